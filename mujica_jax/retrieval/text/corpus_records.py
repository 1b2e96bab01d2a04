"""Read the records of files, on local disk or in a bucket, one at a time.

A file holds a JSON array, JSON Lines or a table (`.tsv`, `.csv`). It may be compressed (`.gz`,
`.bz2`) and may be in a tar archive. Parquet files are read too. A record that cannot be read raises
UserError with its file and line.

All texts are normalised. HTML entities are replaced by their characters (HotpotQA writes "Key &amp;
Peele"), and accents are composed (Unicode NFC). Titles of a corpus and of its questions are then
equal if they look equal.
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

# What a user can give, for error messages.
FORMATS = (
    "a JSON array or JSON Lines of objects (passages have a text and may have a title), or a .tsv "
    "or .csv table whose first line names its columns, plain, .gz or .bz2; a .tar of such files; "
    "or .parquet"
)
# The delimiter of a table, by the ending of its file name.
TABLES = {".tsv": "\t", ".csv": ","}
# The first line of a table must name at least one of these columns.
TABLE_COLUMNS = ("text", "content", "contents", "question")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2")
# Error messages quote this much of a text before and after the character that is wrong.
SHOWN_CHARACTERS = 50
# A JSON array is read in parts of this size.
READ_CHARACTERS = 2**20
# If a record of an array does not end within this many characters, the JSON is broken.
MAX_RECORD_CHARACTERS = 2**24
_space = re.compile(r"[ \t\r\n]*")
# HTML entities must end in a semicolon here. Otherwise `&para=1` in a web address would become a
# paragraph sign.
_entity = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);")


def read_records(path: str | Path) -> Iterator[tuple[int, object]]:
    """Yield the line number and the value of every record of a file.

    For a Parquet file, the number of the row takes the place of the line number. The file must not
    be an archive. Raises UserError if it cannot be read.
    """
    with explained(path):
        if str(path).endswith(".parquet"):
            yield from _parquet_records(path)
            return
        with open_text(path) as file:
            yield from _text_records(path, file)


@contextlib.contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """Open a file, local or in a bucket, as decompressed text."""
    # The encoding utf-8-sig drops a byte order mark.
    with (
        open_file(path) as raw,
        io.TextIOWrapper(decompressed(str(path), raw), "utf-8-sig") as text,
    ):
        yield text


def in_one_form(text: str) -> str:
    """Return a text with HTML entities decoded, in Unicode's composed form (NFC)."""
    if "&" in text:
        text = _entity.sub(lambda entity: html.unescape(entity[0]), text)
    return unicodedata.normalize("NFC", text)


def _texts_in_one_form(value: object) -> object:
    """Return a record in which all texts are normalised by `in_one_form`."""
    if isinstance(value, str):
        return in_one_form(value)
    if isinstance(value, list):
        return [_texts_in_one_form(element) for element in value]
    if isinstance(value, dict):
        return {key: _texts_in_one_form(element) for key, element in value.items()}
    return value


def check_text(text: str) -> None:
    """Raise UserError if a text cannot be written as UTF-8.

    Such strings come from a command line whose bytes are not UTF-8, and from JSON with an escape
    for half a character (a lone surrogate).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown_from = max(0, error.start - SHOWN_CHARACTERS)
        shown = ascii(text[shown_from : error.start + SHOWN_CHARACTERS])
        raise UserError(f"{shown} cannot be written as UTF-8: give whole characters") from error


def records_of(paths: Sequence[str | Path]) -> Iterator[tuple[str, object]]:
    """Yield the place (file and line, as text) and the value of each record of all files."""
    for path in paths:
        if str(path).endswith(ARCHIVES):
            for member, number, record in _archive_records(path):
                yield f"{path}, {member}, line {number}", record
        else:
            unit = "row" if str(path).endswith(".parquet") else "line"
            for number, record in read_records(path):
                yield f"{path}, {unit} {number}", record


def _archive_records(path: str | Path) -> Iterator[tuple[str, int, object]]:
    """Yield the file name, line number and value of each record of an archive."""
    with (
        explained(path),
        open_file(path) as file,
        tarfile.open(fileobj=file, mode="r:*") as archive,
    ):
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is None or _is_hidden(member.name):
                continue
            with io.TextIOWrapper(decompressed(member.name, content), "utf-8-sig") as text:
                for number, record in _text_records(f"{path}, {member.name}", text):
                    yield member.name, number, record


def _is_hidden(member: str) -> bool:
    """Return whether a file in an archive is hidden, or is one that macOS adds.

    macOS adds `._NAME`, `.DS_Store` and `__MACOSX/`.
    """
    *folders, name = member.split("/")
    return name.startswith(".") or "__MACOSX" in folders


def _parquet_records(path: str | Path) -> Iterator[tuple[int, object]]:
    """Yield the row number and the value of each record of a Parquet file."""
    import pyarrow.parquet

    row = 0
    with open_file(path) as file, pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, _texts_in_one_form(record)


@contextlib.contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Raise the errors of reading a file as a UserError of one sentence."""
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
        # tarfile lists every method that it tried, on further lines.
        reason = str(error).partition("\n")[0].rstrip(" :")
        raise UserError(f"{path} cannot be read ({reason}); expected {FORMATS}") from error


def _text_records(path: str | Path, file: TextIO) -> Iterator[tuple[int, object]]:
    """Yield the line number and the value of each record of a text file.

    A file name that ends in .tsv or .csv means a table. Any other file holds a JSON array if it
    begins with a bracket, and JSON Lines if not.
    """
    name = Path(str(path).removesuffix(".gz").removesuffix(".bz2"))
    if name.suffix in TABLES:
        yield from _table_records(path, file, TABLES[name.suffix])
        return
    line_number = 1
    first = file.read(1)
    # At the end of the file `first` is empty, and the loop ends.
    while first.isspace() or first == "\ufeff":
        line_number += first == "\n"
        first = file.read(1)
    if first == "[":
        yield from _array_records(path, file, line_number)
    else:
        yield from _line_records(path, file, first, line_number)


