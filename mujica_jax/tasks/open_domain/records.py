"""Records of open-domain and multi-hop question sets as their official files hold them.

| kind | files | question, answers |
|---|---|---|
| hotpotqa | `hotpot_{train,dev}_*.json` | `question`, `answer`; `supporting_facts`, `context` |
| musique | `musique_ans_*_{train,dev}.jsonl` | `question`, `answer`, `answer_aliases`; `paragraphs`; if answerable |
| nq | `NQ-open.{train,dev}.jsonl` | `question`, `answer`: a list |
| triviaqa | `*-{train,dev}.json`: `{"Data": [...]}` | `Question`, `Answer`: `Value` and `Aliases` |
| popqa | `popQA.tsv` | `question`, `possible_answers`: a JSON list |
| ambigqa | `{train,dev}_light.json` | `question`, `annotations`: each one answer with aliases, or several |
| bamboogle | `*.csv` | `Question`, `Answer` |

A question that stands in several places with the same id and text is one question with all of its
answers. One id for two different questions is refused with both places.
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
from mujica_jax.tasks.data_folder import is_prepared, require_tensorflow
from mujica_jax.tasks.official_files import OFFICIAL_FILES
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
CACHE_FORMAT = 2  # of the Parquet files that are kept
BYTE_ORDER_MARK = "\ufeff"  # that spreadsheets put before a table
# What to put where files are missing.
SOURCES = {kind: official.summary for kind, official in OFFICIAL_FILES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRecord:
    id: str
    text: str
    answers: tuple[str, ...]  # gold answer first, aliases after it
    answer_sets: tuple[
        tuple[tuple[str, ...], ...], ...
    ] = ()  # annotation, answer asked for, its aliases
    gold: tuple[
        GoldPassage, ...
    ] = ()  # gold passages; without a text where the record names a title alone
    context: tuple[GoldPassage, ...] = ()  # the passages given with the question, gold and others
    kind: str = ""  # bridge, comparison, 2hop, ...

    @property
    def titles(self) -> tuple[str, ...]:
        """The different titles of the gold passages."""
        return tuple(dict.fromkeys(passage.title for passage in self.gold))

    @property
    def has_gold_in_context(self) -> bool:
        """Whether the record names gold passages and all of them are among the passages given with
        the question."""
        if self.gold and set(self.gold) <= set(self.context):  # by far the most records
            return True
        keys = {passage_key(passage) for passage in self.context}
        titles = {title_key(passage.title) for passage in self.context}
        return bool(self.gold) and all(
            passage_key(passage) in keys if passage.text else title_key(passage.title) in titles
            for passage in self.gold
        )


def read_set(folder: Path, kind: str) -> list[tuple[bool, OpenRecord]]:
    """Return all questions, each with whether it is for training.

    They come from official files, or from a folder that TensorFlow Datasets has prepared
    (`builders.py`). What was read is kept as Parquet in the user's cache and found again by the
    content of the files: folders may agree in names, sizes and times.
    """
    prepared = is_prepared(folder)
    files = sorted(folder.iterdir()) if prepared else question_files(folder, kind)
    contents = [(file.name, sha256_of(file)) for file in files if file.is_file()]
    key = hashlib.sha256(json.dumps([CACHE_FORMAT, kind, contents]).encode()).hexdigest()[:16]
    kept = cache_folder("questions") / f"{kind}-{key}.parquet"
    records = _read_kept(kept)
    if records is not None:
        return records
    if prepared:
        require_tensorflow(f"reading {folder}")
        from mujica_jax.tasks.open_domain.builders import read_prepared

        records = read_prepared(folder, kind)
    else:
        records = read_question_files(files, kind)
    _keep(kept, records)
    return records


def _read_kept(kept: Path) -> list[tuple[bool, OpenRecord]] | None:
    """Return what an earlier start has read, or None where nothing is kept or the file is
    damaged."""
    import pyarrow
    from pyarrow import parquet

    if not kept.is_file():
        return None
    try:
        return [(row["train"], from_row(row)) for row in parquet.read_table(kept).to_pylist()]
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        _log.warning(
            "%s is damaged (%s): the questions are read from their files again", kept, error
        )
        return None


def _keep(kept: Path, records: Sequence[tuple[bool, OpenRecord]]) -> None:
    """Keep what was read. Where that fails (a full disk), the next start reads the files again."""
    import pyarrow
    from pyarrow import parquet

    rows = [as_row(record) | {"train": training} for training, record in records]
    try:
        with beside(kept) as partial:
            parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
            partial.replace(kept)
    except (pyarrow.ArrowException, OSError, UserError) as error:
        _log.warning("the questions could not be kept for the next start (%s)", error)


def read_question_files(
    files: Sequence[Path], kind: str, training_files: Collection[Path] | None = None
) -> list[tuple[bool, OpenRecord]]:
    """Return the questions of all files, each with whether it is for training.

    The names of the files say which are for training, unless `training_files` lists them. A
    question that stands in a training file and in another file is listed for both.
    """
    if training_files is None:
        training_files = [file for file in files if is_training_file(file.name)]
    merged: dict[tuple[bool, str], OpenRecord] = {}
    first_places: dict[
        str, tuple[str, str]
    ] = {}  # of an id: the text of its question and where it stands
    for file in files:
        training = file in training_files
        for place, record in read_placed_records(file, kind):
            text, first_place = first_places.setdefault(record.id, (record.text, place))
            if _words_of(text) != _words_of(record.text):
                raise UserError(
                    f"{place}: the question {record.id} is {record.text!r} here and {text!r} in "
                    f"{first_place}; give each question its own id"
                )
            known = merged.get((training, record.id))
            merged[training, record.id] = record if known is None else _merge(known, record)
    return [(training, record) for (training, _), record in merged.items()]


def is_training_file(name: str) -> bool:
    return "train" in name.lower()


def _words_of(text: str) -> list[str]:
    return text.lower().split()


def _merge(first: OpenRecord, second: OpenRecord) -> OpenRecord:
    """Join one question of two places: the answers of both, and the passages of the place that has
    the gold ones."""
    better = second if second.has_gold_in_context and not first.has_gold_in_context else first
    return dataclasses.replace(
        better,
        answers=tuple(dict.fromkeys(first.answers + second.answers)),
        answer_sets=tuple(dict.fromkeys(first.answer_sets + second.answer_sets)),
        kind=first.kind or second.kind,
    )


def prepared_records(folder: Path, kind: str) -> list[tuple[str, Any]]:
    """Return the official records of a prepared folder in the order of their files, each with its
    place."""
    require_tensorflow(f"reading {folder}")
    from mujica_jax.tasks.open_domain.builders import prepared_rows

    rows = sorted((row["id"].decode(), row["record"]) for _, row in prepared_rows(folder, kind))
    return [(f"{folder}, {place}", json.loads(record)) for place, record in rows]


def as_row(record: OpenRecord) -> dict[str, Any]:
    """Texts and lists of texts: what is deeper is JSON."""
    row = dataclasses.asdict(record)
    return row | {name: json.dumps(row[name]) for name in ("answer_sets", "gold", "context")}


def from_row(row: Mapping[str, Any]) -> OpenRecord:
    return OpenRecord(
        id=row["id"],
        text=row["text"],
        answers=tuple(row["answers"]),
        answer_sets=tuple(tuple(map(tuple, answers)) for answers in json.loads(row["answer_sets"])),
        gold=tuple(GoldPassage(**passage) for passage in json.loads(row["gold"])),
        context=tuple(GoldPassage(**passage) for passage in json.loads(row["context"])),
        kind=row["kind"],
    )


def question_files(folder: Path, kind: str) -> list[Path]:
    """Return the files with questions, in a fixed order. Raises UserError saying what to put
    where."""
    files = find_question_files(folder)
    if not files:
        what = "does not exist" if not folder.is_dir() else "has no file of questions"
        raise UserError(f"task.data_dir {folder} {what}: put {SOURCES[kind]} there, plain or .gz")
    return files


def find_question_files(folder: Path) -> list[Path]:
    return [
        file
        for pattern in PATTERNS
        for suffix in ("", ".gz")
        for file in visible_files(folder, pattern + suffix)
        if "corpus" not in file.name
    ]


def read_open_records(file: Path, kind: str) -> Iterator[OpenRecord]:
    """Questions with an answer. Raises UserError naming file and place of a record that is not of
    the kind."""
    for _, record in read_placed_records(file, kind):
        yield record


def read_placed_records(file: Path, kind: str) -> Iterator[tuple[str, OpenRecord]]:
    """Read the questions with an answer, each with its file and place. Raises UserError as
    `read_open_records` does."""
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
                f"{place}: this is no record of {kind} ({type(error).__name__}: {error}); use the "
                f"official format: {SOURCES[kind]}"
            ) from error
        if record is None:
            continue
        if not record.text:
            raise UserError(
                f"{place}: question {record.text!r} and answers {list(record.answers)}; both must "
                "be texts"
            )
        yield place, record


def _explained_values(file: Path) -> Iterator[tuple[str, Any]]:
    """What reading a damaged file may raise is one sentence."""
    with explained(file):
        try:
            yield from _values(file)
        except csv.Error as error:
            raise UserError(f"{file} is no table ({error}): use the official file") from error


def _values(file: Path) -> Iterator[tuple[str, Any]]:
    name = file.name.removesuffix(".gz")
    if name.endswith((".csv", ".tsv")):
        yield from _table_rows(file, delimiter="\t" if name.endswith("tsv") else ",")
        return
    if name.endswith(".json"):
        with open_text(file) as text:
            is_object = _first_character(text) == "{"
        if is_object and (whole := _whole_object(file)) is not None:
            yield from _listed_in(file, whole)
            return
    for number, value in read_records(file):
        yield f"line {number}", value


def _table_rows(file: Path, delimiter: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a table by the names in its first line, whatever the order of its columns.

    Rows of empty cells, which spreadsheets leave at the end, are left out. `strict`: a quotation
    mark without its partner would otherwise take the lines behind it into its cell.
    """
    with open_text(file) as text:
        first_line = text.readline().removeprefix(BYTE_ORDER_MARK)
        reader = csv.DictReader(
            itertools.chain([first_line], text), delimiter=delimiter, strict=True
        )
        names = [name for name in reader.fieldnames or () if name.strip()]
        if len(set(names)) < len(names):
            raise UserError(
                f"{file}, line 1: a column is named twice ({', '.join(names)}); name each once"
            )
        for row in _strict_rows(reader, file):
            place = f"line {reader.line_num}"
            surplus = [cell for cell in row.pop(None, ()) if cell.strip()]
            if not surplus and not any((cell or "").strip() for cell in row.values()):
                continue
            if surplus:
                raise UserError(
                    f"{file}, {place}: there are more cells than columns ({surplus!r} is left "
                    "over); put an answer that holds the separator between double quotes"
                )
            yield place, row


