"""DecEx-RAG's trees, over a policy whose turns stand in a table and whose rewards follow by hand;
what is kept of them, what is learnt, and that DPO moves towards what was chosen.
"""

import ast
import asyncio
import collections
import dataclasses
import io
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from mujica_jax.agents import decex as decex_agent
from mujica_jax.agents.decex import Decex, DecexState
from mujica_jax.commands import train
from mujica_jax.config.agents import DecexConfig
from mujica_jax.config.checks import check, check_demonstrations
from mujica_jax.config.files import load_config
from mujica_jax.config.methods import DecexTreeConfig, RemoteConfig
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.learning.losses.preference import DPO
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import Trainer, fit
from mujica_jax.methods.decex import method as decex
from mujica_jax.methods.decex.records import (
    best_chain,
    encode_nodes,
    figures,
    is_pair,
    pairs_by_preference,
    records_of,
)
from mujica_jax.methods.decex.tree import Growth, Tree
from mujica_jax.records import Question, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.runs import sampling
from mujica_jax.tasks.task import Material
from mujica_jax.trajectories import shards
from tests.config.test_config import SMOKE, RecordedRun, assert_each_changes, changed
from tests.helpers.fake_runs import call_fakes
from tests.helpers.little_agent import LittleWorld, attempt, completion, rewarded, tokenizer
from tests.helpers.packed_rows import MODEL as TINY
from tests.helpers.packed_rows import TRAINER as SHORT
from tests.helpers.packed_rows import tiny_decoder
from tests.helpers.patience import HANG_SECONDS

QUESTION = Question(id="q-1", text="What is it?", answers=("gold",))
AGENT = DecexConfig(
    prompt="brief",
    max_iterations=2,
    max_turn_tokens=400,
    max_trajectory_tokens=2000,
    max_observation_tokens=300,
)
CHEAP = DecexTreeConfig(
    branches=3,
    rollouts=2,
    score_both_branches=False,
    learning_rate=1.0,
    end_learning_rate=0.0,
    epochs=1,
)
METHOD = dataclasses.replace(CHEAP, score_both_branches=True)
GOLD = "a </think>\n<answer> gold </answer>"
WRONG = "a </think>\n<answer> wrong </answer>"


def ask(text: str) -> str:
    return f"a. {decex_agent.SUB_QUESTION} {text}?\n"


def recalled(text: str) -> str:
    return f"{decex_agent.MEMORY} x. {decex_agent.RECALL} {text}\n"


def from_memory(text: str) -> str:
    """Return the same text after the beginning that a tree writes."""
    return recalled(text).removeprefix(decex_agent.MEMORY)


BEGINNINGS = {
    decex_agent.BEGINS["memory"]: "<memory>",
    decex_agent.BEGINS["search"]: "<search>",
    decex_agent.AFTER_THOUGHT["stop"]: "<stop>",
    decex_agent.AFTER_THOUGHT["go_on"]: "<go on>",
}


class Table:
    """Writes what follows a state, in its order, and begins again when it is used up.

    A state is named by what was recalled or [found], then the sub-question to solve, then what a
    tree makes of it: "m1>[q1]>b?<search>".
    """

    version = 0

    def __init__(self, turns: Mapping[str, Sequence[str]]) -> None:
        self._turns = turns
        self.asked: collections.Counter[str] = collections.Counter()
        self.written_tokens = 0

    async def generate(self, prompt, params, *, state, continues):
        assert isinstance(state, DecexState)
        await asyncio.sleep(0)
        text = self.turn(state, params.seed)
        reply = completion(text if state.turn or state.begins else f"<think> {text}")
        self.written_tokens += len(reply.token_ids)
        return reply

    def turn(self, state: DecexState, seed: int) -> str:
        name = self.name(state)
        place = self.asked[name]
        self.asked[name] += 1
        return self._turns[name][self.place(place, seed) % len(self._turns[name])]

    def place(self, place: int, seed: int) -> int:
        return place

    @staticmethod
    def name(state: DecexState) -> str:
        steps = [step.recalled or f"[{step.materials[0].text}]" for step in state.steps]
        begun = next((name for text, name in BEGINNINGS.items() if state.begins.endswith(text)), "")
        return ">".join([*steps, *([state.asked] if state.asked else [])]) + begun


class Seeded(Table):
    """Writes the same table by the seed. An equal seed gives an equal text."""

    def place(self, place: int, seed: int) -> int:
        return seed


class Echo(LittleWorld):
    """An environment in which a search finds its own query."""

    async def search(self, query, entity):
        await super().search(query, entity)
        return (Material(text=query),)


class FailsOnce(Echo):
    """An environment in which the first search for each query fails."""

    async def search(self, query, entity):
        first = not any(query == searched for searched, _ in self.searched)
        materials = await super().search(query, entity)
        if first:
            raise RetrievalError(f"the search for {query} timed out")
        return materials


def grow(
    policy: Any,
    *,
    iterations: int = 2,
    world: LittleWorld | None = None,
    writer: Any = None,
    both=False,
    **changes,
) -> Tree:
    agent = Decex(tokenizer(), dataclasses.replace(AGENT, max_iterations=iterations))

    async def reward(trajectory):
        return rewarded(trajectory, QUESTION)

    async def growing() -> Tree:
        growth = Growth(
            agent.begin(attempt(QUESTION), world or Echo(kind="text"), policy),
            dataclasses.replace(METHOD if both else CHEAP, **changes),
            reward=reward,
            gate=asyncio.Semaphore(4),
            writer=writer,
        )
        return await growth.grow()

    return asyncio.run(asyncio.wait_for(growing(), HANG_SECONDS))


