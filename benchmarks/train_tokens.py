"""Tokens a second of training: beside Tunix's PeftTrainer and a plain transformers loop, or of one
step beside the fastest matrix product of this machine. Each prints one JSON line.

    python benchmarks/train_tokens.py peers --checkpoint DIRECTORY [--turns 4] [--seconds 15] [--rows 2] \\
        [--tunix-python PYTHON] [--without transformers] [--dtype bfloat16] [--lora-rank 8]
    python benchmarks/train_tokens.py step --checkpoint DIRECTORY [--rows 4] [--sequence-length 512] \\
        [--dtype float32] [--attention auto] [--remat auto] [--lora-rank 0] [--layers N]

`peers`: 2,000 conversations, lognormal lengths of median 350 and at most 2,048 tokens, the last
third of each trained, as an agent's are. Counted are the tokens of conversations, never padding.
Every trainer is a process of its own that stays alive; they train in turns, one at a time, because
a machine's speed moves: AdamW, all weights trained and kept in float32, products in float32 or in
`--dtype` (autocast in torch), a first step that compiles and is not counted, and then, a turn,
steps until `--seconds` are over. Ours packs the conversations into rows; Tunix gets as many
conversations a step as we have rows, padded to the longest there may be, since it compiles for one
shape; the transformers loop as many, padded to the longest of the step. All three have the same
slots at most. Tunix needs an environment of its own, named by its Python; it draws its weights,
whose values do not matter here. With `--lora-rank` adapters of all matrices are trained and nothing
else, in the transformers loop by peft, which its Python must have. The line has the tokens a second
of each over all turns, ours by theirs, and that of each turn.

`step`: the same batch again and again. DIRECTORY needs a Hugging Face config.json alone: the
weights are drawn. The rows are packed from conversations of uneven length of which a third is
trained. The floating-point operations of a step are counted by the formula of
`learning/throughput.py`, so the share of the matrix product falls with padding, with attention
across conversations, and with everything that is no matrix product.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mujica_jax.errors import UserError

if TYPE_CHECKING:
    from mujica_jax.learning.packing import Batch
    from mujica_jax.learning.trainer import Trainer, TrainState
    from mujica_jax.models.families import DecoderConfig
    from mujica_jax.records import Conversation

CONVERSATIONS = 2000
MEDIAN_TOKENS = 350
MAX_TOKENS = 2048
SIGMA = 0.7
MIN_TOKENS = 6
PEERS = Path(__file__).parent / "peers"


def lengths(seed: int, conversations: int = CONVERSATIONS) -> np.ndarray:
    """Return lognormal lengths.

    A length that exceeds the longest is drawn again, as an agent's limit on a trajectory would have
    it.
    """
    draw = np.random.default_rng(seed)
    accepted = np.empty(0)
    while accepted.size < conversations:
        drawn = draw.lognormal(np.log(MEDIAN_TOKENS), SIGMA, conversations)
        accepted = np.append(accepted, drawn[(drawn >= MIN_TOKENS) & (drawn <= MAX_TOKENS)])
    return accepted[:conversations].astype(np.int64)


def workload(
    vocabulary: int, seed: int, conversations: int = CONVERSATIONS
) -> dict[str, np.ndarray]:
    """Return token ids of all conversations in a row, whether each is trained, and lengths."""
    token_counts = lengths(seed, conversations)
    trained = np.concatenate([np.arange(length) >= 2 * length // 3 for length in token_counts])
    tokens = np.random.default_rng(seed).integers(1, vocabulary, token_counts.sum())
    return {"tokens": tokens.astype(np.int32), "trained": trained, "lengths": token_counts}


def conversations(work: dict[str, np.ndarray]) -> "list[Conversation]":
    """Return the conversations of a workload."""
    drawn = []
    start = 0
    for length in work["lengths"].tolist():
        token_ids = work["tokens"][start : start + length].tolist()
        trained = work["trained"][start : start + length]
        drawn.append(conversation(token_ids, context_tokens=int(np.argmax(trained))))
        start += length
    return drawn


def uneven_conversations(
    model: "DecoderConfig", tokens: int, max_tokens: int
) -> "list[Conversation]":
    """Draw conversations until they have `tokens` tokens.

    Their lengths lie between a quarter of the longest and all of it; the last third is trained.
    """
    draw = np.random.default_rng(0)
    drawn = []
    drawn_tokens = 0
    while drawn_tokens < tokens:
        length = int(draw.integers(max(3, max_tokens // 4), max_tokens + 1))
        token_ids = draw.integers(0, model.vocab_size, length).tolist()
        drawn.append(conversation(token_ids, context_tokens=2 * length // 3))
        drawn_tokens += length
    return drawn


def conversation(token_ids: list[int], context_tokens: int) -> "Conversation":
    """Return a conversation of a context and of a model's turn, which is trained."""
    from mujica_jax.records import Conversation, Turn

    context = tuple(token_ids[:context_tokens])
    reply = tuple(token_ids[context_tokens:])
    turns = (
        Turn(role="context", token_ids=context, text="", trained=False),
        Turn(role="model", token_ids=reply, text="", trained=True),
    )
    return Conversation(role="single", turns=turns)


