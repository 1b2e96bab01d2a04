"""JetStream's engine interface around one of our engines.

Our own generator (`generator.py`) and JetStream's orchestrator can drive it. Differences from the
engines that JetStream was written for:

- A prefix is its token ids, no arrays: `prefill` checks a prompt and computes nothing. `insert`
  notes it for its slot. The next `generate` computes all prompts that were inserted since the last
  one, in whole calls of the engine, and then decodes. One prompt a call would leave most of a call
  empty. The native scheduler does more: it computes a long prompt in chunks between decode calls,
  so that streams wait less.
- A prefix that is dropped or sent to another engine costs nothing. `existing_prefix` is a prompt
  that the new one continues.
- Pages and their tree of prefixes are those of the native generator: a common beginning of several
  prompts is computed once, also when they come together. What a slot computed stays in the tree for
  later requests.
- The engine holds the weights itself: `params` is the result of `load_params`, which also takes a
  new policy.
- `insert` takes `sampling=SamplingParams`: the request's own temperature, filters, seed and limit.
- A call generates up to `decode_steps` tokens a slot. A slot whose numbers are not finite is not
  valid any more.

Our generator frees a slot with `free_resource` as soon as its request is over. So only running
requests need pages, each request has as many as its prompt and its limit need, and `insert` raises
`NoRoomError` if there are too few at present.

JetStream's orchestrator (up to 0.2.2) does not free slots, has one limit for all requests, counts
single steps, and ends its process on any exception. For the orchestrator, make the engine with
`sampling`. Then there must be pages for every slot at full length, and one decode step a call. A
prompt that cannot be served becomes an empty prefix, which is answered with no token, and the
reason is logged.

The orchestrator prefills and generates in different threads. A lock keeps calls of the engine
apart.

Importing this module imports TensorFlow (by seqio). Our own server, `server.py`, does not need it.
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

# JetStream's orchestrator calls it after every insert. JAX has dropped the name.
if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]

NO_TOKENS = np.zeros(0, np.int32)
# JetStream puts a token "beginning of sequence" before every prompt. This one marks it, so that it
# can be taken away again: prompts are computed as they were sent.
NO_TOKEN = -1
ORCHESTRATOR_PREFILL_LENGTH = 2**15  # JetStream's orchestrator pads prompts to no more

# Protobuf makes its classes at import, where a type checker does not see them.
messages: Any = tokenizer_pb2
logger = logging.getLogger(__name__)


# A static node has no leaves, so JetStream finds no arrays to map over, move or delete.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The token ids of a prompt."""

    tokens: tuple[int, ...]  # empty: a prompt that was refused


