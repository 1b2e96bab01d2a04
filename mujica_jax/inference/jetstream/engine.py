"""An adapter: the project's own engine behind JetStream's engine interface.

Two programs can use it: the generator of this package (`generator.py`) and JetStream's own
orchestrator. It differs from other engines with this interface in these points:

- A prefix holds token ids instead of arrays. `prefill` only checks the prompt, and `insert` only
  records it for its slot. The next call of `generate` computes all recorded prompts together, then
  decodes. This fills the prefill calls of the engine, where one prompt would leave most of a call
  empty. (The native scheduler also splits long prompts into chunks between decode calls, so that
  streams wait less. This adapter does not.)
- A prefix costs no memory, so it may be dropped or sent to another engine. Pass `existing_prefix`
  to `prefill` if the new prompt continues an earlier one.
- The pages and the prefix cache are the same as in the native scheduler. A common prefix of several
  prompts is computed once, even if they arrive together. The pages of a finished request stay in
  the prefix cache.
- The engine holds the weights itself. `load_params` sets a new policy, and its result must be
  passed as `params`.
- `insert` takes `sampling=SamplingParams`: the temperature, filters, seed and token limit of the
  request.
- A call of `generate` generates up to `decode_steps` tokens per slot. If the numbers of a slot are
  not finite, its tokens are marked as invalid.

**With the generator of this package**, `free_resource` frees a slot as soon as its request has
ended. So only running requests occupy pages. Each request gets enough pages for its prompt and its
token limit, and `insert` raises `NoRoomError` if there are too few.

**With JetStream's orchestrator** (up to version 0.2.2), make the engine with `sampling`. The
orchestrator does not free slots, so there must be pages for every slot at full length. It has one
token limit for all requests. It counts single decode steps, so `decode_steps` must be 1. It exits
on any exception, so `prefill` turns an invalid prompt into an empty prefix. Such a request gets an
empty answer, and the reason is logged. The orchestrator calls `prefill` and `generate` from
different threads, so a lock separates the calls of the engine.

Importing this module imports TensorFlow (through seqio). `server.py` does not need it.
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

# JetStream's orchestrator calls `jax.tree_map` after every insert, but JAX has removed this name.
if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]

NO_TOKENS = np.zeros(0, np.int32)
# JetStream puts a begin-of-sequence token in front of every prompt. This value stands for that
# token, so that `prefill` can recognise and remove it.
NO_TOKEN = -1
# Longest padded prompt of JetStream's orchestrator, in tokens.
ORCHESTRATOR_PREFILL_LENGTH = 2**15

# Protobuf creates its classes at import time, so type checkers cannot see them.
messages: Any = tokenizer_pb2
logger = logging.getLogger(__name__)


# Registered as a static node, a prefix has no leaves. So JetStream finds no arrays in it to move or
# delete.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The token ids of a prompt."""

    # Empty for a prompt that was rejected.
    tokens: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Running(PagedSequence):
    """A request in one of JetStream's slots."""

    max_new_tokens: int
    sampling: SamplingParams
    # The slot in the project's engine. -1 until the request has pages.
    engine_slot: int = -1
    # The generated token ids.
    generated: list[int] = dataclasses.field(default_factory=list)
    # Whether all log-probabilities so far are finite.
    is_finite: bool = True

    @property
    def capacity_tokens(self) -> int:
        """Largest number of tokens of the sequence, prompt and completion together."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def is_known_finite(self) -> bool:
        """Whether the keys and values are known to be finite. Unknown before the first token."""
        return bool(self.generated) and self.is_finite

    @property
    def computed_tokens(self) -> np.ndarray:
        """The token ids whose keys and values are in the KV cache: all except the last."""
        return np.concatenate([self.prompt, np.asarray(self.generated, np.int32)])[:-1]


@dataclasses.dataclass(eq=False)
class DecodeState:
    """The requests in all slots.

    The engine's methods change the state in place and return it. Only the state that
    `init_decode_state` returned last is valid, as with a donated array.
    """

    # The decode state of the project's engine.
    slots: SlotState
    # The running requests, by JetStream's slot.
    running: dict[int, _Running]
    # Those running requests whose prompts are not computed yet, by JetStream's slot.
    pending: dict[int, _Running]
    # Requests that have ended. Their pages are released before the next call.
    ended: list[_Running]
    # Number of tokens generated since the slot was filled, by JetStream's slot.
    generated: Int[np.ndarray, " slots"]


class JetStreamEngine(engine_api.Engine):
    """The project's engine with JetStream's interface. See the module docstring."""

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

        Pass `sampling` for JetStream's orchestrator: it holds the sampling settings and the token
        limit of all requests. Request i uses the seed `sampling.seed` + i, from 0. Without it, each
        call of `insert` must pass its own settings. Without `tokenizer`, prompts must be token ids.
        `prefix_reuse` turns the prefix cache on. Raises ValueError if JetStream's orchestrator
        cannot use the engine.
        """
        if sampling is not None:
            check_params(sampling)
            _check_for_orchestrator(engine, sampling)
        self._engine = engine
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._prefix_reuse = prefix_reuse
        self._weights = engine.weights
        # Requests that were inserted since the engine was made.
        self._inserted = 0
        self._prefilled_tokens = 0
        # Pages that were evicted before the current decode state was made.
        self._evicted_pages = 0
        self._pages = BlockAllocator(engine.num_pages, engine.page_tokens)
        self._lock = threading.Lock()
        self._state = self.init_decode_state()

    def load_params(self, weights: nnx.State | None = None) -> nnx.State:
        """Replace the policy if `weights` is given, and return the engine's weights.

        After a replacement, call `init_decode_state` before the next prompt.
        """
        if weights is not None:
            with self._lock:
                self._engine.set_weights(weights)
                self._weights = self._engine.weights
        return self._weights

    def release_params(self) -> None:
        """Free the memory of the weights. The engine cannot run again before `load_params`."""
        with self._lock:
            self._engine.release_weights()
            self._weights = self._engine.weights

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Empty the cache, and return a decode state without requests."""
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
        """Check a prompt, and return it as a prefix. Nothing is computed yet.

        The prompt is the first `true_length` of `padded_tokens`. It is appended to
        `existing_prefix` if there is one. Raises RequestError for a prompt that cannot be served.
        For JetStream's orchestrator it returns an empty prefix instead.
        """
        self._check_weights(params)
        try:
            prompt = self._read_prompt(
                existing_prefix, padded=np.asarray(padded_tokens), true_length=int(true_length)
            )
        except RequestError as error:
            if self._sampling is None:
                raise
            logger.warning("a request gets an empty answer: %s", error)
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
        """Put a prefix into a slot. An earlier request in this slot ends.

        Raises NoRoomError if there are too few pages at present. The slot is then idle.
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
        """End the request of a slot. Its keys and values stay in the prefix cache.

        Its pages are released before the next call, together with the pages of other slots. If no
        other request runs, they are released now.
        """
        with self._lock:
            self._end(self._state, slot)
            if not self._state.running:
                self._release_ended(self._state)

    def generate(
        self, params: Any, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Compute the prompts that were inserted, then decode all running slots.

        Each slot gets up to `decode_steps` tokens. The tokens of idle slots are marked as invalid.
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
        """Return the counters of the engine."""
        return EngineCounters(
            prefilled_tokens=self._prefilled_tokens,
            free_pages=self._pages.free,
            evicted_pages=self._evicted_pages + self._pages.evicted,
            compiled_programs=self._engine.compiled_programs,
        )

    def get_tokenizer(self) -> Any:
        """Return no parameters, because `build_tokenizer` needs none."""
        return messages.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        """Return the tokenizer for JetStream's orchestrator."""
        stop_token_ids = self._engine.stop_token_ids
        if self._sampling is not None:
            stop_token_ids = stop_token_ids | set(self._sampling.stop_token_ids)
        return JetStreamTokenizer(self._tokenizer, stop_token_ids)

    def get_prefix_destination_sharding(self) -> jax.sharding.NamedSharding:
        """Return the sharding of a prefix: one copy on the first device."""
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots."""
        return self._engine.slots

    @property
    def samples_per_slot(self) -> int:
        """The number of completions that a slot generates: one."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The largest length of a padded prompt, in tokens.

        The prompt itself must leave room for one generated token.
        """
        length = prefill_length(self._engine.positions)
        return length if self._sampling is None else min(length, ORCHESTRATOR_PREFILL_LENGTH)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """A mesh of the first device, where JetStream would move the arrays of a prefix."""
        return jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("all",))

    @property
    def colocated_cpus(self) -> None:
        """No CPUs for JetStream to use."""
        return None

    def _check_weights(self, params: Any) -> None:
        """Check that `params` are the engine's current weights. Raises ValueError otherwise."""
        if params is not self._weights:
            raise ValueError(
                "params are not the weights of this engine: pass the result of load_params"
            )

    def _check_state(self, decode_state: DecodeState) -> DecodeState:
        """Return the decode state. Raises ValueError if a later one has replaced it."""
        if decode_state is not self._state:
            raise ValueError(
                "this decode state was replaced: use the result of the last init_decode_state"
            )
        return decode_state

    def _read_prompt(
        self, prefix: Prefix | None, *, padded: np.ndarray, true_length: int
    ) -> Int[np.ndarray, " tokens"]:
        """Return the token ids of a prompt, after those of `prefix`.

        Raises RequestError if the prompt cannot be served.
        """
        if true_length > len(padded):
            raise RequestError(
                f"the prompt has {true_length} tokens, but JetStream kept only the last "
                f"{len(padded)}: send a shorter prompt"
            )
        prompt = padded[:true_length].astype(np.int64)
        if len(prompt) and prompt[0] == NO_TOKEN:
            prompt = prompt[1:]
        if prefix is not None:
            if not prefix.tokens:
                raise RequestError(
                    "the prompt continues a prompt that was rejected: send the whole prompt again"
                )
            prompt = np.concatenate([np.asarray(prefix.tokens, np.int64), prompt])
        check_prompt(prompt.tolist(), self._engine.config.vocab_size)
        if len(prompt) >= self._engine.positions:
            raise RequestError(
                f"the prompt's {len(prompt)} tokens leave no room for a completion in the "
                f"{self._engine.positions} positions: send a shorter prompt"
            )
        return prompt.astype(np.int32)

    def _new_request(
        self, prompt: Int[np.ndarray, " tokens"], sampling: SamplingParams | None
    ) -> _Running:
        """Return a request for a prompt, with its own sampling settings or those of the engine."""
        if sampling is None:
            if self._sampling is None:
                raise ValueError(
                    "this engine was made without sampling settings: insert with "
                    "sampling=SamplingParams"
                )
            sampling = dataclasses.replace(
                self._sampling, seed=self._sampling.seed + self._inserted
            )
        max_new_tokens = min(sampling.max_new_tokens, self._engine.positions - len(prompt))
        return _Running(prompt, max_new_tokens, sampling)

    def _check_room(self, state: DecodeState, new_request: _Running) -> None:
        """Check that there are enough pages for the new request and all pending ones.

        Each request counts with all of its pages, even if some requests share pages. Raises
        NoRoomError otherwise.
        """
        pages_of_new_request = self._pages.needed(new_request.capacity_tokens)
        needed_pages = pages_of_new_request
        for request in state.pending.values():
            needed_pages += self._pages.needed(request.capacity_tokens)
        if needed_pages > self._pages.available:
            raise NoRoomError(
                f"prompt and completion need {pages_of_new_request} pages of KV cache, but only "
                f"{self._pages.available} of {self._pages.count} are available for all inserted "
                "prompts together"
            )

    def _end(self, state: DecodeState, slot: int) -> None:
        """End the request in one of JetStream's slots, if there is one.

        Its pages are released before the next call.
        """
        state.generated[slot] = 0
        request = state.running.pop(slot, None)
        state.pending.pop(slot, None)
        if request is not None and request.engine_slot >= 0:
            state.slots.remaining[request.engine_slot] = 0
            state.ended.append(request)

    def _release_ended(self, state: DecodeState) -> None:
        """Release the pages of ended requests, and put their contents into the prefix cache."""
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

        If several prompts have a common prefix, one of them is computed first, so that the others
        find the prefix in the cache.
        """
        while state.pending:
            batch = self._next_batch(state)
            for slot in batch:
                del state.pending[slot]
            requests = list(batch.values())
            self._allocate(state, requests)
            self._prefill_batch(state, requests)

    def _next_batch(self, state: DecodeState) -> dict[int, _Running]:
        """Return pending requests, by JetStream's slot, that can be computed at the same time.

        A request is left out if its next missing page will be computed by another one.
        """
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
        """Give each request of a batch a block table and a slot of the project's engine."""
        slots_in_use = {request.engine_slot for request in state.running.values()}
        free_slots = [slot for slot in range(self._engine.slots) if slot not in slots_in_use]
        copies = []
        for request in batch:
            block_table = self._pages.allocate(
                request.prompt, request.capacity_tokens, reuse=self._prefix_reuse
            )
            assert block_table is not None, "insert checked that there are enough pages"
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
        """Compute the prompts of a batch. Put them into the prefix cache if other prompts wait."""
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
        """Decode all running slots. Return (token ids, validity), [JetStream's slots, steps]."""
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
                    "the policy computed a log-probability that is not finite: check its weights"
                )
                request.is_finite = False
            tokens[slot, :steps] = new
            valid[slot, :steps] = np.logical_and.accumulate(is_finite)
            request.generated += new.tolist()
            state.generated[slot] += valid[slot].sum()
            if not request.is_finite or state.slots.remaining[engine_slot] == 0:
                # Keep the number of generated tokens until the slot is filled again.
                generated = state.generated[slot]
                self._end(state, slot)
                state.generated[slot] = generated
        self._release_ended(state)
        return tokens, valid


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """The project's tokenizer with JetStream's interface.

    Special tokens are not recognised in a text. Clients with a chat template send token ids.

    JetStream decodes tokens one by one. It joins the bytes of a character only if each byte is a
    token of its own. A character that is split over longer tokens is shown as U+FFFD. The token ids
    are always correct, and so are the texts of `server.py`.
    """

    def __init__(self, wrapped: Tokenizer | None, stop_token_ids: frozenset[int]) -> None:
        self._wrapped = wrapped
        self._stop_token_ids = stop_token_ids

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray | jax.Array, int]:
        """Return (token ids with padding, number of tokens) of a text."""
        if self._wrapped is None:
            logger.warning(
                "a request gets an empty answer: the engine has no tokenizer, so send token ids"
            )
            ids = []
        else:
            ids = self._wrapped.encode_trusted(s)
        return token_utils.pad_tokens(np.asarray(ids, np.int32), self.bos_id, self.pad_id, **kwargs)

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Return the text of the token ids."""
        if self._wrapped is None:
            return ""
        piece = b"".join(self._wrapped.token_bytes(id) for id in token_ids)
        if len(piece) == 1 and piece[0] >= 0x80:
            # JetStream waits for the rest of a character that is written like this.
            return f"<0x{piece[0]:02X}>"
        return piece.decode("utf-8", "replace")

    @property
    def stop_tokens(self) -> set[int]:
        """Token ids that end a completion."""
        return set(self._stop_token_ids)

    @property
    def pad_id(self) -> int:
        """Token id of padding."""
        return 0

    @property
    def eos_id(self) -> int:
        """One of the stop tokens, or NO_TOKEN if there is none."""
        return min(self._stop_token_ids, default=NO_TOKEN)

    @property
    def bos_id(self) -> int:
        """The mark that `prefill` removes, in place of a begin-of-sequence token."""
        return NO_TOKEN


def _check_for_orchestrator(engine: Engine, sampling: SamplingParams) -> None:
    """Check that JetStream's orchestrator can use the engine. Raises ValueError otherwise."""
    steps = engine.decode_steps
    if steps != 1:
        raise ValueError(
            f"the engine decodes {steps} steps per call, but JetStream counts single steps: set "
            "decode_steps to 1"
        )
    needed_pages = engine.slots * -(-engine.positions // engine.page_tokens)
    if engine.num_pages < needed_pages:
        raise ValueError(
            f"the engine has {engine.num_pages} pages, but its {engine.slots} slots need "
            f"{needed_pages} at full length, because JetStream never frees a slot: give the engine "
            "more memory, or fewer slots or positions"
        )
    if sampling.stop_strings or sampling.deadline_seconds is not None:
        raise ValueError(
            "JetStream's orchestrator supports neither stop strings nor deadlines: use "
            "mujica_jax.inference.jetstream.server.Server for them"
        )
