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
"""

import csv
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.errors import UserError
from mujica_jax.metrics import normalise_squad
from mujica_jax.records import GoldPassage
from mujica_jax.retrieval.text.corpus_records import explained, open_text, read_records
from mujica_jax.storage.local import beside, visible_files
from mujica_jax.storage.manifest import sha256_of

_log = logging.getLogger(__name__)

PATTERNS = ("*.json", "*.jsonl", "*.csv", "*.tsv")
PREPARED = "dataset_info.json"  # in a folder that `builders.py` has filled
CACHE_FORMAT = 1  # of what is kept
SOURCES = {  # where the official files are, as their papers name them
    "hotpotqa": "hotpot_train_v1.1.json and hotpot_dev_distractor_v1.json from HotpotQA's page",
    "musique": "musique_ans_v1.0_train.jsonl and musique_ans_v1.0_dev.jsonl from MuSiQue's repository",
    "nq": "NQ-open.train.jsonl and NQ-open.dev.jsonl from google-research-datasets/natural-questions",
    "triviaqa": "unfiltered-web-train.json and unfiltered-web-dev.json from TriviaQA's page",
    "popqa": "popQA.tsv from AlexTMallen/adaptive-retrieval",
    "ambigqa": "train_light.json and dev_light.json from AmbigQA's page",
    "bamboogle": "Bamboogle Prerelease.csv from ofirpress/self-ask",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRecord:
    id: str
    text: str
    answers: tuple[str, ...]  # gold answer first, aliases after it
    answer_sets: tuple[tuple[tuple[str, ...], ...], ...] = ()  # annotation, answer asked for, its aliases
    titles: tuple[str, ...] = ()  # gold passages
    context: tuple[GoldPassage, ...] = ()  # the passages given with the question, gold and others
    kind: str = ""  # bridge, comparison, 2hop, ...


def read_set(folder: Path, kind: str) -> list[tuple[bool, OpenRecord]]:
    """Return all questions, each with whether it is for training.

    They come from official files, or from a folder that `builders.py` has filled. What was read is kept as Parquet in
    the user's cache and found again by the content of the files: folders may agree in names, sizes and times.
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
        from mujica_jax.tasks.open_domain.builders import read_prepared

        records = list(read_prepared(folder))
    else:
        records = [("train" in file.name.lower(), record) for file in files for record in read_open_records(file, kind)]
    _keep(kept, records)
    return records


def _read_kept(kept: Path) -> list[tuple[bool, OpenRecord]] | None:
    """Return what an earlier start has read, or None where nothing is kept or the file is damaged."""
    import pyarrow
    from pyarrow import parquet

    if not kept.is_file():
        return None
    try:
        return [(row["train"], from_row(row)) for row in parquet.read_table(kept).to_pylist()]
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s is damaged (%s): the questions are read from their files again", kept, error)
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


def is_prepared(folder: Path) -> bool:
    return (folder / PREPARED).is_file()


def prepared_records(folder: Path) -> list[tuple[str, Any]]:
    """The official records in a folder that `builders.py` has filled, each with its place, in the files' order."""
    from mujica_jax.tasks.open_domain.builders import prepared_rows

    rows = sorted((row["id"].decode(), row["record"]) for _, row in prepared_rows(folder))
    return [(f"{folder}, {place}", json.loads(record)) for place, record in rows]


def as_row(record: OpenRecord) -> dict[str, Any]:
    """Texts and lists of texts: what is deeper is JSON."""
    row = dataclasses.asdict(record)
    return row | {"answer_sets": json.dumps(row["answer_sets"]), "context": json.dumps(row["context"])}


def from_row(row: Mapping[str, Any]) -> OpenRecord:
    return OpenRecord(
        id=row["id"],
        text=row["text"],
        answers=tuple(row["answers"]),
        answer_sets=tuple(tuple(tuple(of) for of in answers) for answers in json.loads(row["answer_sets"])),
        titles=tuple(row["titles"]),
        context=tuple(GoldPassage(**passage) for passage in json.loads(row["context"])),
        kind=row["kind"],
    )


def question_files(folder: Path, kind: str) -> list[Path]:
    """The files with questions, in a fixed order. Raises UserError saying what to put where."""
    found = [
        file
        for pattern in PATTERNS
        for suffix in ("", ".gz")
        for file in visible_files(folder, pattern + suffix)
        if "corpus" not in file.name
    ]
    if not found:
        what = "does not exist" if not folder.is_dir() else "has no file of questions"
        raise UserError(f"task.data_dir {folder} {what}: put {SOURCES[kind]} there, plain or .gz")
    return found


