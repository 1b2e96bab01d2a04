"""TriviaQA over Wikipedia, one agent that decides when to search, with Qwen3-4B on 4 chips
(v5e:2x2).

    python -m mujica_jax.index build --corpus wiki-18.jsonl.gz --kind scann --embedder intfloat/e5-base-v2 --out INDEX
    python -m mujica_jax.eval configs/triviaqa_qwen3_4b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --agents direct rag

Learning When to Search, table 1, share of answers that a judge accepts: 0.48 without search
(direct), 0.73 with one (rag), 0.83 after both stages with 1.03 searches a question; Qwen3-8B 0.61,
0.70 and 0.81 with 1.01. Index, rows by flags and all that is not the task are those of
`nq_qwen3_4b_v5e.py`. Not run.
"""

import dataclasses

from mujica_jax.config.files import load_config, of_kind
from mujica_jax.config.schema import Config, EvalConfig


def get_config() -> Config:
    base = of_kind(load_config("nq_qwen3_4b_v5e"), "task", "triviaqa")
    task = dataclasses.replace(base.task, data_dir="data/triviaqa")
    return dataclasses.replace(
        base,
        name="triviaqa_qwen3_4b_v5e",
        task=task,
        eval=EvalConfig(questions=11_313, split="test"),
    )
