"""2WikiMultihopQA over its knowledge graph, with Qwen2.5-7B on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_v5e.py --init CHECKPOINT --task.data-dir DIR

Mujica-MyGO, table 1: EM 77.63 and F1 84.15 after MyGO, 74.93 and 80.74 after the warm-up, 57.60 and
62.24 few-shot (57.49 and 62.31 in the paper's first version). Rows by flags: table 4 (--agent.split
False, --agent.parallel False).

What is searched: the graph of the data folder, which is its files of triples or, without such
files, the gold evidences of its questions. There an entity has a few triples at most, so this is an
easier task than the paper's, which searched Wikidata. `--task.index
sparql+https://query.wikidata.org/sparql`, or another graph of Wikidata (docs/guides/graphs.md), searches
what the paper searched. Up to 30 triples a search are ours; the paper does not say how many. Those
of an entity that has more are ranked by bge-large-en-v1.5, as in the paper; --task.retriever bm25
ranks them by words.

All but the task is as in `two_wiki_text_v5e.py`, which lists what is the paper's and what is ours.
Not run; learning takes about 1.2 hours by its operations (docs/guides/evaluation.md).
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, TwoWikiConfig


def get_config() -> Config:
    task = TwoWikiConfig(
        environment="graph",
        data_dir="data/2wikimultihopqa",
        hold_out_percent=15,
        dev_questions=500,
        test_questions=500,
        top_k=30,
        retriever="dense",
    )
    return dataclasses.replace(load_config("two_wiki_text_v5e"), name="two_wiki_kg_v5e", task=task)
