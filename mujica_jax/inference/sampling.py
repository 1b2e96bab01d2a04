"""Draw the next token, on the device.

A token is drawn by inverting the cumulative distribution with one uniform number a row: a Gumbel
draw needs one random number a vocabulary entry, which costs more than a small decoder's whole step
on CPU. The uniform number is a function of the request's seed and the token's position alone, so a
request gives the same tokens whatever else is in the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt32

# Two-level cumulative sums: over blocks, then inside the chosen block. 64 keeps both triangular
# products small for vocabularies from 512 (8 blocks) to 152k (2,376 blocks).
BLOCK_TOKENS = 64


def uniforms(
    seeds: UInt32[np.ndarray | Array, " batch"], positions: Int[np.ndarray | Array, " batch"]
) -> Float[Array, " batch"]:
    """Return one uniform number in [0, 1) for each row, a function of (seed, position) only."""

    def uniform(seed: ArrayLike, position: ArrayLike) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    return jax.vmap(uniform)(seeds, positions)


class Sampled(NamedTuple):
    """The token drawn in each row, and its log-probabilities."""

    token: Int[Array, " batch"]
    # Under the unmodified policy, at temperature 1: what a trainer needs.
    logprob: Float[Array, " batch"]
    # Under the distribution drawn from; 0 where the choice was greedy.
    sampling_logprob: Float[Array, " batch"]


class Filters(NamedTuple):
    """Which tokens may be drawn at all.

    Filters apply after the temperature, in this order, as in transformers.
    """

    # The k most likely tokens, and those as likely as the k-th; 0 means all.
    top_k: Int[np.ndarray | Array, " batch"]
    # The fewest likely tokens that hold this share of the probability; 1 means all.
    top_p: Float[np.ndarray | Array, " batch"]
    # Tokens at least this likely, as a share of the likeliest's probability; 0 means all.
    min_p: Float[np.ndarray | Array, " batch"]


def sample(
    logits: Float[Array, "batch vocab"],
    temperatures: Float[np.ndarray | Array, " batch"],
    uniform: Float[Array, " batch"],
    filters: Filters | None = None,
) -> Sampled:
    """Draw the next token of each row. Temperature 0 means greedy. `logits` must be float32.

    Without filters nothing is sorted: that costs more than a small decoder's whole step on CPU.
    """
    assert logits.dtype == jnp.float32, "log-probabilities are computed in float32"

    # Shifted before anything is summed: large logits would round away what tells them apart.
    peak = jnp.max(logits, axis=-1, keepdims=True)
    greedy = _first_index(logits == peak)
    shifted = logits - peak
    log_normaliser = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))

    # Draw from the weights.
    divisor = jnp.where(temperatures > 0, temperatures, 1.0)[:, None]
    weights = jnp.exp(shifted / divisor)
    if filters is not None:
        weights = _filtered(weights, filters)
    drawn, total = _invert(weights, uniform)

    # Rounding at a block's edge may point at a token of weight zero. Then take the mode, whose
    # weight is never zero.
    weight = jnp.take_along_axis(weights, drawn[:, None], axis=-1)[:, 0]
    by_chance = (temperatures > 0) & (weight > 0)
    token = jnp.where(by_chance, drawn, greedy)

    # Log-probabilities. The weight of the mode is exp(0) = 1.
    logit = jnp.take_along_axis(shifted, token[:, None], axis=-1)[:, 0]
    token_weight = jnp.where(by_chance, weight, 1.0)
    is_sampled = temperatures > 0
    sampling_logprob = jnp.log(token_weight) - jnp.log(total)
    zero_or_nan = logit - logit  # NaN where the logits are
    sampling_logprob = jnp.where(is_sampled, sampling_logprob, zero_or_nan)
    return Sampled(token, logit - log_normaliser, sampling_logprob)


def _filtered(
    weights: Float[Array, "batch vocab"], filters: Filters
) -> Float[Array, "batch vocab"]:
    """Set the weight of every token that may not be drawn to 0. The mode always may be drawn."""
    vocab = weights.shape[-1]
    descending = -jnp.sort(-weights, axis=-1)

    # Top k: the weight of the k-th token is the smallest that may be drawn.
    has_top_k = (filters.top_k > 0) & (filters.top_k < vocab)
    last = jnp.where(has_top_k, filters.top_k, vocab) - 1
    threshold = jnp.take_along_axis(descending, last[:, None], axis=-1)
    descending = jnp.where(descending >= threshold, descending, 0.0)

    # Top p: a token stays while those before it hold less than this share of what top k left. The
    # share is 0 where top_p is too small for a float.
    weight_before = jnp.cumsum(descending, axis=-1) - descending
    share = filters.top_p[:, None] * jnp.sum(descending, axis=-1, keepdims=True)
    stays = (weight_before < share) | (weight_before == 0) | (filters.top_p >= 1)[:, None]
    weights_in_p = jnp.where(stays & (descending > 0), descending, jnp.inf)
    threshold_of_p = jnp.min(weights_in_p, axis=-1, keepdims=True)

    # Min p is a share of the mode's weight, which is 1.
    threshold = jnp.maximum(jnp.maximum(threshold, threshold_of_p), filters.min_p[:, None])
    return jnp.where(weights >= threshold, weights, 0.0)


def _first_index(hits: Bool[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """Return the first True of each row, the last index where there is none.

    XLA's argmax on CPU is ten times slower.
    """
    vocab = hits.shape[-1]
    return jnp.min(jnp.where(hits, jnp.arange(vocab, dtype=jnp.int32), vocab - 1), axis=-1)


def _invert(
    weights: Float[Array, "batch vocab"], uniform: Float[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """Return (first index whose cumulative weight exceeds uniform * total, total)."""
    batch, vocab = weights.shape
    blocks = -(-vocab // BLOCK_TOKENS)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * BLOCK_TOKENS - vocab)))
    padded = padded.reshape(batch, blocks, BLOCK_TOKENS)

    # Find the block.
    block_weights = jnp.sum(padded, axis=-1)
    block_edges = _cumulative(block_weights)
    target = uniform * block_edges[:, -1]
    block = jnp.minimum(jnp.sum(block_edges <= target[:, None], axis=-1), blocks - 1)

    # Find the token inside of the block.
    block_start = jnp.take_along_axis(block_edges - block_weights, block[:, None], axis=-1)[:, 0]
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    edges = _cumulative(inside)
    offset = jnp.sum(edges <= (target - block_start)[:, None], axis=-1)
    offset = jnp.minimum(offset, BLOCK_TOKENS - 1)
    return jnp.minimum(block * BLOCK_TOKENS + offset, vocab - 1), block_edges[:, -1]


def _cumulative(values: Float[Array, "batch items"]) -> Float[Array, "batch items"]:
    """Return the cumulative sums of each row.

    For short rows a triangular product is faster on CPU than XLA's cumulative sum. Its cost grows
    with the square of their length.
    """
    items = values.shape[-1]
    if items > 512:
        return jnp.cumsum(values, axis=-1)
    triangle = jnp.triu(jnp.ones((items, items), values.dtype))
    return jax.lax.dot(values, triangle, precision=jax.lax.Precision.HIGHEST)
