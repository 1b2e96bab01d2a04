"""A failed search is the environment's fault.

The attempt is repeated, left out and counted, and earns nothing.
"""

import asyncio
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mujica_jax.agents.agent import EnginePolicy, EpisodeHooks, run_episodes
from mujica_jax.agents.faults import EnvironmentLostError, FaultGuard
from mujica_jax.config.schema import FaultConfig
from mujica_jax.errors import UserError
from mujica_jax.records import Conversation, Question, Search, StopReason, Trajectory, Turn
from mujica_jax.report import comparison
from mujica_jax.report.comparison import Compared
from mujica_jax.report.progress import Progress
from mujica_jax.report.results import PhaseRow, closing_table, score_table
from mujica_jax.report.text import plain
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.rewards.reward import find_reward
from mujica_jax.runs.evaluation import PolicyEvaluator, summarise
from mujica_jax.runs.round_statistics import advice, in_words, round_statistics
from mujica_jax.trajectories.select import groups_of, mean_first_attempt_reward, select
from tests.helpers.episodes import episode
from tests.helpers.little_agent import (
    QUESTION,
    LittleWorld,
    agent,
    answer,
    attempt,
    completion,
    everywhere,
    read,
    search,
    tokenizer,
)

FAILED = StopReason.RETRIEVER_FAILED
F1 = find_reward("f1", "two_wiki")


class Failing(LittleWorld):
    """A world in which the first `failures` searches fail."""

    failures = 0

    async def search(self, query, entity):
        if self.failures > 0:
            self.failures -= 1
            raise RetrievalError("it is down")
        return await super().search(query, entity)


