"""2WikiMultihopQA records as their files hold them: official `dev.json` and `train.json`, and the
smaller files made from them.

One question can stand in several files with different fields (evidences here, aliases there); they
are merged by id. The name of a file says to which official split its questions belong: `train*` or
`dev*`. Evidences carry labels, and Q-ids only where the record gives `evidences_id`; `entity_ids`
names the subjects of every record, so the ids of all subjects and bridge entities are known here,
and from here the graph learns which labels mean the same entity.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from mujica_jax.errors import UserError
from mujica_jax.records import GoldPassage
from mujica_jax.retrieval.graph.triples import (
    LITERAL_ID,
    Triple,
    normalise_label,
    without_parenthesis,
)
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.retrieval.text.corpus_records import explained, records_of
from mujica_jax.storage.local import visible_files
from mujica_jax.tasks.data_folder import is_prepared, sources_of
from mujica_jax.tasks.open_domain.records import OpenRecord, prepared_records
from mujica_jax.tasks.question_fields import (
    check_characters,
    check_not_blank,
    gold_passages,
    is_missing,
    passage_key,
    read_answers,
    read_context,
    read_facts,
    read_id,
    read_label,
    read_question,
    with_texts,
)
from mujica_jax.tasks.task import Split

CORPUS_QUESTION_FILES = ("questions*.jsonl", "questions*.json")
QUESTION_FILES = ("dev*.json", "dev*.jsonl", "train*.json", "train*.jsonl", *CORPUS_QUESTION_FILES)
GRAPH_FILES = ("triples*.tsv",)
CORPUS_FILES = ("corpus*.json", "corpus*.jsonl")
SINGLE_CHAINS = ("compositional", "inference")

Source = Literal["train", "dev", ""]
Placed = tuple[Source, str, object]  # official file, place, and value of a record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(OpenRecord):
    # Gold evidences with every id that the record lets us infer; empty where no file has them.
    triples: tuple[Triple, ...] = ()
    topic_ids: tuple[str, ...] = ()  # Q-ids of the entities the question itself names, in its order
    answer_id: str = ""  # Q-id of the answer, by which the official aliases are listed
    split: Split | None = None  # as the record says itself
    source: Source = ""  # the official file that it stands in; dev, if it stands in both


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mention:
    """`text[start:end]` is `name` up to case."""

    start: int
    end: int
    name: str


def data_files(
    data_dir: str | Path, patterns: Sequence[str], what: str, *, needed: bool = True
) -> list[Path]:
    """Files of the folder that match a pattern, plain or .gz, in a fixed order; at least one if
    they are `needed`."""
    folder = Path(data_dir)
    expected = f"expected {what} ({', '.join(patterns)}, each plain or .gz)"
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise UserError(
            f"the 2WikiMultihopQA folder {folder} {found}; set data_dir to one with {what}; "
            f"{expected}"
        )
    globs = (
        visible_files(folder, pattern + suffix) for pattern in patterns for suffix in ("", ".gz")
    )
    files = dict.fromkeys(itertools.chain.from_iterable(globs))
    if not files and needed:
        raise UserError(f"{folder} has no file with {what}; {expected}")
    return list(files)


def read_folder(data_dir: str | Path) -> list[Record]:
    """Return the questions of official files, or of a folder that `open_domain/builders.py` has
    filled."""
    if is_prepared(Path(data_dir)):
        return _merged(_prepared(Path(data_dir)))
    return read_questions(data_files(data_dir, QUESTION_FILES, "questions"))


def read_corpus_questions(data_dir: str | Path) -> list[Record]:
    """Return the questions of the files that were made for a corpus (`questions*`), none where
    there are no such files.

    The folder may be a prepared one.
    """
    folder = Path(data_dir)
    if not is_prepared(folder):
        return read_questions(
            data_files(folder, CORPUS_QUESTION_FILES, "questions of the corpus", needed=False)
        )
    if not any(name.startswith("questions") for name in sources_of(folder, "two_wiki")):
        return []
    placed = prepared_records(folder, "two_wiki")
    return _merged(
        ("", place, value)
        for place, value in placed
        if _original_place(place, folder).startswith("questions")
    )


def read_questions(files: Iterable[Path]) -> list[Record]:
    """All questions with an answer, merged by id, in the order in which they first appear."""
    return _merged(_placed(files))


def source_of(file_name: str) -> Source:
    """Return the official split that a file's name tells."""
    if file_name.startswith("train"):
        return "train"
    return "dev" if file_name.startswith("dev") else ""


def _placed(files: Iterable[Path]) -> Iterator[Placed]:
    for file in files:
        with explained(file):
            check_not_blank(file)
        for place, value in records_of([file]):
            yield source_of(file.name), place, value


def _prepared(folder: Path) -> Iterator[Placed]:
    """Yield the records of a prepared folder."""
    for place, value in prepared_records(folder, "two_wiki"):
        yield source_of(_original_place(place, folder)), place, value


def _original_place(place: str, folder: Path) -> str:
    """Return the place of a prepared record in its official file, as `dev.json, line 3`."""
    return place.removeprefix(f"{folder}, ").partition(" ")[2]


