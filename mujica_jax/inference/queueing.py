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

EVENT_LOOP_TURNS = (
    6  # a finished worker wakes its episode through a gather: what it asks next joins the next call
)


class QueuedGenerator(abc.ABC):
    """Requests that wait and requests that run. Use from one event loop at a time."""

    def __init__(
        self,
        *,
        slots: int,
        positions: int,
        vocabulary: int,
        queue_size: int,
        token_bytes: Callable[[int], bytes] | None,
        policy_version: int,
    ) -> None:
        """`slots` requests of up to `positions` tokens run at a time.

        `queue_size` bounds how many may wait before a stream is refused; `generate` waits in any
        case. `token_bytes` gives a token's text, which stop strings are looked for in.
        """
        self._slots, self._positions, self._vocabulary = slots, positions, vocabulary
        self._queue_size = queue_size
        self._token_bytes = token_bytes
        self.policy_version = policy_version
        self._waiting: list[tuple[int, int, SequenceState]] = []
        self._running: dict[int, SequenceState] = {}
        self._submitted = 0
        self._driver: asyncio.Task | None = None
        counted = ("requests", "prompt_tokens", "prefilled_tokens", "generated_tokens", "refused")
        self._counts = dict.fromkeys(counted, 0)
        self._seconds = 0.0

    @abc.abstractmethod
    def reset_cache(self) -> None:
        """Drop what was computed of earlier prompts, while nothing runs."""

    @abc.abstractmethod
    def _turn(self) -> None:
        """Fill free slots from the queue, compute, and hand out what was generated."""

    @abc.abstractmethod
    def _free_given_up(self) -> None:
        """Free the slots of requests that were cancelled or have expired, and their places in the
        queue."""

    @property
    def capacity(self) -> int:
        """Requests that can run and wait at a time before a stream is refused."""
        return self._slots + self._queue_size

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        return await self._submit(self._request(prompt, params, continues, shown=None))

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncIterator[Sequence[int]]:
        """Tokens as they are decoded, at least one at a time. Raises OverloadError where the queue
        is full."""
        sequence = self._request(prompt, params, continues, shown=asyncio.Queue())
        self._drop_given_up()
        waiting = len(
            self._waiting
        )  # slots may be free all the same: memory is short, or a call is due
        if len(self._running) + waiting >= self.capacity:
            self._counts["refused"] += 1
            raise OverloadError(
                f"{len(self._running)} requests run and {waiting} wait already, and there is room "
                f"for {self.capacity}: come back later"
            )
        future = self._submit(sequence)
        assert sequence.shown is not None, "made above"
        try:
            while (tokens := await sequence.shown.get()) is not None:
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
        shown: asyncio.Queue | None,
    ) -> SequenceState:
        try:
            self._check(prompt, params)
        except RequestError:
            self._counts["refused"] += 1
            raise
        future = asyncio.get_running_loop().create_future()
        return SequenceState(
            np.asarray(prompt, np.int32), params, continues, future, shown, self._token_bytes
        )

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError for a request that cannot be served."""
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
        """Enqueue; the deadline runs from now."""
        if sequence.params.deadline_seconds is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(sequence.params.deadline_seconds, self._expire, sequence)
            sequence.future.add_done_callback(lambda _: timer.cancel())
        sequence.future.add_done_callback(lambda _: sequence.close())
        self._submitted += 1
        heapq.heappush(self._waiting, (0 if sequence.continues else 1, self._submitted, sequence))
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
        try:
            while self._waiting or self._running:
                self._turn()
                for _ in range(EVENT_LOOP_TURNS):
                    await asyncio.sleep(0)
        except Exception as error:
            # A fault of the engine concerns everyone who waits: they get it instead of waiting for
            # ever.
            for future in self._abandon():
                future.set_exception(error)
            self.reset_cache()  # last: an engine that has failed may fail here again
        except asyncio.CancelledError:
            # The event loop ends; another one may begin. What is in memory stays, unless requests
            # were under way.
            if self._waiting or self._running:
                for future in self._abandon():
                    future.cancel()
                self.reset_cache()
            raise

    def _abandon(self) -> list[asyncio.Future]:
        """Give up every sequence. Returns the futures that still wait; the cache must be reset."""
        futures = [sequence.future for _, _, sequence in self._waiting]
        futures += [sequence.future for sequence in self._running.values()]
        self._waiting.clear()
        self._running.clear()
        return [future for future in futures if not future.done()]

    def _drop_given_up(self) -> None:
        if any(sequence.future.done() for _, _, sequence in self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[2].future.done()]
            heapq.heapify(self._waiting)

    def _count_started(self, sequence: SequenceState) -> None:
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(sequence.prompt)
