"""The questions of a round or of an evaluation as JSON lines.

A trajectory names its question only by the id. These lines give what a reader of trajectories needs
besides: the text of the question, its kind, its gold answers and its gold passages.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from mujica_jax.records import Question


def question_record(question: Question) -> dict[str, Any]:
    """Return a question as a JSON object. Files of predictions begin with the same keys."""
    return {
        "id": question.id,
        "kind": question.kind,
        "question": question.text,
        "answers": question.answers,
        "gold_passages": [dataclasses.asdict(passage) for passage in question.gold_passages],
    }


def encode_questions(questions: Iterable[Question]) -> bytes:
    """Return the questions as JSON lines."""
    lines = []
    for question in questions:
        lines.append(json.dumps(question_record(question), ensure_ascii=False) + "\n")
    return "".join(lines).encode()
