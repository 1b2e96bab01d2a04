"""The clipped policy-gradient losses GRPO and DAPO.

    ratio_t     = exp(log p(x_t) - log p_sampled(x_t))              p_sampled: the policy that wrote the token
    objective_t = w_t min(ratio_t A, clip(ratio_t, 1 - clip_low, 1 + clip_high) A)
    w_t         = min(p_trainer(x_t) / p_engine(x_t), cap), or 1     (truncated importance sampling, below)
    A           = (reward - mean of its group) / std of its group   (Mujica-MyGO, section 3.2;
                                                                     "Learning When to Search", section 5)
    KL_t        = r - log r - 1,  r = p_reference(x_t) / p(x_t)     (DeepSeekMath, equation 4)

    GRPO: loss = - mean over conversations of the mean over their trained tokens of (objective_t - kl_coefficient KL_t)
                                                                               (DeepSeekMath, equation 3)
    DAPO: loss = - sum over all trained tokens of (objective_t - kl_coefficient KL_t) / number of them
                                                                               (DAPO, equation 8, which has no KL term)

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
from mujica_jax.trajectories.packing import Batch


def importance_weights(
    trainer: Float[np.ndarray, "rows time"], engine: Float[np.ndarray, "rows time"], *, cap: float
) -> Float[np.ndarray, "rows time"]:
    """w_t from the log-probabilities of the same tokens. The exponent is bounded, so that nothing
    overflows."""
    difference = np.minimum(trainer - engine, np.log(cap) + 1.0)
    return np.minimum(np.exp(difference), cap).astype(np.float32)


def group_advantages(
    rewards: Float[np.ndarray, "groups members"],
) -> Float[np.ndarray, "groups members"]:
    """How much better each attempt is than its group, all attempts at one question. Where all are
    equal it is 0."""
    above = rewards - rewards.mean(axis=1, keepdims=True)
    equal = (
        np.ptp(rewards, axis=1, keepdims=True) == 0
    )  # a mean of equal numbers may be off by rounding
    return np.where(equal, 0.0, above / np.where(equal, 1.0, rewards.std(axis=1, keepdims=True)))


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
        """Of each trained token, 0 elsewhere. Written so that a ratio on a bound is inside: its
        gradient is the ratio's own."""
        trained, advantages = jnp.asarray(batch.loss_mask), jnp.asarray(batch.columns["advantages"])
        # Chosen before the exponential: what an untrained token holds, even NaN, reaches neither
        # value nor gradient.
        log_ratio = jnp.where(trained, log_probs - batch.columns["sampled_log_probs"], 0.0)
        ratio = jnp.exp(log_ratio)
        above, below = ratio > 1 + self.clip_high, ratio < 1 - self.clip_low
        clipped = ((above & (advantages > 0)) | (below & (advantages < 0))) & trained
        bound = jnp.where(above, 1 + self.clip_high, 1 - self.clip_low)
        objective = jnp.where(trained, jnp.where(clipped, bound, ratio) * advantages, 0.0)
        if self.importance_weighted:
            objective *= jnp.where(trained, batch.columns["importance_weights"], 0.0)
        sums = {
            "clipped_share": clipped,
            "mean_ratio": jnp.where(trained, ratio, 0.0),
            "advantage_log_ratio": jnp.where(trained, advantages * log_ratio, 0.0),
        }
        if self.kl_coefficient:
            log_r = jnp.where(trained, batch.columns["reference_log_probs"] - log_probs, 0.0)
            sums["reference_kl"] = jnp.expm1(log_r) - log_r
            objective -= self.kl_coefficient * sums["reference_kl"]
        return objective, {
            name: divided(jnp.sum(each), counts["trained_tokens"]) for name, each in sums.items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(_Clipped):
    """Every conversation that has trained tokens counts the same, however long. 0 if there is
    none."""

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        return super().counts(batch) | {
            "conversations": jnp.sum(_tokens_of_segments(batch) > 0, dtype=jnp.int32)
        }

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        objective, metrics = self._objective(log_probs, batch, counts)
        tokens = jnp.take_along_axis(
            _tokens_of_segments(batch), jnp.asarray(batch.segment_ids), axis=1
        )
        return -divided(
            jnp.sum(objective / jnp.maximum(tokens, 1)), counts["conversations"]
        ), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class DAPO(_Clipped):
    """Every trained token counts the same. 0 if there is none."""

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        objective, metrics = self._objective(log_probs, batch, counts)
        return -divided(jnp.sum(objective), counts["trained_tokens"]), metrics


def _tokens_of_segments(batch: Batch) -> Int[Array, "rows segments"]:
    """How many trained tokens each conversation of a row has."""
    return sum_by_id(jnp.asarray(batch.loss_mask).astype(jnp.int32), jnp.asarray(batch.segment_ids))
