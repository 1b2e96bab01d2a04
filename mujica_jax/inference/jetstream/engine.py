"""JetStream's engine interface around one of our engines, for our own generator and for JetStream's
orchestrator.

Differences from the engines JetStream was written for:

- A prefix is its token ids, no arrays: `prefill` checks a prompt and computes nothing. `insert`
  notes it for its slot. The next `generate` computes all prompts that were inserted since the last
  one, in whole calls of the engine, and then decodes. One prompt a call would leave most of a call
  empty. The native scheduler does more: it computes a long prompt in chunks between decode calls,
  so that streams wait less.
- A prefix that is dropped or sent to another engine costs nothing. `existing_prefix` is a prompt to
  go on from.
- Pages and their tree of prefixes are those of the native generator: what several prompts begin
  with is computed once, also when they come together. What a slot computed stays in the tree for
  later requests.
- The weights are the engine's own: `params` is what `load_params` gave, which also takes a new
  policy.
- `insert` takes `sampling=SamplingParams`: the request's own temperature, filters, seed and limit.
- A call generates up to `decode_steps` tokens a slot. A slot whose numbers are not finite is not
  valid any more.

Our generator frees a slot with `free_resource` as soon as its request is over. So pages are needed
for what runs, each request has as many as its prompt and its limit need, and `insert` raises
`NoRoomError` where there are too few at present. JetStream's orchestrator (up to 0.2.2) does not
free slots, has one limit for all, counts single steps, and ends its process on any exception. For
it the engine is made with `sampling`: then there must be pages for every slot at full length and
one decode step a call, and a prompt that cannot be served becomes an empty prefix, which is
answered with no token; the reason is logged.

The orchestrator prefills and generates in different threads; a lock keeps calls of the engine
apart.

Importing this module imports TensorFlow (by seqio). Our own server, `server.py`, does without.
"""

import dataclasses
import logging
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int, Num
from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

from mujica_jax.inference.engine.base import Engine, FlushRow, SlotState
from mujica_jax.inference.generator import Capabilities
from mujica_jax.inference.jetstream.contract import EngineCounters, NoRoomError
from mujica_jax.inference.jetstream.generator import prefill_length
from mujica_jax.inference.paging import BlockAllocator
from mujica_jax.inference.requests import RequestError, SamplingParams, check_params, check_prompt
from mujica_jax.inference.sequence import PagedSequence, fill_slot, next_flush, next_prefill
from mujica_jax.models.tokenizer import Tokenizer

if not hasattr(
    jax, "tree_map"
):  # JetStream's orchestrator calls it after every insert; JAX has dropped the name
    jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]

NO_TOKENS = np.zeros(0, np.int32)
# JetStream puts a "beginning of sequence" before every prompt; prompts are computed as they were
# sent
NO_TOKEN = -1
ORCHESTRATOR_PREFILL_LENGTH = 2**15  # JetStream's orchestrator pads prompts to no more

messages: Any = (
    tokenizer_pb2  # protobuf makes its classes at import: a type checker does not see them
)
logger = logging.getLogger(__name__)


# no leaves: what JetStream maps over arrays, moves between devices or deletes is nothing
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    tokens: tuple[int, ...]  # empty: a prompt that was refused


@dataclasses.dataclass(eq=False)
class _Running(PagedSequence):
    """A request in a slot of JetStream. `place` is its slot in our engine, from when its prompt is
    computed."""

    limit: int  # new tokens at most
    sampling: SamplingParams
    place: int = -1
    generated: list[int] = dataclasses.field(default_factory=list)
    finite: bool = True

    @property
    def capacity_tokens(self) -> int:
        return len(self.prompt) + self.limit

    @property
    def computed_tokens(self) -> np.ndarray:
        """What was computed: all tokens but the last."""
        return np.concatenate([self.prompt, np.asarray(self.generated, np.int32)])[:-1]


@dataclasses.dataclass(eq=False)
class DecodeState:
    """What every slot does. Calls change it and give it back: as with a donated array, one is valid
    at a time."""

    slots: SlotState  # of our engine
    running: dict[int, _Running]  # by JetStream's slot
    pending: dict[int, _Running]  # those among them whose prompts are not computed
    ended: list[_Running]  # whose pages go back before the next call
    generated: Int[np.ndarray, " slots"]  # tokens since the slot was filled, by JetStream's slot


