"""Passages of files, local or in a bucket, one at a time: JSON arrays and JSON Lines of `{title, text}`, `.gz`, `.bz2`; Parquet; tar.

Records that say it otherwise are understood too: wiki-18 (`contents` is the title in quotes, a newline, the text) and the HotpotQA
abstracts (a tar of bz2 JSON Lines whose `text` is a list of sentences).

A passage without a title or text, or with an id that came before, is refused with its file and line, or skipped and counted where the
caller asks for that. Where a record carries no `id` (or `_id`), its position in the whole corpus is its id. Indexes (`bm25.py` and the
dense ones) refer to passages by position.
"""

import bz2
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from mujica_jax.errors import UserError
from mujica_jax.retrieval.corpus_files import open_file

FORMATS = (
    'a JSON array or JSON Lines of {"title": ..., "text": ...}, plain, .gz or .bz2, a .tar of such files, or .parquet'
)
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2")
READ_CHARACTERS = 2**20  # of an array, at once
LARGEST_RECORD_CHARACTERS = 2**24  # of an array: a record that does not end within so much is broken JSON


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """What is indexed, by words and by embeddings alike."""
        return f"{self.title}\n{self.text}"


@dataclasses.dataclass
class Skipped:
    """Counts the records that are left out, and remembers what the first of them lacked. A caller that gives one asks for skipping."""

    count: int = 0
    first: str = ""


def read_corpus(paths: Sequence[str | Path]) -> list[Passage]:
    """All passages of the files, in order. Ids are unique over all of them."""
    return list(stream_corpus(paths))


def stream_corpus(paths: Sequence[str | Path], skipped: Skipped | None = None) -> Iterator[Passage]:
    """As `read_corpus`, holding one passage and 8 bytes of every id that is not the passage's own position."""
    known = _KnownIds(paths)
    position = 0
    for place, record in _records_of(paths):
        try:
            passage = _passage(record, str(position), place)
            known.add(passage.id, position, place)
        except UserError as error:
            if skipped is None:
                raise
            skipped.count += 1
            skipped.first = skipped.first or str(error)
            continue
        position += 1
        yield passage


def read_records(path: str | Path) -> Iterator[tuple[int, object]]:
    """Line number (in Parquet: row) and value of every record of a file that is no archive."""
    with _explained(path):
        if str(path).endswith(".parquet"):
            yield from _parquet_records(path)
            return
        with open_text(path) as file:
            yield from _text_records(path, file)


@contextlib.contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """A local file or one in a bucket, decompressed."""
    with open_file(path) as raw, _decompressed(str(path), raw) as text:
        yield text


def _records_of(paths: Sequence[str | Path]) -> Iterator[tuple[str, object]]:
    """Each record of all files with the place it stands at."""
    for path in paths:
        if str(path).endswith(ARCHIVES):
            for member, number, record in _archive_records(path):
                yield f"{path}, {member}, line {number}", record
        else:
            unit = "row" if str(path).endswith(".parquet") else "line"
            for number, record in read_records(path):
                yield f"{path}, {unit} {number}", record


def _archive_records(path: str | Path) -> Iterator[tuple[str, int, object]]:
    with _explained(path), open_file(path) as file, tarfile.open(fileobj=file, mode="r:*") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                with _decompressed(member.name, content) as text:
                    for number, record in _text_records(f"{path}, {member.name}", text):
                        yield member.name, number, record


def _parquet_records(path: str | Path) -> Iterator[tuple[int, object]]:
    import pyarrow.parquet

    row = 0
    with open_file(path) as file, pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, record


def _decompressed(name: str, raw: IO[bytes]) -> TextIO:
    """Closing it does not close what is under it where that is compressed: its owner does."""
    opened: Any = raw
    if name.endswith(".gz"):
        opened = gzip.GzipFile(fileobj=raw)
    elif name.endswith(".bz2"):
        opened = bz2.BZ2File(raw)
    return io.TextIOWrapper(opened, encoding="utf-8")


