"""Tokens a second of training on conversations of uneven length, beside Tunix's PeftTrainer and a
plain transformers loop.

    python benchmarks/train_tokens.py --checkpoint DIRECTORY [--turns 4] [--seconds 15] [--rows 2] \\
        [--tunix-python PYTHON] [--without transformers] [--dtype bfloat16] [--lora-rank 8]

2,000 conversations, lognormal lengths of median 350 and at most 2,048 tokens, the last third of
each trained, as an agent's are. Counted are the tokens of conversations, never padding. Every
trainer is a process of its own that stays alive; they train in turns, one at a time, because a
machine's speed moves: AdamW, all weights trained and kept in float32, products in float32 or in
`--dtype` (autocast in torch), a first step that compiles and is not counted, and then, a turn,
steps until `--seconds` are over. Ours packs the conversations into rows; Tunix gets as many
conversations a step as we have rows, padded to the longest there may be, since it compiles for one
shape; the transformers loop as many, padded to the longest of the step. All three have the same
slots at most. Tunix needs an environment of its own, named by its Python; it draws its weights,
whose values do not matter here. With `--lora-rank` adapters of all matrices are trained and nothing
else, in the transformers loop by peft, which its Python must have.

Prints one JSON line: tokens a second of each over all turns, ours by theirs, and that of each turn.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CONVERSATIONS, MEDIAN_TOKENS, MAX_TOKENS, SIGMA = 2000, 350, 2048, 0.7
MIN_TOKENS = 6
PEERS = Path(__file__).parent / "peers"


def lengths(seed: int, conversations: int = CONVERSATIONS) -> np.ndarray:
    """Lognormal; what exceeds the longest is drawn again, as an agent's limit on a trajectory would
    have it."""
    draw = np.random.default_rng(seed)
    found = np.empty(0)
    while found.size < conversations:
        more = draw.lognormal(np.log(MEDIAN_TOKENS), SIGMA, conversations)
        found = np.append(found, more[(more >= MIN_TOKENS) & (more <= MAX_TOKENS)])
    return found[:conversations].astype(np.int64)


def workload(
    vocabulary: int, seed: int, conversations: int = CONVERSATIONS
) -> dict[str, np.ndarray]:
    """Token ids of all conversations one after the other, whether each is trained, and the
    lengths."""
    of_each = lengths(seed, conversations)
    trained = np.concatenate([np.arange(length) >= 2 * length // 3 for length in of_each])
    tokens = np.random.default_rng(seed).integers(1, vocabulary, of_each.sum()).astype(np.int32)
    return {"tokens": tokens, "trained": trained, "lengths": of_each}


def ours(
    checkpoint: str,
    given: dict[str, np.ndarray],
    *,
    rows: int,
    remat: str,
    dtype: str,
    lora_rank: int,
) -> Callable[[float], dict[str, float]]:
    """Trains for some seconds in this process, at each call."""
    import jax.numpy as jnp

    from mujica_jax.config.schema import TrainerConfig
    from mujica_jax.learning.batches import Batches
    from mujica_jax.learning.optimizer import schedule
    from mujica_jax.learning.packing import pack
    from mujica_jax.learning.trainer import Trainer
    from mujica_jax.models.weights import load_checkpoint
    from mujica_jax.runtime.host_memory import keep_freed_memory

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

    def step() -> tuple[int, float]:
        nonlocal state
        batch = next(batches)
        state, metrics = trainer.train_step(state, batch, rate)
        return int((batch.segment_ids > 0).sum()), float(metrics["loss"])

    def turn(seconds: float) -> dict[str, float]:
        began, tokens, steps, loss = time.perf_counter(), 0, 0, 0.0
        while time.perf_counter() - began < seconds:
            more, loss = step()
            tokens, steps = tokens + more, steps + 1
        taken = time.perf_counter() - began
        return {
            "tokens": tokens,
            "steps": steps,
            "seconds": taken,
            "loss": loss,
            "packing": packed.efficiency,
        }

    step()
    return turn


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


class TrainerApart:
    """A trainer in a process of its own, which waits between its turns: it reads seconds and prints
    JSON."""

    def __init__(self, command: list[str], errors: Path) -> None:
        self.command, self.errors = command, errors
        with open(errors, "w", encoding="utf-8") as file:
            environment, pipe = os.environ | {"JAX_PLATFORMS": "cpu"}, subprocess.PIPE
            self.process = subprocess.Popen(
                command, env=environment, stdin=pipe, stdout=pipe, stderr=file, text=True
            )
        self.turns: list[dict[str, float]] = []

    def train(self, seconds: float) -> None:
        """A turn. With none, what is left when the first step is done: nothing is counted."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(seconds, file=self.process.stdin, flush=True)
            found = json.loads(next(line for line in self.process.stdout if line.startswith("{")))
        except (BrokenPipeError, StopIteration):
            status, said = self.process.wait(), self.errors.read_text(encoding="utf-8")[-2000:]
            raise SystemExit(
                f"{' '.join(self.command[:2])} ended with status {status}:\n{said}"
            ) from None
        if found["steps"]:
            self.turns.append(found)

    def total(self, name: str) -> float:
        return sum(turn[name] for turn in self.turns)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="a Hugging Face directory")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each trainer a turn")
    parser.add_argument(
        "--rows",
        type=int,
        default=2,
        help="rows of 2,048 tokens a step; conversations a step of the others",
    )
    parser.add_argument(
        "--remat", default="none", choices=["auto", "none", "dots", "full"], help="of ours"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="not of Tunix"
    )
    parser.add_argument("--lora-rank", type=int, default=0, help="0: all weights; not of Tunix")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tunix-python", help="Python of an environment with google-tunix")
    parser.add_argument("--without", nargs="*", default=[], choices=["transformers"])
    # The process that this program starts.
    parser.add_argument("--only-ours", metavar="WORKLOAD", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only_ours:
        settings = {
            "rows": given.rows,
            "remat": given.remat,
            "dtype": given.dtype,
            "lora_rank": given.lora_rank,
        }
        turn = ours(given.checkpoint, dict(np.load(given.only_ours)), **settings)
        for line in sys.stdin:
            print(json.dumps(turn(float(line))), flush=True)
        return 0
    path = Path(given.checkpoint) / "config.json"
    if not path.exists():
        print(f"{path} is missing: give a Hugging Face directory", file=sys.stderr)
        return 2
    made = workload(json.loads(path.read_text())["vocab_size"], given.seed, given.conversations)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        work = str(folder / "workload.npz")
        np.savez(work, allow_pickle=False, **made)
        arguments = ["--checkpoint", given.checkpoint, "--rows", str(given.rows)]
        typed = [*arguments, "--dtype", given.dtype, "--lora-rank", str(given.lora_rank)]
        commands = {
            "ours": [sys.executable, __file__, *typed, "--remat", given.remat, "--only-ours", work]
        }
        if given.tunix_python:
            commands["tunix"] = [
                given.tunix_python,
                str(PEERS / "tunix_training.py"),
                *arguments,
                work,
            ]
        if "transformers" not in given.without:
            commands["transformers"] = [
                sys.executable,
                str(PEERS / "transformers_training.py"),
                *typed,
                work,
            ]
        found: dict[str, TrainerApart] = {}
        for name, command in commands.items():
            found[name] = TrainerApart(command, folder / f"{name}.txt")
            opened.callback(found[name].close)
            found[name].train(0)  # so that it compiles alone
        for _ in range(given.turns):
            for trainer in found.values():
                trainer.train(given.seconds)
    speeds = {
        name: trainer.total("tokens") / trainer.total("seconds") for name, trainer in found.items()
    }
    result: dict[str, Any] = {
        f"{name}_tokens_per_second": round(speed, 1) for name, speed in speeds.items()
    }
    of_turns = {
        name: [turn["tokens"] / turn["seconds"] for turn in one.turns]
        for name, one in found.items()
    }
    for name in speeds.keys() - {"ours"}:
        result[f"by_{name}"] = round(speeds["ours"] / speeds[name], 2)
        ratios = zip(of_turns["ours"], of_turns[name], strict=True)
        result[f"by_{name}_of_turns"] = [round(mine / theirs, 2) for mine, theirs in ratios]
    result |= {f"{name}_steps": int(trainer.total("steps")) for name, trainer in found.items()}
    packing = found["ours"].turns[0]["packing"]
    result |= {"packing": round(packing, 4), "mean_tokens": round(float(made["lengths"].mean()), 1)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
