"""PopQA over Wikipedia, one agent that decides when to search, with Qwen3-4B on 4 chips (v5e:2x2).

    python -m mujica_jax.index build --corpus wiki-18.jsonl.gz --kind scann --embedder intfloat/e5-base-v2 --out INDEX
    python -m mujica_jax.eval configs/popqa_qwen3_4b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --agents direct rag

Learning When to Search, table 1, share of answers that a judge accepts: 0.20 without search
(direct), 0.51 with one (rag), 0.54 after both stages with 1.06 searches a question; Qwen3-8B 0.25,
0.52 and 0.53 with 1.01. Index, rows by flags and all that is not the task are those of
`nq_qwen3_4b_v5e.py`. Not run.
"""

import dataclasses

from mujica_jax.config.files import load_config, of_kind
from mujica_jax.config.schema import Config, EvalConfig


def get_config() -> Config:
    base = of_kind(load_config("nq_qwen3_4b_v5e"), "task", "popqa")
    task = dataclasses.replace(base.task, data_dir="data/popqa")
    return dataclasses.replace(
        base, name="popqa_qwen3_4b_v5e", task=task, eval=EvalConfig(questions=14_267, split="test")
    )
