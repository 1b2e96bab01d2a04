"""The tiny world with EviPath: a script that knows the gold chain is the teacher.

    python -m mujica_jax.train configs/tiny_world_evipath.py

A short warm-up on the demonstrations stands in for a language model that knows the format; then trajectories for two
thousand questions are written from their evidence and learnt. With `--method.mode deductive --method.teacher policy`
the warmed-up policy writes them itself, told nothing, and what it gets right is learnt.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EviPathConfig


def get_config() -> Config:
    base = load_config("tiny_world")
    return dataclasses.replace(
        base,
        name="tiny_world_evipath",
        warmup=dataclasses.replace(base.warmup, steps=200),
        sampling=dataclasses.replace(base.sampling, questions_per_round=2_000),
        method=EviPathConfig(
            teacher="scripted",
            embedder="words",
            learning_rate=1e-3,
            end_learning_rate=1e-4,
            epochs=2,
        ),
    )
