"""MuSiQue, out of domain: a policy that was trained on HotpotQA is scored, with Qwen2.5-7B on 32
chips (v5e:4x8).

    python -m mujica_jax.train configs/hotpotqa_v5e.py --init CHECKPOINT --run RUN --task.data-dir HOTPOTQA \\
        --task.index HOTPOTQA_INDEX
    python -m mujica_jax.index build --corpus MUSIQUE/corpus.json --kind scann --out INDEX
    python -m mujica_jax.eval configs/musique_v5e.py --checkpoint RUN --task.data-dir MUSIQUE --task.index INDEX

Mujica-MyGO, table 5: EM 26.11 and F1 35.92; few-shot 5.34 and 17.81 (--init CHECKPOINT
--agent.prompt few_shot). Rows by flags: the baselines of table 3 (--init CHECKPOINT --agents direct
...).

Not run. All questions of MuSiQue's dev file are the test: nothing is chosen on them. The corpus is
the passages of all questions, as in EviPath's appendix E; without an index they are searched by
BM25. The rest is as in `hotpotqa_v5e.py`; `two_wiki_text_v5e.py` lists what is the paper's and what
is ours.
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
