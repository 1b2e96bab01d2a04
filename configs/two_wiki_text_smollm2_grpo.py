"""Train SmolLM2-135M with GRPO on 2WikiMultihopQA over passages, on two CPU cores.

    python -m mujica_jax.train configs/two_wiki_text_smollm2_grpo.py --task.data-dir DIR --init smollm2

Task, warm-up and adapter settings are those of `two_wiki_text_smollm2.py`. docs/lab/claims.md has
the scores of a shorter run.
"""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, GrpoConfig


def get_config() -> Config:
    base = load_config(str(Path(__file__).with_name("two_wiki_text_smollm2.py")))
    return dataclasses.replace(
        base,
        name="two_wiki_text_smollm2_grpo",
        # An update with all 12 rows at once would take 16 GB.
        trainer=dataclasses.replace(base.trainer, accumulation_steps=4),
        sampling=dataclasses.replace(
            base.sampling, questions_per_round=16, questions_per_shard=8, temperature=1.0
        ),
        method=GrpoConfig(
            rounds=8,
            rounds_per_evaluation=4,
            group_size=6,
            learning_rate=1e-4,
            end_learning_rate=1e-5,
            epochs=1,
            mini_batch_size=12,
        ),
    )
