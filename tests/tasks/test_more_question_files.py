"""Question files that look right and are not: aliases that are no list, stray quotation marks,
QALD's ids.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mujica_jax.errors import UserError
from mujica_jax.tasks.open_domain.qald import read_qald
from mujica_jax.tasks.open_domain.records import read_open_records

PARAGRAPH = {
    "idx": 0,
    "title": "Lisma",
    "paragraph_text": "The mill is old.",
    "is_supporting": True,
}


def musique(**changes: Any) -> str:
    record = {
        "id": "2hop__1_2",
        "question": "Who built it?",
        "answer": "Ann Ode",
        "paragraphs": [PARAGRAPH],
    }
    return json.dumps(record | changes) + "\n"


def trivia(answer: dict[str, Any]) -> str:
    return json.dumps({"Data": [{"QuestionId": "t1", "Question": "Who?", "Answer": answer}]})


def read(tmp_path: Path, kind: str, name: str, text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the questions of a file with their answers."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    return [(record.text, record.answers) for record in read_open_records(tmp_path / name, kind)]


def test_a_text_in_the_place_of_a_list_of_aliases_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"dev.jsonl, line 1: .*the aliases are a string and must be a list"
    ):
        read(tmp_path, "musique", "dev.jsonl", musique(answer_aliases="A. Ode"))
    with pytest.raises(
        UserError, match=r"dev.json, record 0: .*the aliases are a string and must be a list"
    ):
        read(tmp_path, "triviaqa", "dev.json", trivia({"Value": "Ann Ode", "Aliases": "A. Ode"}))


def test_missing_aliases_are_none(tmp_path):
    expected = [("Who?", ("Ann Ode",))]
    assert (
        read(tmp_path, "triviaqa", "dev.json", trivia({"Value": "Ann Ode", "Aliases": None}))
        == expected
    )
    assert read(tmp_path, "musique", "dev.jsonl", musique(answer_aliases=None)) == [
        ("Who built it?", ("Ann Ode",))
    ]


def test_answerable_as_a_text_is_refused_because_false_would_count_as_true(tmp_path):
    with pytest.raises(
        UserError, match=r"line 1: .*answerable is 'false' and must be true or false"
    ):
        read(tmp_path, "musique", "dev.jsonl", musique(answerable="false"))


def test_a_quotation_mark_without_its_partner_does_not_swallow_the_lines_behind_it(tmp_path):
    table = 'Question,Answer\nWho?,Ann\nWhat?,"Heroes\nWhere?,Ghent\n'
    with pytest.raises(UserError, match=r"q.csv, line 3: not a row of a table"):
        read(tmp_path, "bamboogle", "q.csv", table)


def test_quoted_cells_are_read(tmp_path):
    table = 'Question,Answer\n"Who, x?","""Heroes"" by\nBowie"\n'
    assert read(tmp_path, "bamboogle", "q.csv", table) == [("Who, x?", ('"Heroes" by\nBowie',))]


def test_empty_rows_and_cells_of_a_spreadsheet_are_left_out(tmp_path):
    assert read(tmp_path, "bamboogle", "q.csv", "Question,Answer\nWho?,Ann,,\n,\n,,,\n") == [
        ("Who?", ("Ann",))
    ]


def test_a_column_that_is_named_twice_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"q.csv, line 1: a column name occurs twice \(Question, Question, Answer\)"
    ):
        read(tmp_path, "bamboogle", "q.csv", "Question,Question,Answer\nWho?,What?,Ann\n")


def qald(**changes: Any) -> dict[str, Any]:
    row = {"x": {"type": "uri", "value": "http://www.wikidata.org/entity/Q2"}}
    answers = [{"head": {"vars": ["x"]}, "results": {"bindings": [row]}}]
    question = [{"language": "en", "string": "Who?"}]
    return {
        "id": "1",
        "question": question,
        "query": {"sparql": "wd:Q1"},
        "answers": answers,
    } | changes


def wordings(text: object) -> list[dict[str, object]]:
    return [{"language": "en", "string": text}]


def read_qald_file(tmp_path: Path, *records: dict[str, Any]) -> list[dict[str, Any]]:
    (tmp_path / "qald_10.json").write_text(json.dumps({"questions": records}))
    return list(read_qald(str(tmp_path), "en"))


def test_one_id_for_two_questions_of_qald_is_refused_with_both_places(tmp_path):
    expected = r"question 1: the question 1 is 'Where\?' here and 'Who\?' in .*question 0"
    with pytest.raises(UserError, match=expected):
        read_qald_file(tmp_path, qald(id=1), qald(question=wordings("Where?")))


def test_a_question_of_qald_that_is_given_twice_counts_once(tmp_path):
    assert len(read_qald_file(tmp_path, qald(), qald())) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"id": None}, "the id is None and must be a string or a number"),
        ({"id": float("nan")}, "nan is not finite and must be a finite number"),
        ({"question": wordings(5)}, "the question is 5 and must be a string"),
        ({"question": wordings(" ")}, "the question is blank in the language en"),
        ({"question": wordings("Who \ud83d?")}, "cannot be written as UTF-8"),
    ],
)
def test_a_field_of_qald_that_cannot_be_read_is_refused_with_its_place(tmp_path, changes, sentence):
    with pytest.raises(UserError, match=rf"qald_10.json, question 0: .*{sentence}"):
        read_qald_file(tmp_path, qald(**changes))


def test_a_blank_literal_of_qald_is_no_answer(tmp_path):
    row = {"x": {"type": "literal", "value": " "}}
    (record,) = read_qald_file(
        tmp_path, qald(answers=[{"head": {"vars": ["x"]}, "results": {"bindings": [row]}}])
    )
    assert record["answers"] == (("unknown", ""),)
