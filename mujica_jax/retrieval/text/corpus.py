"""Passages of files, local or in a bucket, read one at a time.

A passage is a record of `{title, text}` in any form that `corpus_records.py` reads.

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
from mujica_jax.retrieval.manifest import rebuild_advice
from mujica_jax.retrieval.text.corpus_records import FORMATS, check_text, in_one_form, records_of

Hits = list[tuple[int, float]]  # positions of passages and their scores, best first

FILE = "passages.arrow"
BATCH_ROWS = 4096  # of a record batch: what is held while the file is written
MERGED_IDS = 2**18  # that are held as Python's objects before they are sorted into the others

# Shows a value of any size in one short line.
_repr = reprlib.Repr()
_repr.maxlevel = 2
_repr.maxdict = 2
_repr.maxlist = 2
_repr.maxstring = 60
_repr.maxother = 60


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
    """An index that a retriever searches: `encode`, then `search_encoded`; `search` does both."""

    passages: Sequence[Passage]
    version: str

    def encode(self, queries: Sequence[str]) -> Any: ...

    def search_encoded(self, queries: Any, k: int) -> list[Hits]: ...

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the positions and scores of the k best passages of each query, best first.

        Ties are in corpus order, and `check_k` checks k. A search by words may return fewer: a
        passage that shares no word with the query is never returned.
        """
        return self.search_encoded(self.encode(queries), k)


def read_corpus(paths: Sequence[str | Path]) -> list[Passage]:
    """Return all passages of the files, in order. Ids are unique over all of them."""
    return list(stream_corpus(paths))


def stream_corpus(paths: Sequence[str | Path], skipped: Skipped | None = None) -> Iterator[Passage]:
    """Yield the passages of the files, in order.

    Memory holds one passage and what `PassageIds` keeps of every id. With `skipped`, a bad passage
    is left out and counted there; otherwise it raises UserError.
    """
    ids = PassageIds()
    position = 0
    for place, record in records_of(paths):
        try:
            passage = _passage(record, str(position), place)
            if not ids.add(passage.id):
                # The files are read again to find the first use of the id. Only the first skipped
                # passage is shown, so later ones do without.
                is_shown = skipped is None or not skipped.skipped
                first = _first_place(passage.id, paths) if is_shown else ""
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
                f"{rebuild_advice(path.parent)}"
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

        spellings: set[str] = set()
        for title in titles:
            spellings |= _spellings(title)
        value_set = pyarrow.array(sorted(spellings), pyarrow.string())
        options = pyarrow.compute.SetLookupOptions(value_set)
        matches = pyarrow.compute.call_function("is_in", [self._table.column("title")], options)
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
    """Write the passages into an Arrow file, and return how many there were.

    One batch is held in memory at a time.
    """
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("id", "title", "text")])
    rows = 0
    remaining = iter(passages)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        while batch := list(itertools.islice(remaining, BATCH_ROWS)):
            columns = [
                [passage.id for passage in batch],
                [passage.title for passage in batch],
                [passage.text for passage in batch],
            ]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            rows += len(batch)
            on_rows(rows)
            # Freed before the next batch is read.
            del batch, columns
    return rows


class PassageIds:
    """Remembers ids by 16 bytes of a hash each, sorted.

    Two of a hundred million ids are taken for the same with probability 10^-23.
    """

    def __init__(self) -> None:
        self._sorted = np.empty(0, "S16")
        self._recent: set[bytes] = set()

    def add(self, identifier: str) -> bool:
        """Add an id. Return False if it came before."""
        digest = hashlib.blake2b(identifier.encode(), digest_size=16).digest()
        place = self._sorted.searchsorted(digest)
        # numpy returns bytes without the zeros at their end.
        is_sorted_in = place < len(self._sorted) and self._sorted[place] == digest.rstrip(b"\0")
        if is_sorted_in or digest in self._recent:
            return False

        self._recent.add(digest)
        if len(self._recent) == MERGED_IDS:
            recent = np.sort(np.array(list(self._recent), "S16"))
            self._sorted = np.insert(self._sorted, self._sorted.searchsorted(recent), recent)
            self._recent.clear()
        return True


def _first_place(identifier: str, paths: Sequence[str | Path]) -> str:
    """Return the place of the first passage with this id, where none before it was left out."""
    for number, (place, record) in enumerate(records_of(paths)):
        if _passage(record, str(number), place).id == identifier:
            return place
    return "a line that is not there any more"


def _passage(record: object, position: str, place: str) -> Passage:
    """Make a passage of a record. Raise UserError with its place where it is none."""
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
    """Return the title and the text of a record, not yet checked.

    A missing title is empty.
    """
    title = "" if _is_blank(record.get("title")) else record["title"]
    contents = record.get("contents")
    if not title and isinstance(contents, str) and not _is_blank(contents):
        return _title_in_contents(contents)

    # Take the first field that has a value.
    text = record.get("text")
    for field in ("text", "content", "contents", "sentences"):
        if not _is_blank(record.get(field)):
            text = record[field]
            break
    if isinstance(text, list):
        text = _joined(text)
    if text is contents and isinstance(text, str):
        text = _without_title(text, title)
    return title, text


def _is_blank(value: object) -> bool:
    """Return whether a record leaves a field out. Tables without a value hold NaN there."""
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
    """Return a list of sentences, or of paragraphs of sentences, as one text.

    Any other list is returned as it is. Some corpora keep the space before a sentence and some do
    not.
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

    is_text_or_number = isinstance(identifier, str | int | float)
    is_bool = isinstance(identifier, bool)
    is_finite = not isinstance(identifier, float) or math.isfinite(identifier)
    if is_bool or not is_text_or_number or not is_finite:
        raise UserError(
            f"{place}: the passage's id is {_repr.repr(identifier)}; give a text or a number, or "
            "leave the id out"
        )
    return str(identifier)