def pairs_of(tree: Tree) -> list[tuple]:
    """Return of each pair the preference, the last pieces of both sides and the two means."""

    def last(conversation) -> str:
        piece = decex_agent.first_piece(
            conversation.turns[-1].text, in_thought=True, has_sub_question=True
        )
        assert piece is not None
        return piece.text

    return [
        (pair.prefers, last(pair.chosen), last(pair.rejected), pair.means) for pair in tree.pairs
    ]


def searches_of_leaves(tree: Tree) -> list[list[str]]:
    return [queries_of(leaf) for leaf in tree.finished[: tree.leaves]]


def queries_of(leaf: Trajectory) -> list[str]:
    return [search.query for search in leaf.searches]


# Sub-question a is worth 1/2 and b nothing; from memory m1 is worth nothing and m2 1/2; q1 is worth
# 1 and q2 nothing.
TURNS = {
    "": [ask("a"), ask("b"), ask("A")],
    "a?": [recalled("ra") + GOLD, recalled("ra") + WRONG],
    "b?": [recalled("rb") + WRONG],
    "a?<memory>": [from_memory("m1"), from_memory("m2"), from_memory("M1")],
    "m1": [WRONG],
    "m2": [GOLD, WRONG],
    "a?<search>": [" q1 </search>", " q2 </search>", " q2 </search>"],
    "[q1]": [GOLD],
    "[q2]": [WRONG],
}


def test_a_pruned_tree_by_hand():
    table = Table(TURNS)
    tree = grow(table)
    assert tree.counts == {
        "nodes": 7,  # a, b, m1, m2, q1, q2, and the answer
        "rollouts": 12,  # two each of the six that are no answer
        "rollouts_for_pairs": 0,
        "forced_decisions": 0,
        "duplicates": 5,  # A, M1, q2, two answers
        "malformed": 0,
        "pruned_branches": 4,  # b, m1, m2, q2
        "skipped_searches": 0,
        "repeated": 0,
        "retriever_failed": 0,
        "budget_spent": 0,
        "writer_tokens": 0,
        "generated_tokens": tree.counts["generated_tokens"],
        "forward_tokens": tree.counts["forward_tokens"],
    }
    assert pairs_of(tree) == [
        ("sub_question", "a?", "b?", (0.5, 0.0)),
        ("memory_answer", "m2", "m1", (0.5, 0.0)),
        ("sub_query", "q1", "q2", (1.0, 0.0)),
        ("search_over_memory", "q1", "m2", (1.0, 0.5)),
    ]
    assert tree.leaves == 1
    assert len(tree.finished) == 13
    leaf = tree.finished[0]
    assert leaf.reward == 1.0
    assert [search.query for search in leaf.searches] == ["q1"]
    expected = [1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0]
    assert [trajectory.reward for trajectory in tree.finished[1:]] == expected
    rows = pyarrow.parquet.read_table(io.BytesIO(encode_nodes([tree]))).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("q-1", 0, None, "sub-question", "a?", [1.0, 0.0]),
        ("q-1", 1, None, "sub-question", "b?", [0.0, 0.0]),
        ("q-1", 2, 0, "memory", "m1", [0.0, 0.0]),
        ("q-1", 3, 0, "memory", "m2", [1.0, 0.0]),
        ("q-1", 4, 0, "search", "q1", [1.0, 1.0]),
        ("q-1", 5, 0, "search", "q2", [0.0, 0.0]),
        ("q-1", 6, 4, "answer", "gold", [1.0]),
    ]
    # Decisions: 3 samples and what was played; executions 3 each; the last state's 3 votes after 2
    # episodes.
    assert table.asked[""] == 3
    assert table.asked["a?"] == 2
    assert table.asked["a?<memory>"] == 3
    assert table.asked["[q1]"] == 2 + 3


def test_the_leaf_is_the_path_of_the_tree_in_the_published_format():
    """The pieces of a leaf are joined to turns.

    They are a thought with the sub-question and a search, then a thought and the answer.
    """
    (conversation,) = grow(Table(TURNS)).finished[0].conversations
    assert [turn.text for turn in conversation.turns if turn.role == "model"] == [
        "<think> a. So, the next sub-question is: a?\n"
        "I need to look this up. </think>\n"
        "<search> q1 </search>",
        "<think> a </think>\n<answer> gold </answer>",
    ]
    assert [turn.role for turn in conversation.turns] == ["context", "model"] * 2
    assert all(turn.trained == (turn.role == "model") for turn in conversation.turns)


def test_tokens_are_counted_once():
    """The tree has one branch and one episode a node.

    All that was written counts, and how turns began, and what a search found.
    """
    table = Table(TURNS | {"": [ask("a")], "a?": [WRONG], "m1": [WRONG]})
    tree = grow(table, branches=1, rollouts=1)
    assert tree.counts["generated_tokens"] == table.written_tokens
    begun = sum(len(tokenizer().encode_model(text)) for text in decex_agent.BEGINS.values())
    information = len(tree.finished[0].conversations[0].turns[2].token_ids)
    assert tree.counts["forward_tokens"] == table.written_tokens + begun + information


