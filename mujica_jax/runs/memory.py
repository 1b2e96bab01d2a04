"""Compute how much memory each phase of a run needs on each chip, before anything is allocated.

| phase | what is in memory |
|---|---|
| loading | the training state, and the checkpoint that it is made from |
| syncing | the training state, its policy on the way to the engine, and the engine's weights |
| sampling | the training state, the engine's weights, and the engine's temporary arrays |
| learning | the training state, and the gradients and activations of one step |

In all phases the engine's cache of keys and values is in memory too, and so are the embedder and
the index of an exact search. The training state and the policy are sharded over the trainer's mesh.
The engine's weights, keys and values are sharded over `engine.tensor_parallel_size` chips.

`runs.setup` refuses a run that does not fit. Otherwise the engine's cache gets the memory that
nothing else needs.
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

# Names of the parts of a phase's memory.
CHECKPOINT = "checkpoint"
PARAMETERS = "parameters"
MOMENTS = "optimizer state"
POLICY = "policy in transfer"
ENGINE = "engine weights"
CACHE = "KV cache"
RETRIEVAL = "embedder and index"
STEP = "training step"
CALLS = "engine calls"
# The bytes on each chip of the temporary arrays of the engine's programs, without weights and
# cache. tests/models/test_tpu_compile.py checks that the programs do not need more.
ENGINE_TEMPORARIES = 600_000_000
# What to change if a part needs too much memory.
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
    """The memory that one phase needs on each chip.

    `parts` holds the bytes on each chip of each part.
    """

    name: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """The bytes of all parts together on each chip."""
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
    """Return the memory of each phase on each chip.

    `step` is the size of the temporary arrays of the compiled training step, and `calls` that of
    the engine's programs. `retrieval` is the size of the embedder and the index. All are in bytes
    on each chip.
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

    # `resident` and `searched` are in memory in all phases.
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
    """Check that each phase fits into the memory of a chip.

    Raises UserError if one does not. The message names the largest phase, its largest part, and the
    setting to change.
    """
    fullest = max(phase_memories, key=lambda phase: phase.bytes)
    if fullest.bytes <= chip.memory_bytes:
        return
    largest_part = max(fullest.parts, key=lambda part: fullest.parts[part])
    raise UserError(
        f"{config.name} needs {_gigabytes(fullest.bytes)} GB per chip while {fullest.name}, but a "
        f"{chip.name} has {_gigabytes(chip.memory_bytes)} GB. The largest part is "
        f"{largest_part} with {_gigabytes(fullest.parts[largest_part])} GB: "
        f"{REMEDIES[largest_part]}"
    )


def cache_bytes(config: Config, model: DecoderConfig) -> int:
    """Return the bytes of the engine's cache of keys and values on each chip.

    This is enough for `engine.max_num_seqs` sequences of full length, but at most
    `engine.cache_gigabytes`. If `engine.cache_gigabytes` is 0, the result is 0: the cache then gets
    the memory that nothing else needs.
    """
    if not config.engine.cache_gigabytes:
        return 0
    all_bytes = conversations_bytes(config, model, config.engine.max_num_seqs)
    return min(all_bytes, int(config.engine.cache_gigabytes * 1e9))


def conversations_bytes(config: Config, model: DecoderConfig, count: int) -> int:
    """Return the bytes on each chip of the keys and values of `count` conversations.

    Each conversation has its full length, `agent.max_trajectory_tokens`.
    """
    engine = config.engine
    dtype = CACHE_DTYPES.get(engine.cache_dtype, jnp.dtype(config.trainer.dtype))
    pages = count * -(-config.agent.max_trajectory_tokens // engine.page_tokens)
    return (
        pages * page_bytes(model, engine.page_tokens, dtype, LANES) // engine.tensor_parallel_size
    )


def gradient_bytes(trainer: Trainer) -> int:
    """Return the bytes on each chip of the gradient of all trained parameters.

    The update is computed in float32.
    """
    gradient = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding),
        trainer.abstract_state().params,
    )
    trained_type = nnx.LoRAParam if trainer.config.lora_rank else nnx.Param
    return _bytes(nnx.split_state(gradient, trained_type, ...)[0])


def layer_input_bytes(trainer: Trainer) -> int:
    """Return the bytes on each chip of the inputs of all layers, which the backward pass needs.

    They are stored with every `trainer.remat`, for the rows that go through the model at once.
    """
    config = trainer.config
    rows = config.batch_size // config.accumulation_steps
    rows_per_chip = rows // (config.data_parallel_size * config.fsdp)
    tokens_per_chip = rows_per_chip * config.sequence_length
    layer_bytes = tokens_per_chip * trainer.model.hidden_size * jnp.dtype(config.dtype).itemsize
    return trainer.model.num_layers * layer_bytes


def count_parameters(trainer: Trainer) -> tuple[int, int]:
    """Return the number of all parameters, adapters included, and of the trained ones."""
    params = trainer.abstract_state().params
    trained_type = nnx.LoRAParam if trainer.config.lora_rank else nnx.Param
    trained = nnx.split_state(params, trained_type, ...)[0]
    return _numbers(params), _numbers(trained)


def checkpoint_bytes(trainer: Trainer) -> int:
    """Return the bytes of a checkpoint on disk: the parameters and the optimizer state."""
    state = trainer.abstract_state()
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _laid_out(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return an abstract tree of arrays, with the sharding of each array over the mesh."""
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), tree, shardings_of(tree, mesh)
    )


def _bytes(tree: Any) -> int:
    """Return the bytes of a tree of arrays on each chip."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _numbers(tree: Any) -> int:
    """Return how many numbers the arrays of a tree have."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _gigabytes(count: int) -> str:
    """Return a number of bytes in gigabytes, with one decimal."""
    return f"{count / 1e9:.1f}"
