"""The compiled programs of the contiguous engine, and the arrays that they work on.

`prefill` computes prompts into rows. `decode` generates several tokens for all running sequences.
The other programs copy, resize and clear pages, rows and shared prefixes. `contiguous.py` explains
these three parts of the KV cache.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from mujica_jax import kernels
from mujica_jax.inference import sampling
from mujica_jax.inference.engine.base import Decoded, SlotState, advance, narrowed
from mujica_jax.inference.engine.kv_quantization import KVScales, scaled

# The score of a masked token. It is finite, so that a fully masked row does not give NaN.
NEVER = -1e30


class KeysValues(NamedTuple):
    """Keys and values of pages, rows or prefixes, with one array per layer.

    In the shapes, `rows` is the number of pages, rows or prefixes, and `tokens` is the number of
    tokens in each.
    """

    keys: tuple[Num[Array, "rows kv_heads head_dim tokens"], ...]
    values: tuple[Num[Array, "rows kv_heads tokens head_dim"], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of pages, rows or prefixes, and the number of tokens in each."""
        return self.values[0].shape[0], self.values[0].shape[2]


class Memory(NamedTuple):
    """The complete KV cache of an engine."""

    pages: KeysValues
    rows: KeysValues
    # The shared prefixes. They have 0 tokens until the first prefix is stored.
    prefixes: KeysValues


class Places(NamedTuple):
    """The places where the sequences of a call are stored, one per sequence or prefill tile."""

    # Index of the row.
    row: Int[np.ndarray | Array, " rows"]
    # Length of the shared prefix in tokens. Token t is at index t - offset of the row.
    offset: Int[np.ndarray | Array, " rows"]
    # Index of the shared prefix. -1 means none.
    prefix: Int[np.ndarray | Array, " rows"]

    @classmethod
    def nowhere(cls, count: int) -> "Places":
        """Return `count` entries with row 0 and no prefix, as writable numpy arrays."""
        return cls(
            row=np.zeros(count, np.int32),
            offset=np.zeros(count, np.int32),
            prefix=np.full(count, -1, np.int32),
        )


class Tiles(NamedTuple):
    """The arguments of a prefill call."""

    # Token ids, padded with 0.
    tokens: Int[np.ndarray | Array, "tiles time"]
    # Position of the first token of each tile in its sequence.
    start: Int[np.ndarray | Array, " tiles"]
    # Number of tokens in each tile. 0 for an unused tile.
    length: Int[np.ndarray | Array, " tiles"]
    places: Places


