"""The engine on XLA, for CPU and GPU: every running request has a row of contiguous memory, the pages are where it comes from and goes.

Gathering pages anew at every step would cost as much memory traffic as the step itself. So a request's pages are loaded into its slot's
row once, decoding goes on in the row, and what was computed is written back to the pages when it is to be shared. A row remembers which
pages it holds, so a conversation that comes back to its slot loads nothing.

What several rows begin with (a system prompt, worked examples) is held once, as a group: its scores are one matrix product for all rows
instead of a read for each, and the rows hold only what follows. With a shared prompt of 384 tokens this reads a third of the memory
(prefix sharing as in Hydragen, arXiv 2402.05099, section 3). Rows are as wide as the longest of them needs, in steps of 1, 1.5, 2, 3, ...,
and there are as many as run: all slots, half or a quarter of them.

Arrays of a layer: keys [n, kv_heads, head_dim, tokens] and values [n, kv_heads, tokens, head_dim], where n counts pages, rows or groups:
both products then run along what lies together (on CPU half the time of keys laid out like values). Token t of a sequence lies at
t - offset of its row, where offset is the length of its group.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.inference import sampling
from mujica_jax.inference.engine import (
    Decoded,
    Engine,
    FlushRow,
    PrefillRow,
    SlotState,
    advance,
    bucket,
    filtered,
    narrowed,
)
from mujica_jax.models.decoder import Decoder

SMALLEST_WIDTH_TOKENS = 128
GROUPS = 2  # planner and worker have one beginning each
SMALLEST_GROUP_TOKENS, SMALLEST_GROUP_ROWS = 64, 4  # below, a product of its own costs more than it saves
TILE_TOKENS = {
    "cpu": 16
}  # a prefill call is cut into tiles of one request each: the padding is less than one tile a request
OTHER_TILE_TOKENS = 64
CALL_TILES = (4, 16, 64, 256)  # tiles in one prefill call: few programs, and with two or three calls little is padded
ROW_LEVELS = (1, 2, 4)  # rows there may be: slots divided by one of these
CALLS_BEFORE_FEWER_ROWS = 2  # few requests in this many decode calls: not only between a turn and the next
NEVER = -1e30  # finite, so that a fully masked row gives numbers and no NaN


class KeysValues(NamedTuple):
    """One array a layer."""

    keys: tuple[Float[Array, "rows kv_heads head_dim tokens"], ...]
    values: tuple[Float[Array, "rows kv_heads tokens head_dim"], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens in each)."""
        return self.values[0].shape[0], self.values[0].shape[2]


class Memory(NamedTuple):
    pages: KeysValues
    rows: KeysValues
    groups: KeysValues  # length 0 where nothing is shared


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


