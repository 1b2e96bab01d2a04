"""The device side of sampling: a KV cache in slots, one prefill program and one decode program a shape bucket.

The cache of a layer is [slots, kv_heads, head_dim, positions]: with positions last, XLA's products on CPU read both keys and values in
their natural order (a third faster than [..., positions, head_dim]). `prefill` writes the tokens a slot does not hold yet (the rest of a
conversation stays cached between its turns), `decode` runs several steps on the device for all slots and comes back with tokens and
log-probabilities. Which request sits in which slot, and when, is decided in generator.py; this file holds arrays and no policy.

Shapes are bounded: prefill rows and lengths and the attended part of the cache are powers of two, so the number of compiled programs
is at most a few dozen whatever the traffic; `compiled_programs` counts them.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from mujica_jax.inference import sampling
from mujica_jax.models.decoder import Decoder

SMALLEST_PREFILL_TOKENS = 32  # shorter prefills are padded to this: fewer programs, and the padding costs microseconds
SMALLEST_ATTENDED_TOKENS = 128
NEVER = -1e30  # finite, so that a fully masked row gives numbers and no NaN


class Cache(NamedTuple):
    """Keys and values, one array a layer."""

    keys: tuple[Float[Array, "slots kv_heads head_dim positions"], ...]
    values: tuple[Float[Array, "slots kv_heads head_dim positions"], ...]


class SlotState(NamedTuple):
    """What decoding needs to know of each slot."""

    token: Int[np.ndarray | Array, " slots"]  # last token, not yet in the cache
    position: Int[np.ndarray | Array, " slots"]  # its position: tokens before it are cached
    remaining: Int[np.ndarray | Array, " slots"]  # tokens the request may still generate; 0 = nothing runs here
    temperature: Float[np.ndarray | Array, " slots"]
    seed: UInt32[np.ndarray | Array, " slots"]


class PrefillRow(NamedTuple):
    """One request's uncached tokens, to be written from position `start` of `slot`."""

    slot: int
    start: int
    tokens: Sequence[int] | Int[np.ndarray, " uncached"]


