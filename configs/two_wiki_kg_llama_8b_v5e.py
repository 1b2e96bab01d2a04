"""2WikiMultihopQA over its knowledge graph, with Llama-3.1-8B on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_llama_8b_v5e.py --init CHECKPOINT --task.data-dir DIR

Mujica-MyGO, table 1: EM 85.93 and F1 91.61 after MyGO, 82.00 and 85.90 after the warm-up, 77.70 and
82.09 few-shot.

What is searched is the graph of the data folder, or of --task.index. Without files of triples that
is the gold evidences of the questions. The paper searched Wikidata, which is harder;
`two_wiki_kg_v5e.py` says how to do so.

Not run; learning takes about 1.3 hours by its operations (docs/guides/evaluation.md). The task is that of
`two_wiki_kg_v5e.py`, the model that of `two_wiki_text_llama_8b_v5e.py`; all else is as in
`two_wiki_text_v5e.py`, which lists what is the paper's and what is ours.
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