class Training:
    """Steps of our trainer, one after the other."""

    def __init__(self, trainer: "Trainer", state: "TrainState") -> None:
        from mujica_jax.learning.optimizer import schedule

        self.state = state
        self._trainer = trainer
        self._rate = schedule(peak=1e-5, end_value=1e-5, total_steps=1)

    def step(self, batch: "Batch") -> float:
        """Train on a batch, and return the loss."""
        self.state, metrics = self._trainer.train_step(self.state, batch, self._rate)
        return float(metrics["loss"])


class TrainerApart:
    """A trainer in a process of its own, which waits between its turns.

    It reads seconds and prints JSON.
    """

    def __init__(self, command: list[str], errors: Path) -> None:
        self.command = command
        self.errors = errors
        self.turns: list[dict[str, float]] = []
        with open(errors, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def train(self, seconds: float) -> None:
        """Take a turn. With no seconds it only waits for the first step, and nothing is counted."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(seconds, file=self.process.stdin, flush=True)
            turn = json.loads(next(line for line in self.process.stdout if line.startswith("{")))
        except (BrokenPipeError, StopIteration):
            status = self.process.wait()
            messages = self.errors.read_text(encoding="utf-8")[-2000:]
            raise SystemExit(
                f"{' '.join(self.command[:2])} ended with status {status}:\n{messages}"
            ) from None
        if turn["steps"]:
            self.turns.append(turn)

    def total(self, name: str) -> float:
        return sum(turn[name] for turn in self.turns)

    def tokens_per_second(self) -> float:
        return self.total("tokens") / self.total("seconds")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare_with_peers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all trainers train in turns, and return their tokens a second."""
    config_file = Path(arguments.checkpoint) / "config.json"
    if not config_file.exists():
        raise UserError(f"{config_file} is missing: give a Hugging Face directory")
    vocabulary = json.loads(config_file.read_text())["vocab_size"]
    work = workload(vocabulary, arguments.seed, arguments.conversations)

    trainers: dict[str, TrainerApart] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work_file = folder / "workload.npz"
        np.savez(work_file, allow_pickle=False, **work)
        for name, command in trainer_commands(arguments, work_file).items():
            trainers[name] = TrainerApart(command, folder / f"{name}.txt")
            stack.callback(trainers[name].close)
            # Each compiles alone.
            trainers[name].train(0)
        for _ in range(arguments.turns):
            for trainer in trainers.values():
                trainer.train(arguments.seconds)

    result: dict[str, Any] = {}
    for name, trainer in trainers.items():
        result[f"{name}_tokens_per_second"] = round(trainer.tokens_per_second(), 1)
    own_trainer = trainers["ours"]
    for name, trainer in trainers.items():
        if trainer is own_trainer:
            continue
        ratio = own_trainer.tokens_per_second() / trainer.tokens_per_second()
        result[f"by_{name}"] = round(ratio, 2)
        result[f"by_{name}_of_turns"] = [
            round(mine["tokens"] / mine["seconds"] * theirs["seconds"] / theirs["tokens"], 2)
            for mine, theirs in zip(own_trainer.turns, trainer.turns, strict=True)
        ]
    for name, trainer in trainers.items():
        result[f"{name}_steps"] = int(trainer.total("steps"))
    result["packing"] = round(own_trainer.turns[0]["packing"], 4)
    result["mean_tokens"] = round(float(work["lengths"].mean()), 1)
    return result


def trainer_commands(arguments: argparse.Namespace, work_file: Path) -> dict[str, list[str]]:
    """Return the command of each trainer that takes part."""
    shared = ["--checkpoint", arguments.checkpoint, "--rows", str(arguments.rows)]
    typed = [*shared, "--dtype", arguments.dtype, "--lora-rank", str(arguments.lora_rank)]
    work = str(work_file)
    ours = [sys.executable, __file__, "ours", *typed, "--remat", arguments.remat, work]
    commands = {"ours": ours}
    if arguments.tunix_python:
        program = str(PEERS / "tunix_training.py")
        commands["tunix"] = [arguments.tunix_python, program, *shared, work]
    if "transformers" not in arguments.without:
        program = str(PEERS / "transformers_training.py")
        commands["transformers"] = [sys.executable, program, *typed, work]
    return commands


def train_in_turns(arguments: argparse.Namespace) -> None:
    """Train for as many seconds as each line of the input says: the process that `peers` starts."""
    import jax.numpy as jnp

    from mujica_jax.config.schema import TrainerConfig
    from mujica_jax.learning.batches import Batches
    from mujica_jax.learning.packing import pack
    from mujica_jax.learning.trainer import Trainer
    from mujica_jax.models.weights import load_checkpoint
    from mujica_jax.runtime.host_memory import keep_freed_memory

    keep_freed_memory()
    decoder = load_checkpoint(arguments.checkpoint, dtype=jnp.dtype(arguments.dtype))
    config = TrainerConfig(
        sequence_length=MAX_TOKENS,
        batch_size=arguments.rows,
        remat=arguments.remat,
        dtype=arguments.dtype,
        lora_rank=arguments.lora_rank,
    )
    trainer = Trainer(decoder.config, config)
    training = Training(trainer, trainer.initial_state(decoder))
    work = dict(np.load(arguments.workload))
    packed = pack(conversations(work), sequence_length=MAX_TOKENS, seed=0)
    batches = Batches(packed, arguments.rows, seed=0)

    # The first call compiles.
    training.step(next(batches))
    for line in sys.stdin:
        tokens = 0
        steps = 0
        loss = 0.0
        start_time = time.perf_counter()
        while time.perf_counter() - start_time < float(line):
            batch = next(batches)
            loss = training.step(batch)
            tokens += int((batch.segment_ids > 0).sum())
            steps += 1
        turn = {
            "tokens": tokens,
            "steps": steps,
            "seconds": time.perf_counter() - start_time,
            "loss": loss,
            "packing": packed.efficiency,
        }
        print(json.dumps(turn), flush=True)


def measure_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the speed of one training step on drawn weights."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from mujica_jax.config.schema import TrainerConfig
    from mujica_jax.learning.packing import pack
    from mujica_jax.learning.throughput import attended_pairs, training_flops
    from mujica_jax.learning.trainer import Trainer
    from mujica_jax.models.decoder import Decoder
    from mujica_jax.models.weights import load_config
    from mujica_jax.runtime.chips import measured_flops_per_second
    from mujica_jax.runtime.host_memory import keep_freed_memory

    keep_freed_memory()
    model = load_config(arguments.checkpoint)
    if arguments.layers:
        model = dataclasses.replace(model, num_layers=arguments.layers)
    config = TrainerConfig(
        sequence_length=arguments.sequence_length,
        batch_size=arguments.rows,
        dtype=arguments.dtype,
        attention=arguments.attention,
        remat=arguments.remat,
        lora_rank=arguments.lora_rank,
    )
    trainer = Trainer(model, config)
    dtype = jnp.dtype(arguments.dtype)
    decoder = nnx.jit(lambda: Decoder(model, rngs=nnx.Rngs(0), dtype=dtype))()
    training = Training(trainer, trainer.initial_state(decoder))

    slots = arguments.rows * arguments.sequence_length
    drawn = uneven_conversations(model, tokens=4 * slots, max_tokens=arguments.sequence_length)
    rows = pack(drawn, sequence_length=arguments.sequence_length, seed=0)
    row_numbers = np.arange(arguments.rows)
    batch = rows.batch(row_numbers)

    # The first call compiles.
    training.step(batch)
    step_seconds = []
    for _ in range(arguments.repeats):
        start_time = time.perf_counter()
        training.step(batch)
        step_seconds.append(time.perf_counter() - start_time)
    seconds = statistics.median(step_seconds)

    peak = measured_flops_per_second(jax.default_backend(), arguments.dtype)
    operations = training_flops(
        model,
        slots=slots,
        trained_tokens=int(rows.loss_mask[row_numbers].sum()),
        pairs=attended_pairs(rows.segment_ids[row_numbers]),
        lora_rank=arguments.lora_rank,
    )
    tokens = int(np.sum(rows.segment_ids[row_numbers] > 0))
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(training.state.params)),
        "rows": arguments.rows,
        "sequence_length": arguments.sequence_length,
        "dtype": arguments.dtype,
        "tokens": tokens,
        "share_of_slots": round(tokens / slots, 3),
        "gflop": round(operations / 1e9, 1),
        "matmul_gflops": round(peak / 1e9, 1),
        "milliseconds": round(seconds * 1e3, 1),
        "tokens_per_second": round(tokens / seconds, 1),
        "share_of_matmul": round(operations / seconds / peak, 3),
        "device": jax.devices()[0].device_kind,
    }


