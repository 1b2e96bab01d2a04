"""One request between its submission and its completion: its state, what was generated for it, and
where that ends.

`PagedSequence` is the part that an engine with pages needs: a prompt, its pages, and how much of it
is computed.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from mujica_jax.inference.engine.base import Decoded, Engine, FlushRow, PrefillRow, SlotState
from mujica_jax.inference.paging import BlockAllocator, BlockTable
from mujica_jax.inference.requests import Completion, DeadlineError, FinishReason, SamplingParams
from mujica_jax.inference.stops import StopMatcher

Paged = TypeVar("Paged", bound="PagedSequence")
FLOAT32 = np.finfo(np.float32)


@dataclasses.dataclass(eq=False)
class PagedSequence:
    """A prompt whose keys and values are computed into pages."""

    prompt: np.ndarray  # int32
    block_table: BlockTable = dataclasses.field(init=False)  # from when it has pages
    computed: int = dataclasses.field(
        default=0, init=False
    )  # tokens of the prompt whose keys and values are in memory
    flushed: int = dataclasses.field(
        default=0, init=False
    )  # tokens of the sequence that the pages hold
    _block_names: list[int] | None = dataclasses.field(default=None, init=False)

    @property
    def prefilled(self) -> bool:
        return self.computed >= len(self.prompt) - 1

    def block_names(self, page_tokens: int) -> list[int]:
        """Return a name for every full page of the prompt, which stands for all tokens up to its
        end."""
        if self._block_names is None:
            name, self._block_names = 0, []
            for start in range(0, (len(self.prompt) - 1) // page_tokens * page_tokens, page_tokens):
                name = hash((name, self.prompt[start : start + page_tokens].tobytes()))
                self._block_names.append(name)
        return self._block_names

    def use_pages(self, block_table: BlockTable) -> None:
        """Take these pages, which hold the beginning of the prompt."""
        self.block_table = block_table
        self.computed = self.flushed = block_table.cached_tokens


@dataclasses.dataclass(eq=False)
class SequenceState(PagedSequence):
    params: SamplingParams
    continues: bool
    future: asyncio.Future  # of its Completion
    shown: asyncio.Queue | None  # whole tokens, as they become final; None where nobody watches
    token_bytes: (
        Callable[[int], bytes] | None
    )  # a token's text, which stop strings are looked for in
    tokens: list[int] = dataclasses.field(default_factory=list)
    # One a token; they stay empty where the engine gives none.
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampling_logprobs: list[float] = dataclasses.field(default_factory=list)
    finite: bool = True  # all log-probabilities are numbers; tokens drawn under others mean nothing
    _shown_tokens: int = 0
    _stop_string: str | None = None
    _surplus: bool = False  # the engine went on beyond the end

    def __post_init__(self) -> None:
        self._matcher = None
        if self.params.stop_strings:
            self._matcher = StopMatcher(
                self.params.stop_strings, thought_open=self.params.thought_open
            )

    @property
    def watched(self) -> bool:
        """Somebody waits for this request alone, not for a batch."""
        return self.shown is not None or self.params.deadline_seconds is not None

    @property
    def held_tokens(self) -> int:
        """Tokens of the sequence whose keys and values are computed: all but the last, unless the
        engine went on after it.
        """
        return len(self.prompt) + len(self.tokens) - (not self._surplus)

    def take(self, decoded: Decoded, slot: int) -> list[int]:
        """Keep what a decode call generated in the request's slot. Returns the new tokens."""
        steps = int(decoded.valid[:, slot].sum())
        new = decoded.tokens[:steps, slot].tolist()
        logprobs = decoded.logprobs[:steps, slot]
        self.finite &= bool(np.isfinite(logprobs).all())
        self.tokens += new
        self.logprobs += logprobs.tolist()
        self.sampling_logprobs += decoded.sampling_logprobs[:steps, slot].tolist()
        return new

    def ending(
        self, new: Sequence[int], stop_token_ids: Collection[int]
    ) -> tuple[int, FinishReason] | None:
        """(tokens of the completion, why it ends there) if the new tokens, the last ones taken, end
        it."""
        before = len(self.tokens) - len(new)
        for place, token in enumerate(new, start=before):
            if token in stop_token_ids or token in self.params.stop_token_ids:
                return place + 1, "stop"
            if self._matcher is not None:
                assert self.token_bytes is not None, "checked when the request came"
                self._stop_string = self._matcher.push(self.token_bytes(token))
                if self._stop_string is not None:
                    return place + 1, "stop_string"
        return None

    def show(self) -> None:
        """Pass the new tokens to the stream, if there is one."""
        if self.shown is not None and len(self.tokens) > self._shown_tokens:
            self.shown.put_nowait(tuple(self.tokens[self._shown_tokens :]))
            self._shown_tokens = len(self.tokens)

    def complete(self, length: int, reason: FinishReason, policy_version: int) -> None:
        self._surplus = length < len(self.tokens)
        del self.tokens[length:], self.logprobs[length:], self.sampling_logprobs[length:]
        self.show()
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

    def close(self) -> None:
        """Nothing more will be shown."""
        if self.shown is not None:
            self.shown.put_nowait(None)


def padded_tokens(engine: Engine, tokens: int) -> int:
    """Return how many tokens the engine computes for so many of one request."""
    return -(-tokens // engine.tile_tokens) * engine.tile_tokens


def next_prefill(
    engine: Engine, pending: Sequence[tuple[int, Paged]], budget: int
) -> tuple[list[PrefillRow], list[tuple[int, Paged]]]:
    """Return the rows of the next prefill call, of up to `budget` tokens, and those of `pending`
    that it completes.

    `pending` are slots and their sequences. A prompt of which nothing is left to compute has a row
    all the same: it brings what is in its pages to the slot.
    """
    rows, ready = [], []
    for slot, sequence in pending:
        tokens = sequence.prompt[sequence.computed : -1][:budget]
        if len(tokens) or sequence.prefilled:
            rows.append(PrefillRow(slot, sequence.block_table.pages, sequence.computed, tokens))
            sequence.computed += len(tokens)
            budget -= min(budget, padded_tokens(engine, len(tokens)))
            if sequence.prefilled:
                ready.append((slot, sequence))
    return rows, ready


def next_flush(pages: BlockAllocator, ready: Sequence[tuple[int, PagedSequence]]) -> list[FlushRow]:
    """Return what must be written to the pages of prompts that were just computed before others can
    read them."""
    rows, size = [], pages.page_tokens
    for slot, sequence in ready:
        whole = (len(sequence.prompt) - 1) // size * size
        if whole > sequence.flushed:
            rows.append(FlushRow(slot, sequence.block_table.pages, sequence.flushed, whole))
            sequence.flushed = whole
    return rows


def fill_slot(
    state: SlotState, slot: int, *, prompt: np.ndarray, params: SamplingParams, vocabulary: int
) -> None:
    """Write a request into its slot. Nothing is decoded there until `remaining` is set."""
    state.token[slot] = prompt[-1]
    state.position[slot] = len(prompt) - 1
    state.remaining[slot] = 0
    # What an array cannot hold comes as close as it can: an overflow here would fail everyone who
    # waits.
    state.temperature[slot] = params.temperature and np.clip(
        params.temperature, FLOAT32.tiny, FLOAT32.max
    )
    state.seed[slot] = params.seed % 2**32
    state.top_k[slot] = min(params.top_k, vocabulary)
    state.top_p[slot] = params.top_p
    state.min_p[slot] = params.min_p
