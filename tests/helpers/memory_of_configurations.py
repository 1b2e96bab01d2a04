"""Plan the bytes on each chip, by phase and part, for configurations of published models; print
JSON. It uses as many CPU devices as they have chips. Started by `test_configurations.py`.

python -m tests.helpers.memory_of_configurations CONFIG=MODEL ...
"""

import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=32"}

from mujica_jax.config.files import load_config
from mujica_jax.learning.trainer import Trainer
from mujica_jax.models.families import from_hugging_face
from mujica_jax.runs.memory import phases
from tests.models.test_families import PUBLISHED


def planned(name: str, model: str) -> dict[str, dict[str, int]]:
    """Return the planned bytes without those that only a compiler knows (temporaries) and without
    the search index.
    """
    config = load_config(name)
    size = from_hugging_face(PUBLISHED[model])
    phases_of_run = phases(config, size, Trainer(size, config.trainer), step=0, calls=0)
    return {phase.name: dict(phase.parts) for phase in phases_of_run}


if __name__ == "__main__":
    print(json.dumps({word: planned(*word.split("=")) for word in sys.argv[1:]}))