def command_line() -> argparse.Namespace:
    """Return the arguments: `command`, and those of that command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    peers = commands.add_parser("peers", help="beside Tunix and transformers")
    step = commands.add_parser("step", help="one step beside a matrix product")
    # `peers` starts this process.
    ours = commands.add_parser("ours")

    for command_parser, rows, remat in ((peers, 2, "none"), (step, 4, "auto"), (ours, 2, "none")):
        add = command_parser.add_argument
        add("--checkpoint", required=True, help="a Hugging Face directory")
        add("--rows", type=int, default=rows, help="of a step; peers: conversations of the others")
        add("--remat", default=remat, choices=["auto", "none", "dots", "full"], help="of ours")
        add("--dtype", default="float32", choices=["float32", "bfloat16"], help="not of Tunix")
        add("--lora-rank", type=int, default=0, help="0: all weights; not of Tunix")

    peers.add_argument("--turns", type=int, default=4)
    peers.add_argument("--seconds", type=float, default=15.0, help="of each trainer a turn")
    peers.add_argument("--conversations", type=int, default=CONVERSATIONS)
    peers.add_argument("--seed", type=int, default=0)
    peers.add_argument("--tunix-python", help="Python of an environment with google-tunix")
    peers.add_argument("--without", nargs="*", default=[], choices=["transformers"])
    ours.add_argument("workload")
    step.add_argument("--sequence-length", type=int, default=512)
    step.add_argument("--attention", default="auto", choices=["auto", "xla", "splash", "cudnn"])
    step.add_argument("--layers", type=int, help="as if the model had so many layers")
    step.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def main() -> int:
    """Return the exit status: 2 where the directory or a flag is wrong."""
    arguments = command_line()
    if arguments.command == "ours":
        train_in_turns(arguments)
        return 0
    try:
        measure = compare_with_peers if arguments.command == "peers" else measure_step
        print(json.dumps(measure(arguments)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
