"""Train Qwen2.5-7B with MyGO on HotpotQA's distractor setting, on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/hotpotqa_distractor_v5e.py --init CHECKPOINT --task.data-dir DIR

In this setting each question has its own ten passages ("Hotpot-Kimi" in the paper).

Scores in the paper (Mujica-MyGO, table 2): EM 54.07 and F1 68.48 after MyGO, 52.51 and 66.04 after
the warm-up, 15.60 and 32.70 with few-shot prompts.

This configuration was never run. Learning takes about 1.2 hours, estimated from its number of
operations (docs/guides/evaluation.md). BM25 searches the ten passages by words, and the worker sees
five of them. Both choices are ours. All other settings are those of `hotpotqa_v5e.py`.
`two_wiki_text_v5e.py` lists the paper's settings and ours.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.config.tasks import HotpotConfig


def get_config() -> Config:
    task = HotpotConfig(
        data_dir="data/hotpotqa", setting="distractor", max_questions=20_000, top_k=5
    )
    return dataclasses.replace(
        load_config("hotpotqa_v5e"), name="hotpotqa_distractor_v5e", task=task
    )
