"""The engine on XLA, for CPU and GPU: every running request has a row of contiguous memory, the pages are where it comes from and goes.

Gathering pages anew at every step would cost as much memory traffic as the step itself. So a request's pages are loaded into its slot's
row once, decoding goes on in the row, and what was computed is written back to the pages when it is to be shared. A row remembers which
pages it holds, so a conversation that comes back to its slot loads nothing.

What several rows begin with (a system prompt, worked examples) is held once, as a group: its scores are one matrix product for all rows
instead of a read for each, and the rows hold only what follows. With a shared prompt of 384 tokens this reads a third of the memory
(prefix sharing as in Hydragen, arXiv 2402.05099, section 3). Rows are as wide as the longest of them needs, in steps of 1, 1.5, 2, 3, ...

Arrays of a layer: pages [pages, kv_heads, page_tokens, head_dim], rows [slots, kv_heads, width, head_dim], groups [groups, kv_heads,
length, head_dim]. Token n of a sequence lies at n - offset of its row, where offset is the length of its group.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.inference import sampling
from mujica_jax.inference.engine import Decoded, Engine, FlushRow, PrefillRow, SlotState, advance, bucket, filtered
from mujica_jax.models.decoder import Decoder

SMALLEST_WIDTH_TOKENS = 128
GROUPS = 2  # planner and worker have one beginning each
SMALLEST_GROUP_TOKENS, SMALLEST_GROUP_ROWS = 64, 4  # below, a product of its own costs more than it saves
TILE_TOKENS = {
    "cpu": 16
}  # a prefill call is cut into tiles of one request each: the padding is less than one tile a request
OTHER_TILE_TOKENS = 64
CALL_TILES = (4, 16, 64, 256)  # tiles in one prefill call: few programs, and with two or three calls little is padded
NEVER = -1e30  # finite, so that a fully masked row gives numbers and no NaN


class KeysValues(NamedTuple):
    """One array a layer."""

    keys: tuple[Float[Array, "rows kv_heads tokens head_dim"], ...]
    values: tuple[Float[Array, "rows kv_heads tokens head_dim"], ...]


class Memory(NamedTuple):
    pages: KeysValues
    rows: KeysValues
    groups: KeysValues  # length 0 where nothing is shared


class Places(NamedTuple):
    """Where the sequences of a call begin: one entry a slot, or a tile."""

    offset: Int[np.ndarray | Array, " rows"]  # tokens before it are in the group
    group: Int[np.ndarray | Array, " rows"]  # -1: none


class Tiles(NamedTuple):
    """A prefill call. A tile that is not used has slot = slots and length 0."""

    tokens: Int[np.ndarray | Array, "tiles time"]
    slot: Int[np.ndarray | Array, " tiles"]
    start: Int[np.ndarray | Array, " tiles"]
    length: Int[np.ndarray | Array, " tiles"]
    places: Places


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    """What a slot's row holds."""

    pages: list[tuple[int, int]] = dataclasses.field(
        default_factory=list
    )  # (page, its version) of the request, from the front
    tokens: int = 0  # of the sequence, computed or loaded
    offset: int = 0
    group: int = -1
    active: bool = False
    last_used: int = 0


@dataclasses.dataclass(frozen=True)
class _Group:
    pages: list[tuple[int, int]]
    tokens: int


