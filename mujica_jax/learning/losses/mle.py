"""Maximum likelihood.

    loss = - sum over trained t of log p(x_t | x_<t) / number of trained t
         + z_loss * sum over trained t of logsumexp(logits_t-1)^2 / number of trained t

Sums and numbers are over the whole batch, never over padding. The second line, off by default,
keeps logits from drifting by a constant, which log p does not see and bfloat16 does (ST-MoE, arXiv
2202.08906, equation 5).
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
    """Mean negative log-likelihood of the batch's trained tokens; 0 if there are none."""

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

        # Outside of the mask log-probabilities and normalizers are 0.
        loss = -divided(jnp.sum(scores.log_probs), trained_tokens)
        if has_z_loss:
            squares = jnp.sum(jnp.square(scores.log_normalizers))
            loss += divided(self.z_loss * squares, trained_tokens)
        return loss, {}
