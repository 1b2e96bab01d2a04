"""Rewards against numbers worked out by hand, from what an episode's record says."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mujica_jax.errors import UserError
from mujica_jax.records import Question, Reward, StopReason, Trajectory
from mujica_jax.rewards.reward import REWARDS, NoVerdict, NoVerdictError, find_reward
from tests.helpers import episodes
from tests.helpers.plug_in_modules import write_module as write_module


def episode(answer: str, reason: StopReason = StopReason.ANSWERED, **counts: float) -> Trajectory:
    return episodes.episode(answer=answer, counts=counts, stop_reason=reason)


def asked(*answers: str) -> Question:
    return Question(id="q", text="Where?", answers=answers)


# episode -> f1, em, f1_format = 0.9 F1 + 0.1 if every turn was well-formed
EPISODES = {
    "right": (episode("Ghent"), 1.0, 1.0, 1.0),
    "half of it": (
        episode("Ghent, Belgium"),
        2 / 3,
        0.0,
        0.9 * 2 / 3 + 0.1,
    ),  # precision 1/2, recall 1
    "wrong": (episode("Rome"), 0.0, 0.0, 0.1),
    "right with a malformed worker": (episode("Ghent", malformed_workers=1.0), 1.0, 1.0, 0.9),
    "right, and something else was counted": (
        episode("Ghent", malformed_workers=0.0, searches=3.0),
        1.0,
        1.0,
        1.0,
    ),
    "no time left": (episode("", StopReason.ITERATION_LIMIT), 0.0, 0.0, 0.1),
    "a turn that holds nothing": (episode("", StopReason.NO_ACTION), 0.0, 0.0, 0.0),
    "a turn that was cut off": (episode("Ghent", StopReason.TURN_LENGTH), 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("episode_name", EPISODES)
def test_what_an_episode_earns(episode_name):
    trajectory, f1, em, f1_format = EPISODES[episode_name]
    rewards = {name: find_reward(name, "two_wiki")(trajectory, asked("Ghent")) for name in REWARDS}
    assert {name: reward.total for name, reward in rewards.items()} == pytest.approx(
        {"f1": f1, "em": em, "f1_format": f1_format}
    )
    well_formed = float(f1_format > 0.9 * f1)
    assert rewards["f1"].parts == {"f1": pytest.approx(f1)}
    assert rewards["em"].parts == {"em": em}
    assert rewards["f1_format"].parts == {"f1": pytest.approx(f1), "format": well_formed}


@pytest.mark.parametrize("name", REWARDS)
def test_an_episode_whose_search_failed_earns_nothing_under_any_reward(name):
    failed = episode("Ghent", StopReason.RETRIEVER_FAILED)
    assert find_reward(name, "two_wiki")(failed, asked("Ghent")) == Reward(total=0.0)
    rewarded = asyncio.run(find_reward(name, "two_wiki").rewarded(failed, asked("Ghent")))
    assert rewarded == failed
    assert not rewarded.is_rewarded


def test_a_reward_that_raises_the_old_name_has_no_verdict(monkeypatch):
    def without_verdict(answer, trajectory):
        raise NoVerdict("nobody answered")

    monkeypatch.setitem(REWARDS, "old", without_verdict)
    judged = asyncio.run(find_reward("old", "two_wiki").rewarded(episode("Ghent"), asked("Ghent")))
    assert not judged.is_rewarded and judged.counts["judge_failed"] == 1.0


def test_a_reward_may_be_waited_for_and_may_have_no_verdict(monkeypatch):
    """A slow reward gives its number.

    One that cannot be had marks the episode, which keeps how it ended.
    """

    async def slow(answer, trajectory):
        await asyncio.sleep(0)
        if trajectory.answer == "unknown":
            raise NoVerdictError("nobody answered")
        return Reward(total=answer.f1 / 2, parts={"half": answer.f1 / 2})

    monkeypatch.setitem(REWARDS, "slow", slow)
    reward = find_reward("slow", "two_wiki")
    right = asyncio.run(reward.rewarded(episode("Ghent"), asked("Ghent")))
    assert right.reward == 0.5
    assert right.rewards_by_part == {"half": 0.5}
    assert right.is_rewarded is True
    without = asyncio.run(reward.rewarded(episode("unknown", turns=2.0), asked("Ghent")))
    assert without.reward == 0.0
    assert without.rewards_by_part == {}
    assert without.is_rewarded is False
    assert without.counts == {"turns": 2.0, "judge_failed": 1.0}
    assert without.final_answer == "unknown"


@pytest.mark.parametrize(
    "result", [0.5, Reward(total=float("nan")), Reward(total="1"), Reward(total=1.0, parts=None)]
)
def test_what_is_no_reward_is_refused_by_its_name(monkeypatch, result):
    monkeypatch.setitem(REWARDS, "own", lambda answer, trajectory: result)
    with pytest.raises(
        UserError, match=r"the reward <lambda> gave .*; it must return a Reward of finite numbers"
    ):
        find_reward("own", "two_wiki")(episode("Ghent"), asked("Ghent"))
    result = Reward(total=np.float32(0.5), parts={"one": np.int64(1)})
    assert find_reward("own", "two_wiki")(episode("Ghent"), asked("Ghent")) == result


def test_a_users_own_reward_is_named_by_its_module(write_module):
    write_module(
        "own_rewards",
        "from mujica_jax.records import Reward\n"
        "def half(score, trajectory): return Reward(total=score.f1 / 2)\n"
        "def weighed(score, trajectory, weight=2.0): return Reward(total=score.f1 / weight)\n"
        "async def slow(score, trajectory): return Reward(total=score.em / 4)\n"
        "def asking(score, trajectory, question):\n"
        "    return Reward(total=float(question.text == 'Where?'), parts={'f1': score.f1})\n",
    )
    totals = {}
    for name in ("half", "weighed", "slow", "asking"):
        reward = find_reward(f"own_rewards:{name}", "two_wiki")
        totals[name] = asyncio.run(reward.rewarded(episode("Ghent"), asked("Ghent"))).reward
    assert totals == {"half": 0.5, "weighed": 0.5, "slow": 0.25, "asking": 1.0}


def test_a_users_own_reward_that_returns_no_reward_is_refused_at_its_first_use(write_module):
    write_module("numbers_alone", "def half(score, trajectory): return score.f1 / 2\n")
    reward = find_reward("numbers_alone:half", "two_wiki")
    with pytest.raises(UserError, match=r"the reward half gave 0.5; it must return a Reward of"):
        asyncio.run(reward.rewarded(episode("Ghent"), asked("Ghent")))


def test_the_best_alias_counts_and_the_rule_of_the_task_decides():
    assert (
        find_reward("f1", "two_wiki")(episode("Motor City"), asked("Detroit", "Motor City")).total
        == 1.0
    )
    assert find_reward("em", "two_wiki")(episode("Ghent, Belgium"), asked("Ghent")).total == 0.0
    assert find_reward("em", "cover_em")(episode("Ghent, Belgium"), asked("Ghent")).total == 1.0


@given(
    st.text(max_size=30),
    st.lists(st.text(max_size=30), min_size=1, max_size=3),
    st.sampled_from(StopReason),
    st.booleans(),
)
def test_no_episode_earns_more_than_the_best_reward(answer, golds, reason, malformed):
    for name in REWARDS:
        reward = find_reward(name, "two_wiki")
        earned = reward(episode(answer, reason, malformed_workers=float(malformed)), asked(*golds))
        assert 0.0 <= earned.total <= reward.best
