"""MyGO's rule, played by hand: three rounds over two questions whose rewards stand in a table."""

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from mujica_jax.agents.agent import Attempt
from mujica_jax.config.schema import MygoConfig, SamplingConfig
from mujica_jax.learning.optimizer import learning_rate, schedule
from mujica_jax.methods import mygo
from mujica_jax.records import Conversation, Question, StopReason, Trajectory, Turn
from mujica_jax.runs.round_statistics import advice, in_words, round_statistics
from mujica_jax.trajectories.select import select
from tests.helpers.episodes import episode
from tests.helpers.fake_runs import call_fakes

METHOD = MygoConfig(
    rounds=3,
    max_attempts=6,
    keep_per_question=2,
    learning_rate=1.0,
    end_learning_rate=0.0,
    epochs=1,
    replay=0.0,
)
QUESTIONS = [Question(id=name, text=name, answers=(name,)) for name in ("easy", "hard")]


@pytest.fixture(autouse=True)
def recipes_call_the_fake(monkeypatch):
    call_fakes(monkeypatch)


def trajectory(attempt: Attempt, reward: float, token: int) -> Trajectory:
    turn = Turn(role="model", token_ids=(token,), text=str(token), trained=True)
    return episode(
        Conversation(role="planner", turns=(turn,)),
        question_id=attempt.question.id,
        attempt=attempt.number,
        seed=attempt.seed,
        reward=reward,
    )


