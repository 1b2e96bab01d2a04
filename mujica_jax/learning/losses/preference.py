"""Direct preference optimisation (arXiv 2305.18290, equation 7) on pairs of conversations.

    gain(y) = sum over trained t of y of (log p(x_t) - log p_reference(x_t))
    loss    = - mean over pairs of log sigmoid(beta (gain(chosen) - gain(rejected)))

Both conversations of a pair stand in one row (`packing.pack(..., pairs=True)`), so a pair is whole
in every part of a batch and on every device. Columns: `pairs`, which that makes (+n at the tokens
of the chosen conversation of the row's n-th pair, -n at those of the rejected one), and
`reference_log_probs`: the reference is the policy before training, scored once (`Trainer.score`).
DecEx-RAG published no beta: ours is 0.1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mujica_jax.learning.losses.loss import Counts, Loss, LossAndMetrics, divided, sum_by_id
from mujica_jax.learning.packing import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPO(Loss):
    """The mean DPO loss over the pairs of a batch, 0 if there are none.

    The metrics say how often (`accuracy`) and by how much (`margin`) the chosen conversation gained
    more than the rejected one.
    """

    beta: float = 0.1

    @property
    def columns(self) -> tuple[str, ...]:
        return ("pairs", "reference_log_probs")

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        counts = super().counts(batch)
        counts["pairs"] = jnp.sum(_is_pair(_pairs(batch)), dtype=jnp.int32)
        return counts

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        # Selected before the difference is summed: what an untrained token holds reaches neither
        # value nor gradient.
        trained = jnp.asarray(batch.loss_mask)
        gains = jnp.where(trained, log_probs - batch.columns["reference_log_probs"], 0.0)

        # beta (gain(chosen) - gain(rejected)) of each pair.
        pairs = _pairs(batch)
        margin = self.beta * sum_by_id(jnp.sign(pairs) * gains, jnp.abs(pairs))
        is_pair = _is_pair(pairs)

        # log sigmoid(x) as JAX has it: log(1 / (1 + exp(-x))) overflows where the rejected one is
        # far ahead.
        log_likelihoods = jnp.where(is_pair, jax.nn.log_sigmoid(margin), 0.0)
        loss = -divided(jnp.sum(log_likelihoods), counts["pairs"])
        return loss, {
            "margin": divided(jnp.sum(jnp.where(is_pair, margin, 0.0)), counts["pairs"]),
            "accuracy": divided(jnp.sum(is_pair & (margin > 0)), counts["pairs"]),
        }


def _pairs(batch: Batch) -> Int[Array, "rows time"]:
    """Return the pair number of each token, negative for rejected ones."""
    return jnp.asarray(batch.columns["pairs"]).astype(jnp.int32)


def _is_pair(pairs: Int[Array, "rows time"]) -> Array:
    """Return which of a row's pair numbers belong to a pair; 0 is padding."""
    token_counts = sum_by_id(jnp.ones_like(pairs), jnp.abs(pairs))
    return (token_counts > 0).at[:, 0].set(False)
