"""Bamboogle over Wikipedia, one agent that decides when to search, with Qwen3-4B on 4 chips
(v5e:2x2).

    python -m mujica_jax.index build --corpus wiki-18.jsonl.gz --kind scann --embedder intfloat/e5-base-v2 --out INDEX
    python -m mujica_jax.eval configs/bamboogle_qwen3_4b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --agents direct rag

Learning When to Search, table 1, share of answers that a judge accepts: 0.37 without search
(direct), 0.50 with one (rag), 0.61 after both stages with 1.44 searches a question; Qwen3-8B 0.48,
0.54 and 0.56 with 1.22. Index, rows by flags and all that is not the task are those of
`nq_qwen3_4b_v5e.py`. Not run.
"""

import dataclasses

from mujica_jax.config.files import load_config, of_kind
from mujica_jax.config.schema import Config, EvalConfig


def get_config() -> Config:
    base = of_kind(load_config("nq_qwen3_4b_v5e"), "task", "bamboogle")
    task = dataclasses.replace(base.task, data_dir="data/bamboogle")
    return dataclasses.replace(
        base, name="bamboogle_qwen3_4b_v5e", task=task, eval=EvalConfig(questions=125, split="test")
    )
