"""Keys and values in int8, with a scale for every channel of every head.

    stored = round(x / scale)
    scale = MARGIN * max |x| / 127, over the keys, or values, of one channel
    query . key = (query * scale of the keys) . stored
    mixed values = (weights . stored) * scale of the values

So attention itself is unchanged, on any platform. The scales are computed once for each policy.
Rotary angles turn channel i and i + head_dim / 2 into each other as positions grow: the two share a
scale. The maxima are taken over random tokens, so they depend on the policy alone: earlier requests
change no answer. Numbers beyond the range are clipped (`base.narrowed`). A channel's scale holds
for all positions, so it is not stored with them. The engines call this module if `cache_dtype` is
int8.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mujica_jax.models.attention import causal_self_attention

# How much further than the maxima numbers may go before they are clipped: a third of a bit.
MARGIN = 1.25
# The random tokens: 1,024 keys for each channel.
SEQUENCES = 8
TIME = 128
MIN_SCALE = 1e-6  # of a channel that is always zero
LEVELS = 127


class KVScales(NamedTuple):
    keys: Float[Array, "layers kv_heads head_dim"]
    values: Float[Array, "layers kv_heads head_dim"]


@functools.partial(jax.jit, static_argnames=("graph",))
def calibrate_scales(graph: nnx.GraphDef, weights: nnx.State) -> KVScales:
    """Return the scales for the decoder with these weights."""
    decoder = nnx.merge(graph, weights)
    shape = decoder.config.num_layers, decoder.config.num_kv_heads, decoder.config.head_dim
    tokens = jax.random.randint(jax.random.key(0), (SEQUENCES, TIME), 0, decoder.config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(TIME), tokens.shape)
    attention = causal_self_attention(jnp.ones_like(tokens))

    def attend(
        layer: Array, query: Array, key: Array, value: Array, maxima: KVScales
    ) -> tuple[Array, KVScales]:
        # Two channels that are rotated into each other: as far as a rotation may take either.
        pairs = jnp.hypot(*jnp.split(key.astype(jnp.float32), 2, axis=-1))
        keys = jnp.tile(jnp.max(pairs, axis=(0, 1)), 2)
        values = jnp.max(jnp.abs(value.astype(jnp.float32)), axis=(0, 1))
        maxima = KVScales(maxima.keys.at[layer].set(keys), maxima.values.at[layer].set(values))
        return attention(layer, query, key, value), maxima

    zeros = KVScales(jnp.zeros(shape), jnp.zeros(shape))
    _, maxima = decoder.with_memory(tokens, positions, attend, zeros)
    return jax.tree.map(lambda maximum: jnp.maximum(MARGIN / LEVELS * maximum, MIN_SCALE), maxima)


def scaled(attend: Callable[..., Any], scales: KVScales | None) -> Callable[..., Any]:
    """Return `attend(layer, query, key, value, *memory)` for stored keys and values.

    Keys and values are divided by their scales, and the mixed values multiplied again. `attend`
    returns the mixed values, or a tuple that begins with them. Without scales it is returned as it
    is.
    """
    if scales is None:
        return attend

    def with_scales(layer: Any, query: Array, key: Array, value: Array, *memory: Any) -> Any:
        key_scales = scales.keys[layer]
        value_scales = scales.values[layer]
        queries = query.shape[-2] // key.shape[-2]  # heads of queries that read one head of keys
        query = (query * jnp.repeat(key_scales, queries, axis=0)).astype(query.dtype)
        result = attend(layer, query, key / key_scales, value / value_scales, *memory)
        mixed, *rest = result if isinstance(result, tuple) else (result,)
        mixed = (mixed * jnp.repeat(value_scales, queries, axis=0)).astype(query.dtype)
        return (mixed, *rest) if rest else mixed

    return with_scales
