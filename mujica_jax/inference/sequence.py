"""One request between its submission and its completion: its state, what was generated for it, and where that ends."""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np

from mujica_jax.inference.engine.base import Decoded
from mujica_jax.inference.paging import BlockTable
from mujica_jax.inference.requests import Completion, DeadlineError, FinishReason, SamplingParams
from mujica_jax.inference.stops import StopMatcher


@dataclasses.dataclass(eq=False)
class SequenceState:
    prompt: np.ndarray  # int32
    params: SamplingParams
    continues: bool
    future: asyncio.Future  # of its Completion
    shown: asyncio.Queue | None  # whole tokens, as they become final; None where nobody watches
    token_bytes: Callable[[int], bytes] | None  # a token's text, which stop strings are looked for in
    block_table: BlockTable = dataclasses.field(init=False)  # from when it has a slot
    blocks: list[int] | None = None  # a name for every full page of the prompt
    computed: int = 0  # tokens of the prompt whose keys and values are in memory
    flushed: int = 0  # tokens of the sequence that the pages hold
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampling_logprobs: list[float] = dataclasses.field(default_factory=list)
    finite: bool = True  # all log-probabilities are numbers; tokens drawn under others mean nothing
    _shown_tokens: int = 0
    _stop_string: str | None = None
    _surplus: bool = False  # the engine went on beyond the end

    def __post_init__(self) -> None:
        self._matcher = None
        if self.params.stop_strings:
            self._matcher = StopMatcher(self.params.stop_strings, thought_open=self.params.thought_open)

    @property
    def watched(self) -> bool:
        """Somebody waits for this request alone, not for a batch."""
        return self.shown is not None or self.params.deadline_seconds is not None

    @property
    def prefilled(self) -> bool:
        return self.computed >= len(self.prompt) - 1

    @property
    def held_tokens(self) -> int:
        """Tokens of the sequence whose keys and values are computed: all but the last, unless the engine went on after
        it.
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

    def ending(self, new: Sequence[int], stop_token_ids: Collection[int]) -> tuple[int, FinishReason] | None:
        """(tokens of the completion, why it ends there) if the new tokens, the last ones taken, end it."""
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
                logprobs=tuple(self.logprobs),
                sampling_logprobs=tuple(self.sampling_logprobs),
                finish_reason=reason,
                policy_version=policy_version,
                stop_string=self._stop_string,
            )
        )

    def deadline_error(self) -> DeadlineError:
        return DeadlineError(
            f"the deadline of {self.params.deadline_seconds} s passed after {len(self.tokens)} of up to "
            f"{self.params.max_new_tokens} tokens: allow more time or send less at once"
        )

    def close(self) -> None:
        """Nothing more will be shown."""
        if self.shown is not None:
            self.shown.put_nowait(None)
