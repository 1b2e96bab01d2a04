"""Files of a knowledge graph, read in pieces and never whole.

They are tables (`tables.py`) or N-Triples (`dumps.py`), plain, `.gz` or `.bz2`, local or in a
bucket. `GraphSpec` and `Loaded` say which of their statements are kept and how far they were read.

A line that cannot be read is refused with file and line, or left out and counted if the caller asks
for that.
"""

import codecs
import dataclasses
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import Skipped, decompressed, describe_files, open_file
from mujica_jax.retrieval.graph import sparql

KIND = "graph"
FORMATS = "triples as .tsv or .nt, plain, .gz or .bz2"
READ_BYTES = 2**22  # at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """The sources of a graph.

    `properties` are Wikidata's (P57) or full IRIs; without any, all are taken.
    """

    files: tuple[str, ...]
    languages: tuple[str, ...] = sparql.LANGUAGES
    properties: tuple[str, ...] = ()
    # leave out lines that cannot be read and count them, instead of refusing the file
    skip: bool = False

    def __post_init__(self) -> None:
        sparql.check_languages(self.languages)
        for name in self.properties:
            if not re.fullmatch(r"P\d+", name, re.ASCII) and sparql.entity_iri(name) is None:
                raise UserError(f"{name!r} is no property: write it as P57 or as a full address")

    @property
    def predicates(self) -> frozenset[bytes]:
        """The predicates of the chosen properties' statements."""
        predicates = set()
        for name in self.properties:
            iri = sparql.DIRECT + name if name.startswith("P") else name
            predicates.add(iri.encode())
        return frozenset(predicates)

    def plan(self) -> dict[str, Any]:
        """Return everything that the content of the graph depends on."""
        return {
            "kind": KIND,
            "corpus": describe_files(self.files),
            "skip": self.skip,
            "languages": list(self.languages),
            "properties": sorted(self.properties),
        }


@dataclasses.dataclass
class Counts(Skipped):
    """Counts of what was loaded, and of what was left out."""

    triples: int = 0
    names: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """Whole lines of a file, with their ends."""

    lines: list[bytes]
    first_line: int  # number of the first of them, from 1
    end: int  # bytes of the file, decompressed, up to here
    share: float  # of the file as it lies on the disk that was read for it, 0 to 1

    @property
    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """The lines with their numbers."""
        return enumerate(self.lines, start=self.first_line)


def is_table(path: str) -> bool:
    """Return True for a table and False for N-Triples. Raises UserError for any other file."""
    name = path.removesuffix(".gz").removesuffix(".bz2")
    if not name.endswith((".tsv", ".nt")):
        raise UserError(f"{path} is no file of triples: expected {FORMATS}")
    return name.endswith(".tsv")


def pieces(
    path: str, start: int = 0, first_line: int = 1, max_bytes: int | None = None
) -> Iterator[Piece]:
    """Yield pieces of about READ_BYTES, from byte `start` of the decompressed file on.

    Line `first_line` begins there. The last piece is the first one that ends behind `max_bytes`.
    """
    try:
        with open_file(path) as raw, decompressed(path, raw) as file:
            file_bytes = max(1, raw.seek(0, os.SEEK_END))
            raw.seek(0)
            file.seek(start)
            while max_bytes is None or start < max_bytes:
                lines = file.readlines(READ_BYTES)
                if not lines:
                    break
                end = start + sum(map(len, lines))
                if start == 0:
                    lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
                yield Piece(lines, first_line, end, share=raw.tell() / file_bytes)
                start = end
                first_line += len(lines)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: give {FORMATS}") from error
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read after line {first_line - 1:,} ({error}): it is cut off or "
            "damaged"
        ) from error