def _merged(values: Iterable[Placed]) -> list[Record]:
    merged: dict[str, Record] = {}
    first_places: dict[str, str] = {}
    for source, place, value in values:
        record = _record(value, place, source)
        if record is None:
            continue
        other = merged.setdefault(record.id, record)
        first_place = first_places.setdefault(record.id, place)
        if other.text.lower().split() != record.text.lower().split():
            raise UserError(
                f"{place}: the question {record.id} is {record.text!r} here and {other.text!r} "
                f"elsewhere ({first_place}); give each question its own _id"
            )
        if record.split and other.split and record.split != other.split:
            raise UserError(
                f"{place}: the split of question {record.id} is {record.split} here and "
                f"{other.split} elsewhere ({first_place})"
            )
        if other is not record:
            merged[record.id] = _merge(other, record)
    return list(merged.values())


def passages_of(records: Iterable[Record]) -> list[Passage]:
    """Return the passages given with the records, each once. Two texts with one title are two
    passages."""
    distinct: dict[tuple[str, str], GoldPassage] = {}
    for record in records:
        for passage in record.context:
            distinct.setdefault(passage_key(passage), passage)
    return [
        Passage(id=str(number), title=passage.title, text=passage.text)
        for number, passage in enumerate(distinct.values())
    ]


def chain_evidences(triples: Sequence[Triple]) -> tuple[Triple, ...]:
    """The gold chain as a searcher sees it: a bridge entity is called what the triple that found it
    calls it."""
    found_as: dict[str, str] = {}
    evidences = []
    for triple in triples:
        subject = found_as.get(triple.subject_id, triple.subject)
        object_id = "" if triple.object_is_literal else triple.object_id
        evidences.append(dataclasses.replace(triple, subject=subject, object_id=object_id))
        if triple.object_id and not triple.object_is_literal:
            found_as.setdefault(triple.object_id, triple.object)
    return tuple(evidences)


def with_known_ids(rows: Iterable[Triple], records: Iterable[Record]) -> list[Triple]:
    """Graph rows with clean labels and the Q-ids that gold evidences give them.

    A file of triples has no Q-id where its record gave none, and a wrong one where a record lists
    evidences and their ids in different orders; `Record.triples` has both put right. A row that
    questions use for several entities becomes several rows.
    """
    known: dict[tuple[str, str, str], dict[tuple[str, str], None]] = {}
    for record in records:
        for triple in record.triples:
            if triple.subject_id not in ("", triple.subject):
                ids = known.setdefault((triple.subject, triple.relation, triple.object), {})
                ids[triple.subject_id, triple.object_id] = None
    result: dict[Triple, None] = {}
    for raw in rows:
        row = dataclasses.replace(
            raw, subject=clean_label(raw.subject), object=clean_label(raw.object)
        )
        for subject_id, object_id in known.get(
            (row.subject, row.relation, row.object), {(row.subject_id, row.object_id): None}
        ):
            if not object_id and subject_id == row.subject_id:
                object_id = row.object_id
            result[dataclasses.replace(row, subject_id=subject_id, object_id=object_id)] = None
    return list(result)


def clean_label(label: str) -> str:
    """Single spaces, and no double quotes: planners put names between double quotes, and scores
    ignore both."""
    return " ".join(label.replace('"', "'").split())


def mentions(text: str, labels: Sequence[str], titles: Sequence[str]) -> list[Mention] | None:
    """Where a question names each of the entities, in their order; None where one of them cannot be
    found.

    Questions name an entity by its passage title In Title Case: the label, the label with a
    parenthesis, or (in questions with one topic) another name. The longest label is looked for
    first, so that "Love" is not found inside "Love Story".
    """
    found: dict[str, Mention] = {}
    for label in sorted(labels, key=len, reverse=True):
        bare = normalise_label(without_parenthesis(label))
        likely = [
            title
            for title in titles
            if normalise_label(without_parenthesis(clean_label(title))) == bare
        ]
        others = [title for title in titles if title not in likely] if len(labels) == 1 else []
        place = _first_mention(text, [*likely, label]) or _first_mention(text, others)
        if place is None:
            return None
        text = text[: place.start] + "\0" * (place.end - place.start) + text[place.end :]
        found[label] = place
    return [found[label] for label in labels]


def _first_mention(text: str, names: Sequence[str]) -> Mention | None:
    for name in sorted(names, key=len, reverse=True):
        if place := re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE):
            return Mention(start=place.start(), end=place.end(), name=name)
    return None