@dataclasses.dataclass(eq=False)
class _Running(PagedSequence):
    """A request in a slot of JetStream."""

    max_new_tokens: int
    sampling: SamplingParams
    engine_slot: int = -1  # its slot in our engine, once its prompt is computed
    generated: list[int] = dataclasses.field(default_factory=list)
    is_finite: bool = True  # all its log-probabilities

    @property
    def capacity_tokens(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    @property
    def is_known_finite(self) -> bool:
        """Whether what it computed is finite. This is not known before its first token."""
        return bool(self.generated) and self.is_finite

    @property
    def computed_tokens(self) -> np.ndarray:
        """The tokens whose keys and values are computed: all but the last."""
        return np.concatenate([self.prompt, np.asarray(self.generated, np.int32)])[:-1]


@dataclasses.dataclass(eq=False)
class DecodeState:
    """The requests of every slot.

    Calls change it and return it. As with a donated array, only the last one is valid.
    """

    slots: SlotState  # of our engine
    running: dict[int, _Running]  # by JetStream's slot
    pending: dict[int, _Running]  # the running requests whose prompts are not computed
    ended: list[_Running]  # their pages are released before the next call
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
        """Wrap an engine.

        `sampling` holds for all requests of JetStream's orchestrator, its limit of new tokens
        included. The first request has its seed, and each later request the next seed. Without
        `sampling` every insert brings its own. Without a tokenizer prompts are token ids.
        """
        if sampling is not None:
            check_params(sampling)
            _check_for_orchestrator(engine, sampling)
        self._engine = engine
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._prefix_reuse = prefix_reuse
        self._weights = engine.weights
        self._inserted = 0  # requests since the engine was made
        self._prefilled_tokens = 0
        self._evicted_pages = 0  # before the last decode state
        self._pages = BlockAllocator(engine.num_pages, engine.page_tokens)
        self._lock = threading.Lock()
        self._state = self.init_decode_state()

    def load_params(self, weights: nnx.State | None = None) -> nnx.State:
        """Return the policy, after replacing it if `weights` are given.

        A new policy needs a new decode state.
        """
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
        """Return a decode state in which nothing runs and nothing is cached."""
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
        """Return the prefix of a prompt, which follows `existing_prefix` if there is one.

        A prompt that cannot be served raises RequestError. For JetStream's orchestrator it gives an
        empty prefix.
        """
        self._check_weights(params)
        try:
            prompt = self._read_prompt(
                existing_prefix, padded=np.asarray(padded_tokens), true_length=int(true_length)
            )
        except RequestError as error:
            if self._sampling is None:
                raise
            logger.warning("a prompt is answered with no token: %s", error)
            return Prefix(())
        return Prefix(tuple(prompt.tolist()))

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        *,
        sampling: SamplingParams | None = None,
    ) -> DecodeState:
        """Let a slot decode after this prefix. A request that ran there before is ended.

        Raises NoRoomError if memory is short at present: then nothing runs there.
        """
        state = self._check_state(decode_state)
        with self._lock:
            self._end(state, slot)
            if prefix.tokens:
                request = self._new_request(np.asarray(prefix.tokens, np.int32), sampling)
                self._release_ended(state)
                self._check_room(state, request)
                state.running[slot] = request
                state.pending[slot] = request
                self._inserted += 1
        return state

    def free_resource(self, slot: int) -> None:
        """End the request of a slot. What it computed stays in the prefix cache.

        Its pages are released with those of other slots before the next call, or now if nothing
        else runs.
        """
        with self._lock:
            self._end(self._state, slot)
            if not self._state.running:
                self._release_ended(self._state)

    def generate(
        self, params: Any, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Compute the prompts that were inserted, then decode every slot that runs.

        Each slot gets up to `decode_steps` tokens. The results of idle slots are not valid.
        """
        self._check_weights(params)
        state = self._check_state(decode_state)
        with self._lock:
            self._release_ended(state)
            self._prefill_pending(state)
            tokens, valid = self._decode(state)
        steps = tokens.shape[1]
        data = np.concatenate([tokens, valid, state.generated[:, None]], axis=1).astype(np.int32)
        result = engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, steps),
            valid_idx=(steps, 2 * steps),
            length_idx=(2 * steps, 2 * steps + 1),
            samples_per_slot=1,
        )
        return state, result

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
        stop_token_ids = self._engine.stop_token_ids
        if self._sampling is not None:
            stop_token_ids = stop_token_ids | set(self._sampling.stop_token_ids)
        return JetStreamTokenizer(self._tokenizer, stop_token_ids)

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
        """The largest length that prompts are padded to.

        A prompt may have any length that leaves room for one token.
        """
        length = prefill_length(self._engine.positions)
        return length if self._sampling is None else min(length, ORCHESTRATOR_PREFILL_LENGTH)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The first device. A prefix would be sent there if it held arrays."""
        return jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("all",))

    @property
    def colocated_cpus(self) -> None:
        return None

    def _check_weights(self, params: Any) -> None:
        if params is not self._weights:
            raise ValueError(
                "the engine holds its weights itself: call it with what load_params gave"
            )

    def _check_state(self, decode_state: DecodeState) -> DecodeState:
        """Return the decode state. Raises ValueError if it is not the last one."""
        if decode_state is not self._state:
            raise ValueError(
                "this decode state was replaced: use what the last init_decode_state gave"
            )
        return decode_state

    def _read_prompt(
        self, prefix: Prefix | None, *, padded: np.ndarray, true_length: int
    ) -> Int[np.ndarray, " tokens"]:
        """Return the tokens of a prompt, with those of its prefix. Raises RequestError."""
        if true_length > len(padded):
            raise RequestError(
                f"it has {true_length} tokens and JetStream kept the last {len(padded)}: send fewer"
            )
        prompt = padded[:true_length].astype(np.int64)
        if len(prompt) and prompt[0] == NO_TOKEN:
            prompt = prompt[1:]
        if prefix is not None:
            if not prefix.tokens:
                raise RequestError("it goes on from a prompt that was refused")
            prompt = np.concatenate([np.asarray(prefix.tokens, np.int64), prompt])
        check_prompt(prompt.tolist(), self._engine.config.vocab_size)
        if len(prompt) >= self._engine.positions:
            raise RequestError(
                f"its {len(prompt)} tokens leave no room in the {self._engine.positions} positions"
            )
        return prompt.astype(np.int32)

    def _new_request(
        self, prompt: Int[np.ndarray, " tokens"], sampling: SamplingParams | None
    ) -> _Running:
        if sampling is None:
            if self._sampling is None:
                raise ValueError(
                    "this engine has no sampling for all requests: insert with "
                    "sampling=SamplingParams"
                )
            sampling = dataclasses.replace(
                self._sampling, seed=self._sampling.seed + self._inserted
            )
        max_new_tokens = min(sampling.max_new_tokens, self._engine.positions - len(prompt))
        return _Running(prompt, max_new_tokens, sampling)

    def _check_room(self, state: DecodeState, new_request: _Running) -> None:
        """Check that there are pages for all prompts that will be computed. Raises NoRoomError.

        Each prompt counts in full, whether or not some of them share pages.
        """
        pages_of_new_request = self._pages.needed(new_request.capacity_tokens)
        needed_pages = pages_of_new_request
        for request in state.pending.values():
            needed_pages += self._pages.needed(request.capacity_tokens)
        if needed_pages > self._pages.available:
            raise NoRoomError(
                f"prompt and limit need {pages_of_new_request} pages of KV cache, and of "
                f"{self._pages.count} only {self._pages.available} can be had"
            )

    def _end(self, state: DecodeState, slot: int) -> None:
        """End the request in JetStream's slot, if there is one.

        Its pages are released before the next call.
        """
        state.generated[slot] = 0
        request = state.running.pop(slot, None)
        state.pending.pop(slot, None)
        if request is not None and request.engine_slot >= 0:
            state.slots.remaining[request.engine_slot] = 0
            state.ended.append(request)

    def _release_ended(self, state: DecodeState) -> None:
        """Release the pages of ended requests. What they computed goes to the prefix cache."""
        flush_rows = []
        for request in state.ended:
            start = request.flushed_tokens
            stop = len(request.computed_tokens)
            if self._prefix_reuse and request.is_known_finite and stop > start:
                pages = request.block_table.pages
                flush_rows.append(FlushRow(request.engine_slot, pages, start, stop))
        self._engine.flush(flush_rows)

        for request in state.ended:
            tokens = NO_TOKENS
            if request.is_known_finite:
                self._engine.free_slot(request.engine_slot)
                if self._prefix_reuse:
                    tokens = request.computed_tokens
            else:
                broken_pages = self._pages.evict(request.block_table)
                self._engine.free_slot(request.engine_slot, broken_pages=broken_pages)
            self._pages.release(request.block_table, tokens)
        state.ended.clear()

    def _prefill_pending(self, state: DecodeState) -> None:
        """Compute all prompts that were inserted.

        Of several prompts with a common beginning, one is computed before the others.
        """
        while state.pending:
            batch = self._next_batch(state)
            for slot in batch:
                del state.pending[slot]
            requests = list(batch.values())
            self._allocate(state, requests)
            self._prefill_batch(state, requests)

    def _next_batch(self, state: DecodeState) -> dict[int, _Running]:
        """Return the inserted prompts that need no page which another one of them computes."""
        batch: dict[int, _Running] = {}
        being_computed: set[int] = set()
        for slot, request in state.pending.items():
            missing_blocks = []
            if self._prefix_reuse:
                cached_pages = self._pages.cached_pages(request.prompt)
                missing_blocks = request.block_hashes(self._pages.page_tokens)[cached_pages:]
            if not missing_blocks or missing_blocks[0] not in being_computed:
                batch[slot] = request
                being_computed.update(missing_blocks)
        return batch

    def _allocate(self, state: DecodeState, batch: Sequence[_Running]) -> None:
        """Give each of these requests a block table and a slot of our engine."""
        slots_in_use = {request.engine_slot for request in state.running.values()}
        free_slots = [slot for slot in range(self._engine.slots) if slot not in slots_in_use]
        copies = []
        for request in batch:
            block_table = self._pages.allocate(
                request.prompt, request.capacity_tokens, reuse=self._prefix_reuse
            )
            assert block_table is not None, "there was room when it was inserted"
            request.use_pages(block_table)
            if block_table.copied is not None:
                copies.append(block_table.copied)
            request.engine_slot = self._engine.choose_slot(
                free_slots, block_table.pages, block_table.cached_tokens
            )
            free_slots.remove(request.engine_slot)
            fill_slot(
                state.slots,
                request.engine_slot,
                prompt=request.prompt,
                params=request.sampling,
                vocabulary=self._engine.config.vocab_size,
            )
        if copies:
            self._engine.copy_pages(copies)

    def _prefill_batch(self, state: DecodeState, batch: Sequence[_Running]) -> None:
        """Compute these prompts. If other prompts wait, put these into the prefix cache."""
        in_slots = [(request.engine_slot, request) for request in batch]
        unfinished = in_slots
        while unfinished:
            rows, _ = next_prefill(self._engine, unfinished, self._engine.prefill_tokens)
            self._engine.prefill(rows)
            self._prefilled_tokens += sum(len(row.tokens) for row in rows)
            unfinished = [
                (slot, request) for slot, request in unfinished if not request.is_prefilled
            ]
        for request in batch:
            state.slots.remaining[request.engine_slot] = request.max_new_tokens
        if state.pending and self._prefix_reuse:
            self._engine.flush(next_flush(self._pages, in_slots))
            for request in batch:
                self._pages.share(request.block_table, request.prompt[: request.flushed_tokens])

    def _decode(self, state: DecodeState) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, which of them are valid), [JetStream's slots, steps]."""
        shape = (self._engine.slots, self._engine.decode_steps)
        tokens = np.zeros(shape, np.int32)
        valid = np.zeros(shape, bool)
        if not state.running:
            return tokens, valid
        state.slots, decoded = self._engine.decode(state.slots)
        for slot, request in list(state.running.items()):
            engine_slot = request.engine_slot
            steps = int(decoded.valid[:, engine_slot].sum())
            new = decoded.tokens[:steps, engine_slot]
            is_finite = np.isfinite(decoded.logprobs[:steps, engine_slot])
            if not is_finite.all():
                logger.warning(
                    "the policy gave a log-probability that is not finite: check its weights"
                )
                request.is_finite = False
            tokens[slot, :steps] = new
            valid[slot, :steps] = np.logical_and.accumulate(is_finite)
            request.generated += new.tolist()
            state.generated[slot] += valid[slot].sum()
            if not request.is_finite or state.slots.remaining[engine_slot] == 0:
                # The number of tokens stays until the slot is filled again.
                generated = state.generated[slot]
                self._end(state, slot)
                state.generated[slot] = generated
        self._release_ended(state)
        return tokens, valid


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer as JetStream calls it. No special token comes out of a text.

    Clients with a chat template send token ids. JetStream puts texts together from single tokens,
    and bytes of a character only if each is a token of its own. So a character that is spread over
    longer tokens is shown as U+FFFD. Token ids, and texts of `server.py`, are right in any case.
    """

    def __init__(self, wrapped: Tokenizer | None, stop_token_ids: frozenset[int]) -> None:
        self._wrapped = wrapped
        self._stop_token_ids = stop_token_ids

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray | jax.Array, int]:
        if self._wrapped is None:
            logger.warning(
                "a text is answered with no token: the engine has no tokenizer, send token ids"
            )
            ids = []
        else:
            ids = self._wrapped.encode_trusted(s)
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
        return set(self._stop_token_ids)

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def eos_id(self) -> int:
        return min(self._stop_token_ids, default=NO_TOKEN)

    @property
    def bos_id(self) -> int:
        return NO_TOKEN


def _check_for_orchestrator(engine: Engine, sampling: SamplingParams) -> None:
    """Check that JetStream's orchestrator can drive the engine. Raises ValueError."""
    steps = engine.decode_steps
    if steps != 1:
        raise ValueError(
            f"the engine decodes {steps} steps a call and JetStream counts single ones: use 1"
        )
    needed_pages = engine.slots * -(-engine.positions // engine.page_tokens)
    if engine.num_pages < needed_pages:
        raise ValueError(
            f"the engine has {engine.num_pages} pages and its {engine.slots} slots need "
            f"{needed_pages} at full length: JetStream never says when a request is over, so give "
            "it more memory, or fewer slots or positions"
        )
    if sampling.stop_strings or sampling.deadline_seconds is not None:
        raise ValueError(
            "JetStream's orchestrator knows no stop strings and no deadlines: use serving.Server "
            "for them"
        )
