"""Write text to terminals, files and pipes.

The functions here make tables without colours, and escape characters in data that would control a
terminal.
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

# The width of output that goes to a file or a pipe, in characters.
PLAIN_COLUMNS = 120
# Two format characters that ordinary text of some languages needs.
JOINERS = "\u200c\u200d"


def plain(renderable: RenderableType, *, encoding: str = "utf-8") -> str:
    """Return a table or tree as text, without colours and without blanks at the ends of lines.

    If the encoding has no characters for drawing lines, the lines are drawn in ASCII.
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
    """Return a compact table that fits into a terminal with 80 columns.

    The first `left_columns` columns are aligned left, and the others right. With `wrap`, long cells
    of the left columns continue on the next line.
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
    """Return text in which control, direction and surrogate characters are escaped.

    Without this, data could move the cursor of a terminal or change its colours.
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
    """Return whether the stream is a terminal that understands control sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def encoding_of(stream: TextIO) -> str:
    """Return the encoding of a stream; UTF-8 if the stream names none."""
    return getattr(stream, "encoding", None) or "utf-8"


def write(stream: TextIO, text: str) -> None:
    """Write text to a stream. Characters that the stream's encoding lacks are escaped.

    This never ends a run. If the output cannot be written, for example to a file on a full disk,
    the run continues without output.
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
            f"the output cannot be written ({error.strerror}): the program continues without it",
            file=sys.stderr,
        )


def _is_control(character: str) -> bool:
    category = unicodedata.category(character)
    return category in ("Cc", "Cs", "Zl", "Zp") or (category == "Cf" and character not in JOINERS)
