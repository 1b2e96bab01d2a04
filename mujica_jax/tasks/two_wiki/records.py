"""Read the records of 2WikiMultihopQA from their files.

The files are the official `dev.json` and `train.json`, and smaller files made from them. Several
files can have the same question with different fields (evidences in one, aliases in another). Such
records are merged by id. The name of a file tells the official split of its questions: `train*` or
`dev*`.

Evidences have labels, but Q-ids only if the record has `evidences_id`. `entity_ids` lists the
subjects of every record. So this module knows the ids of all subjects and bridge entities. The
graph uses them to find labels that mean the same entity.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.errors import UserError
from mujica_jax.records import GoldPassage
from mujica_jax.retrieval.graph.triples import (
    LITERAL_ID,
    Triple,
    normalise_label,
    without_parenthesis,
)
from mujica_jax.retrieval.text.corpus import Passage, read_corpus
from mujica_jax.retrieval.text.corpus_records import explained, records_of
from mujica_jax.storage.local import visible_files
from mujica_jax.tasks.data_folder import is_prepared, sources_of
from mujica_jax.tasks.open_domain.records import OpenRecord
from mujica_jax.tasks.prepared import prepared_records
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
# Kinds of questions whose evidences are a single chain.
SINGLE_CHAINS = ("compositional", "inference")

# The official split of a file. It is empty for files of neither split.
Source = Literal["train", "dev", ""]
# The official split, the place and the value of a record.
Placed = tuple[Source, str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(OpenRecord):
    """One question with its evidences."""

    # Gold evidences, with every id that can be inferred from the record. Empty if no file has them.
    triples: tuple[Triple, ...] = ()
    # Q-ids of the entities that the question itself names, in the order of `entity_ids`.
    topic_ids: tuple[str, ...] = ()
    # Q-id of the answer. The official aliases are listed by this id.
    answer_id: str = ""
    # The split that the record names itself, or None.
    split: Split | None = None
    # The official split of the record's file. If files of both splits have the question, it is dev.
    source: Source = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mention:
    """A place where a text names an entity. `text[start:end]` is `name`, apart from case."""

    start: int
    end: int
    name: str


def data_files(
    data_dir: str | Path, patterns: Sequence[str], content: str, *, needed: bool = True
) -> list[Path]:
    """Return the folder's files that match one of the patterns, plain or .gz, in a fixed order.

    `content` names what the files hold, for messages. Raises UserError if the folder is missing, or
    if files are `needed` and there are none.
    """
    folder = Path(data_dir)
    expected = f"expected {content} ({', '.join(patterns)}, each plain or .gz)"
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(
            f"the 2WikiMultihopQA folder {folder} {problem}; set task.data_dir to a folder with "
            f"{content}; {expected}"
        )

    # A file may match several patterns.
    files: dict[Path, None] = {}
    for pattern in patterns:
        for suffix in ("", ".gz"):
            files |= dict.fromkeys(visible_files(folder, pattern + suffix))
    if not files and needed:
        raise UserError(f"{folder} has no file with {content}; {expected}")
    return list(files)


def read_folder(data_dir: str | Path) -> list[Record]:
    """Return the questions of a folder with official files, or of a prepared folder.

    `open_domain/builders.py` writes prepared folders. Raises UserError.
    """
    if is_prepared(Path(data_dir)):
        return _merged(_prepared(Path(data_dir)))
    return read_questions(data_files(data_dir, QUESTION_FILES, "questions"))


def read_corpus_questions(data_dir: str | Path) -> list[Record]:
    """Return the questions of the files that were made for a corpus (`questions*`).

    The result is empty without such files. The folder may be a prepared folder.
    """
    folder = Path(data_dir)
    if not is_prepared(folder):
        files = data_files(folder, CORPUS_QUESTION_FILES, "questions of the corpus", needed=False)
        return read_questions(files)

    has_corpus_questions = any(
        name.startswith("questions") for name in sources_of(folder, "two_wiki")
    )
    if not has_corpus_questions:
        return []
    corpus_values: list[Placed] = []
    for place, value in prepared_records(folder, "two_wiki"):
        if _original_place(place, folder).startswith("questions"):
            corpus_values.append(("", place, value))
    return _merged(corpus_values)


def read_questions(files: Iterable[Path]) -> list[Record]:
    """Return all questions with an answer, merged by id, in the order of their first records."""
    return _merged(_placed(files))


def source_of(file_name: str) -> Source:
    """Return the official split of a file, by its name. It is empty for other files."""
    if file_name.startswith("train"):
        return "train"
    return "dev" if file_name.startswith("dev") else ""


def _placed(files: Iterable[Path]) -> Iterator[Placed]:
    """Yield (official split, place, value) for each record of official files."""
    for file in files:
        with explained(file):
            check_not_blank(file)
        for place, value in records_of([file]):
            yield source_of(file.name), place, value


def _prepared(folder: Path) -> Iterator[Placed]:
    """Yield (official split, place, value) for each record of a prepared folder."""
    for place, value in prepared_records(folder, "two_wiki"):
        yield source_of(_original_place(place, folder)), place, value


def _original_place(place: str, folder: Path) -> str:
    """Return the place of a prepared record in its official file, such as `dev.json, line 3`."""
    return place.removeprefix(f"{folder}, ").partition(" ")[2]


def _merged(values: Iterable[Placed]) -> list[Record]:
    """Return the records of the questions with an answer, merged by id.

    Raises UserError for malformed records, and if two different questions have the same id.
    """
    merged_records: dict[str, Record] = {}
    first_places: dict[str, str] = {}
    for source, place, value in values:
        record = _record(value, place, source)
        if record is None:
            continue
        if record.id not in merged_records:
            merged_records[record.id] = record
            first_places[record.id] = place
            continue

        other = merged_records[record.id]
        first_place = first_places[record.id]
        if other.text.lower().split() != record.text.lower().split():
            raise UserError(
                f"{place}: the question {record.id} is {record.text!r} here and {other.text!r} "
                f"elsewhere ({first_place}); give each question its own _id"
            )
        if record.split and other.split and record.split != other.split:
            raise UserError(
                f"{place}: the split of question {record.id} is {record.split} here and "
                f"{other.split} elsewhere ({first_place}); give it one split"
            )
        merged_records[record.id] = _merge(other, record)
    return list(merged_records.values())


def passages_of(records: Iterable[Record]) -> list[Passage]:
    """Return the passages that are given with the records, each once.

    Passages with the same title and different texts are different passages.
    """
    distinct_passages: dict[tuple[str, str], GoldPassage] = {}
    for record in records:
        for passage in record.context:
            distinct_passages.setdefault(passage_key(passage), passage)
    return [
        Passage(id=str(number), title=passage.title, text=passage.text)
        for number, passage in enumerate(distinct_passages.values())
    ]


def chain_evidences(triples: Sequence[Triple]) -> tuple[Triple, ...]:
    """Return the gold chain as an agent sees it.

    A bridge entity keeps the name under which it was found: its name as an object of the chain.
    """
    names_as_object: dict[str, str] = {}
    evidences = []
    for triple in triples:
        subject = names_as_object.get(triple.subject_id, triple.subject)
        object_id = "" if triple.object_is_literal else triple.object_id
        evidences.append(dataclasses.replace(triple, subject=subject, object_id=object_id))
        if object_id:
            names_as_object.setdefault(object_id, triple.object)
    return tuple(evidences)


def with_known_ids(rows: Iterable[Triple], records: Iterable[Record]) -> list[Triple]:
    """Return graph rows with clean labels and with the Q-ids of gold evidences.

    In a file of triples a Q-id is missing if the record had none. It is wrong if the record lists
    evidences and ids in different orders. `Record.triples` has the right ids. A row that questions
    use for several entities becomes several rows.
    """
    # The pairs (subject id, object id) of evidences, by (subject, relation, object). The inner
    # dictionaries are used as ordered sets.
    evidence_ids: dict[tuple[str, str, str], dict[tuple[str, str], None]] = {}
    for record in records:
        for triple in record.triples:
            # In a record without ids, labels take the place of ids.
            if triple.subject_id not in ("", triple.subject):
                key = (triple.subject, triple.relation, triple.object)
                evidence_ids.setdefault(key, {})[triple.subject_id, triple.object_id] = None

    complete_rows: dict[Triple, None] = {}
    for raw_row in rows:
        row = dataclasses.replace(
            raw_row, subject=clean_label(raw_row.subject), object=clean_label(raw_row.object)
        )
        key = (row.subject, row.relation, row.object)
        if key not in evidence_ids:
            complete_rows[row] = None
            continue
        for subject_id, object_id in evidence_ids[key]:
            if not object_id and subject_id == row.subject_id:
                object_id = row.object_id
            complete_row = dataclasses.replace(row, subject_id=subject_id, object_id=object_id)
            complete_rows[complete_row] = None
    return list(complete_rows)


def clean_label(label: str) -> str:
    """Return the label with single spaces, and with single instead of double quotes.

    Planners write names between double quotes. Scores ignore spaces and quotes.
    """
    return " ".join(label.replace('"', "'").split())


def mentions(text: str, labels: Sequence[str], titles: Sequence[str]) -> list[Mention] | None:
    """Return where a question names each of the entities, in the order of the labels.

    The result is None if the text does not name one of them in a known way. Questions name an
    entity by its passage title In Title Case. The title is the label, the label with a parenthesis,
    or (in questions with one topic) another name.
    """
    # The longest label comes first, so that "Love" is not found inside "Love Story".
    mention_of: dict[str, Mention] = {}
    for label in sorted(labels, key=len, reverse=True):
        matching_titles = [
            title for title in titles if _bare_label(clean_label(title)) == _bare_label(label)
        ]
        mention = _first_mention(text, [*matching_titles, label])
        if mention is None and len(labels) == 1:
            other_titles = [title for title in titles if title not in matching_titles]
            mention = _first_mention(text, other_titles)
        if mention is None:
            return None

        # Overwrite the mention, so that no other label is found in it.
        blank = "\0" * (mention.end - mention.start)
        text = text[: mention.start] + blank + text[mention.end :]
        mention_of[label] = mention
    return [mention_of[label] for label in labels]


def _bare_label(label: str) -> str:
    """Return a label without its parenthesis, in a normalised form for comparisons."""
    return normalise_label(without_parenthesis(label))


def _first_mention(text: str, names: Sequence[str]) -> Mention | None:
    """Return the first mention of the longest name that is in the text, or None."""
    for name in sorted(names, key=len, reverse=True):
        match = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE)
        if match is not None:
            return Mention(start=match.start(), end=match.end(), name=name)
    return None


def _record(value: object, place: str, source: Source) -> Record | None:
    """Return the record of a question, or None for a question without an answer.

    Questions of the official test file have no answers. `place` names the record in messages.
    Raises UserError for a malformed record.
    """
    if not isinstance(value, dict):
        raise UserError(
            f"{place}: a question must be an object, but this is a {type(value).__name__}; use the "
            "official format"
        )
    fields: Mapping[str, Any] = value
    check_characters(fields, place)
    id, text = _id_and_text(fields, place)
    if is_missing(fields.get("answer")):
        return None

    split = fields.get("split")
    if split not in (None, *get_args(Split)):
        raise UserError(
            f"{place}: split is {split!r} and must be train, dev or test; correct it or leave it "
            "out"
        )
    try:
        kind = read_label(fields.get("type"))
        triples, topic_ids = _gold_triples(fields)
        paragraphs = read_context(fields.get("context") or [])
        gold = gold_passages(read_facts(fields.get("supporting_facts") or []), paragraphs)
        answer_id = fields.get("answer_id") or ""
        if not isinstance(answer_id, str):
            raise TypeError(f"answer_id is {answer_id!r} and must be a string")
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        raise UserError(
            f"{place}: one of the fields type, evidences, entity_ids, answer_id, supporting_facts "
            f"and context is not in the official format ({error!r}); "
            "docs/guides/own_questions.md has an example"
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


def _id_and_text(fields: Mapping[str, Any], place: str) -> tuple[str, str]:
    """Return the id and the text of a question. Raises UserError if one of them is missing."""
    identifier = fields.get("_id", fields.get("id"))
    question = fields.get("question")
    try:
        id = read_id(identifier)
        text = read_question(question)
    except (TypeError, ValueError):
        id = ""
        text = ""
    if not text:
        raise UserError(
            f"{place}: _id is {identifier!r} and question is {question!r}; give both, as in the "
            "official 2WikiMultihopQA format"
        )
    return id, text


def _answers(fields: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """Return the answer of a record, then its aliases. Raises UserError."""
    answer = fields["answer"]
    aliases = fields.get("answer_aliases") or []
    try:
        if not isinstance(aliases, list):
            raise TypeError("answer_aliases must be a list")
        return read_answers([answer, *aliases])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{place}: answer is {answer!r} and answer_aliases is {aliases!r}; give a string "
            "and a list of strings"
        ) from error


def _merge(first: Record, second: Record) -> Record:
    """Merge two records of one question."""
    with_triples = first if first.triples or not second.triples else second
    context = first.context or second.context
    sources = {first.source, second.source}
    return dataclasses.replace(
        with_triples,
        kind=first.kind or second.kind,
        answers=tuple(dict.fromkeys(first.answers + second.answers)),
        gold=with_texts(with_triples.gold + first.gold + second.gold, context),
        context=context,
        answer_id=first.answer_id or second.answer_id,
        split=first.split or second.split,
        source="dev" if "dev" in sources else max(sources),
    )


def _gold_triples(fields: Mapping[str, Any]) -> tuple[tuple[Triple, ...], tuple[str, ...]]:
    """Return the evidences with ids, and the ids of the topics.

    `entity_ids` lists the subjects in the order in which the evidences first name them:

    - single chain: the topic and the bridge entity
    - comparison: both topics
    - bridge comparison: two films, then their two directors

    If a record has no ids, labels take their place.
    """
    evidences: list[tuple[str, str, str]] = []
    for evidence in fields.get("evidences") or ():
        subject, relation, object_label = [clean_label(cell) for cell in evidence]
        evidences.append((subject, relation, object_label))
    subjects = list(dict.fromkeys(subject for subject, _, _ in evidences))
    entity_ids = [part for part in (fields.get("entity_ids") or "").split("_") if part]
    if evidences and not entity_ids:
        return _triples_without_ids(evidences)
    if not evidences or len(subjects) != len(entity_ids):
        return (), ()

    subject_ids = dict(zip(subjects, entity_ids, strict=True))
    object_ids = _object_ids(fields, [subject_ids[subject] for subject, _, _ in evidences])
    if fields.get("type") in SINGLE_CHAINS:
        topic_ids = entity_ids[:1]
        # The first step leads to the bridge entity, and the last step to the answer.
        if len(entity_ids) > 1:
            object_ids[0] = entity_ids[1]
        object_ids[-1] = object_ids[-1] or fields.get("answer_id") or ""
    elif fields.get("type") == "bridge_comparison":
        topic_count = len(entity_ids) // 2
        topic_ids = entity_ids[:topic_count]
        object_ids[:topic_count] = entity_ids[topic_count:]
    else:
        topic_ids = entity_ids

    triples = [
        Triple(
            subject=subject,
            relation=relation,
            object=object_label,
            subject_id=subject_ids[subject],
            object_id=object_id,
        )
        for (subject, relation, object_label), object_id in zip(evidences, object_ids, strict=True)
    ]
    return tuple(triples), tuple(topic_ids)


def _triples_without_ids(
    evidences: Sequence[tuple[str, str, str]],
) -> tuple[tuple[Triple, ...], tuple[str, ...]]:
    """Return the evidences with labels in place of ids, and the topics.

    The topics are the subjects that are not the object of any evidence.
    """
    subjects = list(dict.fromkeys(subject for subject, _, _ in evidences))
    object_labels = {object_label for _, _, object_label in evidences}
    triples = [
        Triple(
            subject=subject,
            relation=relation,
            object=object_label,
            subject_id=subject,
            object_id=object_label if object_label in subjects else "",
        )
        for subject, relation, object_label in evidences
    ]
    return tuple(triples), tuple(subject for subject in subjects if subject not in object_labels)


def _object_ids(fields: Mapping[str, Any], subject_ids: Sequence[str]) -> list[str]:
    """Return the object id of each evidence, in the order of `subject_ids`.

    An unknown id is empty. `evidences_id` does not always have the order of the evidences, so its
    entries are assigned by subject.
    """
    ids_of_subject: dict[str, list[str]] = {}
    for subject_id, _, object_id in fields.get("evidences_id") or ():
        if object_id == LITERAL_ID:
            object_id = ""
        ids_of_subject.setdefault(subject_id, []).append(object_id)

    # If a subject has more or fewer ids than evidences, all ids are uncertain.
    for subject_id, object_ids in ids_of_subject.items():
        if len(object_ids) != list(subject_ids).count(subject_id):
            return [""] * len(subject_ids)

    object_ids: list[str] = []
    for subject_id in subject_ids:
        remaining_ids = ids_of_subject.get(subject_id)
        object_ids.append(remaining_ids.pop(0) if remaining_ids else "")
    return object_ids


def corpus_of(config: TwoWikiConfig, records: Sequence[Record]) -> list[Passage]:
    """Return the passages of the data folder's corpus, or else those given with the records.

    Raises UserError if there are none.
    """
    files = data_files(config.data_dir, CORPUS_FILES, "passages", needed=False)
    if files:
        return read_corpus(files)
    passages = passages_of(records)
    if passages:
        return passages
    return read_corpus(data_files(config.data_dir, CORPUS_FILES, "passages"))