@dataclasses.dataclass(eq=False, slots=True)
class _Held:
    """What a slot has in a row."""

    row: int = -1  # -1: nothing
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
        self._row_levels = sorted({-(-self.slots // level) for level in ROW_LEVELS})
        self._version = np.zeros(self.num_pages, np.int64)  # counts what was written into a page
        self._clock = 0
        self._start(self._empty(self.num_pages, self.page_tokens))

    def forget(self) -> None:
        pages = self._memory.pages
        if any(layer.is_deleted() for layer in jax.tree.leaves(pages)):  # a call that took the memory over failed
            pages = self._empty(self.num_pages, self.page_tokens)
        self._start(pages)

    def _start(self, pages: KeysValues) -> None:
        """Empty rows in the first shapes: a run that goes on after a kill computes in the shapes of one that was never killed."""
        rows = self._empty(self._row_levels[0], min(self._smallest_width, self._largest_width))
        self._memory = Memory(pages, rows, self._empty(1, 0))
        self._held = [_Held() for _ in range(self.slots)]
        self._slot_of_row = [-1] * self._row_levels[0]
        self._groups: list[_Group | None] = []
        self._calls_with_few = 0

    def choose(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        if cached_tokens:
            # A page stands for all that comes before it: if a row holds the last one, it holds the others.
            index = (cached_tokens - 1) // self.page_tokens
            last = (pages[index], int(self._version[pages[index]]))
            for slot in free:
                held = self._held[slot]
                if held.tokens >= cached_tokens and len(held.pages) > index and held.pages[index] == last:
                    return slot
        return min(free, key=lambda slot: self._held[slot].last_used)

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
        self._widen(max(row.start + len(row.tokens) - self._held[row.slot].offset for row in rows))
        tiles = [tile for row in rows for tile in self._tiles(row)]
        while tiles:
            size = _call_tiles(len(tiles))
            self._prefill_tiles(tiles[:size], size)
            tiles = tiles[size:]
        for row in rows:
            self._held[row.slot].tokens = row.start + len(row.tokens)

    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        slots = np.flatnonzero(state.remaining)
        self._give_up_rows(len(slots))
        rows = np.asarray([self._held[slot].row for slot in slots])
        held = [self._held[slot] for slot in slots]
        places = Places(np.zeros(self._num_rows, np.int32), np.full(self._num_rows, -1, np.int32))
        places.offset[rows] = [one.offset for one in held]
        places.group[rows] = [one.group for one in held]
        in_rows = SlotState.idle(self._num_rows)
        for all_rows, all_slots in zip(in_rows, state, strict=True):
            all_rows[rows] = all_slots[slots]
        written = in_rows.position + np.minimum(in_rows.remaining, self.decode_steps) - places.offset
        self._widen(int(written[rows].max(initial=1)))
        self._count("decode", filtered(state))
        with self._over_mesh():
            self._memory, after, found = _decode(
                self._graph,
                self._weights,
                self._memory,
                in_rows,
                places,
                self._group_lengths(),
                self._stops,
                steps=self.decode_steps,
                filtered=filtered(state),
            )
        state = SlotState(*map(np.array, state))
        for all_slots, all_rows in zip(state, after, strict=True):
            all_slots[slots] = np.asarray(all_rows)[rows]
        decoded = Decoded(*(np.zeros((self.decode_steps, self.slots), array.dtype) for array in found))
        for all_slots, all_rows in zip(decoded, found, strict=True):
            all_slots[:, slots] = np.asarray(all_rows)[:, rows]
        for slot, one in zip(slots, held, strict=True):
            one.tokens = int(state.position[slot])
        return state, decoded

    def flush(self, rows: Sequence[FlushRow]) -> None:
        moves = []
        for flushed in rows:
            held = self._held[flushed.slot]
            held.pages = held.pages[: flushed.start // self.page_tokens]
            for index in range(len(held.pages), -(-flushed.stop // self.page_tokens)):
                page = flushed.pages[index]
                moves.append((held.row, index - held.offset // self.page_tokens, page))
                self._version[page] += 1
                held.pages.append((page, int(self._version[page])))
        for some in _parts(moves):
            places, indices, pages = _padded(some, (0, 0, self.num_pages))
            self._count("flush", len(places))
            self._memory = _store(self._memory, places, indices, pages)

    def retire(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        held = self._held[slot]
        held.active, held.last_used = False, self._clock
        if broken_pages:
            # A request that was given up before its prompt was read has no row; -1 would be the last one, which is somebody else's.
            row = held.row if held.row >= 0 else self._num_rows
            for some in _parts([(page,) for page in broken_pages]):
                (pages,) = _padded(some, (self.num_pages,))
                self._memory = _clear(self._memory, np.int32(row), pages)
            self._lose(held)

    @property
    def _num_rows(self) -> int:
        return len(self._slot_of_row)

    def _lose(self, held: _Held) -> None:
        """What a slot had in a row is there no more."""
        if held.row >= 0:
            self._slot_of_row[held.row] = -1
        held.row, held.pages, held.tokens, held.group, held.offset = -1, [], 0, -1, 0

    def _bring(self, rows: Sequence[PrefillRow]) -> None:
        """Make every row hold what its request has in pages."""
        fresh = [row for row in rows if not self._holds(row)]
        for row in fresh:
            held = self._held[row.slot]
            held.pages, held.tokens, held.group, held.offset = [], 0, -1, 0
        self._make_rows(rows)
        self._form_group(fresh)
        moves = []
        for row in rows:
            held = self._held[row.slot]
            pages = self._versions(row.pages)
            if row in fresh:
                group = self._best_group(pages, row.start)
                offset = 0 if group < 0 else self._groups[group].tokens  # pyright: ignore[reportOptionalMemberAccess]
                held.group, held.offset = group, offset
                first, last = offset // self.page_tokens, -(-row.start // self.page_tokens)
                moves += [(held.row, index - first, row.pages[index]) for index in range(first, last)]
            held.pages, held.tokens = pages, row.start
        if not moves:
            return
        self._widen((1 + max(index for _, index, _ in moves)) * self.page_tokens)
        for some in _parts(moves):
            places, indices, pages = _padded(some, (self._num_rows, 0, 0))
            self._count("load", len(places))
            self._memory = _load(self._memory, places, indices, pages)

    def _holds(self, row: PrefillRow) -> bool:
        held, count = self._held[row.slot], -(-row.start // self.page_tokens)
        if held.row < 0 or held.tokens < row.start or row.start < held.offset or len(held.pages) < count:
            return False
        return held.pages[:count] == self._versions(row.pages[:count])

    def _make_rows(self, rows: Sequence[PrefillRow]) -> None:
        """A row for every request: a free one, that of an idle slot, or a new one."""
        for row in rows:
            self._held[row.slot].active = True
        needed = sum(held.active for held in self._held)
        if needed > self._num_rows:
            count = next(level for level in self._row_levels if level >= needed)
            self._memory = self._memory._replace(rows=_larger(self._memory.rows, count, self._memory.rows.shape[1]))
            self._slot_of_row += [-1] * (count - self._num_rows)
        without = [row.slot for row in rows if self._held[row.slot].row < 0]
        free = [place for place, slot in enumerate(self._slot_of_row) if slot < 0]
        idle = sorted(
            (held for held in self._held if held.row >= 0 and not held.active), key=lambda held: -held.last_used
        )
        for slot in without:
            if not free:
                free.append(idle[-1].row)
                self._lose(idle.pop())
            self._held[slot].row = free.pop(0)
            self._slot_of_row[self._held[slot].row] = slot

    def _give_up_rows(self, running: int) -> None:
        """Go on with fewer rows where few requests run: a step costs what its rows cost, whether they run or not."""
        active = sum(held.active for held in self._held)
        assert running <= active, "what decodes was prefilled"
        count = next(level for level in self._row_levels if level >= active)
        self._calls_with_few = self._calls_with_few + 1 if count < self._num_rows else 0
        if self._calls_with_few < CALLS_BEFORE_FEWER_ROWS:
            return
        self._calls_with_few = 0
        for held in self._held:
            if not held.active:
                self._lose(held)
        kept = [held for held in self._held if held.active]
        places = np.asarray([held.row for held in kept] + [0] * (count - len(kept)), np.int32)
        self._memory = self._memory._replace(rows=_pick(self._memory.rows, places))
        self._slot_of_row = [-1] * count
        slot_of = {id(held): slot for slot, held in enumerate(self._held)}
        for place, held in enumerate(kept):
            held.row, self._slot_of_row[place] = place, slot_of[id(held)]

    def _versions(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        return [(page, int(self._version[page])) for page in pages]

    def _form_group(self, fresh: Sequence[PrefillRow]) -> None:
        """Hold once what many rows begin with, if these do and no group does it yet."""
        beginnings = [self._versions(row.pages[: row.start // self.page_tokens]) for row in fresh]
        slots = {row.slot for row in fresh}
        others = [held for slot, held in enumerate(self._held) if held.active and slot not in slots]
        common = _common_beginning([*beginnings, *(held.pages[: held.tokens // self.page_tokens] for held in others)])
        tokens = len(common) * self.page_tokens
        if tokens < SMALLEST_GROUP_TOKENS or common not in [beginning[: len(common)] for beginning in beginnings]:
            return
        if any(group is not None and group.pages == common for group in self._groups):
            return
        used = {held.group for held in others}
        place = next((place for place in range(GROUPS) if place not in used), None)
        if place is None:
            return
        for held in self._held:
            if held.group == place and not held.active:  # it began with the group that this place had
                self._lose(held)
        self._hold_group(place, _Group(common, tokens))
        for held in others:
            if held.pages[: len(common)] == common and held.tokens >= tokens > held.offset:
                self._count("shift")
                self._memory = _shift(self._memory, np.int32(held.row), np.int32(tokens - held.offset))
                held.group, held.offset = place, tokens
        self._narrow(others)

    def _hold_group(self, place: int, group: _Group) -> None:
        while len(self._groups) <= place:
            self._groups.append(None)
        self._groups[place] = group
        longest = max(one.tokens for one in self._groups if one is not None)
        length = bucket(longest, SMALLEST_GROUP_TOKENS, self._largest_width)
        count, held = self._memory.groups.shape
        if len(self._groups) > count or length > held:
            groups = _larger(self._memory.groups, max(len(self._groups), count), max(length, held))
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

    def _group_lengths(self) -> np.ndarray:
        lengths = [0 if group is None else group.tokens for group in self._groups]
        return np.asarray(lengths + [0] * (self._memory.groups.shape[0] - len(lengths)), np.int32)

    def _tiles(self, row: PrefillRow) -> list[tuple[_Held, int, Sequence[int] | np.ndarray]]:
        size, held = self._tile_tokens, self._held[row.slot]
        return [
            (held, row.start + first, row.tokens[first : first + size]) for first in range(0, len(row.tokens), size)
        ]

    def _prefill_tiles(self, tiles: Sequence[tuple[_Held, int, Any]], count: int) -> None:
        tokens = np.zeros((count, self._tile_tokens), np.int32)
        rows = np.full(count, self._num_rows, np.int32)  # tiles that are not used write nowhere
        starts, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        places = Places(np.zeros(count, np.int32), np.full(count, -1, np.int32))
        for index, (held, start, ids) in enumerate(tiles):
            tokens[index, : len(ids)] = ids
            rows[index], starts[index], lengths[index] = held.row, start, len(ids)
            places.offset[index], places.group[index] = held.offset, held.group
        self._count("prefill", count)
        call = Tiles(tokens, rows, starts, lengths, places)
        with self._over_mesh():
            self._memory = _prefill(self._graph, self._weights, self._memory, call, self._group_lengths())

    def _widen(self, tokens: int) -> None:
        if tokens > self._memory.rows.shape[1]:
            width = bucket(tokens, self._smallest_width, self._largest_width)
            self._memory = self._memory._replace(rows=_larger(self._memory.rows, self._num_rows, width))

    def _narrow(self, active: Sequence[_Held]) -> None:
        """Give up width that no active row needs."""
        needed = max((held.tokens - held.offset for held in active), default=1)
        width = bucket(needed, self._smallest_width, self._largest_width)
        if width >= self._memory.rows.shape[1]:
            return
        self._memory = self._memory._replace(rows=_narrower(self._memory.rows, width))
        for held in self._held:
            if held.tokens - held.offset > width:
                self._lose(held)

    def _empty(self, rows: int, tokens: int) -> KeysValues:
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        sharding = self.mesh and NamedSharding(self.mesh, PartitionSpec(None, "tensor"))

        def layers(*shape: int) -> tuple[Array, ...]:
            return tuple(jnp.zeros(shape, self._dtype, device=sharding) for _ in range(self.config.num_layers))

        return KeysValues(layers(rows, heads, head_dim, tokens), layers(rows, heads, tokens, head_dim))

    def _count(self, *program: Any) -> None:
        self._programs.add((*program, self._memory.rows.shape, self._memory.groups.shape))


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
    memory: Memory, places: Int[Array, " moves"], indices: Int[Array, " moves"], pages: Int[Array, " moves"]
) -> Memory:
    def load(axis: int, rows: Array, layer: Array) -> Array:
        paged, index = _paged(rows, axis, layer.shape[axis]), _page_of_row(places, indices, axis)
        return paged.at[index].set(layer[pages], mode="drop").reshape(rows.shape)

    return memory._replace(rows=_both(load, memory.rows, memory.pages))


@functools.partial(jax.jit, donate_argnames=("memory",))
def _store(
    memory: Memory, places: Int[Array, " moves"], indices: Int[Array, " moves"], pages: Int[Array, " moves"]
) -> Memory:
    def store(axis: int, layer: Array, rows: Array) -> Array:
        paged, index = _paged(rows, axis, layer.shape[axis]), _page_of_row(places, indices, axis)
        return layer.at[pages].set(paged[index], mode="drop")

    return memory._replace(pages=_both(store, memory.pages, memory.rows))


@functools.partial(jax.jit, donate_argnames=("memory",))
def _hold(memory: Memory, place: Int[Array, ""], pages: Int[Array, " pages"]) -> Memory:
    def hold(axis: int, groups: Array, layer: Array) -> Array:
        found = jnp.moveaxis(layer[pages], 0, axis - 1)  # the pages beside the tokens of each
        found = found.reshape(1, *found.shape[: axis - 1], -1, *found.shape[axis + 1 :])
        return jax.lax.dynamic_update_slice(groups, found, (place, 0, 0, 0))

    return memory._replace(groups=_both(hold, memory.groups, memory.pages))


@functools.partial(jax.jit, donate_argnames=("memory",))
def _shift(memory: Memory, place: Int[Array, ""], tokens: Int[Array, ""]) -> Memory:
    def shift(axis: int, rows: Array) -> Array:
        return rows.at[place].set(jnp.roll(rows[place], -tokens, axis=axis - 1))

    return memory._replace(rows=_both(shift, memory.rows))


@functools.partial(jax.jit, donate_argnames=("memory",))
def _clear(memory: Memory, place: Int[Array, ""], pages: Int[Array, " pages"]) -> Memory:
    return memory._replace(
        rows=jax.tree.map(lambda layer: layer.at[place].set(0, mode="drop"), memory.rows),
        pages=jax.tree.map(lambda layer: layer.at[pages].set(0, mode="drop"), memory.pages),
    )


@jax.jit
def _pick(rows: KeysValues, places: Int[Array, " rows"]) -> KeysValues:
    return jax.tree.map(lambda layer: layer[places], rows)


@functools.partial(jax.jit, static_argnames=("count", "tokens"))
def _larger(rows: KeysValues, count: int, tokens: int) -> KeysValues:
    def pad(axis: int, layer: Array) -> Array:
        filling = [(0, 0)] * 4
        filling[0], filling[axis] = (0, count - layer.shape[0]), (0, tokens - layer.shape[axis])
        return jnp.pad(layer, filling)

    return _both(pad, rows)


@functools.partial(jax.jit, static_argnames=("tokens",))
def _narrower(rows: KeysValues, tokens: int) -> KeysValues:
    return _both(lambda axis, layer: jax.lax.slice_in_dim(layer, 0, tokens, axis=axis), rows)


def _both(function: Callable[..., Array], *memories: KeysValues) -> KeysValues:
    """`function(axis of the tokens, layer of each memory)` for the keys and for the values of every layer."""
    keys = (function(3, *layers) for layers in zip(*(memory.keys for memory in memories), strict=True))
    values = (function(2, *layers) for layers in zip(*(memory.values for memory in memories), strict=True))
    return KeysValues(tuple(keys), tuple(values))


def _paged(rows: Array, axis: int, page_tokens: int) -> Array:
    """The tokens of a row as pages of tokens."""
    return rows.reshape(*rows.shape[:axis], -1, page_tokens, *rows.shape[axis + 1 :])


def _page_of_row(places: Array, indices: Array, axis: int) -> tuple:
    return (places, *[slice(None)] * (axis - 1), indices)


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("memory",))
def _prefill(
    graph: nnx.GraphDef, weights: nnx.State, memory: Memory, tiles: Tiles, group_lengths: Int[Array, " groups"]
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

        hidden = decoder(state.token[:, None], state.position[:, None], attend, scan=False)
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
    keys: Float[Array, "rows kv_heads head_dim width"],
    values: Float[Array, "rows kv_heads width head_dim"],
    readable: Bool[Array, "rows time width"],
    group_keys: Float[Array, "groups kv_heads head_dim length"],
    group_values: Float[Array, "groups kv_heads length head_dim"],
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
    if time == 1 and keys.dtype == jnp.float32:
        # A few queries a row: XLA on CPU runs this sum on all cores and the product on one.
        scores = jnp.sum(grouped[..., None] * keys[:, :, None], axis=3)
    else:
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
