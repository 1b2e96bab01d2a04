"""2WikiMultihopQA over its knowledge graph by GRPO, with Qwen2.5-7B on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_grpo_v5e.py --init CHECKPOINT --task.data-dir DIR

Mujica-MyGO, table 7: F1 86.06 and EM 80.15 after 137,941 trajectories and 135 minutes, where MyGO has 85.70 and 80.30
after 7,343 and 35 minutes.

As many trajectories, in 67 batches of 128 questions with 16 attempts each; batch and rate are ours, for the paper has
none of GRPO. Not run; `tests/test_tpu_compile.py` compiles its training step.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, GrpoConfig


def get_config() -> Config:
    like = load_config("two_wiki_kg_v5e")
    return dataclasses.replace(
        like,
        name="two_wiki_kg_grpo_v5e",
        sampling=dataclasses.replace(like.sampling, questions_per_round=128, shard_questions=16),
        method=GrpoConfig(
            rounds=67, rounds_per_phase=10, group_attempts=16, learning_rate=1e-6, end_learning_rate=1e-6, epochs=1
        ),
    )
