"""The state of a request from submission to completion.

`PagedSequence` is the part that belongs to the KV cache: the prompt, its block table, and how much
of the prompt is computed. `SequenceState` adds the sampling parameters, the generated tokens and
the search for the end of the completion. The functions below turn sequences into the rows of engine
calls.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from mujica_jax.inference.engine.base import Decoded, Engine, FlushRow, PrefillRow, SlotState
from mujica_jax.inference.paging import BlockAllocator, BlockTable
from mujica_jax.inference.requests import (
    Completion,
    DeadlineError,
    FinishReason,
    SamplingParams,
    StopMatcher,
    StreamedTokens,
)

Paged = TypeVar("Paged", bound="PagedSequence")
FLOAT32 = np.finfo(np.float32)


@dataclasses.dataclass(eq=False)
class PagedSequence:
    """A prompt, its block table, and its progress through prefill."""

    # Token ids of the prompt, [tokens], int32.
    prompt: np.ndarray
    # The pages of the sequence. Set by `use_pages` when the request is admitted.
    block_table: BlockTable = dataclasses.field(init=False)
    # How many prompt tokens have their keys and values in the KV cache.
    prefilled_tokens: int = dataclasses.field(default=0, init=False)
    # How many tokens of the sequence have their keys and values in the pages of the block table.
    flushed_tokens: int = dataclasses.field(default=0, init=False)
    _block_hashes: list[int] | None = dataclasses.field(default=None, init=False)

    @property
    def is_prefilled(self) -> bool:
        """Whether all prompt tokens except the last are computed. Decode computes the last one."""
        return self.prefilled_tokens >= len(self.prompt) - 1

    def block_hashes(self, page_tokens: int) -> list[int]:
        """Return one hash for each full page of the prompt.

        Each hash covers all tokens from the start of the prompt to the end of the page. So equal
        hashes mean equal prefixes.
        """
        if self._block_hashes is None:
            self._block_hashes = []
            block_hash = 0
            full_pages_tokens = (len(self.prompt) - 1) // page_tokens * page_tokens
            for start in range(0, full_pages_tokens, page_tokens):
                block = self.prompt[start : start + page_tokens]
                block_hash = hash((block_hash, block.tobytes()))
                self._block_hashes.append(block_hash)
        return self._block_hashes

    def use_pages(self, block_table: BlockTable) -> None:
        """Set the block table. Its pages already hold the first `cached_tokens` prompt tokens."""
        self.block_table = block_table
        self.prefilled_tokens = block_table.cached_tokens
        self.flushed_tokens = block_table.cached_tokens


@dataclasses.dataclass(eq=False)
class SequenceState(PagedSequence):
    """One request with its sampling parameters and the tokens that were generated for it."""

    params: SamplingParams
    # Whether a later request of the same conversation will begin with this prompt.
    continues: bool
    # Resolves to the Completion, or raises a RequestError.
    future: asyncio.Future
    # Receives StreamedTokens, and None at the end. None if the request is not streamed.
    stream: asyncio.Queue | None
    # Returns the bytes of a token's text, for the search for stop strings.
    token_bytes: Callable[[int], bytes] | None
    # The generated token ids.
    tokens: list[int] = dataclasses.field(default_factory=list)
    # Log-probability of each generated token under the policy itself. Empty if the engine returns
    # none.
    logprobs: list[float] = dataclasses.field(default_factory=list)
    # Log-probability of each generated token under the distribution that it was drawn from.
    sampling_logprobs: list[float] = dataclasses.field(default_factory=list)
    # Whether all log-probabilities are finite. If not, the sampled tokens are meaningless.
    is_finite: bool = True
    # How many tokens were put into the stream.
    _streamed_tokens: int = 0
    # The stop string that ended the completion.
    _stop_string: str | None = None
    # Whether the engine decoded tokens after the end of the completion.
    _has_surplus: bool = False

    def __post_init__(self) -> None:
        self._matcher = None
        if self.params.stop_strings:
            self._matcher = StopMatcher(
                self.params.stop_strings, thought_open=self.params.thought_open
            )

    @property
    def is_watched(self) -> bool:
        """Whether the request is streamed or has a deadline, so its own latency matters."""
        return self.stream is not None or self.params.deadline_seconds is not None

    @property
    def tokens_in_memory(self) -> int:
        """The number of tokens whose keys and values are in the KV cache.

        The last generated token is not in the cache, unless the engine decoded more tokens after
        it.
        """
        tokens = len(self.prompt) + len(self.tokens)
        return tokens if self._has_surplus else tokens - 1

    def take(self, decoded: Decoded, slot: int) -> list[int]:
        """Append the tokens that a decode call generated in slot `slot`. Return the new tokens."""
        steps = int(decoded.valid[:, slot].sum())
        new = decoded.tokens[:steps, slot].tolist()
        logprobs = decoded.logprobs[:steps, slot]
        self.is_finite &= bool(np.isfinite(logprobs).all())
        self.tokens += new
        self.logprobs += logprobs.tolist()
        self.sampling_logprobs += decoded.sampling_logprobs[:steps, slot].tolist()
        return new

    def ending(
        self, new: Sequence[int], stop_token_ids: Collection[int]
    ) -> tuple[int, FinishReason] | None:
        """Find the first stop token or stop string in the newest tokens.

        `new` holds the token ids that the last call of `take` returned. Returns (number of tokens
        of the completion, finish reason), or None if the completion goes on.
        """
        tokens_before = len(self.tokens) - len(new)
        for length, token in enumerate(new, start=tokens_before + 1):
            if token in stop_token_ids or token in self.params.stop_token_ids:
                return length, "stop"
            if self._matcher is not None:
                assert self.token_bytes is not None, "checked when the request was submitted"
                self._stop_string = self._matcher.push(self.token_bytes(token))
                if self._stop_string is not None:
                    return length, "stop_string"
        return None

    def send_to_stream(self) -> None:
        """Put the tokens that were not sent yet into the stream, if the request is streamed."""
        start = self._streamed_tokens
        if self.stream is None or len(self.tokens) == start:
            return
        self.stream.put_nowait(
            StreamedTokens(
                token_ids=tuple(self.tokens[start:]),
                logprobs=tuple(self.logprobs[start:]) if self.logprobs else None,
            )
        )
        self._streamed_tokens = len(self.tokens)

    def complete(self, length: int, reason: FinishReason, policy_version: int) -> None:
        """Cut the completion to `length` tokens, and resolve the future with it."""
        self._has_surplus = length < len(self.tokens)
        del self.tokens[length:]
        del self.logprobs[length:]
        del self.sampling_logprobs[length:]
        self.send_to_stream()
        self.future.set_result(
            Completion(
                token_ids=tuple(self.tokens),
                logprobs=tuple(self.logprobs) if self.logprobs else None,
                sampling_logprobs=tuple(self.sampling_logprobs) if self.sampling_logprobs else None,
                finish_reason=reason,
                policy_version=policy_version,
                stop_string=self._stop_string,
            )
        )

    def deadline_error(self) -> DeadlineError:
        """Return the error for a request whose deadline has passed."""
        return DeadlineError(
            f"the deadline of {self.params.deadline_seconds} s passed after {len(self.tokens)} of "
            f"up to {self.params.max_new_tokens} tokens: raise the deadline or send fewer requests "
            "at the same time"
        )

    def close_stream(self) -> None:
        """End the stream with None, if the request is streamed."""
        if self.stream is not None:
            self.stream.put_nowait(None)


def padded_tokens(engine: Engine, tokens: int) -> int:
    """Round a number of tokens of one request up to whole tiles of the engine's prefill call."""
    return -(-tokens // engine.tile_tokens) * engine.tile_tokens


def next_prefill(
    engine: Engine, pending: Sequence[tuple[int, Paged]], budget: int
) -> tuple[list[PrefillRow], list[tuple[int, Paged]]]:
    """Choose the tokens of the next prefill call, up to `budget` tokens (padding included).

    `pending` holds (slot, sequence) for the prompts that are not fully computed. The chosen tokens
    are counted as prefilled. Returns (rows, ready): the rows of the call, and the items of `pending`
    whose prompts the call completes. A prompt that is fully cached gets a row without tokens, so
    that the engine learns its block table.
    """
    rows = []
    ready = []
    for slot, sequence in pending:
        start = sequence.prefilled_tokens
        tokens = sequence.prompt[start:-1][:budget]
        if len(tokens) == 0 and not sequence.is_prefilled:
            continue
        rows.append(PrefillRow(slot, sequence.block_table.pages, start, tokens))
        sequence.prefilled_tokens += len(tokens)
        budget -= min(budget, padded_tokens(engine, len(tokens)))
        if sequence.is_prefilled:
            ready.append((slot, sequence))
    return rows, ready


def next_flush(pages: BlockAllocator, ready: Sequence[tuple[int, PagedSequence]]) -> list[FlushRow]:
    """Return the rows that write prompts to their pages, so that other requests can read them.

    `ready` holds (slot, sequence) for prompts that were just computed. Only full pages are written,
    and they are counted as flushed.
    """
    rows = []
    for slot, sequence in ready:
        start = sequence.flushed_tokens
        stop = (len(sequence.prompt) - 1) // pages.page_tokens * pages.page_tokens
        if stop > start:
            rows.append(FlushRow(slot, sequence.block_table.pages, start, stop))
            sequence.flushed_tokens = stop
    return rows


def fill_slot(
    state: SlotState, slot: int, *, prompt: np.ndarray, params: SamplingParams, vocabulary: int
) -> None:
    """Write a request into a slot of `state`. Decoding starts when the caller sets `remaining`."""
    state.token[slot] = prompt[-1]
    state.position[slot] = len(prompt) - 1
    state.remaining[slot] = 0
    # Clip each value to the range of its array, because an overflow would fail all requests.
    temperature = params.temperature
    if temperature != 0:
        temperature = np.clip(temperature, FLOAT32.tiny, FLOAT32.max)
    state.temperature[slot] = temperature
    state.seed[slot] = params.seed % 2**32
    state.top_k[slot] = min(params.top_k, vocabulary)
    state.top_p[slot] = params.top_p
    state.min_p[slot] = params.min_p
