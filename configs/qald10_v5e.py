"""QALD-10 over Wikidata, out of domain: a policy that was trained on 2Wiki-KG is scored, with
Qwen2.5-7B on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_v5e.py --init CHECKPOINT --run RUN --task.data-dir 2WIKI
    python -m mujica_jax.eval configs/qald10_v5e.py --checkpoint RUN --task.data-dir QALD

Mujica-MyGO, table 5: EM 39.85 and F1 49.73; few-shot 27.92 and 37.11 (--init CHECKPOINT
--agent.prompt few_shot).

Not run. All questions whose entities and answers the graph knows are the test: nothing is chosen on
them, and none are for training. The graph is Wikidata's endpoint, as in the paper, or the one that
--task.index names (docs/guides/graphs.md). The triples of an entity that has more than 30 are ranked by
bge-large-en-v1.5, as in the paper; --task.retriever bm25 ranks them by words. The rest is as in
`two_wiki_kg_v5e.py`; `two_wiki_text_v5e.py` lists what is the paper's and what is ours.
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
