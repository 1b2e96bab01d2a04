"""The engine on TPU: pages are read where they lie, by the ragged paged attention kernel, and
written in place.

All layers share one array of pages, [layers x num_pages, page_tokens, 2 x kv_heads, head_dim]; keys
and values of a head stand side by side, as the kernel wants them, and page n of layer l lies at l x
num_pages + n. So the layers run in a scan, compile time does not grow with depth, and the array is
carried through without a copy. The kernel is told its block sizes: its own table asks the device
that runs, and fails where a program is compiled for another one.

Over a mesh the heads are split over `tensor`: each device holds the pages of its own key and value
heads, and the kernel runs on each device's heads alone.
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
from mujica_jax.inference.engine.base import Decoded, Engine, FlushRow, PrefillRow, SlotState
from mujica_jax.inference.engine.kv_quantization import KVScales, scaled
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig

MIN_PREFILL_TOKENS = 256
# Of the kernel: tokens of keys read at once, and queries a block when prompts are read. A decode
# step has one query a sequence.
BLOCK_KEY_TOKENS, BLOCK_QUERIES, BLOCK_DECODE_QUERIES = 512, 128, 32
VMEM_BYTES = 64 << 20
# of a head, or a multiple: the kernel takes smaller ones filled up with zeros, which change no
# product
LANES = 128
PAGES_SPEC = PartitionSpec(None, None, "tensor", None)

Pages = Num[Array, "layers_x_pages page_tokens combined_heads head_dim"]


class Sequences(NamedTuple):
    """The sequences of one call, as the kernel wants them: their queries stand one after the
    other."""

    lengths: Int[np.ndarray | Array, " sequences"]  # tokens of each, the new ones included
    tables: Int[np.ndarray | Array, "sequences pages"]
    query_ends: Int[
        np.ndarray | Array, " sequences_plus_one"
    ]  # 0, and where each sequence's queries end
    count: Int[np.ndarray | Array, " one"]


class Layout(NamedTuple):
    """What a program is compiled for, beside shapes."""

    num_pages: int
    page_tokens: int
    mesh: Mesh | None


def check_tiles(config: DecoderConfig, tensor: int, dtype: DTypeLike) -> None:
    """The kernel reads the heads of a device in whole words of 32 bits, and 1, 2, 4 or a multiple
    of 8 of those."""
    heads, in_a_word = (
        2 * config.num_kv_heads // tensor,
        4 // jnp.dtype(dtype).itemsize,
    )  # keys and values
    words = heads // in_a_word
    if heads % in_a_word or (words % 8 and words not in (1, 2, 4)):
        raise UserError(
            f"{config.num_kv_heads} key and value heads over engine.tensor {tensor} are "
            f"{heads // 2} a device, and the TPU kernel cannot read so many of "
            f"{jnp.dtype(dtype).name}: lower engine.tensor or use another engine.cache_dtype"
        )


class RaggedEngine(Engine):
    """See `Engine`. Pages are the only memory: nothing is loaded, nothing needs to be flushed."""

    def __init__(self, decoder: Decoder, **settings: Any) -> None:
        super().__init__(decoder, **settings)
        self._layout = Layout(self.num_pages, self.page_tokens, self.mesh)
        self._tables = np.zeros((self.slots, -(-self.positions // self.page_tokens)), np.int32)
        self._pages = self._empty_pages()

    def reset_cache(self) -> None:
        self._tables[:] = 0
        if (
            self._pages.is_deleted()
        ):  # a call that took them over failed; else there is room for them once
            self._pages = self._empty_pages()

    def choose_slot(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        return free[0]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for sources, targets in base.lots(pairs):
            self._programs.add(("copy",))
            self._pages = _copy(self._pages, sources, targets, num_pages=self.num_pages)

    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        for row in rows:
            self._tables[row.slot, : len(row.pages)] = row.pages
        rows = [row for row in rows if len(row.tokens)]
        if not rows:
            return
        most = max(self.prefill_tokens, MIN_PREFILL_TOKENS)
        size = base.bucket(sum(len(row.tokens) for row in rows), MIN_PREFILL_TOKENS, most)
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        targets = np.full(
            size, self.num_pages * self.page_tokens, np.int32
        )  # padding is written nowhere
        ends, lengths = np.zeros(self.slots + 1, np.int32), np.zeros(self.slots, np.int32)
        tables = np.zeros_like(self._tables)
        end = 0
        for index, row in enumerate(rows):
            place = slice(end, end + len(row.tokens))
            tokens[place] = row.tokens
            positions[place] = np.arange(row.start, row.start + len(row.tokens))
            table = self._tables[row.slot]
            page, offset = np.divmod(positions[place], self.page_tokens)
            targets[place] = table[page] * self.page_tokens + offset
            end = place.stop
            ends[index + 1 :], lengths[index], tables[index] = (
                end,
                row.start + len(row.tokens),
                table,
            )
        self._programs.add(("prefill", size))
        sequences = Sequences(lengths, tables, ends, np.asarray([len(rows)], np.int32))
        policy = self._graph, self._weights, self._scales
        with self._over_mesh():
            self._pages = _prefill(
                *policy, self._pages, tokens, positions, targets, sequences, layout=self._layout
            )

    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        static = {
            "layout": self._layout,
            "steps": self.decode_steps,
            "filtered": base.filtered(state),
        }
        self._programs.add(("decode", static["filtered"]))
        given = (
            self._graph,
            self._weights,
            self._scales,
            self._pages,
            state,
            self._tables,
            self._stops,
        )
        with self._over_mesh():
            self._pages, state, decoded = _decode(*given, **static)
        return jax.tree.map(np.array, (state, decoded))

    def flush(self, rows: Sequence[FlushRow]) -> None:
        """What is computed lies in its pages already."""

    def free_slot(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        self._tables[slot] = 0
        for (pages,) in base.lots([(page,) for page in broken_pages]):
            self._pages = _clear(self._pages, pages, num_pages=self.num_pages)

    def _empty_pages(self) -> Array:
        sharding = self.mesh and NamedSharding(self.mesh, PAGES_SPEC)
        return jnp.zeros(pages_shape(self.config, self._layout), self._dtype, device=sharding)


def pages_shape(config: DecoderConfig, layout: Layout) -> tuple[int, int, int, int]:
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
    every = jnp.arange(0, pages.shape[0], num_pages)[:, None]  # where each layer's pages begin
    return pages.at[every + targets].set(pages[every + sources])


@functools.partial(jax.jit, static_argnames=("num_pages",), donate_argnames=("pages",))
def _clear(pages: Pages, broken: Int[Array, " pages"], *, num_pages: int) -> Pages:
    return pages.at[jnp.arange(0, pages.shape[0], num_pages)[:, None] + broken].set(0)


@functools.partial(jax.jit, static_argnames=("graph", "layout"), donate_argnames=("pages",))
def _prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: KVScales | None,
    pages: Pages,
    tokens: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    targets: Int[Array, " tokens"],
    sequences: Sequences,
    *,
    layout: Layout,
) -> Pages:
    decoder = nnx.merge(graph, weights)
    attend = scaled(_attend(layout, targets, sequences, BLOCK_QUERIES), scales)
    return decoder.with_memory(tokens[None], positions[None], attend, pages)[1]


@functools.partial(
    jax.jit, static_argnames=("graph", "layout", "steps", "filtered"), donate_argnames=("pages",)
)
def _decode(
    graph: nnx.GraphDef,
    weights: nnx.State,
    scales: KVScales | None,
    pages: Pages,
    state: SlotState,
    tables: Int[Array, "slots pages"],
    stops: Int[Array, " stops"],
    *,
    layout: Layout,
    steps: int,
    filtered: bool,
) -> tuple[Pages, SlotState, Decoded]:
    decoder = nnx.merge(graph, weights)
    filters = sampling.Filters(state.top_k, state.top_p, state.min_p) if filtered else None
    slots, size = state.token.shape[0], layout.page_tokens
    every = jnp.arange(slots + 1, dtype=jnp.int32)

    def step(carry: tuple[Array, SlotState], _: None) -> tuple:
        pages, state = carry
        running = state.remaining > 0
        page = jnp.take_along_axis(tables, (state.position // size)[:, None], axis=1)[:, 0]
        targets = jnp.where(running, page * size + state.position % size, layout.num_pages * size)
        lengths = jnp.where(
            running, state.position + 1, 1
        )  # an idle slot reads one token, and nobody reads its result
        sequences = Sequences(lengths, tables, every, jnp.full(1, slots, jnp.int32))
        attend = scaled(_attend(layout, targets, sequences, BLOCK_DECODE_QUERIES), scales)
        hidden, pages = decoder.with_memory(state.token[None], state.position[None], attend, pages)
        state, decoded = base.advance(decoder.logits(hidden[0]), state, stops, filters)
        return (pages, state), decoded

    (pages, state), decoded = jax.lax.scan(step, (pages, state), None, length=steps)
    return pages, state, decoded


def _attend(
    layout: Layout, targets: Int[Array, " tokens"], sequences: Sequences, block_queries: int
) -> Callable:
    """attend(layer, query, key, value, pages) -> (mixed values, pages with the new keys and
    values); [1, tokens, heads, head_dim]."""
    key_pages = max(1, min(BLOCK_KEY_TOKENS // layout.page_tokens, sequences.tables.shape[1]))

    def on_a_device(
        layer: Array,
        query: Array,
        key: Array,
        value: Array,
        pages: Array,
        targets: Array,
        sequences: Sequences,
    ) -> tuple[Array, Array]:
        layer_tokens = layout.num_pages * layout.page_tokens
        # With a scale, the kernel computes in the type of the queries.
        scale = None if pages.dtype == query.dtype else 1.0
        filling = ((0, 0), (0, 0), (0, pages.shape[3] - query.shape[2]))
        both = jnp.stack([jnp.pad(key, filling), jnp.pad(value, filling)], axis=2)
        both = both.reshape(key.shape[0], -1, pages.shape[3])
        flat = pages.reshape(-1, *pages.shape[2:])
        place = jnp.where(targets < layer_tokens, layer * layer_tokens + targets, flat.shape[0])
        pages = (
            flat.at[place].set(base.narrowed(both, pages.dtype), mode="drop").reshape(pages.shape)
        )
        mixed = ragged_paged_attention(
            jnp.pad(query, filling),
            pages,
            sequences.lengths,
            layer * layout.num_pages + sequences.tables,
            sequences.query_ends,
            sequences.count,
            sm_scale=query.shape[-1] ** -0.5,
            k_scale=scale,
            v_scale=scale,
            num_kv_pages_per_block=key_pages,
            num_queries_per_block=min(block_queries, query.shape[0]),
            vmem_limit_bytes=VMEM_BYTES,
        )
        return mixed[..., : query.shape[2]], pages

    call = on_a_device
    if layout.mesh is not None:
        heads: Any = PartitionSpec(None, "tensor", None)
        whole: Any = PartitionSpec()
        inputs = (
            whole,
            heads,
            heads,
            heads,
            PAGES_SPEC,
            whole,
            Sequences(whole, whole, whole, whole),
        )
        call = jax.shard_map(
            on_a_device,
            mesh=layout.mesh,
            in_specs=inputs,
            out_specs=(heads, PAGES_SPEC),
            check_vma=False,
        )

    def attend(
        layer: Array, query: Array, key: Array, value: Array, pages: Array
    ) -> tuple[Array, Array]:
        mixed, pages = call(
            jnp.asarray(layer), query[0], key[0], value[0], pages, targets, sequences
        )
        return mixed[None], pages

    return attend
