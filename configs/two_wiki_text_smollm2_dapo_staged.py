"""Train SmolLM2-135M with DAPO and staged rewards on 2WikiMultihopQA, on two CPU cores.

    python -m mujica_jax.train configs/two_wiki_text_smollm2_dapo_staged.py --task.data-dir DIR --init smollm2

The agent decides itself whether to search. The warm-up trains on demonstrations that a script plays
with the passages that BM25 finds. The script always searches. docs/lab/claims.md has the scores of
a shorter run.

The settings are small enough for two cores. The paper trains models of 4 to 8 billion parameters
with 500 rounds of 32 questions in two stages, 32 attempts at each question, and a learning rate of
1e-6.
"""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DapoConfig, SingleConfig, StagedRewardConfig


def get_config() -> Config:
    base = load_config(str(Path(__file__).with_name("two_wiki_text_smollm2.py")))
    return dataclasses.replace(
        base,
        name="two_wiki_text_smollm2_dapo_staged",
        task=dataclasses.replace(base.task, triple_demonstrations=0),
        agent=SingleConfig(
            prompt="brief",
            max_searches=4,
            max_turn_tokens=128,
            max_trajectory_tokens=1536,
            max_observation_tokens=256,
        ),
        trainer=dataclasses.replace(
            base.trainer, sequence_length=1536, batch_size=2, accumulation_steps=2
        ),
        sampling=dataclasses.replace(
            base.sampling, questions_per_round=16, questions_per_shard=8, temperature=1.0
        ),
        method=DapoConfig(
            rounds=8,
            rounds_per_evaluation=4,
            group_size=6,
            learning_rate=1e-4,
            end_learning_rate=1e-5,
            epochs=1,
            mini_batch_size=4,
            max_sampled_batches=3,
            # The length of five turns of `max_turn_tokens` tokens.
            overlong_tokens=640,
            # A fifth of `overlong_tokens`, as in DAPO.
            overlong_cache_tokens=128,
        ),
        reward="staged",
        staged=StagedRewardConfig(stage_two_round=5, embedder="minilm"),
    )
