"""What a round asked and kept is written down."""

import dataclasses
import json
import types

from mujica_jax.runs.selection import record_selection
from mujica_jax.trajectories.store import Store
from tests.helpers.viewed_runs import QUESTIONS, other_attempts, solved


def fake_run(directory):
    """Stands in for a `Run`: its store, and a task with the questions."""
    task = types.SimpleNamespace(questions=lambda split: list(QUESTIONS.values()))
    return types.SimpleNamespace(store=Store(directory), task=task)


def test_each_question_of_the_round_is_written_once(tmp_path):
    record_selection(fake_run(tmp_path), 2, [solved(), *other_attempts()], [])
    lines = (tmp_path / "rounds" / "0002" / "questions.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["q1", "q2"]
    assert json.loads(lines[0]) == {
        "id": "q1",
        "kind": "compositional",
        "question": "In which city was the director of Snow born?",
        "answers": ["Oslo", "Kristiania"],
        "gold_passages": [
            {"title": "Snow", "text": "Snow is a film by Ada Crane.", "by_title": False},
            {"title": "Ada Crane", "text": "", "by_title": True},
        ],
    }


def test_kept_trajectories_are_named_by_question_and_attempt(tmp_path):
    _, answered = other_attempts()
    record_selection(fake_run(tmp_path), 2, [solved(), *other_attempts()], [solved(), answered])
    kept = json.loads((tmp_path / "rounds" / "0002" / "kept.json").read_text())
    assert kept == {"kept": [["q1", 0], ["q2", 1]]}


def test_a_second_start_changes_nothing(tmp_path):
    run = fake_run(tmp_path)
    record_selection(run, 2, [solved()], [solved()])
    record_selection(run, 2, [dataclasses.replace(solved(), question_id="q2")], [])
    kept = json.loads((tmp_path / "rounds" / "0002" / "kept.json").read_text())
    assert kept == {"kept": [["q1", 0]]}
