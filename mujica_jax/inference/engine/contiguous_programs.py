"""The memory of the contiguous engine and its compiled programs.

`prefill` reads prompts into rows, `decode` generates several tokens for all rows, and the others
move what is in memory. The layout of the memory stands in `contiguous.py`.
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

NEVER = -1e30  # finite, so that a fully masked row gives numbers and no NaN


class KeysValues(NamedTuple):
    """A memory of pages, rows or prefixes: one array a layer."""

    keys: tuple[Num[Array, "rows kv_heads head_dim tokens"], ...]
    values: tuple[Num[Array, "rows kv_heads tokens head_dim"], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens in each)."""
        return self.values[0].shape[0], self.values[0].shape[2]


class Memory(NamedTuple):
    """All KV cache of an engine."""

    pages: KeysValues
    rows: KeysValues
    prefixes: KeysValues  # length 0 where nothing is shared


class Places(NamedTuple):
    """Where the sequences of a call lie: one entry for each sequence, or for each tile."""

    row: Int[np.ndarray | Array, " rows"]
    offset: Int[np.ndarray | Array, " rows"]  # tokens before it are in the prefix
    prefix: Int[np.ndarray | Array, " rows"]  # -1: none

    @classmethod
    def nowhere(cls, count: int) -> "Places":
        """Return places without a prefix, as numpy arrays that may be written."""
        return cls(
            row=np.zeros(count, np.int32),
            offset=np.zeros(count, np.int32),
            prefix=np.full(count, -1, np.int32),
        )


class Tiles(NamedTuple):
    """A prefill call. A tile that is not used has length 0."""

    tokens: Int[np.ndarray | Array, "tiles time"]
    start: Int[np.ndarray | Array, " tiles"]
    length: Int[np.ndarray | Array, " tiles"]
    places: Places


class DecodeCall(NamedTuple):
    """A decode call: one entry for each sequence."""

    state: SlotState
    places: Places
    prefix_lengths: Int[np.ndarray | Array, " prefixes"]  # tokens
    stops: Int[Array, " stops"]  # token ids that end a sequence


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("memory",))
def prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: KVScales | None,
    memory: Memory,
    tiles: Tiles,
    prefix_lengths: Int[Array, " prefixes"],
) -> Memory:
    """Compute the keys and values of these tiles into their rows."""
    decoder = nnx.merge(graph, weights)
    keys = list(memory.rows.keys)
    values = list(memory.rows.values)
    width = memory.rows.shape[1]

    # Where each token is written. Padding is written out of bounds, that is nowhere.
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

    Without `kernels.paged_attention` the sequences are all rows, in order.
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
        target = jnp.where(running, in_row, width)  # a slot that does not run writes nowhere
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
    """Return `read(layer, query, keys, values)`.

    It is the attention of rows over the tokens that they hold and over their prefix. The first
    query of a row sees `seen` tokens of the row. Each of the `time` queries sees one token more
    than the query before. With `in_order` the sequences are all rows, as they lie in memory.
    """
    prefix = places.prefix
    prefix_length = jnp.where(prefix < 0, 0, prefix_lengths[prefix])
    # What a kernel needs to know of each row.
    row_table = jnp.stack([places.row, seen, jnp.maximum(prefix, 0), prefix_length], axis=1)
    # What XLA needs: which tokens each query may read, in its row and in the prefixes.
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
    """Return softmax attention over each row together with its prefix.

    Scores and weights are float32.
    """
    rows, time, heads, head_dim = query.shape
    compute_dtype = max(query.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
    keys = keys.astype(compute_dtype)
    values = values.astype(compute_dtype)
    prefix_keys = prefix_keys.astype(compute_dtype)
    prefix_values = prefix_values.astype(compute_dtype)
    kv_heads = keys.shape[1]
    width = keys.shape[3]

    # Put together the queries that read one head of keys.
    queries = heads // kv_heads * time
    grouped = query.astype(compute_dtype).reshape(rows, time, kv_heads, -1, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, queries, head_dim)

    # Scores of the row.
    scores = _product("rkqd,rkdw->rkqw", grouped, keys)
    by_time = (scores * head_dim**-0.5).reshape(rows, kv_heads, -1, time, width)
    scores = jnp.where(readable[:, None, None], by_time, NEVER).reshape(scores.shape)
    peak = jnp.max(scores, axis=-1, keepdims=True)

    # Scores of the prefixes, in one product for all rows: [kv_heads, rows x queries, head_dim] with
    # [kv_heads, head_dim, prefixes x length].
    length = prefix_keys.shape[0] * prefix_keys.shape[3]
    if length:
        together = grouped.transpose(1, 0, 2, 3).reshape(kv_heads, rows * queries, head_dim)
        flat_keys = prefix_keys.transpose(1, 2, 0, 3).reshape(kv_heads, head_dim, length)
        flat_values = prefix_values.transpose(1, 0, 2, 3).reshape(kv_heads, length, head_dim)
        prefix_scores = _product("kqd,kds->kqs", together, flat_keys) * head_dim**-0.5
        prefix_scores = prefix_scores.reshape(kv_heads, rows, queries, length).transpose(1, 0, 2, 3)
        prefix_scores = jnp.where(visible.reshape(rows, 1, 1, length), prefix_scores, NEVER)
        peak = jnp.maximum(peak, jnp.max(prefix_scores, axis=-1, keepdims=True))

    # Softmax over both, without a division before the end.
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


# Sums in float32.
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, donate_argnames=("pages",))
def copy_pages(
    pages: KeysValues, sources: Int[Array, " moves"], targets: Int[Array, " moves"]
) -> KeysValues:
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

    A row is cut into places for pages. `page_slots` are the numbers of these places.
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
    """Copy parts of rows into pages, the reverse of `load_pages`."""

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
    """Return `prefixes` resized to this shape, with one of them copied from its pages."""

    def store(token_axis: int, prefixes: Array, pages: Array) -> Array:
        # Move the axis of the pages before that of their tokens, and join the two.
        prefix = jnp.moveaxis(pages[page_indices], 0, token_axis - 1)
        before = prefix.shape[: token_axis - 1]
        after = prefix.shape[token_axis + 1 :]
        prefix = prefix.reshape(1, *before, -1, *after)
        return jax.lax.dynamic_update_slice(prefixes, prefix, (prefix_index, 0, 0, 0))

    return _map_layers(store, resized(prefixes, *shape), pages)


