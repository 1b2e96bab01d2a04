"""Train a new model with DecEx-RAG on the tiny world, on two CPU cores.

    python -m mujica_jax.train configs/tiny_world_decex.py

The agent learns whether to recall a fact or to search for it. About half of the questions are about
common knowledge, whose facts the pre-training text states. All other facts are only in the
passages. The names in a question do not show which case it is. The agent has to learn this from the
rewards of the search trees.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DecexConfig, DecexTreeConfig


def get_config() -> Config:
    base = load_config("tiny_world")
    return dataclasses.replace(
        base,
        name="tiny_world_decex",
        task=dataclasses.replace(
            base.task,
            environment="text",
            top_k=1,
            train_questions=1_000,
            dev_questions=200,
            test_questions=200,
            common_knowledge=0.5,
        ),
        agent=DecexConfig(
            max_turn_tokens=288,
            max_trajectory_tokens=640,
            max_observation_tokens=96,
            prompt="brief",
        ),
        engine=dataclasses.replace(base.engine, max_num_seqs=128),
        trainer=dataclasses.replace(base.trainer, sequence_length=1_280, batch_size=2),
        pretraining=dataclasses.replace(base.pretraining, row_parts=8),
        warmup=dataclasses.replace(base.warmup, miss_rate=0.0),
        sampling=dataclasses.replace(
            base.sampling, questions_per_round=200, questions_per_shard=50
        ),
        method=DecexTreeConfig(
            learning_rate=0.0002, end_learning_rate=2e-05, epochs=2, dpo_learning_rate=0.0001
        ),
        eval=dataclasses.replace(base.eval, questions=200),
    )
