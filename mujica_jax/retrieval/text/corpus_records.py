"""Records of files, local or in a bucket, one at a time: JSON arrays and JSON Lines, plain, `.gz` or `.bz2`, in a tar
or not; Parquet.

What is no JSON, or cannot be read at all, is refused with file and line.
"""

import contextlib
import io
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import decompressed, open_file

FORMATS = (
    "a JSON array or JSON Lines of objects (passages have a title and a text), plain, .gz or .bz2, a .tar of such "
    "files, or .parquet"
)
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2")
SHOWN_CHARACTERS = 50  # of a text before and behind what is wrong with it
READ_CHARACTERS = 2**20  # of an array, at once
MAX_RECORD_CHARACTERS = 2**24  # of an array: a record that does not end within so much is broken JSON
_space = re.compile(r"[ \t\r\n]*")


def read_records(path: str | Path) -> Iterator[tuple[int, object]]:
    """Line number (in Parquet: row) and value of every record of a file that is no archive."""
    with explained(path):
        if str(path).endswith(".parquet"):
            yield from _parquet_records(path)
            return
        with open_text(path) as file:
            yield from _text_records(path, file)


@contextlib.contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """A local file or one in a bucket, decompressed."""
    with open_file(path) as raw, io.TextIOWrapper(decompressed(str(path), raw), "utf-8") as text:
        yield text


def check_text(text: str) -> None:
    """A command line whose bytes are no UTF-8, and an escaped half of a character in JSON, give strings that nothing
    can write down.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[max(0, error.start - SHOWN_CHARACTERS) : error.start + SHOWN_CHARACTERS])
        raise UserError(f"{shown} is no text that UTF-8 can write: give whole characters") from error


def records_of(paths: Sequence[str | Path]) -> Iterator[tuple[str, object]]:
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
    with explained(path), open_file(path) as file, tarfile.open(fileobj=file, mode="r:*") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                with io.TextIOWrapper(decompressed(member.name, content), "utf-8") as text:
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


@contextlib.contextmanager
def explained(path: str | Path) -> Iterator[None]:
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
    except (EOFError, OSError, tarfile.TarError, zlib.error, lzma.LZMAError, pyarrow.ArrowException) as error:
        reason = str(error).partition("\n")[0].rstrip(" :")  # others list what they tried
        raise UserError(f"{path} cannot be read ({reason}); expected {FORMATS}") from error


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
            except (ValueError, RecursionError) as error:
                raise _no_record(path, line_number, error) from error


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
            position = _space.match(text, position).end()  # pyright: ignore[reportOptionalMemberAccess]
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
                line = line_number + text.count("\n", counted, error.pos)
                if ended:
                    raise _no_record(path, line, error) from error
                if len(text) - position > MAX_RECORD_CHARACTERS:
                    raise UserError(
                        f"{path}, line {line_number}: no JSON record that ends within {MAX_RECORD_CHARACTERS:,} "
                        f"characters ({error.msg} in line {line}); expected {FORMATS}"
                    ) from error
            except (ValueError, RecursionError) as error:
                raise _no_record(path, line_number, error) from error
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


def _no_record(path: str | Path, line: int, error: ValueError | RecursionError) -> UserError:
    if isinstance(error, json.JSONDecodeError):
        reason = error.msg
    else:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"
    return UserError(f"{path}, line {line}: not a JSON record ({reason}); expected {FORMATS}")
