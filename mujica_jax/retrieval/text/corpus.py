"""Read the passages of a corpus, and store them in an index.

A corpus is one or more files, on local disk or in a bucket. They are read one passage at a time. A
passage is a record with the fields `title` and `text`, in any file format that `corpus_records.py`
reads. Published corpora can be read unchanged:

- DPR and BEIR: `id` or `_id`, `title`, `text`. The title may be empty or missing.
- wiki-18 (FlashRAG): `contents` is the title in quotes, a newline, and the text.
- Pyserini: `contents` is the text, or the title, a newline, and the text.
- MedRAG: `title`, `content`, and `contents`, which holds both. If a record has a `title`, it is
  used, whatever `contents` begins with.
- HotpotQA's abstracts: a tar of bz2 JSON Lines, in which `text` is a list of sentences.

Text, Markdown, HTML and PDF files are cut into passages (`documents.py`).

The id of a passage is its `id` or `_id`, or else its position in the whole corpus. A passage with
an empty text or a duplicate id raises an error with its file and line. If the caller asks for it,
such passages are skipped and counted instead.

An index stores its passages in an Arrow file. The file is mapped into memory, so that only the
passages that are looked at take memory. The position of a passage in this file is its position in
every index over the corpus.
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
from mujica_jax.retrieval.text.documents import (
    DEFAULT_CHUNKING,
    Chunking,
    document_records,
    is_document,
)

# Search results of one query: (position of a passage, its score), best first.
Hits = list[tuple[int, float]]

FILE = "passages.arrow"
# Number of passages in a record batch. One batch is in memory while the file is written.
BATCH_ROWS = 4096
# Number of new ids that are kept as Python objects before they are merged into the sorted array.
MERGED_IDS = 2**18

# Writes a value of any size on one short line, for error messages.
_repr = reprlib.Repr()
_repr.maxlevel = 2
_repr.maxdict = 2
_repr.maxlist = 2
_repr.maxstring = 60
_repr.maxother = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    """One passage of a corpus."""

    id: str
    # Empty if the corpus has no title for the passage.
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The text that is indexed, both as words and as an embedding."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Index(Protocol):
    """An index of passages. `search` is `encode` followed by `search_encoded`."""

    passages: Sequence[Passage]
    # Hash of everything that search results depend on.
    version: str

    def encode(self, queries: Sequence[str]) -> Any:
        """Return the queries in the form that `search_encoded` takes: words or embeddings."""
        ...

    def search_encoded(self, queries: Any, k: int) -> list[Hits]:
        """Return the positions and scores of the k best passages of each encoded query."""
        ...

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the positions and scores of the k best passages of each query, best first.

        Passages with equal scores are in corpus order. A BM25 index may return fewer than k
        passages, because it never returns a passage that shares no word with the query. Check k
        with `check_k` first.
        """
        return self.search_encoded(self.encode(queries), k)


def read_corpus(paths: Sequence[str | Path]) -> list[Passage]:
    """Return all passages of the files, in order. Their ids are unique over all files."""
    return list(stream_corpus(paths))


def stream_corpus(
    paths: Sequence[str | Path],
    skipped: Skipped | None = None,
    chunking: Chunking = DEFAULT_CHUNKING,
) -> Iterator[Passage]:
    """Yield the passages of the files, in order.

    Only one passage or document at a time is in memory, besides the hashes of all ids
    (`PassageIds`). With `skipped`, a bad passage or document is left out and counted there. Without
    `skipped`, it raises UserError. `chunking` is the size of the passages that documents are cut
    into.
    """
    ids = PassageIds()
    position = 0
    for place, record in _records(paths, skipped, chunking):
        try:
            passage = _passage(record, str(position), place)
            if not ids.add(passage.id):
                # Read the files again to find the first use of the id. Only the first skipped
                # passage is shown to the user, so this is not needed for later ones.
                is_shown = skipped is None or not skipped.skipped
                first = _first_place(passage.id, paths, chunking) if is_shown else ""
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


