"""Run a generator in a thread of its own, for servers.

Calls to the device block the event loop of a generator. A server that answers connections in the
same loop would be silent during each of them. `BackgroundGenerator` has a second event loop, in
another thread, for the generator and for everything that uses it, such as the episode of an agent.
A server's own loop only waits for results.

The number of jobs under way is bounded. A job counts from its start until the generator's thread has
ended it. If there are too many, a new one is refused at once (`OverloadError`).
"""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from mujica_jax.inference.generator import GeneratorStatistics, PolicyGenerator
from mujica_jax.inference.requests import (
    Completion,
    OverloadError,
    SamplingParams,
    StoppedError,
    StreamedTokens,
)

# A job gets a function that it calls with each result, from the generator's thread.
Job = Callable[[Callable[[Any], None]], Coroutine[Any, Any, None]]


class BackgroundGenerator:
    """A generator in its own thread, with a bounded number of jobs under way.

    `start` and `stop` may be called from any thread, `follow`, `stream` and `generate` from any
    event loop. Between `start` and `stop`, nothing else may use the generator.
    """

    def __init__(self, generator: Any, *, capacity: int) -> None:
        """Run at most `capacity` jobs at the same time.

        `generator` is a `PolicyGenerator`, or for jobs of `follow` alone any `requests.Generator`.
        """
        self.generator = generator
        self.capacity = capacity
        # Jobs that were refused because too many were under way, or because the thread has ended.
        self.refused = 0
        self._thread = LoopThread("generator")
        self._under_way = 0
        self._lock = threading.Lock()
        self._accepts = False

    @classmethod
    def of(cls, generator: PolicyGenerator, *, queue_size: int) -> "BackgroundGenerator":
        """Return a background generator with a job for each slot, and `queue_size` that wait."""
        return cls(generator, capacity=generator.slots + queue_size)

    def start(self) -> None:
        """Start the thread, and accept jobs."""
        self._thread.start()
        self._accepts = True

    def refuse_new(self) -> None:
        """Refuse new jobs from now on. Jobs under way go on."""
        self._accepts = False

    def stop(self) -> None:
        """Cancel all jobs, and end the thread."""
        self._accepts = False
        self._thread.stop()

    @property
    def is_live(self) -> bool:
        """Whether new jobs are accepted."""
        return self._accepts and self._thread.is_alive()

    @property
    def under_way(self) -> int:
        """The number of jobs that were started and have not ended."""
        return self._under_way

    @property
    def statistics(self) -> GeneratorStatistics:
        """The generator's statistics. `refused` includes jobs that were refused here."""
        statistics = self.generator.statistics
        return dataclasses.replace(statistics, refused=statistics.refused + self.refused)

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """Complete one prompt. Raises RequestError, and OverloadError if too many jobs run.

        If the caller is cancelled, the request is cancelled too.
        """

        async def job(send: Callable[[Completion], None]) -> None:
            send(await self.generator.generate(prompt, params))

        (completion,) = [result async for result in self.follow(job)]
        return completion

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[StreamedTokens | Completion, None]:
        """Complete one prompt, and yield its tokens as they are generated, and last the completion.

        Raises RequestError, and OverloadError if too many jobs run.
        """

        async def job(send: Callable[[StreamedTokens | Completion], None]) -> None:
            async for item in self.generator.stream(prompt, params):
                send(item)

        async for item in self.follow(job):
            yield item

    async def follow(self, job: Job) -> AsyncGenerator[Any, None]:
        """Run a job in the generator's thread, and yield what it sends. Raise its error.

        Raises OverloadError if too many jobs are under way. If the caller stops iterating (its
        client has left), the job is cancelled.
        """
        self._admit()
        loop = asyncio.get_running_loop()
        # The generator's thread puts results into the queue, and then one _End.
        queue: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: Any) -> None:
            # The loop may have been closed since, by a server that has ended.
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        # A job counts until the generator's thread has ended it. Only then is there room for
        # another one.
        def on_end(error: BaseException | None) -> None:
            with self._lock:
                self._under_way -= 1
            put(_End(error))

        cancel = self._thread.begin(job(put), on_end=on_end)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, _End):
                    break
                yield item
            if isinstance(item.error, asyncio.CancelledError):
                raise StoppedError(
                    "the server stopped before the answer was complete: send the request again"
                )
            if item.error is not None:
                raise item.error
        finally:
            # Cancel the job if the caller has left. Otherwise this has no effect.
            cancel()

    def _admit(self) -> None:
        """Count one more job. Raises OverloadError if there is no room for it."""
        with self._lock:
            if not self._accepts:
                self.refused += 1
                raise OverloadError("the server is stopping: send the request to another server")
            if self._under_way >= self.capacity:
                self.refused += 1
                raise OverloadError(
                    f"the server is full: {self._under_way} requests run or wait, and the limit is "
                    f"{self.capacity}; try again later"
                )
            self._under_way += 1


class _End:
    """The end of a job, with its error if it failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class LoopThread(threading.Thread):
    """A thread that runs an event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        super().__init__(target=self._loop.run_forever, name=name, daemon=True)

    def result_of(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this thread's loop, and wait for its result. Call from other threads."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def begin(
        self, work: Coroutine[Any, Any, None], *, on_end: Callable[[BaseException | None], Any]
    ) -> Callable[[], Any]:
        """Start a coroutine in this thread's loop. Return a function that cancels it.

        When the coroutine ends, `on_end` is called with its error, or with None. This also happens
        if the coroutine is cancelled before it starts. The returned function may be called from any
        thread.
        """
        tasks: list[asyncio.Task] = []

        def report(task: asyncio.Task) -> None:
            on_end(asyncio.CancelledError() if task.cancelled() else task.exception())

        def start() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(report)
            tasks.append(task)

        def cancel() -> None:
            tasks[0].cancel()

        def cancel_from_outside() -> None:
            # After `stop` no task is left to cancel.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(cancel)

        self._loop.call_soon_threadsafe(start)
        return cancel_from_outside

    def stop(self) -> None:
        """Cancel all running coroutines, and end the thread."""
        if not self.is_alive():
            return
        self.result_of(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        """Cancel all other tasks of this loop, and wait for them to end."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
