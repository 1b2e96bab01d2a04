"""Text for terminals, files and pipes: tables without colours, and data that cannot steer a
terminal."""

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
    """A table or tree as text without colours or trailing blanks, in ASCII drawings if the encoding
    needs them."""
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
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, wrap: bool = False
) -> Table:
    """Narrow enough for 80 columns; the first `left` columns stand left, and break if they may
    `wrap`."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(
            heading, justify="left" if place < left else "right", no_wrap=place < left and not wrap
        )
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def visible(text: str) -> str:
    """`text` with control, direction and surrogate characters escaped: data cannot steer a
    terminal."""
    if text.isprintable():
        return text
    return "".join(
        one.encode("unicode_escape").decode("ascii") if _is_control(one) else one for one in text
    )


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def encoding_of(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def write(stream: TextIO, text: str) -> None:
    """Write what the stream's encoding cannot hold as escapes: a run must not end for a name with
    an accent.

    Nor must it end because the file that its output goes to is on a full disk: it goes on without
    that output.
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
