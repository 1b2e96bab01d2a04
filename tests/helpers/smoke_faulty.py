"""A whole run in seconds whose retriever fails at half of the questions. Its agent searches in
every episode, whatever the policy writes.
"""

import dataclasses
import sys
from pathlib import Path

from mujica_jax.config.agents import RagConfig
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, FaultConfig

# For processes that were started from elsewhere.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.helpers.faulty_world import FaultyWorldConfig


def get_config() -> Config:
    config = load_config(str(Path(__file__).with_name("smoke_config.py")))
    task = FaultyWorldConfig(
        **dataclasses.asdict(dataclasses.replace(config.task, environment="text", top_k=1))
    )
    return dataclasses.replace(
        config,
        name="smoke_faulty",
        task=task,
        agent=RagConfig(max_turn_tokens=16, max_trajectory_tokens=384, max_observation_tokens=100),
        warmup=dataclasses.replace(config.warmup, steps=0),
        eval=dataclasses.replace(config.eval, control=False),
        faults=FaultConfig(repeats=1),
    )
