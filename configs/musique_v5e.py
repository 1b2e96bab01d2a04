"""Evaluate Qwen2.5-7B, trained on HotpotQA, out of domain on MuSiQue, on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/hotpotqa_v5e.py --init CHECKPOINT --run RUN --task.data-dir HOTPOTQA \\
        --task.index HOTPOTQA_INDEX
    python -m mujica_jax.index build --corpus MUSIQUE/corpus.json --kind scann --out INDEX
    python -m mujica_jax.eval configs/musique_v5e.py --checkpoint RUN --task.data-dir MUSIQUE --task.index INDEX

Scores in the paper (Mujica-MyGO, table 5): EM 26.11 and F1 35.92, and 5.34 and 17.81 with few-shot
prompts (--init CHECKPOINT --agent.prompt few_shot). The baselines of table 3 have the flags --init
CHECKPOINT --agents direct ...

This configuration was never run. All questions of MuSiQue's dev file are test questions, because
nothing is chosen on them. The corpus consists of the passages of all questions, as in appendix E of
EviPath. Without an index, BM25 searches them. All other settings are those of `hotpotqa_v5e.py`.
`two_wiki_text_v5e.py` lists the paper's settings and ours.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EvalConfig
from mujica_jax.config.tasks import MusiqueConfig


def get_config() -> Config:
    task = MusiqueConfig(
        data_dir="data/musique",
        dev_percent=0,
        top_k=5,
        retriever="dense",
        index="data/musique/index",
    )
    return dataclasses.replace(
        load_config("hotpotqa_v5e"),
        name="musique_v5e",
        task=task,
        eval=EvalConfig(questions=2_417, split="test"),
    )
