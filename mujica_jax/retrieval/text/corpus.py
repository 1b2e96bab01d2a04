"""Passages of files, local or in a bucket, one at a time: records of `{title, text}` in any form
that `corpus_records.py` reads.

Published corpora are read as they are:

- DPR and BEIR: `id` or `_id`, `title`, `text`; a title may be empty or missing.
- wiki-18 (FlashRAG): `contents` is the title in quotes, a newline, the text.
- Pyserini: `contents` is the text, or title, newline, text.
- MedRAG: `title`, `content`, and `contents`, which holds both. A title that a record gives stays,
  whatever `contents` begins with.
- HotpotQA's abstracts: a tar of bz2 JSON Lines whose `text` is a list of sentences.

A passage without a text, or with an id that came before, is refused with its file and line, or
skipped and counted where the caller asks for that. Where a record has no `id` (or `_id`), its
position in the whole corpus is its id.

An index keeps them in an Arrow file that is mapped, not read, so that a corpus of any size costs
the memory of what is looked at. A passage's position in the file is its position in every index
made of it.
"""

import dataclasses
import hashlib
import html
import itertools
import math
import reprlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import Skipped
from mujica_jax.retrieval.manifest import again
from mujica_jax.retrieval.text.corpus_records import FORMATS, check_text, in_one_form, records_of

Hits = list[tuple[int, float]]  # positions of passages and their scores, best first

FILE = "passages.arrow"
BATCH_ROWS = 4096  # of a record batch: what is held while the file is written
MERGED_IDS = 2**18  # that are held as Python's objects before they are sorted into the others

_repr = reprlib.Repr()  # of a value of any size, in one short line
_repr.maxlevel, _repr.maxdict, _repr.maxlist, _repr.maxstring, _repr.maxother = 2, 2, 2, 60, 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    id: str
    title: str  # empty where the corpus has none
    text: str

    @property
    def contents(self) -> str:
        """What is indexed, by words and by embeddings alike."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Index(Protocol):
    """What a retriever searches: `encode`, then `search_encoded`; `search` does both."""

    passages: Sequence[Passage]
    version: str

    def encode(self, queries: Sequence[str]) -> Any: ...

    def search_encoded(self, queries: Any, k: int) -> list[Hits]: ...

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """For each query the positions and scores of the k best passages, best first, ties in
        corpus order; `check_k` says which k it can be. By words they can be fewer: a passage that
        shares none with the query is never returned.
        """
        return self.search_encoded(self.encode(queries), k)


def read_corpus(paths: Sequence[str | Path]) -> list[Passage]:
    """All passages of the files, in order. Ids are unique over all of them."""
    return list(stream_corpus(paths))


def stream_corpus(paths: Sequence[str | Path], skipped: Skipped | None = None) -> Iterator[Passage]:
    """As `read_corpus`, holding one passage and what `PassageIds` keeps of every id. With
    `skipped`, what would be refused is left out and counted there.
    """
    ids = PassageIds()
    position = 0
    for place, record in records_of(paths):
        try:
            passage = _passage(record, str(position), place)
            if not ids.add(passage.id):
                # Where it came first is read again from the beginning: for the one sentence that is
                # shown, not for all that are counted.
                first = (
                    ""
                    if skipped is not None and skipped.skipped
                    else _first_place(passage.id, paths)
                )
                advice = "each file once" if first == place else "each passage its own id"
                raise UserError(
                    f"{place}: the passage id {_repr.repr(passage.id)} was already used in "
                    f"{first}; give {advice}"
                )
        except UserError as error:
            if skipped is None:
                raise
            skipped.skip(error)
            continue
        position += 1
        yield passage


class PassageFile(Sequence[Passage]):
    """The passages of one Arrow file. Reading one takes a few tens of microseconds."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        try:
            self._table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(
                f"{path} cannot be read as an Arrow file ({error}): it is damaged, so "
                f"{again(path.parent)}"
            ) from error

    def __len__(self) -> int:
        return self._table.num_rows

    @overload
    def __getitem__(self, position: int) -> Passage: ...
    @overload
    def __getitem__(self, position: slice) -> list[Passage]: ...
    def __getitem__(self, position: int | slice) -> Passage | list[Passage]:
        rows = range(len(self))[position]  # raises IndexError
        if isinstance(rows, range):
            return [self[row] for row in rows]
        (passage,) = _passages(self._table.slice(rows, 1))
        return passage

    def __iter__(self) -> Iterator[Passage]:
        for batch in self._table.to_batches():
            yield from _passages(batch)

    def titled(self, titles: Iterable[str]) -> list[Passage]:
        """Return the passages with one of these titles, in order."""
        import pyarrow.compute

        spellings = set().union(*map(_spellings, titles))
        wanted = pyarrow.compute.SetLookupOptions(
            pyarrow.array(sorted(spellings), pyarrow.string())
        )
        matches = pyarrow.compute.call_function("is_in", [self._table.column("title")], wanted)
        return _passages(self._table.filter(matches))


def _spellings(title: str) -> set[str]:
    """Return how an index may hold a title: an older one has it as its corpus wrote it."""
    return {
        title,
        html.escape(title),
        html.escape(title, quote=False),
        unicodedata.normalize("NFD", title),
    }


