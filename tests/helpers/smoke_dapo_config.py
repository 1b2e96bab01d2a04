"""A whole run of DAPO with staged rewards in seconds, too small to learn anything."""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DapoConfig, SingleConfig, StagedRewardConfig


def get_config() -> Config:
    config = load_config(str(Path(__file__).with_name("smoke_config.py")))
    return dataclasses.replace(
        config,
        name="smoke_dapo",
        task=dataclasses.replace(config.task, environment="text", top_k=1, common_knowledge=0.5),
        agent=SingleConfig(
            prompt="brief",
            max_searches=4,
            max_turn_tokens=96,
            max_trajectory_tokens=640,
            max_observation_tokens=112,
        ),
        trainer=dataclasses.replace(config.trainer, sequence_length=640, batch_size=2),
        sampling=dataclasses.replace(config.sampling, questions_per_round=4, questions_per_shard=2),
        method=DapoConfig(
            rounds=3,
            rounds_per_evaluation=2,
            group_size=4,
            learning_rate=2e-3,
            end_learning_rate=2e-4,
            epochs=2,
            max_sampled_batches=2,
        ),
        reward="staged",
        staged=StagedRewardConfig(stage_two_round=2),
        eval=dataclasses.replace(config.eval, questions=8),
    )
