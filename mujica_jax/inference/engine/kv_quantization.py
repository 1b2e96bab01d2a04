"""Quantise the KV cache to int8, with one scale for each channel of each key and value head.

    stored = round(x / scale)
    scale = MARGIN * max |x| / 127, the maximum over the keys (or values) of one channel
    query . key = (query * scale of the keys) . stored keys
    mixed values = (attention weights . stored values) * scale of the values

The scales are multiplied into the queries and into the result. So the attention kernels need no
change, on any platform. The engines use this module if `cache_dtype` is int8.

The scales are calibrated once for each policy, on random tokens. They depend on the policy only, so
earlier requests cannot change a result. One scale holds for a channel at all positions. Rotary
embeddings rotate the channels i and i + head_dim / 2 into each other, so these two channels share a
scale. Values outside the calibrated range are clipped (`base.narrowed`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mujica_jax.models.attention import causal_self_attention

# Values up to 1.25 times the calibrated maximum are not clipped. This costs a third of a bit of
# precision.
MARGIN = 1.25
# Number and length of the random sequences for calibration: 1,024 tokens in total.
SEQUENCES = 8
TIME = 128
# Smallest scale, for a channel that is always zero.
MIN_SCALE = 1e-6
# Stored integers lie between -LEVELS and LEVELS.
LEVELS = 127


class KVScales(NamedTuple):
    """The scale of each channel of the keys and of the values."""

    keys: Float[Array, "layers kv_heads head_dim"]
    values: Float[Array, "layers kv_heads head_dim"]


@functools.partial(jax.jit, static_argnames=("graph",))
def calibrate_scales(graph: nnx.GraphDef, weights: nnx.State) -> KVScales:
    """Compute the scales for a decoder with these weights, on random tokens."""
    decoder = nnx.merge(graph, weights)
    shape = decoder.config.num_layers, decoder.config.num_kv_heads, decoder.config.head_dim
    tokens = jax.random.randint(jax.random.key(0), (SEQUENCES, TIME), 0, decoder.config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(TIME), tokens.shape)
    attention = causal_self_attention(jnp.ones_like(tokens))

    def attend(
        layer: Array, query: Array, key: Array, value: Array, maxima: KVScales
    ) -> tuple[Array, KVScales]:
        # Rotary embeddings rotate channel i and i + head_dim / 2 into each other. The length of the
        # pair is the largest value that either channel can reach at any position.
        pairs = jnp.hypot(*jnp.split(key.astype(jnp.float32), 2, axis=-1))
        keys = jnp.tile(jnp.max(pairs, axis=(0, 1)), 2)
        values = jnp.max(jnp.abs(value.astype(jnp.float32)), axis=(0, 1))
        maxima = KVScales(maxima.keys.at[layer].set(keys), maxima.values.at[layer].set(values))
        return attention(layer, query, key, value), maxima

    zeros = KVScales(jnp.zeros(shape), jnp.zeros(shape))
    _, maxima = decoder.with_memory(tokens, positions, attend, zeros)
    return jax.tree.map(lambda maximum: jnp.maximum(MARGIN / LEVELS * maximum, MIN_SCALE), maxima)


def scaled(attend: Callable[..., Any], scales: KVScales | None) -> Callable[..., Any]:
    """Wrap an attention function so that it stores and reads scaled keys and values.

    `attend(layer, query, key, value, *memory)` returns the mixed values, or a tuple that begins
    with them. The wrapper divides keys and values by their scales, multiplies the queries by the
    scales of the keys, and multiplies the mixed values by the scales of the values. Returns
    `attend` itself if `scales` is None.
    """
    if scales is None:
        return attend

    def with_scales(layer: Any, query: Array, key: Array, value: Array, *memory: Any) -> Any:
        key_scales = scales.keys[layer]
        value_scales = scales.values[layer]
        # Number of query heads that share one key and value head (grouped-query attention).
        queries = query.shape[-2] // key.shape[-2]
        query = (query * jnp.repeat(key_scales, queries, axis=0)).astype(query.dtype)
        result = attend(layer, query, key / key_scales, value / value_scales, *memory)
        mixed, *rest = result if isinstance(result, tuple) else (result,)
        mixed = (mixed * jnp.repeat(value_scales, queries, axis=0)).astype(query.dtype)
        return (mixed, *rest) if rest else mixed

    return with_scales