@contextlib.contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    """Turns what reading a file may raise into one sentence."""
    import pyarrow

    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); expected {FORMATS}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give the path of {FORMATS}") from error
    except (EOFError, OSError, tarfile.TarError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read ({error}); expected {FORMATS}") from error


def _text_records(path: str | Path, file: TextIO) -> Iterator[tuple[int, object]]:
    """An array where the text begins with a bracket, else lines."""
    begun = file.read(1)
    while begun and (begun[-1].isspace() or begun[-1] == "\ufeff"):
        begun += file.read(1)
    yield from _array_records(path, file, begun) if begun.endswith("[") else _line_records(path, file, begun)


def _line_records(path: str | Path, file: TextIO, begun: str) -> Iterator[tuple[int, object]]:
    """`begun` is what was read already: blank lines and the first character that is none."""
    before, _, first = begun.rpartition("\n")
    line_number = before.count("\n") + ("\n" in begun)
    while line := first + file.readline():
        first = ""
        line_number += 1
        if line.strip():
            try:
                yield line_number, json.loads(line.lstrip("\ufeff"))
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {line_number}: not a JSON record ({error.msg}); expected {FORMATS}"
                ) from error


def _array_records(path: str | Path, file: TextIO, begun: str) -> Iterator[tuple[int, object]]:
    """Decoded one by one, so that each record has the line it begins on and the file is never held whole."""
    decoder = json.JSONDecoder()
    text, position, counted, line_number, ended = "", 0, 0, 1 + begun.count("\n"), False

    def more() -> bool:
        """Drop what is done and read on. False at the end of the file."""
        nonlocal text, position, counted, ended
        read = file.read(READ_CHARACTERS)
        text, position, counted = text[counted:] + read, position - counted, 0
        ended = not read
        return not ended

    def next_character() -> str:
        nonlocal position, counted, line_number
        while True:
            position = _skip(text, position, " \t\r\n")
            line_number += text.count("\n", counted, position)
            counted = position
            if position < len(text) or not more():
                return text[position : position + 1]

    while next_character() != "]":
        while True:
            try:
                record, end = decoder.raw_decode(text, position)
                if end < len(text) or ended:  # else a number may go on
                    break
            except json.JSONDecodeError as error:
                if ended or len(text) - error.pos > LARGEST_RECORD_CHARACTERS:
                    line = line_number + text.count("\n", counted, error.pos)
                    raise UserError(
                        f"{path}, line {line}: not a JSON record ({error.msg}); expected {FORMATS}"
                    ) from error
            more()
        yield line_number, record
        position = end
        following = next_character()
        if following == ",":
            position += 1
        elif following != "]":
            raise UserError(
                f"{path}, line {line_number}: a comma or the end of the array is missing; expected {FORMATS}"
            )


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


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
                f"{place}: the passage's {field} is {value!r}; every passage needs a title and a text that is not empty"
            )
    identifier = fields.get("id", fields.get("_id"))
    return Passage(id=position if identifier is None else str(identifier), title=fields["title"], text=fields["text"])


def _wiki_18(record: dict[str, Any]) -> dict[str, Any]:
    title, _, text = record["contents"].partition("\n")
    return {**record, "title": title.strip().removeprefix('"').removesuffix('"'), "text": text}


class _KnownIds:
    """Refuses an id that came before. Only hashes of ids are kept; where two agree, the files are read again to find the first."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = paths
        self._hashes: set[int] = set()
        self._unlike: set[int] = set()  # positions of passages whose id is another one than their position

    def add(self, identifier: str, position: int, place: str) -> None:
        if identifier == str(position):
            # Known without keeping it. An earlier passage may have taken this number for itself.
            if self._hashes and _hash(identifier) in self._hashes:
                self._refuse(identifier, place)
            return
        number = int(identifier) if identifier.isascii() and identifier.isdecimal() else -1
        taken = 0 <= number < position and str(number) == identifier and number not in self._unlike
        if taken or (hashed := _hash(identifier)) in self._hashes:
            self._refuse(identifier, place)
            hashed = _hash(identifier)
        self._hashes.add(hashed)
        self._unlike.add(position)

    def _refuse(self, identifier: str, place: str) -> None:
        position = 0
        for earlier, record in _records_of(self._paths):
            if earlier == place:
                return  # two ids of one hash
            try:
                found = _passage(record, str(position), earlier).id
            except UserError:
                continue
            position += 1
            if found == identifier:
                raise UserError(
                    f"{place}: the passage id {identifier!r} was already used in {earlier}; give each passage its own id"
                )


def _hash(identifier: str) -> int:
    return int.from_bytes(hashlib.blake2b(identifier.encode(), digest_size=8).digest(), "little")