class Model:
    """A model that searches once, reads and answers. It records the seeds of its requests."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def generate(self, prompt, params, *, continues=False):
        self.seeds.append(params.seed)
        shown = tokenizer().decode(prompt)
        if "Amber Tide, director" in shown and "Search(" not in shown:
            return completion(read("[1]", "Ilse Vand directed it."))
        if "Ilse Vand directed it." in shown:
            return completion(answer("Ghent"))
        return completion(search((0, "Who directed it?")))


def played(
    failures: int, repeats: int, *, attempts: int = 1, guard: FaultGuard | None = None
) -> Any:
    world = Failing()
    model = Model()
    world.failures = failures
    guard = guard or FaultGuard(FaultConfig(repeats=repeats, max_in_a_row=3))
    trajectories = asyncio.run(
        run_episodes(
            agent(),
            [attempt(number=number) for number in range(attempts)],
            everywhere(world),
            EnginePolicy(model),
            reward=F1,
            concurrency=1,
            hooks=EpisodeHooks(play=guard.play),
        )
    )
    return trajectories, model


def content(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(trajectory, seconds=0.0)


def test_an_attempt_whose_search_fails_is_played_again_by_the_same_seeds():
    (undisturbed,), _ = played(failures=0, repeats=2)
    assert (undisturbed.stop_reason, undisturbed.reward) == (StopReason.ANSWERED, 1.0)
    (repeated,), model = played(failures=2, repeats=2)
    assert content(repeated) == content(undisturbed), "as if nothing had happened"
    first_turn = attempt().turn_seed("0")
    assert model.seeds.count(first_turn) == 3


def test_beyond_its_bound_it_is_left_out_without_a_reward():
    (left_out,), _ = played(failures=2, repeats=1)
    assert (left_out.stop_reason, left_out.is_rewarded) == (FAILED, False)
    assert (left_out.reward, left_out.rewards_by_part) == (0.0, {})
    (never_repeated,), model = played(failures=1, repeats=0)
    assert never_repeated.stop_reason is FAILED
    assert len(model.seeds) == 1


def test_a_retriever_that_is_gone_ends_the_program_and_one_that_comes_back_does_not():
    sentence = (
        r"a search failed in 4 attempts in a row \(each was played 2 times\), but "
        r"faults\.max_in_a_row is 3: start the retriever again"
    )
    with pytest.raises(EnvironmentLostError, match=sentence):
        played(failures=8, repeats=1, attempts=4)
    trajectories, _ = played(failures=6, repeats=1, attempts=7)
    assert [trajectory.is_rewarded for trajectory in trajectories] == [False] * 3 + [True] * 4
    guard = FaultGuard(FaultConfig(repeats=1, max_in_a_row=3))
    played(failures=6, repeats=1, attempts=3, guard=guard)
    with pytest.raises(EnvironmentLostError):  # the count goes on from one unit of work to the next
        played(failures=2, repeats=1, attempts=1, guard=guard)


def test_an_episode_without_a_search_does_not_show_that_the_retriever_answers():
    guard = FaultGuard(FaultConfig(repeats=0, max_in_a_row=1))

    async def play(trajectory: Trajectory) -> None:
        async def run(*_: object) -> Trajectory:
            return trajectory

        nothing: Any = None
        await guard.play(types.SimpleNamespace(run=run), nothing, nothing, nothing)  # pyright: ignore[reportArgumentType]

    failed = episode(stop_reason=FAILED)
    silent = episode()
    searched = episode(searches=(Search(iteration=0, query="a"),))
    for outcome in (failed, searched, failed, silent):
        asyncio.run(play(outcome))
    with pytest.raises(EnvironmentLostError):
        asyncio.run(play(failed))


# What is computed of trajectories


def trajectory(
    question: str, number: int, reward: float, reason: StopReason = StopReason.ANSWERED
) -> Trajectory:
    turn = Turn(role="model", token_ids=(number,), text="", logprobs=(-1.0,), trained=True)
    conversation = Conversation(role="planner", turns=(turn,))
    return episode(
        conversation, question_id=question, attempt=number, reward=reward, stop_reason=reason
    )


def test_the_mean_of_first_attempts_leaves_it_out():
    rows = [
        trajectory("a", 0, 1.0),
        trajectory("b", 0, 0.0, FAILED),
        trajectory("c", 0, 0.5),
        trajectory("c", 1, 0.0),
    ]
    assert mean_first_attempt_reward(rows) == 0.75, "the mean of 1 and 1/2"
    assert mean_first_attempt_reward([trajectory("b", 0, 0.0, FAILED)]) == 0.0


def test_what_is_kept_leaves_it_out_whatever_reward_it_holds():
    failed = dataclasses.replace(trajectory("a", 0, 1.0), stop_reason=FAILED)
    judged = trajectory("a", 1, 1.0).without_verdict()
    selected = select(
        [failed, judged, trajectory("a", 2, 0.9)], k=-1.0, keep_per_question=3, best_reward=1.0
    )
    assert [chosen.attempt for chosen in selected] == [2]


def test_a_group_is_compared_without_it_and_dropped_where_one_member_is_left():
    rows = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0, FAILED), trajectory("a", 2, 0.0)]
    rows += [
        trajectory("b", 0, 1.0),
        trajectory("b", 1, 0.0, FAILED),
        trajectory("b", 2, 0.0, FAILED),
    ]
    rows += [trajectory("c", number, 0.0, FAILED) for number in range(3)]
    first, second, third = groups_of(rows, lambda member: member.reward)
    assert first.rewards == (1.0, 0.0)
    assert first.left_out == 1
    assert first.teaches is True
    assert second.rewards == (1.0,)
    assert second.left_out == 2
    assert second.teaches is False
    assert second.is_comparable is False
    assert third.rewards == ()
    assert third.left_out == 3
    assert third.is_comparable is False


def test_the_statistics_of_a_round_leave_it_out_and_count_it():
    rows = [trajectory("a", 0, 1.0), trajectory("b", 0, 0.5), trajectory("c", 0, 0.0, FAILED)]
    statistics = round_statistics(rows, rows[:1], best_reward=1.0)
    assert statistics["trajectories"] == 3
    assert statistics["left_out"] == 1
    assert statistics["acceptance"] == 0.5
    assert statistics["mean_reward"] == 0.75
    assert statistics["reward_p10"] == 0.5
    assert statistics["unsolved_questions"] == 0.5
    assert (
        "kept 1 of 3 trajectories (2.0 attempts per kept trajectory), 1 left out because a search "
        "or the judge failed;" in in_words(statistics)
    )
    assert "A search or the judge failed in all 1 trajectories" in advice(rows[2:])


# Evaluation


ASKED = [
    Question(id=str(number), text=f"Question {number}?", answers=("Ghent",), kind=str(number % 2))
    for number in range(4)
]


def evaluated(*reasons: StopReason) -> list[Trajectory]:
    """Return a correct trajectory for each question, with these stop reasons.

    Question n has n searches and takes n seconds.
    """
    return [
        episode(
            question_id=question.id,
            answer="Ghent",
            stop_reason=reason,
            searches=(Search(iteration=0, query="a"),) * number,
            seconds=float(number),
        )
        for number, (question, reason) in enumerate(zip(ASKED, reasons, strict=True))
    ]


def test_the_scores_of_an_evaluation_leave_it_out():
    rows = evaluated(StopReason.ANSWERED, FAILED, StopReason.NO_ACTION, FAILED)
    summary = summarise(ASKED, rows, "two_wiki").summary()
    assert summary["em"] == 50.0
    assert summary["questions"] == 2
    assert summary["left_out"] == 2
    assert summary["searches"] == 1.0, "the mean of 0 and 2"
    assert summary["seconds"] == 1.0, "the mean of 0 and 2"
    assert summary["stop_reasons"] == {"answered": 1, "no_action": 1, "retriever_failed": 2}
    assert {kind: score["questions"] for kind, score in summary["by_kind"].items()} == {"0": 2}


def test_a_kind_without_a_score_has_none_in_the_table():
    rows = evaluated(StopReason.ANSWERED, FAILED, StopReason.NO_ACTION, FAILED)
    summary = summarise(ASKED, rows, "two_wiki").summary()
    other = summarise(ASKED, evaluated(*[StopReason.ANSWERED] * 4), "two_wiki").summary()
    assert "100.0" in plain(score_table(other, summary))


def test_an_evaluation_in_which_every_search_failed_has_no_score():
    with pytest.raises(UserError, match="a search failed in all 4 episodes of an evaluation"):
        summarise(ASKED, evaluated(*[FAILED] * 4), "two_wiki")


def test_agents_are_compared_on_the_questions_that_both_were_scored_on():
    summary = {name: 0.0 for name in ("em", "f1", "searches", "tokens", "seconds")}
    summary |= {"em_interval": [0.0, 0.0], "f1_interval": [0.0, 0.0]}
    first = Compared(task="t", agent="one", summary=summary, em=(1.0, None, 0.0, 1.0))
    second = Compared(task="t", agent="two", summary=summary, em=(1.0, 1.0, None, 0.0))
    nothing = Compared(task="t", agent="three", summary=summary, em=(None, 1.0, None, None))
    rows = comparison.rows([first, second, nothing])
    assert rows[1]["against"]["em"] == -50.0
    assert rows[1]["against"]["questions"] == 2
    assert "against" not in rows[2]


def test_what_is_left_out_is_counted_and_printed(tmp_path):
    """The search of one question always fails, greedily and sampled.

    The others are answered correctly.
    """
    questions = [
        dataclasses.replace(QUESTION, id=str(number), text=f"Question {number}?")
        for number in range(3)
    ]
    broken = Failing()
    whole = LittleWorld()
    broken.failures = 1000
    task: Any = types.SimpleNamespace(
        rule="two_wiki",
        questions=lambda split: questions,
        environment=lambda question: broken if question.id == "1" else whole,
        environment_kind="graph",
    )
    section = types.SimpleNamespace(split="dev", questions=3, temperature=1.0)
    config: Any = types.SimpleNamespace(eval=section, seed=0)
    preemption: Any = types.SimpleNamespace(enter=lambda *_: None, check=lambda: None)

    class Scored(Model):
        policy_version = 0

        def reset_cache(self) -> None: ...

    with (tmp_path / "console").open("w") as console:
        scores = PolicyEvaluator(
            name="round 1",
            agent=agent(),
            reward=F1,
            generator=Scored(),
            task=task,
            config=config,
            progress=Progress(console, clock=lambda: 0.0),
            concurrency=2,
            preemption=preemption,
            faults=FaultGuard(FaultConfig(repeats=1, max_in_a_row=16)),
        ).run()
    assert scores.greedy.score.em == 100.0
    assert scores.greedy.score.questions == 2
    assert scores.left_out == 2
    assert scores.exact_matches() == (1.0, None, 1.0)
    predictions = scores.predictions().decode().splitlines()
    assert [line.count('"em": null') for line in predictions] == [0, 2, 0]
    printed = " ".join((tmp_path / "console").read_text().split())
    for kind in ("greedy", "sampled"):
        assert (
            f"round 1, {kind}: 1 of 3 episodes are left out of the scores because a search failed"
            in printed
        )


def test_the_closing_table_shows_what_is_left_out_where_something_is():
    row = PhaseRow(name="round 1", em=100.0, f1=100.0, questions=2, left_out=2, seconds=1.0)
    assert "left out" in plain(closing_table([row]))
    assert "left out" not in plain(closing_table([dataclasses.replace(row, left_out=0)]))


def test_an_evaluation_whose_retriever_is_down_keeps_nothing(tmp_path):
    stored_evaluations: list[Sequence[Trajectory]] = []
    questions = [dataclasses.replace(QUESTION, id=str(number)) for number in range(3)]
    broken = Failing()
    broken.failures = 1000
    task: Any = types.SimpleNamespace(
        rule="two_wiki",
        questions=lambda split: questions,
        environment=everywhere(broken),
        environment_kind="graph",
    )
    config: Any = types.SimpleNamespace(
        eval=types.SimpleNamespace(split="dev", questions=3, temperature=1.0), seed=0
    )

    class Scored(Model):
        policy_version = 0

        def reset_cache(self) -> None: ...

    def keep(name: str, play: Callable[[], Sequence[Trajectory]]) -> Sequence[Trajectory]:
        stored_evaluations.append(play())
        return stored_evaluations[-1]

    with (
        (tmp_path / "console").open("w") as console,
        pytest.raises(UserError, match="a search failed in all 3"),
    ):
        PolicyEvaluator(
            name="round 1",
            agent=agent(),
            reward=F1,
            generator=Scored(),
            task=task,
            config=config,
            progress=Progress(console, clock=lambda: 0.0),
            concurrency=2,
            preemption=types.SimpleNamespace(enter=lambda *_: None, check=lambda: None),  # pyright: ignore[reportArgumentType]
            keep=keep,
        ).run()
    assert stored_evaluations == []