def _table_records(path: str | Path, file: TextIO, delimiter: str) -> Iterator[tuple[int, object]]:
    """Yield the line number and the value of each row of a table.

    The first line names the columns. Fields may be in double quotes, as spreadsheets and DPR write
    them. Raises UserError with the line that cannot be read.
    """
    csv.field_size_limit(MAX_RECORD_CHARACTERS)
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    columns: list[str] = []
    # The line on which the row begins. A quoted field may hold line breaks.
    line_number = 1
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
            "quotes, and write each quote inside it twice"
        ) from error


def _check_columns(columns: list[str], place: str) -> None:
    """Raise UserError if the first line of a table has no known column, or has one twice."""
    shown = ", ".join(columns)[: 2 * SHOWN_CHARACTERS]
    if not set(columns) & set(TABLE_COLUMNS):
        raise UserError(
            f"{place}: the first line of a table must name its columns, but this one is {shown}: "
            "name them, such as id, text, title"
        )
    if len(set(columns)) < len(columns):
        raise UserError(
            f"{place}: two columns of the table have the same name ({shown}): give each its own "
            "name"
        )


def _check_width(row: list[str], columns: list[str], place: str) -> None:
    """Raise UserError unless a row has one field for each column of the table."""
    if len(row) != len(columns):
        raise UserError(
            f"{place}: the row has {len(row)} fields, but the first line names {len(columns)} "
            f"columns ({', '.join(columns)}): give each row one field for each column. Put a field "
            "in double quotes if it holds the separator, a quote or a line break"
        )


def _line_records(
    path: str | Path, file: TextIO, first: str, line_number: int
) -> Iterator[tuple[int, object]]:
    """Yield the line number and the value of each record of JSON Lines.

    `first` is the first character of line `line_number`, which was read already.
    """
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
    """Yield the line number and the value of each record of a JSON array.

    The opening bracket on line `line_number` was read already. The number is that of the line on
    which the record begins.
    """
    reader = _ArrayReader(path, file, line_number)
    while reader.next_character() != "]":
        record = reader.decode_record()
        yield reader.line_number, record
        reader.end_record()


class _ArrayReader:
    """A reader of a JSON array in parts, so that the whole file is never in memory."""

    def __init__(self, path: str | Path, file: TextIO, line_number: int) -> None:
        # The line of the character at `_counted`.
        self.line_number = line_number
        self._path = path
        self._file = file
        self._decoder = json.JSONDecoder()
        # The part of the file that is in memory.
        self._text = ""
        # Position of the next character in `_text`.
        self._position = 0
        # Line breaks in `_text` are counted up to this position.
        self._counted = 0
        # The end of the file was reached.
        self._is_at_end = False

    def next_character(self) -> str:
        """Skip spaces and return the next character, or "" at the end of the file."""
        while True:
            self._position = _space.match(self._text, self._position).end()  # pyright: ignore[reportOptionalMemberAccess]
            self.line_number += self._text.count("\n", self._counted, self._position)
            self._counted = self._position
            if self._position < len(self._text):
                return self._text[self._position]
            self._read_on()
            if self._is_at_end:
                return ""

    def decode_record(self) -> object:
        """Return the record that begins at the current position, and move behind it."""
        while True:
            try:
                decoded, end = self._decoder.raw_decode(self._text, self._position)
                record = _texts_in_one_form(decoded)
                # At the end of `_text`, a number may be incomplete.
                if end < len(self._text) or self._is_at_end:
                    self._position = end
                    return record
            except json.JSONDecodeError as error:
                self._check_incomplete(error)
            except (ValueError, RecursionError) as error:
                raise _no_record(self._path, self.line_number, error) from error
            self._read_on()

    def end_record(self) -> None:
        """Move behind the comma after a record.

        Raises UserError if neither a comma nor the end of the array follows.
        """
        following = self.next_character()
        if following == ",":
            self._position += 1
        elif following != "]":
            raise UserError(
                f"{self._path}, line {self.line_number}: a comma or the end of the array is "
                f"missing; expected {FORMATS}"
            )

    def _check_incomplete(self, error: json.JSONDecodeError) -> None:
        """Raise UserError unless the record may become valid when more of the file is read."""
        error_line = self.line_number + self._text.count("\n", self._counted, error.pos)
        if self._is_at_end:
            raise _no_record(self._path, error_line, error) from error
        if len(self._text) - self._position > MAX_RECORD_CHARACTERS:
            raise UserError(
                f"{self._path}, line {self.line_number}: the JSON record does not end within "
                f"{MAX_RECORD_CHARACTERS:,} characters ({error.msg} in line {error_line}); "
                f"expected {FORMATS}"
            ) from error

    def _read_on(self) -> None:
        """Read the next part of the file, and drop the text whose line breaks are counted."""
        part = self._file.read(READ_CHARACTERS)
        self._text = self._text[self._counted :] + part
        self._position -= self._counted
        self._counted = 0
        self._is_at_end = not part


def _no_record(path: str | Path, line: int, error: ValueError | RecursionError) -> UserError:
    """Return the error for a text that is not JSON."""
    if isinstance(error, json.JSONDecodeError):
        reason = error.msg
    elif isinstance(error, RecursionError):
        reason = "nested too deeply"
    else:
        reason = "a number with too many digits"
    return UserError(f"{path}, line {line}: not a JSON record ({reason}); expected {FORMATS}")
