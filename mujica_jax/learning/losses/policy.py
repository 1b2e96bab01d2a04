"""The clipped policy-gradient losses GRPO and DAPO, on log-probabilities of packed rows.

    ratio_t     = exp(log p(x_t) - log p_sampled(x_t))                         p_sampled: the policy that wrote the token
    objective_t = min(ratio_t A, clip(ratio_t, 1 - clip_low, 1 + clip_high) A)
    A           = (reward - mean of its group) / std of its group              (Mujica-MyGO, section 3.2; "Learning When to Search", 5)

    GRPO: loss = - mean over conversations of the mean over their trained tokens of objective_t           (DeepSeekMath, equation 3)
    DAPO: loss = - sum over all trained tokens of objective_t / number of them                            (DAPO, equation 8)

Differences from the papers. GRPO has no KL term to a reference policy and two clip bounds instead of one (give the same number twice for
the printed form). "Learning When to Search" prints |o_i| in front of the inner sum of its equation 3, which would make long answers
count with the square of their length; we read it as DAPO's own equation. It does not say whether std is a
sample's or a population's: we take the population's. Tokens that the policy did not write have no part in anything.

Pure functions of arrays: the log-probabilities come from `losses.token_log_probs`, so that a gradient goes through them.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Metrics = dict[str, Array]


def group_advantages(
    rewards: Float[np.ndarray, "groups members"], *, by_deviation: bool = True
) -> Float[np.ndarray, "groups members"]:
    """How much better each attempt is than its group, all attempts at one question. Where all are equal it is 0.

    `by_deviation` divides by the group's standard deviation, as both papers do. Without it, questions that are nearly always or
    nearly never answered weigh less ("Understanding R1-Zero-like training", arXiv 2503.20783).
    """
    above = rewards - rewards.mean(axis=1, keepdims=True)
    equal = np.ptp(rewards, axis=1, keepdims=True) == 0  # a mean of equal numbers may be off by rounding
    deviation = rewards.std(axis=1, keepdims=True) if by_deviation else np.ones_like(above)
    return np.where(equal, 0.0, above / np.where(equal, 1.0, deviation))


def grpo_loss(
    log_probs: Float[Array, "rows time"],
    sampled_log_probs: Float[Array | np.ndarray, "rows time"],
    advantages: Float[Array | np.ndarray, "rows time"],
    segment_ids: Int[Array | np.ndarray, "rows time"],
    trained: Bool[Array | np.ndarray, "rows time"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, ""], Metrics]:
    """Every conversation that has trained tokens counts the same, however long. 0 if there is none."""
    segments, trained = jnp.asarray(segment_ids), jnp.asarray(trained)
    objective, metrics = _objective(log_probs, sampled_log_probs, advantages, trained, clip_low, clip_high)
    rows = jnp.arange(segments.shape[0])[:, None]
    tokens_of_segment = jnp.zeros((segments.shape[0], segments.shape[1] + 1)).at[rows, segments].add(trained)
    conversations = jnp.sum(tokens_of_segment > 0)
    mean = objective / jnp.maximum(tokens_of_segment[rows, segments], 1.0)
    loss = -jnp.sum(mean) / jnp.maximum(conversations, 1)
    return loss, metrics | {"loss": loss, "conversations": conversations}


def dapo_loss(
    log_probs: Float[Array, "rows time"],
    sampled_log_probs: Float[Array | np.ndarray, "rows time"],
    advantages: Float[Array | np.ndarray, "rows time"],
    trained: Bool[Array | np.ndarray, "rows time"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, ""], Metrics]:
    """Every trained token counts the same. 0 if there is none."""
    trained = jnp.asarray(trained)
    objective, metrics = _objective(log_probs, sampled_log_probs, advantages, trained, clip_low, clip_high)
    loss = -jnp.sum(objective) / jnp.maximum(jnp.sum(trained), 1)
    return loss, metrics | {"loss": loss}


def _objective(
    log_probs: Array,
    sampled_log_probs: Array | np.ndarray,
    advantages: Array | np.ndarray,
    trained: Array,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "rows time"], Metrics]:
    """Of each trained token, 0 elsewhere. Written so that a ratio on a bound is inside: its gradient is the ratio's own."""
    assert 0 <= clip_low < 1 and clip_high >= 0, f"a ratio is kept between 1 - {clip_low} and 1 + {clip_high}"
    # Chosen before the exponential: what an untrained token holds, even NaN, reaches neither value nor gradient.
    ratio = jnp.exp(jnp.where(trained, log_probs - sampled_log_probs, 0.0))
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    clipped = ((above & (advantages > 0)) | (below & (advantages < 0))) & trained
    bound = jnp.where(above, 1 + clip_high, 1 - clip_low)
    objective = jnp.where(trained, jnp.where(clipped, bound, ratio) * advantages, 0.0)
    count = jnp.maximum(jnp.sum(trained), 1)
    return objective, {
        "trained_tokens": jnp.sum(trained, dtype=jnp.int32),
        "clipped_share": jnp.sum(clipped) / count,
        "mean_ratio": jnp.sum(jnp.where(trained, ratio, 0.0)) / count,
    }
