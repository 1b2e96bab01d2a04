"""Passages of files, local or in a bucket, one at a time: records of `{title, text}` in any form that
`corpus_records.py` reads.

Records that say it otherwise are understood too: wiki-18 (`contents` is the title in quotes, a newline, the text) and
the HotpotQA abstracts (a tar of bz2 JSON Lines whose `text` is a list of sentences).

A passage without a title or text, or with an id that came before, is refused with its file and line, or skipped and
counted where the caller asks for that. Where a record carries no `id` (or `_id`), its position in the whole corpus is
its id.

An index keeps them in an Arrow file that is mapped, not read, so that a corpus of any size costs the memory of what is
looked at. A passage's position in the file is its position in every index made of it.
"""

import dataclasses
import hashlib
import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import Skipped
from mujica_jax.retrieval.manifest import again
from mujica_jax.retrieval.text.corpus_records import FORMATS, check_text, records_of

Hits = list[tuple[int, float]]  # positions of passages and their scores, best first

FILE = "passages.arrow"
BATCH_ROWS = 4096  # of a record batch: what is held while the file is written
MERGED_IDS = 2**18  # that are held as Python's objects before they are sorted into the others

_repr = reprlib.Repr()  # of a value of any size, in one short line
_repr.maxlevel, _repr.maxdict, _repr.maxlist, _repr.maxstring, _repr.maxother = 2, 2, 2, 60, 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """What is indexed, by words and by embeddings alike."""
        return f"{self.title}\n{self.text}"


class Index(Protocol):
    """What a retriever searches: `encode`, then `search_encoded`; `search` does both."""

    passages: Sequence[Passage]
    version: str

    def encode(self, queries: Sequence[str]) -> Any: ...

    def search_encoded(self, queries: Any, k: int) -> list[Hits]: ...

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """For each query the positions and scores of the k best passages, best first, ties in corpus order; `check_k`
        says which k it can be. By words they can be fewer: a passage that shares none with the query is never returned.
        """
        return self.search_encoded(self.encode(queries), k)


def read_corpus(paths: Sequence[str | Path]) -> list[Passage]:
    """All passages of the files, in order. Ids are unique over all of them."""
    return list(stream_corpus(paths))


def stream_corpus(paths: Sequence[str | Path], skipped: Skipped | None = None) -> Iterator[Passage]:
    """As `read_corpus`, holding one passage and what `PassageIds` keeps of every id. With `skipped`, what would be
    refused is left out and counted there.
    """
    ids = PassageIds()
    position = 0
    for place, record in records_of(paths):
        try:
            passage = _passage(record, str(position), place)
            if not ids.add(passage.id):
                # Where it came first is read again from the beginning: for the one sentence that is shown, not for all
                # that are counted.
                first = "" if skipped is not None and skipped.skipped else _first_place(passage.id, paths)
                advice = "each file once" if first == place else "each passage its own id"
                raise UserError(
                    f"{place}: the passage id {_repr.repr(passage.id)} was already used in {first}; give {advice}"
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
                f"{path} cannot be read as an Arrow file ({error}): it is damaged, so {again(path.parent)}"
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
        """The passages with one of these titles, in order."""
        import pyarrow.compute

        wanted = pyarrow.compute.SetLookupOptions(pyarrow.array(sorted(set(titles)), pyarrow.string()))
        matches = pyarrow.compute.call_function("is_in", [self._table.column("title")], wanted)
        return _passages(self._table.filter(matches))


def _passages(rows: Any) -> list[Passage]:
    """Of a table or a batch."""
    return [Passage(**row) for row in rows.to_pylist()]


def write_passages(passages: Iterable[Passage], path: Path, on_rows: Callable[[int], None] = lambda done: None) -> int:
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
    """Which ids came before: 16 bytes of a hash each, sorted. Of a hundred million two are taken for one with
    probability 10^-23.
    """

    def __init__(self) -> None:
        self._sorted, self._recent = np.empty(0, "S16"), set[bytes]()

    def add(self, identifier: str) -> bool:
        """False where it came before."""
        found = hashlib.blake2b(identifier.encode(), digest_size=16).digest()
        place = self._sorted.searchsorted(found)
        known = place < len(self._sorted) and self._sorted[place] == found.rstrip(b"\0")  # as numpy gives it back
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
    found = (place for number, (place, record) in records if _passage(record, str(number), place).id == identifier)
    return next(found, "a line that is not there any more")


def _passage(record: object, position: str, place: str) -> Passage:
    if not isinstance(record, dict):
        raise UserError(
            f"{place}: a passage must be an object and this is a {type(record).__name__}; expected {FORMATS}"
        )
    fields = _wiki_18(record) if isinstance(record.get("contents"), str) and "text" not in record else dict(record)
    if isinstance(text := fields.get("text"), list) and all(isinstance(sentence, str) for sentence in text):
        fields["text"] = "".join(text)  # the abstracts' sentences begin with their own space
    for field in ("title", "text"):
        value = fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise UserError(
                f"{place}: the passage's {field} is {_repr.repr(value)}; every passage needs a title and a text that "
                "is not empty"
            )
    identifier = fields.get("id", fields.get("_id"))
    identifier = position if identifier is None else str(identifier)
    passage = Passage(id=identifier, title=fields["title"], text=fields["text"])
    for field in ("id", "title", "text"):
        try:
            check_text(getattr(passage, field))
        except UserError as error:
            raise UserError(f"{place}, the passage's {field}: {error}") from error
    return passage


def _wiki_18(record: dict[str, Any]) -> dict[str, Any]:
    title, _, text = record["contents"].partition("\n")
    return {**record, "title": title.strip().removeprefix('"').removesuffix('"'), "text": text}
