"""2WikiMultihopQA over passages by staged rewards and DAPO, with Qwen3-8B on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_text_dapo_staged_qwen3_8b_v5e.py --init CHECKPOINT \\
        --task.data-dir DIR --task.index INDEX

Learning When to Search, table 1, 2Wiki with Qwen3-8B: a judge accepts 0.28 without search, 0.43 with one, 0.51 trained.

Attempts, batch, rate, KL term and beta are those of the paper's table 5, 500 steps of 32 questions. Ours: conversations
of 4,096 tokens (16,384 there), turns of 512 and observations of 1,500 (8,192 and 4,096), several updates a step, of 32
rows each (one there), DAPO's clip, a stage of 250 steps each, an evaluation every 50 steps (30), and bge over the
task's index where the paper has E5 over Wikipedia, and Qwen3-Embedding for the queries. Not run;
`tests/test_tpu_compile.py` compiles its training step.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DapoConfig, SingleConfig, StagedRewardConfig


def get_config() -> Config:
    like = load_config("two_wiki_text_qwen3_8b_v5e")
    return dataclasses.replace(
        like,
        name="two_wiki_text_dapo_staged_qwen3_8b_v5e",
        agent=SingleConfig(
            prompt="zero_shot",
            max_searches=4,  # and a fifth turn that answers
            max_turn_tokens=8192,
            max_observation_tokens=4096,
            max_trajectory_tokens=2048 + 16384,  # the paper's limits of a prompt and of a response
        ),
        engine=dataclasses.replace(like.engine, cache_gigabytes=2.0),
        trainer=dataclasses.replace(like.trainer, row_tokens=2048 + 16384, rows_per_step=256, accumulation_steps=8),
        warmup=dataclasses.replace(like.warmup, source="scripted", steps=0),
        sampling=dataclasses.replace(like.sampling, questions_per_round=32, shard_questions=4),
        method=DapoConfig(
            rounds=500,
            rounds_per_phase=50,
            group_attempts=32,
            learning_rate=1e-6,
            end_learning_rate=1e-6,
            epochs=1,
            kl_coefficient=1e-4,
        ),
        reward="staged",
        staged=StagedRewardConfig(stage_two_round=251, embedder="BAAI/bge-large-en-v1.5"),
    )
