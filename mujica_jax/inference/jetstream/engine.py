"""JetStream's engine interface around one of our engines, so that JetStream's own orchestrator, server and clients run
on it.

Differences from the engines JetStream was written for:

- A prefix is its token ids, no arrays. `prefill` computes it into pages and leaves them in the tree of prefixes;
  `insert` leases them from there, or computes again what was evicted meanwhile. So a prefix that is dropped, deleted or
  sent to another engine costs no memory, what several prompts begin with is computed once, and `existing_prefix` is a
  prompt to go on from.
- The weights are the engine's own: `params` is what `load_params` gave.
- JetStream's threads end the process on any exception. A prompt that cannot be served therefore becomes an empty
  prefix, which is answered with no token, and the reason is logged.
- Nothing tells an engine that a request has its `max_tokens`: a slot decodes on until it stops, is full, or is given to
  the next one.

The orchestrator prefills and generates in different threads; the engine takes one call at a time, so a lock is held a
call, and given back between the chunks of a long prompt. One slot more than decode at a time computes prompts.

Importing this module imports TensorFlow (by seqio). Our own server, `server.py`, does without.
"""

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int, Num
from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

from mujica_jax.inference.engine.base import Engine, FlushRow, PrefillRow, SlotState
from mujica_jax.inference.paging import BlockAllocator, BlockTable
from mujica_jax.inference.requests import RequestError, SamplingParams, check_params, check_prompt
from mujica_jax.models.tokenizer import Tokenizer

if not hasattr(jax, "tree_map"):  # JetStream's orchestrator calls it after every insert; JAX has dropped the name
    jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]

NO_TOKEN = -1  # JetStream puts a "beginning of sequence" before every prompt; prompts are computed as they were sent
PREFILL_LENGTHS = tuple(2**power for power in range(4, 16))  # those JetStream pads prompts to

messages: Any = tokenizer_pb2  # protobuf makes its classes at import: a type checker does not see them
logger = logging.getLogger(__name__)


# no leaves: what JetStream maps over arrays, moves between devices or deletes is nothing
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    tokens: tuple[int, ...]  # empty: a prompt that was refused


@dataclasses.dataclass(eq=False)
class _Running:
    block_table: BlockTable
    tokens: list[int]  # prompt and completion; keys and values of the last one are not computed yet
    flushed: int  # tokens that the pages hold


@dataclasses.dataclass(eq=False)
class DecodeState:
    """What every slot does. Calls change it and give it back: as with a donated array, one is valid at a time."""

    slots: SlotState
    running: dict[int, _Running]
    generated: Int[np.ndarray, " slots"]  # tokens since the slot was filled