class JetStreamEngine(engine_api.Engine):
    """See the module's docstring."""

    capabilities = Capabilities(sampling_per_request=True, log_probabilities=False)

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        prefix_reuse: bool = True,
    ) -> None:
        """`sampling` is that of all requests of JetStream's orchestrator, its limit included; its
        seed is that of the first one, and each has the next. Without it every insert brings its
        own. Without a tokenizer prompts are token ids."""
        if sampling is not None:
            check_params(sampling)
            _check(engine, sampling)
        self._engine, self._sampling, self._tokenizer = engine, sampling, tokenizer
        self._reuse = prefix_reuse
        self._weights = engine.weights
        self._inserted = self._prefilled_tokens = self._evicted_pages = 0
        self._pages = BlockAllocator(engine.num_pages, engine.page_tokens)
        self._lock = threading.Lock()
        self._state = self.init_decode_state()

    def load_params(self, weights: nnx.State | None = None) -> nnx.State:
        """Return the policy, after replacing it if there is a new one. A new one needs a new decode
        state."""
        if weights is not None:
            with self._lock:
                self._engine.set_weights(weights)
                self._weights = self._engine.weights
        return self._weights

    def release_params(self) -> None:
        """Give the policy's memory back; `load_params` brings the next one."""
        with self._lock:
            self._engine.release_weights()
            self._weights = self._engine.weights

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Nothing runs and nothing is cached."""
        with self._lock:
            self._engine.reset_cache()
            self._evicted_pages += self._pages.evicted
            self._pages = BlockAllocator(self._engine.num_pages, self._engine.page_tokens)
            slots = self._engine.slots
            self._state = DecodeState(SlotState.idle(slots), {}, {}, [], np.zeros(slots, np.int32))
            return self._state

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: Num[np.ndarray | jax.Array, " padded"],
        true_length: int,
    ) -> Prefix:
        """Return a prompt, or what follows `existing_prefix`. One that cannot be served raises
        RequestError, or gives an empty prefix for JetStream's orchestrator."""
        self._check_weights(params)
        try:
            sequence = self._sequence(existing_prefix, np.asarray(padded_tokens), int(true_length))
        except RequestError as error:
            if self._sampling is None:
                raise
            logger.warning("a prompt is answered with no token: %s", error)
            return Prefix(())
        return Prefix(tuple(sequence.tolist()))

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        *,
        sampling: SamplingParams | None = None,
    ) -> DecodeState:
        """Let a slot decode after this prefix. What ran there before is over. Raises NoRoomError if
        memory is short at present: then nothing runs there."""
        state = self._valid(decode_state)
        with self._lock:
            self._leave(state, slot)
            if prefix.tokens:
                sequence = self._new(np.asarray(prefix.tokens, np.int32), sampling)
                self._return_pages(state)
                self._check_room(state, sequence)
                state.running[slot] = state.pending[slot] = sequence
                self._inserted += 1
        return state

    def free_resource(self, slot: int) -> None:
        """End what runs in a slot. What it computed stays in the tree of prefixes.

        Its pages go back with those of other slots before the next call, or now if nothing runs any
        more."""
        with self._lock:
            self._leave(self._state, slot)
            if not self._state.running:
                self._return_pages(self._state)

    def generate(
        self, params: Any, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Compute the prompts that were inserted, and then up to `decode_steps` tokens for every
        slot that runs; the results of the others are not valid."""
        self._check_weights(params)
        state = self._valid(decode_state)
        with self._lock:
            self._return_pages(state)
            self._compute_prompts(state)
            tokens, valid = self._step(state)
        steps = tokens.shape[1]
        data = np.concatenate([tokens, valid, state.generated[:, None]], axis=1).astype(np.int32)
        columns = {
            "tokens_idx": (0, steps),
            "valid_idx": (steps, 2 * steps),
            "length_idx": (2 * steps, 2 * steps + 1),
        }
        return state, engine_api.ResultTokens(data=data, **columns, samples_per_slot=1)

    def counters(self) -> EngineCounters:
        return EngineCounters(
            prefilled_tokens=self._prefilled_tokens,
            free_pages=self._pages.free,
            evicted_pages=self._evicted_pages + self._pages.evicted,
            compiled_programs=self._engine.compiled_programs,
        )

    def get_tokenizer(self) -> Any:
        return messages.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        stops = self._engine.stop_token_ids | set(
            () if self._sampling is None else self._sampling.stop_token_ids
        )
        return JetStreamTokenizer(self._tokenizer, stops)

    def get_prefix_destination_sharding(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """What prompts are padded to at most. One may have any length that leaves room for a
        token."""
        length = prefill_length(self._engine.positions)
        return length if self._sampling is None else min(length, ORCHESTRATOR_PREFILL_LENGTH)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Where a prefix would be sent, which holds no array: the first device."""
        return jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("all",))

    @property
    def colocated_cpus(self) -> None:
        return None

    def _check_weights(self, params: Any) -> None:
        if params is not self._weights:
            raise ValueError(
                "the engine holds its weights itself: call it with what load_params gave"
            )

    def _valid(self, decode_state: DecodeState) -> DecodeState:
        if decode_state is not self._state:
            raise ValueError(
                "this decode state was replaced: use what the last init_decode_state gave"
            )
        return decode_state

    def _sequence(
        self, prefix: Prefix | None, padded: np.ndarray, true_length: int
    ) -> Int[np.ndarray, " tokens"]:
        if true_length > len(padded):
            raise RequestError(
                f"it has {true_length} tokens and JetStream kept the last {len(padded)}: send fewer"
            )
        new = padded[:true_length].astype(np.int64)
        new = new[1:] if len(new) and new[0] == NO_TOKEN else new
        if prefix is not None and not prefix.tokens:
            raise RequestError("it goes on from a prompt that was refused")
        sequence = (
            new if prefix is None else np.concatenate([np.asarray(prefix.tokens, np.int64), new])
        )
        check_prompt(sequence.tolist(), self._engine.config.vocab_size)
        if len(sequence) >= self._engine.positions:
            raise RequestError(
                f"its {len(sequence)} tokens leave no room in the {self._engine.positions} "
                "positions"
            )
        return sequence.astype(np.int32)

    def _new(self, prompt: Int[np.ndarray, " tokens"], sampling: SamplingParams | None) -> _Running:
        if sampling is None:
            if self._sampling is None:
                raise ValueError(
                    "this engine has no sampling for all requests: insert with "
                    "sampling=SamplingParams"
                )
            sampling = dataclasses.replace(
                self._sampling, seed=self._sampling.seed + self._inserted
            )
        return _Running(
            prompt, min(sampling.max_new_tokens, self._engine.positions - len(prompt)), sampling
        )

    def _check_room(self, state: DecodeState, sequence: _Running) -> None:
        """Check that there are pages for all prompts that will be computed, whether or not they
        share some."""
        coming = [*state.pending.values(), sequence]
        needed = sum(self._pages.needed(one.capacity_tokens) for one in coming)
        if needed > self._pages.available:
            raise NoRoomError(
                f"prompt and limit need {self._pages.needed(sequence.capacity_tokens)} pages of KV "
                f"memory, and of {self._pages.count} only {self._pages.available} can be had"
            )

    def _leave(self, state: DecodeState, slot: int) -> None:
        """End what runs in JetStream's slot, if something does. Its pages go back before the next
        call."""
        state.generated[slot] = 0
        sequence = state.running.pop(slot, None)
        state.pending.pop(slot, None)
        if sequence is not None and sequence.place >= 0:
            state.slots.remaining[sequence.place] = 0
            state.ended.append(sequence)

    def _return_pages(self, state: DecodeState) -> None:
        """Leave what ended requests computed in their pages, for requests with the same prefix."""
        flushes = []
        for sequence in state.ended:
            computed = len(sequence.computed_tokens)
            if (
                sequence.generated
                and sequence.finite
                and self._reuse
                and computed > sequence.flushed
            ):
                flushes.append(
                    FlushRow(sequence.place, sequence.block_table.pages, sequence.flushed, computed)
                )
        self._engine.flush(flushes)
        for sequence in state.ended:
            if sequence.generated and sequence.finite:
                self._engine.free_slot(sequence.place)
                tokens = sequence.computed_tokens if self._reuse else NO_TOKENS
            else:  # before its first token nobody knows whether what it computed is finite
                broken_pages = self._pages.evict(sequence.block_table)
                self._engine.free_slot(sequence.place, broken_pages=broken_pages)
                tokens = NO_TOKENS
            self._pages.release(sequence.block_table, tokens)
        state.ended.clear()

    def _compute_prompts(self, state: DecodeState) -> None:
        """Compute all prompts that were inserted. Of those with a common beginning, one goes before
        the others."""
        while state.pending:
            batch = self._next_batch(state)
            for slot in batch:
                del state.pending[slot]
            self._lease(state, list(batch.values()))
            self._compute(state, list(batch.values()))

    def _next_batch(self, state: DecodeState) -> dict[int, _Running]:
        """Return the inserted prompts that need no page which another one of them computes."""
        batch: dict[int, _Running] = {}
        being_computed: set[int] = set()
        for slot, sequence in state.pending.items():
            cached_pages = self._pages.cached_pages(sequence.prompt)
            missing = (
                sequence.block_names(self._pages.page_tokens)[cached_pages:] if self._reuse else []
            )
            if not missing or missing[0] not in being_computed:
                batch[slot] = sequence
                being_computed.update(missing)
        return batch

    def _lease(self, state: DecodeState, batch: Sequence[_Running]) -> None:
        """Give each of these prompts pages and a slot of our engine."""
        used = {sequence.place for sequence in state.running.values()}
        free = [place for place in range(self._engine.slots) if place not in used]
        copies = []
        for sequence in batch:
            block_table = self._pages.allocate(
                sequence.prompt, sequence.capacity_tokens, reuse=self._reuse
            )
            assert block_table is not None, "there was room when it was inserted"
            sequence.use_pages(block_table)
            if block_table.copied is not None:
                copies.append(block_table.copied)
            sequence.place = self._engine.choose_slot(
                free, block_table.pages, block_table.cached_tokens
            )
            free.remove(sequence.place)
            fill_slot(
                state.slots,
                sequence.place,
                prompt=sequence.prompt,
                params=sequence.sampling,
                vocabulary=self._engine.config.vocab_size,
            )
        if copies:
            self._engine.copy_pages(copies)

    def _compute(self, state: DecodeState, batch: Sequence[_Running]) -> None:
        """Compute these prompts; if others wait for what they begin with, let these find it."""
        waiting = [(sequence.place, sequence) for sequence in batch]
        while waiting:
            rows, ready = next_prefill(self._engine, waiting, self._engine.prefill_tokens)
            self._engine.prefill(rows)
            self._prefilled_tokens += sum(len(row.tokens) for row in rows)
            waiting = [(place, sequence) for place, sequence in waiting if not sequence.prefilled]
        for sequence in batch:
            state.slots.remaining[sequence.place] = sequence.limit
        if state.pending and self._reuse:
            self._engine.flush(
                next_flush(self._pages, [(sequence.place, sequence) for sequence in batch])
            )
            for sequence in batch:
                self._pages.share(sequence.block_table, sequence.prompt[: sequence.flushed])

    def _step(self, state: DecodeState) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, which of them are valid), [JetStream's slots, steps]."""
        shape = self._engine.slots, self._engine.decode_steps
        tokens, valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
        if not state.running:
            return tokens, valid
        state.slots, decoded = self._engine.decode(state.slots)
        for slot, sequence in list(state.running.items()):
            steps = int(decoded.valid[:, sequence.place].sum())
            new = decoded.tokens[:steps, sequence.place]
            finite = np.isfinite(decoded.logprobs[:steps, sequence.place])
            if not finite.all():
                logger.warning(
                    "the policy gave a log-probability that is not finite: check its weights"
                )
                sequence.finite = False
            tokens[slot, :steps] = new
            valid[slot, :steps] = np.logical_and.accumulate(finite)
            sequence.generated += new.tolist()
            state.generated[slot] += valid[slot].sum()
            if not sequence.finite or state.slots.remaining[sequence.place] == 0:
                generated = state.generated[slot]
                self._leave(state, slot)
                state.generated[slot] = generated  # until the slot is filled again
        self._return_pages(state)
        return tokens, valid


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer as JetStream calls it. No special token comes out of a text; clients with a
    chat template send token ids.

    JetStream puts texts together from single tokens, and bytes of a character only if each is a
    token of its own: a character that is spread over longer tokens is shown as U+FFFD. Token ids,
    and texts of `server.py`, are right in any case.
    """

    def __init__(self, wrapped: Tokenizer | None, stop_token_ids: frozenset[int]) -> None:
        self._wrapped, self._stops = wrapped, stop_token_ids

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray | jax.Array, int]:
        if self._wrapped is None:
            logger.warning(
                "a text is answered with no token: the engine has no tokenizer, send token ids"
            )
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
        raise ValueError(
            f"the engine decodes {steps} steps a call and JetStream counts single ones: use 1"
        )
    needed = engine.slots * -(-engine.positions // engine.page_tokens)
    if engine.num_pages < needed:
        raise ValueError(
            f"the engine has {engine.num_pages} pages and its {engine.slots} slots need {needed} "
            "at full length: JetStream never says when a request is over, so give it more memory, "
            "or fewer slots or positions"
        )
    if sampling.stop_strings or sampling.deadline_seconds is not None:
        raise ValueError(
            "JetStream's orchestrator knows no stop strings and no deadlines: use serving.Server "
            "for them"
        )
