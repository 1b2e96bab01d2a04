"""The memory of the contiguous engine and its programs: one reads prompts into rows, one decodes
several steps for all rows, the others move what is in memory. The layout stands in `contiguous.py`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from mujica_jax.inference import sampling
from mujica_jax.inference.engine.base import Decoded, SlotState, advance, narrowed
from mujica_jax.inference.engine.kv_quantization import KVScales, scaled
from mujica_jax.models import cpu_calls

NEVER = -1e30  # finite, so that a fully masked row gives numbers and no NaN


class KeysValues(NamedTuple):
    """One array a layer."""

    keys: tuple[Num[Array, "rows kv_heads head_dim tokens"], ...]
    values: tuple[Num[Array, "rows kv_heads tokens head_dim"], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens in each)."""
        return self.values[0].shape[0], self.values[0].shape[2]


class Memory(NamedTuple):
    pages: KeysValues
    rows: KeysValues
    prefixes: KeysValues  # length 0 where nothing is shared


class Places(NamedTuple):
    """Where the sequences of a call lie: one entry a sequence, or a tile."""

    row: Int[np.ndarray | Array, " rows"]
    offset: Int[np.ndarray | Array, " rows"]  # tokens before it are in the prefix
    prefix: Int[np.ndarray | Array, " rows"]  # -1: none

    @classmethod
    def nowhere(cls, count: int) -> "Places":
        """numpy's, to be written."""
        row, offset = np.zeros((2, count), np.int32)
        return cls(row, offset, np.full(count, -1, np.int32))


class Tiles(NamedTuple):
    """A prefill call. A tile that is not used has length 0."""

    tokens: Int[np.ndarray | Array, "tiles time"]
    start: Int[np.ndarray | Array, " tiles"]
    length: Int[np.ndarray | Array, " tiles"]
    places: Places


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("memory",))
def prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: KVScales | None,
    memory: Memory,
    tiles: Tiles,
    prefix_lengths: Int[Array, " prefixes"],
) -> Memory:
    decoder = nnx.merge(graph, weights)
    keys, values = list(memory.rows.keys), list(memory.rows.values)
    width = memory.rows.shape[1]
    offsets = jnp.arange(tiles.tokens.shape[1])[None, :]
    positions = tiles.start[:, None] + offsets
    in_row = positions - tiles.places.offset[:, None]
    # Padding is written out of bounds, that is nowhere.
    targets = jnp.where(offsets < tiles.length[:, None], in_row, width)
    seen = jnp.where(tiles.length > 0, in_row[:, 0] + 1, 0)
    read = _reader(memory, tiles.places, prefix_lengths, seen, tiles.tokens.shape[1])

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        row = tiles.places.row[:, None]
        keys[layer] = (
            keys[layer].at[row, :, :, targets].set(narrowed(key, keys[layer].dtype), mode="drop")
        )
        values[layer] = (
            values[layer].at[row, :, targets].set(narrowed(value, values[layer].dtype), mode="drop")
        )
        return read(layer, query, keys[layer], values[layer])

    decoder(tiles.tokens, positions, scaled(attend, scales), scan=False)
    return memory._replace(rows=KeysValues(tuple(keys), tuple(values)))


@functools.partial(
    jax.jit, static_argnames=("graph", "steps", "filtered"), donate_argnames=("memory",)
)
def decode(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: KVScales | None,
    memory: Memory,
    state: SlotState,
    places: Places,
    prefix_lengths: Int[Array, " prefixes"],
    stops: Int[Array, " stops"],
    *,
    steps: int,
    filtered: bool,
) -> tuple[Memory, SlotState, Decoded]:
    """Without kernels of our own the sequences are all rows, in order."""
    decoder = nnx.merge(graph, weights)
    width, row = memory.rows.shape[1], places.row
    filters = sampling.Filters(state.top_k, state.top_p, state.min_p) if filtered else None

    def step(carry: tuple[KeysValues, SlotState], _: None) -> tuple:
        rows, state = carry
        keys, values = list(rows.keys), list(rows.values)
        running = state.remaining > 0
        in_row = state.position - places.offset
        write_at = jnp.where(running, in_row, width)  # a slot that does not run writes nowhere
        read = _reader(
            memory, places, prefix_lengths, jnp.where(running, in_row + 1, 0), 1, in_order=True
        )

        def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
            keys[layer] = (
                keys[layer]
                .at[row, :, :, write_at]
                .set(narrowed(key[:, 0], keys[layer].dtype), mode="drop")
            )
            written = narrowed(value[:, 0], values[layer].dtype)
            values[layer] = values[layer].at[row, :, write_at].set(written, mode="drop")
            return read(layer, query, keys[layer], values[layer])

        hidden = decoder(
            state.token[:, None], state.position[:, None], scaled(attend, scales), scan=False
        )
        state, decoded = advance(decoder.logits(hidden[:, 0]), state, stops, filters)
        return (KeysValues(tuple(keys), tuple(values)), state), decoded

    (rows, state), decoded = jax.lax.scan(step, (memory.rows, state), None, length=steps)
    return memory._replace(rows=rows), state, decoded