def read_open_records(file: Path, kind: str) -> Iterator[OpenRecord]:
    """Questions with an answer. Raises UserError naming file and place of a record that is not of the kind."""
    for place, value in _explained_values(file):
        try:
            if not isinstance(value, Mapping):
                raise TypeError(f"it is a {type(value).__name__} and must be an object")
            record = _READERS[kind](value)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(
                f"{file}, {place}: this is no record of {kind} ({type(error).__name__}: {error}); use the official "
                f"format: {SOURCES[kind]}"
            ) from error
        if record is not None:
            if not record.text.strip() or not all(isinstance(answer, str) for answer in record.answers):
                raise UserError(
                    f"{file}, {place}: question {record.text!r} and answers {list(record.answers)}; both must be texts"
                )
            yield record


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
        with open_text(file) as text:
            for number, row in enumerate(csv.DictReader(text, delimiter="\t" if name.endswith("tsv") else ","), 2):
                yield f"line {number}", row
        return
    if name.endswith(".json"):
        with open_text(file) as text:
            beginning = text.read(100).lstrip()
        if beginning.startswith('{"Data"') or beginning.startswith("{\n"):
            with open_text(file) as text:
                try:
                    listed = json.load(text)["Data"]
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(
                        f"{file} is neither a list of records nor has it a field Data ({type(error).__name__}: {error})"
                    ) from error
            yield from ((f"record {number}", value) for number, value in enumerate(listed))
            return
    for number, value in read_records(file):
        yield f"line {number}", value


def _hotpotqa(value: Mapping[str, Any]) -> OpenRecord | None:
    if "answer" not in value:  # the official test file
        return None
    return OpenRecord(
        id=value["_id"],
        text=value["question"].strip(),
        answers=(value["answer"],),
        titles=tuple(dict.fromkeys(title for title, _ in value["supporting_facts"])),
        context=tuple(
            GoldPassage(title=title, text=" ".join(sentence.strip() for sentence in sentences))
            for title, sentences in value["context"]
        ),
        kind=value.get("type", ""),
    )


def _musique(value: Mapping[str, Any]) -> OpenRecord | None:
    if "answer" not in value or not value.get("answerable", True):
        return None
    passages = [(entry["title"], entry["paragraph_text"], entry["is_supporting"]) for entry in value["paragraphs"]]
    return OpenRecord(
        id=value["id"],
        text=value["question"].strip(),
        answers=_distinct([value["answer"], *value.get("answer_aliases", ())]),
        titles=tuple(dict.fromkeys(title for title, _, supporting in passages if supporting)),
        context=tuple(GoldPassage(title=title, text=text) for title, text, _ in passages),
        kind=value["id"].partition("_")[0],
    )


def _natural_questions(value: Mapping[str, Any]) -> OpenRecord:
    answers = value["answer"]
    if isinstance(answers, str):
        raise TypeError("answer is a text and must be a list")
    return OpenRecord(id=_id_of(value["question"]), text=value["question"].strip(), answers=_distinct(answers))


def _triviaqa(value: Mapping[str, Any]) -> OpenRecord | None:
    if "Answer" not in value:
        return None
    answer = value["Answer"]
    answers = _distinct([answer["Value"], *answer["Aliases"]])
    return OpenRecord(id=value["QuestionId"], text=value["Question"].strip(), answers=answers)


def _popqa(value: Mapping[str, Any]) -> OpenRecord:
    answers = value["possible_answers"]
    listed = json.loads(answers) if isinstance(answers, str) else answers
    listed = [answer for answer in listed if normalise_squad(answer)] or listed  # "The The" would cover everything
    return OpenRecord(
        id=str(value["id"]), text=value["question"].strip(), answers=_distinct(listed), kind=value.get("prop") or ""
    )


def _ambigqa(value: Mapping[str, Any]) -> OpenRecord:
    sets = []
    for annotation in value["annotations"]:
        if annotation["type"] == "singleAnswer":
            sets.append((_distinct(annotation["answer"]),))
        else:
            sets.append(tuple(_distinct(pair["answer"]) for pair in annotation["qaPairs"]))
    flat = _distinct([answer for answers in sets for aliases in answers for answer in aliases])
    return OpenRecord(id=str(value["id"]), text=value["question"].strip(), answers=flat, answer_sets=tuple(sets))


def _bamboogle(value: Mapping[str, Any]) -> OpenRecord:
    return OpenRecord(id=_id_of(value["Question"]), text=value["Question"].strip(), answers=(value["Answer"].strip(),))


_READERS: Mapping[str, Callable[[Mapping[str, Any]], OpenRecord | None]] = {
    "hotpotqa": _hotpotqa,
    "musique": _musique,
    "nq": _natural_questions,
    "triviaqa": _triviaqa,
    "popqa": _popqa,
    "ambigqa": _ambigqa,
    "bamboogle": _bamboogle,
}


def _distinct(answers: Sequence[str]) -> tuple[str, ...]:
    if not answers:
        raise ValueError("there is no answer")
    return tuple(dict.fromkeys(answers))


def _id_of(question: str) -> str:
    """Of a question whose file gives it none."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]
