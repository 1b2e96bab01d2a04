"""MuSiQue over Wikipedia, one agent that decides when to search, with Qwen3-4B on 4 chips
(v5e:2x2).

    python -m mujica_jax.index build --corpus wiki-18.jsonl.gz --kind scann --embedder intfloat/e5-base-v2 --out INDEX
    python -m mujica_jax.eval configs/musique_qwen3_4b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --agents direct rag

Learning When to Search, table 1, share of answers that a judge accepts: 0.12 without search
(direct), 0.19 with one (rag), 0.24 after both stages with 1.25 searches a question; Qwen3-8B 0.14,
0.18 and 0.27 with 2.15. Index, rows by flags and all that is not the task are those of
`nq_qwen3_4b_v5e.py`. Not run.
"""

import dataclasses

from mujica_jax.config.files import load_config, of_kind
from mujica_jax.config.schema import Config, EvalConfig


def get_config() -> Config:
    base = of_kind(load_config("nq_qwen3_4b_v5e"), "task", "musique")
    task = dataclasses.replace(base.task, data_dir="data/musique")
    return dataclasses.replace(
        base, name="musique_qwen3_4b_v5e", task=task, eval=EvalConfig(questions=2_417, split="test")
    )
