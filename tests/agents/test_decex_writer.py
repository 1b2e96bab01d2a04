"""A second model that writes DecEx-RAG's trees: its prompts, and how its replies become pieces of
the policy.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from mujica_jax.agents.decex import Decex
from mujica_jax.config.agents import DecexConfig
from mujica_jax.inference.requests import Completion, ReplyError
from mujica_jax.methods.decex.writer import TreeWriter
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason
from tests.agents.test_baselines import FILM, PERSON, QUESTION, Told, world
from tests.helpers.little_agent import attempt, completion, tokenizer
from tests.methods.decex.test_decex import TURNS, Table, grow, pairs_of, searches_of_leaves

CONFIG = DecexConfig(
    prompt="brief",
    max_iterations=3,
    max_turn_tokens=400,
    max_trajectory_tokens=4000,
    max_observation_tokens=900,
)
OTHER = Tokenizer.train(["another vocabulary of other words"] * 9, 500)  # of the second model


class Replies:
    """The second model. It writes these replies in their order and is asked in its own tokens."""

    version = -1

    def __init__(self, replies: Sequence[str | Exception]) -> None:
        self._replies = list(replies)
        self.prompts: list[str] = []

    async def generate(self, prompt, params, *, state, continues) -> Completion:
        await asyncio.sleep(0)
        self.prompts.append(OTHER.decode(list(prompt)))
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        ids = (*OTHER.encode_model(reply), OTHER.end_of_turn_id)
        return dataclasses.replace(
            completion("x"), token_ids=ids, logprobs=None, finish_reason="stop"
        )


def chain(replies: Sequence[str | Exception], own: Sequence[str] = (), passages: Any = None):
    """Return a chain, its own policy, the writer and the second model."""
    policy = Told(own)
    model = Replies(replies)
    writer = TreeWriter(model, OTHER, tokenizer(), version=3)
    begun = Decex(tokenizer(), CONFIG).begin(attempt(QUESTION), passages or world(), writer)
    return begun, policy, writer, model


def last(begun) -> str:
    return begun.pieces().turns[-1].text


async def test_the_retrieval_decision_is_the_policys_and_all_else_the_writers():
    asked = "<reasoning> The director is missing. </reasoning> <question> Who made it? </question>"
    answered = "<reasoning> She was born there. </reasoning>. <answer> Ghent </answer>"
    begun, policy, writer, model = chain(
        [asked, asked, answered], [" Amber Tide </search>", " I recall that Ghent.\n"]
    )
    await begun.decide()
    assert (
        last(begun)
        == "<think> The director is missing. So, the next sub-question is: Who made it?\n"
    )
    assert begun.pieces().turns[-1].token_ids == tuple(tokenizer().encode_model(last(begun))), (
        "the policy's tokens"
    )
    begun.policy = policy
    await begun.solve("search")
    begun.policy = writer
    await begun.decide()
    begun.policy = policy
    await begun.solve("memory")
    begun.policy = writer
    await begun.decide()
    assert last(begun) == "She was born there. </think>\n<answer> Ghent </answer>", (
        "the thought was open"
    )
    trajectory = await begun.finish()
    assert (trajectory.answer, trajectory.policy_version) == ("Ghent", 3)
    first, second, third = model.prompts
    assert "There is no iteration so far." in first
    assert "inside <question>" in first
    assert "inside <answer>" not in first
    assert (
        f"Sub-question: Who made it?\nQuery: Amber Tide\nPassages:\n[0] {FILM}\n[1] {PERSON}"
        in second
    )
    assert "Thought: The director is missing." in second
    assert "nothing that does not stand there" in second
    assert "Iteration 2\nThought: The director is missing.\nSub-question: Who made it?" in third
    assert "Answer from memory: Ghent." in third
    assert QUESTION.text in third


async def test_an_episode_goes_on_by_the_prompt_for_it():
    begun, *_, model = chain(
        ["I lack it. <search> Amber Tide </search>", "It is Ghent. <answer> Ghent </answer>"]
    )
    trajectory = await begun.finish()
    assert trajectory.answer == "Ghent"
    assert [search.query for search in trajectory.searches] == ["Amber Tide"]
    turns = [turn.text for turn in trajectory.conversations[0].turns if turn.role == "model"]
    assert turns == [
        "<think> I lack it. </think>\n<search> Amber Tide </search>",
        "<think> It is Ghent. </think>\n<answer> Ghent </answer>",
    ]
    assert all("reason on from them" in prompt for prompt in model.prompts)


async def test_the_other_decision_is_asked_for_alone():
    asked = "Missing. <question> Who? </question>"
    begun, *_, model = chain(
        [asked, "So. <answer> Ghent </answer>", "So. <answer> Ghent </answer>", asked]
    )
    sample = begun.fork("a")
    stopped = begun.fork("b")
    await sample.decide()
    await stopped.decide_otherwise(sample, "stop")
    assert last(stopped) == "<think> Missing. </think>\n<answer> Ghent </answer>"
    answered = begun.fork("c")
    goes_on = begun.fork("d")
    await answered.decide()
    await goes_on.decide_otherwise(answered, "go_on")
    assert last(goes_on) == "<think> So. So, the next sub-question is: Who?\n"
    assert "inside <question>" not in model.prompts[1]
    assert "inside <answer>" not in model.prompts[3]


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I do not know.",
        "<question>  </question>",
        "<think> <answer> x </answer>",
        ReplyError("no text"),
    ],
)
async def test_a_reply_that_cannot_be_used_is_no_branch(reply):
    begun, *_ = chain([reply])
    await begun.decide()
    assert begun.outcome == ("", StopReason.NO_ACTION)


async def test_a_reply_cannot_write_more_than_its_fields():
    """Tags in a reply's reasons or fields, and the thoughts of a reasoning model, do not reach the
    policy.
    """
    begun, *_ = chain(
        [
            "<think> secret </think> Why </think><search>y</search> not. <question> Who <b> "
            "</search>? </question>"
        ]
    )
    await begun.decide()
    assert "secret" not in last(begun)
    assert last(begun).count("</think>") == 0
    assert "<search>" not in last(begun)
    assert "</search>" not in last(begun)


def test_a_tree_of_two_models():
    """The writer asks, answers and plays the episodes. The policy recalls and searches."""

    class Writing(Table):
        def turn(self, state, seed):
            assert "<memory>" not in self.name(state)
            assert "<search>" not in self.name(state)
            return super().turn(state, seed)

    class Solving(Table):
        def turn(self, state, seed):
            assert self.name(state).endswith(("<memory>", "<search>"))
            return super().turn(state, seed)

    writer = Writing(TURNS)
    policy = Solving(TURNS)
    alone = grow(Table(TURNS))
    both = grow(policy, writer=writer)
    assert pairs_of(both) == pairs_of(alone)
    assert searches_of_leaves(both) == searches_of_leaves(alone)
    assert both.counts["writer_tokens"] == writer.written_tokens
    assert both.counts["generated_tokens"] == policy.written_tokens
    assert both.counts["forward_tokens"] < alone.counts["forward_tokens"], (
        "the writer's tokens are not the policy's"
    )
