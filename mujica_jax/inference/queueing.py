"""The request queue of a generator: submission, streams, deadlines, cancellation and faults.

`QueuedGenerator` is the common base class of `scheduler.BatchedGenerator` and
`jetstream.generator.JetStreamGenerator`. The base class keeps the queue and calls `_turn` until no
request is left. A subclass implements `_turn`: it moves requests from the queue into slots, runs
the engine, and completes requests.

Everything runs in the thread of the event loop, in the order of submission. So the same program
with the same seeds gives the same completions. Only deadlines depend on the clock.
"""

import abc
import asyncio
import dataclasses
import heapq
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from mujica_jax.inference.requests import (
    Completion,
    RequestError,
    SamplingParams,
    StreamedTokens,
    check_params,
    check_prompt,
)
from mujica_jax.inference.sequence import SequenceState

# How often the generator yields to the event loop between two of its turns. A finished request
# wakes its agent through several nested tasks, each of which needs one pass of the event loop. With
# this number of passes the agent's next request arrives in time for the next engine call.
EVENT_LOOP_TURNS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits of a generator: the size of a request, and the number of running requests."""

    # Largest number of requests that run at the same time.
    slots: int
    # Largest number of tokens of one request, prompt and completion together.
    positions: int
    # Size of the vocabulary. Token ids must be below this number.
    vocabulary: int


class QueuedGenerator(abc.ABC):
    """A generator with a queue of waiting requests and a table of running requests.

    Use it from one event loop at a time.
    """

    def __init__(
        self,
        limits: RequestLimits,
        *,
        token_bytes: Callable[[int], bytes] | None,
        policy_version: int,
    ) -> None:
        """Make an empty queue.

        `token_bytes` returns the bytes of a token's text. Without it, requests cannot have stop
        strings. `policy_version` is written into the completions.
        """
        self._slots = limits.slots
        self._positions = limits.positions
        self._vocabulary = limits.vocabulary
        self._token_bytes = token_bytes
        self.policy_version = policy_version
        # A heap of (priority, submission number, request). Lower values come first.
        self._waiting: list[tuple[int, int, SequenceState]] = []
        # The running requests by slot.
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
        """Empty the prefix cache. Call it only while no request runs."""

    @abc.abstractmethod
    def _turn(self) -> None:
        """Fill free slots from the queue, run the engine, and hand out the generated tokens."""

    @abc.abstractmethod
    def _free_given_up(self) -> None:
        """Free the slots of requests that were cancelled or whose deadline passed.

        Also remove such requests from the queue.
        """

    @property
    def slots(self) -> int:
        """The number of requests that can run at the same time. Further requests wait."""
        return self._slots

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        """Complete one prompt. See `requests.Generator`."""
        return await self._submit(self._request(prompt, params, continues, stream=None))

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncGenerator[StreamedTokens | Completion, None]:
        """Complete one prompt token by token. See `requests.StreamingGenerator`."""
        stream = asyncio.Queue()
        future = self._submit(self._request(prompt, params, continues, stream=stream))
        try:
            while True:
                tokens = await stream.get()
                if tokens is None:
                    break
                yield tokens
            yield await future
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
        """Make the state of a new request. Raises RequestError if it cannot be served."""
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
                "stop strings need a tokenizer, but this generator has none: send stop_token_ids"
            )
        if len(prompt) + params.max_new_tokens > self._positions:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones do not fit the "
                f"engine's {self._positions} positions: shorten the prompt or raise "
                "agent.max_trajectory_tokens (--max-tokens of serve)"
            )

    def _submit(self, sequence: SequenceState) -> asyncio.Future:
        """Put a request into the queue and start its deadline timer. Return its future."""
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
        """End a request whose deadline has passed. The next turn frees its slot."""
        if not sequence.future.done():
            self._fail(sequence, sequence.deadline_error())

    def _fail(self, sequence: SequenceState, error: RequestError) -> None:
        """End a request with an error, and count it as refused."""
        self._counts["refused"] += 1
        sequence.future.set_exception(error)

    async def _drive(self) -> None:
        """Run turns until no request waits or runs."""
        try:
            while self._waiting or self._running:
                self._turn()
                for _ in range(EVENT_LOOP_TURNS):
                    await asyncio.sleep(0)
        except Exception as error:
            # The engine failed. Fail all requests, so that none waits forever. Reset the cache
            # last, because a broken engine may raise again here.
            for future in self._abandon():
                future.set_exception(error)
            self.reset_cache()
        except asyncio.CancelledError:
            # The event loop is shutting down, and the generator may be used from another loop
            # later. Keep the prefix cache, unless requests were interrupted.
            if self._waiting or self._running:
                for future in self._abandon():
                    future.cancel()
                self.reset_cache()
            raise

    def _abandon(self) -> list[asyncio.Future]:
        """Remove all requests and return their unfinished futures.

        The caller must reset the cache afterwards.
        """
        futures = [sequence.future for _, _, sequence in self._waiting]
        futures += [sequence.future for sequence in self._running.values()]
        self._waiting.clear()
        self._running.clear()
        return [future for future in futures if not future.done()]

    def _drop_given_up(self) -> None:
        """Remove requests that were cancelled or whose deadline passed from the queue."""
        if any(sequence.future.done() for _, _, sequence in self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[2].future.done()]
            heapq.heapify(self._waiting)

    def _count_started(self, sequence: SequenceState) -> None:
        """Count a request that was given a slot."""
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(sequence.prompt)
