"""A gRPC server with JetStream's protocol, for JetStream's clients.

The service is called `Orchestrator` and has the methods `Decode` and `HealthCheck`. It differs from
JetStream's own server in these points:

- The queue is bounded. If it is full, a request gets RESOURCE_EXHAUSTED at once.
- If a client disconnects or its deadline passes, its slot is freed.
- An invalid request gets INVALID_ARGUMENT. It does not end the process.
- Each piece of text holds complete characters, even if a character is split over several tokens.
- The field `session_cache` is rejected, because the prefix cache needs no names. The field
  `priority` is ignored.

As in JetStream's server, the stop token is not part of the answer.

The connections have a thread of their own, and so has the generator (`inference/background.py`). At
most `BackgroundGenerator.capacity` requests are in the server at the same time.
"""

import codecs
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from mujica_jax.errors import UserError
from mujica_jax.inference.background import BackgroundGenerator, LoopThread
from mujica_jax.inference.generator import GeneratorStatistics
from mujica_jax.inference.requests import (
    Completion,
    DeadlineError,
    EngineError,
    OverloadError,
    PolicyError,
    RequestError,
    SamplingParams,
    StoppedError,
)
from mujica_jax.models.tokenizer import Tokenizer

# The gRPC status for each class of errors. The first match counts, so subclasses come before their
# base class.
STATUS = {
    OverloadError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoppedError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    PolicyError: grpc.StatusCode.INTERNAL,
    EngineError: grpc.StatusCode.INTERNAL,
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
}
# By default gRPC lets two servers open the same port, and each gets a part of the requests. This
# option forbids it.
NO_SHARED_PORT = ("grpc.so_reuseport", 0)

# Protobuf creates its classes at import time, so type checkers cannot see them.
messages: Any = jetstream_pb2
logger = logging.getLogger(__name__)


class Server:
    """A server that answers requests on one port with one generator, which has to be started.

    `start` and `stop` may be called from any thread. Other servers may use the same generator.
    """

    def __init__(
        self,
        background: BackgroundGenerator,
        sampling: SamplingParams,
        *,
        tokenizer: Tokenizer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Make a server. It does not listen before `start`.

        `sampling` holds the sampling settings of all requests, because JetStream's protocol has no
        fields for them. Its only such field is the number of new tokens, and the default is the
        limit of `sampling`. Request i uses the seed `sampling.seed` + i, from 0. Without
        `tokenizer`, prompts must be token ids. Port 0 means any free port. `credentials` turn on
        TLS.
        """
        self._host = host
        self._port = port
        self._credentials = credentials
        self._wire = LoopThread("grpc")
        self._orchestrator = _Orchestrator(background, sampling, tokenizer)
        self._server: grpc.aio.Server | None = None

    def start(self) -> int:
        """Open the port and start to answer requests. Return the port.

        Raises UserError if the port cannot be opened.
        """
        self._wire.start()
        try:
            return self._wire.result_of(self._open())
        except UserError:
            self.stop(grace_seconds=0.0)
            raise

    def stop(self, *, grace_seconds: float = 5.0) -> None:
        """Stop the server. Running requests have `grace_seconds` to end, then they are cancelled."""
        self._orchestrator.live = False
        if self._server is not None:
            self._wire.result_of(self._server.stop(grace_seconds))
            self._server = None
        self._wire.stop()

    @property
    def statistics(self) -> GeneratorStatistics:
        """The generator's statistics. `refused` includes requests that this server rejected."""
        return self._orchestrator.statistics

    async def _open(self) -> int:
        """Open the port and return its number. Raises UserError if it cannot be opened."""
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
    """The implementation of JetStream's service.

    All methods run in the event loop of the connections.
    """

    def __init__(
        self,
        background: BackgroundGenerator,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._background = background
        self._sampling = sampling
        self._tokenizer = tokenizer
        generator = background.generator
        self._stop_token_ids = generator.stop_token_ids | set(sampling.stop_token_ids)
        self._request_numbers = itertools.count()
        # Requests that were refused before the generator saw them, because they were invalid.
        self._refused = 0
        self.live = False

    @property
    def statistics(self) -> GeneratorStatistics:
        """The generator's statistics. `refused` includes requests that this server rejected."""
        statistics = self._background.statistics
        return dataclasses.replace(statistics, refused=statistics.refused + self._refused)

    async def health_check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Answer whether the server takes requests."""
        return messages.HealthCheckResponse(is_live=self.live and self._background.is_live)

    async def decode(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Answer one request with a stream of tokens, or with an error status."""
        try:
            prompt, params = self._read(request, context.time_remaining())
        except RequestError as error:
            self._refused += 1
            await context.abort(*_status(error))
            return
        try:
            as_text = request.WhichOneof("content") == "text_content"
            await self._answer(prompt, params, as_text, context)
        # A request may end with any error of the engine; `_status` logs those that it does not know.
        except Exception as error:
            await context.abort(*_status(error))

    # gRPC looks up the methods by their names in JetStream's protocol.
    HealthCheck = health_check
    Decode = decode

    def _read(
        self, request: Any, seconds_left: float | None
    ) -> tuple[Sequence[int], SamplingParams]:
        """Return the prompt (token ids) and the sampling parameters of a request.

        `seconds_left` is the client's deadline in seconds from now, or None. Raises RequestError if
        the request uses a feature of the protocol that this server does not support. The generator
        checks everything else.
        """
        if request.session_cache:
            raise RequestError(
                f"session_cache is {request.session_cache!r}, but this server does not support it: "
                "leave it empty and send the whole conversation (its prefix is cached)"
            )
        if request.WhichOneof("content") != "text_content":
            prompt = list(request.token_content.token_ids)
        elif self._tokenizer is not None:
            prompt = self._tokenizer.encode_trusted(request.text_content.text)
        else:
            raise RequestError(
                "this server has no tokenizer: send token_content instead of text_content"
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

    async def _answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        as_text: bool,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Run one request and send its tokens to the client as they are generated.

        With `as_text` the tokens are also sent as text. A character is sent when all of its bytes
        have arrived. Raises the error that ended the request.
        """
        if not self.live:
            raise OverloadError("the server is stopping: send the request to another server")
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = self._background.stream(prompt, params)
        # Closing the stream cancels the request if the client has disconnected.
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                # The completion at the end has no further tokens.
                if isinstance(piece, Completion):
                    continue
                tokens = [token for token in piece.token_ids if token not in self._stop_token_ids]
                if tokens:
                    text = decoder.decode(self._bytes(tokens) if as_text else b"")
                    await context.write(_response(tokens, text))
        last_text = decoder.decode(b"", final=True)
        if last_text:
            await context.write(_response((), last_text))

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of the tokens' text. They may end in the middle of a character."""
        if self._tokenizer is None:
            return b""
        return b"".join(self._tokenizer.token_bytes(token) for token in tokens)


def _response(token_ids: Sequence[int], text: str) -> Any:
    """Return one message of an answer, with these tokens and this text."""
    sample = messages.DecodeResponse.StreamContent.Sample(text=text, token_ids=token_ids)
    return messages.DecodeResponse(
        stream_content=messages.DecodeResponse.StreamContent(samples=[sample])
    )


def _status(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC status of an error, and the message for the client."""
    for error_class, status in STATUS.items():
        if isinstance(error, error_class):
            return status, str(error)
    logger.error("a request failed because of an error in the engine", exc_info=error)
    sentence = f"the engine failed ({type(error).__name__}): send the request again, or see the server's log"
    return grpc.StatusCode.INTERNAL, sentence