class Played:
    """Stands in for a `Run`: episodes come from `rewards[question][attempt]`.

    None is an attempt whose search failed. It keeps what was asked.
    """

    def __init__(
        self, rewards: Mapping[str, Sequence[float | None]], token_of: Callable[[Attempt], int]
    ) -> None:
        self.rewards = rewards
        self.token_of = token_of
        self.asked: list[tuple[str, int]] = []
        self.done: dict[int, Any] = {}
        self.config = types.SimpleNamespace(
            method=METHOD,
            sampling=SamplingConfig(questions_per_round=2, questions_per_shard=2, temperature=1.0),
            seed=0,
        )
        self.task = types.SimpleNamespace(questions=lambda split: QUESTIONS)
        self.reward = types.SimpleNamespace(best=1.0)
        self.store = types.SimpleNamespace(
            read_done=lambda number: None,
            write_plan=lambda number, plan: None,
            write_done=self._write_done,
            create=lambda name, data: True,
            write_json_once=lambda name, value: True,
        )
        stage = types.SimpleNamespace(update=lambda *values, **figures: None)
        self.progress = types.SimpleNamespace(
            stage=lambda *names, **figures: contextlib.nullcontext(stage), line=lambda text: None
        )
        self.preemption = types.SimpleNamespace(enter=lambda *names, **options: None)
        self.counters = types.SimpleNamespace(figures=dict)
        self.metrics = types.SimpleNamespace(flush=lambda: None)

    def use_policy(self, state: object, version: int) -> None: ...

    def counted(self, kind: str, step: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _write_done(
        self, number: int, entries: object, *, mean_reward: float, threshold: float
    ) -> None:
        self.done[number] = (mean_reward, threshold)

    def _play(self, attempt: Attempt) -> Trajectory:
        self.asked.append((attempt.question.id, attempt.number))
        reward = self.rewards[attempt.question.id][attempt.number]
        played = trajectory(attempt, reward or 0.0, self.token_of(attempt))
        if reward is None:
            return dataclasses.replace(played, stop_reason=StopReason.RETRIEVER_FAILED)
        return played

    def play_attempts(
        self, number: int, shard: int, attempts: Sequence[Attempt], heard: object
    ) -> Any:
        return None, [self._play(attempt) for attempt in attempts]

    def play_waves(
        self,
        number: int,
        shard: int,
        wave: Callable[[list[Trajectory]], list[Attempt]],
        heard: object,
    ):
        played: list[Trajectory] = []
        while attempts := wave(played):
            played += [self._play(attempt) for attempt in attempts]
        return None, played


def sampled(
    rewards: Mapping[str, Sequence[float | None]],
    *,
    k: float = 0.0,
    token_of=lambda attempt: attempt.number,
    method=METHOD,
):
    run: Any = Played(rewards, token_of)
    run.config.method = method
    nothing: Any = None
    sampled = mygo.sample_round(run, nothing, 1, version=0, previous_k=k)
    return run, sampled.trajectories, sampled.threshold


def attempts_of(run: Played, question: str) -> list[int]:
    return [number for name, number in run.asked if name == question]


def test_the_threshold_is_the_midpoint_of_the_first_attempts_mean_and_the_best_reward():
    run, _, k = sampled({"easy": [1.0] * 6, "hard": [0.5, *[1.0] * 5]})
    # This is (0.75 + 1) / 2. The later attempts, all right, have no part in it.
    assert k == 0.875
    assert run.done[1] == (0.75, 0.875)


def test_the_threshold_never_falls():
    assert sampled({"easy": [0.0] * 6, "hard": [0.0] * 6}, k=0.9)[2] == 0.9
    assert sampled({"easy": [0.0] * 6, "hard": [0.0] * 6}, k=0.2)[2] == 0.5


def test_a_question_stops_at_m_kept_trajectories_and_at_the_configured_attempts():
    # easy: attempts 0 and 1 pass K = 0.5 + 0.9/4 = 0.725; hard never does. Waves are 1, 2, then
    # what is left: 6 in all.
    run, trajectories, k = sampled({"easy": [0.9] * 6, "hard": [0.0] * 6})
    assert k == pytest.approx(0.725)
    assert attempts_of(run, "easy") == [0, 1]
    assert attempts_of(run, "hard") == [0, 1, 2, 3, 4, 5]
    accepted = select(trajectories, k=k, keep_per_question=2, best_reward=1.0)
    assert [(t.question_id, t.attempt) for t in accepted] == [("easy", 0), ("easy", 1)]


def test_a_reward_at_the_threshold_is_not_kept_unless_it_is_the_best():
    run, trajectories, k = sampled({"easy": [0.5] * 6, "hard": [0.5, 0.75, 1.0, 0.76, 0.0, 0.0]})
    assert k == 0.75
    accepted = select(trajectories, k=k, keep_per_question=2, best_reward=1.0)
    assert [(t.question_id, t.attempt) for t in accepted] == [("hard", 2), ("hard", 3)]
    assert select(trajectories, k=1.0, keep_per_question=2, best_reward=1.0)[0].attempt == 2


def test_a_repetition_does_not_count_towards_m():
    """The easy question says the same thing in attempts 0, 1 and 2.

    It is tried until a second text is kept.
    """
    run, trajectories, k = sampled(
        {"easy": [1.0] * 6, "hard": [1.0] * 6},
        token_of=lambda attempt: max(2, attempt.number) + 10 * len(attempt.question.id),
    )
    assert attempts_of(run, "easy") == attempts_of(run, "hard") == [0, 1, 2, 3]
    accepted = select(trajectories, k=k, keep_per_question=2, best_reward=1.0)
    assert [(t.question_id, t.attempt) for t in accepted] == [
        ("easy", 0),
        ("easy", 3),
        ("hard", 0),
        ("hard", 3),
    ]


def test_an_attempt_whose_search_failed_moves_no_threshold_and_costs_an_attempt():
    """The first attempt at the hard question fails, so the mean is the easy one's alone.

    Both are tried until two are kept: of the hard one these are attempts 1 and 2.
    """
    run, trajectories, k = sampled(
        {"easy": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0], "hard": [None, 1.0, 1.0, 1.0, 1.0, 1.0]}
    )
    assert k == 0.75
    assert run.done[1] == (0.5, 0.75)
    accepted = select(trajectories, k=k, keep_per_question=2, best_reward=1.0)
    assert [(t.question_id, t.attempt) for t in accepted] == [
        ("easy", 1),
        ("easy", 2),
        ("hard", 1),
        ("hard", 2),
    ]
    assert len(trajectories) == len(run.asked), "it stays in the records"


