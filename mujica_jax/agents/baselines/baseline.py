"""The parts that all prompt-only baselines share.

These are: how an episode is played and recorded, the message with passages and question, words of
the prompts, and reading an answer.

Each call of the model is a turn of a conversation of its own. In the record the conversation that
gave the answer comes first. Search-o1 and ReAct continue one conversation instead. Only text that
the model generated is parsed.
"""

import abc
import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Episode, Written
from mujica_jax.agents.single import information
from mujica_jax.config.agents import BaselineConfig
from mujica_jax.models.thoughts import outside_thoughts
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

# Role of the conversations that may give the answer.
ANSWERS = "answers"

# --- words of the prompts ---

WRITE_ANSWER = "Write only the final answer, as short as possible, inside <answer> ... </answer>."
REASON_FIRST = "Reason step by step inside <think> ... </think>, then answer.\n"
FROM_KNOWLEDGE = "You answer questions from what you know.\n"
FROM_PASSAGES = "You answer a question from the passages that are shown, and from what you know.\n"

_ANSWER_ENDS = ("</answer>",)
_TAG = re.compile(r"</?[a-z]+>|<\|[a-z_]+\|>", re.IGNORECASE)

# The answer, and why the episode ended.
Outcome = tuple[str, StopReason]


class Baseline(abc.ABC):
    """Implements `Agent`. A baseline derives from it and defines `play`: how it answers."""

    system_prompt: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer, config: BaselineConfig) -> None:
        self._tokenizer = tokenizer
        self._limits = config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        del role, kind
        return Opening(system=self.system_prompt)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        episode = BaselineEpisode(
            self._tokenizer,
            self._limits,
            attempt=attempt,
            environment=environment,
            policy=policy,
        )
        try:
            answer, reason = await self.play(episode)
        except RetrievalError:
            answer = ""
            reason = StopReason.RETRIEVER_FAILED

        # The conversation that gave the answer ended last and stands first in the record.
        return episode.trajectory(episode.conversations[::-1], answer=answer, reason=reason)

    @abc.abstractmethod
    async def play(self, episode: "BaselineEpisode") -> Outcome:
        """Play one episode to its end. Raises RetrievalError."""


class BaselineEpisode(Episode):
    """One episode of a baseline: its question, its turns and its conversations."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: BaselineConfig,
        attempt: Attempt,
        environment: Environment,
        policy: Policy,
    ) -> None:
        super().__init__(tokenizer, limits, attempt=attempt, environment=environment, policy=policy)
        self.question = protocol.one_line(attempt.question.text)
        # In the order in which they ended.
        self.conversations: list[Conversation] = []
        self._turns_started = 0

    def message(self, passages: Sequence[Material] = (), sentences: Sequence[str] = ()) -> str:
        """Return the user message with the passages, the question and the reasoning so far."""
        lines = []
        if passages:
            lines.append(information(self.fit(passages)))
        lines.append(f"Question: {self.question}")
        if sentences:
            lines.append(f"Reasoning so far: {' '.join(sentences)}")
        return "\n".join(lines)

    async def ask(self, system_prompt: str, message: str) -> Written:
        """Hold a conversation of one turn that ends with an answer."""
        with self.conversation(ANSWERS, system_prompt, message=message) as dialogue:
            return await self.write_turn(dialogue, stop_strings=_ANSWER_ENDS)

    @contextlib.contextmanager
    def conversation(self, role: str, system_prompt: str, message: str) -> Iterator[Dialogue]:
        """Open a conversation. It is recorded however it ends."""
        dialogue = Dialogue(self.tokenizer, role, system=system_prompt)
        dialogue.add_user(message)
        try:
            yield dialogue
        finally:
            self.conversations.append(dialogue.record())

    async def write_turn(
        self, dialogue: Dialogue, stop_strings: tuple[str, ...], cut_at: str | None = None
    ) -> Written:
        """Write one turn.

        With `cut_at`, the text that begins an observation, other turns may follow this one.
        """
        place = str(self._turns_started)
        self._turns_started += 1
        return await self.write(
            dialogue,
            place,
            state=None,
            stop_strings=stop_strings,
            cut_at=cut_at,
            continues=cut_at is not None,
        )


# --- reading what the model wrote ---


def outcome_of(written: Written) -> Outcome:
    """Return the answer of a turn, or why the turn has none."""
    if written.cut is not None:
        return "", written.cut
    answer = protocol.parse_answer(written.text)
    if answer is None:
        return "", StopReason.NO_ACTION
    return answer, StopReason.ANSWERED


def first_sentence(text: str) -> str:
    """Return the first line outside of thoughts that says something.

    An answer over several lines is one line. A turn is not cut at its first line, because it may
    begin with a thought.
    """
    turn = protocol.on_one_line("answer", outside_thoughts(text))
    for line in turn.splitlines():
        if without_tags(line).strip():
            return line.strip()
    return ""


def without_tags(text: str) -> str:
    """Return the text with a space for each tag."""
    return _TAG.sub(" ", text)
