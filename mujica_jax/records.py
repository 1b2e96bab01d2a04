"""The records that all parts of the package share: question, turn, conversation, trajectory.

A trajectory keeps the same form from the rollout to the gradient. It stores the token ids, the
log-probabilities and the loss mask as the engine produced them, so training never tokenises text
again. This module imports nothing else of the package, and every other module may import it.
"""

import dataclasses
import enum
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

TurnRole = Literal["context", "model"]
MessageRole = Literal["system", "user", "assistant", "tool"]


class StopReason(enum.StrEnum):
    """The reason why an episode ended.

    Only an ANSWERED episode has an answer to score. Episodes with another reason score zero, except
    RETRIEVER_FAILED: such an episode is left out of training and of scores.
    """

    # The agent finished with an <answer> tag.
    ANSWERED = "answered"
    # A turn contained neither a search nor an answer that the parser accepts.
    NO_ACTION = "no_action"
    # A graph search named a candidate number that the agent had never been shown. Today such a
    # search is refused and the episode continues. Only records of earlier versions have this reason.
    UNKNOWN_CANDIDATE = "unknown_candidate"
    # One turn asked for more searches than `max_searches_per_turn`.
    TOO_MANY_SEARCHES = "too_many_searches"
    # The agent took `max_iterations` turns without an answer.
    ITERATION_LIMIT = "iteration_limit"
    # A turn reached `max_turn_tokens` before it ended.
    TURN_LENGTH = "turn_length"
    # The next turn would make the conversation longer than `max_trajectory_tokens`.
    TRAJECTORY_LENGTH = "trajectory_length"
    # The model's endpoint withheld its reply: a content filter acted, or the model refused.
    FILTERED = "filtered"
    # The model's endpoint refused this request, or its reply could not be parsed.
    BAD_REPLY = "bad_reply"
    # A teacher's turn was still invalid after the last permitted attempt.
    SYNTHESIS_FAILED = "synthesis_failed"
    # The retriever still failed after its retries.
    RETRIEVER_FAILED = "retriever_failed"


# The key in a trajectory's counts that marks an episode for which the judge gave no verdict.
JUDGE_FAILED = "judge_failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entity:
    """A graph node that the agent may search from.

    `id` is the node's key in the graph: a Wikidata Q-id, or the label itself.
    """

    id: str
    label: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One gold triple of a question's reasoning chain.

    `subject_id` and `object_id` are the keys of the two nodes in the graph. They are empty if the
    task does not know them.
    """

    subject: str
    relation: str
    object: str
    subject_id: str = ""
    object_id: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldPassage:
    """A passage that supports the answer."""

    title: str
    # Empty if the data set names only the title of the passage.
    text: str = ""
    # True if every passage with this title counts, whatever its text. Tasks set it when they do not
    # know the searched texts in advance.
    by_title: bool = False

    def is_shown_by(self, line: str, *, cut: bool = False) -> bool:
        """Return whether a search result line `title: text` shows this passage.

        The comparison ignores differences in white space. With `cut`, a line that is only the
        beginning of the passage also counts.
        """
        line = _composed(line)
        heading = _composed(f"{self.title}: ") + " " if self.title.strip() else ""
        if self.by_title or not self.text.strip():
            return bool(heading) and line.startswith(heading)
        passage = heading + _composed(self.text)
        if line == passage:
            return True
        has_text = len(line) > len(heading)
        return cut and has_text and passage.startswith(line)


def _composed(text: str) -> str:
    """Return the text in Unicode form NFC, with each run of white space as one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


