"""The clipped policy-gradient losses GRPO and DAPO.

    ratio_t     = exp(log p(x_t) - log p_sampled(x_t))
    objective_t = w_t min(ratio_t A, clip(ratio_t, 1 - clip_low, 1 + clip_high) A)
    w_t         = min(p_trainer(x_t) / p_engine(x_t), cap), or 1
    A           = (reward - mean of its group) / std of its group
    KL_t        = r - log r - 1,  r = p_reference(x_t) / p(x_t)

    GRPO: loss = - mean over conversations of the mean over their trained tokens of
                   (objective_t - kl_coefficient KL_t)
    DAPO: loss = - sum over all trained tokens of (objective_t - kl_coefficient KL_t)
                   / number of trained tokens

How to read it: x_t is a token that the policy wrote, and p is the policy that is trained. p_sampled
is the policy as it was when it sampled x_t. A is the advantage of the attempt that x_t belongs to.
A group holds all attempts at one question. w_t corrects for the rounding of the engine, as
explained below. p_reference is a frozen policy that the KL term keeps p close to. Tokens that the
policy did not write, such as prompts and passages, enter no sum and no count.

Sources:

- A: Mujica-MyGO, section 3.2, and "Learning When to Search", section 5
- KL_t: DeepSeekMath (arXiv 2402.03300), equation 4
- GRPO: DeepSeekMath, equation 3
- DAPO: DAPO (arXiv 2503.14476), equation 8, which has no KL term

Differences from the papers:

- GRPO has two clip bounds instead of one. Set both to the same number for the printed form.
- GRPO's mean runs over conversations. An attempt with one planner and three workers has four
  conversations, so it counts four times.
- "Learning When to Search" prints |o_i| in front of the inner sum of its equation 3. Taken
  literally, long answers would count with the square of their length. We read it as DAPO's
  equation.
- "Learning When to Search" does not say which standard deviation it divides by. We divide by that
  of the population (1/n, not 1/(n - 1)).

Importance weights: the engine and the trainer round differently, so the engine samples from a
policy that is not exactly the trainer's. With `importance_weighted`, p_sampled is what the trainer
computes for the policy that sampled. The weight w_t then corrects for the engine in expectation,
and its cap bounds the variance. This is truncated importance sampling (Yao et al., 2025, "Your
efficient RL framework secretly brings you off-policy RL training"). The KL term is not weighted.

Columns, each with one number for each token:

- `sampled_log_probs`: log p_sampled(x_t), from the engine (`packing.sampled_log_probs`) or from the
  trainer (`Trainer.score` of the policy that sampled)
- `advantages`: A, the same number for all tokens of an attempt
- `importance_weights`: w_t, only with `importance_weighted`
- `reference_log_probs`: log p_reference(x_t) from `Trainer.score`, only with a KL term
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
    """Return the importance weights w_t = min(p_trainer / p_engine, cap).

    `trainer` and `engine` hold the log-probabilities of the same tokens, under the same policy, as
    the trainer and as the engine computes them. The exponent is bounded, so nothing overflows.
    """
    difference = np.minimum(trainer - engine, np.log(cap) + 1.0)
    return np.minimum(np.exp(difference), cap).astype(np.float32)


def group_advantages(
    rewards: Float[np.ndarray, "groups members"],
) -> Float[np.ndarray, "groups members"]:
    """Return A = (reward - mean of its group) / std of its group.

    A row of `rewards` is a group, which holds all attempts at one question. An advantage says by
    how many standard deviations an attempt is better than the mean of its group. If all rewards of
    a group are equal, its advantages are 0.
    """
    above_mean = rewards - rewards.mean(axis=1, keepdims=True)
    # Compare the largest with the smallest reward: rounding may make the standard deviation of
    # equal numbers differ from 0.
    is_equal = np.ptp(rewards, axis=1, keepdims=True) == 0
    deviation = np.where(is_equal, 1.0, rewards.std(axis=1, keepdims=True))
    return np.where(is_equal, 0.0, above_mean / deviation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Clipped(Loss):
    """The clipped objective of each token, which GRPO and DAPO share."""

    # Ratios below 1 - clip_low are clipped where the advantage is negative.
    clip_low: float
    # Ratios above 1 + clip_high are clipped where the advantage is positive.
    clip_high: float
    # Whether the objective is multiplied by the column `importance_weights`.
    importance_weighted: bool = False
    # Weight of the KL penalty against the reference policy. 0 leaves the penalty out.
    kl_coefficient: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.clip_low < 1 and self.clip_high >= 0, (
            f"clip_low is {self.clip_low} and clip_high is {self.clip_high}; set clip_low to at "
            "least 0 and below 1, and clip_high to at least 0"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The extra columns that the loss reads. The module's docstring explains them."""
        weights = ("importance_weights",) if self.importance_weighted else ()
        reference = ("reference_log_probs",) if self.kl_coefficient else ()
        return ("sampled_log_probs", "advantages", *weights, *reference)

    def _objective(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> tuple[Float[Array, "rows time"], Metrics]:
        """Return objective_t - kl_coefficient KL_t of each token, and the metrics.

        Tokens that are not trained get 0. A ratio that is exactly at a bound is not clipped, so it
        has a gradient.

        The metrics are means over the trained tokens:

        - `clipped_share`: 1 for a token whose ratio is clipped, else 0
        - `mean_ratio`: ratio_t
        - `advantage_log_ratio`: A log(ratio_t)
        - `reference_kl`: KL_t, only with a KL term
        """
        trained = jnp.asarray(batch.loss_mask)
        advantages = jnp.asarray(batch.columns["advantages"])

        # Untrained tokens get 0 before the exponential. So whatever they hold, even NaN, changes
        # neither the value nor the gradient.
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
    """The clipped policy gradient in which every conversation has the same weight.

    The loss of a conversation is the mean over its trained tokens. Conversations without trained
    tokens do not count. The loss is 0 if no conversation has any.
    """

    def counts(self, batch: Batch) -> dict[str, Int[Array, ""]]:
        """Return the numbers of trained tokens and of conversations that have any."""
        counts = super().counts(batch)
        counts["conversations"] = jnp.sum(_trained_tokens(batch) > 0, dtype=jnp.int32)
        return counts

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        objective, metrics = self._objective(log_probs, batch, counts)
        # For each token: how many trained tokens its conversation has.
        tokens = jnp.take_along_axis(_trained_tokens(batch), jnp.asarray(batch.segment_ids), axis=1)
        total = jnp.sum(objective / jnp.maximum(tokens, 1))
        return -divided(total, counts["conversations"]), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class DAPO(_Clipped):
    """The clipped policy gradient in which every trained token has the same weight.

    The loss is 0 if there are no trained tokens.
    """

    def of(
        self, log_probs: Float[Array, "rows time"], batch: Batch, counts: Counts
    ) -> LossAndMetrics:
        objective, metrics = self._objective(log_probs, batch, counts)
        return -divided(jnp.sum(objective), counts["trained_tokens"]), metrics


def _trained_tokens(batch: Batch) -> Int[Array, "rows segments"]:
    """Return the number of trained tokens of each conversation of a row, by its segment id."""
    is_trained = jnp.asarray(batch.loss_mask).astype(jnp.int32)
    return sum_by_id(is_trained, jnp.asarray(batch.segment_ids))
