"""The engine for TPUs: the ragged paged attention kernel reads the pages directly.

All layers share one array of pages, [layers x num_pages, page_tokens, 2 x kv_heads, head_dim]. Page
n of layer l has the index l x num_pages + n. The key and the value of a head are neighbours, as the
kernel requires. With one array the layers run in a scan, so compile time does not grow with the
number of layers, and the array is updated without a copy.

This module sets the block sizes of the kernel. The kernel's own table looks up the device that the
process runs on, and fails if the program is compiled for another device.

With a mesh, the heads are split over the axis `tensor`. Each device holds the pages of its own key
and value heads, and runs the kernel on these heads only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Num

from mujica_jax.errors import UserError
from mujica_jax.inference import sampling
from mujica_jax.inference.engine import base
from mujica_jax.inference.engine.base import (
    Decoded,
    Engine,
    EngineOptions,
    FlushRow,
    PrefillRow,
    SlotState,
)
from mujica_jax.inference.engine.kv_quantization import KVScales, scaled
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig

# Smallest number of tokens in a prefill call. Shorter calls are padded.
MIN_PREFILL_TOKENS = 256

# Block sizes of the kernel: tokens whose keys and values are read at once, queries per block in
# prefill, and queries per block in decode (where each sequence has one query).
BLOCK_KEY_TOKENS = 512
BLOCK_QUERIES = 128
BLOCK_DECODE_QUERIES = 32
# Limit of the kernel's on-chip memory (VMEM).
VMEM_BYTES = 64 << 20
# The kernel needs a head dimension that is a multiple of this. Smaller heads are padded with zeros,
# which do not change the results.
LANES = 128
# How the array of pages is split over a mesh: the combined heads over the axis `tensor`.
PAGES_SPEC = PartitionSpec(None, None, "tensor", None)

Pages = Num[Array, "layers_x_pages page_tokens combined_heads head_dim"]


class Sequences(NamedTuple):
    """The sequences of one call, as the kernel needs them.

    The queries of all sequences are concatenated in one array.
    """

    # Length of each sequence in tokens, including the new tokens.
    lengths: Int[np.ndarray | Array, " sequences"]
    # The block table of each sequence: page numbers within a layer.
    tables: Int[np.ndarray | Array, "sequences pages"]
    # The queries of sequence i are query_ends[i] to before query_ends[i + 1]. The first value is 0.
    query_ends: Int[np.ndarray | Array, " sequences_plus_one"]
    # Number of sequences in use. The others are padding.
    count: Int[np.ndarray | Array, " one"]


class NewTokens(NamedTuple):
    """The tokens of a prefill call. The tokens of all sequences are concatenated."""

    # Token ids.
    ids: Int[np.ndarray | Array, " tokens"]
    # Position of each token in its sequence.
    positions: Int[np.ndarray | Array, " tokens"]
    # Where the keys and values of each token are written: page x page_tokens + offset in the page.
    targets: Int[np.ndarray | Array, " tokens"]


class DecodeCall(NamedTuple):
    """The arguments of a decode call, with one entry per slot."""

    state: SlotState
    # The block tables: page numbers within a layer.
    tables: Int[np.ndarray | Array, "slots pages"]
    # Token ids that end a sequence.
    stops: Int[Array, " stops"]


class Layout(NamedTuple):
    """The static layout of the pages. Programs are compiled for one layout."""

    num_pages: int
    page_tokens: int
    mesh: Mesh | None


class DecodeProgram(NamedTuple):
    """The static arguments that a decode program is compiled for."""

    layout: Layout
    # Decode steps per call.
    steps: int
    # Whether at least one slot has a sampling filter.
    filtered: bool


def check_tiles(config: DecoderConfig, tensor: int, dtype: DTypeLike) -> None:
    """Check that the kernel can read the key and value heads of one device.

    `tensor` is the number of devices that share the heads, and `dtype` is the type of the cache. The
    kernel packs heads into words of 32 bits. It can read 1, 2, 4 or a multiple of 8 words. Raises
    UserError otherwise.
    """
    # Heads on one device, counting keys and values.
    heads = 2 * config.num_kv_heads // tensor
    heads_per_word = 4 // jnp.dtype(dtype).itemsize
    words = heads // heads_per_word
    if heads % heads_per_word or (words % 8 and words not in (1, 2, 4)):
        raise UserError(
            f"{config.num_kv_heads} key and value heads over engine.tensor_parallel_size {tensor} "
            f"are {heads // 2} per device, but the TPU kernel cannot read this number of heads in "
            f"{jnp.dtype(dtype).name}: lower engine.tensor_parallel_size or use another "
            "engine.cache_dtype"
        )


class RaggedEngine(Engine):
    """The engine for TPUs. See `Engine` for the interface.

    The pages are the only KV cache. The programs write into them directly, so there is nothing to
    load before prefill and nothing to flush afterwards.
    """

    def __init__(self, decoder: Decoder, options: EngineOptions) -> None:
        super().__init__(decoder, options)
        self._layout = Layout(self.num_pages, self.page_tokens, self.mesh)
        self._tables = np.zeros((self.slots, -(-self.positions // self.page_tokens)), np.int32)
        self._pages = self._empty_pages()

    def reset_cache(self) -> None:
        self._tables[:] = 0
        # A program that failed may have deleted its donated buffer. Then allocate new pages.
        # Otherwise keep the array, because the memory has no room for a second one.
        if self._pages.is_deleted():
            self._pages = self._empty_pages()

    def choose_slot(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        return free[0]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for sources, targets in base.lots(pairs):
            self._programs.add(("copy",))
            self._pages = _copy(self._pages, sources, targets, num_pages=self.num_pages)

    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        """Compute the tokens of all rows in one call, and write them into the pages."""
        for row in rows:
            self._tables[row.slot, : len(row.pages)] = row.pages
        rows = [row for row in rows if len(row.tokens)]
        if not rows:
            return

        # Build the arrays of the call: the tokens of all rows, concatenated and padded to `size`.
        num_tokens = sum(len(row.tokens) for row in rows)
        largest = max(self.prefill_tokens, MIN_PREFILL_TOKENS)
        size = base.bucket(num_tokens, MIN_PREFILL_TOKENS, largest)
        tokens = np.zeros(size, np.int32)
        positions = np.zeros(size, np.int32)
        # The target of padding is out of bounds, so padding is not written.
        out_of_bounds = self.num_pages * self.page_tokens
        targets = np.full(size, out_of_bounds, np.int32)
        query_ends = np.zeros(self.slots + 1, np.int32)
        lengths = np.zeros(self.slots, np.int32)
        tables = np.zeros_like(self._tables)

        end = 0
        for index, row in enumerate(rows):
            span = slice(end, end + len(row.tokens))
            tokens[span] = row.tokens
            positions[span] = np.arange(row.start, row.start + len(row.tokens))
            table = self._tables[row.slot]
            page, offset = np.divmod(positions[span], self.page_tokens)
            targets[span] = table[page] * self.page_tokens + offset
            end = span.stop
            query_ends[index + 1 :] = end
            lengths[index] = row.start + len(row.tokens)
            tables[index] = table

        self._programs.add(("prefill", size))
        new_tokens = NewTokens(tokens, positions, targets)
        sequences = Sequences(lengths, tables, query_ends, np.asarray([len(rows)], np.int32))
        with self._over_mesh():
            self._pages = _prefill(
                self._graph,
                self._weights,
                self._scales,
                self._pages,
                new_tokens,
                sequences,
                layout=self._layout,
            )

    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        """Generate up to `decode_steps` tokens for every running slot, see `Engine.decode`."""
        filtered = base.filtered(state)
        self._programs.add(("decode", filtered))
        call = DecodeCall(state, self._tables, self._stops)
        program = DecodeProgram(self._layout, self.decode_steps, filtered)
        with self._over_mesh():
            self._pages, state, decoded = _decode(
                self._graph,
                self._weights,
                self._scales,
                self._pages,
                call,
                program=program,
            )
        return jax.tree.map(np.array, (state, decoded))

    def flush(self, rows: Sequence[FlushRow]) -> None:
        """Do nothing, because the programs write into the pages directly."""

    def free_slot(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        self._tables[slot] = 0
        for (pages,) in base.lots([(page,) for page in broken_pages]):
            self._pages = _clear(self._pages, pages, num_pages=self.num_pages)

    def _empty_pages(self) -> Array:
        """Allocate the pages of all layers, filled with zeros."""
        sharding = None
        if self.mesh is not None:
            sharding = NamedSharding(self.mesh, PAGES_SPEC)
        return jnp.zeros(pages_shape(self.config, self._layout), self._dtype, device=sharding)


def pages_shape(config: DecoderConfig, layout: Layout) -> tuple[int, int, int, int]:
    """Return the shape of the pages: [layers x num_pages, page_tokens, 2 x kv_heads, head_dim].

    The head dimension is rounded up to a multiple of LANES.
    """
    head_dim = -(-config.head_dim // LANES) * LANES
    return (
        config.num_layers * layout.num_pages,
        layout.page_tokens,
        2 * config.num_kv_heads,
        head_dim,
    )


@functools.partial(jax.jit, static_argnames=("num_pages",), donate_argnames=("pages",))
def _copy(
    pages: Pages, sources: Int[Array, " moves"], targets: Int[Array, " moves"], *, num_pages: int
) -> Pages:
    """Copy the pages `sources` to the pages `targets`, in all layers."""
    # The index of page 0 of each layer.
    first_pages = jnp.arange(0, pages.shape[0], num_pages)[:, None]
    return pages.at[first_pages + targets].set(pages[first_pages + sources])


@functools.partial(jax.jit, static_argnames=("num_pages",), donate_argnames=("pages",))
def _clear(pages: Pages, broken: Int[Array, " pages"], *, num_pages: int) -> Pages:
    """Set the pages `broken` to zero, in all layers."""
    # The index of page 0 of each layer.
    first_pages = jnp.arange(0, pages.shape[0], num_pages)[:, None]
    return pages.at[first_pages + broken].set(0)


@functools.partial(jax.jit, static_argnames=("graph", "layout"), donate_argnames=("pages",))
def _prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: KVScales | None,
    pages: Pages,
    new_tokens: NewTokens,
    sequences: Sequences,
    *,
    layout: Layout,
) -> Pages:
    """Compute the keys and values of the new tokens, and write them into the pages."""
    decoder = nnx.merge(graph, weights)
    attend = scaled(_attend(layout, new_tokens.targets, sequences, BLOCK_QUERIES), scales)
    tokens = new_tokens.ids[None]
    positions = new_tokens.positions[None]
    return decoder.with_memory(tokens, positions, attend, pages)[1]


@functools.partial(jax.jit, static_argnames=("graph", "program"), donate_argnames=("pages",))
def _decode(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: KVScales | None,
    pages: Pages,
    call: DecodeCall,
    *,
    program: DecodeProgram,
) -> tuple[Pages, SlotState, Decoded]:
    """Generate up to `program.steps` tokens for every running slot.

    Returns (pages, new state, tokens [steps, slots]).
    """
    decoder = nnx.merge(graph, weights)
    layout = program.layout
    filters = None
    if program.filtered:
        filters = sampling.Filters(call.state.top_k, call.state.top_p, call.state.min_p)
    slots = call.state.token.shape[0]
    page_tokens = layout.page_tokens
    out_of_bounds = layout.num_pages * page_tokens
    # Each slot has one query.
    query_ends = jnp.arange(slots + 1, dtype=jnp.int32)

    def step(carry: tuple[Array, SlotState], _: None) -> tuple:
        pages, state = carry
        running = state.remaining > 0
        page_index = (state.position // page_tokens)[:, None]
        page = jnp.take_along_axis(call.tables, page_index, axis=1)[:, 0]
        target = page * page_tokens + state.position % page_tokens
        # An idle slot writes out of bounds, that is, nowhere. It reads one token, and its result is
        # not used.
        targets = jnp.where(running, target, out_of_bounds)
        lengths = jnp.where(running, state.position + 1, 1)
        sequences = Sequences(lengths, call.tables, query_ends, jnp.full(1, slots, jnp.int32))
        attend = scaled(_attend(layout, targets, sequences, BLOCK_DECODE_QUERIES), scales)
        hidden, pages = decoder.with_memory(state.token[None], state.position[None], attend, pages)
        state, decoded = base.advance(decoder.logits(hidden[0]), state, call.stops, filters)
        return (pages, state), decoded

    (pages, state), decoded = jax.lax.scan(step, (pages, call.state), None, length=program.steps)
    return pages, state, decoded


def _write(
    layout: Layout,
    layer: Array,
    pages: Array,
    *,
    key: Array,
    value: Array,
    targets: np.ndarray | Array,
) -> Array:
    """Write the new keys and values of one layer, [tokens, kv_heads, head_dim], into the pages.

    `targets` are the places in this layer: page x page_tokens + offset in the page. A target after
    the last page is not written.
    """
    page_head_dim = pages.shape[3]
    keys_values = jnp.stack(
        [_pad_heads(key, page_head_dim), _pad_heads(value, page_head_dim)], axis=2
    )
    keys_values = keys_values.reshape(key.shape[0], -1, page_head_dim)

    # Turn the places of this layer into places in the array of all layers.
    flat = pages.reshape(-1, *pages.shape[2:])
    layer_tokens = layout.num_pages * layout.page_tokens
    is_in_bounds = targets < layer_tokens
    flat_targets = jnp.where(is_in_bounds, layer * layer_tokens + targets, flat.shape[0])
    keys_values = base.narrowed(keys_values, pages.dtype)
    return flat.at[flat_targets].set(keys_values, mode="drop").reshape(pages.shape)


def _pad_heads(array: Array, head_dim: int) -> Array:
    """Pad the last axis of [tokens, heads, n] with zeros to `head_dim`."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, head_dim - array.shape[2])))


