"""Train Qwen2.5-7B with MyGO on 2WikiMultihopQA over a knowledge graph, on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_v5e.py --init CHECKPOINT --task.data-dir DIR

Scores in the paper (Mujica-MyGO, table 1): EM 77.63 and F1 84.15 after MyGO, 74.93 and 80.74 after
the warm-up, 57.60 and 62.24 with few-shot prompts (57.49 and 62.31 in the first version of the
paper). The ablations of table 4 have the flags --agent.no-split and --agent.no-parallel.

The agent searches the graph of the data folder. It consists of the files of triples in the folder
or, if there are none, of the gold evidences of the questions. In such a graph an entity has only a
few triples. The paper searched Wikidata, which is harder. To search the same graph as the paper,
use `--task.index sparql+https://query.wikidata.org/sparql` or another copy of Wikidata
(docs/guides/graphs.md).

A search returns at most 30 triples. This number is ours, because the paper does not give one. If an
entity has more triples, bge-large-en-v1.5 ranks them, as in the paper. --task.retriever bm25 ranks
them by words.

This configuration was never run. Learning takes about 1.2 hours, estimated from its number of
operations (docs/guides/evaluation.md). All settings except the task are those of
`two_wiki_text_v5e.py`, which lists the paper's settings and ours.
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
