"""Read the files of a knowledge graph in pieces, so that no file is in memory as a whole.

A file is a table (`tables.py`) or N-Triples (`dumps.py`). It may be compressed (`.gz`, `.bz2`) and
may be in a bucket. `GraphSpec` says which files and statements a graph takes.

A line that cannot be read raises UserError with its file and line. With `GraphSpec.skip`, it is
left out and counted instead.
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

# Kind of the index in a manifest.
KIND = "graph"
# What a user can give, for error messages.
FORMATS = "triples as .tsv or .nt, plain, .gz or .bz2"
# Approximate size of a piece, decompressed.
READ_BYTES = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """The sources and the settings of a graph."""

    # Files of triples, local or in a bucket.
    files: tuple[str, ...]
    # Languages of labels and texts, as language tags. Others are left out.
    languages: tuple[str, ...] = sparql.LANGUAGES
    # Properties of Wikidata (such as P57) or full IRIs. An empty tuple takes all properties.
    properties: tuple[str, ...] = ()
    # Leave out and count lines that cannot be read, instead of raising an error.
    skip: bool = False

    def __post_init__(self) -> None:
        sparql.check_languages(self.languages)
        for name in self.properties:
            if not re.fullmatch(r"P\d+", name, re.ASCII) and sparql.entity_iri(name) is None:
                raise UserError(
                    f"{name!r} is not a property: give one such as P57, or a full address (IRI)"
                )

    @property
    def predicates(self) -> frozenset[bytes]:
        """The predicates of the statements of the chosen properties, as IRIs in bytes."""
        predicates = set()
        for name in self.properties:
            iri = sparql.DIRECT + name if name.startswith("P") else name
            predicates.add(iri.encode())
        return frozenset(predicates)

    def plan(self) -> dict[str, Any]:
        """Return everything on which the content of the graph depends."""
        return {
            "kind": KIND,
            "corpus": describe_files(self.files),
            "skip": self.skip,
            "languages": list(self.languages),
            "properties": sorted(self.properties),
        }


@dataclasses.dataclass
class Counts(Skipped):
    """Numbers of loaded triples and names, and of lines that were left out."""

    triples: int = 0
    names: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive whole lines of a file."""

    # The lines, each with its line break.
    lines: list[bytes]
    # Number of the first line in the file, from 1.
    first_line: int
    # Position of the end of the piece in the decompressed file, in bytes.
    end: int
    # Share of the (compressed) file that was read up to here, from 0 to 1.
    share: float

    @property
    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """The lines with their line numbers."""
        return enumerate(self.lines, start=self.first_line)


def is_table(path: str) -> bool:
    """Return True for a table and False for N-Triples. Raises UserError for any other file."""
    name = path.removesuffix(".gz").removesuffix(".bz2")
    if not name.endswith((".tsv", ".nt")):
        raise UserError(f"{path} is not a file of triples: expected {FORMATS}")
    return name.endswith(".tsv")


def pieces(
    path: str, start: int = 0, first_line: int = 1, max_bytes: int | None = None
) -> Iterator[Piece]:
    """Yield pieces of about READ_BYTES, beginning at byte `start` of the decompressed file.

    `first_line` is the number of the line that begins there. With `max_bytes`, the last piece is
    the first one that ends at or after this position. Raises UserError if the file cannot be read.
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
            "damaged, so download it again"
        ) from error
