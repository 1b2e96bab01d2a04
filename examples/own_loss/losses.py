"""Maximum likelihood in which every conversation has the same weight.

    loss = - mean over conversations of the mean over their trained t of log p(x_t | x_<t)

The package's own maximum likelihood is a mean over tokens, so a long conversation weighs more than a
short one. Here a planner with ten turns weighs as much as a worker with one.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mujica_jax.learning.losses.loss import Counts, Loss, LossAndMetrics, divided, sum_by_id
from mujica_jax.learning.packing import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class EqualConversations(Loss):
    """The negative log-likelihood: the mean over each conversation, then over conversations."""

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        """Return the numbers of trained tokens and of conversations that have any."""
        counts = super().counts(batch)
        counts["conversations"] = jnp.sum(_trained_tokens(batch) > 0, dtype=jnp.int32)
        return counts

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        """Return the loss of a batch, and no metrics. Untrained tokens have log-probability 0."""
        log_likelihoods = sum_by_id(log_probs, jnp.asarray(batch.segment_ids))
        means = log_likelihoods / jnp.maximum(_trained_tokens(batch), 1)
        return -divided(jnp.sum(means), counts["conversations"]), {}


def _trained_tokens(batch: Batch) -> Int[Array, "rows segments"]:
    """Return the number of trained tokens of each conversation of a row, by its segment id."""
    is_trained = jnp.asarray(batch.loss_mask).astype(jnp.int32)
    return sum_by_id(is_trained, jnp.asarray(batch.segment_ids))