@pytest.mark.parametrize(("right", "skipped"), [(2, 0), (3, 0), (4, 1)])
def test_searches_are_skipped_above_six_tenths_and_not_at_it(right, skipped):
    turns = TURNS | {"m1": [*[GOLD] * right, *[WRONG] * (5 - right)], "m2": [WRONG], "a?": [GOLD]}
    world = Echo(kind="text")
    tree = grow(Table(turns), rollouts=5, world=world)
    assert tree.counts["skipped_searches"] == skipped
    assert bool(world.searched) != bool(skipped)
    assert ("search_over_memory", "q1", "m1", (1.0, right / 5)) in pairs_of(tree) or skipped
    best, is_leaf = best_chain(tree, "most")
    assert len(best.searches) == (0 if skipped else 1)
    assert is_leaf is True
    assert ("memory_answer", "m1", "m2", (right / 5, 0.0)) in pairs_of(tree)


def test_a_better_memory_at_the_threshold_is_chosen_in_the_pair_and_not_in_the_chain():
    turns = TURNS | {"m1": [GOLD, WRONG], "m2": [WRONG], "[q1]": [WRONG]}
    tree = grow(Table(turns))
    assert ("memory_over_search", "m1", "q1", (0.5, 0.0)) in pairs_of(tree)
    assert [search.query for search in tree.finished[0].searches] == ["q1"]


def voting(stopping: int) -> Mapping[str, Sequence[str]]:
    """Return turns in which `stopping` of four votes at the root stop, one of them wrongly.

    Going on with b is worth nothing.
    """
    turns = TURNS | {
        "": [*[GOLD] * (stopping - 1), WRONG, *[ask("b")] * (4 - stopping)],
        "b?": [WRONG],
    }
    turns |= {
        "b?<memory>": [from_memory("x")],
        "b?<search>": [" x </search>"],
        "x": [WRONG],
        "[x]": [WRONG],
    }
    return turns


