"""Read the records of open-domain and multi-hop question sets from their official files.

| kind | files | question, answers; passages |
|---|---|---|
| hotpotqa | `hotpot_{train,dev}_*.json` | `question`, `answer`; `supporting_facts`, `context` |
| musique | `musique_ans_*.jsonl` | `question`, `answer`, `answer_aliases`; `paragraphs` |
| nq | `NQ-open.{train,dev}.jsonl` | `question`, `answer`: a list |
| triviaqa | `*-{train,dev}.json`: `{"Data": [...]}` | `Question`, `Answer`: `Value` and `Aliases` |
| popqa | `popQA.tsv` | `question`, `possible_answers`: a JSON list |
| ambigqa | `{train,dev}_light.json` | `question`, `annotations` |
| bamboogle | `*.csv` | `Question`, `Answer` |

MuSiQue's files are `musique_ans_*_train.jsonl` and `musique_ans_*_dev.jsonl`. Only its answerable
questions are read. An annotation of AmbigQA is one answer with its aliases, or several such
answers.

If several records have the same id and the same text, they are one question with the answers of all
records. If they have the same id and different texts, an error names both places.
"""

import csv
import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.errors import UserError
from mujica_jax.records import GoldPassage
from mujica_jax.retrieval.text.corpus_records import explained, open_text, read_records
from mujica_jax.storage.local import beside, visible_files
from mujica_jax.storage.manifest import sha256_of
from mujica_jax.tasks.data_folder import damaged, is_prepared
from mujica_jax.tasks.official_files import OFFICIAL_FILES
from mujica_jax.tasks.prepared import prepared_rows
from mujica_jax.tasks.question_fields import (
    check_characters,
    check_not_blank,
    gold_passages,
    is_missing,
    passage_key,
    read_aliases,
    read_answers,
    read_context,
    read_facts,
    read_id,
    read_label,
    read_passage_text,
    read_question,
    read_title,
    title_key,
)

_log = logging.getLogger(__name__)

