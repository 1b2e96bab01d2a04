"""Loss spikes: skip and count updates whose loss or gradient norm is unusually large.

    skip if  x > mean + deviations * max(deviation, mean / 100)

x is the loss, or the gradient norm before clipping. `mean` and `deviation` are the mean and the
standard deviation of x over the updates that this phase has made. The first `window` updates all
have the same weight. After them, each new update has the weight 1 / window, and older ones fade.
Nothing is skipped before there are `window` updates, because the usual values are not known yet.
The lower bound mean / 100 keeps small changes of a nearly constant loss from counting as spikes.

A skipped update leaves parameters, moments and statistics as they are, bit for bit. The step still
counts, so the next step has the next batch and the next learning rate. All of this happens inside
the compiled step (`learning.trainer`). The host reads the counts with the other metrics of the
step. After too many skips in a row it ends the run, because then the run is at fault and not a
single batch.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError

# Lower bound of the standard deviation, as a share of the mean.
MIN_DEVIATION = 0.01


class Spikes(NamedTuple):
    """Statistics of the updates of a phase, and counts of the skipped updates."""

    # Number of updates that this phase has made, without the skipped ones.
    updates: Int[Array, ""]
    # Mean and variance of (loss, gradient norm) over these updates.
    mean: Float[Array, "2"]
    variance: Float[Array, "2"]
    # Number of updates that this phase has skipped.
    skipped: Int[Array, ""]
    # Number of updates skipped since the last one that was made.
    in_a_row: Int[Array, ""]


class TooManySpikesError(UserError):
    """Too many updates in a row were skipped as spikes."""


def no_spikes() -> Spikes:
    """Return the statistics at the beginning of a phase.

    Each field is an array of its own, because a training step reuses the buffer of each field.
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
    """Return whether this update has to be skipped, and the statistics after it.

    An update is a spike if its loss or its gradient norm is more than `deviations` standard
    deviations above the mean. `window` is the number of updates that the statistics look back on.
    """
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
    """Raise TooManySpikesError if more than `max_skips` updates in a row were skipped.

    `values` are the metrics of step `step`.
    """
    if values["skipped_in_a_row"] > max_skips:
        raise TooManySpikesError(
            f"{int(values['skipped_in_a_row'])} updates in a row were skipped as spikes, the last "
            f"at step {step} with loss {values['loss']:.4g} and gradient norm "
            f"{values['grad_norm']:.4g}, but trainer.max_skips_in_a_row is {max_skips}: lower the "
            "learning rate or raise trainer.spike_deviations"
        )
