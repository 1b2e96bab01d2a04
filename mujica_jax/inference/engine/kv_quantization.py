"""Keys and values in int8: every channel of every head has a scale of its own, found once for each
policy.

    kept = round(x / scale)        scale = MARGIN * max |x| / 127, over the keys, or values, of one channel
    query . key = (query * scale of the keys) . kept        mixed values = (weights . kept) * scale of the values

So attention itself computes as ever, on any platform. Rotary angles turn channel i and i + head_dim
/ 2 into each other as positions grow: the two share a scale. The maxima are taken over random
tokens, as a function of the policy alone: what was asked before changes no answer. What lies beyond
the range is clipped (`base.narrowed`). A channel's scale holds for all positions, so it is not
stored with them. Called by the engines where `cache_dtype` is int8.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mujica_jax.models.attention import causal_self_attention

# how much further than the maxima numbers may go before they are clipped: a third of a bit
MARGIN = 1.25
SEQUENCES, TIME = 8, 128  # of the random tokens: 1,024 keys a channel
MIN_SCALE = 1e-6  # of a channel that is always zero
LEVELS = 127


class KVScales(NamedTuple):
    keys: Float[Array, "layers kv_heads head_dim"]
    values: Float[Array, "layers kv_heads head_dim"]


@functools.partial(jax.jit, static_argnames=("graph",))
def calibrate_scales(graph: nnx.GraphDef, weights: nnx.State) -> KVScales:
    """Scales for the decoder with these weights."""
    decoder = nnx.merge(graph, weights)
    shape = decoder.config.num_layers, decoder.config.num_kv_heads, decoder.config.head_dim
    tokens = jax.random.randint(jax.random.key(0), (SEQUENCES, TIME), 0, decoder.config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(TIME), tokens.shape)
    attention = causal_self_attention(jnp.ones_like(tokens))

    def attend(
        layer: Array, query: Array, key: Array, value: Array, seen: KVScales
    ) -> tuple[Array, KVScales]:
        # Of two channels that are rotated into each other, as far as a rotation may take either.
        pairs = jnp.hypot(*jnp.split(key.astype(jnp.float32), 2, axis=-1))
        keys = jnp.tile(jnp.max(pairs, axis=(0, 1)), 2)
        values = jnp.max(jnp.abs(value.astype(jnp.float32)), axis=(0, 1))
        seen = KVScales(seen.keys.at[layer].set(keys), seen.values.at[layer].set(values))
        return attention(layer, query, key, value), seen

    nothing = KVScales(jnp.zeros(shape), jnp.zeros(shape))
    largest = decoder.with_memory(tokens, positions, attend, nothing)[1]
    return jax.tree.map(lambda one: jnp.maximum(MARGIN / LEVELS * one, MIN_SCALE), largest)


def scaled(attend: Callable[..., Any], scales: KVScales | None) -> Callable[..., Any]:
    """`attend(layer, query, key, value, *memory)` with keys and values divided by their scales, and
    what it mixes multiplied again.

    The result is an array, or a tuple that begins with it. Without scales nothing is done."""
    if scales is None:
        return attend

    def with_scales(layer: Any, query: Array, key: Array, value: Array, *memory: Any) -> Any:
        of_keys, of_values = scales.keys[layer], scales.values[layer]
        queries = query.shape[-2] // key.shape[-2]  # heads of queries that read one head of keys
        query = (query * jnp.repeat(of_keys, queries, axis=0)).astype(query.dtype)
        found = attend(layer, query, key / of_keys, value / of_values, *memory)
        mixed, *rest = found if isinstance(found, tuple) else (found,)
        mixed = (mixed * jnp.repeat(of_values, queries, axis=0)).astype(query.dtype)
        return (mixed, *rest) if rest else mixed

    return with_scales
