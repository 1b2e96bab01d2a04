"""Serve a generator through JetStream's gRPC protocol, for JetStream's clients.

The service is `Orchestrator`, with `Decode` and `HealthCheck`. Differences from JetStream's own
server:

- The queue is bounded. A request that finds it full gets RESOURCE_EXHAUSTED at once.
- A client that disconnects, or whose deadline passes, frees its slot.
- A bad request gets INVALID_ARGUMENT. It does not end the process.
- Texts hold whole characters, wherever token borders fall.

As there, the stop token is not part of an answer.

There are two threads, each with an event loop: one for the connections, and one for the generator,
whose calls to the device block their loop. At most `generator.capacity` requests are in the server,
from the moment they arrive until the generator has ended them.

`session_cache` is refused: the cached beginning of a prompt is found again without a name.
`priority` is not read.
"""

import asyncio
import codecs
import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from mujica_jax.errors import UserError
from mujica_jax.inference.generator import GeneratorStatistics, PolicyGenerator
from mujica_jax.inference.requests import (
    DeadlineError,
    EngineError,
    OverloadError,
    PolicyError,
    RequestError,
    SamplingParams,
)
from mujica_jax.models.tokenizer import Tokenizer

# The status of an error's class. Subclasses stand before their base class.
STATUS = {
    OverloadError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    PolicyError: grpc.StatusCode.INTERNAL,
    EngineError: grpc.StatusCode.INTERNAL,
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    asyncio.CancelledError: grpc.StatusCode.UNAVAILABLE,
}
# Two servers on one port would each get a part of the requests.
NO_SHARED_PORT = ("grpc.so_reuseport", 0)

# Protobuf makes its classes at import, where a type checker does not see them.
messages: Any = jetstream_pb2
logger = logging.getLogger(__name__)


