"""Make preference pairs from a search tree.

A pair consists of two executions after the same question and the same earlier steps. The one with
the higher mean reward is chosen, and the other is rejected (equation 2 of the DecEx-RAG paper).
There are two kinds of pairs:

- `execution`: the best execution among siblings of one kind against each worse one. The kinds are
  sub-questions, answers from memory, sub-queries and final answers.
- `decision`: the best executions of the two branches of a decision against each other. The
  decisions are to stop or to go on, and to answer from memory or to search.

Executions with equal means and executions without a score make no pair. The paper does not say
which siblings it pairs.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from mujica_jax.agents.decex import Chain, PieceKind
from mujica_jax.records import Conversation

PairKind = Literal["decision", "execution"]
# The names of preferences. An execution pair has the name of its kind. A decision pair has the name
# of the chosen branch, "_over_", and the name of the other branch.
EXECUTIONS: dict[PieceKind, str] = {
    "sub-question": "sub_question",
    "memory": "memory_answer",
    "search": "sub_query",
    "answer": "final_answer",
}
BRANCHES: dict[PieceKind, str] = {
    "answer": "stop",
    "sub-question": "go_on",
    "memory": "memory",
    "search": "search",
}
DECISIONS = ("stop_over_go_on", "go_on_over_stop", "memory_over_search", "search_over_memory")
PREFERENCES = (*DECISIONS, *EXECUTIONS.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two conversations that differ in their last turn. Only this turn is trained.

    Attributes:
        kind: Whether the pair compares executions or decisions.
        prefers: The name of the preference, one of PREFERENCES.
        chosen: The better conversation.
        rejected: The worse conversation.
        means: The mean rewards of the chosen and of the rejected one.
    """

    kind: PairKind
    prefers: str
    chosen: Conversation
    rejected: Conversation
    means: tuple[float, float]


@dataclasses.dataclass(eq=False)
class Node:
    """A node of the tree: the state after an execution.

    `chain` holds everything from the question to this execution. `rewards` are the rewards of the
    episodes that were played from here.
    """

    chain: Chain
    parent: "Node | None" = None
    rewards: list[float] = dataclasses.field(default_factory=list)

    @property
    def mean(self) -> float:
        """The mean reward of the node."""
        return statistics.fmean(self.rewards)

    @property
    def kind(self) -> PieceKind:
        """The kind of the node's execution."""
        assert self.chain.last is not None, "a node is a state after an execution"
        return self.chain.last.kind


# Siblings: nodes after the same earlier steps.
Group = Sequence[Node]


def execution_pairs(groups: Sequence[Group]) -> list[Pair]:
    """Pair the best node of each group of siblings with each worse one."""
    pairs = []
    for group in groups:
        nodes = scored(group)
        if not nodes:
            continue
        best = best_of(nodes)
        for node in nodes:
            if node.mean < best.mean:
                pairs.append(_pair("execution", EXECUTIONS[best.kind], best, node))
    return pairs


def decision_pairs(decisions: Sequence[tuple[Group, Group]]) -> list[Pair]:
    """Pair the best executions of the two branches of each decision, if their means differ."""
    pairs = []
    for decision in decisions:
        branches = [scored(branch) for branch in decision]
        if all(branches):
            worse, better = sorted(map(best_of, branches), key=lambda node: node.mean)
            if worse.mean < better.mean:
                prefers = f"{BRANCHES[better.kind]}_over_{BRANCHES[worse.kind]}"
                pairs.append(_pair("decision", prefers, better, worse))
    return pairs


def scored(siblings: Group) -> list[Node]:
    """Return the siblings that have a reward.

    The others have none because no episode was played from them, or because a search failed in all
    of these episodes.
    """
    return [node for node in siblings if node.rewards]


def best_of(siblings: Group) -> Node:
    """Return the sibling with the highest mean reward. If several have it, return the first."""
    return max(siblings, key=lambda node: node.mean)


def _pair(kind: PairKind, prefers: str, chosen: Node, rejected: Node) -> Pair:
    """Return the pair of two nodes."""
    return Pair(
        kind=kind,
        prefers=prefers,
        chosen=_up_to_last_turn(chosen.chain.pieces(), kind),
        rejected=_up_to_last_turn(rejected.chain.pieces(), kind),
        means=(chosen.mean, rejected.mean),
    )


def _up_to_last_turn(conversation: Conversation, role: str) -> Conversation:
    """Return a conversation up to the model's last turn. Only this turn is trained."""
    last = max(place for place, turn in enumerate(conversation.turns) if turn.role == "model")
    earlier_turns = [dataclasses.replace(turn, trained=False) for turn in conversation.turns[:last]]
    return Conversation(role=role, turns=(*earlier_turns, conversation.turns[last]))
