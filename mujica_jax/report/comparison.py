"""Agents and tasks side by side: a table for the console and as Markdown, JSON, and a picture of
the scores."""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mujica_jax import metrics
from mujica_jax.report.text import text_table
from mujica_jax.runtime.extras import import_extra

HEADINGS = ("task", "agent", "EM", "F1", "searches", "tokens", "seconds", "EM against the first")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """One agent on one task, greedily."""

    task: str
    agent: str
    summary: dict[str, Any]  # of the evaluation
    # of each question, 0 to 1, in the task's order; None where a search failed
    em: tuple[float | None, ...]


def rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """What is written as JSON: the summary of each, and how it differs from the first agent on the
    same questions: the first ones, where it was asked fewer. Questions at which a search of either
    agent failed are left out.
    """
    first: dict[str, Compared] = {}
    found = []
    for one in compared:
        base = first.setdefault(one.task, one)
        row = {"task": one.task, "agent": one.agent, **one.summary}
        pairs = _scored_by_both(base, one)
        if base is not one and pairs:
            before, after = zip(*pairs, strict=True)
            difference, interval, worse = metrics.paired_bootstrap(before, after)
            row["against"] = {
                "agent": base.agent,
                "questions": len(pairs),
                "em": round(difference, 2),
                "em_interval": [round(bound, 2) for bound in interval],
                "share_not_better": round(worse, 4),
            }
        found.append(row)
    return found


def _scored_by_both(base: Compared, other: Compared) -> list[tuple[float, float]]:
    """Return the exact matches of the questions that both agents were scored on."""
    return [
        (before, after)
        for before, after in zip(base.em, other.em, strict=False)
        if before is not None and after is not None
    ]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    def with_interval(value: float, interval: Sequence[float], form: str, to: str) -> str:
        low, high = (format(bound, form) for bound in interval)
        return f"{format(value, form)} ({low}{to}{high})"

    em, f1 = (
        with_interval(row[name], row[f"{name}_interval"], ".1f", "-") for name in ("em", "f1")
    )
    numbers = (f"{row['searches']:.2f}", f"{row['tokens']:.0f}", f"{row['seconds']:.1f}")
    against = row.get("against")
    difference = (
        ""
        if against is None
        else with_interval(against["em"], against["em_interval"], "+.1f", " to ")
    )
    return (row["task"], row["agent"], em, f1, *numbers, difference)


def markdown(found: Sequence[dict[str, Any]]) -> str:
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *(cells(row) for row in found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(found: Sequence[dict[str, Any]]) -> Table:
    return text_table(HEADINGS, map(cells, found), left=2, wrap=True)


def draw(found: Sequence[dict[str, Any]]) -> bytes:
    """EM of each with its interval, as PNG. Raises UserError where matplotlib is missing."""
    figures = import_extra("matplotlib.figure", "--plot", extra="plots")

    labels = [f"{row['task']}\n{row['agent']}" for row in found]
    figure = figures.Figure(figsize=(1.5 + 1.1 * len(found), 4), layout="constrained")
    axes = figure.add_subplot()
    heights = [row["em"] for row in found]
    errors = [
        [row["em"] - row["em_interval"][0] for row in found],
        [row["em_interval"][1] - row["em"] for row in found],
    ]
    axes.bar(labels, heights, yerr=errors, capsize=4)
    axes.set_ylabel("EM, percent, with 95% intervals")
    axes.tick_params(axis="x", labelrotation=45)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()
