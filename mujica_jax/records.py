"""The nouns of the system: question, turn, conversation, trajectory.

One record goes from rollout to gradient. The engine's own token ids, log-probabilities and loss
mask are stored where they are made; text is never tokenised again for training. Every file above
imports these names from here.
"""

import dataclasses
import enum
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

TurnRole = Literal["context", "model"]


class StopReason(enum.StrEnum):
    """Why an episode ended.

    Only ANSWERED carries an answer that can be scored; all others score zero.
    """

    ANSWERED = "answered"  # the agent closed with an <answer> tag
    NO_ACTION = "no_action"  # a turn held neither a search nor an answer that the parser accepts
    # A graph search named a candidate number that was never given. Such a search is refused and the
    # episode goes on; records of earlier versions end with it.
    UNKNOWN_CANDIDATE = "unknown_candidate"
    # one turn asked more searches than max_searches_per_turn
    TOO_MANY_SEARCHES = "too_many_searches"
    ITERATION_LIMIT = "iteration_limit"  # max_iterations turns passed without an answer
    TURN_LENGTH = "turn_length"  # a turn reached max_turn_tokens before it ended
    TRAJECTORY_LENGTH = "trajectory_length"  # the conversation would exceed max_trajectory_tokens
    FILTERED = "filtered"  # the model's endpoint withheld its reply (a content filter, a refusal)
    # the model's endpoint gave a reply that cannot be read, or refused this request
    BAD_REPLY = "bad_reply"
    SYNTHESIS_FAILED = "synthesis_failed"  # a teacher's turn stayed wrong in all of its tries
    # the environment raised a typed retrieval error after its retries
    RETRIEVER_FAILED = "retriever_failed"


JUDGE_FAILED = "judge_failed"  # in the counts of a trajectory on which the judge gave no verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entity:
    """A node that a graph task offers as candidate.

    `id` is the graph's key (a Q-id or the label itself).
    """

    id: str
    label: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One gold triple, in the order in which the chain uses it."""

    subject: str
    relation: str
    object: str
    subject_id: str = ""  # the graph's key where the task knows it
    object_id: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldPassage:
    """A passage that supports the answer."""

    title: str
    text: str = ""  # empty where the data name a title and no text of it is known
    # any passage of this title counts: the texts that are searched are not known beforehand
    by_title: bool = False

    def is_shown_by(self, line: str, *, cut: bool = False) -> bool:
        """Return whether a line `title: text`, as a search shows it, is this passage.

        White space does not count.

        `cut`: the line may be the beginning of a longer passage.
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
    """Return text with composed letters (NFC) and single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


KNOWN = ", known"  # ends the kind of a question whose facts are common knowledge
UNKNOWN = "unknown"  # said of a fact in the place of what would be recalled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    id: str
    text: str
    answers: tuple[str, ...]  # gold answer first, aliases after it
    candidates: tuple[Entity, ...] = ()  # topic entities, for graph environments
    gold_passages: tuple[GoldPassage, ...] = ()
    evidences: tuple[Evidence, ...] = ()
    kind: str = ""  # compositional, comparison, inference, bridge_comparison, ...
    # For a question that asks for several things: annotation, answer asked for, its aliases.
    # `answers` has all of them.
    answer_sets: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the question's facts are common knowledge, as its kind says."""
        return self.kind.endswith(KNOWN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A run of tokens with one author.

    A `context` turn came from templates, users and retrievers; a `model` turn was sampled.

    `logprobs` (one float a token, float32, under the unmodified policy) exist for model turns that
    an engine sampled. `trained` says whether maximum likelihood learns the tokens. `cut` marks a
    model turn that a length limit ended: maximum likelihood must not learn it, and a policy
    gradient must, since the reward of the episode punishes it.
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
            "one log-probability a token"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    role: str  # a plain word of its agent: "planner", "worker", "single", ...
    turns: tuple[Turn, ...]

    @property
    def token_ids(self) -> list[int]:
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def loss_mask(self) -> list[bool]:
        """Return, for each token, whether the token itself is a training target."""
        return [turn.trained for turn in self.turns for _ in turn.token_ids]

    def with_cut_turns_trained(self) -> "Conversation":
        """Return the conversation as a policy gradient learns it.

        A turn that a length limit cut is trained too.
        """
        turns = [
            dataclasses.replace(turn, trained=True, cut=False) if turn.cut else turn
            for turn in self.turns
        ]
        return dataclasses.replace(self, turns=tuple(turns))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """One sub-question of the planner with its result.

    A reader sees it as a node of the graph of sub-questions.
    """

    iteration: int
    query: str
    entity: str = ""  # label of the candidate searched, for graphs
    materials: tuple[str, ...] = ()  # what the retriever returned, in the order shown to the worker
    selected: tuple[int, ...] = ()  # indexes into materials that the worker chose
    sentence: str = ""  # the worker's answer as the planner saw it
    # whether it brought an answer, from materials or from the worker's own knowledge
    found: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward of an episode: the number that a method compares, and its parts."""

    total: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode.

    The agent leaves it without a reward; `run_episodes` adds that (`with_reward`).
    """

    question_id: str
    attempt: int
    policy_version: int
    seed: int
    # each an independent training row; the first one holds the final answer
    conversations: tuple[Conversation, ...]
    answer: str
    reward: float = 0.0
    rewards_by_part: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # what the agent counted, by its own names
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stop_reason: StopReason
    searches: tuple[Search, ...]
    seconds: float  # not part of the trajectory's identity: excluded from checksums of content

    @property
    def final_answer(self) -> str | None:
        """Return the answer that is scored, or None if the episode ended without one."""
        return self.answer if self.stop_reason is StopReason.ANSWERED else None

    @property
    def is_environment_fault(self) -> bool:
        """Whether a search failed. The episode then says nothing about the policy."""
        return self.stop_reason is StopReason.RETRIEVER_FAILED

    @property
    def is_rewarded(self) -> bool:
        """Whether `reward` is what the policy earned.

        It is not if a search or the judge failed; training leaves such an episode out.
        """
        return not self.is_environment_fault and JUDGE_FAILED not in self.counts

    def with_reward(self, reward: Reward) -> "Trajectory":
        return dataclasses.replace(self, reward=reward.total, rewards_by_part=dict(reward.parts))

    def without_verdict(self) -> "Trajectory":
        """Return the trajectory marked as one without a reward: the judge gave no verdict."""
        counts = {**self.counts, JUDGE_FAILED: 1.0}
        return dataclasses.replace(self, reward=0.0, rewards_by_part={}, counts=counts)


def rewarded(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the trajectories that count in groups, means and thresholds."""
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
