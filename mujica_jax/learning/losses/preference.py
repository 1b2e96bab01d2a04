"""Direct preference optimisation (arXiv 2305.18290, equation 7) on pairs of conversations that lie somewhere in packed rows.

    gain(y) = sum over trained t of y of (log p(x_t) - log p_reference(x_t))
    loss    = - mean over pairs of log sigmoid(beta (gain(chosen) - gain(rejected)))

The reference is the policy before training; its log-probabilities are computed once (`Trainer.score`) and given. DecEx-RAG published no
beta: ours is 0.1. A pure function of arrays: `log_probs` come from `losses.token_log_probs`, so that a gradient goes through them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

BETA = 0.1


class Pairs(NamedTuple):
    """Where the two conversations of each pair lie: row and first slot, as in `PackedRows.placements`. Row -1 is no pair: it fills up."""

    chosen: Int[np.ndarray | Array, "pairs 2"]
    rejected: Int[np.ndarray | Array, "pairs 2"]


def dpo_loss(
    log_probs: Float[Array, "rows time"],
    reference_log_probs: Float[Array | np.ndarray, "rows time"],
    segment_ids: Int[Array | np.ndarray, "rows time"],
    trained: Bool[Array | np.ndarray, "rows time"],
    pairs: Pairs,
    *,
    beta: float = BETA,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Mean over the pairs (0 if there are none), and its metrics: how often and by how much the chosen one gained more."""
    # Chosen before the difference is summed: what an untrained token holds reaches neither value nor gradient.
    gains = jnp.where(jnp.asarray(trained), log_probs - reference_log_probs, 0.0)
    segments = jnp.asarray(segment_ids)

    def gain(place: Int[Array, "pairs 2"]) -> Float[Array, "pairs"]:
        rows, slots = place[:, 0], place[:, 1]
        of_conversation = segments[rows] == segments[rows, slots][:, None]
        return jnp.sum(jnp.where(of_conversation, gains[rows], 0.0), axis=1)

    is_pair = jnp.asarray(pairs.chosen)[:, 0] >= 0
    count = jnp.maximum(jnp.sum(is_pair), 1)
    margin = beta * (gain(jnp.asarray(pairs.chosen)) - gain(jnp.asarray(pairs.rejected)))
    # log sigmoid(x) as JAX has it: log(1 / (1 + exp(-x))) overflows where the rejected one is far ahead.
    loss = -jnp.sum(jnp.where(is_pair, jax.nn.log_sigmoid(margin), 0.0)) / count
    return loss, {
        "loss": loss,
        "pairs": jnp.sum(is_pair, dtype=jnp.int32),
        "margin": jnp.sum(jnp.where(is_pair, margin, 0.0)) / count,
        "right_share": jnp.sum(is_pair & (margin > 0)) / count,
    }
