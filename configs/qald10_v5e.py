"""Evaluate Qwen2.5-7B, trained on 2Wiki-KG, out of domain on QALD-10, on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_v5e.py --init CHECKPOINT --run RUN --task.data-dir 2WIKI
    python -m mujica_jax.eval configs/qald10_v5e.py --checkpoint RUN --task.data-dir QALD

Scores in the paper (Mujica-MyGO, table 5): EM 39.85 and F1 49.73, and 27.92 and 37.11 with few-shot
prompts (--init CHECKPOINT --agent.prompt few_shot).

This configuration was never run. The test questions are all questions whose entities and answers
are in the graph. Nothing is chosen on them, and none of them is used for training. The agent
searches Wikidata's endpoint, as in the paper, or the graph that --task.index names
(docs/guides/graphs.md). If an entity has more than 30 triples, bge-large-en-v1.5 ranks them, as in
the paper. --task.retriever bm25 ranks them by words. All other settings are those of
`two_wiki_kg_v5e.py`. `two_wiki_text_v5e.py` lists the paper's settings and ours.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, EvalConfig
from mujica_jax.config.tasks import QaldConfig


def get_config() -> Config:
    task = QaldConfig(
        data_dir="data/qald10",
        dev_percent=0,
        top_k=30,
        index="sparql+https://query.wikidata.org/sparql",
        retriever="dense",
    )
    return dataclasses.replace(
        load_config("two_wiki_kg_v5e"),
        name="qald10_v5e",
        task=task,
        eval=EvalConfig(questions=394, split="test"),
    )
