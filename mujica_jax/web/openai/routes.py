"""The routes of OpenAI's interface.

    GET  /v1/models             the policy and the agent
    POST /v1/chat/completions   `policy`: the next message of a chat; `agent`: the answer to a question
    POST /v1/completions        `policy` alone: text or token ids in; text, token ids and
                                log-probabilities out

With `"stream": true` an answer arrives in pieces, as server-sent events. The agent answers the last
message of the user; earlier messages are ignored, because an agent knows one question at a time. Its
answer has a field `mujica` with the searches, and each piece of its stream has one with what happens
in the episode.

If a client disconnects, its request is cancelled.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mujica_jax.errors import UserError
from mujica_jax.inference.requests import RequestError, SamplingParams
from mujica_jax.records import Message, StopReason, Trajectory, generated_tokens
from mujica_jax.web.openai.answers import (
    END_OF_STREAM,
    Head,
    Kind,
    LogprobsWriter,
    choice_of,
    finish_reason,
    server_sent,
    usage_of,
)
from mujica_jax.web.openai.errors import ApiError, api_error
from mujica_jax.web.openai.requests import (
    AnswerFields,
    SamplingFields,
    read_chat_request,
    read_completion_request,
)
from mujica_jax.web.served import (
    AGENT,
    POLICY,
    ServedAgent,
    ServedPolicy,
    event_fields,
    searches_of,
)

# The type of a stream's content.
EVENT_STREAM = "text/event-stream"
# Proxies must not collect pieces of a stream.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# Seconds since 1970 at which models were created, which OpenAI's interface asks for and nothing reads.
CREATED = 0
logger = logging.getLogger(__name__)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def router(policy: ServedPolicy | None, agent: ServedAgent | None) -> APIRouter:
    """Return the routes for these models. None: there is no such model."""
    routes = _Routes(policy, agent)
    router = APIRouter(prefix="/v1")
    router.add_api_route("/models", routes.models, methods=["GET"], response_model=None)
    router.add_api_route("/models/{id}", routes.model, methods=["GET"], response_model=None)
    for path, handler in (
        ("/chat/completions", routes.chat),
        ("/completions", routes.completions),
    ):
        router.add_api_route(path, answered(handler), methods=["POST"], response_model=None)
    return router


def answered(handler: Handler) -> Handler:
    """Return the handler with its errors answered in the form of OpenAI's interface."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return _error_answer(error)
        except RequestError as error:
            return _error_answer(api_error(error))
        except UserError as error:
            return _error_answer(ApiError(str(error)))

    return answer


class _Routes:
    """The handlers of one server."""

    def __init__(self, policy: ServedPolicy | None, agent: ServedAgent | None) -> None:
        self._policy = policy
        self._agent = agent
        models = {POLICY: policy, AGENT: agent}
        self._ids = [id for id, model in models.items() if model is not None]

    async def models(self) -> JSONResponse:
        """Answer GET /v1/models."""
        return JSONResponse({"object": "list", "data": [_model_object(id) for id in self._ids]})

    async def model(self, id: str) -> JSONResponse:
        """Answer GET /v1/models/ID."""
        if id not in self._ids:
            return _error_answer(self._unknown_model(id))
        return JSONResponse(_model_object(id))

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        chat = read_chat_request(await request.body())
        if chat.model == AGENT and self._agent is not None:
            return await _answer_of_agent(self._agent, chat.messages, chat.answer, request)
        if chat.model != POLICY or self._policy is None:
            raise self._unknown_model(chat.model)
        prompt = self._policy.prompt_of_messages(chat.messages)
        return await _answer_of_policy(
            self._policy, "chat", prompt, chat.sampling, chat.answer, request
        )

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        asked = read_completion_request(await request.body())
        if asked.model == AGENT and self._agent is not None:
            raise ApiError(
                "the model agent answers questions: send the question to /v1/chat/completions",
                param="model",
            )
        if asked.model != POLICY or self._policy is None:
            raise self._unknown_model(asked.model)
        prompt: Sequence[int]
        if isinstance(asked.prompt, str):
            prompt = self._policy.prompt_of_text(asked.prompt)
        else:
            prompt = asked.prompt
        return await _answer_of_policy(
            self._policy, "completion", prompt, asked.sampling, asked.answer, request
        )

    def _unknown_model(self, id: str) -> ApiError:
        return ApiError(
            f"unknown model {id!r}; choose from {', '.join(self._ids)}",
            status=404,
            param="model",
            code="model_not_found",
        )


async def _answer_of_policy(
    policy: ServedPolicy,
    kind: Kind,
    prompt: Sequence[int],
    sampling: SamplingFields,
    fields: AnswerFields,
    request: Request,
) -> Response:
    """Complete a prompt, and return the answer: whole, or as a stream."""
    room = policy.max_tokens - len(prompt)
    params = sampling.params(policy.defaults, room=room, seed=policy.next_seed())
    policy.check_length(prompt, params)
    head = Head.new(kind, POLICY)
    if fields.stream:
        pieces = _pieces_of_policy(policy, head, prompt, params, fields)
        return await _stream_answer(pieces)

    completion = await _unless_disconnected(request, policy.complete(prompt, params))
    choice = choice_of(kind, policy.text_of(completion), completion, fields, policy.tokenizer)
    if fields.return_token_ids:
        choice["prompt_token_ids"] = list(prompt)
    usage = usage_of(len(prompt), len(completion.token_ids))
    return JSONResponse(head.answer(choice, usage))


