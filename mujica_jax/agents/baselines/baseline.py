"""The base class `Baseline`, and other parts that all prompt-only baselines share.

The other parts are the base class of an episode, sentences that several prompts share, and the
parsers of answers.

In most baselines, each call of the model is a separate conversation of one turn. Search-o1 and
ReAct continue one conversation instead. The record lists the conversation with the answer first.
The parsers read only text that the model generated.
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

# The role of the conversations that may give the answer.
ANSWERS = "answers"

# --- Words that several prompts share. ---

WRITE_ANSWER = "Write only the final answer, as short as possible, inside <answer> ... </answer>."
REASON_FIRST = "Reason step by step inside <think> ... </think>, then answer.\n"
FROM_KNOWLEDGE = "You answer questions from what you know.\n"
FROM_PASSAGES = "You answer a question from the passages that are shown, and from what you know.\n"

_ANSWER_ENDS = ("</answer>",)
_TAG = re.compile(r"</?[a-z]+>|<\|[a-z_]+\|>", re.IGNORECASE)

# The answer, which is empty if there is none, and why the episode ended.
Outcome = tuple[str, StopReason]


class Baseline(abc.ABC):
    """The base class of baselines, which implements `Agent`.

    A baseline derives from it and defines `play`.
    """

    system_prompt: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer, config: BaselineConfig) -> None:
        self._tokenizer = tokenizer
        self._limits = config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return the system prompt. Role and kind do not matter."""
        del role, kind
        return Opening(system=self.system_prompt)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """Play one episode and return its record, without a reward."""
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

        # The conversation with the answer ended last and comes first in the record.
        return episode.trajectory(episode.conversations[::-1], answer=answer, reason=reason)

    @abc.abstractmethod
    async def play(self, episode: "BaselineEpisode") -> Outcome:
        """Play one episode to its end, and return the answer and why the episode ended.

        Raises RetrievalError.
        """


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
        # The finished conversations, in the order in which they ended.
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
        """Let the model answer the message in a new conversation of one turn."""
        with self.conversation(ANSWERS, system_prompt, message=message) as dialogue:
            return await self.write_turn(dialogue, stop_strings=_ANSWER_ENDS)

    @contextlib.contextmanager
    def conversation(self, role: str, system_prompt: str, message: str) -> Iterator[Dialogue]:
        """Open a conversation, and record it at the end, also after an exception."""
        dialogue = Dialogue(self.tokenizer, role, system=system_prompt)
        dialogue.add_user(message)
        try:
            yield dialogue
        finally:
            self.conversations.append(dialogue.record())

    async def write_turn(
        self, dialogue: Dialogue, stop_strings: tuple[str, ...], cut_at: str | None = None
    ) -> Written:
        """Let the model write one turn.

        `cut_at` is the text that begins an observation. The turn is cut there. None means that no
        other turn follows in this conversation.
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


# --- Parsers for the turns that the model writes. ---


def outcome_of(written: Written) -> Outcome:
    """Return the answer of a turn, or why the turn has no answer."""
    if written.cut is not None:
        return "", written.cut
    answer = protocol.parse_answer(written.text)
    if answer is None:
        return "", StopReason.NO_ACTION
    return answer, StopReason.ANSWERED


def first_sentence(text: str) -> str:
    """Return the first line of a turn that is outside of thoughts and contains text.

    An answer that spans several lines counts as one line. Generation does not stop at the first
    line break, because a turn may begin with a thought. This function therefore gets a whole turn.
    """
    turn = protocol.on_one_line("answer", outside_thoughts(text))
    for line in turn.splitlines():
        if without_tags(line).strip():
            return line.strip()
    return ""


def without_tags(text: str) -> str:
    """Return the text with a space in place of each tag."""
    return _TAG.sub(" ", text)
