"""Passages read from files: JSON arrays of `{title, text}` and JSON Lines, plain or gzipped.

A passage without a title or text, or with an id that came before, is refused with its file and line. Where a record carries
no `id` (or `_id`), its position in the whole corpus is its id. Indexes (`bm25.py` and the dense ones) refer to passages by position.
"""

import dataclasses
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from mujica_jax.errors import UserError

FORMATS = 'a JSON array or JSON Lines of {"title": ..., "text": ...}, plain or .gz'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    id: str
    title: str
    text: str


def read_corpus(paths: Sequence[str | Path]) -> list[Passage]:
    """All passages of the files, in order. Ids are unique over all of them."""
    passages: list[Passage] = []
    seen: dict[str, str] = {}
    for path in paths:
        for line_number, record in read_records(path):
            place = f"{path}, line {line_number}"
            passage = _passage(record, str(len(passages)), place)
            if passage.id in seen:
                raise UserError(
                    f"{place}: the passage id {passage.id!r} was already used in {seen[passage.id]}; give each passage its own id"
                )
            seen[passage.id] = place
            passages.append(passage)
    return passages


def read_records(path: str | Path) -> Iterator[tuple[int, object]]:
    """Line number and value of every record in a JSON array or JSON Lines file, gzipped where the name ends in .gz."""
    try:
        with open_text(path) as file:
            first = file.read(1)
            while first and (first.isspace() or first == "\ufeff"):
                first = file.read(1)
            file.seek(0)
            yield from _array_records(path, file.read()) if first == "[" else _line_records(path, file)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); expected {FORMATS}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give the path of {FORMATS}") from error
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); expected {FORMATS}") from error


def open_text(path: str | Path) -> TextIO:
    if str(path).endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")  # pyright: ignore[reportReturnType]
    return open(path, encoding="utf-8")


def _line_records(path: str | Path, file: TextIO) -> Iterator[tuple[int, object]]:
    for line_number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield line_number, json.loads(line.lstrip("\ufeff"))
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {line_number}: not a JSON record ({error.msg}); expected {FORMATS}"
                ) from error


def _array_records(path: str | Path, text: str) -> Iterator[tuple[int, object]]:
    """Decoded one by one, so that each record has the line it begins on."""
    decoder = json.JSONDecoder()
    position, counted, line_number = text.index("[") + 1, 0, 1
    while True:
        position = _skip(text, position, " \t\r\n")
        line_number += text.count("\n", counted, position)
        counted = position
        if text[position : position + 1] == "]":
            return
        try:
            record, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {error.lineno}: not a JSON record ({error.msg}); expected {FORMATS}"
            ) from error
        yield line_number, record
        position = _skip(text, end, " \t\r\n")
        if text[position : position + 1] == ",":
            position += 1
        elif text[position : position + 1] != "]":
            line_number += text.count("\n", counted, position)
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
    for field in ("title", "text"):
        value = record.get(field)
        if not isinstance(value, str) or not value.strip():
            raise UserError(
                f"{place}: the passage's {field} is {value!r}; every passage needs a title and a text that is not empty"
            )
    identifier = record.get("id", record.get("_id", position))
    return Passage(id=str(identifier), title=record["title"], text=record["text"])
