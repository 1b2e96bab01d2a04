from hypothesis import given
from hypothesis import strategies as st

from mujica_jax.rewards import BEST_REWARD, f1_reward


def test_reward_is_the_f1_of_the_answer():
    assert f1_reward("Cemetery of Athens", ["First Cemetery of Athens"], "two_wiki") == 2 * 1.0 * 0.75 / 1.75


def test_the_best_alias_counts():
    assert f1_reward("Motor City", ["Detroit", "Motor City"], "two_wiki") == BEST_REWARD


@given(st.text(max_size=30), st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_no_answer_earns_more_than_the_best_reward(answer, golds):
    assert 0.0 <= f1_reward(answer, golds, "two_wiki") <= BEST_REWARD