def _passages(rows: Any) -> list[Passage]:
    """Return the passages of a table or a batch."""
    return [
        Passage(id=row["id"], title=in_one_form(row["title"]), text=in_one_form(row["text"]))
        for row in rows.to_pylist()
    ]


def write_passages(
    passages: Iterable[Passage], path: Path, on_rows: Callable[[int], None] = lambda done: None
) -> int:
    """How many were written. Holds one batch at a time."""
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("id", "title", "text")])
    rows, left = 0, iter(passages)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        while batch := list(itertools.islice(left, BATCH_ROWS)):
            columns = [[getattr(passage, name) for passage in batch] for name in schema.names]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            rows += len(batch)
            on_rows(rows)
            del batch, columns  # before the next one is read
    return rows


class PassageIds:
    """Which ids came before: 16 bytes of a hash each, sorted. Of a hundred million two are taken
    for one with probability 10^-23.
    """

    def __init__(self) -> None:
        self._sorted, self._recent = np.empty(0, "S16"), set[bytes]()

    def add(self, identifier: str) -> bool:
        """False where it came before."""
        found = hashlib.blake2b(identifier.encode(), digest_size=16).digest()
        place = self._sorted.searchsorted(found)
        known = place < len(self._sorted) and self._sorted[place] == found.rstrip(
            b"\0"
        )  # as numpy gives it back
        if known or found in self._recent:
            return False
        self._recent.add(found)
        if len(self._recent) == MERGED_IDS:
            recent = np.sort(np.array(list(self._recent), "S16"))
            self._sorted = np.insert(self._sorted, self._sorted.searchsorted(recent), recent)
            self._recent.clear()
        return True


def _first_place(identifier: str, paths: Sequence[str | Path]) -> str:
    """Of the first passage with this id, where none before it was left out."""
    records = enumerate(records_of(paths))
    found = (
        place
        for number, (place, record) in records
        if _passage(record, str(number), place).id == identifier
    )
    return next(found, "a line that is not there any more")


def _passage(record: object, position: str, place: str) -> Passage:
    if not isinstance(record, dict):
        raise UserError(
            f"{place}: a passage must be an object and this is a {type(record).__name__}; expected "
            f"{FORMATS}"
        )
    title, text = _title_and_text(record)
    if not isinstance(title, str):
        raise UserError(
            f"{place}: the passage's title is {_repr.repr(title)}; give a text, or leave the title "
            "out"
        )
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"{place}: the passage's text is {_repr.repr(text)}; every passage needs a text that "
            "is not empty"
        )
    passage = Passage(id=_identifier(record, position, place), title=title, text=text)
    for field in ("id", "title", "text"):
        try:
            check_text(getattr(passage, field))
        except UserError as error:
            raise UserError(f"{place}, the passage's {field}: {error}") from error
    return passage


def _title_and_text(record: dict[str, Any]) -> tuple[Any, Any]:
    """Return what a record gives as title and text, not yet checked. A title that is missing is
    empty."""
    title = "" if _is_blank(record.get("title")) else record["title"]
    contents = record.get("contents")
    if not title and isinstance(contents, str) and not _is_blank(contents):
        return _title_in_contents(contents)
    values = (record.get(field) for field in ("text", "content", "contents", "sentences"))
    text = next((value for value in values if not _is_blank(value)), record.get("text"))
    if isinstance(text, list):
        text = _joined(text)
    if text is contents and isinstance(text, str):
        text = _without_title(text, title)
    return title, text


def _is_blank(value: object) -> bool:
    """Tell whether a record leaves a field out. Tables without a value hold NaN there."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _title_in_contents(contents: str) -> tuple[str, str]:
    """Split contents into the title of its first line, and the text.

    A single line is a text without a title, or in quotes a title without a text.
    """
    first, _, text = contents.partition("\n")
    first = first.strip()
    title = first.removeprefix('"').removesuffix('"')
    if text.strip() or first == f'"{title}"':
        return title, text
    return "", contents


def _without_title(contents: str, title: str) -> str:
    """Return contents without its first line where that repeats the title."""
    first, _, text = contents.partition("\n")
    repeats = first.strip().removeprefix('"').removesuffix('"') == title.strip()
    return text if repeats and text.strip() else contents


def _joined(sentences: list[Any]) -> Any:
    """Return a list of sentences, or of paragraphs of sentences, as one text. Any other list is
    returned as it is.

    Some corpora keep the space before a sentence and some do not.
    """
    text = ""
    for sentence in sentences:
        if isinstance(sentence, list):
            sentence = _joined(sentence)
        if not isinstance(sentence, str):
            return sentences
        is_apart = not text or text[-1].isspace() or sentence[:1].isspace()
        text += sentence if is_apart else f" {sentence}"
    return text


def _identifier(record: dict[str, Any], position: str, place: str) -> str:
    """Return the id as a text. Numbers are ids; a table that lacks some holds the others as 7.0."""
    identifier = record.get("id")
    if identifier is None:
        identifier = record.get("_id", position)
    if identifier is None:
        return position
    if isinstance(identifier, float) and identifier.is_integer():
        identifier = int(identifier)
    is_finite = not isinstance(identifier, float) or math.isfinite(identifier)
    if (
        isinstance(identifier, bool)
        or not isinstance(identifier, str | int | float)
        or not is_finite
    ):
        raise UserError(
            f"{place}: the passage's id is {_repr.repr(identifier)}; give a text or a number, or "
            "leave the id out"
        )
    return str(identifier)
