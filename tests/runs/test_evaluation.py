"""Scores of a policy by question kind, against numbers worked out by hand."""

import contextlib
import dataclasses
import io
import json
import types
from typing import Any

import pytest

from mujica_jax.records import GoldPassage, Search, StopReason, Trajectory
from mujica_jax.report.progress import Progress
from mujica_jax.report.results import score_table
from mujica_jax.report.text import plain
from mujica_jax.rewards.reward import find_reward
from mujica_jax.runs.evaluation import Evaluation, PolicyEvaluator, Scores, summarise
from tests.helpers.little_agent import (
    QUESTION,
    LittleWorld,
    ToldPolicy,
    agent,
    answer,
    completion,
    everywhere,
    play,
    read,
    search,
    tokenizer,
)

# kind, gold answers, what was answered, how it ended -> EM and F1 in percent
EPISODES = [
    ("comparison", ("Ghent",), "Ghent", StopReason.ANSWERED, 100.0, 100.0),
    (
        "comparison",
        ("Ghent",),
        "Ghent, Belgium",
        StopReason.ANSWERED,
        0.0,
        200 / 3,
    ),  # precision 1/2, recall 1
    ("comparison", ("no",), "yes", StopReason.ANSWERED, 0.0, 0.0),
    (
        "compositional",
        ("First Cemetery of Athens", "Athens"),
        "the athens",
        StopReason.ANSWERED,
        100.0,
        100.0,
    ),
    ("compositional", ("Ghent",), "Ghent", StopReason.ITERATION_LIMIT, 0.0, 0.0),
    ("", ("Ghent",), "", StopReason.NO_ACTION, 0.0, 0.0),
]
QUESTIONS = [
    dataclasses.replace(QUESTION, id=str(number), kind=kind, answers=golds)
    for number, (kind, golds, *_) in enumerate(EPISODES)
]


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    searched = play(ToldPolicy([search((0, "Who?")), answer("x")], {"Who?": read("[0]", "That.")}))
    return [
        dataclasses.replace(
            searched,
            question_id=str(number),
            answer=reply,
            stop_reason=reason,
            searches=searched.searches * (number % 3),  # 0, 1, 2, 0, 1, 2
        )
        for number, (_, _, reply, reason, _, _) in enumerate(EPISODES)
    ]


@pytest.fixture(scope="module")
def evaluation(trajectories) -> Evaluation:
    return summarise(QUESTIONS, trajectories, "two_wiki")


def test_scores_are_means_over_all_questions_whether_answered_or_not(evaluation):
    assert evaluation.score.em == pytest.approx(200 / 6)
    assert evaluation.score.f1 == pytest.approx((100 + 200 / 3 + 100) / 6)
    assert evaluation.score.questions == 6
    assert evaluation.searches == pytest.approx(6 / 6)


def test_scores_by_kind(evaluation):
    by_kind = evaluation.by_kind
    assert {kind: score.questions for kind, score in by_kind.items()} == {
        "comparison": 3,
        "compositional": 2,
        "other": 1,
    }
    for kind in ("comparison", "compositional", ""):
        expected = [
            (em, f1) for kind_of_episode, _, _, _, em, f1 in EPISODES if kind_of_episode == kind
        ]
        score = by_kind[kind or "other"]
        assert score.em == pytest.approx(sum(em for em, _ in expected) / len(expected))
        assert score.f1 == pytest.approx(sum(f1 for _, f1 in expected) / len(expected))


def test_an_episode_that_did_not_answer_scores_zero_whatever_it_holds(trajectories):
    unanswered = [
        dataclasses.replace(trajectory, answer="Ghent") for trajectory in trajectories[4:]
    ]
    scored = summarise(QUESTIONS[4:], unanswered, "two_wiki")
    assert scored.score.em == 0.0
    assert scored.score.f1 == 0.0


def test_the_rule_of_the_task_decides(trajectories):
    lenient = summarise(QUESTIONS[:3], trajectories[:3], "cover_em")
    assert lenient.score.em == pytest.approx(200 / 3), "Ghent is part of Ghent, Belgium"