def test_a_fixed_threshold_does_not_follow_the_policy():
    fixed = dataclasses.replace(METHOD, threshold="fixed", initial_threshold=0.25)
    run, _, k = sampled({"easy": [0.3] * 6, "hard": [0.25] * 6}, k=0.0, method=fixed)
    assert k == 0.25
    assert attempts_of(run, "easy") == [0, 1]
    assert attempts_of(run, "hard") == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        (
            "online",
            ["sample 1 by 0", "learn 1", "sample 2 by 1", "learn 2", "sample 3 by 2", "learn 3"],
        ),
        (
            "asynchronous",
            ["sample 1 by 0", "sample 2 by 0", "learn 1", "sample 3 by 1", "learn 2", "learn 3"],
        ),
        (
            "offline",
            ["sample 1 by 0", "sample 2 by 0", "sample 3 by 0", "learn 1", "learn 2", "learn 3"],
        ),
    ],
)
def test_a_schedule_says_which_policy_samples_a_round_and_when(monkeypatch, schedule, order):
    happened: list[str] = []
    lines: list[str] = []

    def sample(run, state, number, *, version, previous_k):
        happened.append(f"sample {number} by {version}")
        # K goes from round to round.
        assert state == version
        assert previous_k == pytest.approx((number - 1) / 10)
        attempt = Attempt(question=QUESTIONS[0], number=0, seed=0, temperature=1.0)
        return mygo.SampledRound(
            trajectories=[trajectory(attempt, 1.0, number)],
            threshold=number / 10,
            version=version,
        )

    def train(name, state, rows, **options):
        happened.append(f"learn {name.split()[1]}")
        return int(name.split()[1])

    def ignore(*values: Any, **named: Any) -> None: ...

    monkeypatch.setattr(mygo, "sample_round", sample)
    run: Any = Played({}, lambda attempt: 0)
    run.config.method = dataclasses.replace(METHOD, schedule=schedule)
    run.config.trainer = types.SimpleNamespace(sequence_length=8, batch_size=1, tokens_per_step=8)
    run.train = train
    run.rows_that_fit = list
    run.progress.line = lines.append
    run.compare = ignore
    run.commit_policy = ignore
    run.finish = ignore
    run.metrics.write = ignore
    run.clock = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext())
    state: Any = 0
    mygo._run_rounds(run, state, [])
    assert happened == order
    assert ("; sampled by policy 1 (versions behind the newest: 1)" in lines[2]) == (
        schedule == "asynchronous"
    )


def play_rounds(
    monkeypatch, rewards: Mapping[str, Sequence[float]], *, sequence_length: int = 8, **changes: Any
) -> tuple[list[float], list[str]]:
    """Play all rounds over the table of rewards.

    Returns K of each round, and the lines that were printed.
    """
    lines: list[str] = []
    written: list[dict[str, Any]] = []
    run: Any = Played(rewards, lambda attempt: attempt.number)
    run.config.method = dataclasses.replace(METHOD, **changes)
    run.config.trainer = types.SimpleNamespace(
        sequence_length=sequence_length, batch_size=1, tokens_per_step=sequence_length
    )

    def ignore(*values: Any, **named: Any) -> None: ...

    def fitting(rows: Sequence[Conversation]) -> list[Conversation]:
        return [row for row in rows if len(row.token_ids) <= sequence_length]

    run.train = lambda name, state, rows, **options: state
    run.rows_that_fit = fitting
    run.progress.line = lines.append
    run.compare = ignore
    run.commit_policy = ignore
    run.finish = ignore
    run.metrics.write = lambda phase, step, values: written.append(values)
    run.clock = types.SimpleNamespace(stage=lambda name: contextlib.nullcontext())
    state: Any = 0
    mygo._run_rounds(run, state, [])
    return [values["k"] for values in written], lines


HALF_RIGHT = {"easy": [0.75] * 6, "hard": [0.25] * 6}  # r_mean 0.5: the midpoint is 0.75


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.75, 0.75, 0.75]),
        ({"initial_threshold": 0.5}, [0.75, 0.75, 0.75]),
        ({"initial_threshold": 0.875}, [0.875, 0.875, 0.875]),
        ({"threshold": "fixed", "initial_threshold": 0.5}, [0.5, 0.5, 0.5]),
        ({"schedule": "offline"}, [0.0, 0.0, 0.0]),
        ({"schedule": "offline", "initial_threshold": 0.5}, [0.5, 0.5, 0.5]),
        ({"schedule": "offline", "threshold": "rising"}, [0.75, 0.75, 0.75]),
        (
            {"schedule": "offline", "threshold": "rising", "initial_threshold": 0.875},
            [0.875, 0.875, 0.875],
        ),
        ({"schedule": "asynchronous"}, [0.75, 0.75, 0.75]),
    ],
)
def test_k_begins_where_it_is_told_to_and_stays_there_offline(monkeypatch, changes, expected):
    assert play_rounds(monkeypatch, HALF_RIGHT, **changes)[0] == expected