PATTERNS = ("*.json", "*.jsonl", "*.csv", "*.tsv")
# Version of the layout of the cached Parquet files.
CACHE_FORMAT = 2
# Spreadsheet programs write it at the beginning of a table.
BYTE_ORDER_MARK = "\ufeff"
# The official files of each set, for messages about missing files.
SOURCES = {kind: official.summary for kind, official in OFFICIAL_FILES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRecord:
    """One question with its answers and passages."""

    id: str
    text: str
    # The gold answer, then its aliases.
    answers: tuple[str, ...]
    # One entry for each annotation. An annotation asks for one or several answers, and has all
    # names of each answer.
    answer_sets: tuple[tuple[tuple[str, ...], ...], ...] = ()
    # The gold passages. A gold passage has no text if the record only names its title.
    gold: tuple[GoldPassage, ...] = ()
    # All passages that are given with the question, gold passages and distractors.
    context: tuple[GoldPassage, ...] = ()
    # The kind of the question, such as bridge, comparison or 2hop.
    kind: str = ""

    @property
    def titles(self) -> tuple[str, ...]:
        """The distinct titles of the gold passages."""
        return tuple(dict.fromkeys(passage.title for passage in self.gold))

    @property
    def has_gold_in_context(self) -> bool:
        """Whether the record names gold passages and its context holds all of them."""
        if not self.gold:
            return False
        # Most records pass this quick test.
        if set(self.gold) <= set(self.context):
            return True

        keys = {passage_key(passage) for passage in self.context}
        titles = {title_key(passage.title) for passage in self.context}
        for passage in self.gold:
            if passage.text:
                is_in_context = passage_key(passage) in keys
            else:
                is_in_context = title_key(passage.title) in titles
            if not is_in_context:
                return False
        return True


def read_set(folder: Path, kind: str) -> list[tuple[bool, OpenRecord]]:
    """Return (is for training, record) for each question of a set.

    The folder holds official files, or was prepared by TensorFlow Datasets (`builders.py`). The
    result is cached as Parquet in the user's cache folder. The key of the cache is the content of
    the files, because two folders may have the same names, sizes and times. Raises UserError.
    """
    is_prepared_folder = is_prepared(folder)
    if is_prepared_folder:
        files = sorted(folder.iterdir())
    else:
        files = question_files(folder, kind)

    checksums = [(file.name, sha256_of(file)) for file in files if file.is_file()]
    identity = json.dumps([CACHE_FORMAT, kind, checksums])
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cache_file = cache_folder("questions") / f"{kind}-{key}.parquet"
    records = _read_cached(cache_file)
    if records is not None:
        return records

    if is_prepared_folder:
        records = read_prepared(folder, kind)
    else:
        records = read_question_files(files, kind)
    _write_cache(cache_file, records)
    return records


def _read_cached(cache_file: Path) -> list[tuple[bool, OpenRecord]] | None:
    """Return the cached questions, or None if the file is missing or damaged."""
    import pyarrow
    from pyarrow import parquet

    if not cache_file.is_file():
        return None
    try:
        rows = parquet.read_table(cache_file).to_pylist()
        return [(row["train"], from_row(row)) for row in rows]
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        _log.warning(
            "the cache file %s is damaged (%s): reading the official files instead",
            cache_file,
            error,
        )
        return None


def _write_cache(cache_file: Path, records: Sequence[tuple[bool, OpenRecord]]) -> None:
    """Write the questions to the cache.

    If that fails (a full disk), print a warning. The next start then reads the official files.
    """
    import pyarrow
    from pyarrow import parquet

    rows = [as_row(record) | {"train": is_training} for is_training, record in records]
    try:
        with beside(cache_file) as partial:
            parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
            partial.replace(cache_file)
    except (pyarrow.ArrowException, OSError, UserError) as error:
        _log.warning(
            "cannot cache the questions (%s): the next start reads the official files again", error
        )


def read_question_files(
    files: Sequence[Path], kind: str, training_files: Collection[Path] | None = None
) -> list[tuple[bool, OpenRecord]]:
    """Return (is for training, record) for each question of the files.

    Without `training_files`, the name of a file tells whether it is for training. A question that
    is in a training file and in another file is returned twice. Raises UserError if two different
    questions have the same id.
    """
    if training_files is None:
        training_files = [file for file in files if is_training_file(file.name)]
    # The keys are (is for training, id).
    merged_records: dict[tuple[bool, str], OpenRecord] = {}
    # The text of the first question with each id, and its place.
    first_places: dict[str, tuple[str, str]] = {}
    for file in files:
        is_training = file in training_files
        for place, record in read_placed_records(file, kind):
            text, first_place = first_places.setdefault(record.id, (record.text, place))
            if _words_of(text) != _words_of(record.text):
                raise UserError(
                    f"{place}: the question {record.id} is {record.text!r} here and {text!r} in "
                    f"{first_place}; give each question its own id"
                )
            key = (is_training, record.id)
            if key in merged_records:
                merged_records[key] = _merge(merged_records[key], record)
            else:
                merged_records[key] = record
    return [(is_training, record) for (is_training, _), record in merged_records.items()]


def is_training_file(name: str) -> bool:
    """Return whether a file of this name holds training questions."""
    return "train" in name.lower()


def _words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return text.lower().split()


def _merge(first: OpenRecord, second: OpenRecord) -> OpenRecord:
    """Merge two records of one question.

    The result has the answers of both records. Its passages are from the record whose context holds
    all gold passages, or else from the first record.
    """
    if second.has_gold_in_context and not first.has_gold_in_context:
        with_passages = second
    else:
        with_passages = first
    return dataclasses.replace(
        with_passages,
        answers=tuple(dict.fromkeys(first.answers + second.answers)),
        answer_sets=tuple(dict.fromkeys(first.answer_sets + second.answer_sets)),
        kind=first.kind or second.kind,
    )


def read_prepared(folder: Path, kind: str) -> list[tuple[bool, OpenRecord]]:
    """Return (is for training, record) for each question of a prepared folder.

    The questions are in the order of the official files. Raises UserError.
    """
    positioned: list[tuple[int, bool, OpenRecord]] = []
    for is_training, row in prepared_rows(folder, kind):
        if "gold" not in row:
            raise damaged(
                folder,
                kind,
                "it was prepared by an earlier version, which only stored the titles of gold passages",
            )
        position = int(row.pop("position", 0))
        answers = [text.decode() for text in row.pop("answers")]
        fields: dict[str, Any] = {name: value.decode() for name, value in row.items()}
        fields["answers"] = answers
        positioned.append((position, is_training, from_row(fields)))

    positioned.sort(key=lambda entry: entry[0])
    return [(is_training, record) for _, is_training, record in positioned]


def as_row(record: OpenRecord) -> dict[str, Any]:
    """Return a record as a row of texts and lists of texts. Other fields are written as JSON."""
    row = dataclasses.asdict(record)
    for name in ("answer_sets", "gold", "context"):
        row[name] = json.dumps(row[name])
    return row


def from_row(row: Mapping[str, Any]) -> OpenRecord:
    """Return the record of a row that `as_row` made."""
    answer_sets: list[tuple[tuple[str, ...], ...]] = []
    for annotation in json.loads(row["answer_sets"]):
        answer_sets.append(tuple(tuple(names) for names in annotation))
    return OpenRecord(
        id=row["id"],
        text=row["text"],
        answers=tuple(row["answers"]),
        answer_sets=tuple(answer_sets),
        gold=tuple(GoldPassage(**passage) for passage in json.loads(row["gold"])),
        context=tuple(GoldPassage(**passage) for passage in json.loads(row["context"])),
        kind=row["kind"],
    )


def question_files(folder: Path, kind: str) -> list[Path]:
    """Return the files with questions in a folder, in a fixed order.

    Raises UserError if there are none. The message says which files to put there.
    """
    files = find_question_files(folder)
    if not files:
        problem = "has no file with questions" if folder.is_dir() else "does not exist"
        raise UserError(
            f"task.data_dir {folder} {problem}: put {SOURCES[kind]} there, plain or .gz"
        )
    return files


def find_question_files(folder: Path) -> list[Path]:
    """Return the files with questions in a folder, in a fixed order. There may be none."""
    files: list[Path] = []
    for pattern in PATTERNS:
        for suffix in ("", ".gz"):
            files += visible_files(folder, pattern + suffix)
    return [file for file in files if "corpus" not in file.name]


def read_open_records(file: Path, kind: str) -> Iterator[OpenRecord]:
    """Yield the questions of a file that have an answer.

    Raises UserError for a record that is not of this kind. The message names its file and place.
    """
    for _, record in read_placed_records(file, kind):
        yield record


def read_placed_records(file: Path, kind: str) -> Iterator[tuple[str, OpenRecord]]:
    """Yield (place, record) for each question of a file that has an answer.

    The place names the file and the record in it. Raises UserError for a record that is not of this
    kind.
    """
    with explained(file):
        check_not_blank(file)
    for number, value in _explained_values(file):
        place = f"{file}, {number}"
        check_characters(value, place)
        try:
            if not isinstance(value, Mapping):
                raise TypeError(f"it is a {type(value).__name__} and must be an object")
            record = _READERS[kind](value)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(
                f"{place}: this is not a record of {kind} ({type(error).__name__}: {error}); use "
                f"the official format: {SOURCES[kind]}"
            ) from error
        if record is None:
            continue
        if not record.text:
            raise UserError(
                f"{place}: the question is blank, with the answers {list(record.answers)}; give "
                "the question a text"
            )
        yield place, record


def _explained_values(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for each record of a file. Raises UserError for a damaged file."""
    with explained(file):
        try:
            yield from _values(file)
        except csv.Error as error:
            raise UserError(
                f"{file} cannot be read as a table ({error}): use the official file"
            ) from error


def _values(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for each record of a file. The name of the file tells its format."""
    name = file.name.removesuffix(".gz")
    if name.endswith((".csv", ".tsv")):
        delimiter = "\t" if name.endswith("tsv") else ","
        yield from _table_rows(file, delimiter)
        return

    if name.endswith(".json"):
        with open_text(file) as text:
            is_object = _first_character(text) == "{"
        whole_object = _whole_object(file) if is_object else None
        if whole_object is not None:
            yield from _listed_in(file, whole_object)
            return

    for number, value in read_records(file):
        yield f"line {number}", value


def _table_rows(file: Path, delimiter: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (place, row) for each row of a table. A row maps the names of columns to cells.

    The first line names the columns, in any order. Rows of empty cells, which spreadsheet programs
    write at the end, are left out. Raises UserError.
    """
    with open_text(file) as text:
        first_line = text.readline().removeprefix(BYTE_ORDER_MARK)
        lines = itertools.chain([first_line], text)
        # Without `strict`, an unmatched quotation mark would make the following lines a part of its
        # cell.
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        names = [name for name in reader.fieldnames or () if name.strip()]
        if len(set(names)) < len(names):
            raise UserError(
                f"{file}, line 1: a column name occurs twice ({', '.join(names)}); give each "
                "column its own name"
            )
        for row in _strict_rows(reader, file):
            place = f"line {reader.line_num}"
            surplus = [cell for cell in row.pop(None, ()) if cell.strip()]
            is_blank = not any((cell or "").strip() for cell in row.values())
            if is_blank and not surplus:
                continue
            if surplus:
                raise UserError(
                    f"{file}, {place}: there are more cells than columns ({surplus!r} is left "
                    "over); put an answer that contains the separator into double quotes"
                )
            yield place, row


def _strict_rows(reader: csv.DictReader, file: Path) -> Iterator[dict[Any, Any]]:
    """Yield the rows of a strict reader. Raises UserError for misplaced quotation marks."""
    # The first line of the next row.
    first_line = reader.line_num + 1
    try:
        for row in reader:
            yield row
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{file}, line {first_line}: not a row of a table ({error}); put a cell that contains "
            "quotation marks into double quotes, and double the quotation marks inside it"
        ) from error


def _first_character(text: TextIO) -> str:
    """Return the first character that is neither white space nor a byte order mark."""
    character = text.read(1)
    while character.isspace() or character == BYTE_ORDER_MARK:
        character = text.read(1)
    return character


def _whole_object(file: Path) -> Any:
    """Return the object of a file that is one JSON object, or None if each line is a record.

    Raises UserError if the file looks like one object and cannot be read.
    """
    with open_text(file) as text:
        content = text.read().removeprefix(BYTE_ORDER_MARK)
    try:
        return json.loads(content)
    except RecursionError:
        return None
    except ValueError as error:
        has_record_per_line = isinstance(error, json.JSONDecodeError) and error.msg.startswith(
            "Extra data"
        )
        looks_like_one_object = content.lstrip().startswith(("{\n", "{\r", '{"Data"'))
        if has_record_per_line or not looks_like_one_object:
            return None
        raise UserError(
            f"{file} is neither a list of records nor an object with a field Data "
            f"({type(error).__name__}: {error}): use the official file"
        ) from error


def _listed_in(file: Path, whole_object: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) for each record in the field `Data`, as in TriviaQA's files.

    An object with a question is itself the only record. Raises UserError for other objects.
    """
    if "question" in whole_object and "Data" not in whole_object:
        yield "line 1", whole_object
        return
    values = whole_object.get("Data")
    if not isinstance(values, list):
        raise UserError(
            f"{file} is neither a list of records nor an object whose field Data is a list: use "
            "the official file"
        )
    for number, value in enumerate(values):
        yield f"record {number}", value


def _hotpotqa(value: Mapping[str, Any]) -> OpenRecord | None:
    """Return the record of a HotpotQA question, or None for a question without an answer."""
    # The official test file has no answers.
    if is_missing(value.get("answer")):
        return None
    paragraphs = read_context(value["context"])
    return OpenRecord(
        id=read_id(value.get("_id", value.get("id"))),
        text=read_question(value["question"]),
        answers=read_answers([value["answer"]]),
        gold=gold_passages(read_facts(value["supporting_facts"]), paragraphs),
        context=tuple(passage for passage, _ in paragraphs),
        kind=read_label(value.get("type")),
    )


def _musique(value: Mapping[str, Any]) -> OpenRecord | None:
    """Return the record of a MuSiQue question, or None for an unanswerable one."""
    answerable = value.get("answerable", True)
    if not isinstance(answerable, int):
        raise TypeError(f"answerable is {answerable!r} and must be true or false")
    if is_missing(value.get("answer")) or not answerable:
        return None

    context: dict[tuple[str, str], GoldPassage] = {}
    gold: dict[tuple[str, str], GoldPassage] = {}
    for entry in value["paragraphs"]:
        passage = GoldPassage(
            title=read_title(entry["title"]), text=read_passage_text(entry["paragraph_text"])
        )
        passage = context.setdefault(passage_key(passage), passage)
        if not isinstance(entry["is_supporting"], int):
            raise TypeError(
                f"is_supporting is {entry['is_supporting']!r} and must be true or false"
            )
        if entry["is_supporting"]:
            gold[passage_key(passage)] = passage

    id = read_id(value["id"])
    return OpenRecord(
        id=id,
        text=read_question(value["question"]),
        answers=read_answers([value["answer"], *read_aliases(value.get("answer_aliases"))]),
        gold=tuple(gold.values()),
        context=tuple(context.values()),
        kind=id.partition("_")[0],
    )


def _natural_questions(value: Mapping[str, Any]) -> OpenRecord:
    """Return the record of a question of NQ-open."""
    question = read_question(value["question"])
    return OpenRecord(
        id=_id_of(value["question"]), text=question, answers=read_answers(value["answer"])
    )


def _triviaqa(value: Mapping[str, Any]) -> OpenRecord | None:
    """Return the record of a TriviaQA question, or None for a question without an answer."""
    answer = value.get("Answer")
    if answer is None:
        return None
    return OpenRecord(
        id=read_id(value["QuestionId"]),
        text=read_question(value["Question"]),
        answers=read_answers([answer["Value"], *read_aliases(answer.get("Aliases"))]),
    )


def _popqa(value: Mapping[str, Any]) -> OpenRecord:
    """Return the record of a PopQA question."""
    question_id = read_id(value["id"])
    text = read_question(value["question"])
    answers = value["possible_answers"]
    if isinstance(answers, str):
        answers = json.loads(answers)
    return OpenRecord(
        id=question_id,
        text=text,
        answers=read_answers(answers),
        kind=read_label(value.get("prop")),
    )


def _ambigqa(value: Mapping[str, Any]) -> OpenRecord:
    """Return the record of an AmbigQA question."""
    answer_sets: list[tuple[tuple[str, ...], ...]] = []
    for annotation in value["annotations"]:
        if annotation["type"] == "singleAnswer":
            answer_sets.append((read_answers(annotation["answer"]),))
        else:
            pairs = annotation["qaPairs"]
            answer_sets.append(tuple(read_answers(pair["answer"]) for pair in pairs))

    all_names: list[str] = []
    for answer_set in answer_sets:
        for names in answer_set:
            all_names += names
    answers = read_answers(all_names)
    return OpenRecord(
        id=read_id(value["id"]),
        text=read_question(value["question"]),
        answers=answers,
        answer_sets=tuple(answer_sets),
    )


def _bamboogle(value: Mapping[str, Any]) -> OpenRecord:
    """Return the record of a Bamboogle question."""
    return OpenRecord(
        id=_id_of(value["Question"]),
        text=read_question(value["Question"]),
        answers=read_answers([value["Answer"].strip()]),
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], OpenRecord | None]] = {
    "hotpotqa": _hotpotqa,
    "musique": _musique,
    "nq": _natural_questions,
    "triviaqa": _triviaqa,
    "popqa": _popqa,
    "ambigqa": _ambigqa,
    "bamboogle": _bamboogle,
}


def _id_of(question: str) -> str:
    """Return an id for a question whose file gives none: a hash of its text."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]
