"""Text for terminals, files and pipes.

It has tables without colours, and data that cannot steer a terminal.
"""

import io
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mujica_jax.runtime.standard_output import CANNOT_BE_WRITTEN, discard

PLAIN_COLUMNS = 120  # width of output that goes to a file or a pipe
JOINERS = "\u200c\u200d"  # format characters that ordinary text needs


def plain(renderable: RenderableType, *, encoding: str = "utf-8") -> str:
    """Return a table or tree as text without colours or trailing blanks.

    Lines are drawn in ASCII if the encoding needs it.
    """
    file = io.TextIOWrapper(
        io.BytesIO(), encoding=encoding, errors="backslashreplace", newline="\n"
    )
    console = Console(
        file=file,
        width=PLAIN_COLUMNS,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
    )
    console.print(renderable, highlight=False)
    file.seek(0)
    lines = [line.rstrip() for line in file.read().split("\n")]
    return "\n".join(lines).strip("\n") + "\n"


def text_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left_columns: int = 1,
    wrap: bool = False,
) -> Table:
    """Return a table that is narrow enough for 80 columns.

    The first `left_columns` columns are aligned left, and break if they may `wrap`.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        if index < left_columns:
            table.add_column(heading, justify="left", no_wrap=not wrap)
        else:
            table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def visible(text: str) -> str:
    """Return text with control, direction and surrogate characters escaped.

    So data cannot steer a terminal.
    """
    if text.isprintable():
        return text
    characters = []
    for character in text:
        if _is_control(character):
            character = character.encode("unicode_escape").decode("ascii")
        characters.append(character)
    return "".join(characters)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def encoding_of(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def write(stream: TextIO, text: str) -> None:
    """Write text to a stream, with escapes for characters that its encoding lacks.

    A run must not end for a name with an accent. Nor must it end because its output goes to a file
    on a full disk: it continues without that output.
    """
    encoding = encoding_of(stream)
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        if error.errno not in CANNOT_BE_WRITTEN:
            raise
        discard(stream)
        print(
            f"the output cannot be written ({error.strerror}): the program goes on without it",
            file=sys.stderr,
        )


def _is_control(character: str) -> bool:
    category = unicodedata.category(character)
    return category in ("Cc", "Cs", "Zl", "Zp") or (category == "Cf" and character not in JOINERS)
