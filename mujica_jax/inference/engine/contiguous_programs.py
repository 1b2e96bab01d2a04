"""The two programs of the resident engine: one reads prompts into rows, one decodes several steps for all rows."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from mujica_jax.inference import sampling
from mujica_jax.inference.engine.base import Decoded, SlotState, advance, narrowed
from mujica_jax.inference.engine.contiguous_memory import KeysValues, Memory
from mujica_jax.inference.engine.kv_quantization import CacheScales, scaled

NEVER = -1e30  # finite, so that a fully masked row gives numbers and no NaN


class Places(NamedTuple):
    """Where the sequences of a call begin: one entry a row, or a tile."""

    offset: Int[np.ndarray | Array, " rows"]  # tokens before it are in the group
    group: Int[np.ndarray | Array, " rows"]  # -1: none


class Tiles(NamedTuple):
    """A prefill call. A tile that is not used has row = rows and length 0."""

    tokens: Int[np.ndarray | Array, "tiles time"]
    row: Int[np.ndarray | Array, " tiles"]
    start: Int[np.ndarray | Array, " tiles"]
    length: Int[np.ndarray | Array, " tiles"]
    places: Places


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("memory",))
def prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: CacheScales | None,
    memory: Memory,
    tiles: Tiles,
    group_lengths: Int[Array, " groups"],
) -> Memory:
    decoder = nnx.merge(graph, weights)
    keys, values = list(memory.rows.keys), list(memory.rows.values)
    rows, width = memory.rows.shape
    offsets = jnp.arange(tiles.tokens.shape[1])[None, :]
    positions = tiles.start[:, None] + offsets
    in_row = positions - tiles.places.offset[:, None]
    targets = jnp.where(
        offsets < tiles.length[:, None], in_row, width
    )  # padding is written out of bounds, that is nowhere
    readable = jnp.arange(width)[None, None, :] <= in_row[:, :, None]
    visible = _visible(tiles.places.group, group_lengths, memory.groups)
    mine = jnp.minimum(tiles.row, rows - 1)

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        row = tiles.row[:, None]
        keys[layer] = keys[layer].at[row, :, :, targets].set(narrowed(key, keys[layer].dtype), mode="drop")
        values[layer] = values[layer].at[row, :, targets].set(narrowed(value, values[layer].dtype), mode="drop")
        groups = memory.groups.keys[layer], memory.groups.values[layer]
        return _attention(query, keys[layer][mine], values[layer][mine], readable, *groups, visible)

    decoder(tiles.tokens, positions, scaled(attend, scales), scan=False)
    return memory._replace(rows=KeysValues(tuple(keys), tuple(values)))


@functools.partial(jax.jit, static_argnames=("graph", "steps", "filtered"), donate_argnames=("memory",))
def decode(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: CacheScales | None,
    memory: Memory,
    state: SlotState,
    places: Places,
    group_lengths: Int[Array, " groups"],
    stops: Int[Array, " stops"],
    *,
    steps: int,
    filtered: bool,
) -> tuple[Memory, SlotState, Decoded]:
    decoder = nnx.merge(graph, weights)
    rows, width = memory.rows.shape
    every = jnp.arange(rows)
    visible = _visible(places.group, group_lengths, memory.groups)
    filters = sampling.Filters(state.top_k, state.top_p, state.min_p) if filtered else None

    def step(carry: tuple[KeysValues, SlotState], _: None) -> tuple:
        rows, state = carry
        keys, values = list(rows.keys), list(rows.values)
        running = state.remaining > 0
        in_row = state.position - places.offset
        write_at = jnp.where(running, in_row, width)  # a slot that does not run writes nowhere
        readable = jnp.arange(width)[None, None, :] <= in_row[:, None, None]

        def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
            keys[layer] = keys[layer].at[every, :, :, write_at].set(narrowed(key[:, 0], keys[layer].dtype), mode="drop")
            values[layer] = (
                values[layer].at[every, :, write_at].set(narrowed(value[:, 0], values[layer].dtype), mode="drop")
            )
            groups = memory.groups.keys[layer], memory.groups.values[layer]
            return _attention(query, keys[layer], values[layer], readable, *groups, visible)

        hidden = decoder(state.token[:, None], state.position[:, None], scaled(attend, scales), scan=False)
        state, decoded = advance(decoder.logits(hidden[:, 0]), state, stops, filters)
        return (KeysValues(tuple(keys), tuple(values)), state), decoded

    (rows, state), decoded = jax.lax.scan(step, (memory.rows, state), None, length=steps)
    return memory._replace(rows=rows), state, decoded


def _visible(
    group: Int[np.ndarray | Array, " rows"], lengths: Int[Array, " groups"], groups: KeysValues
) -> Bool[Array, "rows groups tokens"]:
    count, tokens = groups.shape
    inside = jnp.arange(tokens)[None, :] < lengths[:, None]
    return (group[:, None, None] == jnp.arange(count)[None, :, None]) & inside[None]


def _attention(
    query: Float[Array, "rows time heads head_dim"],
    keys: Num[Array, "rows kv_heads head_dim width"],
    values: Num[Array, "rows kv_heads width head_dim"],
    readable: Bool[Array, "rows time width"],
    group_keys: Num[Array, "groups kv_heads head_dim length"],
    group_values: Num[Array, "groups kv_heads length head_dim"],
    visible: Bool[Array, "rows groups length"],
) -> Float[Array, "rows time heads head_dim"]:
    """Softmax attention over a row and, together with it, over the row's group. Scores and weights are float32."""
    keys, values, group_keys, group_values = (
        held.astype(query.dtype) for held in (keys, values, group_keys, group_values)
    )
    rows, time, heads, head_dim = query.shape
    kv_heads, width = keys.shape[1], keys.shape[3]
    queries = heads // kv_heads * time  # of one head of keys
    grouped = query.reshape(rows, time, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, kv_heads, queries, head_dim)
    scores = jnp.einsum("rkqd,rkdw->rkqw", grouped, keys).astype(jnp.float32)
    by_time = (scores * head_dim**-0.5).reshape(rows, kv_heads, -1, time, width)
    scores = jnp.where(readable[:, None, None], by_time, NEVER).reshape(scores.shape)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    length = group_keys.shape[0] * group_keys.shape[3]
    if length:
        # One product for all rows: [kv_heads, rows x queries, head_dim] with [kv_heads, head_dim, groups x length].
        together = grouped.transpose(1, 0, 2, 3).reshape(kv_heads, rows * queries, head_dim)
        flat_keys = group_keys.transpose(1, 2, 0, 3).reshape(kv_heads, head_dim, length)
        flat_values = group_values.transpose(1, 0, 2, 3).reshape(kv_heads, length, head_dim)
        group_scores = jnp.einsum("kqd,kds->kqs", together, flat_keys).astype(jnp.float32) * head_dim**-0.5
        group_scores = group_scores.reshape(kv_heads, rows, queries, length).transpose(1, 0, 2, 3)
        group_scores = jnp.where(visible.reshape(rows, 1, 1, length), group_scores, NEVER)
        peak = jnp.maximum(peak, jnp.max(group_scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum("rkqw,rkwd->rkqd", weights.astype(values.dtype), values)
    if length:
        group_weights = jnp.exp(group_scores - peak)
        total = total + jnp.sum(group_weights, axis=-1, keepdims=True)
        flat_weights = (
            group_weights.astype(values.dtype).transpose(1, 0, 2, 3).reshape(kv_heads, rows * queries, length)
        )
        group_mixed = jnp.einsum("kqs,ksd->kqd", flat_weights, flat_values)
        mixed = mixed + group_mixed.reshape(kv_heads, rows, queries, head_dim).transpose(1, 0, 2, 3)
    mixed = (mixed.astype(jnp.float32) / total).astype(query.dtype)
    mixed = mixed.reshape(rows, kv_heads, -1, time, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, time, heads, head_dim)
