"""Figures of a training step that the step itself does not compute: speed and memory.

The speed is also given as a share of the machine's peak. All of this is arithmetic on the host, on
numbers that are there already: nothing here waits for a device. Called by the methods for steps
that are logged. Floating-point operations are counted by formula, without those that are
recomputed:

    slots x 6 x weights of the layers
    + trained tokens x 6 x weights of the head
    + 12 x layers x heads x head_dim x sum over conversations of length x (length + 1) / 2

The 6: a multiply-add is two operations, and the backward pass costs twice the forward pass.
Untrained positions never meet the head. With LoRA a frozen weight has no gradient of its own and
counts 4 in the place of 6; the adapters beside it count 6. What XLA says of a program is not used:
it counts the body of a scan once.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from mujica_jax.learning.packing import PackedRows
from mujica_jax.learning.trainer import StepMetrics, Trainer
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.layers import projections
from mujica_jax.runtime.chips import peak_flops_per_second
from mujica_jax.runtime.compilation_cache import compile_counter
from mujica_jax.runtime.host_memory import peak_bytes

# Operations per weight and token.
TRAINED = 6.0
FROZEN = 4.0


class Throughput:
    """Figures of one phase's steps.

    Tokens and operations of a step are those of the average step over the phase's rows.
    """

    def __init__(
        self, trainer: Trainer, rows: PackedRows, *, done: int, seconds: Callable[[], float]
    ) -> None:
        """Start to measure after `done` steps.

        `seconds` returns the seconds that learning has taken so far, without compiling and saving.
        """
        config = trainer.config
        self._devices = trainer.mesh.size

        # A step's share of all rows; above 1 where a step sees rows several times.
        step_share = config.batch_size / rows.num_rows
        tokens = int(np.count_nonzero(rows.segment_ids))
        self._step_tokens = step_share * tokens
        self._step_flops = training_flops(
            trainer.model,
            slots=config.batch_size * rows.sequence_length,
            trained_tokens=step_share * rows.trained_tokens,
            pairs=step_share * attended_pairs(rows.segment_ids),
            lora_rank=config.lora_rank,
        )
        self._row_figures = {
            "packing_efficiency": rows.efficiency,
            "trained_fraction": rows.trained_tokens / tokens,
        }
        self._peak_flops = peak_flops_per_second(list(trainer.mesh.devices.flat), config.dtype)

        # State at the last reading.
        self._seconds = seconds
        self._last_programs = compile_counter().programs
        self._last_step = done
        self._last_seconds = seconds()

    def of(self, metrics: StepMetrics) -> dict[str, float | int]:
        """Return the figures of a step. Speeds are those since the last call."""
        programs = compile_counter().programs
        seconds = self._seconds()
        steps_per_second = (metrics.step - self._last_step) / max(
            seconds - self._last_seconds, 1e-9
        )
        figures = {
            "tokens_per_second": steps_per_second * self._step_tokens,
            "tokens_per_second_per_device": steps_per_second * self._step_tokens / self._devices,
            "mfu": steps_per_second * self._step_flops / self._peak_flops,
            **self._row_figures,
            "compiled_programs": programs - self._last_programs,
            **memory(),
        }
        self._last_programs = programs
        self._last_step = metrics.step
        self._last_seconds = seconds
        return figures


def memory() -> dict[str, float | int]:
    """Return the peak of memory so far, in bytes.

    The figures are of this process, and of its fullest device if devices report theirs.
    """
    figures: dict[str, float | int] = {"host_peak_bytes": peak_bytes()}
    device_peaks = []
    for device in jax.local_devices():
        statistics: Any = device.memory_stats()
        if statistics and "peak_bytes_in_use" in statistics:
            device_peaks.append(statistics["peak_bytes_in_use"])
    if device_peaks:
        figures["device_peak_bytes"] = max(device_peaks)
    return figures


def training_flops(
    model: DecoderConfig,
    *,
    slots: int,
    trained_tokens: float | int,
    pairs: float | int,
    lora_rank: int = 0,
) -> float:
    """Return the floating-point operations of one step.

    `slots` counts all places of its rows, padding included; `pairs` is the number that
    `attended_pairs` counts. A `lora_rank` above 0 means that only adapters are trained.
    """
    matrices = projections(model)
    flops_per_weight = FROZEN if lora_rank else TRAINED
    layer_flops = flops_per_weight * sum(math.prod(weight.shape) for weight in matrices)
    for weight in matrices:
        layer_flops += TRAINED * lora_rank * sum(weight.sides)
    return (
        slots * model.num_layers * layer_flops
        + trained_tokens * flops_per_weight * model.vocab_size * model.hidden_size
        + 12.0 * model.num_layers * model.num_heads * model.head_dim * pairs
    )


def attended_pairs(segment_ids: Int[np.ndarray, "rows time"]) -> int:
    """Count the pairs of a token and a token that it attends to, itself included.

    `segment_ids` number the conversations of each row, and 0 marks padding.
    """
    total = 0
    for row in segment_ids:
        lengths = np.bincount(row[row > 0])
        total += int(np.sum(lengths * (lengths + 1) // 2))
    return total
