"""What lies in the memory of each chip, phase by phase, before any of it is there.

| phase | what is there |
|---|---|
| loading | the checkpoint in the parameters' type, the state that is made of it |
| syncing | state, its policy in the compute type on its way, engine weights, keys and values |
| sampling | state, engine weights, keys and values, the engine's temporaries |
| learning | state, gradients and activations of a step, keys and values; the engine's weights have left |

The embedder and the rows of an exact search are there from sampling on. State and policy lie over
the trainer's mesh, engine weights, keys and values over `engine.tensor` chips. Called by `setup`,
which refuses what does not fit, and by `run`, which leaves the keys and values what the rest does
not need.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.inference.engine.base import page_bytes
from mujica_jax.inference.engine.factory import CACHE_DTYPES
from mujica_jax.inference.engine.ragged import LANES
from mujica_jax.learning.trainer import Trainer
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.quantization import engine_weights
from mujica_jax.models.sharding import MESH_AXES, shardings_of
from mujica_jax.runtime.chips import Chip

CHECKPOINT, PARAMETERS, MOMENTS = "checkpoint", "parameters", "optimiser"
POLICY, ENGINE, CACHE = "policy on its way", "engine weights", "keys and values"
RETRIEVAL, STEP, CALLS = "embedder and index", "step", "engine calls"
# The programs of the engine, beside weights and cache: what tests/test_tpu_compile.py holds them
# to.
ENGINE_TEMPORARIES = 600_000_000
REMEDIES = {
    CHECKPOINT: "raise trainer.fsdp",
    PARAMETERS: "raise trainer.fsdp, or set trainer.parameter_dtype to bfloat16",
    MOMENTS: "raise trainer.fsdp, or train adapters with trainer.lora_rank",
    POLICY: "raise trainer.fsdp",
    ENGINE: "raise engine.tensor, or set engine.weights to int8",
    CACHE: "lower engine.cache_gigabytes",
    RETRIEVAL: "search on another host with `index serve`",
    STEP: "raise trainer.accumulation_steps, or set trainer.remat to full",
    CALLS: "lower engine.prefill_tokens",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    name: str
    parts: Mapping[str, int]  # bytes on each chip

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def phases(
    config: Config,
    model: DecoderConfig,
    trainer: Trainer,
    *,
    step: int,
    calls: int = ENGINE_TEMPORARIES,
    retrieval: int = 0,
) -> list[PhaseMemory]:
    """`step` and `calls`: temporaries of the compiled training step and of the engine's programs;
    `retrieval`: embedder and index on a chip."""
    state, mesh = trainer.abstract_state(), trainer.mesh
    parameters, moments = _bytes(state.params), _bytes(state.opt_state)
    compute = jnp.dtype(config.trainer.dtype)
    plain = nnx.eval_shape(lambda: nnx.state(Decoder(model, rngs=nnx.Rngs(0), dtype=compute)))
    stored = jax.eval_shape(
        lambda weights: engine_weights(weights, model, config.engine.weights, compute), plain
    )
    kept = {PARAMETERS: parameters, MOMENTS: moments}
    around = {CACHE: cache_bytes(config, model), RETRIEVAL: retrieval}
    engine = {
        ENGINE: _bytes(_laid_out(stored, AbstractMesh((1, 1, config.engine.tensor), MESH_AXES)))
    }
    checkpoint = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, config.trainer.parameter_dtype), plain
    )
    found = {
        "loading": {CHECKPOINT: _bytes(_laid_out(checkpoint, mesh)), **kept, **around},
        "syncing": {POLICY: _bytes(_laid_out(stored, mesh)), **kept, **engine, **around},
        "sampling": {**kept, **engine, **around, CALLS: calls},
        "learning": {**kept, **around, STEP: step},
    }
    return [PhaseMemory(name=name, parts=parts) for name, parts in found.items()]


def check_memory(config: Config, found: list[PhaseMemory], chip: Chip) -> None:
    """Raises UserError naming the fullest phase, its largest part, and what to change."""
    fullest = max(found, key=lambda phase: phase.bytes)
    if fullest.bytes <= chip.memory_bytes:
        return
    largest = max(fullest.parts, key=lambda part: fullest.parts[part])
    raise UserError(
        f"{config.name} needs {_gigabytes(fullest.bytes)} GB a chip while {fullest.name} and a "
        f"{chip.name} has {_gigabytes(chip.memory_bytes)} GB: the largest part is "
        f"{_gigabytes(fullest.parts[largest])} GB of {largest}, so {REMEDIES[largest]}"
    )


def cache_bytes(config: Config, model: DecoderConfig) -> int:
    """Keys and values on each chip: all slots at full length, or what `engine.cache_gigabytes`
    allows. 0 where it does not say: they take what the rest leaves."""
    engine = config.engine
    if not engine.cache_gigabytes:
        return 0
    dtype = CACHE_DTYPES.get(engine.cache_dtype, jnp.dtype(config.trainer.dtype))
    pages = engine.slots * -(-config.agent.max_trajectory_tokens // engine.page_tokens)
    most = pages * page_bytes(model, engine.page_tokens, dtype, LANES) // engine.tensor
    return min(most, int(engine.cache_gigabytes * 1e9))


def _laid_out(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), tree, shardings_of(tree, mesh)
    )


def _bytes(tree: Any) -> int:
    """On each chip."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}"
