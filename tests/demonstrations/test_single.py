"""Demonstrations of the agent that decides itself whether to search: common knowledge from memory,
all else by keywords.
"""

import asyncio
import dataclasses
from collections.abc import Mapping

import pytest

from mujica_jax.agents.single import Single
from mujica_jax.config.agents import SingleConfig
from mujica_jax.demonstrations.policy import ScriptedPolicy
from mujica_jax.records import Evidence, Question, StopReason, Trajectory
from mujica_jax.tasks.task import Environment, Material
from tests.helpers.little_agent import LittleWorld, attempt, rewarded, tokenizer
from tests.helpers.tiny_worlds import small_world

LIMITS = SingleConfig(
    prompt="brief", max_turn_tokens=900, max_trajectory_tokens=6000, max_observation_tokens=3000
)
CHAIN = (("Amber Tide", "director", "Ilse Vand"), ("Ilse Vand", "place of birth", "Ghent"))
QUESTION = Question(
    id="q-1",
    text="Where was the director of Amber Tide born?",
    answers=("Ghent",),
    kind="compositional",
    evidences=tuple(Evidence(subject=s, relation=r, object=o) for s, r, o in CHAIN),
)
FILM = Material(text="Amber Tide: The director of Amber Tide is Ilse Vand.", title="Amber Tide")
DIRECTOR = Material(text="Ilse Vand: The place of birth of Ilse Vand is Ghent.", title="Ilse Vand")


def play(question: Question, world: Environment, style="reflect", **noise) -> Trajectory:
    player = Single(tokenizer(), dataclasses.replace(LIMITS, style=style))
    return asyncio.run(
        player.run(attempt(question, temperature=0.0), world, ScriptedPolicy(tokenizer(), **noise))
    )


def text_world(materials_by_query: Mapping[str, tuple[Material, ...]]) -> LittleWorld:
    return LittleWorld(materials_by_query, kind="text")


def turns(trajectory: Trajectory) -> list[str]:
    return [turn.text for turn in trajectory.conversations[0].turns if turn.role == "model"]


def test_it_searches_step_by_step_and_says_what_it_learnt():
    world = text_world({"Amber Tide director": (FILM,), "Ilse Vand place of birth": (DIRECTOR,)})
    assert turns(play(QUESTION, world)) == [
        "<think> The director of Amber Tide is unknown. </think>\n"
        "<search> Amber Tide director </search>",
        "<reflect> The director of Amber Tide is Ilse Vand. The place of birth of Ilse Vand is "
        "unknown. </reflect>\n"
        "<search> Ilse Vand place of birth </search>",
        "<reflect> The place of birth of Ilse Vand is Ghent. Ghent. </reflect>\n"
        "<answer> Ghent </answer>",
    ]


def test_common_knowledge_is_answered_from_memory():
    trajectory = play(dataclasses.replace(QUESTION, kind="compositional, known"), text_world({}))
    assert turns(trajectory) == [
        "<think> The director of Amber Tide is Ilse Vand. The place of birth of Ilse Vand is "
        "Ghent. </think>\n"
        "<reflect> Ghent. </reflect>\n"
        "<answer> Ghent </answer>"
    ]


def test_a_share_of_what_is_common_knowledge_is_searched_for():
    world = text_world({"Amber Tide director": (FILM, DIRECTOR)})
    known = [
        dataclasses.replace(QUESTION, id=f"q-{n}", kind="compositional, known") for n in range(200)
    ]
    trajectories = [play(question, world, miss_rate=0.3) for question in known]
    assert (
        0.2
        < sum(bool(trajectory.searches) for trajectory in trajectories) / len(trajectories)
        < 0.4
    )
    assert all(trajectory.answer == "Ghent" for trajectory in trajectories)


def test_one_search_that_states_two_facts_is_enough():
    assert len(play(QUESTION, text_world({"Amber Tide director": (FILM, DIRECTOR)})).searches) == 1


def test_a_search_in_vain_is_repeated_once_and_then_given_up():
    world = text_world({"Amber Tide director": (DIRECTOR,), "Amber Tide": (FILM,)})
    trajectory = play(QUESTION, world)
    assert [search.query for search in trajectory.searches] == ["Amber Tide director", "Amber Tide"]
    assert trajectory.answer == "Ghent"
    nothing = play(QUESTION, text_world({}))
    assert (nothing.stop_reason, len(nothing.searches)) == (StopReason.NO_ACTION, 2)


@pytest.mark.parametrize("style", ["reflect", "search_r1"])
def test_demonstrations_of_the_tiny_world_are_right_and_well_formed(style):
    world = small_world(50, 60, 10, facts=4, environment="text", common_knowledge=0.5)
    known = []
    for question, environment in world.demonstrations():
        trajectory = rewarded(play(question, environment, style), question, "f1_format")
        assert trajectory.reward == 1.0, (question, turns(trajectory))
        is_known = question.kind.endswith("known")
        assert (len(trajectory.searches) == 0) == is_known
        known.append(is_known)
    assert 0 < sum(known) < len(known)
