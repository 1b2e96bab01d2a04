"""The engine for CPUs and GPUs (XLA): each running request has a contiguous row of KV cache.

The KV cache has three parts:

- **Pages** are the permanent part. Block tables and the prefix cache refer to pages.
- **Rows** are the working memory. Each slot with a running request has one row, which holds the
  keys and values of its sequence one after the other. Attention reads rows. Gathering the pages in
  every decode step would cost as much memory traffic as the step itself.
- **Shared prefixes** hold the beginning that several rows have in common, such as a system prompt.

The engine moves tokens between them:

- Prefill loads the cached pages of a request into the row of its slot, and computes the rest of the
  prompt in the row.
- Decode appends to the row.
- Flush copies new tokens from the row to the pages, where other requests can reuse them.

The engine remembers which pages a row holds. If a conversation returns to the same slot, nothing
needs to be loaded.

A shared prefix is stored once, and the rows hold only the tokens after it. One matrix product
computes the attention scores of all rows over the prefix. With a shared prompt of 384 tokens, this
reads a third of the memory (prefix sharing as in Hydragen, arXiv 2402.05099, section 3).

Each shape of the rows needs its own compiled program (docs/lab/experiments.md has the cost), so the
engine uses few shapes. Their number depends on the attention program:

- With the kernel `kernels.paged_attention`, attention reads only the tokens that a row holds. So the
  rows always have the same shape. A decode call has one entry for each running request. The number
  of entries is rounded up to 1, 1/2, 1/4 or 1/8 of the slots.
- Without the kernel, XLA reads each row to its end. So all rows are as wide as the longest sequence
  needs, rounded up to the smallest width times 1, 1.5, 2, 3, 4, ... There is one row for each
  running request. The number of rows is rounded up to 1, 1/2 or 1/4 of the slots.

The arrays of one layer are keys [n, kv_heads, head_dim, tokens] and values [n, kv_heads, tokens,
head_dim], where n is the number of pages, rows or prefixes. With this layout both matrix products
read contiguous memory. On a CPU with 48 rows this is 20% to 50% faster than keys in the layout of
the values, and equally fast with 256 rows. Token t of a sequence is at index t - offset of its row,
where offset is the length of its shared prefix.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from mujica_jax import kernels
from mujica_jax.inference.engine import contiguous_programs as programs
from mujica_jax.inference.engine.base import (
    Decoded,
    Engine,
    EngineOptions,
    FlushRow,
    PrefillRow,
    SlotState,
    bucket,
    filtered,
    lots,
)
from mujica_jax.models.decoder import Decoder, unstacked
from mujica_jax.models.layers import projections

# Smallest width of a row, in tokens.
MIN_WIDTH_TOKENS = 256
# Largest number of shared prefixes. The planner's and the worker's prompts have one each.
MAX_PREFIXES = 2

# A shared prefix must have at least this many tokens and rows. Otherwise its own matrix product
# costs more than it saves.
MIN_PREFIX_TOKENS = 64
MIN_PREFIX_ROWS = 4


class TileSizes(NamedTuple):
    """The shape of a prefill call, [tiles, tile_tokens].

    A tile holds consecutive tokens of one request. So each request is padded by less than one tile.
    """

    # Tokens per tile.
    tile_tokens: int
    # Allowed numbers of tiles in a call. Each number needs one program for each shape of the rows.
    tiles_per_call: tuple[int, ...]


# With `kernels.paged_attention`, small tiles cost little.
KERNEL_TILES = TileSizes(8, (16, 64))
# XLA reads the row once for each tile, and each tile must be large enough for efficient matrix
# products on the platform.
XLA_TILES = {"cpu": TileSizes(16, (8, 64))}
OTHER_XLA_TILES = TileSizes(64, (8, 64))

# The number of rows is the number of slots divided by one of these levels.
ROW_LEVELS = (1, 2, 4)
# With `kernels.paged_attention`, the number of entries of a decode call is the number of slots
# divided by one of these levels.
KERNEL_ROW_LEVELS = (*ROW_LEVELS, 8)
# The number of rows shrinks after this many decode calls in a row with few requests. So it does not
# shrink in the short time between two turns of a conversation.
CALLS_BEFORE_FEWER_ROWS = 2

# (page number, version of its contents). Equal pairs hold the same keys and values.
PageVersion = tuple[int, int]


@dataclasses.dataclass(eq=False, slots=True)
class _SlotCache:
    """The row of a slot, and what the row holds."""

    # Index of the row. -1 means that the slot has no row.
    row: int = -1
    # The pages whose contents the row and its shared prefix hold, in the order of the tokens.
    pages: list[PageVersion] = dataclasses.field(default_factory=list)
    # How many tokens of the sequence the row and its shared prefix hold.
    tokens: int = 0
    # Length of the shared prefix in tokens. The row holds only the tokens after it.
    offset: int = 0
    # Index of the shared prefix. -1 means none.
    prefix: int = -1
    # Whether a request runs in the slot.
    is_active: bool = False
    # When the slot was last freed, counted in prefill calls.
    last_used: int = 0

    def forget(self) -> None:
        """Mark the row as empty."""
        self.pages = []
        self.tokens = 0
        self.prefix = -1
        self.offset = 0


@dataclasses.dataclass(frozen=True)
class _SharedPrefix:
    """A prefix that several rows share."""

    # The pages that hold the prefix, in the order of the tokens.
    pages: list[PageVersion]
    # Length of the prefix in tokens.
    tokens: int


class _Tile(NamedTuple):
    """Consecutive tokens of one prompt in a prefill call."""

    slot_cache: _SlotCache
    # Position of the first token in the sequence.
    start: int
    # At most `tile_tokens` token ids.
    tokens: Any


class ContiguousEngine(Engine):
    """The engine for CPUs and GPUs. See `Engine` for the interface."""

    def __init__(self, decoder: Decoder, options: EngineOptions) -> None:
        super().__init__(decoder, options)
        with self._over_mesh():
            attend = kernels.paged_attention(head_dim=self.config.head_dim, dtype=self._dtype)
        self._has_kernel = attend is not None

        # The smallest and largest width of the rows, in tokens. Use a single width if a smaller one
        # would save less than its programs cost.
        self._largest_width = -(-self.positions // self.page_tokens) * self.page_tokens
        self._smallest_width = max(MIN_WIDTH_TOKENS, 2 * self.page_tokens)
        if self._has_kernel or self._largest_width < 1.5 * self._smallest_width:
            self._smallest_width = self._largest_width

        # The allowed numbers of rows.
        levels = KERNEL_ROW_LEVELS if self._has_kernel else ROW_LEVELS
        self._row_counts = sorted({-(-self.slots // level) for level in levels})
        # How many rows must share a prefix. It must be more than the parallel searches of one turn:
        # these searches may be identical and would become a shared prefix of their own.
        self._min_prefix_rows = max(MIN_PREFIX_ROWS, self.slots // 8)

        # How often each page was written, [num_pages].
        self._page_version = np.zeros(self.num_pages, np.int64)
        # Number of prefill calls so far.
        self._clock = 0
        self._reset_memory(self._zeros(self.num_pages, self.page_tokens))

        # The shapes of prefill calls.
        if self._has_kernel:
            tiles = KERNEL_TILES
        else:
            tiles = XLA_TILES.get(jax.default_backend(), OTHER_XLA_TILES)
        self.tile_tokens, self._tiles_per_call = tiles
        self.min_call_tokens = self._tiles_per_call[0] * self.tile_tokens

    def _load_weights(self, weights: nnx.State) -> None:
        """Load the weights, with one array per layer.

        A scan over stacked layers would copy all weights in every decode step (`decoder.unstacked`).
        Matrices for which the product kernel is faster are stored as [outputs, inputs].
        """
        super()._load_weights(weights)
        with self._over_mesh():
            output_major = []
            for weight in projections(self.config):
                inputs, outputs = weight.sides
                if kernels.prefers_output_major(
                    inputs=inputs, outputs=outputs, dtype=self._compute_dtype
                ):
                    output_major.append(weight.name)
            self._weights = unstacked(
                self._weights, self.config, output_major=frozenset(output_major)
            )

    def reset_cache(self) -> None:
        pages = self._memory.pages
        # A program that failed may have deleted its donated buffers. Then allocate new pages.
        if any(layer.is_deleted() for layer in jax.tree.leaves(pages)):
            pages = self._zeros(self.num_pages, self.page_tokens)
        self._reset_memory(pages)

    def _reset_memory(self, pages: programs.KeysValues) -> None:
        """Allocate empty rows and prefixes in their initial shapes, and keep `pages`.

        The initial shapes are always the same. So a run that continues after a crash uses the same
        programs, and gets the same numbers, as a run that was never interrupted.
        """
        self._width = min(self._smallest_width, self._largest_width)
        if self._has_kernel:
            row_count = self._row_counts[-1]
            prefixes = self._zeros(MAX_PREFIXES, self._width)
        else:
            row_count = self._row_counts[0]
            prefixes = self._zeros(1, 0)
        self._memory = programs.Memory(pages, self._zeros(row_count, self._width), prefixes)
        self._slot_caches = [_SlotCache() for _ in range(self.slots)]
        # The slot of each row. -1 means that the row is free.
        self._slot_of_row = [-1] * row_count
        self._prefixes: list[_SharedPrefix | None] = []
        self._calls_with_few_requests = 0

    def choose_slot(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        # Prefer a slot whose row already holds the cached pages, because nothing needs to be
        # loaded. A page version implies all pages before it, so compare only the last cached page.
        if cached_tokens:
            index = (cached_tokens - 1) // self.page_tokens
            last_page = (pages[index], int(self._page_version[pages[index]]))
            for slot in free:
                slot_cache = self._slot_caches[slot]
                if (
                    slot_cache.tokens >= cached_tokens
                    and len(slot_cache.pages) > index
                    and slot_cache.pages[index] == last_page
                ):
                    return slot
        return min(free, key=lambda slot: self._slot_caches[slot].last_used)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for sources, targets in lots(pairs):
            self._programs.add(("copy",))
            pages = programs.copy_pages(self._memory.pages, sources, targets)
            self._memory = self._memory._replace(pages=pages)
        for _, target in pairs:
            self._page_version[target] += 1

    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        """Load the cached tokens of each request into its row, and compute the rest in tiles."""
        self._clock += 1
        self._load(rows)

        tiles = []
        for row in rows:
            slot_cache = self._slot_caches[row.slot]
            for first in range(0, len(row.tokens), self.tile_tokens):
                tokens = row.tokens[first : first + self.tile_tokens]
                tiles.append(_Tile(slot_cache, row.start + first, tokens))
        while tiles:
            tile_count = _tiles_in_next_call(len(tiles), self._tiles_per_call)
            self._prefill_tiles(tiles[:tile_count], tile_count)
            tiles = tiles[tile_count:]

        for row in rows:
            self._slot_caches[row.slot].tokens = row.start + len(row.tokens)

    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        """Generate up to `decode_steps` tokens for every running slot, see `Engine.decode`."""
        slots = np.flatnonzero(state.remaining)
        slot_caches = [self._slot_caches[slot] for slot in slots]

        # The call has `size` entries, and `entries` are the indices of the running slots among
        # them. Without the kernel, entry i is row i.
        if self._has_kernel:
            size = self._row_count_for(len(slots))
            entries = np.arange(len(slots))
        else:
            self._shrink_rows(len(slots))
            size = self._num_rows
            entries = np.asarray([slot_cache.row for slot_cache in slot_caches])
        places = _places(slot_caches, entries=entries, size=size)
        call_state = SlotState.idle(size)
        for entry_values, slot_values in zip(call_state, state, strict=True):
            entry_values[entries] = slot_values[slots]

        # Make the rows wide enough for the tokens that this call generates.
        new_tokens = np.minimum(call_state.remaining, self.decode_steps)
        tokens_in_row = call_state.position + new_tokens - places.offset
        self._fit_rows(int(tokens_in_row[entries].max(initial=1)))

        self._count_program("decode", filtered(state), size)
        call = programs.DecodeCall(call_state, places, self._prefix_lengths(), self._stops)
        with self._over_mesh():
            self._memory, call_state, call_decoded = programs.decode(
                self._graph,
                self._weights,
                self._scales,
                self._memory,
                call,
                steps=self.decode_steps,
                filtered=filtered(state),
            )

        # Copy the results from the entries of the call back to the slots.
        state = SlotState(*map(np.array, state))
        for slot_values, entry_values in zip(state, call_state, strict=True):
            slot_values[slots] = np.asarray(entry_values)[entries]
        shape = (self.decode_steps, self.slots)
        decoded = Decoded(*(np.zeros(shape, array.dtype) for array in call_decoded))
        for slot_values, entry_values in zip(decoded, call_decoded, strict=True):
            slot_values[:, slots] = np.asarray(entry_values)[:, entries]
        for slot, slot_cache in zip(slots, slot_caches, strict=True):
            slot_cache.tokens = int(state.position[slot])
        return state, decoded

    def flush(self, rows: Sequence[FlushRow]) -> None:
        """Copy computed tokens from the rows of slots to their pages."""
        moves = []
        for flushed in rows:
            slot_cache = self._slot_caches[flushed.slot]
            slot_cache.pages = slot_cache.pages[: flushed.start // self.page_tokens]
            first_in_row = slot_cache.offset // self.page_tokens
            for index in range(len(slot_cache.pages), -(-flushed.stop // self.page_tokens)):
                page = flushed.pages[index]
                moves.append((slot_cache.row, index - first_in_row, page))
                self._page_version[page] += 1
                slot_cache.pages.append((page, int(self._page_version[page])))
        for lot in lots(moves):
            self._count_row_program("flush")
            pages = programs.store_pages(self._memory.pages, self._memory.rows, *lot)
            self._memory = self._memory._replace(pages=pages)

    def free_slot(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        slot_cache = self._slot_caches[slot]
        slot_cache.is_active = False
        slot_cache.last_used = self._clock
        if not broken_pages:
            return

        # A request that was cancelled before its prefill has no row (-1). Index -1 would clear the
        # last row, which may belong to another request. An index after the last row clears nothing.
        row = slot_cache.row if slot_cache.row >= 0 else self._num_rows
        self._count_row_program("clear")
        rows = programs.clear(self._memory.rows, np.asarray([row]))
        self._memory = self._memory._replace(rows=rows)
        for (page_lot,) in lots([(page,) for page in broken_pages]):
            self._programs.add(("clear",))
            pages = programs.clear(self._memory.pages, page_lot)
            self._memory = self._memory._replace(pages=pages)
        self._evict(slot_cache)

    @property
    def _num_rows(self) -> int:
        """The current number of rows."""
        return len(self._slot_of_row)

    def _row_count_for(self, requests: int) -> int:
        """Return the smallest allowed number of rows for this many requests."""
        return next(count for count in self._row_counts if count >= requests)

    def _evict(self, slot_cache: _SlotCache) -> None:
        """Free the row of a slot, and forget its contents."""
        if slot_cache.row >= 0:
            self._slot_of_row[slot_cache.row] = -1
        slot_cache.row = -1
        slot_cache.forget()

    # Prefill: load cached pages into rows.

    def _load(self, requests: Sequence[PrefillRow]) -> None:
        """Give each request a row, and copy its cached tokens from the pages into the row."""
        to_load = []
        for request in requests:
            slot_cache = self._slot_caches[request.slot]
            if self._is_in_row(request):
                # Tokens in the row after the start of this request belong to an earlier request.
                slot_cache.pages = self._page_versions(request.pages)
                slot_cache.tokens = request.start
            else:
                slot_cache.forget()
                to_load.append(request)
        self._assign_rows(requests)
        self._share_prefix(to_load)

        # List the pages to copy: all cached pages of a request that are not in its shared prefix.
        moves = []
        for request in to_load:
            slot_cache = self._slot_caches[request.slot]
            slot_cache.pages = self._page_versions(request.pages)
            slot_cache.tokens = request.start
            slot_cache.offset = 0
            slot_cache.prefix = self._longest_prefix(slot_cache.pages, request.start)
            if slot_cache.prefix >= 0:
                slot_cache.offset = self._prefixes[slot_cache.prefix].tokens  # pyright: ignore[reportOptionalMemberAccess]
            first = slot_cache.offset // self.page_tokens
            stop = -(-request.start // self.page_tokens)
            for index in range(first, stop):
                moves.append((slot_cache.row, index - first, request.pages[index]))

        tokens_in_rows = [
            request.start + len(request.tokens) - self._slot_caches[request.slot].offset
            for request in requests
        ]
        self._fit_rows(max(tokens_in_rows))
        for lot in lots(moves):
            self._count_row_program("load")
            rows = programs.load_pages(self._memory.rows, self._memory.pages, *lot)
            self._memory = self._memory._replace(rows=rows)

    def _is_in_row(self, request: PrefillRow) -> bool:
        """Return whether the slot's row already holds all cached tokens of the request."""
        slot_cache = self._slot_caches[request.slot]
        page_count = -(-request.start // self.page_tokens)
        if (
            slot_cache.row < 0
            or slot_cache.tokens < request.start
            or request.start < slot_cache.offset
            or len(slot_cache.pages) < page_count
        ):
            return False
        return slot_cache.pages[:page_count] == self._page_versions(request.pages[:page_count])

    def _page_versions(self, pages: Sequence[int]) -> list[PageVersion]:
        """Return the pages with the current versions of their contents."""
        return [(page, int(self._page_version[page])) for page in pages]

    def _prefill_tiles(self, tiles: Sequence[_Tile], tile_count: int) -> None:
        """Compute tiles in one call of shape [tile_count, tile_tokens]. Pad with empty tiles."""
        tokens = np.zeros((tile_count, self.tile_tokens), np.int32)
        starts = np.zeros(tile_count, np.int32)
        # An empty tile has length 0 and writes nothing.
        lengths = np.zeros(tile_count, np.int32)
        for index, tile in enumerate(tiles):
            tokens[index, : len(tile.tokens)] = tile.tokens
            starts[index] = tile.start
            lengths[index] = len(tile.tokens)
        slot_caches = [tile.slot_cache for tile in tiles]
        places = _places(slot_caches, entries=np.arange(len(tiles)), size=tile_count)
        self._count_program("prefill", tile_count)
        call = programs.Tiles(tokens, starts, lengths, places)
        with self._over_mesh():
            self._memory = programs.prefill(
                self._graph, self._weights, self._scales, self._memory, call, self._prefix_lengths()
            )

    # Rows: assign rows to slots, and change the number and the width of the rows.

    def _assign_rows(self, requests: Sequence[PrefillRow]) -> None:
        """Give each request a row: a free row, the row of an idle slot, or a new row."""
        for request in requests:
            self._slot_caches[request.slot].is_active = True
        active_slots = sum(slot_cache.is_active for slot_cache in self._slot_caches)
        if active_slots > self._num_rows:
            new_rows = self._row_count_for(active_slots) - self._num_rows
            self._slot_of_row += [-1] * new_rows

        free_rows = [row for row, slot in enumerate(self._slot_of_row) if slot < 0]
        idle_slots = [
            slot_cache
            for slot_cache in self._slot_caches
            if slot_cache.row >= 0 and not slot_cache.is_active
        ]
        # Rows are taken from the end of this list, so the slot that was idle longest is last.
        idle_slots.sort(key=lambda slot_cache: -slot_cache.last_used)
        slots_without_row = [
            request.slot for request in requests if self._slot_caches[request.slot].row < 0
        ]
        for slot in slots_without_row:
            if not free_rows:
                free_rows.append(idle_slots[-1].row)
                self._evict(idle_slots.pop())
            row = free_rows.pop(0)
            self._slot_caches[slot].row = row
            self._slot_of_row[row] = slot

    def _shrink_rows(self, running: int) -> None:
        """Reduce the number of rows if few requests run, because a step also computes idle rows."""
        active = sum(slot_cache.is_active for slot_cache in self._slot_caches)
        assert running <= active, "every decoding request must have been prefilled"
        row_count = self._row_count_for(active)
        if row_count < self._num_rows:
            self._calls_with_few_requests += 1
        else:
            self._calls_with_few_requests = 0
        if self._calls_with_few_requests < CALLS_BEFORE_FEWER_ROWS:
            return
        self._calls_with_few_requests = 0

        # Move the rows of active slots to the front, and drop all other rows.
        for slot_cache in self._slot_caches:
            if not slot_cache.is_active:
                self._evict(slot_cache)
        active_slots = [slot for slot, cache in enumerate(self._slot_caches) if cache.is_active]
        old_rows = [self._slot_caches[slot].row for slot in active_slots]
        padding = [0] * (row_count - len(old_rows))
        self._count_row_program("fewer rows", row_count)
        rows = programs.select_rows(self._memory.rows, np.asarray(old_rows + padding, np.int32))
        self._memory = self._memory._replace(rows=rows)
        self._slot_of_row = [-1] * row_count
        for row, slot in enumerate(active_slots):
            self._slot_caches[slot].row = row
            self._slot_of_row[row] = slot

    def _fit_rows(self, tokens: int) -> None:
        """Resize the array of rows to the current number of rows and a width of `tokens` or more.

        One program changes both sizes, so the memory is copied once.
        """
        width = bucket(tokens, self._smallest_width, self._largest_width)
        self._width = max(self._width, width)
        if self._memory.rows.shape != (self._num_rows, self._width):
            self._count_row_program("resize rows", self._num_rows, self._width)
            rows = programs.resized(self._memory.rows, self._num_rows, self._width)
            self._memory = self._memory._replace(rows=rows)

    def _shrink_width(self, active: Sequence[_SlotCache]) -> None:
        """Reduce the width of the rows to what the active rows need.

        Only the number changes here. The next call of `_fit_rows` resizes the memory. Idle rows that
        do not fit are evicted.
        """
        tokens = max((slot_cache.tokens - slot_cache.offset for slot_cache in active), default=1)
        width = bucket(tokens, self._smallest_width, self._largest_width)
        self._width = min(self._width, width)
        for slot_cache in self._slot_caches:
            if slot_cache.tokens - slot_cache.offset > self._width:
                self._evict(slot_cache)

    # Shared prefixes.

    def _share_prefix(self, to_load: Sequence[PrefillRow]) -> None:
        """Make a shared prefix of the tokens that many rows begin with, if there are such tokens.

        Does nothing if no request of `to_load` begins with these tokens, or if this shared prefix
        exists already.
        """
        slots_to_load = {request.slot for request in to_load}
        running = [
            slot_cache
            for slot, slot_cache in enumerate(self._slot_caches)
            if slot_cache.is_active and slot not in slots_to_load
        ]

        prefix = self._new_prefix(to_load, running)
        if prefix is None:
            return

        # Replace a shared prefix that no running request reads. Idle rows that depend on it are
        # evicted.
        indices_in_use = {slot_cache.prefix for slot_cache in running}
        free_indices = [index for index in range(MAX_PREFIXES) if index not in indices_in_use]
        if not free_indices:
            return
        index = free_indices[0]
        for slot_cache in self._slot_caches:
            if slot_cache.prefix == index and not slot_cache.is_active:
                self._evict(slot_cache)
        self._store_prefix(index, prefix)

        # In the rows of running requests that begin with the prefix, keep only the tokens after it.
        for slot_cache in running:
            begins_with_prefix = slot_cache.pages[: len(prefix.pages)] == prefix.pages
            if begins_with_prefix and slot_cache.tokens >= prefix.tokens > slot_cache.offset:
                self._count_row_program("shift")
                shift = np.int32(prefix.tokens - slot_cache.offset)
                rows = programs.shift_row(self._memory.rows, np.int32(slot_cache.row), shift)
                self._memory = self._memory._replace(rows=rows)
                slot_cache.prefix = index
                slot_cache.offset = prefix.tokens
        self._shrink_width(running)

    def _new_prefix(
        self, to_load: Sequence[PrefillRow], running: Sequence[_SlotCache]
    ) -> _SharedPrefix | None:
        """Return a prefix that many rows share and that should be stored once, or None.

        Returns None if the shared prefix would cost more than it saves, or if it exists already.
        """
        beginnings = [
            self._page_versions(request.pages[: request.start // self.page_tokens])
            for request in to_load
        ]
        running_beginnings = [
            slot_cache.pages[: slot_cache.tokens // self.page_tokens] for slot_cache in running
        ]
        pages = _common_beginning(beginnings + running_beginnings, self._min_prefix_rows)
        tokens = len(pages) * self.page_tokens
        if tokens < MIN_PREFIX_TOKENS:
            return None
        if not any(beginning[: len(pages)] == pages for beginning in beginnings):
            return None
        if any(prefix is not None and prefix.pages == pages for prefix in self._prefixes):
            return None
        return _SharedPrefix(pages, tokens)

    def _store_prefix(self, index: int, prefix: _SharedPrefix) -> None:
        """Copy a prefix from its pages into the array of prefixes. Enlarge the array as needed."""
        while len(self._prefixes) <= index:
            self._prefixes.append(None)
        self._prefixes[index] = prefix

        longest = max(stored.tokens for stored in self._prefixes if stored is not None)
        smallest = max(MIN_PREFIX_TOKENS, 2 * self.page_tokens)
        length = bucket(longest, smallest, self._largest_width)
        old_shape = self._memory.prefixes.shape
        new_shape = (max(len(self._prefixes), old_shape[0]), max(length, old_shape[1]))

        # Pad the list with copies of the last page, so that one program serves prefixes of any
        # length. Nothing is read after the end of the prefix.
        pages = np.full(new_shape[1] // self.page_tokens, prefix.pages[-1][0], np.int32)
        pages[: len(prefix.pages)] = [page for page, _ in prefix.pages]
        self._programs.add(("prefix", old_shape, new_shape))
        prefixes = programs.store_prefix(
            self._memory.prefixes, self._memory.pages, np.int32(index), pages, new_shape
        )
        self._memory = self._memory._replace(prefixes=prefixes)

    def _longest_prefix(self, pages: Sequence[PageVersion], start: int) -> int:
        """Return the index of the longest shared prefix that a sequence begins with, or -1.

        `pages` are the pages of the sequence. The prefix has at most `start` tokens.
        """
        # (tokens, index) of the longest prefix so far.
        longest = (0, -1)
        for index, prefix in enumerate(self._prefixes):
            if prefix is None or prefix.tokens > start:
                continue
            if pages[: len(prefix.pages)] == prefix.pages:
                longest = max(longest, (prefix.tokens, index))
        return longest[1]

    def _prefix_lengths(self) -> np.ndarray:
        """Return the length of each shared prefix in tokens, [prefixes]. Unused ones have 0."""
        lengths = [0 if prefix is None else prefix.tokens for prefix in self._prefixes]
        padding = [0] * (self._memory.prefixes.shape[0] - len(lengths))
        return np.asarray(lengths + padding, np.int32)

    def _zeros(self, count: int, tokens: int) -> programs.KeysValues:
        """Return zeros for `count` pages, rows or prefixes of `tokens` tokens each."""
        heads = self.config.num_kv_heads
        head_dim = self.config.head_dim
        sharding = None
        if self.mesh is not None:
            sharding = NamedSharding(self.mesh, PartitionSpec(None, "tensor"))

        def layers(*shape: int) -> tuple[Array, ...]:
            return tuple(
                jnp.zeros(shape, self._dtype, device=sharding)
                for _ in range(self.config.num_layers)
            )

        return programs.KeysValues(
            layers(count, heads, head_dim, tokens), layers(count, heads, tokens, head_dim)
        )

    def _count_program(self, *program: Any) -> None:
        """Count a program that is compiled for each shape of the prefixes and of the rows."""
        self._count_row_program(*program, self._memory.prefixes.shape)

    def _count_row_program(self, *program: Any) -> None:
        """Count a program that is compiled for each shape of the rows."""
        self._programs.add((*program, self._memory.rows.shape))


def _places(
    slot_caches: Sequence[_SlotCache], *, entries: np.ndarray, size: int
) -> programs.Places:
    """Return the places of a call with `size` entries.

    `entries` are the indices of the entries that are used, one for each of `slot_caches`.
    """
    places = programs.Places.nowhere(size)
    places.row[entries] = [slot_cache.row for slot_cache in slot_caches]
    places.offset[entries] = [slot_cache.offset for slot_cache in slot_caches]
    places.prefix[entries] = [slot_cache.prefix for slot_cache in slot_caches]
    return places


def _common_beginning(
    sequences: Sequence[Sequence[PageVersion]], min_rows: int
) -> list[PageVersion]:
    """Return the longest list of pages that at least `min_rows` sequences begin with.

    Each page after the first must also be shared by at least half of the sequences that share the
    pages before it.
    """
    common: list[PageVersion] = []
    while True:
        longer = [sequence for sequence in sequences if len(sequence) > len(common)]
        counts = collections.Counter(sequence[len(common)] for sequence in longer)
        if not counts:
            return common
        page, count = max(counts.items(), key=lambda item: item[1])
        if count < min_rows:
            return common
        if common and 2 * count < len(sequences):
            return common
        sequences = [sequence for sequence in longer if sequence[len(common)] == page]
        common.append(page)


def _tiles_in_next_call(waiting: int, sizes: Sequence[int]) -> int:
    """Return how many tiles to run in the next call, one of the allowed `sizes`.

    `waiting` is the number of tiles that are left. The result is the smallest size that holds all
    of them, if they fill at least three quarters of it. Otherwise it is the next smaller size.
    """
    smaller = sizes[0]
    for size in sizes:
        if waiting <= size:
            return size if 4 * waiting >= 3 * size else smaller
        smaller = size
    return sizes[-1]