def _reader(
    memory: Memory,
    places: Places,
    lengths: Int[Array, " prefixes"],
    seen: Int[Array, " rows"],
    time: int,
    *,
    in_order: bool = False,
) -> Callable[[int, Array, Array, Array], Array]:
    """`read(layer, query, keys, values)`: attention of rows over a prefix and over what they hold,
    of which the first query sees `seen` tokens and each of the `time` queries one more. `in_order`:
    they are all rows, as they lie."""
    prefix = places.prefix
    shared = jnp.where(prefix < 0, 0, lengths[prefix])
    of_rows = jnp.stack([places.row, seen, jnp.maximum(prefix, 0), shared], axis=1)
    readable = jnp.arange(memory.rows.shape[1]) < (seen[:, None] + jnp.arange(time))[:, :, None]
    count, tokens = memory.prefixes.shape
    inside = jnp.arange(tokens)[None, :] < lengths[:, None]
    visible = (prefix[:, None, None] == jnp.arange(count)[None, :, None]) & inside[None]

    def read(layer: int, query: Array, keys: Array, values: Array) -> Array:
        prefixes = memory.prefixes.keys[layer], memory.prefixes.values[layer]
        if cpu_calls.can_attend(keys.shape[2], keys.dtype):
            return cpu_calls.attention(query, keys, values, *prefixes, of_rows)
        if not in_order:
            keys, values = keys[places.row], values[places.row]
        return _attention(query, keys, values, readable, *prefixes, visible)

    return read