# The suffix of `Question.kind` for a question whose facts are common knowledge.
KNOWN = ", known"
# The answer of a model that cannot recall a fact.
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a task, with its gold answers and, where the task has them, its gold facts."""

    id: str
    text: str
    # The gold answer, then its aliases.
    answers: tuple[str, ...]
    # The topic entities from which a graph search may start.
    candidates: tuple[Entity, ...] = ()
    gold_passages: tuple[GoldPassage, ...] = ()
    evidences: tuple[Evidence, ...] = ()
    # The question type that the data set gives, for example "compositional" or "comparison".
    kind: str = ""
    # The gold answers of a question that asks for several things. An annotation is the list of
    # answers that one annotator gave. The nested tuples are annotations, the answers of each
    # annotation, and the aliases of each answer. `answers` lists all aliases.
    answer_sets: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the facts of the question are common knowledge, according to its kind."""
        return self.kind.endswith(KNOWN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """Consecutive tokens of a conversation that come from the same source.

    A `context` turn contains text from templates, users and retrievers. A `model` turn was sampled.

    - `logprobs` holds one float32 log-probability for each token, under the policy without
      temperature or filters. Only model turns that an engine sampled have it.
    - `trained` is True if maximum likelihood learns the tokens.
    - `cut` is True if a length limit ended the model turn. Maximum likelihood must not learn such a
      turn. A policy gradient must learn it, because the reward of the episode punishes it.
    """

    role: TurnRole
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None = None
    trained: bool = False
    cut: bool = False

    def __post_init__(self) -> None:
        assert self.role == "model" or not (self.trained or self.cut), (
            "only tokens that the model generated carry loss"
        )
        assert not (self.trained and self.cut), (
            "maximum likelihood does not learn a turn that a limit cut"
        )
        assert self.logprobs is None or len(self.logprobs) == len(self.token_ids), (
            "a turn needs one log-probability for each token"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """The turns of one dialogue with the model, and the role that the model plays in it.

    `role` is a name that the agent chooses, for example "planner", "worker" or "single".
    """

    role: str
    turns: tuple[Turn, ...]

    @property
    def token_ids(self) -> list[int]:
        """Return the token ids of all turns, in order."""
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def loss_mask(self) -> list[bool]:
        """Return, for each token of the conversation, whether it is a training target."""
        return [turn.trained for turn in self.turns for _ in turn.token_ids]

    def with_cut_turns_trained(self) -> "Conversation":
        """Return the conversation for a policy gradient.

        The turns that a length limit cut are training targets too.
        """
        turns = [
            dataclasses.replace(turn, trained=True, cut=False) if turn.cut else turn
            for turn in self.turns
        ]
        return dataclasses.replace(self, turns=tuple(turns))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation that is text, as files of conversations hold it.

    `learning.conversations` writes messages as a `Conversation`, in the tokens of a chat template.

    - `trained` is True if maximum likelihood learns the message. Only the assistant's may be.
    - `ends_turn` is True if the model ends the message with its end-of-turn token. That token is
      then learnt too. It is False for a message that a stop string ended.
    - `tag` is the name of the protocol tag that encloses the message, such as "information". It is
      empty for a message without a tag. `content` does not include the tag.
    - `token_ids` are the tokens with which a model wrote the content, without its end-of-turn token.
      They are empty if they are the tokens that the tokenizer itself chooses for the content.
    """

    role: MessageRole
    content: str
    trained: bool = False
    ends_turn: bool = True
    tag: str = ""
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.role == "assistant" or not self.trained, (
            "only messages of the assistant carry loss"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """One sub-question of an episode, and its result."""

    # The turn of the planner that asked the sub-question, counted from 0.
    iteration: int
    query: str
    # The label of the candidate entity that was searched. Graph searches have one.
    entity: str = ""
    # The lines that the retriever returned, in the order in which the worker saw them.
    materials: tuple[str, ...] = ()
    # The indexes of the materials that the worker chose.
    selected: tuple[int, ...] = ()
    # The worker's answer in the words that the planner saw.
    sentence: str = ""
    # True if the sub-question was answered, from the materials or from the worker's own knowledge.
    found: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward of an episode: the total that a method compares, and the parts behind it."""

    total: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode: an attempt of the agent to answer a question.

    The agent returns it without a reward. `run_episodes` scores the episode and adds the reward.
    """

    question_id: str
    # The number of the attempt at this question, counted from 0.
    attempt: int
    policy_version: int
    seed: int
    # Each conversation is learnt on its own, without the others. The first one holds the final
    # answer.
    conversations: tuple[Conversation, ...]
    answer: str
    reward: float = 0.0
    rewards_by_part: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Numbers that the agent counted during the episode, under names that the agent chooses.
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stop_reason: StopReason
    searches: tuple[Search, ...]
    # The duration of the episode. Checksums of the content leave it out, because it varies.
    seconds: float

    @property
    def final_answer(self) -> str | None:
        """Return the answer to score, or None if the episode ended without an answer."""
        return self.answer if self.stop_reason is StopReason.ANSWERED else None

    @property
    def is_environment_fault(self) -> bool:
        """Whether a search failed. Such an episode says nothing about the policy."""
        return self.stop_reason is StopReason.RETRIEVER_FAILED

    @property
    def is_rewarded(self) -> bool:
        """Whether `reward` measures what the policy did.

        It is False if a search or the judge failed. Training leaves such episodes out.
        """
        return not self.is_environment_fault and JUDGE_FAILED not in self.counts

    def with_reward(self, reward: Reward) -> "Trajectory":
        """Return the trajectory with this reward."""
        return dataclasses.replace(self, reward=reward.total, rewards_by_part=dict(reward.parts))

    def without_verdict(self) -> "Trajectory":
        """Return the trajectory with reward 0 and a mark that the judge gave no verdict."""
        counts = {**self.counts, JUDGE_FAILED: 1.0}
        return dataclasses.replace(self, reward=0.0, rewards_by_part={}, counts=counts)


def rewarded(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the trajectories whose reward counts in groups, means and thresholds."""
    return [trajectory for trajectory in trajectories if trajectory.is_rewarded]


def generated_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return how many tokens the model sampled in these trajectories."""
    tokens = 0
    for trajectory in trajectories:
        for conversation in trajectory.conversations:
            for turn in conversation.turns:
                if turn.role == "model":
                    tokens += len(turn.token_ids)
    return tokens
