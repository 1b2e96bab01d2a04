"""The routes of the page that asks an agent.

GET  /api/ask            what can be asked: agents, sources, example questions
POST /api/ask            {"question": "...", "agent": "mujica", "source": "task"}: what happens in
                         the episode, as server-sent events; the last one has the trajectory's id
GET  /api/ask/ID         one of the last trajectories, in the form of `trajectories.py`
"""

import collections
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mujica_jax.errors import UserError
from mujica_jax.inference.requests import RequestError
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Trajectory
from mujica_jax.web.openai.answers import server_sent
from mujica_jax.web.openai.errors import api_error
from mujica_jax.web.openai.routes import EVENT_STREAM, STREAM_HEADERS
from mujica_jax.web.run_library import UnknownNameError
from mujica_jax.web.served import ServedModels, event_fields
from mujica_jax.web.trajectory_detail import detail

# Trajectories that the server keeps in memory, the last ones. Nothing is written to disk.
MAX_KEPT_TRAJECTORIES = 100
MAX_QUESTION_CHARACTERS = 4000
logger = logging.getLogger(__name__)


def router(served: ServedModels) -> APIRouter:
    """Return the routes. Without an agent, the page says that nothing can be asked."""
    agent = served.agent
    asked = _AskedTrajectories(served.tokenizer)
    routes = APIRouter(prefix="/api/ask")

    @routes.get("")
    def choices() -> dict[str, Any]:
        if agent is None:
            return {"model": None, "agents": [], "sources": [], "examples": []}
        return {
            "model": served.name,
            "agents": list(agent.answerers),
            "sources": list(agent.sources),
            "examples": list(served.examples),
        }

    @routes.post("")
    async def ask(request: Request) -> Response:
        if agent is None:
            raise UnknownNameError("this server has no agent: start it with --config CONFIG")
        question, agent_name, source = _read(await request.body())
        agent.check(agent_name, source)
        events = agent.answer(question, agent=agent_name, source=source)
        try:
            first_event = await anext(events)
        except RequestError as error:
            answer = api_error(error)
            return JSONResponse({"error": str(error)}, answer.status, answer.headers())
        content = _stream(asked, question, first_event, events)
        return StreamingResponse(content, media_type=EVENT_STREAM, headers=STREAM_HEADERS)

    @routes.get("/{id}")
    def trajectory(id: int) -> dict[str, Any]:
        return asked.detail(id)

    return routes


class _AskedTrajectories:
    """The last trajectories of the page, by their ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._numbers = itertools.count(1)
        self._trajectories: collections.OrderedDict[int, tuple[str, Trajectory]] = (
            collections.OrderedDict()
        )

    def add(self, question: str, trajectory: Trajectory) -> int:
        """Keep a trajectory, and return its id. The oldest one is dropped if there are too many."""
        id = next(self._numbers)
        self._trajectories[id] = (question, trajectory)
        while len(self._trajectories) > MAX_KEPT_TRAJECTORIES:
            self._trajectories.popitem(last=False)
        return id

    def detail(self, id: int) -> dict[str, Any]:
        """Return a trajectory as a JSON object. Raises UnknownNameError."""
        if id not in self._trajectories:
            raise UnknownNameError(
                f"there is no trajectory {id}: the server keeps the last {MAX_KEPT_TRAJECTORIES}, "
                "until it ends"
            )
        question, trajectory = self._trajectories[id]
        backend = None if self._tokenizer is None else self._tokenizer.backend
        return {
            "run": None,
            "set": "asked",
            "set_title": "questions on this page",
            "shard": 0,
            "row": id,
            "kept": None,
            "threshold": None,
            "damaged": [],
            **detail(trajectory, None, backend),
            "question": question,
        }


async def _stream(
    asked: _AskedTrajectories,
    question: str,
    first_event: Any,
    events: AsyncGenerator[Any, None],
) -> AsyncGenerator[str, None]:
    """Yield what happens in an episode as server-sent events."""
    # Starlette cancels this if the client disconnects, and closing the events ends the episode.
    async with contextlib.aclosing(events):
        try:
            yield _event(asked, question, first_event)
            async for event in events:
                yield _event(asked, question, event)
        except UserError as error:
            yield server_sent({"event": "error", "error": str(error)})
        # Any other error is a fault of the server. The page must not wait for an answer.
        except Exception as error:
            logger.error("an episode ended with an error", exc_info=error)
            sentence = f"the server failed ({type(error).__name__}): see its log, and ask again"
            yield server_sent({"event": "error", "error": sentence})


def _event(asked: _AskedTrajectories, question: str, event: Any) -> str:
    """Return one server-sent event. A trajectory is kept, and its id is sent."""
    if isinstance(event, Trajectory):
        return server_sent({"event": "trajectory", "id": asked.add(question, event)})
    return server_sent(event_fields(event))


def _read(body: bytes) -> tuple[str, str | None, str | None]:
    """Return the question, the agent and the source of a request. Raises UserError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request is not JSON ({error}): send a JSON object") from error
    if not isinstance(fields, dict):
        raise UserError(f"the request is a JSON {type(fields).__name__}: send a JSON object")
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"question is {question!r}: write a question")
    if len(question) > MAX_QUESTION_CHARACTERS:
        raise UserError(
            f"the question has {len(question):,} characters: write at most "
            f"{MAX_QUESTION_CHARACTERS:,}"
        )
    names = []
    for name in ("agent", "source"):
        value = fields.get(name)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{name} is {value!r}: give one of the names of /api/ask")
        names.append(value or None)
    return question, names[0], names[1]
