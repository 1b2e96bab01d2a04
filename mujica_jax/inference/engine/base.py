"""The interface of the engines: a paged KV cache, and programs that prefill prompts and decode.

An engine holds arrays and decides nothing. `scheduler.py` decides which request runs in which slot,
and `paging.py` which pages it has (its block table). There are two engines, with the same results:

- `contiguous.ContiguousEngine`, for XLA on CPU and GPU. Running sequences have a contiguous KV
  cache beside the pages. A prefix that many sequences share is stored once and read by all of them
  together.
- `ragged.RaggedEngine`, for TPU. The ragged paged attention kernel reads the pages where they lie,
  and the programs write them in place.

Shapes are bounded, so the number of compiled programs is a few dozen whatever the traffic.
`compiled_programs` counts them.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from mujica_jax.errors import UserError
from mujica_jax.inference import sampling
from mujica_jax.inference.engine.kv_quantization import LEVELS, KVScales, calibrate_scales
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.weight_sync import sync_weights

LOT_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The sizes of an engine, the types of its cache, and the devices that it runs on."""

    slots: int  # requests that run at a time
    positions: int  # tokens of the longest request, prompt and completion
    page_tokens: int
    num_pages: int
    prefill_tokens: int  # prompt tokens that are computed between two decode calls
    decode_steps: int  # steps in a decode call
    stop_token_ids: Sequence[int]
    # Heads and the matrices around them are split over the axis `tensor`. None: one device.
    mesh: Mesh | None = None
    # What keys and values are stored as. None: the compute type. Attention computes in that type.
    cache_dtype: DTypeLike | None = None


class SlotState(NamedTuple):
    """The state of every slot, as decoding needs it."""

    # The last token, whose keys and values are not in memory yet.
    token: Int[np.ndarray | Array, " slots"]
    # Its position: the tokens before it are in memory.
    position: Int[np.ndarray | Array, " slots"]
    # Tokens that the request may still generate; 0 = nothing runs here.
    remaining: Int[np.ndarray | Array, " slots"]
    temperature: Float[np.ndarray | Array, " slots"]
    seed: UInt32[np.ndarray | Array, " slots"]
    top_k: Int[np.ndarray | Array, " slots"]  # 0 = all
    top_p: Float[np.ndarray | Array, " slots"]  # 1 = all
    min_p: Float[np.ndarray | Array, " slots"]  # 0 = all

    @classmethod
    def idle(cls, slots: int) -> "SlotState":
        """Return a state in which nothing runs, as numpy arrays that may be written."""
        return cls(
            token=np.zeros(slots, np.int32),
            position=np.zeros(slots, np.int32),
            remaining=np.zeros(slots, np.int32),
            temperature=np.zeros(slots, np.float32),
            seed=np.zeros(slots, np.uint32),
            top_k=np.zeros(slots, np.int32),
            top_p=np.ones(slots, np.float32),
            min_p=np.zeros(slots, np.float32),
        )


class PrefillRow(NamedTuple):
    """Tokens of one request to compute in a prefill call: those from position `start`."""

    slot: int
    pages: Sequence[int]  # the block table; the pages before `start` hold its beginning
    start: int
    tokens: Sequence[int] | Int[np.ndarray, " uncached"]


class FlushRow(NamedTuple):
    """Tokens of one request to write to its pages: from position `start` to before `stop`."""

    slot: int
    pages: Sequence[int]
    start: int
    stop: int


class Decoded(NamedTuple):
    """The result of a decode call, [steps, slots].

    No token was generated where `valid` is False.
    """

    tokens: Int[np.ndarray | Array, "steps slots"]
    logprobs: Float[np.ndarray | Array, "steps slots"]  # under the unmodified policy
    sampling_logprobs: Float[np.ndarray | Array, "steps slots"]  # under the distribution drawn from
    valid: Bool[np.ndarray | Array, "steps slots"]