def _strict_rows(reader: csv.DictReader, file: Path) -> Iterator[dict[Any, Any]]:
    """The rows of a reader that refuses quotation marks in wrong places."""
    first_line = reader.line_num + 1
    try:
        for row in reader:
            yield row
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{file}, line {first_line}: not a row of a table ({error}); put a cell that holds "
            "quotation marks between double quotes, and double those inside it"
        ) from error


def _first_character(text: TextIO) -> str:
    """Return the first character that is neither white space nor a byte order mark."""
    while read := text.read(1):
        if not read.isspace() and read != BYTE_ORDER_MARK:
            return read
    return ""


def _whole_object(file: Path) -> Any:
    """Return the one object that a file holds, or None where each line holds a record."""
    with open_text(file) as text:
        content = text.read().removeprefix(BYTE_ORDER_MARK)
    try:
        return json.loads(content)
    except RecursionError:
        return None
    except ValueError as error:
        is_record_a_line = isinstance(error, json.JSONDecodeError) and error.msg.startswith(
            "Extra data"
        )
        if is_record_a_line or not content.lstrip().startswith(("{\n", "{\r", '{"Data"')):
            return None
        raise UserError(
            f"{file} is neither a list of records nor has it a field Data ({type(error).__name__}: "
            f"{error})"
        ) from error