def _attention(
    query: Float[Array, "rows time heads head_dim"],
    keys: Num[Array, "rows kv_heads head_dim width"],
    values: Num[Array, "rows kv_heads width head_dim"],
    readable: Bool[Array, "rows time width"],
    prefix_keys: Num[Array, "prefixes kv_heads head_dim length"],
    prefix_values: Num[Array, "prefixes kv_heads length head_dim"],
    visible: Bool[Array, "rows prefixes length"],
) -> Float[Array, "rows time heads head_dim"]:
    """Softmax attention over a row and, together with it, over the row's prefix. Scores and weights
    are float32."""
    rows, time, heads, head_dim = query.shape
    computed = max(query.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
    held = (keys, values, prefix_keys, prefix_values)
    keys, values, prefix_keys, prefix_values = (array.astype(computed) for array in held)
    kv_heads, width = keys.shape[1], keys.shape[3]
    queries = heads // kv_heads * time  # of one head of keys
    grouped = (
        query.astype(computed).reshape(rows, time, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    )
    grouped = grouped.reshape(rows, kv_heads, queries, head_dim)
    scores = _product("rkqd,rkdw->rkqw", grouped, keys)
    by_time = (scores * head_dim**-0.5).reshape(rows, kv_heads, -1, time, width)
    scores = jnp.where(readable[:, None, None], by_time, NEVER).reshape(scores.shape)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    length = prefix_keys.shape[0] * prefix_keys.shape[3]
    if length:
        # One product for all rows: [kv_heads, rows x queries, head_dim] with [kv_heads, head_dim,
        # prefixes x length].
        together = grouped.transpose(1, 0, 2, 3).reshape(kv_heads, rows * queries, head_dim)
        flat_keys = prefix_keys.transpose(1, 2, 0, 3).reshape(kv_heads, head_dim, length)
        flat_values = prefix_values.transpose(1, 0, 2, 3).reshape(kv_heads, length, head_dim)
        prefix_scores = _product("kqd,kds->kqs", together, flat_keys) * head_dim**-0.5
        prefix_scores = prefix_scores.reshape(kv_heads, rows, queries, length).transpose(1, 0, 2, 3)
        prefix_scores = jnp.where(visible.reshape(rows, 1, 1, length), prefix_scores, NEVER)
        peak = jnp.maximum(peak, jnp.max(prefix_scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = _product("rkqw,rkwd->rkqd", weights.astype(values.dtype), values)
    if length:
        prefix_weights = jnp.exp(prefix_scores - peak)
        total = total + jnp.sum(prefix_weights, axis=-1, keepdims=True)
        flat_weights = prefix_weights.astype(values.dtype).transpose(1, 0, 2, 3)
        flat_weights = flat_weights.reshape(kv_heads, rows * queries, length)
        prefix_mixed = _product("kqs,ksd->kqd", flat_weights, flat_values)
        mixed = mixed + prefix_mixed.reshape(kv_heads, rows, queries, head_dim).transpose(
            1, 0, 2, 3
        )
    mixed = (mixed / total).astype(query.dtype)
    mixed = mixed.reshape(rows, kv_heads, -1, time, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, time, heads, head_dim)


# Sums in float32: more exact, and XLA on a CPU multiplies bfloat16 fast only so.
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, donate_argnames=("pages",))
def copy_pages(
    pages: KeysValues, sources: Int[Array, " moves"], targets: Int[Array, " moves"]
) -> KeysValues:
    return jax.tree.map(lambda layer: layer.at[targets].set(layer[sources]), pages)


@functools.partial(jax.jit, donate_argnames=("rows",))
def load_pages(rows: KeysValues, held: KeysValues, *moves: Int[Array, " moves"]) -> KeysValues:
    """`moves`: rows, which of their pages, and pages."""
    places, indices, pages = moves

    def load(axis: int, rows: Array, layer: Array) -> Array:
        paged, index = _paged(rows, axis, layer.shape[axis], places, indices)
        return paged.at[index].set(layer[pages]).reshape(rows.shape)

    return _both(load, rows, held)


@functools.partial(jax.jit, donate_argnames=("held",))
def store_pages(held: KeysValues, rows: KeysValues, *moves: Int[Array, " moves"]) -> KeysValues:
    places, indices, pages = moves

    def store(axis: int, layer: Array, rows: Array) -> Array:
        paged, index = _paged(rows, axis, layer.shape[axis], places, indices)
        return layer.at[pages].set(paged[index])

    return _both(store, held, rows)


@functools.partial(jax.jit, static_argnames=("shape",))
def store_prefix(
    prefixes: KeysValues,
    held: KeysValues,
    place: Int[Array, ""],
    pages: Int[Array, " pages"],
    shape: tuple[int, int],
) -> KeysValues:
    """`prefixes` in this shape, with what the pages hold at a place."""

    def hold(axis: int, prefixes: Array, layer: Array) -> Array:
        found = jnp.moveaxis(layer[pages], 0, axis - 1)  # the pages beside the tokens of each
        found = found.reshape(1, *found.shape[: axis - 1], -1, *found.shape[axis + 1 :])
        return jax.lax.dynamic_update_slice(prefixes, found, (place, 0, 0, 0))

    return _both(hold, resized(prefixes, *shape), held)


@functools.partial(jax.jit, donate_argnames=("rows",))
def shift_row(rows: KeysValues, place: Int[Array, ""], tokens: Int[Array, ""]) -> KeysValues:
    def shift(axis: int, rows: Array) -> Array:
        return rows.at[place].set(jnp.roll(rows[place], -tokens, axis=axis - 1))

    return _both(shift, rows)


@functools.partial(jax.jit, donate_argnames=("held",))
def clear(held: KeysValues, places: Int[Array, " places"]) -> KeysValues:
    """Empties rows, or pages."""
    return jax.tree.map(lambda layer: layer.at[places].set(0, mode="drop"), held)


@jax.jit
def select_rows(rows: KeysValues, places: Int[Array, " rows"]) -> KeysValues:
    return jax.tree.map(lambda layer: layer[places], rows)


@functools.partial(jax.jit, static_argnames=("count", "tokens"))
def resized(rows: KeysValues, count: int, tokens: int) -> KeysValues:
    """Cut, or filled up with zeros."""

    def resize(axis: int, layer: Array) -> Array:
        ends = [(0, 0, 0)] * 4
        ends[0], ends[axis] = (0, count - layer.shape[0], 0), (0, tokens - layer.shape[axis], 0)
        return jax.lax.pad(layer, jnp.zeros((), layer.dtype), ends)

    return _both(resize, rows)


def _both(function: Callable[..., Array], *memories: KeysValues) -> KeysValues:
    """`function(axis of the tokens, layer of each memory)` for the keys and for the values of every
    layer."""
    keys = (
        function(3, *layers) for layers in zip(*(memory.keys for memory in memories), strict=True)
    )
    values = (
        function(2, *layers) for layers in zip(*(memory.values for memory in memories), strict=True)
    )
    return KeysValues(tuple(keys), tuple(values))


def _paged(
    rows: Array, axis: int, page_tokens: int, places: Array, indices: Array
) -> tuple[Array, tuple]:
    """The tokens of rows as pages of tokens, and where the pages `indices` of the rows `places` are
    in it."""
    paged = rows.reshape(*rows.shape[:axis], -1, page_tokens, *rows.shape[axis + 1 :])
    return paged, (places, *[slice(None)] * (axis - 1), indices)
