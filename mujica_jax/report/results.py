"""The end of a run: its phases as a table and as `summary.json`, and one solved question as a
tree."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mujica_jax.records import Question, StopReason, Trajectory
from mujica_jax.report.text import text_table, visible


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """One row of the closing table: what a phase cost and how the policy after it scores on
    held-out questions."""

    name: str
    em: float  # greedy decoding, percent
    f1: float
    # at the evaluation temperature, percent; None where it was not measured
    em_sampled: float | None = None
    f1_sampled: float | None = None
    questions: int  # held-out questions that the greedy scores are means over
    left_out: int = 0  # episodes of both evaluations whose search failed: no score counts them
    trajectories: int = 0  # sampled in this phase
    accepted: int = 0  # of these, kept for training
    # read and generated that went through the model to sample and to score them; a script's do not
    tokens: int = 0
    searches: float | None = None  # a question, in the greedy evaluation
    # kind -> em, em_interval, f1, questions
    by_kind: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    seconds: float  # the phase and its evaluation


def summary_dict(phases: Sequence[PhaseRow], **about: Any) -> dict[str, Any]:
    """The content of `summary.json`: what the run is, its phases, and their seconds, each of the
    start that finished it.

    Numbers are rounded to two decimals; `PhaseRow(**phase)` takes a phase back.
    """
    rows = tuple(dataclasses.asdict(phase) for phase in phases)
    return rounded({**about, "phases": rows, "seconds": sum(phase.seconds for phase in phases)})


def closing_table(phases: Sequence[PhaseRow]) -> Table:
    """Return a table with a row a phase: scores in percent, greedy unless called sampled, and
    searches a question.

    If searches failed in an evaluation, a last column counts the episodes that are left out."""
    headings = [
        "phase",
        "EM",
        "F1",
        "EM\nsampled",
        "F1\nsampled",
        "trajectories",
        "accepted",
        "searches",
        "minutes",
    ]
    has_left_out = any(phase.left_out for phase in phases)
    if has_left_out:
        headings.append("left out")
    rows = []
    for phase in phases:
        numbers = (phase.em, phase.f1, phase.em_sampled, phase.f1_sampled)
        scores = ("-" if number is None else f"{number:.1f}" for number in numbers)
        counts = (
            f"{count:,}" if phase.trajectories else "-"
            for count in (phase.trajectories, phase.accepted)
        )
        searches = "-" if phase.searches is None else f"{phase.searches:.2f}"
        left_out = (f"{phase.left_out:,}",) if has_left_out else ()
        rows.append(
            (phase.name, *scores, *counts, searches, f"{phase.seconds / 60:.1f}", *left_out)
        )
    return text_table(headings, rows)


def score_table(greedy: Mapping[str, Any], sampled: Mapping[str, Any] | None = None) -> Table:
    """A row a question kind and one for all of them, from the summaries of evaluations of the same
    questions."""
    scores, rows = ("EM", "95% of EM", "F1"), []
    for kind, row in [*sorted(greedy["by_kind"].items()), ("all", greedy)]:
        beside: tuple[str, ...] = ()
        if sampled:
            other = sampled if row is greedy else sampled["by_kind"].get(kind)
            beside = (
                ("-", "-", "-") if other is None else _score_cells(other)
            )  # all of its searches failed
        rows.append((kind, f"{row['questions']:,}", *_score_cells(row), *beside))
    return text_table(
        ("kind", "questions", *scores, *(f"{score}\nsampled" for score in scores if sampled)), rows
    )


def question_tree(question: Question, trajectory: Trajectory) -> Tree:
    """Question -> iterations -> sub-questions, each with the evidence its worker chose and the
    sentence it wrote; then the answer, and its reward where the question has gold answers.

    Data is shown literally: "[bold]" in a passage is no markup, and control characters are made
    visible.
    """

    def node(label: str, text: str = "", style: str = "") -> Text:
        return Text.assemble((label, "dim"), (visible(text), style))

    assert question.id == trajectory.question_id, (
        f"question {question.id}, trajectory of {trajectory.question_id}"
    )
    tree = Tree(node("", question.text, "bold"), guide_style="dim")
    ordered = sorted(trajectory.searches, key=lambda search: search.iteration)
    for number, (_, group) in enumerate(
        itertools.groupby(ordered, key=lambda search: search.iteration), start=1
    ):
        iteration = tree.add(node(f"iteration {number}"))
        for search in group:
            branch = iteration.add(
                node(f"{search.entity and f'[{visible(search.entity)}] '}", search.query, "cyan")
            )
            size = len(search.materials)
            for i in search.selected:
                nowhere = f"number {i} of {size} (does not exist)"
                branch.add(node("evidence: ", search.materials[i] if 0 <= i < size else nowhere))
            if search.sentence or not search.found:
                branch.add(
                    node("worker: ", search.sentence or f"nothing found in {size} materials")
                )
            elif not search.selected:  # of an agent without workers
                for material in search.materials:
                    branch.add(node("found: ", material))
    if trajectory.stop_reason is StopReason.ANSWERED:
        tree.add(node("answer: ", trajectory.answer, "bold"))
    else:
        tree.add(node("no answer: ", trajectory.stop_reason.value, "red"))
        turns = [
            turn for conversation in trajectory.conversations[:1] for turn in conversation.turns
        ]
        if written := [turn.text for turn in turns if turn.role == "model"]:
            tree.add(node("last turn: ", written[-1]))
    if question.answers:
        tree.add(node("gold: ", " | ".join(question.answers)))
        parts = ", ".join(
            f"{name} {value:.2f}" for name, value in trajectory.rewards_by_part.items()
        )
        tree.add(node("reward: ", f"{trajectory.reward:.2f}{f' ({parts})' if parts else ''}"))
    return tree


def _score_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    low, high = row["em_interval"]
    return f"{row['em']:.1f}", f"{low:.1f}-{high:.1f}", f"{row['f1']:.1f}"


def rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [rounded(entry) for entry in value]
    return round(value, 2) if isinstance(value, float) else value