class JetStreamEngine(engine_api.Engine):
    """See the module's docstring. Requests are sampled as `sampling` says, which also bounds how many new tokens any of
    them gets; its seed is that of the first one, and each has the next.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams, *, tokenizer: Tokenizer | None = None) -> None:
        """`engine` has one slot more than requests decode at a time. Without a tokenizer prompts are token ids."""
        check_params(sampling)
        _check(engine, sampling)
        self._engine, self._sampling, self._tokenizer = engine, sampling, tokenizer
        self._spare = engine.slots - 1
        self._weights = engine.weights
        self._inserted = 0
        self._lock = threading.Lock()  # engine and pages
        self._prefilling = threading.Lock()  # the spare slot; taken before the other one
        self._state = self.init_decode_state()

    def load_params(self, *args: Any, **kwargs: Any) -> nnx.State:
        return self._weights

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Nothing runs and nothing is cached."""
        with self._prefilling, self._lock:
            self._engine.reset_cache()
            self._pages = BlockAllocator(self._engine.num_pages, self._engine.page_tokens)
            slots = self._engine.slots
            self._state = DecodeState(SlotState.idle(slots), {}, np.zeros(slots, np.int32))
            return self._state

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: Num[np.ndarray | jax.Array, " padded"],
        true_length: int,
    ) -> Prefix:
        """Compute a prompt, or what follows `existing_prefix`; a refused prompt gives an empty prefix."""
        self._check_weights(params)
        try:
            sequence = self._sequence(existing_prefix, np.asarray(padded_tokens), int(true_length))
        except RequestError as error:
            logger.warning("a prompt is answered with no token: %s", error)
            return Prefix(())
        with self._prefilling:
            with self._lock:
                block_table = self._allocate(sequence, len(sequence))
            if block_table.cached_tokens < len(sequence) - 1:
                for row in self._chunks(self._spare, block_table, sequence):
                    with self._lock:
                        self._engine.prefill([row])
            with self._lock:
                self._end(self._spare, _Running(block_table, sequence.tolist(), block_table.cached_tokens))
        return Prefix(tuple(sequence.tolist()))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Let a slot decode after this prefix. What ran there before is over."""
        state = self._valid(decode_state)
        with self._lock:
            if (before := state.running.pop(slot, None)) is not None:
                self._end(slot, before)
            state.generated[slot] = state.slots.remaining[slot] = 0
            if prefix.tokens:
                self._start(state, slot, np.asarray(prefix.tokens, np.int32))
        return state

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, engine_api.ResultTokens]:
        """One token for every slot that runs; the results of the others are not valid."""
        self._check_weights(params)
        state = self._valid(decode_state)
        with self._lock:
            tokens, valid = self._step(state)
        data = np.stack([tokens, valid, state.generated], axis=1)[: self.max_concurrent_decodes].astype(np.int32)
        columns = {"tokens_idx": (0, 1), "valid_idx": (1, 2), "length_idx": (2, 3)}
        return state, engine_api.ResultTokens(data=data, **columns, samples_per_slot=1)

    def get_tokenizer(self) -> Any:
        return messages.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        stops = self._engine.stop_token_ids | set(self._sampling.stop_token_ids)
        return JetStreamTokenizer(self._tokenizer, stops)

    def get_prefix_destination_sharding(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.slots - 1

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        fitting = [length for length in PREFILL_LENGTHS if length <= self._engine.positions]
        return max(fitting, default=PREFILL_LENGTHS[0])

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Where a prefix would be sent, which holds no array: the first device."""
        return jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("all",))

    @property
    def colocated_cpus(self) -> None:
        return None

    def _check_weights(self, params: Any) -> None:
        if params is not self._weights:
            raise ValueError("the engine holds its weights itself: call it with what load_params gave")

    def _valid(self, decode_state: DecodeState) -> DecodeState:
        if decode_state is not self._state:
            raise ValueError("this decode state was replaced: use what the last init_decode_state gave")
        return decode_state

    def _sequence(self, prefix: Prefix | None, padded: np.ndarray, true_length: int) -> Int[np.ndarray, " tokens"]:
        if true_length > len(padded):
            raise RequestError(f"it has {true_length} tokens and JetStream kept the last {len(padded)}: send fewer")
        new = padded[:true_length].astype(np.int64)
        new = new[1:] if len(new) and new[0] == NO_TOKEN else new
        if prefix is not None and not prefix.tokens:
            raise RequestError("it goes on from a prompt that was refused")
        sequence = new if prefix is None else np.concatenate([np.asarray(prefix.tokens, np.int64), new])
        check_prompt(sequence.tolist(), self._engine.config.vocab_size)
        if len(sequence) >= self._engine.positions:
            raise RequestError(f"its {len(sequence)} tokens leave no room in the {self._engine.positions} positions")
        return sequence.astype(np.int32)

    def _allocate(self, sequence: Int[np.ndarray, " tokens"], capacity_tokens: int) -> BlockTable:
        block_table = self._pages.allocate(sequence, capacity_tokens)
        if block_table is None:  # a page that is to be copied takes the last one; without it there is always enough
            block_table = self._pages.allocate(sequence, capacity_tokens, reuse=False)
        assert block_table is not None, "there are pages for every slot at full length"
        if block_table.copied is not None:
            self._engine.copy_pages([block_table.copied])
        return block_table

    def _chunks(self, slot: int, block_table: BlockTable, sequence: Int[np.ndarray, " tokens"]) -> Iterator[PrefillRow]:
        """What is to be computed of a prompt; at least one row, which brings what is computed to the slot."""
        last, step = len(sequence) - 1, self._engine.prefill_tokens
        for start in range(block_table.cached_tokens, max(last, block_table.cached_tokens + 1), step):
            yield PrefillRow(slot, block_table.pages, start, sequence[start : min(start + step, last)])

    def _start(self, state: DecodeState, slot: int, sequence: Int[np.ndarray, " tokens"]) -> None:
        room = min(self._sampling.max_new_tokens, self._engine.positions - len(sequence))
        block_table = self._allocate(sequence, len(sequence) + room)
        for row in self._chunks(slot, block_table, sequence):
            self._engine.prefill([row])
        state.running[slot] = _Running(block_table, sequence.tolist(), block_table.cached_tokens)
        params, slots = self._sampling, state.slots
        slots.token[slot], slots.position[slot], slots.remaining[slot] = sequence[-1], len(sequence) - 1, room
        slots.temperature[slot], slots.seed[slot] = params.temperature, (params.seed + self._inserted) % 2**32
        slots.top_k[slot], slots.top_p[slot], slots.min_p[slot] = params.top_k, params.top_p, params.min_p
        self._inserted += 1

    def _step(self, state: DecodeState) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, which of them are valid), one a slot."""
        if not state.running:
            return np.zeros(self._engine.slots, np.int32), np.zeros(self._engine.slots, bool)
        state.slots, decoded = self._engine.decode(state.slots)
        tokens, valid = np.asarray(decoded.tokens[0]), np.array(decoded.valid[0])
        finite = np.isfinite(decoded.logprobs[0])
        for slot, running in list(state.running.items()):
            running.tokens.append(int(tokens[slot]))
            if not finite[slot]:
                logger.warning("the policy gave a log-probability that is not finite: check its weights")
                valid[slot] = False
                self._engine.free_slot(slot, broken_pages=self._pages.evict(running.block_table))
                self._pages.release(running.block_table, np.zeros(0, np.int32))
            elif state.slots.remaining[slot] == 0:
                self._end(slot, running)
            else:
                continue
            state.slots.remaining[slot] = 0
            del state.running[slot]
        state.generated += valid
        return tokens, valid

    def _end(self, slot: int, running: _Running) -> None:
        """Leave what the slot computed in its pages, for requests with the same prefix."""
        computed = len(running.tokens) - 1
        if computed > running.flushed:
            self._engine.flush([FlushRow(slot, running.block_table.pages, running.flushed, computed)])
        self._engine.free_slot(slot)
        self._pages.release(running.block_table, np.asarray(running.tokens[:computed], np.int32))


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer as JetStream calls it. No special token comes out of a text; clients with a chat template send
    token ids.

    JetStream puts texts together from single tokens, and bytes of a character only if each is a token of its own: a
    character that is spread over longer tokens is shown as U+FFFD. Token ids, and texts of `server.py`, are right in
    any case.
    """

    def __init__(self, wrapped: Tokenizer | None, stop_token_ids: frozenset[int]) -> None:
        self._wrapped, self._stops = wrapped, stop_token_ids

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray | jax.Array, int]:
        if self._wrapped is None:
            logger.warning("a text is answered with no token: the engine has no tokenizer, send token ids")
        ids = [] if self._wrapped is None else self._wrapped.encode_trusted(s)
        return token_utils.pad_tokens(np.asarray(ids, np.int32), self.bos_id, self.pad_id, **kwargs)

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        if self._wrapped is None:
            return ""
        piece = b"".join(self._wrapped.token_bytes(id) for id in token_ids)
        if len(piece) == 1 and piece[0] >= 0x80:
            return f"<0x{piece[0]:02X}>"  # JetStream waits for the rest of the character
        return piece.decode("utf-8", "replace")

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._stops)

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def eos_id(self) -> int:
        return min(self._stops, default=NO_TOKEN)

    @property
    def bos_id(self) -> int:
        return NO_TOKEN


def _check(engine: Engine, sampling: SamplingParams) -> None:
    if (steps := engine.decode_steps) != 1:
        raise ValueError(f"the engine decodes {steps} steps a call and JetStream counts single ones: use 1")
    if engine.slots < 2:
        raise ValueError(f"the engine has {engine.slots} slot and one computes prompts: give it at least 2")
    needed = engine.slots * -(-engine.positions // engine.page_tokens)
    if engine.num_pages < needed:
        raise ValueError(
            f"the engine has {engine.num_pages} pages and its {engine.slots} slots need {needed} at full length: "
            "JetStream never says when a request is over, so give it more memory, or fewer slots or positions"
        )
    if sampling.stop_strings or sampling.deadline_seconds is not None:
        raise ValueError("JetStream's orchestrator knows no stop strings and no deadlines: use serving.Server for them")
