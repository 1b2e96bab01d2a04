"""The engine on XLA, for CPU and GPU: every running request has a row of contiguous memory, the
pages are where it comes from and goes.

Gathering pages again at every step would cost as much memory traffic as the step itself. So a
request's pages are loaded into its slot's row once, decoding goes on in the row, and what was
computed is written back to the pages when it is to be shared. A row remembers which pages it holds,
so a conversation that comes back to its slot loads nothing.

What several rows begin with (a system prompt, worked examples) is held once, as a prefix: its
scores are one matrix product for all rows instead of a read for each, and the rows hold only what
follows. With a shared prompt of 384 tokens this reads a third of the memory (prefix sharing as in
Hydragen, arXiv 2402.05099, section 3).

Every shape of the memory is a program of its own (docs/LOG.md has what that costs). Kernels of our
own read what a row holds, wherever it lies: then the memory has one shape, and a call takes as many
rows as run, all slots, a half, a quarter or an eighth of them. XLA reads every row to its end: then
rows are as wide as the longest of them needs, in steps of 1, 1.5, 2, 3, ..., and as many as run.

Arrays of a layer: keys [n, kv_heads, head_dim, tokens] and values [n, kv_heads, tokens, head_dim],
where n counts pages, rows or prefixes: both products then run along what lies together (on CPU a
fifth to a half faster with 48 rows than keys laid out like values, and as fast with 256). Token t
of a sequence lies at t - offset of its row, where offset is the length of its prefix.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from mujica_jax.inference.engine import contiguous_programs as programs
from mujica_jax.inference.engine.base import (
    Decoded,
    Engine,
    FlushRow,
    PrefillRow,
    SlotState,
    bucket,
    filtered,
    lots,
)
from mujica_jax.models import cpu_calls
from mujica_jax.models.decoder import Decoder, unstacked

MIN_WIDTH_TOKENS = 256
MAX_PREFIXES = 2  # planner and worker have one beginning each
MIN_PREFIX_TOKENS, MIN_PREFIX_ROWS = 64, 4  # below, a product of its own costs more than it saves
# A prefill call is cut into tiles of one request each: the padding is less than one tile a request.
# XLA reads a row once a tile, kernels of our own (`cpu_calls`) lose less by small ones. (Tokens in
# a tile, tiles in one call: every size of a call is a program for each shape of the rows.)
TILES = {"cpu kernels": (8, (16, 64)), "cpu": (16, (8, 64))}
OTHER_TILES = (64, (8, 64))
ROW_LEVELS = (1, 2, 4)  # rows there may be: slots divided by one of these
KERNEL_ROW_LEVELS = (*ROW_LEVELS, 8)  # of a decode call
CALLS_BEFORE_FEWER_ROWS = (
    2  # few requests in this many decode calls: not only between a turn and the next
)


@dataclasses.dataclass(eq=False, slots=True)
class _SlotCache:
    """What a slot has in a row."""

    row: int = -1  # -1: nothing
    # (page, its version) of the request, from the front
    pages: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    tokens: int = 0  # of the sequence, computed or loaded
    offset: int = 0
    prefix: int = -1
    active: bool = False
    last_used: int = 0


@dataclasses.dataclass(frozen=True)
class _SharedPrefix:
    pages: list[tuple[int, int]]
    tokens: int


class ContiguousEngine(Engine):
    """See `Engine`."""

    def __init__(self, decoder: Decoder, **settings: Any) -> None:
        super().__init__(decoder, **settings)
        self._largest_width = -(-self.positions // self.page_tokens) * self.page_tokens
        self._smallest_width = max(MIN_WIDTH_TOKENS, 2 * self.page_tokens)
        with self._over_mesh():
            self._kernels = cpu_calls.can_attend(self.config.head_dim, self._dtype)
        if (
            self._kernels or self._largest_width < 1.5 * self._smallest_width
        ):  # a second one is not worth its programs
            self._smallest_width = self._largest_width
        # More than the searches of one turn, which may all be the same.
        self._prefix_rows = max(MIN_PREFIX_ROWS, self.slots // 8)
        levels = KERNEL_ROW_LEVELS if self._kernels else ROW_LEVELS
        self._row_levels = sorted({-(-self.slots // level) for level in levels})
        self._version = np.zeros(self.num_pages, np.int64)  # counts what was written into a page
        self._clock = 0
        self._start(self._empty(self.num_pages, self.page_tokens))
        reader = "cpu kernels" if self._kernels else jax.default_backend()
        self.tile_tokens, self.call_tiles = TILES.get(reader, OTHER_TILES)
        self.min_call_tokens = self.call_tiles[0] * self.tile_tokens

    def _use(self, weights: nnx.State) -> None:
        super()._use(weights)
        with self._over_mesh():
            turned = jax.default_backend() == "cpu" and self.mesh is None
            least = cpu_calls.LARGE_MATRIX[self._compute_dtype.name] if turned else None
            self._weights = unstacked(self._weights, self.config, output_major_from=least)

    def reset_cache(self) -> None:
        pages = self._memory.pages
        if any(
            layer.is_deleted() for layer in jax.tree.leaves(pages)
        ):  # a call that took the memory over failed
            pages = self._empty(self.num_pages, self.page_tokens)
        self._start(pages)

    def _start(self, pages: programs.KeysValues) -> None:
        """Empty rows in the first shapes: a run that goes on after a kill computes in the shapes of
        one that was never killed."""
        self._width = min(self._smallest_width, self._largest_width)  # that the rows are to have
        count = self._row_levels[-1 if self._kernels else 0]
        prefixes = self._empty(MAX_PREFIXES, self._width) if self._kernels else self._empty(1, 0)
        self._memory = programs.Memory(pages, self._empty(count, self._width), prefixes)
        self._slot_caches = [_SlotCache() for _ in range(self.slots)]
        self._slot_of_row = [-1] * count
        self._prefixes: list[_SharedPrefix | None] = []
        self._calls_with_few = 0

    def choose_slot(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        if cached_tokens:
            # A page stands for all that comes before it: if a row holds the last one, it holds the
            # others.
            index = (cached_tokens - 1) // self.page_tokens
            last = (pages[index], int(self._version[pages[index]]))
            for slot in free:
                held = self._slot_caches[slot]
                if (
                    held.tokens >= cached_tokens
                    and len(held.pages) > index
                    and held.pages[index] == last
                ):
                    return slot
        return min(free, key=lambda slot: self._slot_caches[slot].last_used)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for sources, targets in lots(pairs):
            self._programs.add(("copy",))
            self._memory = self._memory._replace(
                pages=programs.copy_pages(self._memory.pages, sources, targets)
            )
        for _, target in pairs:
            self._version[target] += 1

    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        self._clock += 1
        self._load(rows)
        tiles = [
            (
                self._slot_caches[row.slot],
                row.start + first,
                row.tokens[first : first + self.tile_tokens],
            )
            for row in rows
            for first in range(0, len(row.tokens), self.tile_tokens)
        ]
        while tiles:
            size = _call_tiles(len(tiles), self.call_tiles)
            self._prefill_tiles(tiles[:size], size)
            tiles = tiles[size:]
        for row in rows:
            self._slot_caches[row.slot].tokens = row.start + len(row.tokens)

    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        slots = np.flatnonzero(state.remaining)
        held = [self._slot_caches[slot] for slot in slots]
        if self._kernels:
            count, rows = self._level(len(slots)), np.arange(len(slots))
        else:
            self._shrink_rows(len(slots))
            count, rows = self._num_rows, np.asarray([one.row for one in held])
        places = programs.Places.nowhere(count)
        places.row[rows] = [one.row for one in held]
        places.offset[rows] = [one.offset for one in held]
        places.prefix[rows] = [one.prefix for one in held]
        in_rows = SlotState.idle(count)
        for all_rows, all_slots in zip(in_rows, state, strict=True):
            all_rows[rows] = all_slots[slots]
        written = (
            in_rows.position + np.minimum(in_rows.remaining, self.decode_steps) - places.offset
        )
        self._fit_rows(int(written[rows].max(initial=1)))
        self._count("decode", filtered(state), count)
        with self._over_mesh():
            self._memory, after, found = programs.decode(
                self._graph,
                self._weights,
                self._scales,
                self._memory,
                in_rows,
                places,
                self._prefix_lengths(),
                self._stops,
                steps=self.decode_steps,
                filtered=filtered(state),
            )
        state = SlotState(*map(np.array, state))
        for all_slots, all_rows in zip(state, after, strict=True):
            all_slots[slots] = np.asarray(all_rows)[rows]
        decoded = Decoded(
            *(np.zeros((self.decode_steps, self.slots), array.dtype) for array in found)
        )
        for all_slots, all_rows in zip(decoded, found, strict=True):
            all_slots[:, slots] = np.asarray(all_rows)[:, rows]
        for slot, one in zip(slots, held, strict=True):
            one.tokens = int(state.position[slot])
        return state, decoded

    def flush(self, rows: Sequence[FlushRow]) -> None:
        moves = []
        for flushed in rows:
            held = self._slot_caches[flushed.slot]
            held.pages = held.pages[: flushed.start // self.page_tokens]
            for index in range(len(held.pages), -(-flushed.stop // self.page_tokens)):
                page = flushed.pages[index]
                moves.append((held.row, index - held.offset // self.page_tokens, page))
                self._version[page] += 1
                held.pages.append((page, int(self._version[page])))
        for lot in lots(moves):
            self._count_for_rows("flush")
            stored = programs.store_pages(self._memory.pages, self._memory.rows, *lot)
            self._memory = self._memory._replace(pages=stored)

    def free_slot(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        held = self._slot_caches[slot]
        held.active, held.last_used = False, self._clock
        if broken_pages:
            # A request that was given up before its prompt was read has no row; -1 would be the
            # last one, which another request holds.
            row = held.row if held.row >= 0 else self._num_rows
            self._count_for_rows("clear")
            self._memory = self._memory._replace(
                rows=programs.clear(self._memory.rows, np.asarray([row]))
            )
            for (pages,) in lots([(page,) for page in broken_pages]):
                self._programs.add(("clear",))
                self._memory = self._memory._replace(
                    pages=programs.clear(self._memory.pages, pages)
                )
            self._evict(held)

    @property
    def _num_rows(self) -> int:
        return len(self._slot_of_row)

    def _level(self, rows: int) -> int:
        return next(level for level in self._row_levels if level >= rows)

    def _evict(self, held: _SlotCache) -> None:
        """Drops what the slot had in a row."""
        if held.row >= 0:
            self._slot_of_row[held.row] = -1
        held.row, held.pages, held.tokens, held.prefix, held.offset = -1, [], 0, -1, 0

    def _load(self, rows: Sequence[PrefillRow]) -> None:
        """Make every row hold what its request has in pages."""
        fresh = []
        for row in rows:
            held = self._slot_caches[row.slot]
            if self._holds(
                row
            ):  # what the slot has beyond the request's beginning is another one's
                held.pages, held.tokens = self._versions(row.pages), row.start
            else:
                held.pages, held.tokens, held.prefix, held.offset = [], 0, -1, 0
                fresh.append(row)
        self._make_rows(rows)
        self._share_prefix(fresh)
        moves = []
        for row in fresh:
            held = self._slot_caches[row.slot]
            held.pages, held.tokens, held.offset = self._versions(row.pages), row.start, 0
            held.prefix = self._longest_prefix(held.pages, row.start)
            if held.prefix >= 0:
                held.offset = self._prefixes[held.prefix].tokens  # pyright: ignore[reportOptionalMemberAccess]
            first, last = held.offset // self.page_tokens, -(-row.start // self.page_tokens)
            moves += [(held.row, index - first, row.pages[index]) for index in range(first, last)]
        self._fit_rows(
            max(row.start + len(row.tokens) - self._slot_caches[row.slot].offset for row in rows)
        )
        for lot in lots(moves):
            self._count_for_rows("load")
            loaded = programs.load_pages(self._memory.rows, self._memory.pages, *lot)
            self._memory = self._memory._replace(rows=loaded)

    def _holds(self, row: PrefillRow) -> bool:
        held, count = self._slot_caches[row.slot], -(-row.start // self.page_tokens)
        if (
            held.row < 0
            or held.tokens < row.start
            or row.start < held.offset
            or len(held.pages) < count
        ):
            return False
        return held.pages[:count] == self._versions(row.pages[:count])

    def _make_rows(self, rows: Sequence[PrefillRow]) -> None:
        """A row for every request: a free one, that of an idle slot, or a new one."""
        for row in rows:
            self._slot_caches[row.slot].active = True
        needed = sum(held.active for held in self._slot_caches)
        if needed > self._num_rows:
            self._slot_of_row += [-1] * (self._level(needed) - self._num_rows)
        without = [row.slot for row in rows if self._slot_caches[row.slot].row < 0]
        free = [place for place, slot in enumerate(self._slot_of_row) if slot < 0]
        idle = sorted(
            (held for held in self._slot_caches if held.row >= 0 and not held.active),
            key=lambda held: -held.last_used,
        )
        for slot in without:
            if not free:
                free.append(idle[-1].row)
                self._evict(idle.pop())
            self._slot_caches[slot].row = free.pop(0)
            self._slot_of_row[self._slot_caches[slot].row] = slot

    def _shrink_rows(self, running: int) -> None:
        """Go on with fewer rows where few requests run: a step costs what its rows cost, whether
        they run or not."""
        active = sum(held.active for held in self._slot_caches)
        assert running <= active, "what decodes was prefilled"
        count = self._level(active)
        self._calls_with_few = self._calls_with_few + 1 if count < self._num_rows else 0
        if self._calls_with_few < CALLS_BEFORE_FEWER_ROWS:
            return
        self._calls_with_few = 0
        for held in self._slot_caches:
            if not held.active:
                self._evict(held)
        kept = [held for held in self._slot_caches if held.active]
        places = np.asarray([held.row for held in kept] + [0] * (count - len(kept)), np.int32)
        self._count_for_rows("fewer rows", count)
        self._memory = self._memory._replace(rows=programs.select_rows(self._memory.rows, places))
        self._slot_of_row = [-1] * count
        slot_of = {id(held): slot for slot, held in enumerate(self._slot_caches)}
        for place, held in enumerate(kept):
            held.row, self._slot_of_row[place] = place, slot_of[id(held)]

    def _versions(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        return [(page, int(self._version[page])) for page in pages]

    def _share_prefix(self, fresh: Sequence[PrefillRow]) -> None:
        """Hold once what many rows begin with, if these do and no prefix does it yet."""
        beginnings = [self._versions(row.pages[: row.start // self.page_tokens]) for row in fresh]
        slots = {row.slot for row in fresh}
        others = [
            held for slot, held in enumerate(self._slot_caches) if held.active and slot not in slots
        ]
        running = (held.pages[: held.tokens // self.page_tokens] for held in others)
        common = _common_beginning([*beginnings, *running], self._prefix_rows)
        tokens = len(common) * self.page_tokens
        if tokens < MIN_PREFIX_TOKENS or common not in [
            beginning[: len(common)] for beginning in beginnings
        ]:
            return
        if any(prefix is not None and prefix.pages == common for prefix in self._prefixes):
            return
        used = {held.prefix for held in others}
        place = next((place for place in range(MAX_PREFIXES) if place not in used), None)
        if place is None:
            return
        for held in self._slot_caches:
            if (
                held.prefix == place and not held.active
            ):  # it began with the prefix that this place had
                self._evict(held)
        self._store_prefix(place, _SharedPrefix(common, tokens))
        for held in others:
            if held.pages[: len(common)] == common and held.tokens >= tokens > held.offset:
                self._count_for_rows("shift")
                moved = programs.shift_row(
                    self._memory.rows, np.int32(held.row), np.int32(tokens - held.offset)
                )
                self._memory = self._memory._replace(rows=moved)
                held.prefix, held.offset = place, tokens
        self._narrow(others)

    def _store_prefix(self, place: int, prefix: _SharedPrefix) -> None:
        while len(self._prefixes) <= place:
            self._prefixes.append(None)
        self._prefixes[place] = prefix
        longest = max(one.tokens for one in self._prefixes if one is not None)
        length = bucket(longest, max(MIN_PREFIX_TOKENS, 2 * self.page_tokens), self._largest_width)
        before = self._memory.prefixes.shape
        shape = max(len(self._prefixes), before[0]), max(length, before[1])
        # Filled up with its last page, which lies beyond its length there: one program whatever the
        # prefix.
        pages = np.full(shape[1] // self.page_tokens, prefix.pages[-1][0], np.int32)
        pages[: len(prefix.pages)] = [page for page, _ in prefix.pages]
        self._programs.add(("prefix", before, shape))
        prefixes = programs.store_prefix(
            self._memory.prefixes, self._memory.pages, np.int32(place), pages, shape
        )
        self._memory = self._memory._replace(prefixes=prefixes)

    def _longest_prefix(self, pages: Sequence[tuple[int, int]], start: int) -> int:
        """The longest prefix that these pages begin with, -1 if there is none."""
        fitting = [
            (prefix.tokens, place)
            for place, prefix in enumerate(self._prefixes)
            if prefix is not None
            and prefix.tokens <= start
            and pages[: len(prefix.pages)] == prefix.pages
        ]
        return max(fitting)[1] if fitting else -1

    def _prefix_lengths(self) -> np.ndarray:
        lengths = [0 if prefix is None else prefix.tokens for prefix in self._prefixes]
        return np.asarray(lengths + [0] * (self._memory.prefixes.shape[0] - len(lengths)), np.int32)

    def _prefill_tiles(self, tiles: Sequence[tuple[_SlotCache, int, Any]], count: int) -> None:
        tokens = np.zeros((count, self.tile_tokens), np.int32)
        starts, lengths = (
            np.zeros(count, np.int32),
            np.zeros(count, np.int32),
        )  # tiles of length 0 write nowhere
        places = programs.Places.nowhere(count)
        for index, (held, start, ids) in enumerate(tiles):
            tokens[index, : len(ids)] = ids
            starts[index], lengths[index] = start, len(ids)
            places.row[index], places.offset[index], places.prefix[index] = (
                held.row,
                held.offset,
                held.prefix,
            )
        self._count("prefill", count)
        call = programs.Tiles(tokens, starts, lengths, places)
        with self._over_mesh():
            self._memory = programs.prefill(
                self._graph, self._weights, self._scales, self._memory, call, self._prefix_lengths()
            )

    def _fit_rows(self, tokens: int) -> None:
        """As many rows as there are to be, with room for so many tokens, in one move of the
        memory."""
        self._width = max(self._width, bucket(tokens, self._smallest_width, self._largest_width))
        if self._memory.rows.shape != (self._num_rows, self._width):
            self._count_for_rows("resize rows", self._num_rows, self._width)
            rows = programs.resized(self._memory.rows, self._num_rows, self._width)
            self._memory = self._memory._replace(rows=rows)

    def _narrow(self, active: Sequence[_SlotCache]) -> None:
        """Give up width that no active row needs."""
        needed = max((held.tokens - held.offset for held in active), default=1)
        self._width = min(self._width, bucket(needed, self._smallest_width, self._largest_width))
        for held in self._slot_caches:
            if held.tokens - held.offset > self._width:
                self._evict(held)

    def _empty(self, rows: int, tokens: int) -> programs.KeysValues:
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        sharding = self.mesh and NamedSharding(self.mesh, PartitionSpec(None, "tensor"))

        def layers(*shape: int) -> tuple[Array, ...]:
            return tuple(
                jnp.zeros(shape, self._dtype, device=sharding)
                for _ in range(self.config.num_layers)
            )

        return programs.KeysValues(
            layers(rows, heads, head_dim, tokens), layers(rows, heads, tokens, head_dim)
        )

    def _count(self, *program: Any) -> None:
        self._count_for_rows(*program, self._memory.prefixes.shape)

    def _count_for_rows(self, *program: Any) -> None:
        self._programs.add((*program, self._memory.rows.shape))


def _common_beginning(
    sequences: Sequence[Sequence[tuple[int, int]]], rows: int
) -> list[tuple[int, int]]:
    """The longest beginning that so many sequences, and half of those that begin as they do, have
    in common."""
    common: list[tuple[int, int]] = []
    while True:
        counts = collections.Counter(
            sequence[len(common)] for sequence in sequences if len(sequence) > len(common)
        )
        page, count = max(counts.items(), key=lambda item: item[1], default=((0, 0), 0))
        if count < rows or (2 * count < len(sequences) and common):
            return common
        sequences = [
            sequence
            for sequence in sequences
            if len(sequence) > len(common) and sequence[len(common)] == page
        ]
        common.append(page)


def _call_tiles(waiting: int, sizes: Sequence[int]) -> int:
    """Tiles of the next call: all that wait, if they fill most of it, or as many as fill one."""
    for smaller, size in zip((sizes[0], *sizes), sizes, strict=False):
        if waiting <= size:
            return size if 4 * waiting >= 3 * size else smaller
    return sizes[-1]
