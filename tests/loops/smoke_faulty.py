"""A whole run in seconds whose retriever fails at a quarter of the questions."""

import dataclasses
import sys
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, FaultConfig

sys.path.append(str(Path(__file__).parent))  # for processes that were started from elsewhere

from faulty_world import FaultyWorldConfig


def get_config() -> Config:
    config = load_config(str(Path(__file__).with_name("smoke_config.py")))
    task = FaultyWorldConfig(**dataclasses.asdict(config.task))
    return dataclasses.replace(config, name="smoke_faulty", task=task, faults=FaultConfig(repeats=1))