class DecodeCall(NamedTuple):
    """The arguments of a decode call. `state` and `places` have one entry per sequence."""

    state: SlotState
    places: Places
    # Length of each shared prefix in tokens.
    prefix_lengths: Int[np.ndarray | Array, " prefixes"]
    # Token ids that end a sequence.
    stops: Int[Array, " stops"]


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("memory",))
def prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: KVScales | None,
    memory: Memory,
    tiles: Tiles,
    prefix_lengths: Int[Array, " prefixes"],
) -> Memory:
    """Compute the keys and values of the tiles, and write them into their rows.

    `scales` are the scales of an int8 cache, or None. `prefix_lengths` are in tokens.
    """
    decoder = nnx.merge(graph, weights)
    keys = list(memory.rows.keys)
    values = list(memory.rows.values)
    width = memory.rows.shape[1]

    # The index in the row to which each token is written. The index of padding is out of bounds, so
    # padding is not written.
    tile_tokens = tiles.tokens.shape[1]
    offsets = jnp.arange(tile_tokens)[None, :]
    positions = tiles.start[:, None] + offsets
    in_row = positions - tiles.places.offset[:, None]
    targets = jnp.where(offsets < tiles.length[:, None], in_row, width)

    seen = jnp.where(tiles.length > 0, in_row[:, 0] + 1, 0)
    read = _reader(memory, tiles.places, prefix_lengths, seen=seen, time=tile_tokens)

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        row = tiles.places.row[:, None]
        new_keys = narrowed(key, keys[layer].dtype)
        keys[layer] = keys[layer].at[row, :, :, targets].set(new_keys, mode="drop")
        new_values = narrowed(value, values[layer].dtype)
        values[layer] = values[layer].at[row, :, targets].set(new_values, mode="drop")
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
    call: DecodeCall,
    *,
    steps: int,
    filtered: bool,
) -> tuple[Memory, SlotState, Decoded]:
    """Generate up to `steps` tokens for every running sequence.

    `filtered` says whether a sequence has a sampling filter. Without `kernels.paged_attention`,
    entry i of the call must be row i. Returns (memory, new state, tokens [steps, sequences]).
    """
    decoder = nnx.merge(graph, weights)
    width = memory.rows.shape[1]
    places = call.places
    filters = None
    if filtered:
        filters = sampling.Filters(call.state.top_k, call.state.top_p, call.state.min_p)

    def step(carry: tuple[KeysValues, SlotState], _: None) -> tuple:
        rows, state = carry
        keys = list(rows.keys)
        values = list(rows.values)
        running = state.remaining > 0
        in_row = state.position - places.offset
        # For a sequence that is not running the index is out of bounds, so nothing is written.
        target = jnp.where(running, in_row, width)
        seen = jnp.where(running, in_row + 1, 0)
        read = _reader(memory, places, call.prefix_lengths, seen=seen, time=1, in_order=True)

        def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
            new_key = narrowed(key[:, 0], keys[layer].dtype)
            keys[layer] = keys[layer].at[places.row, :, :, target].set(new_key, mode="drop")
            new_value = narrowed(value[:, 0], values[layer].dtype)
            values[layer] = values[layer].at[places.row, :, target].set(new_value, mode="drop")
            return read(layer, query, keys[layer], values[layer])

        hidden = decoder(
            state.token[:, None], state.position[:, None], scaled(attend, scales), scan=False
        )
        state, decoded = advance(decoder.logits(hidden[:, 0]), state, call.stops, filters)
        return (KeysValues(tuple(keys), tuple(values)), state), decoded

    (rows, state), decoded = jax.lax.scan(step, (memory.rows, call.state), None, length=steps)
    return memory._replace(rows=rows), state, decoded