class Engine(abc.ABC):
    """Weights, KV cache and compiled programs.

    Use it from one thread: the compiled programs donate the memory and return it.
    """

    tile_tokens = 1  # a request's tokens in a prefill call are rounded up to a multiple of this
    min_call_tokens = 1  # a prefill call of fewer tokens costs as much as one of these

    def __init__(self, decoder: Decoder, options: EngineOptions) -> None:
        """Take the weights of a decoder. Subclasses allocate the KV cache.

        A decoder without arrays (`nnx.eval_shape`) gives only the shapes: then call `set_weights`
        before the first prompt.
        """
        if options.mesh is not None:
            check_heads(decoder.config, options.mesh)
        self.config = decoder.config
        self.slots = options.slots
        self.positions = options.positions
        self.page_tokens = options.page_tokens
        self.num_pages = options.num_pages
        self.prefill_tokens = options.prefill_tokens
        self.decode_steps = options.decode_steps
        self.stop_token_ids = frozenset(options.stop_token_ids)
        self._stops = jnp.asarray(sorted(options.stop_token_ids), jnp.int32)
        self.mesh = options.mesh
        self._graph, weights = nnx.split(decoder)
        self._compute_dtype = jnp.dtype(decoder.dtype)
        self._dtype = self._compute_dtype
        if options.cache_dtype is not None:
            self._dtype = jnp.dtype(options.cache_dtype)
        self.release_weights()
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(weights)):
            self._load_weights(weights)
        self._programs: set[tuple] = set()

    @property
    def compiled_programs(self) -> int:
        return len(self._programs)

    @property
    def weights(self) -> nnx.State:
        """The policy."""
        return self._weights

    def set_weights(self, weights: nnx.State) -> None:
        """Replace the policy, and reset the cache.

        The call returns when the weights are on the engine's devices. These never hold two
        policies.
        """
        self.release_weights()
        self._load_weights(weights)
        jax.block_until_ready(self._weights)
        self.reset_cache()

    def release_weights(self) -> None:
        """Give the memory of the weights back. Nothing runs until `set_weights`."""
        self._weights = nnx.State({})
        self._scales: KVScales | None = None

    def _load_weights(self, weights: nnx.State) -> None:
        """Put weights on the engine's devices, in the layout that its programs take."""
        self._weights = sync_weights(weights, self.mesh)
        if jnp.issubdtype(self._dtype, jnp.integer):
            with self._over_mesh():
                self._scales = calibrate_scales(self._graph, self._weights)

    def _over_mesh(self) -> Any:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @abc.abstractmethod
    def reset_cache(self) -> None:
        """Forget what the KV cache holds. Called while nothing runs."""

    @abc.abstractmethod
    def choose_slot(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        """Return the free slot in which a request with these pages starts soonest."""

    @abc.abstractmethod
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to), in the order in which they were allocated.

        A page may be copied from and then copied to, never the other way.
        """

    @abc.abstractmethod
    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        """Compute the keys and values of these tokens.

        The last token of a request is not among them: decode computes it.
        """

    @abc.abstractmethod
    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        """Generate up to `decode_steps` tokens for every running slot. Returns numpy arrays."""

    @abc.abstractmethod
    def flush(self, rows: Sequence[FlushRow]) -> None:
        """Write what slots computed to their pages, unless it is there already."""

    @abc.abstractmethod
    def free_slot(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        """End the request of a slot.

        `broken_pages` may hold values that are not finite. These pages and the slot are set to
        zero: masked positions weigh 0, and 0 x NaN would be NaN for the next request too.
        """


def advance(
    logits: Float[Array, "slots vocab"],
    state: SlotState,
    stops: Int[Array, " stops"],
    filters: sampling.Filters | None,
) -> tuple[SlotState, Decoded]:
    """Draw the next token of every running slot.

    The arrays of the result are [slots], those of one step.
    """
    running = state.remaining > 0
    uniform = sampling.uniforms(state.seed, state.position)
    drawn = sampling.sample(logits, state.temperature, uniform, filters)
    token = jnp.where(running, drawn.token, state.token)
    stopped = jnp.any(token[:, None] == stops[None, :], axis=-1)
    remaining = jnp.where(stopped, 0, state.remaining - 1)
    state = state._replace(
        token=token,
        position=jnp.where(running, state.position + 1, state.position),
        remaining=jnp.where(running, remaining, 0),
    )
    return state, Decoded(token, drawn.logprob, drawn.sampling_logprob, running)


def filtered(state: SlotState) -> bool:
    """Return whether a running slot draws from a part of the vocabulary.

    Then the program that sorts the vocabulary runs.
    """
    is_running = state.remaining > 0
    has_filter = (state.top_k > 0) | (state.top_p < 1) | (state.min_p > 0)
    return bool(np.any(is_running & has_filter))


def narrowed(values: Float[Array, "*shape"], dtype: DTypeLike) -> Num[Array, "*shape"]:
    """Return keys or values in the type of the KV cache, clipped to its range.

    float8 has no infinity, so a number beyond its range would become NaN. int8 would wrap round.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(values), -LEVELS, LEVELS).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -largest, largest)
    return values.astype(dtype)


def bucket(needed: int, smallest: int, largest: int) -> int:
    """Return the smallest size of `smallest` x 1, 1.5, 2, 3, 4, 6, ... that holds `needed`.

    The result is at most `largest`.
    """
    size = smallest
    while size < needed:
        half_larger = size * 3 // 2
        size = half_larger if half_larger >= needed else size * 2
    return min(size, largest)


def lots(moves: Sequence[tuple[int, ...]]) -> Iterator[list[np.ndarray]]:
    """Yield the columns of moves of pages, in lots of LOT_SIZE: one shape, so one program.

    The last lot is filled up with its last move, which changes nothing when it is repeated.
    """
    for first in range(0, len(moves), LOT_SIZE):
        lot = list(moves[first : first + LOT_SIZE])
        padding = [lot[-1]] * (LOT_SIZE - len(lot))
        yield list(np.asarray(lot + padding, np.int32).T)


def check_heads(config: DecoderConfig, mesh: Mesh) -> None:
    """Check that the key and value heads can be split over the devices. Raises UserError."""
    if config.num_kv_heads % mesh.shape["tensor"]:
        raise UserError(
            f"{config.num_kv_heads} key and value heads cannot be split over "
            f"engine.tensor_parallel_size {mesh.shape['tensor']}: use a divisor of "
            f"{config.num_kv_heads}"
        )


def page_bytes(config: DecoderConfig, page_tokens: int, dtype: DTypeLike, lanes: int = 1) -> int:
    """Return the bytes of one page: keys and values of all layers.

    Heads are filled up to a multiple of `lanes`.
    """
    head_dim = -(-config.head_dim // lanes) * lanes
    keys = config.num_layers * page_tokens * config.num_kv_heads * head_dim
    return 2 * keys * jnp.dtype(dtype).itemsize