def test_stop_reasons_are_counted(evaluation):
    assert evaluation.stop_reasons == {"answered": 4, "iteration_limit": 1, "no_action": 1}


def test_the_interval_holds_the_score_and_lies_within_the_scale(evaluation):
    low, high = evaluation.score.em_interval
    assert 0 <= low < evaluation.score.em < high <= 100
    assert summarise(QUESTIONS[:1], evaluation.trajectories[:1], "two_wiki").score.em_interval == (
        100.0,
        100.0,
    )


def test_the_summary_says_in_rounded_numbers_what_was_measured(evaluation):
    summary = evaluation.summary()
    assert summary["em"] == 33.33
    assert summary["f1"] == 44.44
    assert summary["questions"] == 6
    assert summary["searches"] == 1.0
    assert summary["stop_reasons"] == evaluation.stop_reasons
    assert set(summary["by_kind"]) == {"comparison", "compositional", "other"}
    comparison = summary["by_kind"]["comparison"]
    assert comparison["em"] == 33.33
    assert comparison["f1"] == 55.56
    assert comparison["questions"] == 3


def test_as_many_trajectories_as_questions(trajectories):
    with pytest.raises(ValueError, match="shorter"):
        summarise(QUESTIONS, trajectories[:-1], "two_wiki")


def test_the_score_of_a_question_is_the_mean_over_its_episodes(trajectories):
    """There are two questions and three passes.

    The first is right once in two episodes whose search worked, the second in all three: EM (50 +
    100) / 2.
    """
    right = dataclasses.replace(trajectories[0], question_id="0")
    wrong = dataclasses.replace(right, answer="Bruges")
    failed = dataclasses.replace(right, stop_reason=StopReason.RETRIEVER_FAILED)
    second = dataclasses.replace(right, question_id="1")
    passes = [right, second, wrong, second, failed, second]
    evaluation = summarise(QUESTIONS[:2], passes, "two_wiki")
    assert evaluation.score.em == 75.0
    assert evaluation.score.questions == 2
    assert evaluation.left_out == 1
    scores = Scores(
        questions=QUESTIONS[:2],
        rule="two_wiki",
        greedy=evaluation_of(right, second),
        sampled=evaluation,
    )
    rows = [json.loads(line) for line in scores.predictions().decode().splitlines()]
    assert rows[0]["sampled"] == {
        "predictions": ["Ghent", "Bruges", "Ghent"],
        "em": 0.5,
        "f1": 0.5,
    }
    assert rows[1]["sampled"]["em"] == 1.0


def evaluation_of(*played: Trajectory) -> Evaluation:
    return summarise(QUESTIONS[: len(played)], played, "two_wiki")