def _records(
    paths: Sequence[str | Path], skipped: Skipped | None, chunking: Chunking
) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each record of the files, and of each chunk of documents."""
    for path in paths:
        if not is_document(path):
            yield from records_of([path])
            continue
        try:
            chunks = list(document_records(path, chunking))
        except UserError as error:
            if skipped is None:
                raise
            skipped.skip(error)
            continue
        yield from chunks


class PassageFile(Sequence[Passage]):
    """The passages of one Arrow file, mapped into memory.

    Reading one passage takes some 10 to 50 microseconds. Raises UserError if the file is damaged.
    """

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
        # Raises IndexError if there is no such row.
        rows = range(len(self))[position]
        if isinstance(rows, range):
            return [self[row] for row in rows]
        (passage,) = _passages(self._table.slice(rows, 1))
        return passage

    def __iter__(self) -> Iterator[Passage]:
        for batch in self._table.to_batches():
            yield from _passages(batch)

    def titled(self, titles: Iterable[str]) -> list[Passage]:
        """Return the passages that have one of these titles, in corpus order."""
        import pyarrow.compute

        spellings: set[str] = set()
        for title in titles:
            spellings |= _spellings(title)
        value_set = pyarrow.array(sorted(spellings), pyarrow.string())
        options = pyarrow.compute.SetLookupOptions(value_set)
        matches = pyarrow.compute.call_function("is_in", [self._table.column("title")], options)
        return _passages(self._table.filter(matches))


def _spellings(title: str) -> set[str]:
    """Return all spellings that an index may have for a title.

    An index of an older release holds titles as its corpus wrote them: with HTML entities, or with
    decomposed accents.
    """
    return {
        title,
        html.escape(title),
        html.escape(title, quote=False),
        unicodedata.normalize("NFD", title),
    }


def _passages(rows: Any) -> list[Passage]:
    """Return the passages in the rows of an Arrow table or record batch."""
    return [
        Passage(id=row["id"], title=in_one_form(row["title"]), text=in_one_form(row["text"]))
        for row in rows.to_pylist()
    ]


def write_passages(
    passages: Iterable[Passage], path: Path, on_rows: Callable[[int], None] = lambda done: None
) -> int:
    """Write the passages into an Arrow file, and return how many were written.

    One record batch is in memory at a time. `on_rows` is called with the number written so far.
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
            # Free the batch before the next one is read.
            del batch, columns
    return rows


class PassageIds:
    """A set of ids, to find duplicates. It stores 16 bytes of the hash of each id.

    The probability that any two of a hundred million different ids have the same hash is 10^-23.
    """

    def __init__(self) -> None:
        self._sorted = np.empty(0, "S16")
        self._recent: set[bytes] = set()

    def add(self, identifier: str) -> bool:
        """Add an id. Return False if it was added before."""
        digest = hashlib.blake2b(identifier.encode(), digest_size=16).digest()
        place = self._sorted.searchsorted(digest)
        # numpy returns byte strings without zero bytes at their end.
        is_sorted_in = place < len(self._sorted) and self._sorted[place] == digest.rstrip(b"\0")
        if is_sorted_in or digest in self._recent:
            return False

        self._recent.add(digest)
        if len(self._recent) == MERGED_IDS:
            recent = np.sort(np.array(list(self._recent), "S16"))
            self._sorted = np.insert(self._sorted, self._sorted.searchsorted(recent), recent)
            self._recent.clear()
        return True


def _first_place(identifier: str, paths: Sequence[str | Path], chunking: Chunking) -> str:
    """Return the file and line of the first passage with this id.

    The records before it must be valid. They are, because only the first bad passage is looked up.
    """
    records = _records(paths, skipped=None, chunking=chunking)
    for number, (place, record) in enumerate(records):
        if _passage(record, str(number), place).id == identifier:
            return place
    return "a line that no longer exists"


def _passage(record: object, position: str, place: str) -> Passage:
    """Return the passage of a record. Raises UserError with its place if it is not valid.

    `position` is the record's position in the corpus. It is the id of a passage without an id.
    """
    if not isinstance(record, dict):
        raise UserError(
            f"{place}: a passage must be an object, but this is a {type(record).__name__}; "
            f"expected {FORMATS}"
        )
    title, text = _title_and_text(record)
    if not isinstance(title, str):
        raise UserError(
            f"{place}: the passage's title is {_repr.repr(title)}; give a string, or leave the "
            "title out"
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
    """Return the title and the text of a record. Their types are unchecked.

    Without the field `title`, the first line of `contents` may be the title. Otherwise the title is
    empty.
    """
    title = "" if _is_blank(record.get("title")) else record["title"]
    contents = record.get("contents")
    if not title and isinstance(contents, str) and not _is_blank(contents):
        return split_contents(contents)

    # The text is the first of these fields that has a value.
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
    """Return whether the value of a field counts as missing. Parquet tables may hold NaN."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def split_contents(contents: str) -> tuple[str, str]:
    """Split `contents` into title (its first line) and text.

    A single line is a text without a title. A single line in quotes is a title without a text.
    """
    first, _, text = contents.partition("\n")
    first = first.strip()
    title = first.removeprefix('"').removesuffix('"')
    if text.strip() or first == f'"{title}"':
        return title, text
    return "", contents


def _without_title(contents: str, title: str) -> str:
    """Return `contents` without its first line, if that line repeats the title."""
    first, _, text = contents.partition("\n")
    repeats = first.strip().removeprefix('"').removesuffix('"') == title.strip()
    return text if repeats and text.strip() else contents


def _joined(sentences: list[Any]) -> Any:
    """Join a list of sentences, or of paragraphs of sentences, into one text.

    Any other list is returned unchanged. A space is put between two sentences, unless the corpus
    has kept it.
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
    """Return the id of a record as a string. Raises UserError if it is not a string or a number.

    A table in which some ids are missing holds the id 7 as 7.0, which becomes "7".
    """
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
            f"{place}: the passage's id is {_repr.repr(identifier)}; give a string or a number, or "
            "leave the id out"
        )
    return str(identifier)
