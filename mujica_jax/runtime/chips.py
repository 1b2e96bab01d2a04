"""How fast a device can be: the published figures of TPUs, and for every other device what its
largest matrix product reaches.

The table stands here once: the share of the peak that training reaches (MFU) and the check that a
program fits a chip read it. A CPU has no figure worth publishing, so it is measured, in well under
a second and once a process.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, by its maker's data sheet."""

    name: str
    kinds: tuple[str, ...]  # what JAX calls it (`device.device_kind`)
    flops_per_second: float  # bfloat16; a multiply-add is two
    memory_bytes: int


CHIPS = (
    Chip(name="v4", kinds=("TPU v4",), flops_per_second=275e12, memory_bytes=32 * 2**30),
    Chip(
        name="v5e",
        kinds=("TPU v5 lite", "TPU v5e"),
        flops_per_second=197e12,
        memory_bytes=16 * 10**9,
    ),
    Chip(name="v5p", kinds=("TPU v5", "TPU v5p"), flops_per_second=459e12, memory_bytes=95 * 2**30),
    Chip(
        name="v6e",
        kinds=("TPU v6 lite", "TPU v6e"),
        flops_per_second=918e12,
        memory_bytes=32 * 10**9,
    ),
    Chip(
        name="v7x", kinds=("TPU7x", "TPU v7x"), flops_per_second=2307e12, memory_bytes=192 * 2**30
    ),
)
PRODUCT_SIZE = {"cpu": 1024}  # rows and columns of the measured product
LARGE_PRODUCT_SIZE = 8192  # on an accelerator
MEASURED_SECONDS = 0.3  # the product is repeated for so long, and the fastest one counts


def chip_of(device_kind: str) -> Chip | None:
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)


def peak_flops_per_second(devices: Sequence[Any], dtype: str) -> float:
    """FLOPs a second of all these devices together: published for chips that are in the table, in
    bfloat16 whatever `dtype` is, as MFU is always quoted; measured in `dtype` for the others.

    The devices of a CPU are parts of one machine, which is measured as a whole.
    """
    first = devices[0]
    if (chip := chip_of(first.device_kind)) is not None:
        return chip.flops_per_second * len(devices)
    machines = (
        len({device.process_index for device in devices})
        if first.platform == "cpu"
        else len(devices)
    )
    return measured_flops_per_second(first.platform, dtype) * machines


@functools.cache
def measured_flops_per_second(platform: str, dtype: str) -> float:
    """FLOPs a second of the largest of a few square products on the first device here."""
    size = PRODUCT_SIZE.get(platform, LARGE_PRODUCT_SIZE)
    matrix = jnp.ones((size, size), jnp.dtype(dtype), device=jax.local_devices(backend=platform)[0])
    product = jax.jit(lambda matrix: matrix @ matrix)
    return 2 * size**3 / fastest_seconds(lambda: product(matrix).block_until_ready())


def fastest_seconds(call: Callable[[], Any], *, spend_seconds: float = MEASURED_SECONDS) -> float:
    """Seconds of the fastest of as many calls as fit `spend_seconds`, at least one, after one that
    may compile."""
    call()
    fastest, until = float("inf"), time.perf_counter() + spend_seconds
    while (began := time.perf_counter()) < until or fastest == float("inf"):
        call()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