def test_scores_shown_do_not_depend_on_the_reward():
    """Under f1_format the half-right and the silent episode earn something else.

    The console and both files show the same EM and F1.
    """
    replies = {"0": answer("Ghent"), "1": answer("Ghent, Belgium"), "2": "Hm."}
    questions = [
        dataclasses.replace(QUESTION, id=number, text=f"Question {number}?", kind="one")
        for number in replies
    ]
    task: Any = types.SimpleNamespace(
        rule="two_wiki",
        questions=lambda split: questions,
        environment=everywhere(LittleWorld()),
        environment_kind="graph",
    )
    section = types.SimpleNamespace(split="dev", questions=3, temperature=1.0)
    asked: list[tuple[float, str]] = []
    nothing: Any = types.SimpleNamespace(enter=lambda *_: None, check=lambda: None)

    class Model:
        policy_version = 0

        def reset_cache(self) -> None: ...

        async def generate(self, prompt, params, *, continues=False):
            shown = tokenizer().decode(prompt)
            number = next(number for number in replies if f"Question {number}?" in shown)
            asked.append((params.temperature, number))
            # The sampled answer is right, the greedy one is not.
            is_right = number == "1" and params.temperature > 0
            return completion(answer("Ghent") if is_right else replies[number])

    def shown(reward: str, samples: int = 1) -> tuple[list[str], dict, list[dict], list[float]]:
        console = io.StringIO()
        config: Any = types.SimpleNamespace(eval=section, seed=0)
        with contextlib.closing(console):
            scores = PolicyEvaluator(
                name="policy 0",
                agent=agent(),
                reward=find_reward(reward, "two_wiki"),
                generator=Model(),
                task=task,
                config=config,
                progress=Progress(console, clock=lambda: 0.0),
                concurrency=1,
                preemption=nothing,
                samples=samples,
            ).run()
            summary = scores.summary()
            for values in summary.values():
                del values["seconds"]
            lines = [
                *console.getvalue().splitlines(),
                plain(score_table(summary["greedy"], summary.get("sampled"))),
            ]
        rows = [json.loads(line) for line in scores.predictions().decode().splitlines()]
        return lines, summary, rows, [row.pop("reward") for row in rows]

    *by_f1, f1_rewards = shown("f1")
    *by_format, format_rewards = shown("f1_format")
    assert asked == [(temperature, number) for temperature in (0.0, 1.0) for number in replies] * 2
    assert by_f1 == by_format
    assert by_f1[1]["greedy"]["em"] == 33.33
    assert [(row["em"], row["sampled"]["em"]) for row in by_f1[2]] == [
        (1.0, 1.0),
        (0.0, 1.0),
        (0.0, 0.0),
    ]
    assert f1_rewards == pytest.approx([1.0, 2 / 3, 0.0])
    assert format_rewards == pytest.approx([1.0, 0.7, 0.0])
    asked.clear()
    lines, summary, rows, _ = shown("f1", samples=0)
    assert asked == [(0.0, number) for number in replies]
    assert "sampled" not in lines[-1]
    assert summary == {"greedy": by_f1[1]["greedy"]}
    assert [
        row | {"sampled": full["sampled"]} for row, full in zip(rows, by_f1[2], strict=True)
    ] == by_f1[2]
    asked.clear()
    _, summary, rows, _ = shown("f1", samples=2)
    passes = (0.0, 1.0, 1.0)
    assert asked == [(temperature, number) for temperature in passes for number in replies]
    one_sample: Any = by_f1[1]
    two_samples: Any = summary
    assert two_samples["greedy"] == one_sample["greedy"]
    assert two_samples["sampled"]["em"] == one_sample["sampled"]["em"]
    assert rows[1]["sampled"] == {"predictions": ["Ghent", "Ghent"], "em": 1.0, "f1": 1.0}


def test_what_was_read_is_compared_with_the_gold_passages():
    gold = (GoldPassage(title="Amber Tide"), GoldPassage(title="Ilse Vand"))
    asked = dataclasses.replace(
        QUESTION, gold_passages=gold, answer_sets=((("Ghent",), ("Bruges",)),)
    )
    materials = ("Amber Tide: A film.", "Tin Orchard: A film.")
    read_search = Search(iteration=0, query="a", materials=materials, selected=(0,))
    unread_search = Search(
        iteration=1, query="b", materials=("Ilse Vand: Born in Ghent.",), selected=()
    )
    trajectory = dataclasses.replace(
        play(ToldPolicy([answer("Ghent")])), searches=(read_search, unread_search)
    )
    summary = summarise([asked], [trajectory], "two_wiki").summary()
    # all gold ones were found; the one that was selected is one of two
    assert summary["gold_found"] == 100.0
    assert summary["support_em"] == 0.0
    assert summary["support_f1"] == 66.67
    assert summary["set_f1"] == 66.67
    unread = dataclasses.replace(
        trajectory,
        searches=tuple(
            dataclasses.replace(searched, selected=()) for searched in trajectory.searches
        ),
    )
    assert summarise([asked], [unread], "two_wiki").summary()["support_f1"] == 80.0, (
        "2 of 3 and 2 of 2"
    )
    assert "gold_found" not in summarise([asked], [trajectory], "two_wiki", "graph").summary()
