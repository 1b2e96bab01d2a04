"""The smoke run with EviPath in the place of MyGO: the script is the teacher."""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EviPathConfig


def get_config() -> Config:
    base = load_config(str(Path(__file__).with_name("smoke_config.py")))
    method = EviPathConfig(
        teacher="scripted",
        embedder="words",
        learning_rate=2e-3,
        end_learning_rate=2e-4,
        epochs=4,
        warmup_ratio=0.1,
    )
    return dataclasses.replace(base, name="smoke_evipath", method=method)
