"""The state of a request between its submission and its completion.

It holds the prompt and what was generated, and finds where the completion ends. `PagedSequence` is
the part that an engine with pages needs: a prompt, its block table, and how much of the prompt is
computed.
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
)

Paged = TypeVar("Paged", bound="PagedSequence")
FLOAT32 = np.finfo(np.float32)


@dataclasses.dataclass(eq=False)
class PagedSequence:
    """A prompt whose keys and values are computed into pages."""

    prompt: np.ndarray  # int32
    block_table: BlockTable = dataclasses.field(init=False)  # set when the request gets pages
    # Tokens of the prompt whose keys and values are in memory.
    prefilled_tokens: int = dataclasses.field(default=0, init=False)
    # Tokens of the sequence that the pages hold.
    flushed_tokens: int = dataclasses.field(default=0, init=False)
    _block_hashes: list[int] | None = dataclasses.field(default=None, init=False)

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens of the prompt but the last are computed."""
        return self.prefilled_tokens >= len(self.prompt) - 1

    def block_hashes(self, page_tokens: int) -> list[int]:
        """Return a hash for every full page of the prompt.

        The hash covers all tokens up to the page's end.
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
        """Take the pages of this block table, which hold the beginning of the prompt."""
        self.block_table = block_table
        self.prefilled_tokens = block_table.cached_tokens
        self.flushed_tokens = block_table.cached_tokens


@dataclasses.dataclass(eq=False)
class SequenceState(PagedSequence):
    """A request, and what was generated for it."""

    params: SamplingParams
    continues: bool  # the conversation will come back with this prompt as its beginning
    future: asyncio.Future  # of its Completion
    stream: asyncio.Queue | None  # gets tokens as they become final; None: it is not streamed
    # Returns a token's text, in which stop strings are looked for.
    token_bytes: Callable[[int], bytes] | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    # One for each token. They stay empty if the engine gives none.
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampling_logprobs: list[float] = dataclasses.field(default_factory=list)
    # Whether all log-probabilities are finite. Tokens drawn under others mean nothing.
    is_finite: bool = True
    _streamed_tokens: int = 0
    _stop_string: str | None = None
    _has_surplus: bool = False  # the engine decoded tokens beyond the end

    def __post_init__(self) -> None:
        self._matcher = None
        if self.params.stop_strings:
            self._matcher = StopMatcher(
                self.params.stop_strings, thought_open=self.params.thought_open
            )

    @property
    def is_watched(self) -> bool:
        """Whether this request is waited for by itself, and not as part of a batch."""
        return self.stream is not None or self.params.deadline_seconds is not None

    @property
    def tokens_in_memory(self) -> int:
        """How many tokens of the sequence have their keys and values computed.

        These are all but the last, or all if the engine decoded more after it.
        """
        tokens = len(self.prompt) + len(self.tokens)
        return tokens if self._has_surplus else tokens - 1

    def take(self, decoded: Decoded, slot: int) -> list[int]:
        """Append what a decode call generated in the request's slot. Returns the new tokens."""
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
        """Return where the new tokens end the completion, and why; None if they do not.

        The result is (tokens of the completion, reason). `new` are the last tokens that were taken.
        """
        tokens_before = len(self.tokens) - len(new)
        for length, token in enumerate(new, start=tokens_before + 1):
            if token in stop_token_ids or token in self.params.stop_token_ids:
                return length, "stop"
            if self._matcher is not None:
                assert self.token_bytes is not None, "checked when the request came"
                self._stop_string = self._matcher.push(self.token_bytes(token))
                if self._stop_string is not None:
                    return length, "stop_string"
        return None

    def send_to_stream(self) -> None:
        """Put the new tokens into the stream, if there is one."""
        if self.stream is not None and len(self.tokens) > self._streamed_tokens:
            self.stream.put_nowait(tuple(self.tokens[self._streamed_tokens :]))
            self._streamed_tokens = len(self.tokens)

    def complete(self, length: int, reason: FinishReason, policy_version: int) -> None:
        """Cut the completion to `length` tokens and give it to whoever waits for it."""
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
        return DeadlineError(
            f"the deadline of {self.params.deadline_seconds} s passed after {len(self.tokens)} of "
            f"up to {self.params.max_new_tokens} tokens: allow more time or send less at once"
        )

    def close_stream(self) -> None:
        """End the stream, if there is one."""
        if self.stream is not None:
            self.stream.put_nowait(None)


def padded_tokens(engine: Engine, tokens: int) -> int:
    """Return how many tokens the engine computes for this many tokens of one request."""
    return -(-tokens // engine.tile_tokens) * engine.tile_tokens


def next_prefill(
    engine: Engine, pending: Sequence[tuple[int, Paged]], budget: int
) -> tuple[list[PrefillRow], list[tuple[int, Paged]]]:
    """Return the rows of the next prefill call, and the items of `pending` that it completes.

    `pending` are slots and their sequences. The call computes up to `budget` tokens. A prompt that
    is all cached has a row too, without tokens: it brings its pages to the slot.
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
    """Return the rows to flush of prompts that were just computed, so that others can read them.

    Only full pages are flushed.
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
    """Write a request into its slot. Nothing is decoded there until `remaining` is set."""
    state.token[slot] = prompt[-1]
    state.position[slot] = len(prompt) - 1
    state.remaining[slot] = 0
    # Values beyond the range of an array are clipped: an overflow here would fail all requests.
    temperature = params.temperature
    if temperature != 0:
        temperature = np.clip(temperature, FLOAT32.tiny, FLOAT32.max)
    state.temperature[slot] = temperature
    state.seed[slot] = params.seed % 2**32
    state.top_k[slot] = min(params.top_k, vocabulary)
    state.top_p[slot] = params.top_p
    state.min_p[slot] = params.min_p
