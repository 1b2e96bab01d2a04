"""The agent that tries again: how often it plays, and what it records."""

import dataclasses
import types

import pytest

from examples.retry_agent import agents
from examples.retry_agent.agents import Retry, RetryConfig
from mujica_jax.agents.agent import Attempt
from mujica_jax.records import Question, StopReason
from tests.helpers.episodes import episode


class PlayedMujica:
    """Ends its episodes as `ends` says, in order, and notes their seeds."""

    def __init__(self, ends: list[StopReason]) -> None:
        self.ends = ends
        self.seeds: list[int] = []

    async def run(self, attempt, environment, policy):
        self.seeds.append(attempt.seed)
        return episode(seed=attempt.seed, stop_reason=self.ends[len(self.seeds) - 1])


@pytest.mark.parametrize(
    ("ends", "tries"),
    [
        ([StopReason.ANSWERED], 1),
        ([StopReason.NO_ACTION, StopReason.ANSWERED], 2),
        ([StopReason.NO_ACTION] * 4, 3),
    ],
)
async def test_it_plays_until_there_is_an_answer_or_its_tries_are_used(monkeypatch, ends, tries):
    mujica = PlayedMujica(ends)
    monkeypatch.setattr(agents, "Mujica", lambda tokenizer, config: mujica)
    config = types.SimpleNamespace(max_tries=3)
    attempt = Attempt(
        question=Question(id="q", text="?", answers=("a",)), number=0, seed=7, temperature=1.0
    )
    trajectory = await Retry(None, config).run(attempt, None, None)  # type: ignore[arg-type]
    assert mujica.seeds == [7, 8, 9][:tries]
    assert trajectory.counts["tries"] == tries
    assert trajectory.stop_reason is ends[tries - 1]
    assert trajectory.seed == 7


def test_its_settings_are_those_of_mujica_and_the_number_of_tries():
    names = {field.name for field in dataclasses.fields(RetryConfig)}
    assert "max_tries" in names
    assert "max_iterations" in names
