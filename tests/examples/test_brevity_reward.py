"""The reward that charges for long episodes, against numbers worked out by hand."""

import pytest

from examples.brevity_reward.rewards import brevity
from mujica_jax.metrics import Score
from mujica_jax.records import Conversation, Reward, Trajectory, Turn
from tests.helpers import episodes


def episode_of(tokens: int) -> Trajectory:
    """Return an episode in which the model wrote this many tokens, and read five more."""
    read = Turn(role="context", token_ids=(1,) * 5, text="")
    written = Turn(role="model", token_ids=(2,) * tokens, text="", trained=True)
    return episodes.episode(Conversation(role="planner", turns=(read, written)))


@pytest.mark.parametrize(
    ("tokens", "f1", "total", "cost"),
    [(200, 1.0, 1.0, 0.0), (300, 1.0, 0.9, 0.1), (5000, 1.0, 0.5, 0.5), (5000, 0.2, 0.0, 0.5)],
)
def test_an_episode_pays_for_its_tokens_above_the_free_ones(tokens, f1, total, cost):
    reward = brevity(Score(em=0.0, f1=f1, precision=f1, recall=f1), episode_of(tokens))
    assert reward == Reward(
        total=pytest.approx(total), parts={"f1": f1, "length": pytest.approx(-cost)}
    )
