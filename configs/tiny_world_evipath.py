"""Train a new model with EviPath on the tiny world, as its own teacher, on two CPU cores.

    python -m mujica_jax.train configs/tiny_world_evipath.py

The paper uses a language model that follows prompts. Here the warm-up teaches the model the agent's
prompts (with EviPath's tags) and the teacher's prompts. The warmed-up policy is then the teacher.
It reads the answer and the evidence of each question and writes trajectories. Training uses those
whose answer is right.

Variants:

- `--method.mode deductive`: the same teacher reads neither answer nor evidence.
  `--method.trajectories N` gives both modes the same number of right trajectories, as in table 4 of
  the paper.
- `--method.teacher scripted`: the teacher is a script, which plays the demonstrations of the
  warm-up for all questions, without mistakes.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EviPathConfig, MujicaConfig


def get_config() -> Config:
    base = load_config("tiny_world")
    assert isinstance(base.agent, MujicaConfig), "EviPath needs an agent with planner and workers"
    return dataclasses.replace(
        base,
        name="tiny_world_evipath",
        # A conversation with the teacher also contains the answer and up to four triples.
        agent=dataclasses.replace(base.agent, protocol="evipath", max_trajectory_tokens=400),
        trainer=dataclasses.replace(base.trainer, sequence_length=320, batch_size=7),
        warmup=dataclasses.replace(base.warmup, steps=300),
        sampling=dataclasses.replace(base.sampling, questions_per_round=2_000),
        method=EviPathConfig(
            teacher="policy",
            embedder="words",
            learning_rate=1e-3,
            end_learning_rate=1e-4,
            epochs=2,
        ),
    )
