"""Read the records of files, local or in a bucket, one at a time.

A file is a JSON array, JSON Lines or a table (`.tsv`, `.csv`), plain, `.gz` or `.bz2`, in a tar or
not; or Parquet. What cannot be read is refused with file and line.

Every text has one form: HTML entities are the characters that they stand for (HotpotQA writes "Key
&amp; Peele"), and accents are composed (Unicode NFC). So the titles of a corpus and of its
questions are equal where they look equal.
"""

import contextlib
import csv
import html
import io
import json
import lzma
import re
import tarfile
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import decompressed, open_file

FORMATS = (
    "a JSON array or JSON Lines of objects (passages have a text and may have a title), or a .tsv "
    "or .csv table whose first line names its columns, plain, .gz or .bz2; a .tar of such files; "
    "or .parquet"
)
TABLES = {".tsv": "\t", ".csv": ","}
TABLE_COLUMNS = (
    "text",
    "content",
    "contents",
    "question",
)  # a table's first line names one of them
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2")
SHOWN_CHARACTERS = 50  # of a text before and behind what is wrong with it
READ_CHARACTERS = 2**20  # of an array, at once
MAX_RECORD_CHARACTERS = (
    2**24
)  # of an array: a record that does not end within so much is broken JSON
_space = re.compile(r"[ \t\r\n]*")
# Entities end in a semicolon here: without one, `&para=1` of an address would be a paragraph sign.
_entity = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);")


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
    # The encoding drops a byte order mark.
    with (
        open_file(path) as raw,
        io.TextIOWrapper(decompressed(str(path), raw), "utf-8-sig") as text,
    ):
        yield text


def in_one_form(text: str) -> str:
    """Return the text with HTML entities decoded and in Unicode's composed form."""
    if "&" in text:
        text = _entity.sub(lambda entity: html.unescape(entity[0]), text)
    return unicodedata.normalize("NFC", text)


def _texts_in_one_form(value: object) -> object:
    """Return a record whose every text is in one form."""
    if isinstance(value, str):
        return in_one_form(value)
    if isinstance(value, list):
        return [_texts_in_one_form(element) for element in value]
    if isinstance(value, dict):
        return {key: _texts_in_one_form(element) for key, element in value.items()}
    return value


