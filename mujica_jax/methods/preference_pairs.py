"""Preference pairs of a search tree: of two executions after the same past, the one whose mean reward is higher is
chosen (equation 2 of the DecEx-RAG paper: chosen and rejected after the question and the steps before).

    execution   the best execution of a kind against each worse one: sub-questions, sub-answers, sub-queries, answers
    decision    the best executions of the two branches of a decision: stop and go on, memory and search

Equal means give no pair, and neither does what was not scored. The paper does not say which siblings it pairs.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from mujica_jax.agents.decex import Chain
from mujica_jax.records import Conversation

PairKind = Literal["decision", "execution"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two conversations that differ in their last turn, which alone is trained; the first one is preferred."""

    kind: PairKind
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


Group = Sequence[Node]


def execution_pairs(groups: Sequence[Group]) -> list[Pair]:
    """The best of each group of siblings against each that is worse."""
    pairs = []
    for group in groups:
        scored = [node for node in group if node.rewards]
        pairs += [_pair("execution", best_of(scored), node) for node in scored if node.mean < best_of(scored).mean]
    return pairs


def decision_pairs(decisions: Sequence[tuple[Group, Group]]) -> list[Pair]:
    """The best executions of the two branches of a decision, where their means differ."""
    pairs = []
    for decision in decisions:
        scored = [[node for node in branch if node.rewards] for branch in decision]
        if all(scored):
            worse, better = sorted(map(best_of, scored), key=lambda node: node.mean)
            pairs += [_pair("decision", better, worse)] if worse.mean < better.mean else []
    return pairs


def best_of(siblings: Group) -> Node:
    """The first of the best ones."""
    return max(siblings, key=lambda node: node.mean)


def _pair(kind: PairKind, chosen: Node, rejected: Node) -> Pair:
    sides = (_up_to_last_turn(node.chain.record(), kind) for node in (chosen, rejected))
    return Pair(kind=kind, chosen=next(sides), rejected=next(sides), means=(chosen.mean, rejected.mean))


def _up_to_last_turn(conversation: Conversation, role: str) -> Conversation:
    """With the last turn of the model at its end, the only one that is trained."""
    last = max(place for place, turn in enumerate(conversation.turns) if turn.role == "model")
    before = (dataclasses.replace(turn, trained=False) for turn in conversation.turns[:last])
    return Conversation(role=role, turns=(*before, conversation.turns[last]))
