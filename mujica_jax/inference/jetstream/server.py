"""A generator behind JetStream's gRPC protocol (`Orchestrator`: Decode, HealthCheck), for
JetStream's clients.

What is different from JetStream's own server: the queue is bounded, and a request that finds it
full gets RESOURCE_EXHAUSTED at once; a client that goes away, or whose deadline passes, frees its
slot; a bad request is told INVALID_ARGUMENT instead of ending the process; texts are whole wherever
token borders fall. As there, the stop token is not part of an answer.

Two threads, each with an event loop: one for the wire, and one for the generator, whose calls to
the device block their loop. At most `generator.capacity` requests are known to the server, from the
moment they arrive until the generator has let go of them.

`session_cache` is refused: what was computed for the beginning of a prompt is found again without a
name. `priority` is not read.
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

STATUS = {  # of an error's class, the narrower ones first
    OverloadError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    PolicyError: grpc.StatusCode.INTERNAL,
    EngineError: grpc.StatusCode.INTERNAL,
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    asyncio.CancelledError: grpc.StatusCode.UNAVAILABLE,
}
NO_SHARED_PORT = (
    "grpc.so_reuseport",
    0,
)  # two servers on one port would each get some of the requests

messages: Any = (
    jetstream_pb2  # protobuf makes its classes at import: a type checker does not see them
)
logger = logging.getLogger(__name__)


class Server:
    """One generator on one port. `start` and `stop` may be called from any thread; between them the
    generator is the server's.
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
        """Requests are sampled as `sampling` says: the protocol names the number of new tokens
        alone, and without it a request gets the most that `sampling` allows. Each request has the
        next seed. Without a tokenizer prompts are token ids. Port 0: any.
        """
        self._host, self._port, self._credentials = host, port, credentials
        self._device, self._wire = _LoopThread("generator"), _LoopThread("grpc")
        self._orchestrator = _Orchestrator(generator, sampling, tokenizer, self._device)
        self._server: grpc.aio.Server | None = None

    def start(self) -> int:
        """Returns the port."""
        self._device.start()
        self._wire.start()
        try:
            return self._wire.result_of(self._open())
        except UserError:
            self.stop(grace_seconds=0.0)
            raise

    def stop(self, *, grace_seconds: float = 5.0) -> None:
        """No request is taken any more; those under way have this long to end."""
        self._orchestrator.live = False
        if self._server is not None:
            self._wire.result_of(self._server.stop(grace_seconds))
            self._server = None
        self._device.stop()
        self._wire.stop()

    @property
    def statistics(self) -> GeneratorStatistics:
        """The generator's, with what was refused before it came there."""
        return self._orchestrator.statistics

    async def _open(self) -> int:
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
    """Lives in the wire's loop; `_relay` alone runs in the device's."""

    def __init__(
        self,
        generator: PolicyGenerator,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        device: "_LoopThread",
    ) -> None:
        self._generator, self._sampling, self._tokenizer, self._device = (
            generator,
            sampling,
            tokenizer,
            device,
        )
        self._stops = generator.stop_token_ids | set(sampling.stop_token_ids)
        self._numbers = itertools.count()
        self._under_way = 0
        self._refused = 0
        self.live = False

    @property
    def statistics(self) -> GeneratorStatistics:
        counted = self._generator.statistics
        return dataclasses.replace(counted, refused=counted.refused + self._refused)

    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return messages.HealthCheckResponse(is_live=self.live and self._device.is_alive())

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            prompt, params = self._read(request, context.time_remaining())
            self._admit()
        except RequestError as error:
            self._refused += 1
            ended = error
        else:
            ended = await self._answer(
                prompt, params, request.WhichOneof("content") == "text_content", context
            )
        if ended is not None:
            await context.abort(*_status(ended))

    def _read(
        self, request: Any, seconds_left: float | None
    ) -> tuple[Sequence[int], SamplingParams]:
        """Raises RequestError for what the protocol allows and this server does not; the rest is
        the generator's to check.
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
        most, limits = (
            self._sampling.max_new_tokens,
            (self._sampling.deadline_seconds, seconds_left),
        )
        params = dataclasses.replace(
            self._sampling,
            max_new_tokens=request.max_tokens if request.max_tokens else most,
            seed=self._sampling.seed + next(self._numbers),
            deadline_seconds=min((limit for limit in limits if limit is not None), default=None),
        )
        if params.deadline_seconds is not None and params.deadline_seconds <= 0:
            raise DeadlineError("the deadline passed before the request was read: allow more time")
        return prompt, params

    def _admit(self) -> None:
        if not self.live:
            raise OverloadError("the server is stopping: ask another one")
        if self._under_way >= self._generator.capacity:
            raise OverloadError(
                f"{self._under_way} requests run and wait already, and there is room for "
                f"{self._generator.capacity}: come back later"
            )

    async def _answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        as_text: bool,
        context: grpc.aio.ServicerContext,
    ) -> BaseException | None:
        """Send tokens as they come, and a character when its last byte does; returns why there are
        no more, None if the answer is complete.
        """
        arrived: asyncio.Queue[Sequence[int] | BaseException | None] = asyncio.Queue()
        wire = asyncio.get_running_loop()

        def ended(
            error: BaseException | None,
        ) -> None:  # however it ends: only now is there room for another request
            self._under_way -= 1
            arrived.put_nowait(error)

        self._under_way += 1
        relay = self._relay(
            prompt, params, functools.partial(wire.call_soon_threadsafe, arrived.put_nowait)
        )
        cancel = self._device.begin(relay, functools.partial(wire.call_soon_threadsafe, ended))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        bytes_of = (
            self._tokenizer.token_bytes
            if as_text and self._tokenizer is not None
            else lambda id: b""
        )
        try:
            while isinstance(news := await arrived.get(), Sequence):
                if shown := [token for token in news if token not in self._stops]:
                    await context.write(
                        _response(shown, decoder.decode(b"".join(map(bytes_of, shown))))
                    )
            if rest := decoder.decode(b"", final=True):
                await context.write(_response((), rest))
            return news
        finally:
            cancel()  # for a client that went away; otherwise nothing is left to cancel

    async def _relay(
        self, prompt: Sequence[int], params: SamplingParams, show: Callable[[Sequence[int]], Any]
    ) -> None:
        async for tokens in self._generator.stream(prompt, params):
            show(tokens)


class _LoopThread(threading.Thread):
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        super().__init__(target=self._loop.run_forever, name=name, daemon=True)

    def result_of(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Its result, to another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def begin(
        self, work: Coroutine[Any, Any, None], ended: Callable[[BaseException | None], Any]
    ) -> Callable[[], Any]:
        """Run it here, and say how it ended, even if it was cancelled before it began. Returns what
        cancels it, from any thread.
        """
        tasks: list[asyncio.Task] = []

        def report(task: asyncio.Task) -> None:
            ended(asyncio.CancelledError() if task.cancelled() else task.exception())

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(report)

        self._loop.call_soon_threadsafe(start)
        return lambda: self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

    def stop(self) -> None:
        """What still runs is cancelled."""
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
    for kind, status in STATUS.items():
        if isinstance(error, kind):
            return status, str(
                error
            ) or "the server stopped before the answer was complete: ask again"
    logger.error("a request was lost to a fault of the engine", exc_info=error)
    return (
        grpc.StatusCode.INTERNAL,
        f"the engine failed ({type(error).__name__}): ask again, and see the server's log",
    )
