"""Maximum likelihood.

    loss = - sum over trained t of log p(x_t | x_<t) / number of trained t    (over the whole batch, never over padding)
         + z_loss * sum over trained t of logsumexp(logits_t-1)^2 / number of trained t

The second line, off by default, keeps logits from drifting by a constant, which log p does not see
and bfloat16 does (ST-MoE, arXiv 2202.08906, equation 5).
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from mujica_jax.learning.log_probs import token_scores
from mujica_jax.learning.losses.loss import Counts, Loss, LossAndMetrics, divided
from mujica_jax.models.attention import Implementation
from mujica_jax.models.decoder import Decoder, Remat
from mujica_jax.trajectories.packing import Batch


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
        trained, normalized = jnp.asarray(batch.loss_mask), self.z_loss > 0
        found = token_scores(
            decoder,
            batch,
            trained,
            attention=attention,
            remat=remat,
            normalized=normalized,
            uniform=not normalized,
        )
        count = (self.counts(batch) if counts is None else counts)["trained_tokens"]
        loss = -divided(
            jnp.sum(found.log_probs), count
        )  # log_probs is 0 outside the mask, and so are the normalizers
        if normalized:
            loss += divided(self.z_loss * jnp.sum(jnp.square(found.log_normalizers)), count)
        return loss, {}
