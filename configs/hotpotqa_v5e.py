"""HotpotQA over the introductions of all Wikipedia articles (Hotpot in the paper), with Qwen2.5-7B
on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus enwiki-20171001-pages-meta-current-withlinks-abstracts.tar.bz2 \\
        --kind scann --out INDEX
    python -m mujica_jax.train configs/hotpotqa_v5e.py --init CHECKPOINT --task.data-dir DIR --task.index INDEX

Mujica-MyGO, table 2: EM 41.54 and F1 53.79 after MyGO, 40.55 and 52.35 after the warm-up, 15.77 and
27.96 few-shot. Rows by flags: the baselines of table 3 (--agents of mujica_jax.eval).

Not run; learning takes about 1.2 hours by its operations (docs/guides/evaluation.md). All but the task is
as in `two_wiki_text_v5e.py`, which lists what is the paper's and what is ours. Each host searches
the 5.2 million embeddings by ScaNN in its own memory: on the chips they would not fit beside a
training step.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.config.tasks import HotpotConfig


def get_config() -> Config:
    task = HotpotConfig(
        data_dir="data/hotpotqa",
        max_questions=20_000,  # of 90,447 for training
        top_k=5,
        retriever="dense",
        index="data/hotpotqa/index",
    )
    return dataclasses.replace(load_config("two_wiki_text_v5e"), name="hotpotqa_v5e", task=task)
