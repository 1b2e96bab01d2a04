import pytest

from mujica_jax.records import Conversation, Trajectory
from mujica_jax.trajectories.select import (
    accepts,
    mean_first_attempt_reward,
    select,
    threshold,
    training_rows,
)
from tests.helpers.episodes import episode
from tests.helpers.packed_rows import conversation


def trajectory(
    question: str,
    attempt: int,
    reward: float,
    planner: int | None = None,
    workers: tuple[Conversation, ...] = (),
) -> Trajectory:
    """Return a trajectory. Its planner conversation is its own, unless `planner` says which."""
    token = attempt if planner is None else planner
    conversations = conversation((1, 2), (token,)), *workers
    return episode(*conversations, question_id=question, attempt=attempt, reward=reward)


def attempts(selected: list[Trajectory]) -> list[tuple[str, int]]:
    return [(chosen.question_id, chosen.attempt) for chosen in selected]


@pytest.mark.parametrize(
    ("previous", "mean", "best", "expected"),
    [
        (0.0, 0.4, 1.0, 0.7),  # the midpoint of 0.4 and 1
        (0.8, 0.4, 1.0, 0.8),  # it never falls
        (0.0, 0.0, 1.0, 0.5),
        (0.0, 1.0, 1.0, 1.0),
        (0.0, 1.0, 2.0, 1.5),  # another best reward: the midpoint of 1 and 2
    ],
)
def test_the_threshold_is_the_midpoint_of_mean_and_best_and_never_falls(
    previous, mean, best, expected
):
    assert threshold(
        previous_k=previous, mean_first_attempt_reward=mean, best_reward=best
    ) == pytest.approx(expected)


def test_a_reward_must_lie_above_the_threshold():
    assert not accepts(0.7, k=0.7, best_reward=1.0)
    assert accepts(0.71, k=0.7, best_reward=1.0)


def test_the_best_reward_is_accepted_even_where_the_threshold_is_that_high():
    assert accepts(1.0, k=1.0, best_reward=1.0)


def test_only_first_attempts_count_in_the_mean():
    sampled = [
        trajectory("a", 0, 1.0),
        trajectory("b", 0, 0.0),
        trajectory("b", 1, 1.0),
        trajectory("c", 0, 0.2),
    ]
    assert mean_first_attempt_reward(sampled) == pytest.approx(0.4)
    assert mean_first_attempt_reward([]) == 0.0


def test_the_earliest_accepted_attempts_of_a_question_are_kept():
    sampled = [
        trajectory("a", 3, 1.0),
        trajectory("a", 0, 0.1),
        trajectory("a", 2, 1.0),
        trajectory("a", 1, 0.9),
    ]
    assert attempts(select(sampled, k=0.5, keep_per_question=2, best_reward=1.0)) == [
        ("a", 1),
        ("a", 2),
    ]


def test_each_question_has_a_limit_of_its_own():
    sampled = [trajectory(question, attempt, 1.0) for attempt in range(3) for question in "ba"]
    assert attempts(select(sampled, k=0.5, keep_per_question=1, best_reward=1.0)) == [
        ("b", 0),
        ("a", 0),
    ]


def test_a_repeated_planner_conversation_does_not_use_up_the_limit():
    sampled = [trajectory("a", attempt, 1.0, planner=attempt // 2) for attempt in range(6)]
    assert attempts(select(sampled, k=0.5, keep_per_question=2, best_reward=1.0)) == [
        ("a", 0),
        ("a", 2),
    ]


def test_the_same_planner_conversation_may_serve_two_questions():
    sampled = [trajectory("a", 0, 1.0, planner=7), trajectory("b", 0, 1.0, planner=7)]
    assert len(select(sampled, k=0.5, keep_per_question=3, best_reward=1.0)) == 2


def test_planner_and_every_worker_become_rows():
    workers = (conversation((3,), (4,)), conversation((5,), (6,)))
    with_workers = trajectory("a", 0, 1.0, workers=workers)
    without_workers = trajectory("b", 0, 1.0)
    assert training_rows([with_workers, without_workers]) == [
        with_workers.conversations[0],
        *workers,
        without_workers.conversations[0],
    ]
