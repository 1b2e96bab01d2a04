"""Train a new model with GRPO on the tiny world, on two CPU cores.

    python -m mujica_jax.train configs/tiny_world_grpo.py

Model, demonstrations and questions are those of `tiny_world.py`. With `--method.kind dapo` the
method uses DAPO's clipping and dynamic sampling.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, GrpoConfig


def get_config() -> Config:
    base = load_config("tiny_world")
    return dataclasses.replace(
        base,
        name="tiny_world_grpo",
        sampling=dataclasses.replace(
            base.sampling, questions_per_round=50, questions_per_shard=50, temperature=1.0
        ),
        method=GrpoConfig(
            rounds=8,
            rounds_per_evaluation=4,
            group_size=8,
            learning_rate=0.00025,
            end_learning_rate=2.5e-05,
            epochs=1,
            mini_batch_size=32,
        ),
    )
