"""The interface of the engines, and the data that schedulers and engines exchange.

An engine holds the weights, the paged KV cache and the compiled programs for prefill and decode. It
makes no scheduling decisions: `scheduler.py` assigns requests to slots, and `paging.py` assigns
pages to requests (block tables). A slot is a place in the decode batch, and holds one running
request. There are two engines, and both implement the same interface:

- `contiguous.ContiguousEngine` is for CPUs and GPUs. Each running sequence has a contiguous KV
  cache in addition to the pages. A prefix that many sequences share is stored once, and one matrix
  product reads it for all of them.
- `ragged.RaggedEngine` is for TPUs. The ragged paged attention kernel reads the pages directly, and
  the programs write new keys and values into the pages.

Array shapes are rounded up to a few sizes, so an engine compiles at most a few dozen programs.
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

# How many page moves (copies, loads or stores) one compiled program performs.
LOT_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The sizes of an engine, the data type of its KV cache, and its devices."""

    # Largest number of requests that run at the same time (vLLM's max_num_seqs).
    slots: int
    # Largest number of tokens of one request, prompt and completion together.
    positions: int
    # Tokens per page of the KV cache (vLLM's block size).
    page_tokens: int
    # Number of pages in the KV cache.
    num_pages: int
    # Largest number of prompt tokens that are computed between two decode calls.
    prefill_tokens: int
    # Decode steps per decode call. Each step generates one token for every running slot.
    decode_steps: int
    # Token ids that end every request.
    stop_token_ids: Sequence[int]
    # Attention heads and their weight matrices are split over the mesh axis `tensor`. None means
    # one device.
    mesh: Mesh | None = None
    # Data type of the stored keys and values. None means the compute type of the decoder. Attention
    # always computes in the compute type.
    cache_dtype: DTypeLike | None = None


class SlotState(NamedTuple):
    """The decode state of all slots, one value per slot."""

    # The last token of the sequence. Its keys and values are not in the KV cache yet.
    token: Int[np.ndarray | Array, " slots"]
    # Position of `token` in the sequence, from 0. All earlier tokens are in the KV cache.
    position: Int[np.ndarray | Array, " slots"]
    # How many tokens the request may still generate. 0 means that the slot does not decode.
    remaining: Int[np.ndarray | Array, " slots"]
    # Sampling temperature. 0 means greedy decoding.
    temperature: Float[np.ndarray | Array, " slots"]
    # Seed of the random draws.
    seed: UInt32[np.ndarray | Array, " slots"]
    # The filters, see `sampling.Filters`. top_k 0, top_p 1 and min_p 0 turn a filter off.
    top_k: Int[np.ndarray | Array, " slots"]
    top_p: Float[np.ndarray | Array, " slots"]
    min_p: Float[np.ndarray | Array, " slots"]

    @classmethod
    def idle(cls, slots: int) -> "SlotState":
        """Return the state of idle slots, as writable numpy arrays."""
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
    """The tokens of one request that a prefill call computes."""

    slot: int
    # The block table. Its pages hold the keys and values of all tokens before `start`.
    pages: Sequence[int]
    # Position of the first token to compute.
    start: int
    # Token ids from position `start` on. May be empty if all earlier tokens are cached.
    tokens: Sequence[int] | Int[np.ndarray, " uncached"]


class FlushRow(NamedTuple):
    """A range of tokens of one request whose keys and values are written to its pages."""

    slot: int
    # The block table.
    pages: Sequence[int]
    # Position of the first token to write.
    start: int
    # Position after the last token to write.
    stop: int


class Decoded(NamedTuple):
    """The result of a decode call. All arrays are [steps, slots]."""

    # The generated token ids.
    tokens: Int[np.ndarray | Array, "steps slots"]
    # Log-probability of each token under the policy itself (temperature 1, no filters).
    logprobs: Float[np.ndarray | Array, "steps slots"]
    # Log-probability of each token under the distribution that it was drawn from.
    sampling_logprobs: Float[np.ndarray | Array, "steps slots"]
    # False where no token was generated. The other arrays have no meaning there.
    valid: Bool[np.ndarray | Array, "steps slots"]


