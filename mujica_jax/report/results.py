"""Format the results of a run: tables of scores, `summary.json`, and trees of questions."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mujica_jax.records import Question, Search, StopReason, Trajectory
from mujica_jax.report.text import text_table, visible


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """One row of the closing table: the cost of a phase, and the scores of the policy after it.

    Attributes:
        name: The name of the phase.
        em: Exact match with greedy decoding on the held-out questions, in percent.
        f1: F1 with greedy decoding on the held-out questions, in percent.
        em_sampled: Exact match at the evaluation temperature, in percent. None if not measured.
        f1_sampled: F1 at the evaluation temperature, in percent. None if not measured.
        questions: Number of held-out questions that the greedy scores are means over.
        left_out: Number of episodes, in both evaluations, that no score counts because a search
            failed.
        trajectories: Number of trajectories sampled in this phase.
        accepted: Number of these trajectories that are kept for training.
        tokens: Number of tokens that went through the model to sample trajectories and to score
            them, both read and generated ones. Tokens that a script wrote do not count.
        searches: Mean number of searches per question, in the greedy evaluation.
        by_kind: The greedy scores of each kind of question: em, em_interval, f1 and questions.
        seconds: Duration of the phase with its evaluation, in seconds.
    """

    name: str
    em: float
    f1: float
    em_sampled: float | None = None
    f1_sampled: float | None = None
    questions: int
    left_out: int = 0
    trajectories: int = 0
    accepted: int = 0
    tokens: int = 0
    searches: float | None = None
    by_kind: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    seconds: float


def summary_dict(phases: Sequence[PhaseRow], **run_facts: Any) -> dict[str, Any]:
    """Return the content of `summary.json`: `run_facts`, the phases, and their total seconds.

    If a run was restarted, the seconds of a phase count only the start that finished it. Numbers
    are rounded to two decimals. `PhaseRow(**phase)` turns a stored phase into an object again.
    """
    rows = tuple(dataclasses.asdict(phase) for phase in phases)
    seconds = sum(phase.seconds for phase in phases)
    return rounded({**run_facts, "phases": rows, "seconds": seconds})


def closing_table(phases: Sequence[PhaseRow]) -> Table:
    """Return a table with a row for each phase.

    Scores are in percent. They come from greedy decoding unless the heading says "sampled". The
    column "searches" is a mean per question. If a search failed in any evaluation, a last column
    counts the episodes that are left out of the scores.
    """
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
        row = [phase.name]
        for score in (phase.em, phase.f1, phase.em_sampled, phase.f1_sampled):
            row.append("-" if score is None else f"{score:.1f}")
        for count in (phase.trajectories, phase.accepted):
            row.append(f"{count:,}" if phase.trajectories else "-")
        row.append("-" if phase.searches is None else f"{phase.searches:.2f}")
        row.append(f"{phase.seconds / 60:.1f}")
        if has_left_out:
            row.append(f"{phase.left_out:,}")
        rows.append(row)
    return text_table(headings, rows)


def score_table(greedy: Mapping[str, Any], sampled: Mapping[str, Any] | None = None) -> Table:
    """Return a table of scores with a row for each kind of question, and one for all questions.

    `greedy` and `sampled` are the summaries of two evaluations of the same questions. The column
    "95% of EM" is the 95% bootstrap interval of EM.
    """
    headings = ["kind", "questions", "EM", "95% of EM", "F1"]
    if sampled:
        headings += ["EM\nsampled", "95% of EM\nsampled", "F1\nsampled"]

    rows = []
    for kind, summary in sorted(greedy["by_kind"].items()):
        row = [kind, f"{summary['questions']:,}", *_score_cells(summary)]
        if sampled:
            # The kind is missing if a search failed in all of its episodes.
            row += _score_cells(sampled["by_kind"].get(kind))
        rows.append(row)

    all_questions = ["all", f"{greedy['questions']:,}", *_score_cells(greedy)]
    if sampled:
        all_questions += _score_cells(sampled)
    return text_table(headings, [*rows, all_questions])


def question_tree(question: Question, trajectory: Trajectory) -> Tree:
    """Return a question and its trajectory as a tree: iterations, sub-questions, evidence, answer.

    Below each sub-question are the evidence that the worker chose and the sentence that the worker
    wrote. If the question has gold answers, they are shown with the reward.

    All texts are shown literally: "[bold]" in a passage is not read as markup, and control
    characters are escaped.
    """
    assert question.id == trajectory.question_id, (
        f"the trajectory belongs to question {trajectory.question_id}, not to {question.id}"
    )
    tree = Tree(_node("", question.text, "bold"), guide_style="dim")

    # Show the searches, grouped by iteration.
    ordered = sorted(trajectory.searches, key=lambda search: search.iteration)
    groups = itertools.groupby(ordered, key=lambda search: search.iteration)
    for number, (_, searches) in enumerate(groups, start=1):
        iteration = tree.add(_node(f"iteration {number}"))
        for search in searches:
            _add_search(iteration, search)

    # Show the answer, or why the episode ended without one.
    if trajectory.stop_reason is StopReason.ANSWERED:
        tree.add(_node("answer: ", trajectory.answer, "bold"))
    else:
        tree.add(_node("no answer: ", trajectory.stop_reason.value, "red"))
        last_turn = _last_model_turn(trajectory)
        if last_turn is not None:
            tree.add(_node("last turn: ", last_turn))

    # Show the reward and its parts.
    if question.answers:
        tree.add(_node("gold: ", " | ".join(question.answers)))
        reward = f"{trajectory.reward:.2f}"
        if trajectory.rewards_by_part:
            parts = [f"{name} {value:.2f}" for name, value in trajectory.rewards_by_part.items()]
            reward = f"{reward} ({', '.join(parts)})"
        tree.add(_node("reward: ", reward))
    return tree


def _node(label: str, text: str = "", style: str = "") -> Text:
    """Return one line of the tree: a dim label, followed by the text in a style of `rich`."""
    return Text.assemble((label, "dim"), (visible(text), style))


def _add_search(iteration: Tree, search: Search) -> None:
    """Add a sub-question to the tree, with its evidence and the worker's sentence.

    If the agent has no workers, all passages that the search returned are shown instead.
    """
    label = f"[{visible(search.entity)}] " if search.entity else ""
    branch = iteration.add(_node(label, search.query, "cyan"))

    materials = search.materials
    for index in search.selected:
        if 0 <= index < len(materials):
            branch.add(_node("evidence: ", materials[index]))
        else:
            branch.add(_node("evidence: ", f"number {index} of {len(materials)} (does not exist)"))

    if search.sentence:
        branch.add(_node("worker: ", search.sentence))
    elif not search.found:
        branch.add(_node("worker: ", f"nothing found in {len(materials)} materials"))
    elif not search.selected:
        # The agent has no workers and reads the search results itself.
        for material in materials:
            branch.add(_node("found: ", material))


def _last_model_turn(trajectory: Trajectory) -> str | None:
    """Return the text of the model's last turn in the first conversation; None without a turn."""
    if not trajectory.conversations:
        return None
    turns = [turn for turn in trajectory.conversations[0].turns if turn.role == "model"]
    return turns[-1].text if turns else None


def _score_cells(summary: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Return EM, its 95% interval and F1 as texts; dashes if nothing was scored."""
    if summary is None:
        return "-", "-", "-"
    low, high = summary["em_interval"]
    return f"{summary['em']:.1f}", f"{low:.1f}-{high:.1f}", f"{summary['f1']:.1f}"


def rounded(value: Any) -> Any:
    """Return a value with all its floats rounded to two decimals. Tuples become lists."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [rounded(entry) for entry in value]
    return round(value, 2) if isinstance(value, float) else value
