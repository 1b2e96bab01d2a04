"""The queue in front of an engine: submission, streams, deadlines, cancellation and faults.

`QueuedGenerator` is what `scheduler.BatchedGenerator` and `jetstream.generator.JetStreamGenerator`
have in common. A subclass moves requests from the queue into slots and computes, one turn at a
time.

Everything runs in the event loop's own thread and in submission order, so a run is a function of
its requests: the same program with the same seeds gives the same completions. Deadlines alone
depend on the clock.
"""

import abc
import asyncio
import dataclasses
import heapq
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from mujica_jax.inference.requests import (
    Completion,
    OverloadError,
    RequestError,
    SamplingParams,
    check_params,
    check_prompt,
)
from mujica_jax.inference.sequence import SequenceState

# Between two turns of the generator the event loop makes this many. A finished worker wakes its
# episode through a gather, so that its next request joins the next call.
EVENT_LOOP_TURNS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The requests that a generator takes, and how many of them at a time."""

    slots: int  # requests that run at a time
    positions: int  # tokens of one request, prompt and completion
    vocabulary: int  # token ids are below this number
    # Requests that may wait before a stream is refused; `generate` waits in any case.
    queue_size: int


class QueuedGenerator(abc.ABC):
    """The requests that wait and those that run. Use it from one event loop at a time."""

    def __init__(
        self,
        limits: RequestLimits,
        *,
        token_bytes: Callable[[int], bytes] | None,
        policy_version: int,
    ) -> None:
        """Make an empty queue.

        `token_bytes` returns a token's text, in which stop strings are looked for.
        """
        self._slots = limits.slots
        self._positions = limits.positions
        self._vocabulary = limits.vocabulary
        self._queue_size = limits.queue_size
        self._token_bytes = token_bytes
        self.policy_version = policy_version
        # A heap of (priority, number of submission, request).
        self._waiting: list[tuple[int, int, SequenceState]] = []
        self._running: dict[int, SequenceState] = {}
        self._submitted = 0
        self._driver: asyncio.Task | None = None
        self._counts = {
            "requests": 0,
            "prompt_tokens": 0,
            "prefilled_tokens": 0,
            "generated_tokens": 0,
            "refused": 0,
        }
        self._seconds = 0.0

    @abc.abstractmethod
    def reset_cache(self) -> None:
        """Drop what was computed of earlier prompts, while nothing runs."""

    @abc.abstractmethod
    def _turn(self) -> None:
        """Fill free slots from the queue, compute, and hand out what was generated."""

    @abc.abstractmethod
    def _free_given_up(self) -> None:
        """Free the slots of requests that were cancelled or have expired.

        Their places in the queue are freed too.
        """

    @property
    def capacity(self) -> int:
        """Requests that can run and wait at a time before a stream is refused."""
        return self._slots + self._queue_size

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        """Complete one prompt. See `requests.Generator`."""
        return await self._submit(self._request(prompt, params, continues, stream=None))

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncIterator[Sequence[int]]:
        """Yield tokens as they are decoded, at least one at a time.

        Raises OverloadError if the queue is full.
        """
        stream = asyncio.Queue()
        sequence = self._request(prompt, params, continues, stream=stream)

        # Requests may wait although slots are free, because memory is short or a call is due.
        self._drop_given_up()
        running = len(self._running)
        waiting = len(self._waiting)
        if running + waiting >= self.capacity:
            self._counts["refused"] += 1
            raise OverloadError(
                f"{running} requests run and {waiting} wait already, and there is room for "
                f"{self.capacity}: come back later"
            )

        future = self._submit(sequence)
        try:
            while True:
                tokens = await stream.get()
                if tokens is None:
                    break
                yield tokens
            await future
        finally:
            future.cancel()

    def _request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        continues: bool,
        *,
        stream: asyncio.Queue | None,
    ) -> SequenceState:
        """Return a new request. Raises RequestError if it cannot be served."""
        try:
            self._check(prompt, params)
        except RequestError:
            self._counts["refused"] += 1
            raise
        future = asyncio.get_running_loop().create_future()
        return SequenceState(
            prompt=np.asarray(prompt, np.int32),
            params=params,
            continues=continues,
            future=future,
            stream=stream,
            token_bytes=self._token_bytes,
        )

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Check that a request can be served. Raises RequestError."""
        check_params(params)
        check_prompt(prompt, self._vocabulary)
        if params.stop_strings and self._token_bytes is None:
            raise RequestError(
                "stop strings need a tokenizer and this generator has none: send stop_token_ids"
            )
        if len(prompt) + params.max_new_tokens > self._positions:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones do not fit the "
                f"engine's {self._positions} positions: shorten the prompt or raise "
                "agent.max_trajectory_tokens (of serve: --max-tokens)"
            )

    def _submit(self, sequence: SequenceState) -> asyncio.Future:
        """Put a request into the queue. Its deadline counts from now."""
        if sequence.params.deadline_seconds is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(sequence.params.deadline_seconds, self._expire, sequence)
            sequence.future.add_done_callback(lambda _: timer.cancel())
        sequence.future.add_done_callback(lambda _: sequence.close_stream())
        self._submitted += 1
        priority = 0 if sequence.continues else 1
        heapq.heappush(self._waiting, (priority, self._submitted, sequence))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return sequence.future

    def _expire(self, sequence: SequenceState) -> None:
        if not sequence.future.done():
            self._fail(sequence, sequence.deadline_error())

    def _fail(self, sequence: SequenceState, error: RequestError) -> None:
        self._counts["refused"] += 1
        sequence.future.set_exception(error)

    async def _drive(self) -> None:
        """Take turns until no request waits or runs."""
        try:
            while self._waiting or self._running:
                self._turn()
                for _ in range(EVENT_LOOP_TURNS):
                    await asyncio.sleep(0)
        except Exception as error:
            # A fault of the engine ends all requests, so that none waits for ever. The cache is
            # reset last, because an engine that has failed may fail here again.
            for future in self._abandon():
                future.set_exception(error)
            self.reset_cache()
        except asyncio.CancelledError:
            # The event loop ends, and another one may begin. The cache stays, unless requests were
            # under way.
            if self._waiting or self._running:
                for future in self._abandon():
                    future.cancel()
                self.reset_cache()
            raise

    def _abandon(self) -> list[asyncio.Future]:
        """Give up every request. Returns the futures that are not done. The cache must be reset."""
        futures = [sequence.future for _, _, sequence in self._waiting]
        futures += [sequence.future for sequence in self._running.values()]
        self._waiting.clear()
        self._running.clear()
        return [future for future in futures if not future.done()]

    def _drop_given_up(self) -> None:
        """Take requests that were cancelled or have expired out of the queue."""
        if any(sequence.future.done() for _, _, sequence in self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[2].future.done()]
            heapq.heapify(self._waiting)

    def _count_started(self, sequence: SequenceState) -> None:
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(sequence.prompt)
