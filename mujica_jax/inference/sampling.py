"""Sample the next token of each request from the logits, on the device.

Each draw uses one uniform random number per row and inverts the cumulative distribution of the
tokens. The Gumbel trick would need one random number per vocabulary entry. On CPU that costs more
than a whole decode step of a small model.

The uniform number depends only on the request's seed and on the position of the token. So a request
gets the same tokens in every batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt32

# Tokens per block. The cumulative sum is computed in two levels: over the blocks of the vocabulary,
# then inside the chosen block. 64 keeps both levels short for vocabularies from 512 tokens (8
# blocks) to 152k tokens (2,376 blocks).
BLOCK_TOKENS = 64


def uniforms(
    seeds: UInt32[np.ndarray | Array, " batch"], positions: Int[np.ndarray | Array, " batch"]
) -> Float[Array, " batch"]:
    """Return one uniform random number in [0, 1) per row. It depends on seed and position only."""

    def uniform(seed: ArrayLike, position: ArrayLike) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    return jax.vmap(uniform)(seeds, positions)


class Sampled(NamedTuple):
    """The sampled token of each row, and its log-probabilities."""

    token: Int[Array, " batch"]
    # Log-probability under the policy itself: temperature 1, no filters. Training uses this one.
    logprob: Float[Array, " batch"]
    # Log-probability under the distribution that the token was drawn from, after temperature and
    # filters. 0 for greedy decoding.
    sampling_logprob: Float[Array, " batch"]


class Filters(NamedTuple):
    """Filters that restrict which tokens can be drawn, one value per row.

    The filters apply after the temperature, in the order top_k, top_p, min_p, as in transformers.
    """

    # Keep the k most likely tokens, and all tokens as likely as the k-th. 0 keeps all tokens.
    top_k: Int[np.ndarray | Array, " batch"]
    # Keep the smallest set of most likely tokens whose probabilities sum to at least top_p. 1 keeps
    # all tokens.
    top_p: Float[np.ndarray | Array, " batch"]
    # Keep tokens whose probability is at least min_p times the largest one. 0 keeps all tokens.
    min_p: Float[np.ndarray | Array, " batch"]


def sample(
    logits: Float[Array, "batch vocab"],
    temperatures: Float[np.ndarray | Array, " batch"],
    uniform: Float[Array, " batch"],
    filters: Filters | None = None,
) -> Sampled:
    """Sample the next token of each row.

    `logits` must be float32. A temperature of 0 means greedy decoding. `uniform` holds one random
    number in [0, 1) per row, from `uniforms`. Pass `filters=None` if no row has a filter: the
    vocabulary is then not sorted, because on CPU that costs more than a decode step of a small
    model.
    """
    assert logits.dtype == jnp.float32, "logits must be float32, for exact log-probabilities"

    # Subtract the maximum first. The sum over large logits would lose small differences.
    peak = jnp.max(logits, axis=-1, keepdims=True)
    greedy = _first_index(logits == peak)
    shifted = logits - peak
    log_normaliser = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))

    # Draw from the unnormalised probabilities.
    divisor = jnp.where(temperatures > 0, temperatures, 1.0)[:, None]
    weights = jnp.exp(shifted / divisor)
    if filters is not None:
        weights = _filtered(weights, filters)
    drawn, total = _invert(weights, uniform)

    # Because of rounding at the edge of a block, the drawn token may have weight zero. Then take
    # the most likely token, whose weight is never zero.
    weight = jnp.take_along_axis(weights, drawn[:, None], axis=-1)[:, 0]
    by_chance = (temperatures > 0) & (weight > 0)
    token = jnp.where(by_chance, drawn, greedy)

    # Compute the log-probabilities. The weight of the most likely token is exp(0) = 1.
    logit = jnp.take_along_axis(shifted, token[:, None], axis=-1)[:, 0]
    token_weight = jnp.where(by_chance, weight, 1.0)
    is_sampled = temperatures > 0
    sampling_logprob = jnp.log(token_weight) - jnp.log(total)
    # For greedy decoding the value is 0. It is NaN where the logits are NaN, so callers notice.
    zero_or_nan = logit - logit
    sampling_logprob = jnp.where(is_sampled, sampling_logprob, zero_or_nan)
    return Sampled(token, logit - log_normaliser, sampling_logprob)


def _filtered(
    weights: Float[Array, "batch vocab"], filters: Filters
) -> Float[Array, "batch vocab"]:
    """Set the weights of all tokens that the filters exclude to 0.

    `weights` are unnormalised probabilities, and the largest weight of each row is 1. The most
    likely token is never excluded.
    """
    vocab = weights.shape[-1]
    descending = -jnp.sort(-weights, axis=-1)

    # Top k: a token must weigh at least as much as the k-th most likely token.
    has_top_k = (filters.top_k > 0) & (filters.top_k < vocab)
    last = jnp.where(has_top_k, filters.top_k, vocab) - 1
    threshold = jnp.take_along_axis(descending, last[:, None], axis=-1)
    descending = jnp.where(descending >= threshold, descending, 0.0)

    # Top p: keep a token if the more likely tokens together weigh less than top_p times the total
    # that top k kept. `share` is 0 if top_p is too small for a float32; the first token is then
    # kept by the second condition.
    weight_before = jnp.cumsum(descending, axis=-1) - descending
    share = filters.top_p[:, None] * jnp.sum(descending, axis=-1, keepdims=True)
    stays = (weight_before < share) | (weight_before == 0) | (filters.top_p >= 1)[:, None]
    weights_in_p = jnp.where(stays & (descending > 0), descending, jnp.inf)
    threshold_of_p = jnp.min(weights_in_p, axis=-1, keepdims=True)

    # Min p: the largest weight is 1, so min_p itself is the threshold.
    threshold = jnp.maximum(jnp.maximum(threshold, threshold_of_p), filters.min_p[:, None])
    return jnp.where(weights >= threshold, weights, 0.0)


def _first_index(hits: Bool[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """Return the index of the first True in each row, or the last index if there is no True.

    On CPU this is ten times faster than XLA's argmax.
    """
    vocab = hits.shape[-1]
    return jnp.min(jnp.where(hits, jnp.arange(vocab, dtype=jnp.int32), vocab - 1), axis=-1)


def _invert(
    weights: Float[Array, "batch vocab"], uniform: Float[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """Invert the cumulative distribution of each row.

    Returns (index, total): the first index whose cumulative weight exceeds uniform * total, and the
    sum of all weights. The cumulative sums are computed over blocks of BLOCK_TOKENS tokens, then
    inside one block.
    """
    batch, vocab = weights.shape
    blocks = -(-vocab // BLOCK_TOKENS)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * BLOCK_TOKENS - vocab)))
    padded = padded.reshape(batch, blocks, BLOCK_TOKENS)

    # Find the block.
    block_weights = jnp.sum(padded, axis=-1)
    block_edges = _cumulative(block_weights)
    target = uniform * block_edges[:, -1]
    block = jnp.minimum(jnp.sum(block_edges <= target[:, None], axis=-1), blocks - 1)

    # Find the token inside the block.
    block_start = jnp.take_along_axis(block_edges - block_weights, block[:, None], axis=-1)[:, 0]
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    edges = _cumulative(inside)
    offset = jnp.sum(edges <= (target - block_start)[:, None], axis=-1)
    offset = jnp.minimum(offset, BLOCK_TOKENS - 1)
    return jnp.minimum(block * BLOCK_TOKENS + offset, vocab - 1), block_edges[:, -1]


def _cumulative(values: Float[Array, "batch items"]) -> Float[Array, "batch items"]:
    """Return the cumulative sums of each row.

    For short rows, the product with a triangular matrix is faster on CPU than XLA's cumulative sum.
    Its cost grows with the square of the row length, so rows with more than 512 items use XLA's
    cumulative sum.
    """
    items = values.shape[-1]
    if items > 512:
        return jnp.cumsum(values, axis=-1)
    triangle = jnp.triu(jnp.ones((items, items), values.dtype))
    return jax.lax.dot(values, triangle, precision=jax.lax.Precision.HIGHEST)
