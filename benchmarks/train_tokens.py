"""Tokens a second of training on conversations of uneven length, beside Tunix's PeftTrainer and a plain transformers
loop.

    python benchmarks/train_tokens.py --checkpoint DIRECTORY [--seconds 60] [--rows 2] [--tunix-python PYTHON] \\
        [--without transformers] [--dtype bfloat16] [--lora-rank 8]

2,000 conversations, lognormal lengths of median 350 and at most 2,048 tokens, the last third of each trained, as an
agent's are. Counted are the tokens of conversations, never padding. Every trainer runs in a process of its own, one
after the other: AdamW, all weights trained and kept in float32, products in float32 or in `--dtype` (autocast in
torch), a first step that compiles and is not counted, and then as many steps as `--seconds` hold. Ours packs the
conversations into rows; Tunix gets as many conversations a step as we have rows, padded to the longest there may be,
since it compiles for one shape; the transformers loop as many, padded to the longest of the step. All three have the
same slots at most. Tunix needs an environment of its own, named by its Python; it draws its weights, whose values do
not matter here. With `--lora-rank` adapters of all matrices are trained and nothing else, in the transformers loop by
peft, which its Python must have.

Prints one JSON line: tokens a second of each, and ours by theirs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CONVERSATIONS, MEDIAN_TOKENS, MAX_TOKENS, SIGMA = 2000, 350, 2048, 0.7
MIN_TOKENS = 6
PEERS = Path(__file__).parent / "peers"


def lengths(seed: int, conversations: int = CONVERSATIONS) -> np.ndarray:
    """Lognormal; what exceeds the longest is drawn again, as an agent's limit on a trajectory would have it."""
    draw = np.random.default_rng(seed)
    found = np.empty(0)
    while found.size < conversations:
        more = draw.lognormal(np.log(MEDIAN_TOKENS), SIGMA, conversations)
        found = np.append(found, more[(more >= MIN_TOKENS) & (more <= MAX_TOKENS)])
    return found[:conversations].astype(np.int64)


def workload(vocabulary: int, seed: int, conversations: int = CONVERSATIONS) -> dict[str, np.ndarray]:
    """Token ids of all conversations one after the other, whether each is trained, and the lengths."""
    of_each = lengths(seed, conversations)
    trained = np.concatenate([np.arange(length) >= 2 * length // 3 for length in of_each])
    tokens = np.random.default_rng(seed).integers(1, vocabulary, of_each.sum()).astype(np.int32)
    return {"tokens": tokens, "trained": trained, "lengths": of_each}


def ours(
    checkpoint: str,
    given: dict[str, np.ndarray],
    *,
    rows: int,
    seconds: float,
    remat: str,
    dtype: str,
    lora_rank: int,
) -> dict[str, float]:
    """Measured in this process."""
    import jax.numpy as jnp

    from mujica_jax.config.schema import TrainerConfig
    from mujica_jax.learning.optimizer import schedule
    from mujica_jax.learning.trainer import Trainer
    from mujica_jax.models.weights import load_checkpoint
    from mujica_jax.runtime.host_memory import keep_freed_memory
    from mujica_jax.trajectories.batches import Batches
    from mujica_jax.trajectories.packing import pack

    keep_freed_memory()
    decoder = load_checkpoint(checkpoint, dtype=jnp.dtype(dtype))
    config = TrainerConfig(
        row_tokens=MAX_TOKENS,
        rows_per_step=rows,
        remat=remat,  # pyright: ignore[reportArgumentType]
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        lora_rank=lora_rank,
    )
    trainer = Trainer(decoder.config, config)
    state, rate = trainer.initial_state(decoder), schedule(peak=1e-5, end_value=1e-5, total_steps=1)
    packed = pack(conversations(given), row_tokens=MAX_TOKENS, seed=0)
    batches = Batches(packed, rows, seed=0)
    state, metrics = trainer.train_step(state, next(batches), rate)
    metrics["loss"].block_until_ready()
    began, tokens, steps = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds:
        batch = next(batches)
        state, metrics = trainer.train_step(state, batch, rate)
        metrics["loss"].block_until_ready()
        tokens, steps = tokens + int((batch.segment_ids > 0).sum()), steps + 1
    return {
        "tokens": tokens,
        "steps": steps,
        "seconds": time.perf_counter() - began,
        "loss": float(metrics["loss"]),
        "packing": packed.efficiency,
    }


def conversations(given: dict[str, np.ndarray]) -> list:
    from mujica_jax.records import Conversation, Turn

    found, start = [], 0
    for length in given["lengths"].tolist():
        ids, trained = (given[name][start : start + length] for name in ("tokens", "trained"))
        cut = int(np.argmax(trained))
        turns = (
            Turn(role="context", token_ids=tuple(ids[:cut].tolist()), text="", trained=False),
            Turn(role="model", token_ids=tuple(ids[cut:].tolist()), text="", trained=True),
        )
        found.append(Conversation(role="single", turns=turns))
        start += length
    return found


def measured_apart(command: list[str]) -> dict[str, float]:
    """What a program prints as its last line."""
    finished = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    if finished.returncode:
        raise SystemExit(f"{' '.join(command[:2])} ended with status {finished.returncode}:\n{finished.stderr[-2000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="a Hugging Face directory")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each trainer, after its first step")
    parser.add_argument(
        "--rows", type=int, default=2, help="rows of 2,048 tokens a step; conversations a step of the others"
    )
    parser.add_argument("--remat", default="none", choices=["auto", "none", "dots", "full"], help="of ours")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="not of Tunix")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: all weights; not of Tunix")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tunix-python", help="Python of an environment with google-tunix")
    parser.add_argument("--without", nargs="*", default=[], choices=["transformers"])
    # The process that this program starts.
    parser.add_argument("--only-ours", metavar="WORKLOAD", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only_ours:
        settings = {"rows": given.rows, "seconds": given.seconds, "remat": given.remat, "dtype": given.dtype}
        settings["lora_rank"] = given.lora_rank
        print(json.dumps(ours(given.checkpoint, dict(np.load(given.only_ours)), **settings)))
        return 0
    path = Path(given.checkpoint) / "config.json"
    if not path.exists():
        print(f"{path} is missing: give a Hugging Face directory", file=sys.stderr)
        return 2
    made = workload(json.loads(path.read_text())["vocab_size"], given.seed, given.conversations)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        work = str(Path(folder) / "workload.npz")
        np.savez(work, **made)
        arguments = ["--checkpoint", given.checkpoint, "--seconds", str(given.seconds), "--rows", str(given.rows)]
        typed = [*arguments, "--dtype", given.dtype, "--lora-rank", str(given.lora_rank)]
        again = [sys.executable, __file__, *typed, "--remat", given.remat, "--only-ours", work]
        found["ours"] = measured_apart(again)
        if given.tunix_python:
            found["tunix"] = measured_apart([given.tunix_python, str(PEERS / "tunix_training.py"), *arguments, work])
        if "transformers" not in given.without:
            program = str(PEERS / "transformers_training.py")
            found["transformers"] = measured_apart([sys.executable, program, *typed, work])
    speeds = {name: of_one["tokens"] / of_one["seconds"] for name, of_one in found.items()}
    result = {f"{name}_tokens_per_second": round(speed, 1) for name, speed in speeds.items()}
    result |= {f"by_{name}": round(speeds["ours"] / speed, 2) for name, speed in speeds.items() if name != "ours"}
    result |= {f"{name}_steps": of_one["steps"] for name, of_one in found.items()}
    result |= {"packing": round(found["ours"]["packing"], 4), "mean_tokens": round(float(made["lengths"].mean()), 1)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
