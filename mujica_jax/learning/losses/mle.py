"""Maximum likelihood.

    loss = - sum over trained t of log p(x_t | x_<t) / number of trained t
         + z_loss * sum over trained t of logsumexp(logits_t-1)^2 / number of trained t

t runs over the trained tokens of the whole batch. Padding and untrained tokens do not count. x_<t
are the tokens before x_t in its conversation, and logits_t-1 are the logits that predict x_t.

The second line is the z-loss (ST-MoE, arXiv 2202.08906, equation 5). It is off by default. A
constant that is added to all logits of a position leaves log p unchanged, so the first line lets
all logits drift together. Large logits are inexact in bfloat16. The z-loss holds their logsumexp
near 0.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from mujica_jax.learning.log_probs import token_scores
from mujica_jax.learning.losses.loss import Counts, Loss, LossAndMetrics, divided
from mujica_jax.learning.packing import Batch
from mujica_jax.models.attention import Implementation
from mujica_jax.models.decoder import Decoder, Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLE(Loss):
    """The mean negative log-likelihood of the trained tokens, or 0 if there are none."""

    # Weight of the squared log-normaliser of the logits. 0 turns the z-loss off.
    z_loss: float = 0.0

    def __call__(
        self,
        decoder: Decoder,
        batch: Batch,
        counts: Counts | None = None,
        *,
        attention: Implementation = "auto",
        remat: Remat | Literal["auto"] = "auto",
    ) -> LossAndMetrics:
        has_z_loss = self.z_loss > 0
        scores = token_scores(
            decoder,
            batch,
            jnp.asarray(batch.loss_mask),
            attention=attention,
            remat=remat,
            normalized=has_z_loss,
        )
        if counts is None:
            counts = self.counts(batch)
        trained_tokens = counts["trained_tokens"]

        # Log-probabilities and log-normalisers are 0 for all tokens that are not trained.
        loss = -divided(jnp.sum(scores.log_probs), trained_tokens)
        if has_z_loss:
            squares = jnp.sum(jnp.square(scores.log_normalizers))
            loss += divided(self.z_loss * squares, trained_tokens)
        return loss, {}