class Server:
    """One generator on one port.

    `start` and `stop` may be called from any thread. Between them only the server may use the
    generator.
    """

    def __init__(
        self,
        generator: PolicyGenerator,
        sampling: SamplingParams,
        *,
        tokenizer: Tokenizer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Make a server that samples all requests as `sampling` says.

        The protocol has a field for the number of new tokens alone. Without it a request gets the
        limit of `sampling`. Each request has the next seed. Without a tokenizer prompts are token
        ids. Port 0 is any free one.
        """
        self._host = host
        self._port = port
        self._credentials = credentials
        self._device = _LoopThread("generator")
        self._wire = _LoopThread("grpc")
        self._orchestrator = _Orchestrator(generator, sampling, tokenizer, self._device)
        self._server: grpc.aio.Server | None = None

    def start(self) -> int:
        """Start to answer requests. Returns the port."""
        self._device.start()
        self._wire.start()
        try:
            return self._wire.result_of(self._open())
        except UserError:
            self.stop(grace_seconds=0.0)
            raise

    def stop(self, *, grace_seconds: float = 5.0) -> None:
        """Take no more requests, and give those under way this long to end."""
        self._orchestrator.live = False
        if self._server is not None:
            self._wire.result_of(self._server.stop(grace_seconds))
            self._server = None
        self._device.stop()
        self._wire.stop()

    @property
    def statistics(self) -> GeneratorStatistics:
        """The generator's statistics, and what was refused before it reached the generator."""
        return self._orchestrator.statistics

    async def _open(self) -> int:
        """Open the port, and return it. Raises UserError."""
        self._server = grpc.aio.server(options=[NO_SHARED_PORT])
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(self._orchestrator, self._server)
        address = f"{self._host}:{self._port}"
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise UserError(f"{address} cannot be opened: choose another port") from error
        await self._server.start()
        self._orchestrator.live = True
        return port


class _Orchestrator(jetstream_pb2_grpc.OrchestratorServicer):
    """JetStream's service. It runs in the wire's loop, and `_relay` alone in the device's."""

    def __init__(
        self,
        generator: PolicyGenerator,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        device: "_LoopThread",
    ) -> None:
        self._generator = generator
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._device = device
        self._stop_token_ids = generator.stop_token_ids | set(sampling.stop_token_ids)
        self._request_numbers = itertools.count()
        self._requests_under_way = 0
        self._refused = 0
        self.live = False

    @property
    def statistics(self) -> GeneratorStatistics:
        statistics = self._generator.statistics
        return dataclasses.replace(statistics, refused=statistics.refused + self._refused)

    async def health_check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return messages.HealthCheckResponse(is_live=self.live and self._device.is_alive())

    async def decode(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            prompt, params = self._read(request, context.time_remaining())
            self._admit()
        except RequestError as error:
            self._refused += 1
            failure = error
        else:
            as_text = request.WhichOneof("content") == "text_content"
            failure = await self._answer(prompt, params, as_text, context)
        if failure is not None:
            await context.abort(*_status(failure))

    # gRPC calls the methods by the names that JetStream's protocol has for them.
    HealthCheck = health_check
    Decode = decode

    def _read(
        self, request: Any, seconds_left: float | None
    ) -> tuple[Sequence[int], SamplingParams]:
        """Return the prompt and the sampling parameters of a request.

        Raises RequestError for what the protocol allows and this server does not. The generator
        checks the rest.
        """
        if request.session_cache:
            raise RequestError(
                f"session_cache is {request.session_cache!r}: leave it out and send the whole "
                "conversation, whose beginning is cached"
            )
        if request.WhichOneof("content") != "text_content":
            prompt = list(request.token_content.token_ids)
        elif self._tokenizer is not None:
            prompt = self._tokenizer.encode_trusted(request.text_content.text)
        else:
            raise RequestError(
                "this server has no tokenizer: send token_content in the place of text_content"
            )
        deadlines = [
            seconds
            for seconds in (self._sampling.deadline_seconds, seconds_left)
            if seconds is not None
        ]
        params = dataclasses.replace(
            self._sampling,
            max_new_tokens=request.max_tokens or self._sampling.max_new_tokens,
            seed=self._sampling.seed + next(self._request_numbers),
            deadline_seconds=min(deadlines, default=None),
        )
        if params.deadline_seconds is not None and params.deadline_seconds <= 0:
            raise DeadlineError("the deadline passed before the request was read: allow more time")
        return prompt, params

    def _admit(self) -> None:
        """Check that there is room for one more request. Raises OverloadError."""
        if not self.live:
            raise OverloadError("the server is stopping: ask another one")
        if self._requests_under_way >= self._generator.capacity:
            raise OverloadError(
                f"{self._requests_under_way} requests run and wait already, and there is room for "
                f"{self._generator.capacity}: come back later"
            )

    async def _answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        as_text: bool,
        context: grpc.aio.ServicerContext,
    ) -> BaseException | None:
        """Send tokens as they come. A character of a text is sent when its last byte has come.

        Returns None when the answer is complete, otherwise the error that ended it.
        """
        # The queue gets tokens from the generator's thread, and at the end an error or None.
        queue: asyncio.Queue[Sequence[int] | BaseException | None] = asyncio.Queue()
        wire_loop = asyncio.get_running_loop()
        send = functools.partial(wire_loop.call_soon_threadsafe, queue.put_nowait)

        # Only when the generator has ended a request is there room for another one.
        def on_end(error: BaseException | None) -> None:
            self._requests_under_way -= 1
            queue.put_nowait(error)

        self._requests_under_way += 1
        cancel = self._device.begin(
            self._relay(prompt, params, send),
            on_end=functools.partial(wire_loop.call_soon_threadsafe, on_end),
        )
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            while True:
                item = await queue.get()
                if not isinstance(item, Sequence):
                    failure = item
                    break
                tokens = [token for token in item if token not in self._stop_token_ids]
                if tokens:
                    text = decoder.decode(self._bytes(tokens) if as_text else b"")
                    await context.write(_response(tokens, text))
            last_text = decoder.decode(b"", final=True)
            if last_text:
                await context.write(_response((), last_text))
            return failure
        finally:
            # For a client that went away. Otherwise nothing is left to cancel.
            cancel()

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens, which may end inside of a character."""
        if self._tokenizer is None:
            return b""
        return b"".join(self._tokenizer.token_bytes(token) for token in tokens)

    async def _relay(
        self, prompt: Sequence[int], params: SamplingParams, send: Callable[[Sequence[int]], Any]
    ) -> None:
        """Send the tokens of one request as the generator gives them."""
        async for tokens in self._generator.stream(prompt, params):
            send(tokens)


class _LoopThread(threading.Thread):
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        super().__init__(target=self._loop.run_forever, name=name, daemon=True)

    def result_of(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine here, and return its result to another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def begin(
        self, work: Coroutine[Any, Any, None], *, on_end: Callable[[BaseException | None], Any]
    ) -> Callable[[], Any]:
        """Run a coroutine here, and call `on_end` with its error or None.

        `on_end` is called also if the coroutine is cancelled before it has begun. Returns a
        function that cancels it, from any thread.
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

        self._loop.call_soon_threadsafe(start)
        return functools.partial(self._loop.call_soon_threadsafe, cancel)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        if not self.is_alive():
            return
        self.result_of(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _response(token_ids: Sequence[int], text: str) -> Any:
    sample = messages.DecodeResponse.StreamContent.Sample(text=text, token_ids=token_ids)
    return messages.DecodeResponse(
        stream_content=messages.DecodeResponse.StreamContent(samples=[sample])
    )


def _status(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return the status of an error, and its sentence for the client."""
    for error_class, status in STATUS.items():
        if isinstance(error, error_class):
            sentence = str(error) or "the server stopped before the answer was complete: ask again"
            return status, sentence
    logger.error("a request was lost to a fault of the engine", exc_info=error)
    sentence = f"the engine failed ({type(error).__name__}): ask again, and see the server's log"
    return grpc.StatusCode.INTERNAL, sentence
