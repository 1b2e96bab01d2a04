"""What is told of a training step beside what the step itself computes: its speed, its share of the
machine's peak, its memory.

Host arithmetic on numbers that are there already: nothing here waits for a device. Called by the
methods for steps that are logged. Floating-point operations are counted by formula and without what
is recomputed:

    slots x 6 x weights of the layers              (a multiply-add is two, the backward pass twice the forward pass)
    + trained tokens x 6 x weights of the head     (untrained positions never meet the head)
    + 12 x layers x heads x head_dim x sum over conversations of length x (length + 1) / 2

With LoRA a frozen weight has no gradient of its own and counts 4 in the place of 6; the adapters
beside it count 6. What XLA says of a program is not used: it counts the body of a scan once.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from mujica_jax.learning.trainer import StepMetrics, Trainer
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.layers import projections
from mujica_jax.runtime.chips import peak_flops_per_second
from mujica_jax.runtime.compile_counter import compile_counter
from mujica_jax.runtime.host_memory import peak_bytes
from mujica_jax.trajectories.packing import PackedRows

TRAINED, FROZEN = 6.0, 4.0  # operations a weight and token


class Throughput:
    """Figures of one phase's steps. Tokens and operations of a step are those of the average step
    over the phase's rows."""

    def __init__(
        self, trainer: Trainer, rows: PackedRows, *, done: int, seconds: Callable[[], float]
    ) -> None:
        """`done` steps were made before; `seconds` gives what learning has taken so far, without
        compiling and saving."""
        config, self._devices = trainer.config, trainer.mesh.size
        share = (
            config.rows_per_step / rows.num_rows
        )  # of all rows in a step; above 1 where rows are seen several times
        tokens = int(np.count_nonzero(rows.segment_ids))
        self._step_tokens = share * tokens
        self._step_flops = training_flops(
            trainer.model,
            slots=config.rows_per_step * rows.row_tokens,
            trained_tokens=share * rows.trained_tokens,
            pairs=share * attended_pairs(rows.segment_ids),
            lora_rank=config.lora_rank,
        )
        self._of_rows = {
            "packing_efficiency": rows.efficiency,
            "trained_fraction": rows.trained_tokens / tokens,
        }
        self._peak = peak_flops_per_second(list(trainer.mesh.devices.flat), config.dtype)
        self._seconds, self._programs = seconds, compile_counter().programs
        self._last = (done, seconds())

    def of(self, metrics: StepMetrics) -> dict[str, float | int]:
        """Speeds are those since the step that was asked for before."""
        (step, seconds), programs = self._last, compile_counter().programs
        self._last = (metrics.step, self._seconds())
        rate = (self._last[0] - step) / max(self._last[1] - seconds, 1e-9)
        found = {
            "tokens_per_second": rate * self._step_tokens,
            "tokens_per_second_per_device": rate * self._step_tokens / self._devices,
            "mfu": rate * self._step_flops / self._peak,
            **self._of_rows,
            "compiled_programs": programs - self._programs,
            **memory(),
        }
        self._programs = programs
        return found


def memory() -> dict[str, float | int]:
    """The most memory held so far: of this process, and of its fullest device where devices
    tell."""
    found: dict[str, float | int] = {"host_peak_bytes": peak_bytes()}
    told: list[Any] = [device.memory_stats() for device in jax.local_devices()]
    peaks = [
        statistics["peak_bytes_in_use"]
        for statistics in told
        if statistics and "peak_bytes_in_use" in statistics
    ]
    return found | ({"device_peak_bytes": max(peaks)} if peaks else {})


def training_flops(
    model: DecoderConfig,
    *,
    slots: int,
    trained_tokens: float | int,
    pairs: float | int,
    lora_rank: int = 0,
) -> float:
    """Of one step over this many slots, padding included; `pairs` of `attended_pairs`."""
    matrices = projections(model)
    each = FROZEN if lora_rank else TRAINED
    in_layers = each * sum(math.prod(weight.shape) for weight in matrices)
    for weight in matrices:
        in_layers += TRAINED * lora_rank * sum(weight.sides)
    return (
        slots * model.num_layers * in_layers
        + trained_tokens * each * model.vocab_size * model.hidden_size
        + 12.0 * model.num_layers * model.num_heads * model.head_dim * pairs
    )


def attended_pairs(segment_ids: Int[np.ndarray, "rows time"]) -> int:
    """Pairs of a token and one that it attends to, itself included, in the conversations of all
    rows; 0 marks padding."""
    total = 0
    for row in segment_ids:
        lengths = np.bincount(row[row > 0])
        total += int(np.sum(lengths * (lengths + 1) // 2))
    return total
