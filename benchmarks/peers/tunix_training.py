"""Tunix's PeftTrainer on the conversations of `benchmarks/train_tokens.py`, which starts it by a
Python that has it; trains for as many seconds as each line of its input says and prints JSON.

`--rows` conversations a step, padded to the longest there may be: it compiles for every shape it
meets and packs nothing. Its own loss, the mask that of the trained tokens; all weights of its Qwen2
in float32, AdamW.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np
import optax
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.sft import peft_trainer, utils

MAX_TOKENS = 2048

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", required=True)
parser.add_argument("--rows", type=int, required=True)
parser.add_argument("workload")
arguments = parser.parse_args()

work = np.load(arguments.workload)
ends = np.cumsum(work["lengths"])
tokens, trained = (np.split(work[name], ends[:-1]) for name in ("tokens", "trained"))
fields = json.loads((pathlib.Path(arguments.checkpoint) / "config.json").read_text())
config = qwen2.ModelConfig(
    num_layers=fields["num_hidden_layers"],
    vocab_size=fields["vocab_size"],
    embed_dim=fields["hidden_size"],
    hidden_dim=fields["intermediate_size"],
    num_heads=fields["num_attention_heads"],
    head_dim=fields["hidden_size"] // fields["num_attention_heads"],
    num_kv_heads=fields["num_key_value_heads"],
    rope_theta=1_000_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
)


def batch(start: int) -> dict[str, np.ndarray]:
    shape = (arguments.rows, MAX_TOKENS)
    ids = np.zeros(shape, np.int32)
    filled = np.zeros(shape, bool)
    wanted = np.zeros(shape, bool)
    for row in range(arguments.rows):
        index = (start + row) % len(tokens)
        length = len(tokens[index])
        ids[row, :length] = tokens[index]
        filled[row, :length] = True
        wanted[row, :length] = trained[index]
    return {"ids": ids, "filled": filled, "wanted": wanted}


def model_input(inputs):
    return {
        "input_tokens": inputs["ids"],
        "input_mask": inputs["wanted"],
        "positions": utils.build_positions_from_mask(inputs["filled"]),
        "attention_mask": utils.make_causal_attn_mask(inputs["filled"]),
    }


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5))
settings = peft_trainer.TrainingConfig(eval_every_n_steps=10**9)
trainer = peft_trainer.PeftTrainer(qwen2.Qwen2(config, rngs=nnx.Rngs(0)), optimizer, settings)
trainer = trainer.with_gen_model_input_fn(model_input)
trainer.is_managed_externally = True  # it would close itself after the first stretch
trainer.train([batch(0)])

done = 1


class Turn:
    """The batches of as many seconds, and what they came to."""

    def __init__(self, seconds: float, first_step: int) -> None:
        self._seconds = seconds
        self._first_step = first_step
        self._start_time = time.perf_counter()
        self.tokens = 0
        self.steps = 0

    def batches(self):
        """Yield batches until the time is up."""
        while self.elapsed() < self._seconds:
            inputs = batch((self._first_step + self.steps) * arguments.rows)
            self.tokens += int(inputs["filled"].sum())
            self.steps += 1
            yield inputs

    def elapsed(self) -> float:
        return time.perf_counter() - self._start_time


def train_for(seconds: float, first_step: int) -> dict[str, float]:
    turn = Turn(seconds, first_step)
    if seconds:
        # This returns when the last step is done.
        trainer.train(turn.batches())
    return {"tokens": turn.tokens, "steps": turn.steps, "seconds": turn.elapsed()}


for line in sys.stdin:
    figures = train_for(float(line), first_step=done)
    done += int(figures["steps"])
    print(json.dumps(figures), flush=True)
