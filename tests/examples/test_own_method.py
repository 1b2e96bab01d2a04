"""Best-of-n sampling: which attempts are learnt."""

from examples.own_method.methods import best_attempts
from tests.helpers.episodes import episode


def test_the_best_attempt_at_each_question_is_learnt_if_its_reward_is_high_enough():
    attempts = [
        episode(question_id="a", attempt=0, reward=0.5),
        episode(question_id="a", attempt=1, reward=1.0),
        episode(question_id="a", attempt=2, reward=1.0),
        episode(question_id="b", attempt=0, reward=0.4),
        episode(question_id="c", attempt=0, reward=0.6, counts={"judge_failed": 1.0}),
        episode(question_id="d", attempt=0, reward=0.7),
    ]
    best = best_attempts(attempts, min_reward=0.5)
    assert [(trajectory.question_id, trajectory.attempt) for trajectory in best] == [
        ("a", 1),
        ("d", 0),
    ]
