"""The clipped policy-gradient losses GRPO and DAPO.

    ratio_t     = exp(log p(x_t) - log p_sampled(x_t))
    objective_t = w_t min(ratio_t A, clip(ratio_t, 1 - clip_low, 1 + clip_high) A)
    w_t         = min(p_trainer(x_t) / p_engine(x_t), cap), or 1
    A           = (reward - mean of its group) / std of its group
    KL_t        = r - log r - 1,  r = p_reference(x_t) / p(x_t)

    GRPO: loss = - mean over conversations of the mean over their trained tokens of
                   (objective_t - kl_coefficient KL_t)
    DAPO: loss = - sum over all trained tokens of (objective_t - kl_coefficient KL_t)
                   / number of them

p_sampled is the policy that wrote the token. w_t is truncated importance sampling, see below.
Sources: A is that of Mujica-MyGO, section 3.2, and of "Learning When to Search", section 5; KL_t is
DeepSeekMath, equation 4; GRPO is DeepSeekMath, equation 3; DAPO is DAPO, equation 8, which has no
KL term.

Differences from the papers. GRPO has two clip bounds instead of one (give the same number twice for
the printed form), and its mean is over conversations: an attempt with several workers counts as
many times. "Learning When to Search" prints |o_i| in front of the inner sum of its equation 3,
which would make long answers count with the square of their length; we read it as DAPO's own
equation. It does not say whether std is a sample's or a population's: we take the population's.
Tokens that the policy did not write have no part in anything.

Engine and trainer round differently, so the engine samples from a policy that is not quite the
trainer's. With `importance_weighted`, p_sampled is the trainer's own number and the column
`importance_weights` holds w_t, which makes up for the difference in expectation; the cap bounds its
variance (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
training"). The KL term is not weighed.

Columns: `sampled_log_probs` (`packing.sampled_log_probs`, or `Trainer.score` of the policy that
sampled), `advantages`, `importance_weights` if asked for, and with a KL term `reference_log_probs`
(`Trainer.score` of the reference).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mujica_jax.learning.losses.loss import (
    Counts,
    Loss,
    LossAndMetrics,
    Metrics,
    divided,
    sum_by_id,
)
from mujica_jax.learning.packing import Batch


def importance_weights(
    trainer: Float[np.ndarray, "rows time"], engine: Float[np.ndarray, "rows time"], *, cap: float
) -> Float[np.ndarray, "rows time"]:
    """Return w_t from the trainer's and the engine's log-probabilities of the same tokens.

    The exponent is bounded, so nothing overflows.
    """
    difference = np.minimum(trainer - engine, np.log(cap) + 1.0)
    return np.minimum(np.exp(difference), cap).astype(np.float32)


def group_advantages(
    rewards: Float[np.ndarray, "groups members"],
) -> Float[np.ndarray, "groups members"]:
    """Return by how many standard deviations each attempt is better than its group's mean.

    A group holds all attempts at one question. Where all its rewards are equal, the advantage is 0.
    """
    above_mean = rewards - rewards.mean(axis=1, keepdims=True)
    # By the range: a mean of equal numbers may be off by rounding.
    is_equal = np.ptp(rewards, axis=1, keepdims=True) == 0
    deviation = np.where(is_equal, 1.0, rewards.std(axis=1, keepdims=True))
    return np.where(is_equal, 0.0, above_mean / deviation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Clipped(Loss):
    clip_low: float
    clip_high: float
    importance_weighted: bool = False
    kl_coefficient: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.clip_low < 1 and self.clip_high >= 0, (
            f"a ratio is kept between 1 - {self.clip_low} and 1 + {self.clip_high}"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        weights = ("importance_weights",) if self.importance_weighted else ()
        reference = ("reference_log_probs",) if self.kl_coefficient else ()
        return ("sampled_log_probs", "advantages", *weights, *reference)

    def _objective(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> tuple[Float[Array, "rows time"], Metrics]:
        """Return the objective of each trained token, 0 elsewhere, and the metrics.

        A ratio on a bound counts as inside: its gradient is the ratio's own.
        """
        trained = jnp.asarray(batch.loss_mask)
        advantages = jnp.asarray(batch.columns["advantages"])

        # Selected before the exponential: what an untrained token holds, even NaN, reaches neither
        # value nor gradient.
        log_ratio = jnp.where(trained, log_probs - batch.columns["sampled_log_probs"], 0.0)
        ratio = jnp.exp(log_ratio)
        is_above = ratio > 1 + self.clip_high
        is_below = ratio < 1 - self.clip_low
        is_worse = (is_above & (advantages > 0)) | (is_below & (advantages < 0))
        is_clipped = is_worse & trained
        bound = jnp.where(is_above, 1 + self.clip_high, 1 - self.clip_low)
        clipped_ratio = jnp.where(is_clipped, bound, ratio)
        objective = jnp.where(trained, clipped_ratio * advantages, 0.0)
        if self.importance_weighted:
            objective *= jnp.where(trained, batch.columns["importance_weights"], 0.0)

        token_metrics = {
            "clipped_share": is_clipped,
            "mean_ratio": jnp.where(trained, ratio, 0.0),
            "advantage_log_ratio": jnp.where(trained, advantages * log_ratio, 0.0),
        }
        if self.kl_coefficient:
            log_r = jnp.where(trained, batch.columns["reference_log_probs"] - log_probs, 0.0)
            token_metrics["reference_kl"] = jnp.expm1(log_r) - log_r
            objective -= self.kl_coefficient * token_metrics["reference_kl"]

        metrics = {}
        for name, values in token_metrics.items():
            metrics[name] = divided(jnp.sum(values), counts["trained_tokens"])
        return objective, metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(_Clipped):
    """The clipped objective with the same weight for every conversation, however long.

    Only conversations with trained tokens count. The loss is 0 if there are none.
    """

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        counts = super().counts(batch)
        counts["conversations"] = jnp.sum(_trained_tokens(batch) > 0, dtype=jnp.int32)
        return counts

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        objective, metrics = self._objective(log_probs, batch, counts)
        # The trained tokens of the conversation that each token belongs to.
        tokens = jnp.take_along_axis(_trained_tokens(batch), jnp.asarray(batch.segment_ids), axis=1)
        total = jnp.sum(objective / jnp.maximum(tokens, 1))
        return -divided(total, counts["conversations"]), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class DAPO(_Clipped):
    """Every trained token counts the same. 0 if there is none."""

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        objective, metrics = self._objective(log_probs, batch, counts)
        return -divided(jnp.sum(objective), counts["trained_tokens"]), metrics


def _trained_tokens(batch: Batch) -> Int[Array, "rows segments"]:
    """Count the trained tokens of each conversation of a row."""
    is_trained = jnp.asarray(batch.loss_mask).astype(jnp.int32)
    return sum_by_id(is_trained, jnp.asarray(batch.segment_ids))
