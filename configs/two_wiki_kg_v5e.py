"""2WikiMultihopQA over its knowledge graph, with Qwen2.5-7B on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_v5e.py --init CHECKPOINT --task.data-dir DIR

Model, agent, questions, attempts and learning rates are those of `two_wiki_text_v5e.py`; what is searched is the graph
of the data folder, or the one that --task.index names. A whole run there is still to come.
"""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, TwoWikiConfig


def get_config() -> Config:
    base = load_config(str(Path(__file__).with_name("two_wiki_text_v5e.py")))
    task = TwoWikiConfig(
        environment="graph",
        data_dir="data/2wikimultihopqa",
        hold_out_percent=15,
        dev_questions=500,
        test_questions=500,
        top_k=30,
    )
    return dataclasses.replace(base, name="two_wiki_kg_v5e", task=task)
