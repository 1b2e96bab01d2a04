"""The peak speed and the memory of devices.

The peak speed of a TPU is the published figure. Other devices are measured with a large matrix
product, once in each process and in less than a second.

The table of chips has two uses. MFU is the share of the peak speed that training reaches. Another
check compares the memory of a chip with the memory that a program needs.
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
    """One kind of chip. The figures are those of the maker's data sheet."""

    name: str
    # Names by which JAX calls the chip (`device.device_kind`).
    kinds: tuple[str, ...]
    # Peak speed in bfloat16. A multiply-add counts as two operations.
    flops_per_second: float
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
# Number of rows and of columns of the measured matrix product, by platform.
PRODUCT_SIZE = {"cpu": 1024}
# The same for an accelerator.
LARGE_PRODUCT_SIZE = 8192
# The product is repeated for this long, and the fastest repetition counts.
MEASURED_SECONDS = 0.3


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip with this JAX name, or None if the table does not have it."""
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)


def peak_flops_per_second(devices: Sequence[Any], dtype: str) -> float:
    """Return the peak FLOP/s of all these devices together.

    For chips in the table it is the published figure in bfloat16, whatever `dtype` is, because MFU
    is always quoted so. Other devices are measured in `dtype`. All CPU devices of a process share
    one machine, which is measured as a whole.
    """
    device = devices[0]
    chip = chip_of(device.device_kind)
    if chip is not None:
        return chip.flops_per_second * len(devices)

    if device.platform == "cpu":
        # The number of machines.
        measured_units = len({device.process_index for device in devices})
    else:
        measured_units = len(devices)
    return measured_flops_per_second(device.platform, dtype) * measured_units


@functools.cache
def measured_flops_per_second(platform: str, dtype: str) -> float:
    """Return the FLOP/s of the fastest of several square matrix products on the first device."""
    size = PRODUCT_SIZE.get(platform, LARGE_PRODUCT_SIZE)
    device = jax.local_devices(backend=platform)[0]
    matrix = jnp.ones((size, size), jnp.dtype(dtype), device=device)
    product = jax.jit(lambda matrix: matrix @ matrix)
    return 2 * size**3 / fastest_seconds(lambda: product(matrix).block_until_ready())


def fastest_seconds(call: Callable[[], Any], *, spend_seconds: float = MEASURED_SECONDS) -> float:
    """Call a function repeatedly for `spend_seconds`, and return the seconds of the fastest call.

    At least one call is measured. An extra first call, which may compile, is not measured.
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