def check_text(text: str) -> None:
    """A command line whose bytes are no UTF-8, and an escaped half of a character in JSON, give
    strings that nothing can write down.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[max(0, error.start - SHOWN_CHARACTERS) : error.start + SHOWN_CHARACTERS])
        raise UserError(
            f"{shown} is no text that UTF-8 can write: give whole characters"
        ) from error


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
    with (
        explained(path),
        open_file(path) as file,
        tarfile.open(fileobj=file, mode="r:*") as archive,
    ):
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and not _is_hidden(member.name):
                with io.TextIOWrapper(decompressed(member.name, content), "utf-8-sig") as text:
                    for number, record in _text_records(f"{path}, {member.name}", text):
                        yield member.name, number, record


def _is_hidden(member: str) -> bool:
    """Whether a file of an archive is one that macOS writes beside the others: `._NAME`,
    `.DS_Store`, `__MACOSX/`."""
    *folders, name = member.split("/")
    return name.startswith(".") or "__MACOSX" in folders


def _parquet_records(path: str | Path) -> Iterator[tuple[int, object]]:
    import pyarrow.parquet

    row = 0
    with open_file(path) as file, pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, _texts_in_one_form(record)


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
    except (
        EOFError,
        OSError,
        tarfile.TarError,
        zlib.error,
        lzma.LZMAError,
        pyarrow.ArrowException,
    ) as error:
        reason = str(error).partition("\n")[0].rstrip(" :")  # others list what they tried
        raise UserError(f"{path} cannot be read ({reason}); expected {FORMATS}") from error


def _text_records(path: str | Path, file: TextIO) -> Iterator[tuple[int, object]]:
    """Read a table, known by the file's name, or an array, which begins with a bracket, or else
    JSON Lines."""
    name = Path(str(path).removesuffix(".gz").removesuffix(".bz2"))
    if name.suffix in TABLES:
        yield from _table_records(path, file, TABLES[name.suffix])
        return
    line_number = 1
    first = file.read(1)
    # At the end of the file `first` is empty, which is no space.
    while first.isspace() or first == "\ufeff":
        line_number += first == "\n"
        first = file.read(1)
    if first == "[":
        yield from _array_records(path, file, line_number)
    else:
        yield from _line_records(path, file, first, line_number)


def _table_records(path: str | Path, file: TextIO, delimiter: str) -> Iterator[tuple[int, object]]:
    """Read the rows of a table whose first line names its columns, quoted as spreadsheets and DPR
    do."""
    csv.field_size_limit(MAX_RECORD_CHARACTERS)
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    columns: list[str] = []
    line_number = 1  # where the row begins: a quoted field may hold line breaks
    try:
        for row in rows:
            place = f"{path}, line {line_number}"
            is_blank = not "".join(row).strip("\ufeff \t")
            if not is_blank and not columns:
                columns = [name.strip() for name in row]
                _check_columns(columns, place)
            elif not is_blank:
                _check_width(row, columns, place)
                yield line_number, dict(zip(columns, map(in_one_form, row), strict=True))
            line_number = rows.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line_number}: not a row of a table ({error}): put the field in double "
            "quotes and double the quotes inside it"
        ) from error


def _check_columns(columns: list[str], place: str) -> None:
    """Check the first line of a table. Raises UserError where it names no columns, or one twice."""
    shown = ", ".join(columns)[: 2 * SHOWN_CHARACTERS]
    if not set(columns) & set(TABLE_COLUMNS):
        raise UserError(
            f"{place}: the first line of a table names its columns and this is {shown}: name them, "
            "as id, text, title"
        )
    if len(set(columns)) < len(columns):
        raise UserError(
            f"{place}: a column of the table is named twice ({shown}): give each its own name"
        )


def _check_width(row: list[str], columns: list[str], place: str) -> None:
    """Check that a row has as many fields as the table has columns. Raises UserError."""
    if len(row) != len(columns):
        raise UserError(
            f"{place}: the row has {len(row)} fields and the first line names {len(columns)} "
            f"columns ({', '.join(columns)}): give every row as many, in double quotes where a "
            "field holds the separator, a quote or a line break"
        )


def _line_records(
    path: str | Path, file: TextIO, first: str, line_number: int
) -> Iterator[tuple[int, object]]:
    """Read JSON Lines. `first` is a character of line `line_number` that was read already."""
    while line := first + file.readline():
        first = ""
        if line.strip():
            try:
                yield line_number, _texts_in_one_form(json.loads(line.lstrip("\ufeff")))
            except (ValueError, RecursionError) as error:
                raise _no_record(path, line_number, error) from error
        line_number += 1


def _array_records(
    path: str | Path, file: TextIO, line_number: int
) -> Iterator[tuple[int, object]]:
    """Decode records one by one, so that each has the line it begins on and the file is never held
    whole."""
    decoder = json.JSONDecoder()
    text = ""
    position = 0
    counted = 0
    ended = False

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
                decoded, end = decoder.raw_decode(text, position)
                record = _texts_in_one_form(decoded)
                if end < len(text) or ended:  # else a number may go on
                    break
            except json.JSONDecodeError as error:
                line = line_number + text.count("\n", counted, error.pos)
                if ended:
                    raise _no_record(path, line, error) from error
                if len(text) - position > MAX_RECORD_CHARACTERS:
                    raise UserError(
                        f"{path}, line {line_number}: no JSON record that ends within "
                        f"{MAX_RECORD_CHARACTERS:,} characters ({error.msg} in line {line}); "
                        f"expected {FORMATS}"
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
                f"{path}, line {line_number}: a comma or the end of the array is missing; expected "
                f"{FORMATS}"
            )


def _no_record(path: str | Path, line: int, error: ValueError | RecursionError) -> UserError:
    if isinstance(error, json.JSONDecodeError):
        reason = error.msg
    else:
        reason = (
            "nested too deeply"
            if isinstance(error, RecursionError)
            else "a number with too many digits"
        )
    return UserError(f"{path}, line {line}: not a JSON record ({reason}); expected {FORMATS}")
