"""Records of your own questions, in the forms in which other projects keep theirs.

A record needs a question and at least one answer. Everything else is optional.

| field | names that are read |
|---|---|
| question | `question`, `query`, or `text` as in BEIR's `queries.jsonl` |
| answers | `answer`, `answers`, `golden_answers` (FlashRAG), `reward_model.ground_truth` (verl, Search-R1) |
| other correct answers | `answer_aliases`, `aliases` |
| id | `id`, `_id`, `qid`; without one, a hash of the question |
| passages given with the question | `context` and `supporting_facts` (HotpotQA), `paragraphs` (MuSiQue) |
| kind of question | `type` |
| split | `split`: train, dev or test |

FlashRAG keeps the last rows of the table inside of `metadata`, where they are read too.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.metrics import normalise_squad
from mujica_jax.records import GoldPassage
from mujica_jax.retrieval.text.corpus_records import explained, read_records
from mujica_jax.storage.local import visible_files
from mujica_jax.tasks.open_domain.records import OpenRecord
from mujica_jax.tasks.question_fields import (
    check_characters,
    check_not_blank,
    gold_passages,
    is_missing,
    read_aliases,
    read_answers,
    read_context,
    read_facts,
    read_id,
    read_label,
    read_passage_text,
    read_question,
    read_title,
)
from mujica_jax.tasks.task import Split

QUESTION_FIELDS = ("question", "query", "text")
ANSWER_FIELDS = ("answer", "answers", "golden_answers", "reward_model.ground_truth")
ID_FIELDS = ("id", "_id", "qid")
PATTERNS = ("*.json", "*.jsonl", "*.csv", "*.tsv", "*.parquet")
# The names of splits: in a record's field `split`, as a word of a file's name, and in data sets of the
# Hugging Face Hub.
SPLIT_NAMES: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "dev": "dev",
    "val": "dev",
    "valid": "dev",
    "validation": "dev",
    "test": "test",
}
FORMATS = (
    "a JSON array, JSON Lines, .csv, .tsv or .parquet with the fields question and answers (other "
    "names: docs/guides/own_questions.md)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnRecord:
    """A question of yours, its place in its file, and its split if the data say one."""

    place: str
    split: Split | None
    record: OpenRecord


def read_own_records(data_dir: Path) -> Iterator[OwnRecord]:
    """Yield the questions of a file, or of all question files of a folder.

    Raises UserError for a folder without such files, and with file and line for a record that
    cannot be read.
    """
    for file in question_files(data_dir):
        with explained(file):
            if not file.name.endswith(".parquet"):
                check_not_blank(file)
        split_of_file = split_of_name(file.name)
        unit = "row" if file.name.endswith(".parquet") else "line"
        for number, value in read_records(file):
            place = f"{file}, {unit} {number}"
            record, split = read_record(value, place)
            yield OwnRecord(place=place, split=split or split_of_file, record=record)


def question_files(data_dir: Path) -> list[Path]:
    """Return the question files of a folder in a fixed order, or the one file itself."""
    if data_dir.is_file():
        return [data_dir]
    files: list[Path] = []
    for pattern in PATTERNS:
        for suffix in ("", ".gz"):
            files += visible_files(data_dir, pattern + suffix)
    files = [file for file in files if "corpus" not in file.name]
    if not files:
        problem = "has no file of questions" if data_dir.is_dir() else "does not exist"
        raise UserError(f"task.data_dir {data_dir} {problem}: give {FORMATS}")
    return files


def split_of_name(name: str) -> Split | None:
    """Return the split that a word of a file's name says, or None if no word says one.

    Words are runs of letters: `nq_test-2.jsonl` is for testing, and `latest.jsonl` says nothing.
    """
    for word in re.findall(r"[a-z]+", name.lower()):
        if word in SPLIT_NAMES:
            return SPLIT_NAMES[word]
    return None


def read_record(value: object, place: str) -> tuple[OpenRecord, Split | None]:
    """Return the question of a record, and the split that the record says, if it says one.

    Raises UserError with the place of a record that lacks a question or answers, or that holds
    something else than texts there.
    """
    if not isinstance(value, Mapping):
        raise UserError(
            f"{place}: the record is a {type(value).__name__} and must be an object with the "
            "fields question and answers"
        )
    check_characters(value, place)
    # FlashRAG keeps everything but id, question and answers in `metadata`.
    metadata = value.get("metadata")
    fields = {**metadata, **value} if isinstance(metadata, Mapping) else value
    try:
        question = _question(fields)
        context, gold = _passages(fields)
        record = OpenRecord(
            id=_id(fields, question),
            text=question,
            answers=_answers(fields),
            gold=gold,
            context=context,
            kind=read_label(fields.get("type")),
        )
        return record, _split(fields)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        message = error.args[0] if error.args else type(error).__name__
        raise UserError(f"{place}: {message}; give {FORMATS}") from error


def _question(fields: Mapping[str, Any]) -> str:
    for name in QUESTION_FIELDS:
        if not is_missing(fields.get(name)):
            return read_question(fields[name])
    raise ValueError(
        f"there is no question (fields {', '.join(map(str, fields))}; one of "
        f"{', '.join(QUESTION_FIELDS)} must hold it)"
    )


def _id(fields: Mapping[str, Any], question: str) -> str:
    for name in ID_FIELDS:
        if fields.get(name) is not None:
            return read_id(fields[name])
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def _answers(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return all answers and aliases, the first answer first.

    Raises ValueError if there is none, or if two fields contradict each other.
    """
    answers_of_fields: dict[str, tuple[str, ...]] = {}
    for name in ANSWER_FIELDS:
        values = _answer_values(fields, name)
        if values:
            answers_of_fields[name] = read_answers(values)
    if not answers_of_fields:
        raise ValueError(
            f"the question has no answer (fields {', '.join(map(str, fields))}; one of "
            f"{', '.join(ANSWER_FIELDS)} must hold one)"
        )

    # Fields that repeat each other are common. Fields without a common answer are a mistake.
    (first_name, first_answers), *others = answers_of_fields.items()
    for name, answers in others:
        if not _normalized(first_answers) & _normalized(answers):
            raise ValueError(
                f"{first_name} is {list(first_answers)} and {name} is {list(answers)}, and they "
                "share no answer: keep the correct field"
            )

    aliases = [
        *read_aliases(_parsed_list(fields.get("answer_aliases"))),
        *read_aliases(_parsed_list(fields.get("aliases"))),
    ]
    all_answers = [answer for answers in answers_of_fields.values() for answer in answers]
    return read_answers([*all_answers, *aliases])


