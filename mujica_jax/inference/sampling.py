"""Drawing the next token, on the device.

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
    """One uniform number in [0, 1) a row, a function of (seed, position) only."""

    def one(seed: ArrayLike, position: ArrayLike) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    return jax.vmap(one)(seeds, positions)


class Sampled(NamedTuple):
    token: Int[Array, " batch"]
    logprob: Float[
        Array, " batch"
    ]  # under the unmodified policy, at temperature 1: what a trainer needs
    sampling_logprob: Float[
        Array, " batch"
    ]  # under the distribution drawn from; 0 where the choice was greedy


class Filters(NamedTuple):
    """What may be drawn at all: applied after the temperature, in this order, as transformers
    does."""

    top_k: Int[
        np.ndarray | Array, " batch"
    ]  # the k most likely tokens, and those as likely as the k-th; 0 means all
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
    """The next token of each row. Temperature 0 means greedy. Log-probabilities are float32:
    `logits` must be.

    Without filters nothing is sorted: that costs more than a small decoder's whole step on CPU.
    """
    assert logits.dtype == jnp.float32, "log-probabilities are computed in float32"
    peak = jnp.max(logits, axis=-1, keepdims=True)
    greedy = _first_index(logits == peak)
    shifted = (
        logits - peak
    )  # shifted before anything is summed: large logits would round away what tells them apart
    log_normaliser = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    divisor = jnp.where(temperatures > 0, temperatures, 1.0)[:, None]
    weights = jnp.exp(shifted / divisor)
    if filters is not None:
        weights = _filtered(weights, filters)
    drawn, total = _invert(weights, uniform)
    # Rounding at a block's edge may point at a token of weight zero: fall back to the mode, which
    # never has it.
    weight = jnp.take_along_axis(weights, drawn[:, None], axis=-1)[:, 0]
    by_chance = (temperatures > 0) & (weight > 0)
    token = jnp.where(by_chance, drawn, greedy)
    chosen = jnp.take_along_axis(shifted, token[:, None], axis=-1)[:, 0]
    weight_of_mode = jnp.where(by_chance, weight, 1.0)
    # chosen - chosen is 0, or NaN where the logits are
    sampling = jnp.where(
        temperatures > 0, jnp.log(weight_of_mode) - jnp.log(total), chosen - chosen
    )
    return Sampled(token, chosen - log_normaliser, sampling)


def _filtered(
    weights: Float[Array, "batch vocab"], filters: Filters
) -> Float[Array, "batch vocab"]:
    """The weights with 0 for every token that may not be drawn. The mode always may."""
    vocab = weights.shape[-1]
    falling = -jnp.sort(-weights, axis=-1)
    last = jnp.where((filters.top_k > 0) & (filters.top_k < vocab), filters.top_k, vocab) - 1
    least = jnp.take_along_axis(falling, last[:, None], axis=-1)
    falling = jnp.where(falling >= least, falling, 0.0)
    # A token stays while those before it hold less than top_p of what top_k left.
    before = jnp.cumsum(falling, axis=-1) - falling
    held = filters.top_p[:, None] * jnp.sum(
        falling, axis=-1, keepdims=True
    )  # 0 where top_p is too small for a float
    stays = (before < held) | (before == 0) | (filters.top_p >= 1)[:, None]
    least_of_p = jnp.min(jnp.where(stays & (falling > 0), falling, jnp.inf), axis=-1, keepdims=True)
    least = jnp.maximum(jnp.maximum(least, least_of_p), filters.min_p[:, None])  # the mode weighs 1
    return jnp.where(weights >= least, weights, 0.0)


def _first_index(hits: Bool[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """The first True of each row, the last index where there is none. XLA's argmax on CPU is ten
    times slower."""
    vocab = hits.shape[-1]
    return jnp.min(jnp.where(hits, jnp.arange(vocab, dtype=jnp.int32), vocab - 1), axis=-1)


def _invert(
    weights: Float[Array, "batch vocab"], uniform: Float[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """(first index whose cumulative weight exceeds uniform * total, total)."""
    batch, vocab = weights.shape
    blocks = -(-vocab // BLOCK_TOKENS)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * BLOCK_TOKENS - vocab))).reshape(
        batch, blocks, BLOCK_TOKENS
    )
    block_weights = jnp.sum(padded, axis=-1)
    block_edges = _cumulative(block_weights)
    target = uniform * block_edges[:, -1]
    block = jnp.minimum(jnp.sum(block_edges <= target[:, None], axis=-1), blocks - 1)
    before = jnp.take_along_axis(block_edges - block_weights, block[:, None], axis=-1)[:, 0]
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    edges = _cumulative(inside)
    offset = jnp.minimum(jnp.sum(edges <= (target - before)[:, None], axis=-1), BLOCK_TOKENS - 1)
    return jnp.minimum(block * BLOCK_TOKENS + offset, vocab - 1), block_edges[:, -1]


def _cumulative(values: Float[Array, "batch items"]) -> Float[Array, "batch items"]:
    # A triangular product beats XLA's cumulative sum on CPU for short rows; long ones would square
    # their cost.
    items = values.shape[-1]
    if items > 512:
        return jnp.cumsum(values, axis=-1)
    return jax.lax.dot(
        values,
        jnp.triu(jnp.ones((items, items), values.dtype)),
        precision=jax.lax.Precision.HIGHEST,
    )
