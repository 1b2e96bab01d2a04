"""Evaluate Qwen2.5-7B on AmbigQA over Wikipedia, on 4 chips (v5e:2x2).

    python -m mujica_jax.index build --corpus wiki-18.jsonl.gz --kind scann --embedder intfloat/e5-base-v2 --out INDEX
    python -m mujica_jax.eval configs/ambigqa_v5e.py --init CHECKPOINT --task.data-dir DIR --task.index INDEX \\
        --agents direct chain_of_thought rag iter_retgen ircot flare search_o1

A single agent searches in the format of Search-R1.

EM and F1 in the paper (DecEx-RAG, table 1), by the name of the agent:

    Search-R1 (its own checkpoint)    49.2  60.4
    direct                            11.6  22.4
    chain_of_thought                  27.6  38.1
    rag                               44.3  56.7
    iter_retgen                       47.0  58.8
    ircot                             24.5  40.6
    flare                             40.6  50.1
    search_o1                         42.5  53.4

As in the paper, a search returns three passages, and there are at most four searches. For the other
data sets of the paper, use `nq_qwen3_4b_v5e.py` with --task.top-k 3.

This configuration was never run. The index, and all settings except the task, the model and the
style, are those of `nq_qwen3_4b_v5e.py`.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.kinds import of_kind
from mujica_jax.config.schema import Config, EvalConfig


def get_config() -> Config:
    base = of_kind(load_config("nq_qwen3_4b_v5e"), "task", "ambigqa")
    task = dataclasses.replace(base.task, data_dir="data/ambigqa", top_k=3)
    return dataclasses.replace(
        base,
        name="ambigqa_v5e",
        task=task,
        model=load_config("two_wiki_text_v5e").model,
        agent=dataclasses.replace(base.agent, style="search_r1"),
        eval=EvalConfig(questions=2_002, split="test"),
    )