def _record(value: object, place: str, source: Source) -> Record | None:
    """None for a question without an answer (the official test file)."""
    if not isinstance(value, dict):
        raise UserError(
            f"{place}: a question must be an object and this is a {type(value).__name__}; use the "
            "official format"
        )
    fields: Mapping[str, Any] = value
    check_characters(fields, place)
    identifier = fields.get("_id", fields.get("id"))
    question = fields.get("question")
    try:
        id = read_id(identifier)
        text = read_question(question)
    except (TypeError, ValueError):
        id = text = ""
    if not text:
        raise UserError(
            f"{place}: _id is {identifier!r} and question {question!r}; both are needed, as in the "
            "official 2WikiMultihopQA format"
        )
    if is_missing(fields.get("answer")):
        return None
    split = fields.get("split")
    if split not in (None, *get_args(Split)):
        raise UserError(
            f"{place}: split is {split!r}; it must be train, dev or test, or be left out"
        )
    try:
        kind = read_label(fields.get("type"))
        triples, topic_ids = _gold_triples(fields)
        paragraphs = read_context(fields.get("context") or [])
        gold = gold_passages(read_facts(fields.get("supporting_facts") or []), paragraphs)
        answer_id = fields.get("answer_id") or ""
        if not isinstance(answer_id, str):
            raise TypeError(f"answer_id is {answer_id!r} and must be a text")
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        raise UserError(
            f"{place}: type, evidences, entity_ids, answer_id, supporting_facts or context are not "
            f"in the official format ({error!r}); docs/own_questions.md has an example"
        ) from error
    return Record(
        id=id,
        kind=kind,
        text=text,
        answers=_answers(fields, place),
        gold=gold,
        triples=triples,
        topic_ids=topic_ids,
        answer_id=answer_id,
        context=tuple(passage for passage, _ in paragraphs),
        split=split,
        source=source,
    )


def _answers(fields: Mapping[str, Any], place: str) -> tuple[str, ...]:
    answer = fields["answer"]
    aliases = fields.get("answer_aliases") or []
    try:
        if not isinstance(aliases, list):
            raise TypeError("answer_aliases must be a list")
        return read_answers([answer, *aliases])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{place}: answer is {answer!r} and answer_aliases {aliases!r}; they must be a text "
            "and a list of texts"
        ) from error


def _merge(first: Record, second: Record) -> Record:
    better = first if first.triples or not second.triples else second
    context = first.context or second.context
    sources = {first.source, second.source}
    return dataclasses.replace(
        better,
        kind=first.kind or second.kind,
        answers=tuple(dict.fromkeys(first.answers + second.answers)),
        gold=with_texts(better.gold + first.gold + second.gold, context),
        context=context,
        answer_id=first.answer_id or second.answer_id,
        split=first.split or second.split,
        source="dev" if "dev" in sources else max(sources),
    )


def _gold_triples(fields: Mapping[str, Any]) -> tuple[tuple[Triple, ...], tuple[str, ...]]:
    """Evidences with ids, and the topics' ids; where a record gives none, labels are ids and topics
    the subjects that nothing finds.

    `entity_ids` lists the subjects in the order in which the evidences first name them: topic and
    bridge entity of a single chain, both topics of a comparison, two films and their two directors
    of a bridge comparison.
    """
    evidences = [
        tuple(clean_label(cell) for cell in evidence) for evidence in fields.get("evidences") or ()
    ]
    subjects = list(dict.fromkeys(subject for subject, _, _ in evidences))
    entity_ids = [part for part in (fields.get("entity_ids") or "").split("_") if part]
    if evidences and not entity_ids:
        found = {label for _, _, label in evidences}
        unnamed = [
            Triple(
                subject=of,
                relation=is_,
                object=to,
                subject_id=of,
                object_id=to if to in subjects else "",
            )
            for of, is_, to in evidences
        ]
        return tuple(unnamed), tuple(subject for subject in subjects if subject not in found)
    if not evidences or len(subjects) != len(entity_ids):
        return (), ()
    id_of = dict(zip(subjects, entity_ids, strict=True))
    object_ids = _object_ids(fields, [id_of[subject] for subject, _, _ in evidences])
    if fields.get("type") in SINGLE_CHAINS:
        topics, object_ids[0] = (
            entity_ids[:1],
            entity_ids[1] if len(entity_ids) > 1 else object_ids[0],
        )
        object_ids[-1] = object_ids[-1] or fields.get("answer_id") or ""
    elif fields.get("type") == "bridge_comparison":
        topics = entity_ids[: len(entity_ids) // 2]
        object_ids[: len(topics)] = entity_ids[len(topics) :]
    else:
        topics = entity_ids
    triples = [
        Triple(
            subject=subject,
            relation=relation,
            object=found,
            subject_id=id_of[subject],
            object_id=object_id,
        )
        for (subject, relation, found), object_id in zip(evidences, object_ids, strict=True)
    ]
    return tuple(triples), tuple(topics)


def _object_ids(fields: Mapping[str, Any], subject_ids: Sequence[str]) -> list[str]:
    """Object ids of the evidences, found by subject: the ids are not always listed in the order of
    the evidences."""
    by_subject: dict[str, list[str]] = {}
    for subject_id, _, object_id in fields.get("evidences_id") or ():
        by_subject.setdefault(subject_id, []).append("" if object_id == LITERAL_ID else object_id)
    complete = all(
        len(ids) == list(subject_ids).count(subject_id) for subject_id, ids in by_subject.items()
    )
    return [
        by_subject[subject].pop(0) if complete and by_subject.get(subject) else ""
        for subject in subject_ids
    ]