def _answer_values(fields: Mapping[str, Any], name: str) -> list[object]:
    """Return the values of an answer field as a list. Empty if the record does not have it."""
    value: Any = fields
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    # verl keeps the answers in `ground_truth`, or in its `target`.
    if isinstance(value, Mapping):
        if "target" not in value:
            raise ValueError(f"{name} has the fields {', '.join(map(str, value))} and no target")
        value = value["target"]
    value = _parsed_list(value)
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [answer for answer in values if not is_missing(answer)]


def _normalized(answers: tuple[str, ...]) -> set[str]:
    return {normalise_squad(answer) for answer in answers}


def _parsed_list(value: Any) -> Any:
    """Return the list that a text holds as JSON, as cells of tables do. Other values stay."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _passages(
    fields: Mapping[str, Any],
) -> tuple[tuple[GoldPassage, ...], tuple[GoldPassage, ...]]:
    """Return the passages given with the question, and those of them that are gold."""
    if not fields.get("paragraphs"):
        paragraphs = read_context(fields["context"]) if fields.get("context") else []
        facts = read_facts(fields["supporting_facts"]) if fields.get("supporting_facts") else []
        return tuple(passage for passage, _ in paragraphs), gold_passages(facts, paragraphs)

    context: list[GoldPassage] = []
    gold: list[GoldPassage] = []
    for entry in fields["paragraphs"]:
        text = read_passage_text(entry.get("paragraph_text", entry.get("text")))
        passage = GoldPassage(title=read_title(entry.get("title")), text=text)
        context.append(passage)
        if entry.get("is_supporting"):
            gold.append(passage)
    return tuple(dict.fromkeys(context)), tuple(dict.fromkeys(gold))


def _split(fields: Mapping[str, Any]) -> Split | None:
    name = fields.get("split")
    if name is None or is_missing(name):
        return None
    if name not in SPLIT_NAMES:
        raise ValueError(f"split is {name!r} and must be one of {', '.join(SPLIT_NAMES)}")
    return SPLIT_NAMES[name]
