"""2WikiMultihopQA over Wikipedia, one agent that decides when to search, with Qwen3-4B on 4 chips
(v5e:2x2).

    python -m mujica_jax.index build --corpus wiki-18.jsonl.gz --kind scann --embedder intfloat/e5-base-v2 --out INDEX
    python -m mujica_jax.eval configs/two_wiki_text_qwen3_4b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX --agents direct rag

Learning When to Search, table 1, share of answers that a judge accepts: 0.23 without search
(direct), 0.41 with one (rag), 0.61 after both stages with 1.33 searches a question; Qwen3-8B 0.28,
0.43 and 0.51 with 1.41. Index, rows by flags and all that is not the task are those of
`nq_qwen3_4b_v5e.py`. Not run. Half of the dev file is the test; the paper trains on other questions
of the set.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EvalConfig, TwoWikiConfig


def get_config() -> Config:
    base = load_config("nq_qwen3_4b_v5e")
    task = TwoWikiConfig(
        environment="text",
        data_dir="data/2wikimultihopqa",
        # The highest share that is allowed, for files that are neither train* nor dev*: nothing is
        # learnt here.
        hold_out_percent=99,
        dev_questions=6_288,  # half of the dev file
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
