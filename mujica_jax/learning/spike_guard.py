"""Loss spikes: an update whose loss or gradient norm stands out above those before it is skipped,
and counted.

    skip where  x > mean + deviations * max(deviation, mean / 100)    x: the loss, or the gradient norm before clipping

Mean and standard deviation are over the updates of this phase that were made: of all of them until
there are `window`, from then on with weights that fade by 1 / window an update. Before there are
`window` nothing is skipped, as what is usual is unknown. The floor of a hundredth keeps a loss that
hardly moves from looking wild.

A skipped update leaves parameters, moments and statistics as they were, bit for bit; the step
counts, so the next batch and the next learning rate come. All of it happens inside the compiled
step (`learning.trainer`): the host reads the counts with the step's other metrics and ends the run
after too many in a row, where not a batch but the run is broken.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError

MIN_DEVIATION = 0.01  # as a share of the mean


class Spikes(NamedTuple):
    """What is usual, and how often it was left. Each pair is (loss, gradient norm)."""

    updates: Int[Array, ""]  # made in this phase
    mean: Float[Array, "2"]
    variance: Float[Array, "2"]
    skipped: Int[Array, ""]  # in this phase
    in_a_row: Int[Array, ""]  # skipped since the last update


class TooManySpikes(UserError):
    """Update after update stands out: the run, or its threshold, is broken."""


def no_spikes() -> Spikes:
    """At the beginning of a phase. A step takes over its buffers, so no two fields are one
    array."""
    updates, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))
    return Spikes(updates, jnp.zeros(2, jnp.float32), jnp.zeros(2, jnp.float32), skipped, in_a_row)


def detect_spike(
    spikes: Spikes,
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
    *,
    deviations: float,
    window: int,
) -> tuple[Bool[Array, ""], Spikes]:
    """Whether this update is skipped, and what is known after it."""
    seen = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    usual = jnp.maximum(jnp.sqrt(spikes.variance), MIN_DEVIATION * spikes.mean)
    skip = (spikes.updates >= window) & jnp.any(seen > spikes.mean + deviations * usual)
    weight = 1.0 / jnp.minimum(spikes.updates + 1, window).astype(jnp.float32)
    difference = seen - spikes.mean
    taken = Spikes(
        updates=spikes.updates + 1,
        mean=spikes.mean + weight * difference,
        variance=(1.0 - weight) * (spikes.variance + weight * difference**2),
        skipped=spikes.skipped,
        in_a_row=jnp.zeros_like(spikes.in_a_row),
    )
    left = spikes._replace(skipped=spikes.skipped + 1, in_a_row=spikes.in_a_row + 1)
    return skip, optax.tree.where(skip, left, taken)


def raise_if_too_many(values: dict[str, Any], *, step: int, most: int) -> None:
    """Raises TooManySpikes where a step's metrics count more than `most` skipped updates in a
    row."""
    if values["skipped_in_a_row"] > most:
        raise TooManySpikes(
            f"step {step} is number {int(values['skipped_in_a_row'])} in a row whose update was "
            f"skipped, with loss {values['loss']:.4g} and gradient norm {values['grad_norm']:.4g}, "
            f"and trainer.max_skips_in_a_row is {most}: lower the learning rate or raise "
            "trainer.spike_deviations"
        )
