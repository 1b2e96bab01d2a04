"""Rounds of GRPO and DAPO, played by hand: questions whose rewards stand in a table, and what is
learnt of them.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.agents.agent import Attempt
from mujica_jax.commands import train
from mujica_jax.config.checks import check
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import DapoConfig, GrpoConfig, SamplingConfig, TrainerConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.losses.policy import DAPO, GRPO, importance_weights
from mujica_jax.learning.packing import PackedRows
from mujica_jax.methods import grpo
from mujica_jax.records import Conversation, Question, StopReason, Trajectory, Turn
from mujica_jax.report.stage_clock import StageClock
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import PhaseCost, PhaseState
from mujica_jax.trajectories.select import overlong_punishment, training_rows
from mujica_jax.trajectories.store import Store
from tests.helpers.episodes import episode
from tests.helpers.fake_runs import call_fakes
from tests.helpers.paths import HELPERS

SMOKE = str(HELPERS / "smoke_config.py")
COMMON: dict[str, Any] = {
    "rounds": 2,
    "rounds_per_evaluation": 2,
    "group_size": 2,
    "learning_rate": 1e-3,
    "end_learning_rate": 1e-4,
    "epochs": 1,
}
DAPO_METHOD = DapoConfig(**COMMON, max_sampled_batches=3, importance_cap=0.0)
GRPO_METHOD = GrpoConfig(**COMMON, importance_cap=0.0)
QUESTIONS = [Question(id=f"q{number}", text="?", answers=("yes",)) for number in range(8)]
CONTEXT_TOKENS = (5, 6, 7)
MODEL_TOKENS = (1, 2)
FAILED = None  # in the place of a reward: a search of the attempt failed


@pytest.fixture(autouse=True)
def recipes_call_the_fake(monkeypatch):
    call_fakes(monkeypatch)


def start() -> Any:
    """Return the state that rounds begin with."""


def conversation(attempt: Attempt, role: str) -> Conversation:
    """Return a conversation of four turns. The first token says which question it is of."""
    number = 100 + int(attempt.question.id[1:])
    turns = [
        Turn(role="context", token_ids=(number, *CONTEXT_TOKENS), text=""),
        Turn(role="model", token_ids=MODEL_TOKENS, text="", logprobs=(-0.5, -1.5), trained=True),
        Turn(role="context", token_ids=CONTEXT_TOKENS, text=""),
        Turn(role="model", token_ids=MODEL_TOKENS, text="", logprobs=(-1.0, -1.0), trained=True),
    ]
    return Conversation(role=role, turns=tuple(turns))


def with_last_turn_cut(whole: Conversation) -> Conversation:
    *turns, last = whole.turns
    return dataclasses.replace(
        whole, turns=(*turns, dataclasses.replace(last, trained=False, cut=True))
    )


class Played:
    """Stands in for a `Run`: rewards come from `rewards[question][attempt]`.

    It keeps what was asked and learnt. With `cut` a length limit cut the last turn of every attempt
    that earned nothing.
    """

    def __init__(
        self,
        root: Path,
        rewards: Mapping[str, Sequence[float | None]],
        method,
        roles=("planner",),
        cut: bool = False,
    ) -> None:
        self.rewards = rewards
        self.roles = roles
        self.cut = cut
        self.asked: list[str] = []
        self.learnt: list[tuple[str, PackedRows, LearningPlan]] = []
        self.messages: list[str] = []
        self.figures: dict[int, dict[str, Any]] = {}
        self.phases: list[tuple[Any, Any, dict[str, int]]] = []
        self.scorings = 0
        self.config: Any = types.SimpleNamespace(
            method=method,
            sampling=SamplingConfig(questions_per_round=2, questions_per_shard=1, temperature=1.0),
            trainer=TrainerConfig(sequence_length=24, batch_size=2),
            seed=0,
        )
        self.task: Any = types.SimpleNamespace(questions=lambda split: QUESTIONS, rule="two_wiki")
        self.store = Store(root)
        self.clock = StageClock()
        stage = types.SimpleNamespace(update=lambda *values, **figures: None)
        self.progress: Any = types.SimpleNamespace(
            stage=lambda *names, **figures: contextlib.nullcontext(stage), line=self.messages.append
        )
        self.preemption: Any = types.SimpleNamespace(enter=lambda *names, **options: None)
        self.counters: Any = types.SimpleNamespace(figures=dict)
        self.metrics: Any = types.SimpleNamespace(flush=lambda: None, write=self._write)
        self.generator: Any = types.SimpleNamespace(release_weights=lambda: None)
        self.trainer: Any = types.SimpleNamespace(score=self._score)

    def _write(self, phase: str, step: int, values: dict[str, Any]) -> None:
        self.figures[step] = values

    def _score(self, state: Any, rows: PackedRows) -> np.ndarray:
        """Return scores twice as likely as the engine's; the reference is sure of all."""
        self.scorings += 1
        ours = rows.columns["sampled_log_probs"] + np.float32(np.log(2.0))
        return np.zeros_like(ours) if state == "reference" else ours

    def committed_state(self, version: int) -> str:
        assert version == 0
        return "reference"

    def compare(self, *_: object) -> None: ...
    def use_policy(self, *_: object) -> None: ...
    def commit_policy(self, state: object, version: int) -> None: ...
    def remove_past_checkpoints(self) -> None: ...
    def counted(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def read_shards(self, entries: Any) -> list[Trajectory]:
        return [trajectory for entry in entries for trajectory in self.store.read_shard(entry)]

    def play_attempts(
        self,
        number: int,
        shard: int,
        attempts: Sequence[Attempt],
        heard: Callable[[Trajectory], None],
    ) -> Any:
        self.asked += [attempt.question.id for attempt in attempts if attempt.number == 0]
        trajectories = [self._play(attempt, number) for attempt in attempts]
        for trajectory in trajectories:
            heard(trajectory)
        return self.store.write_shard(number, shard, trajectories), trajectories

    def _play(self, attempt: Attempt, number: int) -> Trajectory:
        reward = self.rewards[attempt.question.id][attempt.number]
        conversations = [conversation(attempt, role) for role in self.roles]
        if self.cut and not reward:
            conversations = [with_last_turn_cut(spoken) for spoken in conversations]
        return episode(
            *conversations,
            question_id=attempt.question.id,
            attempt=attempt.number,
            policy_version=number - 1,
            seed=attempt.seed,
            answer="yes" if reward else "no",
            reward=reward or 0.0,
            rewards_by_part={} if reward is FAILED else {"f1": reward},
            stop_reason=StopReason.RETRIEVER_FAILED if reward is FAILED else StopReason.ANSWERED,
        )

    def train(self, name: str, start: Any, rows: PackedRows, *, plan: LearningPlan) -> Any:
        self.learnt.append((name, rows, plan))
        return f"after {name}"

    def finish(self, phase: Any, state: Any, cost: PhaseCost) -> Any:
        counts = dataclasses.asdict(cost)
        del counts["start_time"]
        self.phases.append((phase, state, counts))
        return phase

    def finished_state(self, name: str, *, plan: LearningPlan) -> str:
        return f"after {name}"

    def phases_left(self) -> list[tuple[Any, Any, dict[str, int]]]:
        """Return the phases, their states and counts.

        The state of a round of an earlier start is read from its checkpoint.
        """
        return [
            (phase, state() if isinstance(state, PhaseState) else state, counts)
            for phase, state, counts in self.phases
        ]


def play(
    root: Path, rewards: Mapping[str, Sequence[float | None]], method: Any = DAPO_METHOD, **options
) -> Any:
    run: Any = Played(root, rewards, method, **options)
    run.results = grpo._run_rounds(run, cast(Any, start))
    return run


def questions_in(rows: PackedRows) -> set[str]:
    return {f"q{token - 100}" for token in rows.tokens[rows.tokens >= 100]}


RIGHT = (1.0, 1.0)
WRONG = (0.0, 0.0)
MIXED = (1.0, 0.0)
TABLE = {
    "q0": RIGHT,
    "q1": MIXED,
    "q2": WRONG,
    "q3": (0.0, 1.0),
    "q4": MIXED,
    "q5": MIXED,
    "q6": WRONG,
    "q7": WRONG,
}


def test_groups_that_teach_nothing_are_dropped_and_others_sampled_until_the_batch_is_full(tmp_path):
    run = play(tmp_path, TABLE)
    expected = ["q0", "q1", "q2", "q3", "q4", "q5"]
    # One group is missing after q1 and after q2. From q4 on it is the next round.
    assert run.asked == expected
    (_, first, _), (_, second, _) = run.learnt
    assert questions_in(first) == {"q1", "q3"}
    assert questions_in(second) == {"q4", "q5"}
    figures = run.figures[1]
    assert figures["sampled_groups"] == 4
    assert figures["learnt_groups"] == 2
    assert figures["dropped_groups"] == 2
    assert figures["all_right_share"] == 0.25
    assert figures["all_wrong_share"] == 0.25
    assert figures["mean_reward"] == 0.5
    assert figures["entropy_estimate"] == pytest.approx((0.5 + 1.5 + 1.0 + 1.0) / 4)
    assert figures["reward_f1"] == 0.5
    ((phase, state, counts),) = run.phases
    assert phase.name == "round 2"
    assert phase.step == 2
    assert state == "after round 2"
    tokens = len(MODEL_TOKENS) * 2 + len(CONTEXT_TOKENS) * 2 + 1
    assert counts == {
        "trajectories": 12,
        "accepted": 8,
        "forward_tokens": 12 * tokens,
        "trained_slots": 2
        * 1
        * 2
        * 24,  # rounds, updates, rows, slots: four conversations of 11 tokens in two rows
    }


def test_with_equal_rewards_alone_sampling_stops_at_its_bound_and_nothing_is_learnt(tmp_path):
    method = dataclasses.replace(DAPO_METHOD, max_sampled_batches=2)
    run = play(tmp_path, dict.fromkeys(TABLE, WRONG), method)
    assert run.asked == [f"q{number}" for number in range(8)], (
        "two batches of two questions a round, and no more"
    )
    assert run.learnt == []
    assert run.phases[0][1] is start, "the very state that it began with"
    assert [
        f"round {n}: no update, because all attempts at a question earned the same reward, "
        "at each of 4 questions" in run.messages[n - 1]
        for n in (1, 2)
    ] == [True, True]
    assert (
        "(mean reward 0.000). Raise method.group_size (now 2) or sampling.temperature (now 1.0)"
        in run.messages[0]
    )
    assert run.figures[2]["steps"] == 0
    assert run.figures[2]["learnt_groups"] == 0


def test_a_batch_that_stays_short_is_learnt_and_said(tmp_path):
    run = play(
        tmp_path,
        dict.fromkeys(TABLE, RIGHT) | {"q0": MIXED},
        dataclasses.replace(DAPO_METHOD, rounds=1),
    )
    assert len(run.asked) == 6
    assert questions_in(run.learnt[0][1]) == {"q0"}
    assert (
        "only 1 groups have different rewards, and sampling.questions_per_round asks for 2. "
        "After 6 questions"
    ) in run.messages[0]


def test_no_question_comes_twice_in_a_round(tmp_path):
    method = dataclasses.replace(DAPO_METHOD, max_sampled_batches=99)
    run = play(tmp_path, dict.fromkeys(TABLE, WRONG), method)
    assert run.asked == 2 * [f"q{number}" for number in range(8)]


def test_grpo_learns_all_groups_and_samples_once(tmp_path):
    run = play(tmp_path, TABLE, GRPO_METHOD)
    assert run.asked == ["q0", "q1", "q2", "q3"]
    rows = run.learnt[0][1]
    assert questions_in(rows) == {"q0", "q1"}
    # The mean is 1/2 and the deviation 1/2.
    for question, expected in (("q0", [0.0, 0.0]), ("q1", [-1.0, 1.0])):
        place = rows.tokens == 100 + int(question[1:])
        assert sorted(rows.columns["advantages"][place].tolist()) == expected


def test_all_conversations_of_a_trajectory_have_its_advantage(tmp_path):
    run = play(tmp_path, TABLE, roles=("planner", "worker", "worker"))
    rows = run.learnt[0][1]
    begins = rows.tokens == 101
    assert sorted(rows.columns["advantages"][begins].tolist()) == [-1.0] * 3 + [1.0] * 3


def test_tokens_of_observations_carry_no_loss(tmp_path):
    rows = play(tmp_path, TABLE).learnt[0][1]
    sampled_tokens = np.isin(rows.tokens, MODEL_TOKENS) & (rows.segment_ids > 0)
    np.testing.assert_array_equal(rows.loss_mask, sampled_tokens)
    loss = DAPO(clip_low=0.2, clip_high=0.28)
    now = jnp.asarray(rows.columns["sampled_log_probs"] + 0.1 * rows.columns["advantages"])

    def value(columns: dict[str, np.ndarray]) -> float:
        batch = dataclasses.replace(rows, columns=columns).batch(slice(None), loss.columns)
        return float(loss.of(now, batch, loss.counts(batch))[0])

    junk = {name: np.where(rows.loss_mask, column, np.nan) for name, column in rows.columns.items()}
    assert value(junk) == value(dict(rows.columns)) != 0.0


def advantages(rows: PackedRows, question: str) -> list[float]:
    """Return the advantage of each conversation about a question."""
    return sorted(rows.columns["advantages"][rows.tokens == 100 + int(question[1:])].tolist())


@pytest.mark.parametrize("kind", [GRPO_METHOD, DAPO_METHOD])
def test_attempts_whose_search_failed_are_no_members_of_their_group(tmp_path, kind):
    """The rewards of q0 are 1, 0 and a failure, and are compared as 1 and 0.

    Of q1 one attempt is left, and the group is dropped.
    """
    table = {
        "q0": (1.0, FAILED, 0.0),
        "q1": (1.0, FAILED, FAILED),
        "q2": (1.0, 1.0, 0.0),
        "q3": (0.0, 0.0, 0.0),
    }
    method = dataclasses.replace(kind, rounds=1, rounds_per_evaluation=1, group_size=3)
    run = play(tmp_path, {**dict.fromkeys(TABLE, (0.0,) * 3), **table}, method)
    rows = run.learnt[0][1]
    figures = run.figures[1]
    assert advantages(rows, "q0") == [-1.0, 1.0]
    assert advantages(rows, "q1") == []
    # Another question takes the place of the dropped group.
    refilled = kind is DAPO_METHOD
    assert run.asked == (["q0", "q1", "q2"] if refilled else ["q0", "q1"])
    # The mean is 2/3 and the deviation 2**0.5 / 3.
    if refilled:
        assert advantages(rows, "q2") == pytest.approx([-(2**0.5), 0.5**0.5, 0.5**0.5])
    assert figures["left_out"] == 3
    assert figures["degenerate_groups"] == 1
    assert figures["dropped_groups"] == 1
    assert figures["mean_reward"] == pytest.approx(4 / 6 if refilled else 2 / 3)
    assert figures["trajectories"] == (9 if refilled else 6)
    assert (
        f"round 1: a search or the judge failed in 3 of {figures['trajectories']} attempts, "
        "which are left out;" in run.messages[0]
    )
    assert "1 of" in run.messages[0]
    assert "groups have fewer than two attempts left and are dropped" in run.messages[0]
    second_run = play(tmp_path, table, method)
    assert second_run.asked == []
    assert second_run.phases_left() == run.phases_left()


def test_a_round_of_failures_alone_learns_nothing(tmp_path):
    run = play(
        tmp_path, dict.fromkeys(TABLE, (FAILED, FAILED)), dataclasses.replace(GRPO_METHOD, rounds=1)
    )
    assert run.learnt == []
    assert run.figures[1]["steps"] == 0
    assert run.figures[1]["mean_reward"] == 0.0
    assert run.figures[1]["degenerate_groups"] == 2


@pytest.mark.parametrize("kind", [GRPO_METHOD, DAPO_METHOD])
def test_a_turn_that_a_length_limit_cut_is_learnt_with_the_advantage_of_its_attempt(tmp_path, kind):
    """The stored record says the same.

    Maximum likelihood does not learn the turn (`training_rows`).
    """
    run = play(tmp_path, TABLE, dataclasses.replace(kind, rounds=1), cut=True)
    rows = run.learnt[0][1]
    sampled_tokens = np.isin(rows.tokens, MODEL_TOKENS) & (rows.segment_ids > 0)
    np.testing.assert_array_equal(rows.loss_mask, sampled_tokens)
    assert (rows.columns["sampled_log_probs"][sampled_tokens] < 0).all()
    stored = [t for entry in run.store.shards() for t in run.store.read_shard(entry)]
    cut = [t for t in stored if t.reward == 0.0]
    assert cut
    assert all(not row.turns[-1].trained for row in training_rows(cut))


def test_the_options_of_learning(tmp_path):
    method = dataclasses.replace(DAPO_METHOD, epochs=3, mini_batch_size=1)
    run = play(tmp_path, TABLE, method)
    (_, rows, first), (_, _, second) = run.learnt
    assert rows.num_rows == 2
    assert first.steps == 6
    assert first.trainer.batch_size == 1
    assert first.stretch == (0.0, 0.5)
    assert second.stretch == (0.5, 1.0)
    assert first.loss == DAPO(clip_low=0.2, clip_high=0.28)
    weighted = dataclasses.replace(GRPO_METHOD, importance_cap=2.0, kl_coefficient=0.1)
    assert grpo.loss_of(weighted) == GRPO(
        clip_low=0.2, clip_high=0.2, importance_weighted=True, kl_coefficient=0.1
    )


def test_the_trainers_scores_are_kept_for_a_restart(tmp_path):
    """To the trainer a token is twice as likely as to the engine.

    The weight is 2 and cut to 1.5, and ratios are to the trainer.
    """
    method = dataclasses.replace(GRPO_METHOD, importance_cap=1.5, kl_coefficient=0.1, rounds=1)
    run = play(tmp_path, TABLE, method)
    assert run.scorings == 2
    # The run is killed while it learns.
    (tmp_path / "rounds/0001/LEARNT.json").unlink()
    second_run = play(tmp_path, TABLE, method)
    assert second_run.scorings == 0
    assert second_run.asked == []
    for rows in (run.learnt[0][1], second_run.learnt[0][1]):
        trained = rows.loss_mask
        np.testing.assert_array_equal(rows.columns["importance_weights"][trained], np.float32(1.5))
        np.testing.assert_array_equal(rows.columns["reference_log_probs"], 0.0)
        ours = sorted(
            set(np.round(rows.columns["sampled_log_probs"][trained] - np.log(2.0), 6).tolist())
        )
        assert ours == pytest.approx([-1.5, -1.0, -0.5])
    assert second_run.figures[1] == run.figures[1]
    assert run.figures[1]["truncated_share"] == 1.0
    assert run.figures[1]["mean_importance_weight"] == 1.5


def test_a_round_that_is_over_is_not_played_again(tmp_path):
    method = dataclasses.replace(DAPO_METHOD, rounds_per_evaluation=1)
    whole = play(tmp_path, TABLE, method)
    second_run = play(tmp_path, TABLE, method)
    assert second_run.asked == []
    assert second_run.learnt == []
    assert second_run.phases_left() == whole.phases_left()
    assert len(whole.phases) == 2


def test_a_round_whose_checkpoint_is_damaged_is_learnt_again_from_its_shards(tmp_path):
    method = dataclasses.replace(DAPO_METHOD, rounds_per_evaluation=1)
    whole = play(tmp_path, TABLE, method)
    second_run = play(tmp_path, TABLE, method)
    relearnt = []
    second_run.finished_state = lambda name, *, plan: None
    second_run.train_phase = lambda name, start, rows, *, plan: relearnt.append((name, rows, plan))
    second_run.phases[-1][1]()
    ((name, rows, plan),) = relearnt
    _, expected_rows, expected_plan = whole.learnt[-1]
    assert second_run.asked == []
    assert name == "round 2"
    assert plan == expected_plan
    np.testing.assert_array_equal(rows.tokens, expected_rows.tokens)
    np.testing.assert_array_equal(rows.columns["advantages"], expected_rows.columns["advantages"])


def test_importance_weights_worked_by_hand():
    trainer = np.log([[0.5, 0.2, 0.9]])
    engine = np.log([[0.4, 0.4, 0.1]])
    np.testing.assert_allclose(
        importance_weights(trainer, engine, cap=2.0), [[1.25, 0.5, 2.0]], rtol=1e-6
    )
    assert importance_weights(np.zeros((1, 1)), np.full((1, 1), -1e6), cap=2.0) == 2.0


def test_the_punishment_of_long_trajectories_worked_by_hand(tmp_path):
    punishments = [
        overlong_punishment(tokens, limit_tokens=10, cache_tokens=4) for tokens in (3, 6, 8, 10, 50)
    ]
    assert punishments == [0.0, 0.0, -0.5, -1.0, -1.0]
    # Every trajectory here has 4 generated tokens: 1/2 is taken from each, and no group teaches
    # more for it.
    method = dataclasses.replace(DAPO_METHOD, overlong_tokens=5, overlong_cache_tokens=2, rounds=1)
    run = play(tmp_path, TABLE, method)
    assert run.figures[1]["mean_compared_reward"] == run.figures[1]["mean_reward"] - 0.5
    assert run.figures[1]["dropped_groups"] == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group_size": 1}, "method.group_size is 1 and must be at least 2"),
        ({"rounds_per_evaluation": 0}, "method.rounds_per_evaluation is 0 and must be at least 1"),
        ({"max_sampled_batches": 0}, "method.max_sampled_batches is 0 and must be at least 1"),
        ({"clip_low": 1.0}, "method.clip_low is 1.0 and must be at least 0 and below 1"),
        ({"importance_cap": -1.0}, "method.importance_cap is -1.0"),
        (
            {"overlong_tokens": 8},
            "method.overlong_cache_tokens is 0, but method.overlong_tokens is 8: give "
            "--method.overlong-cache-tokens from 1 to 8",
        ),
        (
            {"mini_batch_size": 3},
            "method.mini_batch_size 3 cannot be split into data_parallel_size x fsdp x "
            "accumulation_steps = 2 equal parts",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, sentence):
    config = load_config(SMOKE)
    trainer = dataclasses.replace(config.trainer, accumulation_steps=2)
    with pytest.raises(UserError) as refused:
        check(
            dataclasses.replace(
                config, trainer=trainer, method=dataclasses.replace(DAPO_METHOD, **changes)
            )
        )
    assert sentence in str(refused.value)


def test_a_reference_that_would_be_removed_is_refused():
    config = dataclasses.replace(
        load_config(SMOKE),
        keep_policies=1,
        method=dataclasses.replace(GRPO_METHOD, kl_coefficient=0.1),
    )
    with pytest.raises(
        UserError, match=r"method.kl_coefficient 0.1 needs policy 0, but keep_policies 1 removes it"
    ):
        check(config)


def test_workers_elsewhere_are_refused():
    config = load_config(SMOKE)
    sampling = dataclasses.replace(config.sampling, workers="external")
    with pytest.raises(
        UserError,
        match=r"sampling.workers is external, but method.kind is dapo and .* only sample for mygo",
    ):
        check(dataclasses.replace(config, sampling=sampling, method=DAPO_METHOD))


def test_a_control_without_demonstrations_is_refused():
    config = load_config(SMOKE)
    bare = dataclasses.replace(config.warmup, steps=0, source="few_shot")
    assert config.eval.control
    for method in (DAPO_METHOD, config.method):
        with pytest.raises(UserError, match=r"eval.control is True, but warmup.steps is 0"):
            check(dataclasses.replace(config, init="checkpoint", warmup=bare, method=method))


def test_a_group_of_one_is_one_sentence_and_status_2(capsys):
    flags = "--method.kind dapo --method.rounds-per-evaluation 1 --method.group-size 1".split()
    assert train.main([SMOKE, *flags]) == 2
    assert capsys.readouterr().err.startswith(
        "error: method.group_size is 1 and must be at least 2"
    )


def test_a_round_of_fewer_rows_than_an_update_learns_each_of_them_once(tmp_path):
    """There are two rows, and eight in an update.

    Six are padding, and every epoch is one update of the whole batch.
    """
    method = dataclasses.replace(GRPO_METHOD, rounds=1, mini_batch_size=8, epochs=2)
    run = play(tmp_path, TABLE, method)
    few = play(tmp_path / "few", TABLE, dataclasses.replace(method, mini_batch_size=2))
    _, rows, plan = run.learnt[0]
    assert rows.num_rows == 8
    assert plan.steps == 2
    assert run.figures[1]["steps"] == 2
    assert few.learnt[0][1].num_rows == 2
    assert few.learnt[0][2].steps == 2
    assert not rows.loss_mask[2:].any()
    assert not rows.segment_ids[2:].any()
    whole = rows.batch(slice(None), ("advantages",))
    part = few.learnt[0][1].batch(slice(None), ("advantages",))
    for name in ("tokens", "loss_mask"):
        np.testing.assert_array_equal(getattr(whole, name)[:2], getattr(part, name))
    np.testing.assert_array_equal(whole.columns["advantages"][:2], part.columns["advantages"])