def _listed_in(file: Path, whole: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the records under `Data`, as TriviaQA's files have them, or the only record of a
    file."""
    if "question" in whole and "Data" not in whole:
        yield "line 1", whole
        return
    if not isinstance(whole.get("Data"), list):
        raise UserError(f"{file} is neither a list of records nor has it a field Data with one")
    yield from ((f"record {number}", value) for number, value in enumerate(whole["Data"]))


def _hotpotqa(value: Mapping[str, Any]) -> OpenRecord | None:
    if is_missing(value.get("answer")):  # the official test file
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
    question = read_question(value["question"])
    return OpenRecord(
        id=_id_of(value["question"]), text=question, answers=read_answers(value["answer"])
    )


def _triviaqa(value: Mapping[str, Any]) -> OpenRecord | None:
    answer = value.get("Answer")
    if answer is None:
        return None
    return OpenRecord(
        id=read_id(value["QuestionId"]),
        text=read_question(value["Question"]),
        answers=read_answers([answer["Value"], *read_aliases(answer.get("Aliases"))]),
    )


def _popqa(value: Mapping[str, Any]) -> OpenRecord:
    answers = value["possible_answers"]
    return OpenRecord(
        id=read_id(value["id"]),
        text=read_question(value["question"]),
        answers=read_answers(json.loads(answers) if isinstance(answers, str) else answers),
        kind=read_label(value.get("prop")),
    )


def _ambigqa(value: Mapping[str, Any]) -> OpenRecord:
    sets = []
    for annotation in value["annotations"]:
        if annotation["type"] == "singleAnswer":
            sets.append((read_answers(annotation["answer"]),))
        else:
            sets.append(tuple(read_answers(pair["answer"]) for pair in annotation["qaPairs"]))
    flat = read_answers([answer for answers in sets for aliases in answers for answer in aliases])
    return OpenRecord(
        id=read_id(value["id"]),
        text=read_question(value["question"]),
        answers=flat,
        answer_sets=tuple(sets),
    )


def _bamboogle(value: Mapping[str, Any]) -> OpenRecord:
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
    """Of a question whose file gives it none."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]