@pytest.mark.parametrize(("stopping", "ends"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_tree_ends_where_more_than_half_of_the_turns_stop(stopping, ends):
    tree = grow(Table(voting(stopping)), branches=4)
    assert (tree.counts["rollouts"] == 0) == ends
    decision = ("stop_over_go_on", "gold", "b?", (1.0, 0.0))
    assert (decision in pairs_of(tree)) == (not ends and stopping > 1)
    if ends:
        assert sorted(episode.answer for episode in tree.finished) == ["gold", "wrong"]
        assert tree.leaves == 2
        assert pairs_of(tree) == [("final_answer", "gold", "wrong", (1.0, 0.0))]


def test_a_turn_that_cannot_be_read_votes_for_nothing_and_is_no_branch():
    turns = TURNS | {"": [GOLD, "no tag", ask("b")], "b?": [GOLD]}
    turns |= {
        "b?<memory>": [" not closed", from_memory("x")],
        "b?<search>": [" not closed", " x </search>"],
    }
    tree = grow(Table(turns | {"x": [WRONG], "[x]": [GOLD]}))
    assert tree.counts["malformed"] == 1 + 2 + 2
    assert tree.counts["rollouts"] == 6
    empty = grow(Table({"": ["no tag"]}))
    assert not empty.finished
    assert empty.counts["malformed"] == 3
    assert empty.unfinished.stop_reason is StopReason.NO_ACTION


# Both branches


def test_the_search_is_scored_where_memory_was_good_enough_and_not_expanded():
    """m2 is worth 1 and q1 is worth 1/2.

    The pair prefers memory, and the leaf is without a search.
    """
    turns = TURNS | {"m2": [GOLD], "[q1]": [GOLD, WRONG], "m2<go on>": ["\n"]}
    cheap = grow(Table(turns))
    both = grow(Table(turns), both=True)
    decision = ("memory_over_search", "m2", "q1", (1.0, 0.5))
    assert decision in pairs_of(both)
    assert decision not in pairs_of(cheap)
    assert ("sub_query", "q1", "q2", (0.5, 0.0)) in pairs_of(both)
    assert searches_of_leaves(both) == searches_of_leaves(cheap) == [[]]
    assert both.counts["skipped_searches"] == cheap.counts["skipped_searches"] == 1
    assert both.counts["rollouts_for_pairs"] == 4
    assert cheap.counts["rollouts_for_pairs"] == 0
    assert both.counts["rollouts"] == cheap.counts["rollouts"] + 4
    assert both.counts["malformed"] == 3, "forced to go on, the last state writes no sub-question"


def test_going_on_is_scored_where_the_vote_ends_the_tree_and_not_expanded():
    tree = grow(Table(voting(3)), branches=4, both=True)
    assert pairs_of(tree) == [
        ("final_answer", "gold", "wrong", (1.0, 0.0)),
        ("stop_over_go_on", "gold", "b?", (1.0, 0.0)),
    ]
    assert tree.leaves == 2
    assert tree.counts["rollouts"] == 2
    assert tree.counts["rollouts_for_pairs"] == 2
    assert tree.counts["pruned_branches"] == 1


def test_the_decision_that_no_sample_took_is_forced_after_the_same_thoughts():
    """After q1 all three votes stop with 1, and going on is worth nothing.

    Before the first step nothing is forced.
    """
    table = Table(
        TURNS
        | {"[q1]<go on>": [" c?\n", " d?\n", " C?\n"], "[q1]>c?": [WRONG], "[q1]>d?": [GOLD, WRONG]}
    )
    tree = grow(table, both=True)
    assert ("stop_over_go_on", "gold", "d?", (1.0, 0.5)) in pairs_of(tree)
    (pair,) = (pair for pair in tree.pairs if pair.prefers == "stop_over_go_on")
    assert pair.rejected.turns[-1].text == "<think> a So, the next sub-question is: d?\n"
    assert pair.chosen.turns[-1].text == "<think> a </think>\n<answer> gold </answer>"
    assert pair.chosen.turns[:-1] == pair.rejected.turns[:-1]
    assert tree.counts["forced_decisions"] == 3
    assert tree.counts["rollouts_for_pairs"] == 4
    assert table.asked["<stop>"] == 0
    assert tree.leaves == 1


def test_stopping_is_forced_where_every_sample_goes_on():
    """After m2, which is good enough, all samples ask c, which is worth nothing.

    Forced to stop, one is right.
    """
    turns = TURNS | {
        "m2": [GOLD, GOLD, ask("c"), ask("c"), ask("c")],
        "m2<stop>": [" gold </answer>", " no </answer>"],
    }
    turns |= {"m2>c?": [WRONG], "m2>c?<memory>": [from_memory("y")], "m2>y": [WRONG]}
    turns |= {"m2>c?<search>": [" y </search>"], "m2>[y]": [WRONG]}
    tree = grow(Table(turns), both=True)
    assert ("stop_over_go_on", "gold", "c?", (1.0, 0.0)) in pairs_of(tree)
    assert all(leaf.answer == "wrong" for leaf in tree.finished[: tree.leaves]), (
        "what is forced is no leaf"
    )
    # Where T iterations are used nothing is forced to go on.
    assert tree.counts["forced_decisions"] == 3


# Faults of the retriever


def test_a_search_that_fails_is_no_branch_and_counted():
    tree = grow(Table(TURNS), world=Echo(kind="text", failing=frozenset({"q1", "q2"})))
    assert tree.counts["malformed"] == 0
    assert tree.counts["retriever_failed"] == 3
    assert tree.counts["repeated"] == 6
    assert [search for search in tree.finished[0].searches] == [], (
        "the best of memory is what is left"
    )


def test_an_episode_that_a_failed_search_ended_enters_no_mean():
    """Episodes that search for what fails are lost. The others give a its worth of 1."""
    turns = TURNS | {
        "a?": ["I need to look this up. </think>\n<search> lost </search>", GOLD],
        "": [ask("a")],
    }
    turns |= {"a?<memory>": [from_memory("m1"), from_memory("m2")]}
    tree = grow(Seeded(turns), rollouts=4, world=Echo(kind="text", failing=frozenset({"lost"})))
    (node,) = (node for node in tree.nodes if node["text"] == "a?")
    rewards = node["rewards"]
    assert isinstance(rewards, list)
    assert 0 < len(rewards) < 4
    assert set(rewards) == {1.0}
    assert tree.counts["retriever_failed"] == 4 - len(rewards)
    assert tree.counts["repeated"] == 2 * (4 - len(rewards))
    assert not any(episode.stop_reason is StopReason.RETRIEVER_FAILED for episode in tree.finished)


def test_repeated_by_the_same_seeds_a_tree_is_the_one_without_the_fault():
    turns = TURNS | {
        "a?": ["I need to look this up. </think>\n<search> ra </search>", GOLD],
        "[ra]": [GOLD, WRONG],
    }
    turns |= {"": [ask("a"), ask("b")], "a?<memory>": [from_memory("m1"), from_memory("m2")]}
    whole = grow(Seeded(turns))
    repeated = grow(Seeded(turns), world=FailsOnce(kind="text"))
    assert repeated.counts["repeated"] > 0 == repeated.counts["retriever_failed"]
    assert pairs_of(repeated) == pairs_of(whole)
    assert repeated.nodes == whole.nodes
    assert [episode.reward for episode in repeated.finished] == [
        episode.reward for episode in whole.finished
    ]


def test_a_node_whose_episodes_are_all_lost_is_not_expanded():
    turns = TURNS | {
        "a?": ["I need to look this up. </think>\n<search> lost </search>"],
        "": [ask("a")],
    }
    tree = grow(Table(turns), world=Echo(kind="text", failing=frozenset({"lost"})))
    assert not tree.finished
    assert not tree.pairs
    assert tree.unfinished.stop_reason is StopReason.RETRIEVER_FAILED
    lost = records_of(tree, "most", 1.0)
    whole = records_of(grow(Table(TURNS)), "most", 1.0)
    tree_figures = figures([*lost, *whole])
    # The figures are of the whole tree alone.
    assert tree_figures["best_reward"] == 1.0
    assert tree_figures["leaf_share"] == 1.0
    assert tree_figures["retrievals"] == 1.0
    assert tree_figures["questions"] == 2
    assert tree_figures["unfinished"] == 1
    assert tree_figures["retriever_failed"] == 2


# Every layer has two sub-questions, two answers from memory and two sub-queries, and ends with one
# wrong answer.
class Wide(Table):
    def __init__(self) -> None:
        super().__init__({})

    def turn(self, state: DecexState, seed: int) -> str:
        if not state.is_piece:
            steps = len(state.steps) + (state.asked is not None)
            begun = recalled("r") if state.asked is not None else ""
            return begun + (ask("r") + recalled("r")) * (2 - steps) + WRONG
        if state.asked is None:
            return WRONG if len(state.steps) == 2 else ask(f"q{self._next('ask', state)}")
        if state.begins.endswith(decex_agent.MEMORY):
            return from_memory(f"memory{self._next('memory', state)}")
        return f" search{self._next('search', state)} </search>"

    def _next(self, question: str, state: DecexState) -> int:
        key = f"{question}{state.steps}{state.asked}"
        self.asked[key] += 1
        return self.asked[key] % 2


def test_layers_grow_linearly_and_by_two_and_by_all_executions():
    """The sizes are k = 2 and T = 2.

    A pruned layer has 2 + 2 + 2 nodes and is followed by one state, an unpruned one by 2. In a full
    one each sub-question has 4 executions, so 2 + 8 nodes are followed by 8 states.
    """
    counts = {
        name: grow(Wide(), branches=2, expansion=name).counts
        for name in ("pruned", "unpruned", "full")
    }
    assert counts["pruned"]["nodes"] == 6 + 6 + 1
    assert counts["pruned"]["rollouts"] == 2 * 12
    assert counts["unpruned"]["nodes"] == 6 + 2 * 6 + 4
    assert counts["unpruned"]["rollouts"] == 2 * 18
    assert counts["full"]["nodes"] == 10 + 8 * 10 + 64
    assert counts["full"]["rollouts"] == 0


def test_an_unpruned_tree_keeps_both_branches_of_each_decision():
    tree = grow(Table(TURNS), expansion="unpruned")
    assert tree.leaves == 3, "gold and wrong after m2, gold after q1"
    assert queries_of(tree.finished[0]) == ["q1"]
    assert queries_of(tree.finished[1]) == []
    assert queries_of(tree.finished[2]) == []
    assert ("final_answer", "gold", "wrong", (1.0, 0.0)) in pairs_of(tree), "after m2"


@pytest.mark.parametrize("both", [False, True])
def test_a_full_tree_scores_by_the_answers_beneath(both):
    turns = TURNS | {
        "": [ask("a")],
        "m1": [GOLD],
        "m2": [WRONG],
        "[q1]": [GOLD, WRONG],
        "[q2]": [WRONG],
    }
    tree = grow(Table(turns), branches=2, expansion="full", both=both)
    assert tree.counts["rollouts"] == 0
    assert tree.leaves == len(tree.finished) == 5
    assert pairs_of(tree) == [
        ("memory_answer", "m1", "m2", (1.0, 0.0)),
        ("sub_query", "q1", "q2", (0.5, 0.0)),
        ("final_answer", "gold", "wrong", (1.0, 0.0)),  # after q1
        ("memory_over_search", "m1", "q1", (1.0, 0.5)),
    ]


def test_a_spent_budget_keeps_what_was_made():
    whole = grow(Wide(), branches=2, expansion="full")
    half = round(whole.counts["generated_tokens"] / 2)
    part = grow(Wide(), branches=2, expansion="full", budget_tokens=half)
    assert part.counts["budget_spent"] == 1
    assert whole.counts["budget_spent"] == 0
    assert 0 < part.leaves < whole.leaves
    assert half <= part.counts["generated_tokens"] < whole.counts["generated_tokens"]
    none = grow(Wide(), branches=2, expansion="full", budget_tokens=1)
    # The first layer was begun.
    assert not none.finished
    assert none.counts["nodes"] == 10
    (record,) = records_of(none, "most", 1.0)
    assert record.stop_reason == StopReason.ITERATION_LIMIT
    assert record.reward == 0.0
    assert figures([record])["unfinished"] == figures([record])["budget_spent"] == 1


# What is kept and learnt


def test_the_chain_is_a_leaf_with_the_best_reward_whatever_an_episode_searched():
    """Two leaves are right, and so are episodes with more and with fewer searches.

    SFT learns a path of the tree.
    """
    twice = "I need to look this up. </think>\n<search> more </search>"
    turns = TURNS | {
        "a?": [twice],
        "[more]": ["a </think>\n<search> q1 </search>"],
        "[more]>[q1]": [GOLD],
    }
    tree = grow(Table(turns), expansion="unpruned")
    assert searches_of_leaves(tree) == [["q1"], [], []]
    assert tree.finished[1].reward == tree.finished[0].reward == 1
    assert max(len(episode.searches) for episode in tree.finished if episode.reward == 1) == 2, (
        "an episode searched twice"
    )
    chains = {name: best_chain(tree, name) for name in ("most", "least")}
    assert chains["most"] == (tree.finished[0], True)
    assert chains["least"] == (tree.finished[1], True)


def test_an_episode_stands_in_only_where_no_leaf_has_the_best_reward():
    """The votes after q1 are wrong, and the episodes after m2 and q1 were right.

    The chain is one of these, with most or with least searches.
    """
    tree = grow(Table(TURNS | {"[q1]": [GOLD, GOLD, WRONG, WRONG, WRONG]}))
    most_chain = best_chain(tree, "most")
    least_chain = best_chain(tree, "least")
    assert most_chain[0].reward == 1.0
    assert [search.query for search in most_chain[0].searches] == ["q1"]
    assert most_chain[1] is False
    assert least_chain[0].reward == 1.0
    assert least_chain[0].searches == ()
    assert least_chain[1] is False
    assert figures(records_of(tree, "most", 1.0))["leaf_share"] == 0


def test_records_survive_a_shard_and_say_what_the_tree_was():
    tree = grow(Table(TURNS))
    records = shards.decode(shards.encode(records_of(tree, "most", 2.0)), "here")
    assert [is_pair(record) for record in records] == [False, True, True, True, True]
    assert len({record.attempt for record in records}) == 5
    for record, pair in zip(records[1:], tree.pairs, strict=True):
        assert record.conversations == (pair.chosen, pair.rejected)
        for side in record.conversations:
            assert [turn.trained for turn in side.turns] == [False] * (len(side.turns) - 1) + [True]
        assert (
            record.conversations[0].turns[:-1] == record.conversations[1].turns[:-1]
            or pair.kind == "decision"
        )
    tree_figures = figures(records)
    assert tree_figures["questions"] == 1
    assert tree_figures["seconds"] == 2.0
    assert tree_figures["nodes"] == 7
    assert tree_figures["best_reward"] == 1.0
    assert tree_figures["decision_pairs"] == 1
    assert tree_figures["execution_pairs"] == 3
    assert tree_figures["retrievals"] == 1
    preferred = {name: count for name, count in pairs_by_preference(records).items() if count}
    assert preferred == {
        "sub_question": 1,
        "memory_answer": 1,
        "sub_query": 1,
        "search_over_memory": 1,
    }
    assert tree_figures["pairs_search_over_memory"] == 1
    assert tree_figures["pairs_memory_over_search"] == 0


def test_dpo_moves_towards_what_was_chosen():
    sides = [side for pair in grow(Table(TURNS)).pairs for side in (pair.chosen, pair.rejected)]
    model = dataclasses.replace(
        TINY, vocab_size=tokenizer().vocab_size, max_position_embeddings=1024
    )
    config = dataclasses.replace(SHORT, sequence_length=512, batch_size=2)
    trainer = Trainer(model, config, DPO(beta=0.1))
    state = trainer.initial_state(tiny_decoder(model))
    packed = pack(sides, sequence_length=512, seed=0, pairs=True)
    reference = trainer.score(state, packed)
    rows = packed.with_columns(reference_log_probs=reference)
    metrics = []
    rates = schedule(peak=3e-3, end_value=3e-3, total_steps=8)
    batches = trainer.batches(rows, seed=0)
    state = fit(trainer, state, batches, schedule=rates, steps=8, on_step=metrics.append).state
    assert metrics[0].loss == pytest.approx(math.log(2), abs=1e-5)
    assert metrics[-1].loss < 0.6
    gains = np.where(packed.loss_mask, trainer.score(state, packed) - reference, 0.0)
    signs = np.sign(packed.columns["pairs"])
    assert (gains * signs).sum() > 1.0, "chosen turns gained on rejected ones"


# The method


@pytest.fixture(autouse=True)
def recipes_call_the_fake(monkeypatch):
    call_fakes(monkeypatch)


class Dice:
    """A generator that reads the end of its prompt and writes what its seed says."""

    policy_version = 0

    async def generate(self, prompt, params, *, continues):
        await asyncio.sleep(0)
        text = tokenizer_of_run(prompt)
        die = params.seed + round(1000 * params.temperature)
        answer = "gold" if die % 2 else "wrong"
        solved = f"x. {decex_agent.RECALL} {die % 3}\n"
        text_of_opening = {
            decex_agent.MEMORY: f" {solved}",
            "<search>": f" {die % 3} </search>",
            "<answer>": f" {answer} </answer>",
            decex_agent.SUB_QUESTION: f" q{die % 2}?\n",
        }
        searching = ask(f"q{die % 2}") + decex_agent.write_search("x")
        recalling = ask("q") + recalled("x")
        turns = [GOLD, WRONG, searching, recalling + GOLD, searching, recalling + WRONG]
        begun = next((name for name in text_of_opening if text.endswith(name)), None)
        written = turns[die % 6] if begun is None else text_of_opening[begun]
        if text.endswith("assistant\n"):
            written = f"<think> {written}"
        ids = (*Dice.tokenizer.encode_model(written), Dice.tokenizer.end_of_turn_id)
        return completion_of(ids[: params.max_new_tokens], len(ids) <= params.max_new_tokens)

    tokenizer: Any = None

    def release_weights(self) -> None: ...
    def reset_cache(self) -> None: ...


def tokenizer_of_run(prompt: Sequence[int]) -> str:
    return Dice.tokenizer.decode(list(prompt))


def completion_of(ids: tuple[int, ...], whole: bool):
    like = completion("x")
    logprobs = tuple(-0.5 for _ in ids)
    reason = "stop" if whole else "length"
    return dataclasses.replace(like, token_ids=ids, logprobs=logprobs, finish_reason=reason)


READ_OR_PLAY = sampling.read_or_play


class TreeRun(RecordedRun):
    def __init__(self, config: Config, root) -> None:
        super().__init__(config, root)
        Dice.tokenizer = self.tokenizer
        gold = [
            dataclasses.replace(question, answers=("gold",))
            for question in self.task.questions("train")
        ]
        world = Echo(kind="text")
        self.task: Any = types.SimpleNamespace(
            questions=lambda split: gold, environment=lambda question: world, rule=self.task.rule
        )
        self.generator = Dice()
        self.trainer = types.SimpleNamespace(
            score=lambda state, packed: np.zeros(packed.tokens.shape, np.float32)
        )

    def read_or_play(self, number: int, shard: int, play) -> tuple:
        entry, trajectories = READ_OR_PLAY(self, number, shard, play)  # pyright: ignore[reportArgumentType]
        self.asked.append((number, shard, shards.content_sha256(trajectories)))
        return entry, trajectories

    def intact_shard(self, number: int, shard: int):
        return self.store.find_shard(number, shard)

    def read_shards(self, entries: Any):
        return [record for entry in entries for record in self.store.read_shard(entry)]


def without_seconds(figures: dict) -> dict:
    return {name: value for name, value in figures.items() if name != "seconds"}


@pytest.fixture
def played(tmp_path):
    """Return a function that plays a configuration and returns the events of its run."""
    numbers = iter(range(1000))

    def play(config: Config) -> list:
        own: Any = TreeRun(config, tmp_path / str(next(numbers)))
        own.asked.append([result.row.name for result in decex.decex(own)])
        events = [str(event) for event in own.asked if "seconds" not in str(event)]
        for event in own.asked:
            if event[0] == "decex":
                events.append(str(without_seconds(event[2])))
        return events

    return play


@pytest.fixture(scope="module")
def config() -> Config:
    smoke = load_config(str(SMOKE))
    return dataclasses.replace(
        smoke,
        task=dataclasses.replace(smoke.task, environment="text"),
        agent=dataclasses.replace(AGENT, max_iterations=2),
        trainer=dataclasses.replace(smoke.trainer, sequence_length=1024, batch_size=2),
        pretraining=dataclasses.replace(smoke.pretraining, steps=0),
        warmup=dataclasses.replace(smoke.warmup, steps=0),
        sampling=dataclasses.replace(smoke.sampling, questions_per_round=6, questions_per_shard=4),
        method=dataclasses.replace(METHOD, epochs=2),
        eval=dataclasses.replace(smoke.eval, control=False),
    )


def test_every_field_of_the_method_changes_what_a_run_does(config, played):
    values = {
        "branches": 2,
        "rollouts": 3,
        "skip_above": 0.0,
        "score_both_branches": False,
        "remote": RemoteConfig(
            base_url="http://nowhere.invalid/v1", model="m", mode="chat", tokenizer="none"
        ),
        "expansion": "unpruned",
        "budget_tokens": 100,
        "sft": False,
        "retrievals": "least",
        "min_reward": 0.0,
        "learning_rate": 0.5,
        "end_learning_rate": 0.1,
        "epochs": 4,
        "dpo": False,
        "decision_pairs": False,
        "execution_pairs": False,
        "beta": 0.2,
        "dpo_learning_rate": 1e-3,
        "dpo_epochs": 2,
    }
    assert set(values) | {"kind"} == {field.name for field in dataclasses.fields(DecexTreeConfig)}
    high = changed(config, "method", min_reward=1.0)
    # The leaves of a pruned tree have one path.
    del values["retrievals"]
    assert_each_changes(
        high, "method", values | {"min_reward": 2.0}, lambda c: refused_or(played, c)
    )
    unpruned = changed(config, "method", expansion="unpruned")
    assert_each_changes(unpruned, "method", {"retrievals": "least"}, played)
    assert_each_changes(config, "sampling", {"questions_per_round": 2, "temperature": 0.5}, played)
    assert_each_changes(config, "agent", {"max_iterations": 1}, played)


def refused_or(play, config: Config) -> list:
    try:
        return play(config)
    except UserError as error:
        return [str(error)]


def test_the_phases_are_those_that_are_asked_for(config, played):
    def rows(**fields) -> str:
        return next(
            event
            for event in played(changed(config, "method", **fields))
            if event.startswith("['warm-up'")
        )

    assert rows() == "['warm-up', 'sft', 'dpo']"
    assert rows(sft=False) == "['warm-up', 'dpo']"
    assert rows(dpo=False) == "['warm-up', 'sft']"


def test_where_no_pair_is_left_dpo_is_skipped_with_a_line(config, played):
    events = played(changed(config, "method", decision_pairs=False, execution_pairs=False))
    assert "['warm-up', 'sft']" in events
    assert any("left no preference pair" in event for event in events)


@pytest.mark.parametrize("lost", [(), ("DONE.json", "shard-00001.parquet")])
def test_what_is_kept_is_not_grown_again_and_what_is_lost_is_grown_to_the_same(
    config, tmp_path, monkeypatch, lost
):
    def learnt(own: Any) -> list:
        decex.decex(own)
        return [event for event in own.asked if event[0] in ("sft", "dpo")]

    first = learnt(TreeRun(config, tmp_path))
    nodes = [
        pyarrow.parquet.read_table(file).num_rows for file in sorted((tmp_path / "trees").iterdir())
    ]
    entries = [
        shards.decode(file.read_bytes(), file.name)
        for file in sorted((tmp_path / "rounds/0001").glob("*.parquet"))
    ]
    assert nodes == [
        sum(record.counts["nodes"] for record in records if not is_pair(record))
        for records in entries
    ]
    for name in lost:
        (tmp_path / "rounds" / "0001" / name).unlink()
    asked: list[str] = []
    generate = Dice.generate

    async def heard(self, prompt, params, *, continues):
        asked.append(tokenizer_of_run(prompt))
        return await generate(self, prompt, params, continues=continues)

    monkeypatch.setattr(Dice, "generate", heard)
    second_run: Any = TreeRun(config, tmp_path)
    # The reference was scored.
    second_run.trainer = None
    assert learnt(second_run) == first
    assert len(first) == 2
    texts = {question.text for question in second_run.task.questions("train")[:6]}
    sampled_questions = {text for text in texts if any(text in prompt for prompt in asked)}
    assert len(sampled_questions) == (2 if lost else 0), "the second shard has two of six questions"


def test_trees_that_spend_their_budget_before_a_chain_are_told_of(config, played):
    early = changed(config, "method", expansion="full", budget_tokens=1, sft=False)
    (message,) = (event for event in played(early) if "have no chain" in event)
    (of_others,) = (
        event
        for event in played(changed(early, "method", budget_tokens=300))
        if "have no chain" in event
    )
    assert re.match(
        r"0 of 6 trees have no chain; [1-6] trees reached the limit of method\.budget_tokens",
        of_others,
    )
    assert re.match(
        r"[1-6] of 6 trees have no chain; [1-6] trees reached the limit of "
        r"method\.budget_tokens 1, and the parts that they grew",
        message,
    )


def test_trees_without_a_reward_are_answered_in_a_sentence(config, played, monkeypatch):
    monkeypatch.setattr(
        Dice, "generate", lambda self, *_, **__: asyncio.sleep(0, completion_of((1, 2), False))
    )
    with pytest.raises(UserError) as refused:
        played(config)
    assert str(refused.value) == (
        "the best chain of 6 trees earns 0.00, but method.min_reward is 0.5: raise method.branches "
        "(now 3) or warmup.steps (now 0), start from a stronger model, or lower method.min_reward"
    )


def test_a_second_model_writes_the_trees_of_a_run(config, played, monkeypatch):
    """The second model asks and answers rightly from memory.

    Its tokens are counted apart from the policy's.
    """

    class Replies:
        policy_version = -1

        async def generate(self, prompt, params, *, continues):
            await asyncio.sleep(0)
            goes_on = "no iteration so far" in tokenizer().decode(prompt)
            field = "<question> q? </question>" if goes_on else "<answer> gold </answer>"
            return completion(f"Because. {field}")

    endpoint = types.SimpleNamespace(generator=Replies(), tokenizer=tokenizer())
    monkeypatch.setattr(decex, "open_endpoint", lambda remote, out: endpoint)
    remote = RemoteConfig(base_url="http://localhost:1/v1", model="m", mode="chat", tokenizer="t")
    events = played(changed(config, "method", remote=remote))
    figures_line = next(event for event in events if "writer_tokens" in event)
    figures = ast.literal_eval(figures_line)
    assert figures["writer_tokens"] > figures["generated_tokens"] > 0
    assert figures["best_reward"] == 1.0
    assert figures["leaf_share"] == 1.0
    assert figures["chains"] == 6
    assert any(event.startswith("['warm-up', 'sft'") for event in events)


def test_a_run_says_what_its_pairs_prefer_and_how_many_chains_are_leaves(config, played):
    events = played(config)
    (line,) = (event for event in events if "the best chain ends at a leaf in" in event)
    figures = ast.literal_eval(next(event for event in events if "pairs_stop_over_go_on" in event))
    names = ("stop over go on", "go on over stop", "memory over search", "search over memory")
    counts = {name: int(line.partition(f"{name} ")[2].partition(",")[0]) for name in names}
    assert sum(counts.values()) == figures["decision_pairs"] > 0
    assert counts == {name: figures[f"pairs_{name.replace(' ', '_')}"] for name in names}
    assert f"a leaf in {figures['leaf_share']:.0%}" in line


def test_a_pair_that_exceeds_a_row_is_told_of(config, played):
    without_sft = changed(config, "method", sft=False)
    message = r"[1-9]\d* of \d+ pairs exceed 300 tokens and are left out"
    assert any(
        re.search(message, event)
        for event in played(changed(without_sft, "trainer", sequence_length=300))
    )
    assert not any("pairs exceed" in event for event in played(without_sft))


def test_a_run_whose_retriever_is_gone_ends_with_a_sentence(config, played, monkeypatch):
    async def fails(self, query, entity):
        raise RetrievalError("gone")

    monkeypatch.setattr(Echo, "search", fails)
    searching = "a </think>\n<search> x </search>"

    async def searches(self, prompt, params, *, continues):
        await asyncio.sleep(0)
        asking = tokenizer_of_run(prompt).endswith("assistant\n")
        ids = Dice.tokenizer.encode_model(f"<think> {ask('q')}{searching}" if asking else searching)
        return completion_of((*ids, Dice.tokenizer.end_of_turn_id), True)

    monkeypatch.setattr(Dice, "generate", searches)
    with pytest.raises(
        UserError, match=r"searches failed, each in 3 tries, and none of 4 trees could be finished"
    ):
        played(config)


def test_the_control_needs_demonstrations(config):
    with pytest.raises(UserError, match=r"eval\.control is True, but warmup\.steps is 0"):
        check(changed(config, "eval", control=True))


def test_a_mistake_ends_the_program_with_status_two(capsys):
    assert train.main([str(SMOKE), "--method.kind", "decex"]) == 2
    assert capsys.readouterr().err == (
        "error: method.kind decex grows its trees from the decisions of the agent decex, but "
        "agent.kind is mujica: add --agent.kind decex\n"
    )


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        ("agent", None, "agent.kind is mujica: add --agent.kind decex"),
        (
            "method",
            {"expansion": "full"},
            "method.expansion full grows 2 layers, each with 18 times the states",
        ),
        ("method", {"sft": False, "dpo": False}, "nothing is learnt from the trees"),
        (
            "method",
            {"remote": RemoteConfig(model="m")},
            "--method.remote.model is m, but there is no endpoint",
        ),
        ("method", {"branches": 0}, "method.branches is 0 and must be at least 1"),
        ("method", {"beta": 0.0}, "method.beta is 0.0 and must be above 0"),
        (
            "method",
            {"dpo_learning_rate": -1.0},
            "method.dpo_learning_rate is -1.0 and must be above 0",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_explained(config, section, fields, words):
    mujica = dataclasses.replace(config, agent=load_config(str(SMOKE)).agent)
    with pytest.raises(UserError) as refused:
        check(mujica if fields is None else changed(config, section, **fields))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        (
            {},
            "trainer.sequence_length is 1024, but both conversations of a preference pair must "
            "fit into one row and agent.max_trajectory_tokens is 2000",
        ),
        ({"dpo": False}, None),
        ({"decision_pairs": False, "execution_pairs": False}, None),
    ],
)
def test_a_row_must_hold_both_sides_of_a_pair(config, fields, refused):
    asked = changed(config, "method", **fields)
    if refused is None:
        check_demonstrations(asked)
    else:
        with pytest.raises(UserError) as error:
            check_demonstrations(asked)
        assert refused in str(error.value)
        assert "--trainer.sequence-length 4000" in str(error.value)
    check_demonstrations(changed(asked, "trainer", sequence_length=4000))
    # A finished run is evaluated all the same.
    check(asked)
