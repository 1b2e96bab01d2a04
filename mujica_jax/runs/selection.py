"""Record what a round asked and what training kept, for people who look at the run.

    rounds/0003/questions.jsonl    the questions of the round, one JSON object in each line
    rounds/0003/kept.json          which trajectories the policy learns from

No program decides anything by these files. Without them a viewer could show neither the text of a
question nor its gold passages, because a trajectory names its question only by the id.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from mujica_jax.records import Question, Trajectory
from mujica_jax.runs.run import Run
from mujica_jax.runtime import distributed


def question_record(question: Question) -> dict[str, Any]:
    """Return a question as a JSON object. Files of predictions have the same keys."""
    return {
        "id": question.id,
        "kind": question.kind,
        "question": question.text,
        "answers": question.answers,
        "gold_passages": [dataclasses.asdict(passage) for passage in question.gold_passages],
    }


def record_selection(
    run: Run, number: int, trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]
) -> None:
    """Store the questions of a round, and which of its trajectories are kept for training.

    Files that an earlier start of the run stored are not changed.
    """
    if not distributed.is_primary():
        return
    asked_ids = dict.fromkeys(trajectory.question_id for trajectory in trajectories)
    question_of = {question.id: question for question in run.task.questions("train")}
    lines = []
    for question_id in asked_ids:
        record = question_record(question_of[question_id])
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    folder = f"rounds/{number:04d}"
    run.store.create(f"{folder}/questions.jsonl", "".join(lines).encode())
    kept_names = [[trajectory.question_id, trajectory.attempt] for trajectory in kept]
    run.store.write_json_once(f"{folder}/kept.json", {"kept": kept_names})