@functools.partial(jax.jit, donate_argnames=("rows",))
def shift_row(rows: KeysValues, row_index: Int[Array, ""], tokens: Int[Array, ""]) -> KeysValues:
    """Move the contents of a row to its front, by this many tokens."""

    def shift(token_axis: int, rows: Array) -> Array:
        shifted = jnp.roll(rows[row_index], -tokens, axis=token_axis - 1)
        return rows.at[row_index].set(shifted)

    return _map_layers(shift, rows)


@functools.partial(jax.jit, donate_argnames=("memory",))
def clear(memory: KeysValues, indices: Int[Array, " indices"]) -> KeysValues:
    """Set rows, or pages, to zero. An index beyond the last one changes nothing."""
    return jax.tree.map(lambda layer: layer.at[indices].set(0, mode="drop"), memory)


@jax.jit
def select_rows(rows: KeysValues, row_indices: Int[Array, " rows"]) -> KeysValues:
    return jax.tree.map(lambda layer: layer[row_indices], rows)


@functools.partial(jax.jit, static_argnames=("count", "tokens"))
def resized(rows: KeysValues, count: int, tokens: int) -> KeysValues:
    """Return `count` rows of `tokens` tokens, cut off or filled up with zeros."""

    def resize(token_axis: int, layer: Array) -> Array:
        padding = [(0, 0, 0)] * 4  # (before, after, between) of each axis
        padding[0] = (0, count - layer.shape[0], 0)
        padding[token_axis] = (0, tokens - layer.shape[token_axis], 0)
        return jax.lax.pad(layer, jnp.zeros((), layer.dtype), padding)

    return _map_layers(resize, rows)


def _map_layers(function: Callable[..., Array], *memories: KeysValues) -> KeysValues:
    """Return the memory of `function(token_axis, layer of each memory)` for all keys and values."""
    keys = []
    for layers in zip(*(memory.keys for memory in memories), strict=True):
        keys.append(function(3, *layers))
    values = []
    for layers in zip(*(memory.values for memory in memories), strict=True):
        values.append(function(2, *layers))
    return KeysValues(tuple(keys), tuple(values))


def _cut_into_pages(rows: Array, token_axis: int, page_tokens: int) -> Array:
    """Return the rows with the axis of their tokens split in two: pages and tokens of a page."""
    before = rows.shape[:token_axis]
    after = rows.shape[token_axis + 1 :]
    return rows.reshape(*before, -1, page_tokens, *after)


def _page_index(token_axis: int, row_indices: Array, page_slots: Array) -> tuple:
    """Return the index of these pages of these rows in the result of `_cut_into_pages`."""
    return (row_indices, *[slice(None)] * (token_axis - 1), page_slots)
