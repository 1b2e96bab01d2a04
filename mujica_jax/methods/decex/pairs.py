"""Preference pairs of a search tree.

Of two executions after the same past, the one whose mean reward is higher is chosen (equation 2 of
the DecEx-RAG paper: chosen and rejected after the question and the steps before).

    execution   the best execution of a kind against each worse one: sub-questions, answers from
                memory, sub-queries, final answers
    decision    the best executions of the two branches of a decision: stop and go on, memory and
                search

Equal means give no pair, and neither does what was not scored. The paper does not say which
siblings it pairs.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from mujica_jax.agents.decex import Chain, PieceKind
from mujica_jax.records import Conversation

PairKind = Literal["decision", "execution"]
# What a pair prefers: the kind of both executions, or the branch that is chosen over the other one.
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
    """Two conversations that differ in their last turn, which alone is trained.

    The first one is preferred.
    """

    kind: PairKind
    prefers: str  # one of PREFERENCES
    chosen: Conversation
    rejected: Conversation
    means: tuple[float, float]


@dataclasses.dataclass(eq=False)
class Node:
    """A state after an execution."""

    chain: Chain
    parent: "Node | None" = None
    rewards: list[float] = dataclasses.field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rewards)

    @property
    def kind(self) -> PieceKind:
        assert self.chain.last is not None, "a node is a state after an execution"
        return self.chain.last.kind


Group = Sequence[Node]


def execution_pairs(groups: Sequence[Group]) -> list[Pair]:
    """Pair the best of each group of siblings with each that is worse."""
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
    """Pair the best executions of the two branches of a decision, where their means differ."""
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

    For the others no episode was played, or every search failed.
    """
    return [node for node in siblings if node.rewards]


def best_of(siblings: Group) -> Node:
    """Return the sibling with the highest mean reward, the first of equal ones."""
    return max(siblings, key=lambda node: node.mean)


def _pair(kind: PairKind, prefers: str, chosen: Node, rejected: Node) -> Pair:
    return Pair(
        kind=kind,
        prefers=prefers,
        chosen=_up_to_last_turn(chosen.chain.pieces(), kind),
        rejected=_up_to_last_turn(rejected.chain.pieces(), kind),
        means=(chosen.mean, rejected.mean),
    )


def _up_to_last_turn(conversation: Conversation, role: str) -> Conversation:
    """Cut a conversation after the last turn of the model, the only one that is trained."""
    last = max(place for place, turn in enumerate(conversation.turns) if turn.role == "model")
    earlier_turns = [dataclasses.replace(turn, trained=False) for turn in conversation.turns[:last]]
    return Conversation(role=role, turns=(*earlier_turns, conversation.turns[last]))