def test_a_first_k_of_the_best_reward_keeps_what_reaches_it(monkeypatch):
    rewards = {"easy": [1.0, 0.9, 0.9, 0.9, 0.9, 0.9], "hard": [0.9] * 6}
    ks, lines = play_rounds(monkeypatch, rewards, rounds=1, initial_threshold=1.0)
    assert ks == [1.0]
    assert lines[0].startswith("round 1: threshold K 1.000; kept 1 of 12 trajectories")


def test_a_round_says_whether_nothing_beat_k_or_what_was_kept_is_too_long(monkeypatch):
    lines = play_rounds(monkeypatch, {"easy": [0.0] * 6, "hard": [0.0] * 6}, rounds=1)[1]
    assert lines[1].startswith(
        "round 1: none of 12 trajectories beat the threshold K = 0.500, so the policy does not "
        "change. "
    )
    lines = play_rounds(
        monkeypatch, {"easy": [1.0] * 6, "hard": [0.0] * 6}, rounds=1, sequence_length=0
    )[1]
    assert lines[1] == (
        "round 1: 2 of 8 trajectories beat the threshold K = 0.750, but none of their 2 "
        "conversations fits trainer.sequence_length 0: the shortest has 1 tokens. The policy does "
        "not change. Raise trainer.sequence_length, or lower agent.max_trajectory_tokens"
    )


def test_the_warnings_of_a_round_are_counted():
    """Two attempts at one question say the same, and a third one at another question ends badly."""
    attempts = [
        Attempt(question=QUESTIONS[n // 2], number=n % 2, seed=0, temperature=1.0) for n in range(3)
    ]
    first, repeated, bad = (
        trajectory(attempt, reward, 7)
        for attempt, reward in zip(attempts, (1.0, 0.5, 0.0), strict=True)
    )
    bad = dataclasses.replace(bad, stop_reason=StopReason.NO_ACTION)
    statistics = round_statistics([first, repeated, bad], [first], best_reward=1.0)
    assert [
        statistics[name] for name in ("acceptance", "format_failures", "duplicates")
    ] == pytest.approx([1 / 3, 1 / 3, 0])
    assert (
        round_statistics([first, repeated, bad], [first, repeated], best_reward=1.0)["duplicates"]
        == 0.5
    )
    assert in_words(statistics).startswith(
        "kept 1 of 3 trajectories (3.0 attempts per kept trajectory); mean reward of first "
        "attempts 0.50; reward of all attempts: 10th percentile 0.00, median 0.50, "
        "90th percentile 1.00; 50% of questions unsolved;"
    )
    assert statistics["unsolved_questions"] == 0.5
    assert statistics["attempts_a_kept"] == 3.0
    assert statistics["mean_reward"] == 0.5
    assert statistics["reward_p10"] == 0.0
    assert statistics["reward_p50"] == 0.5
    assert statistics["reward_p90"] == 1.0
    assert "raise warmup.steps" in advice([bad])
    assert "max_attempts" in advice([repeated])
    endless = dataclasses.replace(bad, stop_reason=StopReason.TURN_LENGTH)
    assert "1 of 1 trajectories ended with turn_length: raise agent.max_turn_tokens" in advice(
        [endless]
    )


def test_rounds_go_down_one_cosine():
    """Three rounds of 4, 2 and 6 updates follow half a cosine over the rounds."""
    for number, steps in enumerate((4, 2, 6)):
        rates = schedule(
            peak=1.0, end_value=0.0, total_steps=steps, stretch=(number / 3, (number + 1) / 3)
        )
        rates_of_steps = [float(learning_rate(rates, step)) for step in range(steps + 1)]

        expected = [
            0.5 * (1 + math.cos(math.pi * (number + step / steps) / 3)) for step in range(steps + 1)
        ]
        assert rates_of_steps == pytest.approx(expected, abs=1e-6)