def _reader(
    memory: Memory,
    places: Places,
    prefix_lengths: Int[np.ndarray | Array, " prefixes"],
    *,
    seen: Int[Array, " rows"],
    time: int,
    in_order: bool = False,
) -> Callable[[int, Array, Array, Array], Array]:
    """Return the function `read(layer, query, keys, values)` that computes attention.

    Each sequence attends to its row and to its shared prefix. Each sequence has `time` queries. The
    first query sees the first `seen` tokens of the row, and each later query sees one token more.
    `keys` and `values` are the rows of the layer. Pass `in_order=True` if sequence i is stored in
    row i.
    """
    prefix = places.prefix
    prefix_length = jnp.where(prefix < 0, 0, prefix_lengths[prefix])
    # For the kernel: row, visible tokens of the row, prefix and its length, for each sequence.
    row_table = jnp.stack([places.row, seen, jnp.maximum(prefix, 0), prefix_length], axis=1)
    # For XLA: masks of the tokens that each query may read, in its row and in the prefixes.
    readable = jnp.arange(memory.rows.shape[1]) < (seen[:, None] + jnp.arange(time))[:, :, None]
    prefix_count, prefix_tokens = memory.prefixes.shape
    inside = jnp.arange(prefix_tokens)[None, :] < prefix_lengths[:, None]
    visible = (prefix[:, None, None] == jnp.arange(prefix_count)[None, :, None]) & inside[None]

    def read(layer: int, query: Array, keys: Array, values: Array) -> Array:
        prefixes = memory.prefixes.keys[layer], memory.prefixes.values[layer]
        attend = kernels.paged_attention(head_dim=keys.shape[2], dtype=keys.dtype)
        if attend is not None:
            return attend(query, keys, values, *prefixes, row_table)
        if not in_order:
            keys = keys[places.row]
            values = values[places.row]
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
    """Compute softmax attention of each sequence over its row and its shared prefix together.

    `readable` masks the tokens of the row that each query may read. `visible` masks the tokens of
    the prefixes that each sequence may read. Scores and attention weights are float32. The result
    has the type of `query`.
    """
    rows, time, heads, head_dim = query.shape
    compute_dtype = max(query.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
    keys = keys.astype(compute_dtype)
    values = values.astype(compute_dtype)
    prefix_keys = prefix_keys.astype(compute_dtype)
    prefix_values = prefix_values.astype(compute_dtype)
    kv_heads = keys.shape[1]
    width = keys.shape[3]

    # Group the queries that share a key and value head (grouped-query attention).
    queries = heads // kv_heads * time
    grouped = query.astype(compute_dtype).reshape(rows, time, kv_heads, -1, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, queries, head_dim)

    # Scores over the row.
    scores = _product("rkqd,rkdw->rkqw", grouped, keys)
    by_time = (scores * head_dim**-0.5).reshape(rows, kv_heads, -1, time, width)
    scores = jnp.where(readable[:, None, None], by_time, NEVER).reshape(scores.shape)
    peak = jnp.max(scores, axis=-1, keepdims=True)

    # Scores over the prefixes, in one matrix product for all sequences: [kv_heads, rows x queries,
    # head_dim] times [kv_heads, head_dim, prefixes x length].
    length = prefix_keys.shape[0] * prefix_keys.shape[3]
    if length:
        together = grouped.transpose(1, 0, 2, 3).reshape(kv_heads, rows * queries, head_dim)
        flat_keys = prefix_keys.transpose(1, 2, 0, 3).reshape(kv_heads, head_dim, length)
        flat_values = prefix_values.transpose(1, 0, 2, 3).reshape(kv_heads, length, head_dim)
        prefix_scores = _product("kqd,kds->kqs", together, flat_keys) * head_dim**-0.5
        prefix_scores = prefix_scores.reshape(kv_heads, rows, queries, length).transpose(1, 0, 2, 3)
        prefix_scores = jnp.where(visible.reshape(rows, 1, 1, length), prefix_scores, NEVER)
        peak = jnp.maximum(peak, jnp.max(prefix_scores, axis=-1, keepdims=True))

    # Softmax over both parts. Divide by the total weight once, at the end.
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = _product("rkqw,rkwd->rkqd", weights.astype(values.dtype), values)
    if length:
        prefix_weights = jnp.exp(prefix_scores - peak)
        total = total + jnp.sum(prefix_weights, axis=-1, keepdims=True)
        flat_weights = prefix_weights.astype(values.dtype).transpose(1, 0, 2, 3)
        flat_weights = flat_weights.reshape(kv_heads, rows * queries, length)
        prefix_mixed = _product("kqs,ksd->kqd", flat_weights, flat_values)
        prefix_mixed = prefix_mixed.reshape(kv_heads, rows, queries, head_dim)
        mixed = mixed + prefix_mixed.transpose(1, 0, 2, 3)
    mixed = (mixed / total).astype(query.dtype)
    mixed = mixed.reshape(rows, kv_heads, -1, time, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, time, heads, head_dim)


# An einsum that sums in float32.
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, donate_argnames=("pages",))
def copy_pages(
    pages: KeysValues, sources: Int[Array, " moves"], targets: Int[Array, " moves"]
) -> KeysValues:
    """Copy the pages `sources` to the pages `targets`."""
    return jax.tree.map(lambda layer: layer.at[targets].set(layer[sources]), pages)


@functools.partial(jax.jit, donate_argnames=("rows",))
def load_pages(
    rows: KeysValues,
    pages: KeysValues,
    row_indices: Int[Array, " moves"],
    page_slots: Int[Array, " moves"],
    page_indices: Int[Array, " moves"],
) -> KeysValues:
    """Copy pages into rows.

    Move i copies page `page_indices[i]` into row `row_indices[i]`. A row holds width / page_tokens
    pages one after the other, and `page_slots[i]` is the index of the page within the row.
    """

    def load(token_axis: int, rows: Array, pages: Array) -> Array:
        paged = _cut_into_pages(rows, token_axis, pages.shape[token_axis])
        target = _page_index(token_axis, row_indices, page_slots)
        return paged.at[target].set(pages[page_indices]).reshape(rows.shape)

    return _map_layers(load, rows, pages)


@functools.partial(jax.jit, donate_argnames=("pages",))
def store_pages(
    pages: KeysValues,
    rows: KeysValues,
    row_indices: Int[Array, " moves"],
    page_slots: Int[Array, " moves"],
    page_indices: Int[Array, " moves"],
) -> KeysValues:
    """Copy parts of rows into pages. This is the reverse of `load_pages`."""

    def store(token_axis: int, pages: Array, rows: Array) -> Array:
        paged = _cut_into_pages(rows, token_axis, pages.shape[token_axis])
        source = _page_index(token_axis, row_indices, page_slots)
        return pages.at[page_indices].set(paged[source])

    return _map_layers(store, pages, rows)


