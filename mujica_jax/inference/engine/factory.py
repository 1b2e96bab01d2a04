"""Make the engine for this machine, and choose the size of its KV cache."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mujica_jax.config.schema import EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.engine.base import Engine, EngineOptions, check_heads, page_bytes
from mujica_jax.inference.engine.contiguous import ContiguousEngine
from mujica_jax.inference.engine.ragged import LANES, RaggedEngine, check_tiles
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.sharding import make_mesh, shardings_of
from mujica_jax.runtime.host_memory import available_bytes

# Share of the free memory that the KV cache may take, on an accelerator and on the host. The rest
# is for temporary arrays of the programs.
DEVICE_SHARE = 0.9
HOST_SHARE = 0.5
# Values of engine.cache_dtype. Any other value means the compute type of the model.
CACHE_DTYPES = {"bfloat16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
# The setting to lower if conversations are longer than the model's context.
CONTEXT_SETTING = "agent.max_trajectory_tokens (--max-tokens of serve)"


def make_engine(
    decoder: Decoder,
    engine: EngineConfig,
    *,
    positions: int,
    stop_token_ids: Sequence[int],
    reserved_bytes: int = 0,
) -> Engine:
    """Make the engine for this platform: `RaggedEngine` on TPUs, `ContiguousEngine` elsewhere.

    Requests may have up to `positions` tokens, prompt and completion together. The engine runs on
    `engine.tensor_parallel_size` devices. `engine.cache_gigabytes` is the size of the KV cache in
    GB (10^9 bytes). 0 means enough pages for all slots at full length, or as many as fit into the
    free memory. In that case, `reserved_bytes` of each device stay free for later allocations of
    the program.

    Raises UserError if the model does not fit the context length, the devices or the memory.
    """
    check_context(decoder.config, positions)
    dtype = _cache_dtype(decoder.dtype, engine)
    num_pages = _num_pages(
        decoder.config, engine, positions=positions, dtype=dtype, reserved_bytes=reserved_bytes
    )
    options = EngineOptions(
        slots=engine.max_num_seqs,
        positions=positions,
        page_tokens=engine.page_tokens,
        num_pages=num_pages,
        prefill_tokens=engine.prefill_tokens,
        decode_steps=engine.decode_steps_per_call,
        stop_token_ids=stop_token_ids,
        mesh=engine_mesh(engine),
        cache_dtype=dtype,
    )
    engine_class = RaggedEngine if jax.default_backend() == "tpu" else ContiguousEngine
    return engine_class(decoder, options)


def check_engine(
    model: DecoderConfig, engine: EngineConfig, *, positions: int, dtype: DTypeLike
) -> None:
    """Check that `make_engine` can make an engine for this model, without loading its weights.

    `dtype` is the compute type of the model. Raises UserError otherwise.
    """
    check_context(model, positions)
    mesh = engine_mesh(engine)
    cache_dtype = _cache_dtype(dtype, engine)
    if mesh is not None:
        check_heads(model, mesh)
        shardings_of(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))), mesh)
    if jax.default_backend() == "tpu":
        check_tiles(model, engine.tensor_parallel_size, cache_dtype)
    _num_pages(model, engine, positions=positions, dtype=cache_dtype, reserved_bytes=0)


def check_context(model: DecoderConfig, positions: int, *, setting: str = CONTEXT_SETTING) -> None:
    """Check that the model's context length is at least `positions` tokens.

    `setting` is the name of the setting that the user can lower. Raises UserError otherwise.
    """
    if positions > model.context_tokens:
        raise UserError(
            f"conversations may have {positions:,} tokens, but the model reads at most "
            f"{model.context_tokens:,} (max_position_embeddings of its config.json): lower "
            f"{setting}"
        )


def engine_mesh(engine: EngineConfig) -> Mesh | None:
    """Return the mesh of this host's engine, or None for a single device.

    Each host runs its own engine on its own devices. Raises UserError if this host has too few
    devices for `engine.tensor_parallel_size`.
    """
    devices = jax.local_devices()
    if engine.tensor_parallel_size > len(devices):
        raise UserError(
            f"engine.tensor_parallel_size is {engine.tensor_parallel_size}, but only {len(devices)} "
            f"devices are available: use at most {len(devices)}"
        )
    if engine.tensor_parallel_size == 1:
        return None
    return make_mesh(1, 1, engine.tensor_parallel_size, devices)


def _num_pages(
    model: DecoderConfig,
    engine: EngineConfig,
    *,
    positions: int,
    dtype: DTypeLike,
    reserved_bytes: int,
) -> int:
    """Return the number of pages: enough for all slots at full length, or all that fit in memory.

    Raises UserError if the memory is too small for one request of `positions` tokens.
    """
    lanes = LANES if jax.default_backend() == "tpu" else 1
    # Bytes of a page on one device.
    page_size = page_bytes(model, engine.page_tokens, dtype, lanes) // engine.tensor_parallel_size
    pages_per_request = -(-positions // engine.page_tokens)
    pages_for_all_slots = engine.max_num_seqs * pages_per_request
    if engine.cache_gigabytes:
        memory = engine.cache_gigabytes * 1e9
        source = "engine.cache_gigabytes allows only"
    else:
        memory = _free_bytes() - reserved_bytes
        source = "the free memory is"
        if jax.default_backend() != "tpu":
            # `ContiguousEngine` also holds a contiguous cache of full length for each slot.
            memory -= pages_for_all_slots * page_size
    # What is reserved may be more than what is free.
    memory = max(memory, 0)
    num_pages = min(int(memory) // page_size, pages_for_all_slots)
    if num_pages < pages_per_request:
        raise UserError(
            f"one request of {positions} tokens needs {pages_per_request * page_size / 1e9:.3g} GB "
            f"of KV cache, but {source} {memory / 1e9:.3g} GB: lower agent.max_trajectory_tokens or "
            "engine.max_num_seqs, or give the cache more memory"
        )
    return num_pages


def _cache_dtype(compute: DTypeLike, engine: EngineConfig) -> DTypeLike:
    """Return the data type of the stored keys and values."""
    return CACHE_DTYPES.get(engine.cache_dtype, compute)


def _free_bytes() -> float:
    """Return how many bytes the KV cache may take: on one accelerator, or on the host for a CPU."""
    statistics = jax.local_devices()[0].memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return HOST_SHARE * available_bytes()
    return DEVICE_SHARE * (statistics["bytes_limit"] - statistics["bytes_in_use"])
