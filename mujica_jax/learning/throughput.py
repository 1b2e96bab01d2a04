"""Speed and memory of training steps, for the training log.

The host computes all figures from numbers that it already has, so nothing here waits for a device.
The methods call this module for steps that are logged.

The speed is also given as a share of the peak of the devices (model FLOPs utilisation, MFU).
Floating-point operations of a step are counted by this formula, without those that
rematerialisation computes again:

    slots x 6 x weights of the layers
    + trained tokens x 6 x weights of the head
    + 12 x layers x heads x head_dim x sum over conversations of length x (length + 1) / 2

How to read it: a slot is one place of a row, and padding counts too. A multiply-add is two
operations, and the backward pass costs twice the forward pass, which makes 6 for each weight. The
head is computed only for trained tokens. The last line is attention: length x (length + 1) / 2 is
the number of pairs of a token and a token that it attends to.

With LoRA a frozen weight needs no gradient of its own and counts 4 instead of 6. The weights of the
adapters count 6. XLA's own count is not used, because it counts the body of a scan only once.
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

# Floating-point operations of the forward and the backward pass, per weight and token.
TRAINED = 6.0
FROZEN = 4.0


class Throughput:
    """The speed of the steps of one phase.

    Every step counts as many tokens and floating-point operations as an average step of the phase.
    """

    def __init__(
        self, trainer: Trainer, rows: PackedRows, *, done: int, seconds: Callable[[], float]
    ) -> None:
        """Start to measure, after the phase has made `done` steps.

        `rows` are all rows of the phase. `seconds` returns how many seconds training has taken so
        far, without the time for compiling and saving.
        """
        config = trainer.config
        self._devices = trainer.mesh.size

        # Rows of a batch, as a share of all rows. Above 1 if a batch has some rows several times.
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

        # Values at the last call of `of`.
        self._seconds = seconds
        self._last_programs = compile_counter().programs
        self._last_step = done
        self._last_seconds = seconds()

    def of(self, metrics: StepMetrics) -> dict[str, float | int]:
        """Return the figures for the metrics of a step, by their names in the training log.

        Speeds are averages since the last call.
        """
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
    """Return the peak of memory use so far, in bytes, by the names in the training log.

    `host_peak_bytes` is the peak of this process. `device_peak_bytes` is the highest peak of its
    devices, and is left out if they do not report their memory.
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
    """Return the floating-point operations of one step, by the formula of this module.

    `slots` is the number of places in its rows, with padding. `trained_tokens` is the number of its
    trained tokens, and `pairs` the number that `attended_pairs` returns. If `lora_rank` is above 0,
    only adapters are trained.
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
    """Return the number of pairs of a token and a token that it attends to, itself included.

    This is the sum over conversations of length x (length + 1) / 2. `segment_ids` number the
    conversations of each row, and 0 marks padding.
    """
    total = 0
    for row in segment_ids:
        lengths = np.bincount(row[row > 0])
        total += int(np.sum(lengths * (lengths + 1) // 2))
    return total