class ResidentEngine(Engine):
    """See `Engine`."""

    def __init__(self, decoder: Decoder, **settings: Any) -> None:
        super().__init__(decoder, **settings)
        self._tile_tokens = TILE_TOKENS.get(jax.default_backend(), OTHER_TILE_TOKENS)
        self._smallest_width = max(SMALLEST_WIDTH_TOKENS, 2 * self.page_tokens)
        self._largest_width = -(-self.positions // self.page_tokens) * self.page_tokens
        self._version = np.zeros(self.num_pages, np.int64)  # counts what was written into a page
        self._clock = 0
        self._memory = Memory(self._empty(self.num_pages, self.page_tokens), *self._fresh_rows())
        self._rows = [_Row() for _ in range(self.slots)]
        self._groups: list[_Group | None] = []

    def forget(self) -> None:
        # Back to the first shapes too: a run that goes on after a kill computes in the shapes of one that was never killed.
        pages = self._memory.pages
        if any(layer.is_deleted() for layer in jax.tree.leaves(pages)):  # a call that took the memory over failed
            pages = self._empty(self.num_pages, self.page_tokens)
        self._memory = Memory(pages, *self._fresh_rows())
        self._rows = [_Row() for _ in range(self.slots)]
        self._groups = []

    def choose(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        if cached_tokens:
            # A page stands for all that comes before it: if a row holds the last one, it holds the others.
            index = (cached_tokens - 1) // self.page_tokens
            last = (pages[index], int(self._version[pages[index]]))
            for slot in free:
                row = self._rows[slot]
                if row.tokens >= cached_tokens and len(row.pages) > index and row.pages[index] == last:
                    return slot
        return min(free, key=lambda slot: self._rows[slot].last_used)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for some in _parts(pairs):
            sources, targets = _padded(some, (0, self.num_pages))
            self._count("copy", len(sources))
            self._memory = _copy(self._memory, sources, targets)
        for _, target in pairs:
            self._version[target] += 1

    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        self._clock += 1
        self._bring(rows)
        self._widen(max(row.start + len(row.tokens) - self._rows[row.slot].offset for row in rows))
        tiles = [tile for row in rows for tile in self._tiles(row)]
        while tiles:
            size = _call_tiles(len(tiles))
            self._prefill_tiles(tiles[:size], size)
            tiles = tiles[size:]
        for row in rows:
            self._rows[row.slot].tokens = row.start + len(row.tokens)

    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        running = np.asarray(state.remaining) > 0
        places = self._places(range(self.slots))
        written = np.asarray(state.position) + np.minimum(state.remaining, self.decode_steps) - places.offset
        self._widen(int(written[running].max(initial=1)))
        self._count("decode", filtered(state))
        self._memory, state, decoded = _decode(
            self._graph,
            self._weights,
            self._memory,
            state,
            places,
            self._group_lengths(),
            self._stops,
            steps=self.decode_steps,
            filtered=filtered(state),
        )
        state, decoded = jax.tree.map(np.array, (state, decoded))
        for slot in np.flatnonzero(running):
            self._rows[slot].tokens = int(state.position[slot])
        return state, decoded

    def flush(self, rows: Sequence[FlushRow]) -> None:
        moves = []
        for flushed in rows:
            row = self._rows[flushed.slot]
            row.pages = row.pages[: flushed.start // self.page_tokens]
            for index in range(len(row.pages), -(-flushed.stop // self.page_tokens)):
                page = flushed.pages[index]
                moves.append((flushed.slot, index - row.offset // self.page_tokens, page))
                self._version[page] += 1
                row.pages.append((page, int(self._version[page])))
        for some in _parts(moves):
            slots, indices, pages = _padded(some, (0, 0, self.num_pages))
            self._count("flush", len(slots))
            self._memory = _store(self._memory, slots, indices, pages)

    def retire(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        row = self._rows[slot]
        row.active, row.last_used = False, self._clock
        if broken_pages:
            self._rows[slot] = _Row(last_used=self._clock)
            for some in _parts([(page,) for page in broken_pages]):
                (pages,) = _padded(some, (self.num_pages,))
                self._memory = _clear(self._memory, np.int32(slot), pages)

    def _bring(self, rows: Sequence[PrefillRow]) -> None:
        """Make every row hold what its request has in pages."""
        fresh = []
        for row in rows:
            if self._holds(row):  # taken before a group forms: that may empty or cut rows that nobody has
                self._take(row)
            else:
                fresh.append(row)
        self._form_group(fresh)
        moves = []
        for row in fresh:
            self._take(row)
            held = self._rows[row.slot]
            held.group = self._best_group(held.pages, row.start)
            group = self._groups[held.group] if held.group >= 0 else None
            held.offset = 0 if group is None else group.tokens
            first, last = held.offset // self.page_tokens, -(-row.start // self.page_tokens)
            moves += [(row.slot, index - first, row.pages[index]) for index in range(first, last)]
        if not moves:
            return
        self._widen((1 + max(index for _, index, _ in moves)) * self.page_tokens)
        for some in _parts(moves):
            slots, indices, pages = _padded(some, (self.slots, 0, 0))
            self._count("load", len(slots))
            self._memory = _load(self._memory, slots, indices, pages)

    def _take(self, row: PrefillRow) -> None:
        held = self._rows[row.slot]
        held.pages, held.tokens, held.active = self._versions(row.pages), row.start, True

    def _holds(self, row: PrefillRow) -> bool:
        held, count = self._rows[row.slot], -(-row.start // self.page_tokens)
        if held.tokens < row.start or row.start < held.offset or len(held.pages) < count:
            return False
        return held.pages[:count] == self._versions(row.pages[:count])

    def _versions(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        return [(page, int(self._version[page])) for page in pages]

    def _form_group(self, fresh: Sequence[PrefillRow]) -> None:
        """Hold once what many rows begin with, if these do and no group does it yet."""
        beginnings = [self._versions(row.pages[: row.start // self.page_tokens]) for row in fresh]
        others = [row for row in self._rows if row.active]
        common = _common_beginning([*beginnings, *(row.pages[: row.tokens // self.page_tokens] for row in others)])
        tokens = len(common) * self.page_tokens
        if tokens < SMALLEST_GROUP_TOKENS or common not in [beginning[: len(common)] for beginning in beginnings]:
            return
        if any(group is not None and group.pages == common for group in self._groups):
            return
        used = {row.group for row in others}
        place = next((place for place in range(GROUPS) if place not in used), None)
        if place is None:
            return
        for row in self._rows:
            if row.group == place:  # an idle row that began with the group of this place
                row.pages, row.tokens, row.group, row.offset = [], 0, -1, 0
        self._hold_group(place, _Group(common, tokens))
        for slot, row in enumerate(self._rows):
            if row.active and row.pages[: len(common)] == common and row.tokens >= tokens > row.offset:
                self._count("shift")
                self._memory = _shift(self._memory, np.int32(slot), np.int32(tokens - row.offset))
                row.group, row.offset = place, tokens
        self._narrow()

    def _hold_group(self, place: int, group: _Group) -> None:
        while len(self._groups) <= place:
            self._groups.append(None)
        self._groups[place] = group
        length = bucket(
            max(one.tokens for one in self._groups if one is not None), SMALLEST_GROUP_TOKENS, self._largest_width
        )
        held = self._memory.groups.keys[0].shape
        if (len(self._groups), length) > (held[0], held[2]):
            larger = self._empty(max(len(self._groups), held[0]), max(length, held[2]))
            groups = jax.tree.map(
                lambda new, old: new.at[: old.shape[0], :, : old.shape[2]].set(old), larger, self._memory.groups
            )
            self._memory = self._memory._replace(groups=groups)
        pages = np.asarray([page for page, _ in group.pages], np.int32)
        self._count("group", len(pages))
        self._memory = _hold(self._memory, np.int32(place), pages)

    def _best_group(self, pages: Sequence[tuple[int, int]], start: int) -> int:
        """The longest group that these pages begin with, -1 if there is none."""
        fitting = [
            (group.tokens, place)
            for place, group in enumerate(self._groups)
            if group is not None and group.tokens <= start and pages[: len(group.pages)] == group.pages
        ]
        return max(fitting)[1] if fitting else -1

    def _places(self, slots: Iterable[int]) -> Places:
        rows = [self._rows[slot] for slot in slots]
        return Places(
            np.asarray([row.offset for row in rows], np.int32), np.asarray([row.group for row in rows], np.int32)
        )

    def _group_lengths(self) -> np.ndarray:
        lengths = [0 if group is None else group.tokens for group in self._groups]
        return np.asarray(lengths + [0] * (self._memory.groups.keys[0].shape[0] - len(lengths)), np.int32)

    def _tiles(self, row: PrefillRow) -> list[tuple[int, int, Sequence[int] | np.ndarray]]:
        size = self._tile_tokens
        return [
            (row.slot, row.start + first, row.tokens[first : first + size]) for first in range(0, len(row.tokens), size)
        ]

    def _prefill_tiles(self, tiles: Sequence[tuple[int, int, Any]], count: int) -> None:
        tokens = np.zeros((count, self._tile_tokens), np.int32)
        slots = np.full(count, self.slots, np.int32)  # tiles that are not used write nowhere
        starts, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        places = Places(np.zeros(count, np.int32), np.full(count, -1, np.int32))
        for index, (slot, start, ids) in enumerate(tiles):
            tokens[index, : len(ids)] = ids
            slots[index], starts[index], lengths[index] = slot, start, len(ids)
            places.offset[index], places.group[index] = self._rows[slot].offset, self._rows[slot].group
        self._count("prefill", count)
        call = Tiles(tokens, slots, starts, lengths, places)
        self._memory = _prefill(self._graph, self._weights, self._memory, call, self._group_lengths())

    def _widen(self, tokens: int) -> None:
        width = self._memory.rows.keys[0].shape[2]
        if tokens > width:
            wider = bucket(tokens, self._smallest_width, self._largest_width)
            self._memory = self._memory._replace(rows=_wider(self._memory.rows, wider))

    def _narrow(self) -> None:
        """Give up width that no active row needs."""
        needed = max((row.tokens - row.offset for row in self._rows if row.active), default=1)
        width = bucket(needed, self._smallest_width, self._largest_width)
        if width >= self._memory.rows.keys[0].shape[2]:
            return
        rows = jax.tree.map(lambda layer: layer[:, :, :width], self._memory.rows)
        self._memory = self._memory._replace(rows=rows)
        for row in self._rows:
            if row.tokens - row.offset > width:
                row.pages, row.tokens = [], 0

    def _fresh_rows(self) -> tuple[KeysValues, KeysValues]:
        return self._empty(self.slots, min(self._smallest_width, self._largest_width)), self._empty(1, 0)

    def _empty(self, rows: int, tokens: int) -> KeysValues:
        shape = (rows, self.config.num_kv_heads, tokens, self.config.head_dim)

        def layers() -> tuple[Array, ...]:
            return tuple(jnp.zeros(shape, self._dtype) for _ in range(self.config.num_layers))

        return KeysValues(layers(), layers())

    def _count(self, *program: Any) -> None:
        rows, groups = self._memory.rows.keys[0], self._memory.groups.keys[0]
        self._programs.add((*program, rows.shape, groups.shape))


def _common_beginning(sequences: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The longest beginning that at least SMALLEST_GROUP_ROWS sequences, and half of those that begin as they do, have in common."""
    common: list[tuple[int, int]] = []
    while True:
        counts: dict[tuple[int, int], int] = {}
        for sequence in sequences:
            if len(sequence) > len(common):
                counts[sequence[len(common)]] = counts.get(sequence[len(common)], 0) + 1
        page, count = max(counts.items(), key=lambda item: item[1], default=((0, 0), 0))
        if count < SMALLEST_GROUP_ROWS or (2 * count < len(sequences) and common):
            return common
        sequences = [
            sequence for sequence in sequences if len(sequence) > len(common) and sequence[len(common)] == page
        ]
        common.append(page)


def _call_tiles(waiting: int) -> int:
    """Tiles of the next call: all that wait, if they fill most of it, or as many as fill one."""
    for size in CALL_TILES:
        if waiting <= size:
            return size if 4 * waiting >= 3 * size or size == CALL_TILES[0] else CALL_TILES[CALL_TILES.index(size) - 1]
    return CALL_TILES[-1]


def _parts(moves: Sequence[tuple[int, ...]]) -> Iterable[Sequence[tuple[int, ...]]]:
    """Moves in lots of 256 or fewer."""
    return (moves[first : first + 256] for first in range(0, len(moves), 256))


def _padded(moves: Sequence[tuple[int, ...]], filling: tuple[int, ...]) -> list[np.ndarray]:
    """The columns of the moves, filled up to 4, 16, 64 or 256 with moves that do nothing."""
    size = next(size for size in (4, 16, 64, 256) if size >= len(moves))
    return list(np.asarray([*moves, *[filling] * (size - len(moves))], np.int32).T)


@functools.partial(jax.jit, donate_argnames=("memory",))
def _copy(memory: Memory, sources: Int[Array, " moves"], targets: Int[Array, " moves"]) -> Memory:
    pages = jax.tree.map(lambda layer: layer.at[targets].set(layer[sources], mode="drop"), memory.pages)
    return memory._replace(pages=pages)


@functools.partial(jax.jit, donate_argnames=("memory",))
def _load(
    memory: Memory, slots: Int[Array, " moves"], indices: Int[Array, " moves"], pages: Int[Array, " moves"]
) -> Memory:
    def load(rows: Array, layer: Array) -> Array:
        paged = rows.reshape(*rows.shape[:2], -1, layer.shape[2], rows.shape[3])
        return paged.at[slots, :, indices].set(layer[pages], mode="drop").reshape(rows.shape)

    return memory._replace(rows=jax.tree.map(load, memory.rows, memory.pages))


@functools.partial(jax.jit, donate_argnames=("memory",))
def _store(
    memory: Memory, slots: Int[Array, " moves"], indices: Int[Array, " moves"], pages: Int[Array, " moves"]
) -> Memory:
    def store(layer: Array, rows: Array) -> Array:
        paged = rows.reshape(*rows.shape[:2], -1, layer.shape[2], rows.shape[3])
        return layer.at[pages].set(paged[slots, :, indices], mode="drop")

    return memory._replace(pages=jax.tree.map(store, memory.pages, memory.rows))


@functools.partial(jax.jit, donate_argnames=("memory",))
def _hold(memory: Memory, place: Int[Array, ""], pages: Int[Array, " pages"]) -> Memory:
    def hold(groups: Array, layer: Array) -> Array:
        found = layer[pages].transpose(1, 0, 2, 3).reshape(1, layer.shape[1], -1, layer.shape[3])
        return jax.lax.dynamic_update_slice(groups, found, (place, 0, 0, 0))

    return memory._replace(groups=jax.tree.map(hold, memory.groups, memory.pages))


@functools.partial(jax.jit, donate_argnames=("memory",))
def _shift(memory: Memory, slot: Int[Array, ""], tokens: Int[Array, ""]) -> Memory:
    rows = jax.tree.map(lambda layer: layer.at[slot].set(jnp.roll(layer[slot], -tokens, axis=1)), memory.rows)
    return memory._replace(rows=rows)


@functools.partial(jax.jit, donate_argnames=("memory",))
def _clear(memory: Memory, slot: Int[Array, ""], pages: Int[Array, " pages"]) -> Memory:
    return memory._replace(
        rows=jax.tree.map(lambda layer: layer.at[slot].set(0), memory.rows),
        pages=jax.tree.map(lambda layer: layer.at[pages].set(0, mode="drop"), memory.pages),
    )


@functools.partial(jax.jit, static_argnames=("width",))
def _wider(rows: KeysValues, width: int) -> KeysValues:
    return jax.tree.map(lambda layer: jnp.pad(layer, ((0, 0), (0, 0), (0, width - layer.shape[2]), (0, 0))), rows)


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("memory",))
def _prefill(
    graph: nnx.GraphDef, weights: nnx.State, memory: Memory, tiles: Tiles, group_lengths: Int[Array, " groups"]
) -> Memory:
    decoder = nnx.merge(graph, weights)
    keys, values = list(memory.rows.keys), list(memory.rows.values)
    slots, _, width, _ = keys[0].shape
    offsets = jnp.arange(tiles.tokens.shape[1])[None, :]
    positions = tiles.start[:, None] + offsets
    in_row = positions - tiles.places.offset[:, None]
    targets = jnp.where(
        offsets < tiles.length[:, None], in_row, width
    )  # padding is written out of bounds, that is nowhere
    readable = jnp.arange(width)[None, None, :] <= in_row[:, :, None]
    visible = _visible(tiles.places.group, group_lengths, memory.groups)
    mine = jnp.minimum(tiles.slot, slots - 1)

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        index = (tiles.slot[:, None], slice(None), targets)
        keys[layer] = keys[layer].at[index].set(key.astype(keys[layer].dtype), mode="drop")
        values[layer] = values[layer].at[index].set(value.astype(values[layer].dtype), mode="drop")
        groups = memory.groups.keys[layer], memory.groups.values[layer]
        return _attention(query, keys[layer][mine], values[layer][mine], readable, *groups, visible)

    decoder(tiles.tokens, positions, attend, scan=False)
    return memory._replace(rows=KeysValues(tuple(keys), tuple(values)))


@functools.partial(jax.jit, static_argnames=("graph", "steps", "filtered"), donate_argnames=("memory",))
def _decode(
    graph: nnx.GraphDef,
    weights: nnx.State,
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
    slots, _, width, _ = memory.rows.keys[0].shape
    every = jnp.arange(slots)
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
            index = (every, slice(None), write_at)
            keys[layer] = keys[layer].at[index].set(key[:, 0].astype(keys[layer].dtype), mode="drop")
            values[layer] = values[layer].at[index].set(value[:, 0].astype(values[layer].dtype), mode="drop")
            groups = memory.groups.keys[layer], memory.groups.values[layer]
            return _attention(query, keys[layer], values[layer], readable, *groups, visible)

        hidden = decoder(state.token[:, None], state.position[:, None], attend, scan=False)
        state, decoded = advance(decoder.logits(hidden[:, 0]), state, stops, filters)
        return (KeysValues(tuple(keys), tuple(values)), state), decoded

    (rows, state), decoded = jax.lax.scan(step, (memory.rows, state), None, length=steps)
    return memory._replace(rows=rows), state, decoded


def _visible(
    group: Int[np.ndarray | Array, " rows"], lengths: Int[Array, " groups"], groups: KeysValues
) -> Bool[Array, "rows groups tokens"]:
    count, _, tokens, _ = groups.keys[0].shape
    inside = jnp.arange(tokens)[None, :] < lengths[:, None]
    return (group[:, None, None] == jnp.arange(count)[None, :, None]) & inside[None]


def _attention(
    query: Float[Array, "rows time heads head_dim"],
    keys: Float[Array, "rows kv_heads width head_dim"],
    values: Float[Array, "rows kv_heads width head_dim"],
    readable: Bool[Array, "rows time width"],
    group_keys: Float[Array, "groups kv_heads length head_dim"],
    group_values: Float[Array, "groups kv_heads length head_dim"],
    visible: Bool[Array, "rows groups length"],
) -> Float[Array, "rows time heads head_dim"]:
    """Softmax attention over a row and, together with it, over the row's group. Scores and weights are float32."""
    rows, time, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    queries = heads // kv_heads * time  # of one head of keys
    grouped = query.reshape(rows, time, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, kv_heads, queries, head_dim)
    scores = jnp.einsum("rkqd,rkwd->rkqw", grouped, keys).astype(jnp.float32) * head_dim**-0.5
    by_time = scores.reshape(rows, kv_heads, -1, time, keys.shape[2])
    scores = jnp.where(readable[:, None, None], by_time, NEVER).reshape(scores.shape)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    length = group_keys.shape[0] * group_keys.shape[2]
    if length:
        # One product for all rows: [kv_heads, rows x queries, head_dim] with [kv_heads, groups x length, head_dim].
        together = grouped.transpose(1, 0, 2, 3).reshape(kv_heads, rows * queries, head_dim)
        flat_keys = group_keys.transpose(1, 0, 2, 3).reshape(kv_heads, length, head_dim)
        flat_values = group_values.transpose(1, 0, 2, 3).reshape(kv_heads, length, head_dim)
        group_scores = jnp.einsum("kqd,ksd->kqs", together, flat_keys).astype(jnp.float32) * head_dim**-0.5
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