@functools.partial(jax.jit, static_argnames=("shape",))
def store_prefix(
    prefixes: KeysValues,
    pages: KeysValues,
    prefix_index: Int[Array, ""],
    page_indices: Int[Array, " pages"],
    shape: tuple[int, int],
) -> KeysValues:
    """Copy pages into the shared prefix `prefix_index`, after resizing the array of prefixes.

    `page_indices` are the pages in the order of the tokens. `shape` is the new (number of prefixes,
    tokens per prefix).
    """

    def store(token_axis: int, prefixes: Array, pages: Array) -> Array:
        # Move the axis of the pages in front of the axis of the tokens, and merge the two axes.
        prefix = jnp.moveaxis(pages[page_indices], 0, token_axis - 1)
        before = prefix.shape[: token_axis - 1]
        after = prefix.shape[token_axis + 1 :]
        prefix = prefix.reshape(1, *before, -1, *after)
        return jax.lax.dynamic_update_slice(prefixes, prefix, (prefix_index, 0, 0, 0))

    return _map_layers(store, resized(prefixes, *shape), pages)


@functools.partial(jax.jit, donate_argnames=("rows",))
def shift_row(rows: KeysValues, row_index: Int[Array, ""], tokens: Int[Array, ""]) -> KeysValues:
    """Drop the first `tokens` tokens of a row, and move the rest to the front."""

    def shift(token_axis: int, rows: Array) -> Array:
        shifted = jnp.roll(rows[row_index], -tokens, axis=token_axis - 1)
        return rows.at[row_index].set(shifted)

    return _map_layers(shift, rows)


@functools.partial(jax.jit, donate_argnames=("memory",))
def clear(memory: KeysValues, indices: Int[Array, " indices"]) -> KeysValues:
    """Set rows or pages to zero. An index that is out of bounds has no effect."""
    return jax.tree.map(lambda layer: layer.at[indices].set(0, mode="drop"), memory)


@jax.jit
def select_rows(rows: KeysValues, row_indices: Int[Array, " rows"]) -> KeysValues:
    """Return a new array with the rows `row_indices`, in this order."""
    return jax.tree.map(lambda layer: layer[row_indices], rows)


@functools.partial(jax.jit, static_argnames=("count", "tokens"))
def resized(rows: KeysValues, count: int, tokens: int) -> KeysValues:
    """Return the rows resized to `count` rows of `tokens` tokens, cut off or padded with zeros."""

    def resize(token_axis: int, layer: Array) -> Array:
        # (before, after, between) for each axis. Negative numbers cut off.
        padding = [(0, 0, 0)] * 4
        padding[0] = (0, count - layer.shape[0], 0)
        padding[token_axis] = (0, tokens - layer.shape[token_axis], 0)
        return jax.lax.pad(layer, jnp.zeros((), layer.dtype), padding)

    return _map_layers(resize, rows)


def _map_layers(function: Callable[..., Array], *memories: KeysValues) -> KeysValues:
    """Apply `function(token_axis, *arrays)` to the keys and to the values of each layer.

    `arrays` has one array from each of `memories`. The token axis is 3 for keys and 2 for values.
    """
    keys = []
    for layers in zip(*(memory.keys for memory in memories), strict=True):
        keys.append(function(3, *layers))
    values = []
    for layers in zip(*(memory.values for memory in memories), strict=True):
        values.append(function(2, *layers))
    return KeysValues(tuple(keys), tuple(values))


def _cut_into_pages(rows: Array, token_axis: int, page_tokens: int) -> Array:
    """Split the token axis of the rows into two axes: pages, and tokens of a page."""
    before = rows.shape[:token_axis]
    after = rows.shape[token_axis + 1 :]
    return rows.reshape(*before, -1, page_tokens, *after)


def _page_index(token_axis: int, row_indices: Array, page_slots: Array) -> tuple:
    """Return the index that selects pages of rows in the result of `_cut_into_pages`."""
    return (row_indices, *[slice(None)] * (token_axis - 1), page_slots)
