"""Tokens a second of the training step, and its share of the fastest matrix product this machine
does; one JSON line.

    python benchmarks/train_step.py DIRECTORY [--rows 4] [--row-tokens 512] [--dtype float32] [--attention auto] \\
        [--remat auto] [--lora-rank 0]

DIRECTORY holds a Hugging Face config.json; the weights are drawn, their values do not matter here.
The rows are packed from conversations of uneven length of which a third is trained, as an agent's
are. The floating-point operations of a step are counted by the formula of `learning/throughput.py`,
so the share falls with padding, with attention across conversations, and with everything that is no
matrix product.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mujica_jax.config.schema import TrainerConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import pack
from mujica_jax.learning.throughput import attended_pairs, training_flops
from mujica_jax.learning.trainer import Trainer
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.weights import load_config
from mujica_jax.records import Conversation, Turn
from mujica_jax.runtime.chips import measured_flops_per_second
from mujica_jax.runtime.host_memory import keep_freed_memory


def median_seconds(call, repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def conversations(model: DecoderConfig, tokens: int, longest: int) -> list[Conversation]:
    """Context and model turns in turn, two to one, until `tokens` are there; lengths between a
    quarter of the longest and all of it.
    """
    draw = np.random.default_rng(0)
    found, total = [], 0
    while total < tokens:
        length = int(draw.integers(max(3, longest // 4), longest + 1))
        ids = tuple(draw.integers(0, model.vocab_size, length).tolist())
        cut = 2 * length // 3
        turns = (
            Turn(role="context", token_ids=ids[:cut], text="", trained=False),
            Turn(role="model", token_ids=ids[cut:], text="", trained=True),
        )
        found.append(Conversation(role="single", turns=turns))
        total += length
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--attention", default="auto", choices=["auto", "xla", "splash", "cudnn"])
    parser.add_argument("--remat", default="auto", choices=["auto", "none", "dots", "full"])
    parser.add_argument("--lora-rank", type=int, default=0, help="0: every weight is trained")
    parser.add_argument("--layers", type=int, help="as if the model had so many layers")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    keep_freed_memory()
    try:
        model = load_config(given.directory)
        if given.layers:
            model = dataclasses.replace(model, num_layers=given.layers)
        config = TrainerConfig(
            row_tokens=given.row_tokens,
            rows_per_step=given.rows,
            dtype=given.dtype,
            attention=given.attention,
            remat=given.remat,
            lora_rank=given.lora_rank,
        )
        trainer = Trainer(model, config)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    state = trainer.initial_state(
        nnx.jit(lambda: Decoder(model, rngs=nnx.Rngs(0), dtype=jnp.dtype(given.dtype)))()
    )
    some = conversations(model, 4 * given.rows * given.row_tokens, given.row_tokens)
    rows = pack(some, row_tokens=given.row_tokens, seed=0)
    chosen = np.arange(given.rows)
    batch, rate = rows.batch(chosen), schedule(peak=1e-5, end_value=1e-5, total_steps=1)

    def step() -> None:
        nonlocal state
        state, metrics = trainer.train_step(state, batch, rate)
        metrics["loss"].block_until_ready()

    seconds = median_seconds(step, given.repeats)
    peak = measured_flops_per_second(jax.default_backend(), given.dtype)
    operations = training_flops(
        model,
        slots=chosen.size * given.row_tokens,
        trained_tokens=int(rows.loss_mask[chosen].sum()),
        pairs=attended_pairs(rows.segment_ids[chosen]),
        lora_rank=given.lora_rank,
    )
    tokens = int(np.sum(rows.segment_ids[chosen] > 0))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    result = {
        "parameters": count,
        "rows": given.rows,
        "row_tokens": given.row_tokens,
        "dtype": given.dtype,
        "tokens": tokens,
        "share_of_slots": round(tokens / chosen.size / given.row_tokens, 3),
        "gflop": round(operations / 1e9, 1),
        "matmul_gflops": round(peak / 1e9, 1),
        "milliseconds": round(seconds * 1e3, 1),
        "tokens_per_second": round(tokens / seconds, 1),
        "share_of_matmul": round(operations / seconds / peak, 3),
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
