"""2WikiMultihopQA over passages, with Qwen3-8B on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_text_qwen3_8b_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX

The training step compiles for this topology and fits (`tests/test_tpu_compile.py`); a whole run there is still to come.
The engine splits Qwen3-8B's eight heads of keys over the four chips of a host. Questions, attempts and learning rates
are those of the Mujica-MyGO paper, as with Qwen2.5-7B (`two_wiki_text_v5e.py`). The `model` section is not read with
--init.
"""

import dataclasses
from pathlib import Path

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config


def get_config() -> Config:
    base = load_config(str(Path(__file__).with_name("two_wiki_text_v5e.py")))
    return dataclasses.replace(
        base,
        name="two_wiki_text_qwen3_8b_v5e",
        model=dataclasses.replace(base.model, family="qwen3"),
    )
