"""Train Qwen2.5-7B with MyGO on HotpotQA, on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus enwiki-20171001-pages-meta-current-withlinks-abstracts.tar.bz2 \\
        --kind scann --out INDEX
    python -m mujica_jax.train configs/hotpotqa_v5e.py --init CHECKPOINT --task.data-dir DIR --task.index INDEX

The agent searches the introductions of all Wikipedia articles ("Hotpot" in the paper).

Scores in the paper (Mujica-MyGO, table 2): EM 41.54 and F1 53.79 after MyGO, 40.55 and 52.35 after
the warm-up, 15.77 and 27.96 with few-shot prompts. The baselines of table 3 are `--agents` of
mujica_jax.eval.

This configuration was never run. Learning takes about 1.2 hours, estimated from its number of
operations (docs/guides/evaluation.md). All settings except the task are those of
`two_wiki_text_v5e.py`, which lists the paper's settings and ours. Each host searches the 5.2
million embeddings with ScaNN in its own memory. On the chips there would be no room for them next
to a training step.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.config.tasks import HotpotConfig


def get_config() -> Config:
    task = HotpotConfig(
        data_dir="data/hotpotqa",
        # The training set has 90,447 questions.
        max_questions=20_000,
        top_k=5,
        retriever="dense",
        index="data/hotpotqa/index",
    )
    return dataclasses.replace(load_config("two_wiki_text_v5e"), name="hotpotqa_v5e", task=task)
