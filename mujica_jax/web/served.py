"""The models of a server: the policy itself, and the agent that it plays.

A client of the policy sends a prompt or messages and gets what the model writes next. A client of
the agent sends a question and gets an answer. Both use one generator, in a thread of its own
(`inference/background.py`).
"""

import codecs
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

from mujica_jax.errors import UserError, nearest
from mujica_jax.inference.background import BackgroundGenerator
from mujica_jax.inference.requests import (
    Completion,
    RequestError,
    SamplingParams,
    StreamedTokens,
    before_stop,
)
from mujica_jax.learning.conversations import conversation_of
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Message, Trajectory
from mujica_jax.runs.asking import Answerer
from mujica_jax.runs.episode_events import Event
from mujica_jax.tasks.asked import AskedQuestion, asked_question
from mujica_jax.tasks.task import Task

# The ids of the two models.
POLICY = "policy"
AGENT = "agent"


class ServedPolicy:
    """The policy behind /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        background: BackgroundGenerator,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        defaults: SamplingParams,
    ) -> None:
        """Serve the generator of `background`.

        `max_tokens` is the largest number of tokens in a prompt and its answer. `defaults` are the
        sampling settings for requests without their own; request i has the seed `defaults.seed` + i.
        """
        self.background = background
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.defaults = defaults
        self._stop_token_ids = background.generator.stop_token_ids
        self._numbers = itertools.count()

    def next_seed(self) -> int:
        """Return the seed of the next request."""
        return self.defaults.seed + next(self._numbers)

    def prompt_of_text(self, text: str) -> list[int]:
        """Return the tokens of a prompt. No part of the text becomes a special token."""
        return self.tokenizer.encode_trusted(text)

    def prompt_of_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, up to the generation prompt.

        The first and the last message are not the assistant's. Raises RequestError if the chat
        template cannot write the messages.
        """
        roles = [message.role for message in messages]
        try:
            if "assistant" not in roles:
                return self.tokenizer.open_messages(messages)
            end_of_turns = len(roles) - roles[::-1].index("assistant")
            conversation = conversation_of(self.tokenizer, messages[:end_of_turns])
            rest = self.tokenizer.continue_messages(messages[end_of_turns:], stopped=True)
            return [*conversation.token_ids, *rest]
        except UserError as error:
            raise RequestError(str(error)) from error

    def check_length(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Check that a prompt and its answer fit. Raises RequestError."""
        if len(prompt) + params.max_new_tokens > self.max_tokens:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_new_tokens}, but "
                f"this server holds {self.max_tokens} together: shorten the prompt, or lower "
                "max_tokens"
            )

    async def complete(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """Complete a prompt. Raises RequestError."""
        return await self.background.generate(prompt, params)

    def text_of(self, completion: Completion) -> str:
        """Return the text of a completion, without its stop token and its stop string."""
        tokens = completion.token_ids
        if completion.finish_reason == "stop":
            tokens = tokens[:-1]
        text = b"".join(self.tokenizer.token_bytes(token) for token in tokens).decode(
            errors="replace"
        )
        if completion.stop_string is None:
            return text
        return before_stop(text, completion.stop_string)

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator["Piece", None]:
        """Complete a prompt, and yield its text piece by piece. Raises RequestError.

        Text that may be the beginning of a stop string is held back until that is known.
        """
        text = HeldBackText(params.stop_strings)
        stop_ids = self._stop_token_ids | frozenset(params.stop_token_ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        items = self.background.stream(prompt, params)
        # Closing the stream cancels the request if the client has disconnected.
        async with contextlib.aclosing(items):
            async for item in items:
                if isinstance(item, Completion):
                    rest = text.end(decoder.decode(b"", final=True))
                    yield Piece(text=rest, completion=item)
                    continue
                shown = [token for token in item.token_ids if token not in stop_ids]
                data = b"".join(self.tokenizer.token_bytes(token) for token in shown)
                yield Piece(text=text.push(decoder.decode(data)), tokens=item)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an answer that is streamed.

    Attributes:
        text: The text that can be shown now.
        tokens: The tokens that were decoded. None in the last piece.
        completion: The whole completion, in the last piece alone.
    """

    text: str
    tokens: StreamedTokens | None = None
    completion: Completion | None = None


class HeldBackText:
    """Text that arrives in pieces, without what follows the first stop string.

    As long as the end of the text may be the beginning of a stop string, that end is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._text = ""
        self._shown = 0
        self._stopped = False

    def push(self, piece: str) -> str:
        """Add a piece, and return the text that can be shown now."""
        self._text += piece
        visible = self._visible()
        return self._show(len(visible) - self._possible_stop(visible))

    def end(self, piece: str) -> str:
        """Add the last piece, and return the rest of the text."""
        self._text += piece
        return self._show(len(self._visible()))

    def _visible(self) -> str:
        """Return the text before the first stop string that is not inside of a thought."""
        shortest = self._text
        for stop in self._stops:
            before = before_stop(self._text, stop)
            if len(before) < len(shortest):
                shortest = before
        self._stopped = len(shortest) < len(self._text)
        return shortest

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        if self._stopped:
            return 0
        longest = max((len(stop) for stop in self._stops), default=1)
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def _show(self, end: int) -> str:
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


class Source(Protocol):
    """What an agent may search. `asked` returns a question with its environment."""

    async def asked(self, question: str) -> AskedQuestion:
        """Return the question. Raises UserError if it cannot be asked here."""
        ...


class TaskSource:
    """The passages or the graph of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task

    async def asked(self, question: str) -> AskedQuestion:
        """Return the question with the candidates that the task finds in it. Raises UserError."""
        return await asked_question(self.task, question)


class ServedAgent:
    """The agent behind the model id `agent`, and behind the page that asks it."""

    def __init__(
        self,
        background: BackgroundGenerator,
        answerers: Mapping[str, Answerer],
        sources: Mapping[str, Source],
    ) -> None:
        """Serve the agents of `answerers`, by their names, over `sources`, by theirs.

        The first of each is used unless a client names another one.
        """
        self.background = background
        self.answerers = answerers
        self.sources = sources

    def check(self, agent: str | None, source: str | None) -> None:
        """Check the names of an agent and of a source. None: the first. Raises UserError."""
        if agent is not None and agent not in self.answerers:
            raise UserError(f"unknown agent {agent!r}; {nearest(agent, self.answerers)}")
        if source is not None and source not in self.sources:
            raise UserError(f"unknown source {source!r}; {nearest(source, self.sources)}")

    async def answer(
        self, question: str, *, agent: str | None = None, source: str | None = None
    ) -> AsyncGenerator[str | Event | Trajectory, None]:
        """Play an episode.

        Yields notes on the question (sentences), what happens in the episode, and last the
        trajectory. Raises UserError if the question cannot be asked, and OverloadError if the
        server is full.
        """
        self.check(agent, source)
        answerer = self.answerers[agent or next(iter(self.answerers))]
        searched = self.sources[source or next(iter(self.sources))]

        async def job(send: Callable[[Any], None]) -> None:
            asked = await searched.asked(question)
            for note in asked.notes:
                send(note)
            send(await answerer.answer(asked, send))

        events = self.background.follow(job)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModels:
    """What a server serves.

    Attributes:
        name: The name of the policy, such as the run and the number of its policy.
        background: The generator of both models.
        policy: The policy; None if it is behind an endpoint of its own.
        agent: The agent; None if no task says what it searches.
        tokenizer: The tokenizer of the policy.
        examples: Questions that the task asks.
    """

    name: str
    background: BackgroundGenerator
    policy: ServedPolicy | None = None
    agent: ServedAgent | None = None
    tokenizer: Tokenizer | None = None
    examples: tuple[str, ...] = ()


def event_fields(event: str | Event) -> dict[str, Any]:
    """Return a note on the question, or an event of an episode, as a JSON object."""
    if isinstance(event, str):
        return {"event": "note", "note": event}
    return event.as_dict()


def searches_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the searches of an episode as JSON objects."""
    return [dataclasses.asdict(search) for search in trajectory.searches]
