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
from mujica_jax.trajectories.packing import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPO(Loss):
    """Mean over the pairs (0 if there are none); its metrics: how often and by how much the chosen
    one gained more."""

    beta: float = 0.1

    @property
    def columns(self) -> tuple[str, ...]:
        return ("pairs", "reference_log_probs")

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        return super().counts(batch) | {"pairs": jnp.sum(_is_pair(_pairs(batch)), dtype=jnp.int32)}

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        # Chosen before the difference is summed: what an untrained token holds reaches neither
        # value nor gradient.
        gains = jnp.where(
            jnp.asarray(batch.loss_mask), log_probs - batch.columns["reference_log_probs"], 0.0
        )
        pairs = _pairs(batch)
        margin, is_pair = (
            self.beta * sum_by_id(jnp.sign(pairs) * gains, jnp.abs(pairs)),
            _is_pair(pairs),
        )
        # log sigmoid(x) as JAX has it: log(1 / (1 + exp(-x))) overflows where the rejected one is
        # far ahead.
        of_pairs = jnp.where(is_pair, jax.nn.log_sigmoid(margin), 0.0)
        return -divided(jnp.sum(of_pairs), counts["pairs"]), {
            "margin": divided(jnp.sum(jnp.where(is_pair, margin, 0.0)), counts["pairs"]),
            "accuracy": divided(jnp.sum(is_pair & (margin > 0)), counts["pairs"]),
        }


def _pairs(batch: Batch) -> Int[Array, "rows time"]:
    return jnp.asarray(batch.columns["pairs"]).astype(jnp.int32)


def _is_pair(pairs: Int[Array, "rows time"]) -> Array:
    """Which of a row's pair numbers are taken; 0 is padding."""
    return (sum_by_id(jnp.ones_like(pairs), jnp.abs(pairs)) > 0).at[:, 0].set(False)