class Engine(abc.ABC):
    """The base class of the engines: weights, KV cache and compiled programs.

    Use an engine from one thread only. Each program takes over the buffers of the KV cache (buffer
    donation) and returns new ones.
    """

    # A prefill call rounds the number of tokens of each request up to a multiple of this.
    tile_tokens = 1
    # A prefill call with fewer tokens costs as much as a call with this number of tokens.
    min_call_tokens = 1

    def __init__(self, decoder: Decoder, options: EngineOptions) -> None:
        """Copy the weights of `decoder` to the engine's devices. Subclasses allocate the KV cache.

        `decoder` may hold shapes instead of arrays (`nnx.eval_shape`). Then call `set_weights`
        before the first prefill. Raises UserError if the key and value heads cannot be split over
        the mesh.
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
        """Number of programs that were compiled since the engine was made."""
        return len(self._programs)

    @property
    def weights(self) -> nnx.State:
        """The weights of the policy, in the layout of the engine's programs."""
        return self._weights

    def set_weights(self, weights: nnx.State) -> None:
        """Replace the policy's weights, and empty the KV cache.

        The old weights are freed first, so the devices never hold two policies. The call returns
        when the new weights are on the devices.
        """
        self.release_weights()
        self._load_weights(weights)
        jax.block_until_ready(self._weights)
        self.reset_cache()

    def release_weights(self) -> None:
        """Free the memory of the weights. The engine cannot run again before `set_weights`."""
        self._weights = nnx.State({})
        self._scales: KVScales | None = None

    def _load_weights(self, weights: nnx.State) -> None:
        """Copy weights to the engine's devices, in the layout that its programs expect."""
        self._weights = sync_weights(weights, self.mesh)
        if jnp.issubdtype(self._dtype, jnp.integer):
            with self._over_mesh():
                self._scales = calibrate_scales(self._graph, self._weights)

    def _over_mesh(self) -> Any:
        """Return a context in which programs run on the engine's mesh, if there is one."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @abc.abstractmethod
    def reset_cache(self) -> None:
        """Empty the KV cache. Called only while no request runs."""

    @abc.abstractmethod
    def choose_slot(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        """Choose one of the free slots for a new request.

        `free` are the free slots, `pages` is the block table of the request, and the first
        `cached_tokens` tokens are already in these pages. Returns the slot where the request can
        start with the least copying.
        """

    @abc.abstractmethod
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages. `pairs` holds (source page, target page), in the order of allocation.

        A page may be a source first and a target later. It is never a target first and a source
        later.
        """

    @abc.abstractmethod
    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        """Compute the keys and values of prompt tokens.

        The last prompt token of a request is never included. The first decode step computes it,
        because decoding needs its logits.
        """

    @abc.abstractmethod
    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        """Generate up to `decode_steps` tokens in every slot with `remaining` > 0.

        A slot stops earlier at a stop token or when `remaining` reaches 0. Returns the new state
        and the generated tokens, as numpy arrays.
        """

    @abc.abstractmethod
    def flush(self, rows: Sequence[FlushRow]) -> None:
        """Copy computed keys and values from the slots to their pages, if they are not there yet."""

    @abc.abstractmethod
    def free_slot(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        """Free the slot of a request that has ended.

        Pass the pages that may hold NaN or infinite values as `broken_pages`. The engine sets these
        pages and the slot's own memory to zero. Otherwise the next request would read NaN: attention
        multiplies masked positions by 0, and 0 x NaN is NaN.
        """


def advance(
    logits: Float[Array, "slots vocab"],
    state: SlotState,
    stops: Int[Array, " stops"],
    filters: sampling.Filters | None,
) -> tuple[SlotState, Decoded]:
    """Sample the next token of every running slot, and update the state of the slots.

    `stops` are the token ids that end a request. Returns (new state, tokens of this step). The
    arrays of the step are [slots].
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
    """Return whether at least one running slot has a sampling filter (top_k, top_p or min_p).

    The engine then runs the decode program that sorts the vocabulary.
    """
    is_running = state.remaining > 0
    has_filter = (state.top_k > 0) | (state.top_p < 1) | (state.min_p > 0)
    return bool(np.any(is_running & has_filter))


def narrowed(values: Float[Array, "*shape"], dtype: DTypeLike) -> Num[Array, "*shape"]:
    """Convert keys or values to the data type of the KV cache, and clip them to its range.

    Without clipping, values outside the range would become NaN in float8 (which has no infinity)
    and wrap around in int8.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(values), -LEVELS, LEVELS).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -largest, largest)
    return values.astype(dtype)


def bucket(needed: int, smallest: int, largest: int) -> int:
    """Round `needed` up to the next allowed size, at most `largest`.

    The allowed sizes are `smallest` times 1, 1.5, 2, 3, 4, 6, 8, 12, ... Few sizes mean few
    compiled programs.
    """
    size = smallest
    while size < needed:
        half_larger = size * 3 // 2
        size = half_larger if half_larger >= needed else size * 2
    return min(size, largest)


def lots(moves: Sequence[tuple[int, ...]]) -> Iterator[list[np.ndarray]]:
    """Split page moves into lots of LOT_SIZE, so that all lots have one shape and one program.

    A move is a tuple of integers, such as (source page, target page). Yields one int32 array
    [LOT_SIZE] for each member of the tuple. The last lot is padded with copies of its last move,
    which have no further effect.
    """
    for first in range(0, len(moves), LOT_SIZE):
        lot = list(moves[first : first + LOT_SIZE])
        padding = [lot[-1]] * (LOT_SIZE - len(lot))
        yield list(np.asarray(lot + padding, np.int32).T)


def check_heads(config: DecoderConfig, mesh: Mesh) -> None:
    """Check that the key and value heads can be split evenly over the devices.

    Raises UserError otherwise.
    """
    if config.num_kv_heads % mesh.shape["tensor"]:
        raise UserError(
            f"{config.num_kv_heads} key and value heads cannot be split over "
            f"engine.tensor_parallel_size {mesh.shape['tensor']}: use a divisor of "
            f"{config.num_kv_heads}"
        )


def page_bytes(config: DecoderConfig, page_tokens: int, dtype: DTypeLike, lanes: int = 1) -> int:
    """Return the size of one page in bytes: keys and values of all layers and heads.

    The head dimension is rounded up to a multiple of `lanes`.
    """
    head_dim = -(-config.head_dim // lanes) * lanes
    keys = config.num_layers * page_tokens * config.num_kv_heads * head_dim
    return 2 * keys * jnp.dtype(dtype).itemsize
