"""The peak speed of a device.

It is the published figure of a TPU, and for every other device what its largest matrix product
reaches.

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
MEASURED_SECONDS = 0.3  # for which the product is repeated; the fastest one counts


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip that JAX calls by this name, or None if it is not in the table."""
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)


def peak_flops_per_second(devices: Sequence[Any], dtype: str) -> float:
    """Return the FLOPs a second of all these devices together.

    Chips in the table have their published figure, in bfloat16 whatever `dtype` is, as MFU is
    always quoted. Others are measured in `dtype`. The devices of a CPU are parts of one machine,
    which is measured as a whole.
    """
    device = devices[0]
    chip = chip_of(device.device_kind)
    if chip is not None:
        return chip.flops_per_second * len(devices)

    if device.platform == "cpu":
        measured_units = len({device.process_index for device in devices})  # machines
    else:
        measured_units = len(devices)
    return measured_flops_per_second(device.platform, dtype) * measured_units


@functools.cache
def measured_flops_per_second(platform: str, dtype: str) -> float:
    """Return the FLOPs a second of the fastest of a few square products on the first device."""
    size = PRODUCT_SIZE.get(platform, LARGE_PRODUCT_SIZE)
    device = jax.local_devices(backend=platform)[0]
    matrix = jnp.ones((size, size), jnp.dtype(dtype), device=device)
    product = jax.jit(lambda matrix: matrix @ matrix)
    return 2 * size**3 / fastest_seconds(lambda: product(matrix).block_until_ready())


def fastest_seconds(call: Callable[[], Any], *, spend_seconds: float = MEASURED_SECONDS) -> float:
    """Return the seconds of the fastest call among those that fit into `spend_seconds`.

    At least one call is measured. A first one, which may compile, is not.
    """
    call()
    end_time = time.perf_counter() + spend_seconds
    fastest = float("inf")
    while True:
        start_time = time.perf_counter()
        if start_time >= end_time and fastest != float("inf"):
            return fastest
        call()
        fastest = min(fastest, time.perf_counter() - start_time)
