"""The engine for this machine, with as much KV memory as it needs and the machine has."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mujica_jax.config.schema import EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.engine.base import Engine, check_heads, page_bytes
from mujica_jax.inference.engine.contiguous import ContiguousEngine
from mujica_jax.inference.engine.ragged import LANES, RaggedEngine, check_tiles
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.sharding import make_mesh, shardings_of
from mujica_jax.runtime.host_memory import available_bytes

DEVICE_SHARE = 0.9  # of the accelerator memory that is free: the rest is for a step's temporaries
HOST_SHARE = 0.5
CACHE_DTYPES = {"bfloat16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
# what a user lowers for a model's context
CONTEXT_SETTING = "agent.max_trajectory_tokens (of serve: --max-tokens)"


def make_engine(
    decoder: Decoder,
    engine: EngineConfig,
    *,
    positions: int,
    stop_token_ids: Sequence[int],
    reserved_bytes: int = 0,
) -> Engine:
    """An engine for requests of up to `positions` tokens, on this platform and over `engine.tensor`
    devices. Where `engine.cache_gigabytes` does not say what its memory may take, `reserved_bytes`
    of each device stay free for what is still to come."""
    check_context(decoder.config, positions)
    kind = RaggedEngine if jax.default_backend() == "tpu" else ContiguousEngine
    dtype = _cache_dtype(decoder.dtype, engine)
    return kind(
        decoder,
        slots=engine.slots,
        positions=positions,
        page_tokens=engine.page_tokens,
        num_pages=_num_pages(decoder.config, engine, positions, dtype, reserved_bytes),
        prefill_tokens=engine.prefill_tokens,
        decode_steps=engine.decode_steps_per_call,
        stop_token_ids=stop_token_ids,
        mesh=engine_mesh(engine),
        cache_dtype=dtype,
    )


def check_engine(
    model: DecoderConfig, engine: EngineConfig, *, positions: int, dtype: DTypeLike
) -> None:
    """What `make_engine` would refuse of a model that computes in `dtype`, before there is one.
    Raises UserError."""
    check_context(model, positions)
    mesh, kept = engine_mesh(engine), _cache_dtype(dtype, engine)
    if mesh is not None:
        check_heads(model, mesh)
        shardings_of(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))), mesh)
    if jax.default_backend() == "tpu":
        check_tiles(model, engine.tensor, kept)
    _num_pages(model, engine, positions, kept, reserved=0)


def check_context(model: DecoderConfig, positions: int, *, setting: str = CONTEXT_SETTING) -> None:
    """Check that a model was made for conversations of `positions` tokens. Raises UserError.

    `setting` names what the user lowers."""
    if positions > model.context_tokens:
        raise UserError(
            f"conversations may have {positions:,} tokens and the model reads at most "
            f"{model.context_tokens:,} (max_position_embeddings of its config.json): lower "
            f"{setting}"
        )


def engine_mesh(engine: EngineConfig) -> Mesh | None:
    """Every host has an engine of its own, over devices of its own."""
    devices = jax.local_devices()
    if engine.tensor > len(devices):
        raise UserError(
            f"engine.tensor is {engine.tensor} and {len(devices)} devices are available: use at "
            f"most {len(devices)}"
        )
    return make_mesh(1, 1, engine.tensor, devices) if engine.tensor > 1 else None


def _num_pages(
    model: DecoderConfig, engine: EngineConfig, positions: int, dtype: DTypeLike, reserved: int
) -> int:
    """Pages for all slots at full length, or as many as fit."""
    lanes = LANES if jax.default_backend() == "tpu" else 1
    size = page_bytes(model, engine.page_tokens, dtype, lanes) // engine.tensor  # on each device
    one = -(-positions // engine.page_tokens)
    if engine.cache_gigabytes:
        memory, whose = engine.cache_gigabytes * 1e9, "engine.cache_gigabytes allows"
    else:
        memory, whose = _free_bytes() - reserved, "are free"
        if jax.default_backend() != "tpu":
            memory -= engine.slots * one * size  # the rows of running requests, beside the pages
    count = min(int(memory) // size, engine.slots * one)
    if count < one:
        raise UserError(
            f"one request of {positions} tokens needs {one * size / 1e9:.3g} GB of KV memory and "
            f"{memory / 1e9:.3g} GB {whose}: lower agent.max_trajectory_tokens or engine.slots, or "
            "give it more memory"
        )
    return count


def _cache_dtype(compute: DTypeLike, engine: EngineConfig) -> DTypeLike:
    """Of keys and values. On a CPU float32 in place of bfloat16: to write one bfloat16 XLA copies
    all of them there."""
    if engine.cache_dtype != "compute":
        return CACHE_DTYPES[engine.cache_dtype]
    return jnp.float32 if jax.default_backend() == "cpu" else compute


def _free_bytes() -> float:
    statistics = jax.local_devices()[0].memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return HOST_SHARE * available_bytes()
    return DEVICE_SHARE * (statistics["bytes_limit"] - statistics["bytes_in_use"])