async def _pieces_of_policy(
    policy: ServedPolicy,
    head: Head,
    prompt: Sequence[int],
    params: SamplingParams,
    fields: AnswerFields,
) -> AsyncGenerator[str, None]:
    """Yield the pieces of a completion as server-sent events."""
    num_tokens = 0
    is_first = True
    names_tokens = fields.return_token_ids or fields.logprobs
    logprobs = LogprobsWriter(head.kind, fields, policy.tokenizer)
    pieces = policy.stream(prompt, params)
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            token_ids = () if piece.tokens is None else piece.tokens.token_ids
            num_tokens += len(token_ids)
            is_last = piece.completion is not None
            # Text that may be the beginning of a stop string is held back.
            if not piece.text and not is_last and not names_tokens:
                continue
            if head.kind == "chat":
                delta = {"role": "assistant"} if is_first else {}
                choice: dict[str, Any] = {"delta": {**delta, "content": piece.text}}
            else:
                choice = {"text": piece.text}
            choice["logprobs"] = logprobs.write(piece.tokens)
            choice["finish_reason"] = None
            if piece.completion is not None:
                choice["finish_reason"] = finish_reason(piece.completion)
            if fields.return_token_ids:
                choice["token_ids"] = list(token_ids)
            is_first = False
            yield head.piece(choice)
    if fields.include_usage:
        yield head.piece(None, usage=usage_of(len(prompt), num_tokens))
    yield END_OF_STREAM


async def _answer_of_agent(
    agent: ServedAgent, messages: Sequence[Message], fields: AnswerFields, request: Request
) -> Response:
    """Answer the last message of the user, and return the answer: whole, or as a stream."""
    question = messages[-1].content.strip()
    if messages[-1].role != "user" or not question:
        raise ApiError(
            "the last message is not a question: send it as the user's", param="messages"
        )
    head = Head.new("chat", AGENT)
    if fields.stream:
        return await _stream_answer(_pieces_of_agent(agent, head, question, fields))

    trajectory = await _unless_disconnected(request, _last_of(agent, question))
    message = {"role": "assistant", "content": trajectory.answer, "refusal": None}
    choice = {"message": message, "logprobs": None, "finish_reason": _finish(trajectory)}
    return JSONResponse(
        head.answer(choice, _usage(trajectory), mujica=_outcome(trajectory)),
    )


async def _pieces_of_agent(
    agent: ServedAgent, head: Head, question: str, fields: AnswerFields
) -> AsyncGenerator[str, None]:
    """Yield what happens in an episode, and then the answer, as server-sent events."""
    trajectory: Trajectory | None = None
    events = agent.answer(question)
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Trajectory):
                trajectory = event
                continue
            choice = {"delta": {}, "logprobs": None, "finish_reason": None}
            yield head.piece(choice, mujica=event_fields(event))
    assert trajectory is not None, "an episode ends with its trajectory, or with an error"
    delta = {"role": "assistant", "content": trajectory.answer}
    choice = {"delta": delta, "logprobs": None, "finish_reason": _finish(trajectory)}
    yield head.piece(choice, mujica=_outcome(trajectory))
    if fields.include_usage:
        yield head.piece(None, usage=_usage(trajectory))
    yield END_OF_STREAM


async def _last_of(agent: ServedAgent, question: str) -> Trajectory:
    """Play an episode to its end."""
    trajectory: Trajectory | None = None
    async for event in agent.answer(question):
        if isinstance(event, Trajectory):
            trajectory = event
    assert trajectory is not None, "an episode ends with its trajectory, or with an error"
    return trajectory


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    """Return the field `mujica` of an agent's answer."""
    return {
        "stop_reason": trajectory.stop_reason.value,
        "searches": searches_of(trajectory),
    }


def _finish(trajectory: Trajectory) -> str:
    return "stop" if trajectory.stop_reason is StopReason.ANSWERED else "length"


def _usage(trajectory: Trajectory) -> dict[str, int]:
    """Return the tokens of an episode. The prompt tokens are those that the model only read."""
    all_tokens = sum(len(conversation.token_ids) for conversation in trajectory.conversations)
    written_tokens = generated_tokens([trajectory])
    return usage_of(all_tokens - written_tokens, written_tokens)


async def _stream_answer(pieces: AsyncGenerator[str, None]) -> Response:
    """Return a stream, once its first piece is there.

    So a request that is refused is answered with its status, and not by a stream that ends in an
    error. An error after the first piece is the last piece of the stream.
    """
    first_piece = await anext(pieces)

    async def content() -> AsyncGenerator[str, None]:
        # Starlette cancels this if the client disconnects, and closing the pieces cancels the job.
        async with contextlib.aclosing(pieces):
            yield first_piece
            try:
                async for piece in pieces:
                    yield piece
            except RequestError as error:
                yield server_sent(api_error(error).body())
            # Any other error is a fault of the server. The client must not take the text for whole.
            except Exception as error:
                logger.error("a stream ended with an error", exc_info=error)
                failure = ApiError(f"the server failed ({type(error).__name__})", status=500)
                yield server_sent(failure.body())

    return StreamingResponse(content(), media_type=EVENT_STREAM, headers=STREAM_HEADERS)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of the work. If the client disconnects before, the work is cancelled.

    Raises ApiError then, which nobody reads.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client has left", status=499)
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Wait until the client has disconnected."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _model_object(id: str) -> dict[str, Any]:
    return {"id": id, "object": "model", "created": CREATED, "owned_by": "mujica_jax"}


def _error_answer(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())
