"""Train Llama-3.1-8B with MyGO on 2WikiMultihopQA over a knowledge graph, on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_llama_8b_v5e.py --init CHECKPOINT --task.data-dir DIR

Scores in the paper (Mujica-MyGO, table 1): EM 85.93 and F1 91.61 after MyGO, 82.00 and 85.90 after
the warm-up, 77.70 and 82.09 with few-shot prompts.

The agent searches the graph of the data folder, or the graph that --task.index names. Without files
of triples in the folder, the graph consists of the gold evidences of the questions. The paper
searched Wikidata, which is harder; `two_wiki_kg_v5e.py` explains how to search it.

This configuration was never run. Learning takes about 1.3 hours, estimated from its number of
operations (docs/guides/evaluation.md). The task is that of `two_wiki_kg_v5e.py` and the model that
of `two_wiki_text_llama_8b_v5e.py`. All other settings are those of `two_wiki_text_v5e.py`, which
lists the paper's settings and ours.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config


def get_config() -> Config:
    return dataclasses.replace(
        load_config("two_wiki_kg_v5e"),
        name="two_wiki_kg_llama_8b_v5e",
        model=load_config("two_wiki_text_llama_8b_v5e").model,
    )
