"""The files in configs/: checkpoints and chips of those for published models, and which of them
compile the same programs.
"""

import ast
import dataclasses
import re
from collections.abc import Hashable

from mujica_jax.config.files import CONFIG_FOLDER, load_config
from mujica_jax.config.schema import Config, ModelConfig
from mujica_jax.models.families import from_hugging_face
from tests.models.test_families import PUBLISHED

CONFIGS = {path.stem: load_config(str(path)) for path in sorted(CONFIG_FOLDER.glob("*.py"))}
TOPOLOGY = re.compile(r"\((v\w+:\d+x\d+)\)")


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((CONFIG_FOLDER / f"{name}.py").read_text())) or ""


def topology_of(name: str) -> str | None:
    """Return the chips that the first paragraph of a configuration's docstring names, such as
    `v5e:4x8`, or None.
    """
    match = TOPOLOGY.search(docstring(name).partition("\n\n")[0])
    return match and match[1]


def published_sizes(checkpoint: str) -> ModelConfig:
    size = from_hugging_face(PUBLISHED[checkpoint])
    return ModelConfig(
        family=size.family,
        vocab_tokens=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        rope_theta=size.rope_theta,
    )


def checkpoint_of(config: Config) -> str | None:
    """Return the published model that has the sizes of the section `model`."""
    return next((name for name in PUBLISHED if published_sizes(name) == config.model), None)


def programs_of(name: str) -> Hashable:
    """What its training step, its engine and their memory follow from.

    The engine behind JetStream's interface runs the programs of the native one.
    """
    config = CONFIGS[name]
    engine = dataclasses.replace(config.engine, kind="native")
    return (
        config.model,
        topology_of(name),
        config.trainer,
        engine,
        config.agent.max_trajectory_tokens,
    )
