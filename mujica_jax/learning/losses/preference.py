"""Direct preference optimisation (arXiv 2305.18290, equation 7) on pairs of conversations.

    gain(y) = sum over trained t of y of (log p(x_t) - log p_reference(x_t))
    loss    = - mean over pairs of log sigmoid(beta (gain(chosen) - gain(rejected)))

A pair has two conversations: the chosen one, which is better, and the rejected one. The gain of a
conversation y is the amount by which training has raised its log-probability. The loss falls when
the chosen conversation gains more than the rejected one. The reference is the policy before
training. `Trainer.score` computes its log-probabilities once, before the first step.

`packing.pack(..., pairs=True)` puts both conversations of a pair into one row. So a pair is never
split between two parts of a batch or between two devices.

Columns, each with one number for each token:

- `pairs`: made by `packing.pack`. In the n-th pair of a row, tokens of the chosen conversation have
  +n and tokens of the rejected one have -n. Padding has 0.
- `reference_log_probs`: log p_reference(x_t)

DecEx-RAG trains with this loss and publishes no beta. Our default is 0.1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mujica_jax.learning.losses.loss import Counts, Loss, LossAndMetrics, divided, sum_by_id
from mujica_jax.learning.packing import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPO(Loss):
    """The mean DPO loss over the pairs of a batch, or 0 if there are no pairs.

    Metrics: `margin` is the mean of beta (gain(chosen) - gain(rejected)). `accuracy` is the share
    of pairs whose margin is positive.
    """

    # Scale of the difference of the gains (beta in equation 7). A larger beta keeps the policy
    # closer to the reference.
    beta: float = 0.1

    @property
    def columns(self) -> tuple[str, ...]:
        return ("pairs", "reference_log_probs")

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        """Return the numbers of trained tokens and of pairs."""
        counts = super().counts(batch)
        counts["pairs"] = jnp.sum(_is_pair(_pairs(batch)), dtype=jnp.int32)
        return counts

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        # Untrained tokens get 0 before the sum. So whatever they hold, even NaN, changes neither
        # the value nor the gradient.
        trained = jnp.asarray(batch.loss_mask)
        gains = jnp.where(trained, log_probs - batch.columns["reference_log_probs"], 0.0)

        # For each pair number: beta (gain(chosen) - gain(rejected)).
        pairs = _pairs(batch)
        margin = self.beta * sum_by_id(jnp.sign(pairs) * gains, jnp.abs(pairs))
        is_pair = _is_pair(pairs)

        # JAX's log_sigmoid is stable. log(1 / (1 + exp(-x))) would overflow for a pair whose
        # rejected conversation gained much more.
        log_likelihoods = jnp.where(is_pair, jax.nn.log_sigmoid(margin), 0.0)
        loss = -divided(jnp.sum(log_likelihoods), counts["pairs"])
        return loss, {
            "margin": divided(jnp.sum(jnp.where(is_pair, margin, 0.0)), counts["pairs"]),
            "accuracy": divided(jnp.sum(is_pair & (margin > 0)), counts["pairs"]),
        }


def _pairs(batch: Batch) -> Int[Array, "rows time"]:
    """Return the pair number of each token: positive if chosen, negative if rejected, else 0."""
    return jnp.asarray(batch.columns["pairs"]).astype(jnp.int32)


def _is_pair(pairs: Int[Array, "rows time"]) -> Array:
    """Return, for each row and each pair number, whether the row has a pair of this number.

    The shape is [rows, time + 1]. Number 0 is padding and never a pair.
    """
    token_counts = sum_by_id(jnp.ones_like(pairs), jnp.abs(pairs))
    return (token_counts > 0).at[:, 0].set(False)
