"""Attention of long packed rows on a CPU, block by block: blocks of keys that no query of a block sees are never
multiplied.

A packed row holds several conversations, and attention never crosses from one into another. Each block of queries walks
over the blocks of keys from the one where its first conversation begins to its own, with a running maximum and sum, so
that scores exist for one pair of blocks at a time (FlashAttention, Dao et al. 2022, algorithm 1). The gradient is
written out, for a loop whose length is data has no derived one; it computes the weights again from the normalizers
(algorithm 4).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK_TOKENS = 64  # smaller ones skip more and leave a product too little work
MASKED_SCORE = -1e30  # finite: a difference of two of them is 0, where that of two infinities would be NaN


def block_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time kv_heads head_dim"],
    value: Float[Array, "batch time kv_heads head_dim"],
    segment_ids: Int[Array, "batch time"],
) -> Float[Array, "batch time heads head_dim"]:
    """As `attention.segment_attention`, of segments without gaps; rows one after the other, each with blocks of its
    own. In float32: of bfloat16 such small products would be slower on a CPU."""
    batch, time, heads, head_dim = query.shape
    kv_heads, blocks = key.shape[2], -(-time // BLOCK_TOKENS)
    sharing = heads // kv_heads

    def cut(array: Array, *axes: int) -> Array:
        """Filled up to whole blocks, with the axes of heads as given: [batch, blocks, *axes, block, head_dim]."""
        filled = jnp.pad(array.astype(jnp.float32), ((0, 0), (0, blocks * BLOCK_TOKENS - time), (0, 0), (0, 0)))
        parts = filled.reshape(batch, blocks, BLOCK_TOKENS, *axes, head_dim)
        return jnp.moveaxis(parts, 2, -2)

    # Query heads that share a key head are the rows of one product.
    queries = cut(query, kv_heads, sharing).reshape(batch, blocks, kv_heads, -1, head_dim) / math.sqrt(head_dim)
    segments = jnp.pad(segment_ids, ((0, 0), (0, blocks * BLOCK_TOKENS - time)))
    begins = jnp.argmax(segments[:, ::BLOCK_TOKENS, None] == segments[:, None, :], axis=-1)
    of_rows = (
        queries,
        cut(key, kv_heads),
        cut(value, kv_heads),
        segments.reshape(batch, blocks, BLOCK_TOKENS),
        begins // BLOCK_TOKENS,
    )
    mixed = jax.lax.map(lambda row: _mix(*row), of_rows)
    parts = mixed.reshape(batch, blocks, heads, BLOCK_TOKENS, head_dim)
    return jnp.moveaxis(parts, 3, 2).reshape(batch, -1, heads, head_dim)[:, :time].astype(query.dtype)


@jax.custom_vjp
def _mix(
    queries: Float[Array, "blocks kv_heads rows head_dim"],
    keys: Float[Array, "blocks kv_heads block head_dim"],
    values: Float[Array, "blocks kv_heads block head_dim"],
    segments: Int[Array, "blocks block"],
    firsts: Int[Array, " blocks"],
) -> Float[Array, "blocks kv_heads rows head_dim"]:
    """One row. `firsts`: the first block of keys that a block of queries sees."""
    return _forward(queries, keys, values, segments, firsts)[0]


def _forward(queries: Array, keys: Array, values: Array, segments: Array, firsts: Array) -> tuple[Array, tuple]:
    def one_block(at: Array) -> tuple[Array, Array]:
        def add(of: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            before, total, mixed = carry
            scores = _scores(queries, keys, segments, at, of)
            maximum = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - maximum), jnp.exp(before - maximum)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            return maximum, total, mixed * shrink + weights @ values[of]

        # Where a query sees nothing of a first block, its masked scores count there until it has seen itself.
        none = jnp.zeros((*queries.shape[1:3], 1), jnp.float32)
        start = none + MASKED_SCORE, none, jnp.zeros(queries.shape[1:], jnp.float32)
        maximum, total, mixed = jax.lax.fori_loop(firsts[at], at + 1, add, start)
        return mixed / total, maximum + jnp.log(total)

    mixed, normalizers = jax.lax.map(one_block, jnp.arange(len(queries)))
    return mixed, (queries, keys, values, segments, firsts, mixed, normalizers)


def _backward(saved: tuple, gradient: Array) -> tuple[Array, Array, Array, None, None]:
    queries, keys, values, segments, firsts, mixed, normalizers = saved
    inner = jnp.sum(gradient * mixed, axis=-1, keepdims=True)

    def one_block(of_keys: tuple[Array, Array], at: Array) -> tuple[tuple[Array, Array], Array]:
        def add(of: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            of_queries, of_keys, of_values = carry
            weights = jnp.exp(_scores(queries, keys, segments, at, of) - normalizers[at])
            of_scores = weights * (gradient[at] @ values[of].mT - inner[at])
            return (
                of_queries + of_scores @ keys[of],
                of_keys.at[of].add(of_scores.mT @ queries[at]),
                of_values.at[of].add(weights.mT @ gradient[at]),
            )

        start = (jnp.zeros(queries.shape[1:], jnp.float32), *of_keys)
        of_queries, *of_keys_and_values = jax.lax.fori_loop(firsts[at], at + 1, add, start)
        return tuple(of_keys_and_values), of_queries

    none = jnp.zeros_like(keys), jnp.zeros_like(values)
    (of_keys, of_values), of_queries = jax.lax.scan(one_block, none, jnp.arange(len(queries)))
    return of_queries, of_keys, of_values, None, None


def _scores(queries: Array, keys: Array, segments: Array, at: Array, of: Array) -> Array:
    """Of the block `at` of queries with the block `of` of keys, [kv_heads, rows, block] in float32."""
    places = jnp.arange(BLOCK_TOKENS)
    causal = at * BLOCK_TOKENS + places[:, None] >= of * BLOCK_TOKENS + places[None, :]
    visible = causal & (segments[at][:, None] == segments[of][None, :])
    bias = jnp.where(visible, 0.0, MASKED_SCORE)
    return queries[at] @ keys[of].mT + jnp.tile(bias, (queries.shape[2] // BLOCK_TOKENS, 1))


_mix.defvjp(_forward, _backward)
