"""2WikiMultihopQA over passages, with SmolLM2-135M as an agent that decides itself whether to
search: staged rewards and DAPO. docs/lab/claims.md has the scores of a shortened run.

    python -m mujica_jax.train configs/two_wiki_text_smollm2_dapo_staged.py --task.data-dir DIR --init smollm2

The warm-up learns demonstrations that a script plays over what BM25 finds: each of them searches.
The paper's numbers (500 rounds of 32 questions, 32 attempts, learning rate 1e-6, a stage each) are
for models of 4 to 8 billion parameters; these are for two cores.
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
            overlong_tokens=640,  # five turns at their limit
            overlong_cache_tokens=128,  # a fifth of it, as in DAPO
        ),
        reward="staged",
        staged=StagedRewardConfig(stage_two_round=5, embedder="minilm"),
    )
