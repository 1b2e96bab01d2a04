"""The engine for this machine, with as much KV memory as it needs and the machine has."""

from collections.abc import Sequence

import jax

from mujica_jax.config import EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.engine import Engine, page_bytes
from mujica_jax.inference.resident import ResidentEngine
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.host_memory import available_bytes

DEVICE_SHARE = 0.9  # of the accelerator memory that is free: the rest is for a step's temporaries
HOST_SHARE = 0.5


def make_engine(decoder: Decoder, config: EngineConfig, *, positions: int, stop_token_ids: Sequence[int]) -> Engine:
    """An engine for requests of up to `positions` tokens."""
    return ResidentEngine(
        decoder,
        slots=config.slots,
        positions=positions,
        page_tokens=config.page_tokens,
        num_pages=_num_pages(decoder, config, positions),
        prefill_tokens=config.prefill_tokens,
        decode_steps=config.decode_steps_per_call,
        stop_token_ids=stop_token_ids,
    )


def _num_pages(decoder: Decoder, config: EngineConfig, positions: int) -> int:
    """Pages for all slots at full length, or as many as fit."""
    size = page_bytes(decoder.config, config.page_tokens, decoder.dtype)
    one = -(-positions // config.page_tokens)
    if config.cache_gigabytes:
        memory, whose = config.cache_gigabytes * 1e9, "engine.cache_gigabytes allows"
    else:
        memory, whose = _free_bytes(), "are free"
        memory -= config.slots * one * size  # the rows of running requests, beside the pages
    count = min(int(memory) // size, config.slots * one)
    if count < one:
        raise UserError(
            f"one request of {positions} tokens needs {one * size / 1e9:.3g} GB of KV memory and {memory / 1e9:.3g} GB {whose}: "
            "lower agent.max_trajectory_tokens or engine.slots, or give it more memory"
        )
    return count


def _free_bytes() -> float:
    statistics = jax.local_devices()[0].memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return HOST_SHARE * available_bytes()
    return DEVICE_SHARE * (statistics["bytes_limit"] - statistics["bytes_in_use"])
