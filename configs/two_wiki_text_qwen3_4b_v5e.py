"""Evaluate Qwen3-4B on 2WikiMultihopQA over Wikipedia, on 4 chips (v5e:2x2).

    python -m mujica_jax.index build --corpus wiki-18.jsonl.gz --kind scann --embedder intfloat/e5-base-v2 --out INDEX
    python -m mujica_jax.eval configs/two_wiki_text_qwen3_4b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --agents direct rag

A single agent decides when to search.

Scores in the paper (Learning When to Search, table 1), as the share of answers that a judge
accepts:

- Qwen3-4B: 0.23 without a search (direct), 0.41 with one search (rag), and 0.61 after both stages
  of training, with 1.33 searches for each question;
- Qwen3-8B: 0.28, 0.43, and 0.51 with 1.41 searches.

This configuration was never run. The index, the flags for other rows, and all settings except the
task are those of `nq_qwen3_4b_v5e.py`. The test questions are half of the dev file. The paper
trains on other questions of the data set.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EvalConfig, TwoWikiConfig


def get_config() -> Config:
    base = load_config("nq_qwen3_4b_v5e")
    task = TwoWikiConfig(
        environment="text",
        data_dir="data/2wikimultihopqa",
        # 99 is the largest permitted value. It applies to files that are neither train* nor dev*.
        # This configuration does not train, so it holds out almost all of their questions.
        hold_out_percent=99,
        # Each split is half of the dev file.
        dev_questions=6_288,
        test_questions=6_288,
        top_k=5,
        retriever="dense",
        index="data/wikipedia/index",
        embedder="intfloat/e5-base-v2",
    )
    return dataclasses.replace(
        base,
        name="two_wiki_text_qwen3_4b_v5e",
        task=task,
        eval=EvalConfig(questions=6_288, split="test"),
    )
