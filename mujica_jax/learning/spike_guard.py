"""Loss spikes: skip and count updates whose loss or gradient norm stands out.

    skip where  x > mean + deviations * max(deviation, mean / 100)

Here x is the loss, or the gradient norm before clipping. Mean and standard deviation are over the
updates that this phase has made. Until there are `window` of them they weigh the same; after that,
weights fade by 1 / window an update. Before there are `window` updates nothing is skipped, because
the usual values are not known yet. Because of the floor of a hundredth, a loss that hardly moves
has no spikes.

A skipped update leaves parameters, moments and statistics as they were, bit for bit. The step
counts, so the next batch and the next learning rate follow. All of it happens inside the compiled
step (`learning.trainer`). The host reads the counts with the step's other metrics. After too many
skips in a row it ends the run, because then the run is broken and not a batch.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError

MIN_DEVIATION = 0.01  # as a share of the mean


class Spikes(NamedTuple):
    """Statistics of the updates of a phase, and counts of the skipped ones.

    Each pair is (loss, gradient norm).
    """

    updates: Int[Array, ""]  # made in this phase
    mean: Float[Array, "2"]
    variance: Float[Array, "2"]
    skipped: Int[Array, ""]  # in this phase
    in_a_row: Int[Array, ""]  # skipped since the last update


class TooManySpikesError(UserError):
    """Update after update stands out: the run, or its threshold, is broken."""


def no_spikes() -> Spikes:
    """Return the statistics at the beginning of a phase.

    A step takes over their buffers, so no two fields are one array.
    """
    return Spikes(
        updates=jnp.zeros((), jnp.int32),
        mean=jnp.zeros(2, jnp.float32),
        variance=jnp.zeros(2, jnp.float32),
        skipped=jnp.zeros((), jnp.int32),
        in_a_row=jnp.zeros((), jnp.int32),
    )


def detect_spike(
    spikes: Spikes,
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
    *,
    deviations: float,
    window: int,
) -> tuple[Bool[Array, ""], Spikes]:
    """Return whether this update is skipped, and the statistics after it."""
    values = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    deviation = jnp.maximum(jnp.sqrt(spikes.variance), MIN_DEVIATION * spikes.mean)
    has_window = spikes.updates >= window
    is_spike = has_window & jnp.any(values > spikes.mean + deviations * deviation)

    weight = 1.0 / jnp.minimum(spikes.updates + 1, window).astype(jnp.float32)
    difference = values - spikes.mean
    after_update = Spikes(
        updates=spikes.updates + 1,
        mean=spikes.mean + weight * difference,
        variance=(1.0 - weight) * (spikes.variance + weight * difference**2),
        skipped=spikes.skipped,
        in_a_row=jnp.zeros_like(spikes.in_a_row),
    )
    after_skip = spikes._replace(skipped=spikes.skipped + 1, in_a_row=spikes.in_a_row + 1)
    return is_spike, optax.tree.where(is_spike, after_skip, after_update)


def raise_if_too_many(values: dict[str, Any], *, step: int, max_skips: int) -> None:
    """Raise TooManySpikesError if too many updates in a row were skipped.

    `values` are the metrics of step `step`. More than `max_skips` are too many.
    """
    if values["skipped_in_a_row"] > max_skips:
        raise TooManySpikesError(
            f"step {step} is number {int(values['skipped_in_a_row'])} in a row whose update was "
            f"skipped, with loss {values['loss']:.4g} and gradient norm {values['grad_norm']:.4g}, "
            f"and trainer.max_skips_in_a_row is {max_skips}: lower the learning rate or raise "
            "trainer.spike_deviations"
        )
