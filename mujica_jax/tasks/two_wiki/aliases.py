"""Read other names of answers from `id_aliases.json` of 2WikiMultihopQA.

The file is part of the release whose questions have an `answer_id` (December 2020).

A line of the file is `{"Q_id": ..., "aliases": [...], "demonyms": [...]}`. For the `answer_id` of a
question, the official script (`2wikimultihop_evaluate_v1.1.py`) accepts both lists as gold answers.
Scores and rewards do the same here: the names are added to `Question.answers` after the gold
answer.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.corpus_records import explained, records_of
from mujica_jax.tasks.question_fields import check_characters, check_not_blank
from mujica_jax.tasks.two_wiki.records import Record

ALIAS_FILE = "id_aliases.json"
ADVICE = "use the file from the same archive as these questions (data_ids.zip), or remove it"


def alias_file(folder: Path) -> Path | None:
    """Return the folder's file of aliases, plain or .gz, or None if there is none."""
    files = [folder / f"{ALIAS_FILE}{suffix}" for suffix in ("", ".gz")]
    return next((file for file in files if file.is_file()), None)


def official_aliases(file: Path, records: Sequence[Record]) -> dict[str, tuple[str, ...]]:
    """Return the aliases of the questions' answers, by answer id.

    Raises UserError for a file of another release.
    """
    answer_ids = {record.answer_id for record in records} - {""}
    aliases = read_aliases(file, answer_ids)
    if not aliases:
        if answer_ids:
            reason = "none of its ids is the answer_id of a question"
        else:
            reason = "the questions have no answer_id"
        raise UserError(
            f"{file} belongs to another release than the questions in its folder: {reason}; "
            f"{ADVICE}"
        )
    return aliases


def read_aliases(file: Path, answer_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the aliases and demonyms of these answer ids.

    Raises UserError for a line that is not in the format. The message names the line.
    """
    with explained(file):
        check_not_blank(file, holds="alias")
    aliases: dict[str, tuple[str, ...]] = {}
    for place, line in records_of([file]):
        answer_id, names = _read_line(line, place)
        if answer_id in answer_ids:
            aliases[answer_id] = names
    return aliases


def with_aliases(records: Sequence[Record], aliases: Mapping[str, tuple[str, ...]]) -> list[Record]:
    """Return the records with the aliases added to their answers."""
    complete: list[Record] = []
    for record in records:
        answers = dict.fromkeys((*record.answers, *aliases.get(record.answer_id, ())))
        complete.append(dataclasses.replace(record, answers=tuple(answers)))
    return complete


def with_record_aliases(record: object, aliases: Mapping[str, tuple[str, ...]]) -> object:
    """Return an official record with the aliases of its answer added to its `answer_aliases`."""
    if not isinstance(record, Mapping):
        return record
    answer_aliases = aliases.get(record.get("answer_id") or "")
    if not answer_aliases:
        return record
    record_aliases = record.get("answer_aliases") or []
    return {**record, "answer_aliases": [*record_aliases, *answer_aliases]}


def _read_line(line: object, place: str) -> tuple[str, tuple[str, ...]]:
    """Return the id of a line, and its aliases and demonyms."""
    check_characters(line, place)
    fields = line if isinstance(line, Mapping) else {}
    answer_id = fields.get("Q_id")
    aliases = fields.get("aliases")
    demonyms = fields.get("demonyms")
    if not (isinstance(answer_id, str) and _are_texts(aliases) and _are_texts(demonyms)):
        raise UserError(
            f"{place}: this is not a line of {ALIAS_FILE} of 2WikiMultihopQA v1.1; "
            f"each line is an object with the id Q_id and the lists aliases and demonyms; {ADVICE}"
        )
    names = [*aliases, *demonyms]
    return answer_id, tuple(name for name in names if name.strip())


def _are_texts(names: object) -> TypeGuard[list[str]]:
    """Return whether this is a list of texts."""
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