def _attend(
    layout: Layout,
    targets: Int[np.ndarray | Array, " tokens"],
    sequences: Sequences,
    block_queries: int,
) -> Callable:
    """Return the attention function `attend(layer, query, key, value, pages)`.

    It writes the new keys and values into the pages at `targets`, computes attention over the
    pages, and returns (mixed values, pages). All arrays except the pages are [1, tokens, heads,
    head_dim]. `block_queries` is the number of queries per block of the kernel.
    """
    pages_per_block = min(BLOCK_KEY_TOKENS // layout.page_tokens, sequences.tables.shape[1])
    pages_per_block = max(1, pages_per_block)

    def attend_on_device(
        layer: Array,
        query: Array,
        key: Array,
        value: Array,
        pages: Array,
        targets: np.ndarray | Array,
        sequences: Sequences,
    ) -> tuple[Array, Array]:
        pages = _write(layout, layer, pages, key=key, value=value, targets=targets)
        # If a scale is given, the kernel converts keys and values to the type of the queries.
        scale = None if pages.dtype == query.dtype else 1.0
        mixed = ragged_paged_attention(
            _pad_heads(query, pages.shape[3]),
            pages,
            sequences.lengths,
            layer * layout.num_pages + sequences.tables,
            sequences.query_ends,
            sequences.count,
            sm_scale=query.shape[-1] ** -0.5,
            k_scale=scale,
            v_scale=scale,
            num_kv_pages_per_block=pages_per_block,
            num_queries_per_block=min(block_queries, query.shape[0]),
            vmem_limit_bytes=VMEM_BYTES,
        )
        return mixed[..., : query.shape[2]], pages

    # With a mesh, each device computes attention for its own heads.
    attend_on_devices = attend_on_device
    if layout.mesh is not None:
        heads: Any = PartitionSpec(None, "tensor", None)
        replicated: Any = PartitionSpec()
        attend_on_devices = jax.shard_map(
            attend_on_device,
            mesh=layout.mesh,
            in_specs=(
                replicated,
                heads,
                heads,
                heads,
                PAGES_SPEC,
                replicated,
                Sequences(replicated, replicated, replicated, replicated),
            ),
            out_specs=(heads, PAGES_SPEC),
            check_vma=False,
        )

    def attend(
        layer: Array, query: Array, key: Array, value: Array, pages: Array
    ) -> tuple[Array, Array]:
        mixed, pages = attend_on_devices(
            jnp.asarray(layer), query[0], key[0], value[0], pages, targets, sequences
        )
        return mixed[None], pages

    return attend