class Engine:
    """Weights, cache and compiled programs. Single-threaded; every array of the cache is donated to the next call."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        positions: int,
        prefill_tokens: int,
        decode_steps: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.config = decoder.config
        self.slots, self.positions = slots, positions
        self.prefill_tokens, self.decode_steps = prefill_tokens, decode_steps
        self.stop_token_ids = frozenset(stop_token_ids)
        self._stops = jnp.asarray(sorted(stop_token_ids), jnp.int32)
        self._graph, self._weights = nnx.split(decoder)
        self._dtype = decoder.dtype
        self._cache = self._empty_cache()
        self._programs: set[tuple] = set()

    def set_weights(self, weights: nnx.State) -> None:
        """Replace the policy. The cache is stale afterwards: the caller forgets what the slots held."""
        self._weights = weights

    def clear(self, slot: int) -> None:
        """Empty a slot that holds values that are not finite: masked positions weigh 0, and 0 x NaN is NaN for whoever comes next."""
        self._cache = _clear(self._cache, np.int32(slot))

    @property
    def compiled_programs(self) -> int:
        return len(self._programs)

    def prefill_shape(self, length: int) -> tuple[int, int]:
        """(rows, padded length) of the prefill call that a request of `length` uncached tokens belongs to."""
        padded = _bucket(length, SMALLEST_PREFILL_TOKENS, self.positions)
        return max(1, min(self.slots, self.prefill_tokens // padded)), padded

    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        """Write rows of one padded length into the cache. The last token of a request is not among them: decode takes it."""
        count, padded = self.prefill_shape(max(len(row.tokens) for row in rows))
        assert len(rows) <= count, f"{len(rows)} rows for a prefill call of {count}"
        tokens = np.zeros((count, padded), np.int32)
        slots = np.full(count, self.slots, np.int32)  # rows that are not used write nowhere
        starts, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row.tokens)] = row.tokens
            slots[index], starts[index], lengths[index] = row.slot, row.start, len(row.tokens)
        attended = self._attended(int((starts + lengths).max()))
        self._programs.add(("prefill", count, padded, attended))
        self._cache = _prefill(
            self._graph, self._weights, self._cache, tokens, slots, starts, lengths, attended=attended
        )

    def decode(self, state: SlotState) -> tuple[SlotState, np.ndarray, np.ndarray, np.ndarray]:
        """Up to `decode_steps` tokens for every running slot.

        Returns the new state, tokens int32 [steps, slots], log-probabilities float32 [steps, slots] and a bool mask of the same
        shape that is True where a token was generated.
        """
        running = np.asarray(state.remaining) > 0
        last = int(np.asarray(state.position)[running].max(initial=0)) + self.decode_steps + 1
        attended = self._attended(last)
        self._programs.add(("decode", attended))
        self._cache, state, tokens, logprobs, valid = _decode(
            self._graph, self._weights, self._cache, state, self._stops, attended=attended, steps=self.decode_steps
        )
        return SlotState(*map(np.asarray, state)), np.asarray(tokens), np.asarray(logprobs), np.asarray(valid)

    def _attended(self, needed: int) -> int:
        return _bucket(needed, SMALLEST_ATTENDED_TOKENS, self.positions)

    def _empty_cache(self) -> Cache:
        shape = (self.slots, self.config.num_kv_heads, self.config.head_dim, self.positions)
        layers = range(self.config.num_layers)
        return Cache(
            tuple(jnp.zeros(shape, self._dtype) for _ in layers), tuple(jnp.zeros(shape, self._dtype) for _ in layers)
        )


def _bucket(needed: int, smallest: int, largest: int) -> int:
    size = smallest
    while size < needed:
        size *= 2
    return min(size, largest)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _clear(cache: Cache, slot: Int[Array, ""]) -> Cache:
    return jax.tree.map(lambda layer: layer.at[slot].set(0), cache)


@functools.partial(jax.jit, static_argnames=("graph", "attended"), donate_argnames=("cache",))
def _prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    cache: Cache,
    tokens: Int[Array, "rows time"],
    slots: Int[Array, " rows"],
    starts: Int[Array, " rows"],
    lengths: Int[Array, " rows"],
    *,
    attended: int,
) -> Cache:
    decoder = nnx.merge(graph, weights)
    rows, time = tokens.shape
    offsets = jnp.arange(time)[None, :]
    positions = starts[:, None] + offsets
    # Padding is written out of bounds, that is nowhere.
    targets = jnp.where(offsets < lengths[:, None], positions, cache.keys[0].shape[-1])
    keys, values = list(cache.keys), list(cache.values)
    readable = jnp.arange(attended)[None, None, :] <= positions[:, :, None]

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        index = (slots[:, None], slice(None), slice(None), targets)
        keys[layer] = keys[layer].at[index].set(key.astype(keys[layer].dtype), mode="drop")
        values[layer] = values[layer].at[index].set(value.astype(values[layer].dtype), mode="drop")
        mine = jnp.minimum(slots, keys[layer].shape[0] - 1)
        return _attention(query, keys[layer][mine, ..., :attended], values[layer][mine, ..., :attended], readable)

    decoder(tokens, positions, attend, scan=False)
    return Cache(tuple(keys), tuple(values))


@functools.partial(jax.jit, static_argnames=("graph", "attended", "steps"), donate_argnames=("cache",))
def _decode(
    graph: nnx.GraphDef,
    weights: nnx.State,
    cache: Cache,
    state: SlotState,
    stops: Int[Array, " stops"],
    *,
    attended: int,
    steps: int,
) -> tuple[Cache, SlotState, Int[Array, "steps slots"], Float[Array, "steps slots"], Bool[Array, "steps slots"]]:
    decoder = nnx.merge(graph, weights)
    slots = jnp.arange(state.token.shape[0])

    def step(carry: tuple[Cache, SlotState], _: None) -> tuple:
        (window, state) = carry
        keys, values = list(window.keys), list(window.values)
        running = state.remaining > 0
        write_at = jnp.where(running, state.position, attended)  # a slot that does not run writes nowhere
        readable = jnp.arange(attended)[None, None, :] <= state.position[:, None, None]

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            index = (slots, slice(None), slice(None), write_at)
            keys[layer] = keys[layer].at[index].set(key[:, 0].astype(keys[layer].dtype), mode="drop")
            values[layer] = values[layer].at[index].set(value[:, 0].astype(values[layer].dtype), mode="drop")
            return _attention(query, keys[layer], values[layer], readable)

        hidden = decoder(state.token[:, None], state.position[:, None], attend, scan=False)
        logits = decoder.logits(hidden[:, 0])
        token, logprob = sampling.sample(logits, state.temperature, sampling.uniforms(state.seed, state.position))
        token = jnp.where(running, token, state.token)
        stopped = jnp.any(token[:, None] == stops[None, :], axis=-1)
        remaining = jnp.where(stopped, 0, state.remaining - 1)
        state = state._replace(
            token=token,
            position=jnp.where(running, state.position + 1, state.position),
            remaining=jnp.where(running, remaining, 0),
        )
        return (Cache(tuple(keys), tuple(values)), state), (token, logprob, running)

    # Steps run on a window of the cache that covers what is attended: slicing once a call, not once a step.
    window = jax.tree.map(lambda layer: layer[..., :attended], cache)
    (window, state), (tokens, logprobs, running) = jax.lax.scan(step, (window, state), None, length=steps)
    cache = jax.tree.map(lambda layer, part: jax.lax.dynamic_update_slice(layer, part, (0, 0, 0, 0)), cache, window)
    return cache, state, tokens, logprobs, running


def _attention(
    query: Float[Array, "rows time heads head_dim"],
    keys: Float[Array, "rows kv_heads head_dim positions"],
    values: Float[Array, "rows kv_heads head_dim positions"],
    readable: Bool[Array, "rows time positions"],
) -> Float[Array, "rows time heads head_dim"]:
    rows, time, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    grouped = query.reshape(rows, time, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, kv_heads, groups * time, head_dim)
    scores = jnp.einsum("bhqd,bhds->bhqs", grouped, keys).astype(jnp.float32) * head_dim**-0.5
    mask = jnp.broadcast_to(readable[:, None, None], (rows, 1, groups, time, readable.shape[-1]))
    scores = jnp.where(mask.reshape(rows, 1, groups * time, -1), scores, NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)  # float32 above
    out = jnp.einsum("bhqs,bhds->bhqd", weights, values)
    out = out.reshape(rows, kv_heads, groups, time, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, time, heads, head_dim)
