"""Compute what lies in the memory of each chip, phase by phase, before any of it is there.

| phase | what is there |
|---|---|
| loading | the checkpoint in the parameters' type, the state that is made of it |
| syncing | state, its policy in the compute type on its way, engine weights, keys and values |
| sampling | state, engine weights, keys and values, the engine's temporaries |
| learning | state, gradients and activations of a step, keys and values; no engine weights |

The embedder and the rows of an exact search are there from sampling on. State and policy lie over
the trainer's mesh, engine weights, keys and values over `engine.tensor_parallel_size` chips. Called
by `setup`, which refuses what does not fit, and by `run`, which leaves the keys and values what the
rest does not need.
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

# Parts of a phase's memory.
CHECKPOINT = "checkpoint"
PARAMETERS = "parameters"
MOMENTS = "optimiser"
POLICY = "policy on its way"
ENGINE = "engine weights"
CACHE = "keys and values"
RETRIEVAL = "embedder and index"
STEP = "step"
CALLS = "engine calls"
# Bytes of the engine's programs, beside weights and cache. tests/models/test_tpu_compile.py holds them to
# it.
ENGINE_TEMPORARIES = 600_000_000
REMEDIES = {
    CHECKPOINT: "raise trainer.fsdp",
    PARAMETERS: "raise trainer.fsdp, or set trainer.parameter_dtype to bfloat16",
    MOMENTS: "raise trainer.fsdp, or train adapters with trainer.lora_rank",
    POLICY: "raise trainer.fsdp",
    ENGINE: "raise engine.tensor_parallel_size, or set engine.weights to int8",
    CACHE: "lower engine.cache_gigabytes",
    RETRIEVAL: "search on another host with `index serve`",
    STEP: "raise trainer.accumulation_steps, or set trainer.remat to full",
    CALLS: "lower engine.prefill_tokens",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The memory that one phase takes on each chip."""

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
    """Return the memory of each phase.

    `step` and `calls` are the bytes of temporaries of the compiled training step and of the
    engine's programs, `retrieval` those of embedder and index on a chip.
    """
    state = trainer.abstract_state()
    compute_dtype = jnp.dtype(config.trainer.dtype)
    decoder = nnx.eval_shape(
        lambda: nnx.state(Decoder(model, rngs=nnx.Rngs(0), dtype=compute_dtype))
    )
    checkpoint = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, config.trainer.parameter_dtype), decoder
    )
    stored = jax.eval_shape(
        lambda weights: engine_weights(weights, model, config.engine.weights, compute_dtype),
        decoder,
    )
    engine_mesh = AbstractMesh((1, 1, config.engine.tensor_parallel_size), MESH_AXES)

    # What stays in all phases, and the engine's weights.
    resident = {PARAMETERS: _bytes(state.params), MOMENTS: _bytes(state.opt_state)}
    searched = {CACHE: cache_bytes(config, model), RETRIEVAL: retrieval}
    engine = {ENGINE: _bytes(_laid_out(stored, engine_mesh))}
    checkpoint_bytes = _bytes(_laid_out(checkpoint, trainer.mesh))
    policy_bytes = _bytes(_laid_out(stored, trainer.mesh))
    return [
        PhaseMemory(name="loading", parts={CHECKPOINT: checkpoint_bytes, **resident, **searched}),
        PhaseMemory(name="syncing", parts={POLICY: policy_bytes, **resident, **engine, **searched}),
        PhaseMemory(name="sampling", parts={**resident, **engine, **searched, CALLS: calls}),
        PhaseMemory(name="learning", parts={**resident, **searched, STEP: step}),
    ]


def check_memory(config: Config, phase_memories: list[PhaseMemory], chip: Chip) -> None:
    """Check that each phase fits a chip.

    Raises UserError naming the fullest phase, its largest part, and what to change.
    """
    fullest = max(phase_memories, key=lambda phase: phase.bytes)
    if fullest.bytes <= chip.memory_bytes:
        return
    largest_part = max(fullest.parts, key=lambda part: fullest.parts[part])
    raise UserError(
        f"{config.name} needs {_gigabytes(fullest.bytes)} GB a chip while {fullest.name} and a "
        f"{chip.name} has {_gigabytes(chip.memory_bytes)} GB: the largest part is "
        f"{_gigabytes(fullest.parts[largest_part])} GB of {largest_part}, so "
        f"{REMEDIES[largest_part]}"
    )


def cache_bytes(config: Config, model: DecoderConfig) -> int:
    """Return the bytes of keys and values on each chip.

    These are all slots at full length, or what `engine.cache_gigabytes` allows. Without that
    setting it is 0: they take what the rest leaves.
    """
    engine = config.engine
    if not engine.cache_gigabytes:
        return 0
    dtype = CACHE_DTYPES.get(engine.cache_dtype, jnp.dtype(config.trainer.dtype))
    pages_per_slot = -(-config.agent.max_trajectory_tokens // engine.page_tokens)
    pages = engine.max_num_seqs * pages_per_slot
    full_bytes = (
        pages * page_bytes(model, engine.page_tokens, dtype, LANES) // engine.tensor_parallel_size
    )
    return min(full_bytes, int(engine.cache_gigabytes * 1e9))


def _laid_out(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return an abstract tree with the shardings that it has over a mesh."""
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), tree, shardings_of(tree, mesh)
    )


def _bytes(tree: Any) -> int:
    """Return the bytes of a tree on each chip."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}"
