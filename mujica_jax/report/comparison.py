"""Compare the results of evaluations.

There are two kinds of comparison. Several agents or tasks are compared in one table, which is
printed and also written as Markdown, JSON and a picture. Two policies are compared question by
question: `eval` reads the predictions that an earlier evaluation wrote for the first policy.
"""

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mujica_jax import metrics
from mujica_jax.errors import UserError
from mujica_jax.records import Question
from mujica_jax.report.text import text_table
from mujica_jax.runtime.extras import import_extra

# The scores of each question (0 to 1), by the question's id. The names of the scores are the keys
# of SCORE_LABELS. The sampled ones are missing if the evaluation was greedy only. A score is None
# if a search failed.
QuestionScores = Mapping[str, Mapping[str, float | None]]
SCORE_LABELS = {
    "em": "EM",
    "f1": "F1",
    "em_sampled": "EM, sampled",
    "f1_sampled": "F1, sampled",
}
# The headings of the comparison table. Searches, tokens and seconds are means per question.
HEADINGS = ("task", "agent", "EM", "F1", "searches", "tokens", "seconds", "EM vs. first agent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """The result of one agent on one task, with greedy decoding.

    Attributes:
        task: The name of the task.
        agent: The name of the agent.
        summary: The summary of the evaluation (`runs.evaluation.Evaluation.summary`).
        em: The exact match of each question (0 to 1), in the task's order. None if a search failed.
    """

    task: str
    agent: str
    summary: dict[str, Any]
    em: tuple[float | None, ...]


def rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the comparison as JSON objects, one for each result.

    Each holds the result's summary and, under `against`, its difference to the first agent on the
    same task. Two agents are compared on the same questions. If one of them was asked fewer, only
    these are used. A question is left out if a search of either agent failed.
    """
    first_of_task: dict[str, Compared] = {}
    result_rows = []
    for result in compared:
        base = first_of_task.setdefault(result.task, result)
        row = {"task": result.task, "agent": result.agent, **result.summary}
        pairs = _scored_by_both(base, result)
        if result is not base and pairs:
            base_scores, scores = zip(*pairs, strict=True)
            difference, interval, share_not_better = metrics.paired_bootstrap(base_scores, scores)
            row["against"] = {
                "agent": base.agent,
                "questions": len(pairs),
                "em": round(difference, 2),
                "em_interval": [round(bound, 2) for bound in interval],
                "share_not_better": round(share_not_better, 4),
            }
        result_rows.append(row)
    return result_rows


def _scored_by_both(base: Compared, other: Compared) -> list[tuple[float, float]]:
    """Return the exact matches of both agents, for each question that both were scored on."""
    return [
        (base_score, score)
        for base_score, score in zip(base.em, other.em, strict=False)
        if base_score is not None and score is not None
    ]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one row of the table. They belong to the columns of `HEADINGS`."""
    against = row.get("against")
    difference = ""
    if against is not None:
        difference = _with_interval(against["em"], against["em_interval"], "+.1f", between=" to ")
    return (
        row["task"],
        row["agent"],
        _with_interval(row["em"], row["em_interval"], ".1f", between="-"),
        _with_interval(row["f1"], row["f1_interval"], ".1f", between="-"),
        f"{row['searches']:.2f}",
        f"{row['tokens']:.0f}",
        f"{row['seconds']:.1f}",
        difference,
    )


def _with_interval(
    value: float, interval: Sequence[float], number_format: str, *, between: str
) -> str:
    """Return a number with its interval as text, as in `61.5 (58.0-65.1)`."""
    low, high = interval
    interval_text = f"{format(low, number_format)}{between}{format(high, number_format)}"
    return f"{format(value, number_format)} ({interval_text})"


def markdown(result_rows: Sequence[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *(cells(row) for row in result_rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(result_rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for the console."""
    return text_table(HEADINGS, map(cells, result_rows), left_columns=2, wrap=True)


def draw(result_rows: Sequence[dict[str, Any]]) -> bytes:
    """Draw a bar chart of all EM scores with their 95% intervals, and return it as a PNG file.

    Raises UserError if matplotlib is not installed.
    """
    figures = import_extra("matplotlib.figure", "--plot", extra="plots")

    labels = [f"{row['task']}\n{row['agent']}" for row in result_rows]
    figure = figures.Figure(figsize=(1.5 + 1.1 * len(result_rows), 4), layout="constrained")
    axes = figure.add_subplot()
    heights = [row["em"] for row in result_rows]
    errors = [
        [row["em"] - row["em_interval"][0] for row in result_rows],
        [row["em_interval"][1] - row["em"] for row in result_rows],
    ]
    axes.bar(labels, heights, yerr=errors, capsize=4)
    axes.set_ylabel("EM, percent, with 95% intervals")
    axes.tick_params(axis="x", labelrotation=45)

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def read_scores(result: str) -> QuestionScores:
    """Return the scores of each question of an earlier result.

    `result` is the result file of an earlier evaluation. The scores are in the file of predictions
    next to it. Raises UserError if that file cannot be read, or if `eval` did not write it.
    """
    file = Path(result).with_suffix(".predictions.jsonl")
    try:
        return scores_of_predictions(file.read_bytes())
    except OSError as error:
        raise UserError(
            f"--beside is {result}, but its predictions {file} cannot be read ({error.strerror}): "
            "give the result file of an evaluation, and keep its predictions in the same folder"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--beside is {result}, but {file} does not hold predictions of mujica_jax.eval: give "
            "the result file of an evaluation"
        ) from error


def scores_of_predictions(predictions: bytes) -> QuestionScores:
    """Return the scores of each question from the content of a predictions file."""
    scores_by_id = {}
    for line in predictions.decode().splitlines():
        row = json.loads(line)
        scores = {"em": row["em"], "f1": row["f1"]}
        if "sampled" in row:
            scores["em_sampled"] = row["sampled"]["em"]
            scores["f1_sampled"] = row["sampled"]["f1"]
        scores_by_id[row["id"]] = scores
    return scores_by_id


def check_same_questions(
    result: str, earlier: QuestionScores, questions: Sequence[Question]
) -> None:
    """Check that an earlier result covers exactly these questions. Raises UserError otherwise."""
    ids = {question.id for question in questions}
    if ids != earlier.keys():
        raise UserError(
            f"--beside {result} has {len(earlier)} questions and this evaluation has {len(ids)}; "
            f"{len(ids & earlier.keys())} are in both: compare results on the same questions, with "
            "the same --task, --eval.split and --eval.questions"
        )


def differences(earlier: QuestionScores, scores: QuestionScores) -> dict[str, Any]:
    """Return how much higher each score is than in the earlier result, in percentage points.

    Each difference has a 95% bootstrap interval, paired over the questions. A score is left out if
    only one of the two results has it. A question is left out if a search failed in either result.
    """
    result: dict[str, Any] = {}
    for name in SCORE_LABELS:
        pairs = []
        for question_id, question_scores in scores.items():
            first = earlier[question_id].get(name)
            second = question_scores.get(name)
            if first is not None and second is not None:
                pairs.append((first, second))
        if not pairs:
            continue
        first_scores, second_scores = zip(*pairs, strict=True)
        difference, interval, _ = metrics.paired_bootstrap(first_scores, second_scores)
        result[name] = {
            "questions": len(pairs),
            "difference": round(difference, 2),
            "interval": [round(bound, 2) for bound in interval],
        }
    return result


def difference_table(score_differences: Mapping[str, Any]) -> Table:
    """Return the differences to an earlier result as a table for the console."""
    rows = []
    for name, values in score_differences.items():
        difference = _with_interval(
            values["difference"], values["interval"], "+.1f", between=" to "
        )
        rows.append((SCORE_LABELS[name], f"{values['questions']:,}", difference))
    return text_table(("score", "questions", "difference to the earlier result"), rows)
