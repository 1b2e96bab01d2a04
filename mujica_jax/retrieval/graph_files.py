"""Files of a knowledge graph, read in pieces and never whole: what of each piece a graph keeps, and where to go on.

- `.tsv`: the columns of `graph.py`. An end without a Q-id is the entity that alone is called so in these files, else one of its own.
- `.nt`: N-Triples, as Wikidata's truthy dump, line by line. Kept are labels and aliases in the chosen languages, and statements: in
  Wikidata's dumps `prop/direct/...`, in others every predicate outside the vocabularies that describe data (DESCRIBING), or the
  chosen ones. Texts in other languages, blank nodes and unknown values are left out without a word.

Both plain, `.gz` or `.bz2`. A line that cannot be read is refused with file and line, or left out and counted where the caller asks
for that.
"""

import bz2
import contextlib
import dataclasses
import gzip
import os
import re
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from mujica_jax.errors import UserError
from mujica_jax.retrieval import sparql
from mujica_jax.retrieval.graph import COLUMNS, Triple, normalise_label, without_parenthesis

if TYPE_CHECKING:
    from pyoxigraph import Quad, Store

FORMATS = "triples as .tsv or .nt, plain, .gz or .bz2"
READ_BYTES = 2**22  # at once
DIRECT = "http://www.wikidata.org/prop/direct/"
DESCRIBING = tuple(
    address.encode()
    for address in (
        "http://www.wikidata.org/",
        "http://wikiba.se/",
        "http://schema.org/",
        "https://schema.org/",
        "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
        "http://www.w3.org/2000/01/rdf-schema#",
        "http://www.w3.org/2002/07/owl#",
        "http://www.w3.org/2004/02/skos/core#",
        "http://www.w3.org/ns/",
        "http://creativecommons.org/ns#",
    )
)
NAMES = (sparql.LABEL.encode(), sparql.ALIAS.encode())
SCHEMA = (sparql.DIRECT_CLAIM.encode(), sparql.PROPERTY_TYPE.encode())

_line = re.compile(rb"\s*(<[^>]*>|_:\S+)\s*<([^>]*)>\s*(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What of the files is kept. Properties are Wikidata's (P57) or full IRIs; none given are all."""

    languages: tuple[str, ...] = sparql.LANGUAGES
    properties: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sparql.check_languages(self.languages)
        for name in self.properties:
            if not re.fullmatch(r"P\d+", name, re.ASCII) and sparql.entity_iri(name) is None:
                raise UserError(f"{name!r} is no property: write it as P57 or as a full address")

    @property
    def predicates(self) -> frozenset[bytes]:
        return frozenset((DIRECT + name if name.startswith("P") else name).encode() for name in self.properties)


@dataclasses.dataclass
class Counts:
    triples: int = 0
    names: int = 0
    skipped: int = 0
    first_skipped: str = ""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Whole lines of a file."""

    content: bytes
    first_line: int  # number of the first of them, from 1
    end: int  # bytes of the file, decompressed, up to here
    lines: int  # of the file up to here
    share: float  # of the file as it lies on the disk that was read for it, 0 to 1


class Kept(NamedTuple):
    number: int
    text: bytes
    role: str


def is_table(path: str) -> bool:
    """Raises UserError for what is neither format."""
    name = path.removesuffix(".gz").removesuffix(".bz2")
    if not name.endswith((".tsv", ".nt")):
        raise UserError(f"{path} is no file of triples: expected {FORMATS}")
    return name.endswith(".tsv")


def pieces(path: str, start: int = 0, lines: int = 0, size: int | None = None) -> Iterator[Piece]:
    """From byte `start` of the decompressed file on, in front of which `lines` lines stand; of about `size` bytes (READ_BYTES)."""
    try:
        with open(path, "rb") as raw, _decompressed(path, raw) as file:
            bytes_there = max(1, os.fstat(raw.fileno()).st_size)
            file.seek(start)
            rest = b""
            while content := file.read(size or READ_BYTES):
                whole, line_end, after = content.rpartition(b"\n")
                if not line_end:
                    rest += content
                    continue
                whole, rest = rest + whole + line_end, after
                start, before = start + len(whole), lines
                lines += whole.count(b"\n")
                yield Piece(whole, before + 1, start, lines, raw.tell() / bytes_there)
            if rest:
                yield Piece(rest, lines + 1, start + len(rest), lines + 1, 1.0)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: give {FORMATS}") from error
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read after line {lines:,} ({error}): it is cut off or damaged") from error


class Table:
    """Quads of tab-separated rows, for one graph. Names of all rows are put there before the first statement."""

    def __init__(self, store: "Store", path: str, *, skip: bool, counts: Counts) -> None:
        self._store, self._path, self._skip, self._counts = store, path, skip, counts

    def names(self, piece: Piece) -> "list[Quad]":
        """Labels of the entities that have Q-ids: the first one that is met, then others."""
        from pyoxigraph import Literal, NamedNode, Quad

        label, alias, quads = NamedNode(sparql.LABEL), NamedNode(sparql.ALIAS), []
        called: dict[str, str] = {}
        for row in self._rows(piece, count=False):
            for text, key in self._ends(row):
                iri = sparql.entity_iri(key)
                if iri is None:
                    continue
                first = called[key] = called.get(key) or next(self._texts(iri, sparql.LABEL), text)
                quads.append(Quad(iri, label if text == first else alias, Literal(text)))
                quads += _searched(iri, text)
        return quads

    def statements(self, piece: Piece) -> "list[Quad]":
        from pyoxigraph import Literal, NamedNode, Quad

        label, claim, quads = NamedNode(sparql.LABEL), NamedNode(sparql.DIRECT_CLAIM), []
        for row in self._rows(piece, count=True):
            relation = NamedNode(sparql.RELATION + urllib.parse.quote(row.relation, safe=""))
            iris = []
            for text, key in self._ends(row):
                iri = sparql.entity_iri(key) or self._called(text)
                if iri is None:
                    iri = NamedNode(sparql.named_iri(text))
                    quads += [Quad(iri, label, Literal(text)), *_searched(iri, text)]
                iris.append(iri)
            found = iris[1] if len(iris) == 2 else Literal(row.object)
            quads.append(Quad(iris[0], relation, found))
            quads += [Quad(relation, claim, relation), Quad(relation, label, Literal(row.relation))]
        return quads

    def _ends(self, row: Triple) -> list[tuple[str, str]]:
        return [(row.subject, row.subject_id), *([] if row.object_is_literal else [(row.object, row.object_id)])]

    def _called(self, text: str) -> "Any":
        """The entity with a Q-id that alone is called so, up to case and spacing, or else up to a closing parenthesis."""
        from pyoxigraph import Literal, NamedNode

        searched, normal = NamedNode(sparql.SEARCHED_LABEL), normalise_label(text)
        for name in (normal, without_parenthesis(normal)):
            subjects: list[Any] = [
                quad.subject for quad in self._store.quads_for_pattern(None, searched, Literal(name))
            ]
            found = [
                iri
                for iri in subjects
                if not iri.value.startswith(sparql.NAMED) and (name == normal or self._is_called(iri, name))
            ]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def _is_called(self, iri: Any, name: str) -> bool:
        texts = (*self._texts(iri, sparql.LABEL), *self._texts(iri, sparql.ALIAS))
        return any(normalise_label(text) == name for text in texts)

    def _texts(self, iri: Any, predicate: str) -> Iterator[str]:
        from pyoxigraph import Literal, NamedNode

        for quad in self._store.quads_for_pattern(iri, NamedNode(predicate), None):
            if isinstance(quad.object, Literal):
                yield quad.object.value

    def _rows(self, piece: Piece, *, count: bool) -> Iterator[Triple]:
        for number, line in enumerate(piece.content.removesuffix(b"\n").split(b"\n"), start=piece.first_line):
            if number == 1:
                _check_header(self._path, line)
            elif line.strip():
                try:
                    row = _row(f"{self._path}, line {number:,}", line)
                except UserError as error:
                    if not self._skip:
                        raise
                    if count:
                        _skipped(self._counts, str(error))
                    continue
                self._counts.triples += count
                yield row


class Lines:
    """The lines of N-Triples that a graph keeps."""

    def __init__(self, path: str, choice: Choice, *, skip: bool, counts: Counts) -> None:
        self._path, self._skip, self._counts = path, skip, counts
        self._languages = frozenset(language.lower().encode() for language in choice.languages)
        self._predicates = choice.predicates
        self._roles: dict[bytes, str] = {}

    def kept(self, piece: Piece, claims: set[bytes]) -> list[Kept]:
        """Predicates of statements are added to `claims`."""
        kept, roles = [], self._roles
        for number, line in enumerate(piece.content.removesuffix(b"\n").split(b"\n"), start=piece.first_line):
            if line.startswith(b"<") and (place := line.find(b"> <")) > 0:  # as dumps are written: seven times as fast
                end = line.find(b">", place + 3)
                subject, predicate, rest = line[:place], line[place + 3 : end], line[end + 1 :].lstrip()
            elif found := _line.match(line):
                subject, predicate, rest = found.groups()
            else:
                if line.strip() and not line.lstrip().startswith(b"#"):
                    kept.append(Kept(number, line, "none"))  # to be refused by the parser
                continue
            role = roles.get(predicate)
            if role is None:
                role = roles[predicate] = self._role(predicate)
            if role == "none" or subject.startswith(b"_:") or not self._is_wanted(rest, role):
                continue
            kept.append(Kept(number, line, role))
            if role == "statement":
                claims.add(predicate)
        return kept

    def load(self, store: "Store", kept: Sequence[Kept]) -> None:
        """Into the store, and counts them. Raises UserError naming the first line that is no triple."""
        from pyoxigraph import RdfFormat

        try:
            store.bulk_load(b"".join(line.text + b"\n" for line in kept), RdfFormat.N_TRIPLES, lenient=True)
        except SyntaxError:
            whole = [line for line in kept if self._is_whole(line.number, line.text)]
            assert len(whole) < len(kept), "a piece cannot be read and each of its lines can"
            self.load(store, whole)
        else:
            self._counts.triples += sum(line.role == "statement" for line in kept)
            self._counts.names += sum(line.role == "name" for line in kept)

    def _is_whole(self, number: int, line: bytes) -> bool:
        from pyoxigraph import RdfFormat, parse

        try:
            list(parse(line, RdfFormat.N_TRIPLES, lenient=True))
            return True
        except SyntaxError as error:
            what = str(error).partition(": ")[2].partition(" (line")[0] or str(error)
            sentence = f"{self._path}, line {number:,}: no triple in N-Triples ({what})"
            if not self._skip:
                raise UserError(f"{sentence}: mend it, or leave such lines out with --skip") from error
            _skipped(self._counts, sentence)
            return False

    def _role(self, predicate: bytes) -> str:
        if predicate in NAMES:
            return "name"
        if predicate in SCHEMA:
            return "schema"
        if self._predicates:
            return "statement" if predicate in self._predicates else "none"
        if predicate.startswith(DIRECT.encode()):
            return "statement"
        return "none" if predicate.startswith(DESCRIBING) else "statement"

    def _is_wanted(self, rest: bytes, role: str) -> bool:
        """The object: a text in a chosen language or in none, and for names a text."""
        if rest.startswith(b'"'):
            after = rest[rest.rfind(b'"') + 1 :]
            if not after.startswith(b"@"):
                return True
            language = after[1:].split(maxsplit=1)[:1]  # none where the line is cut there: the parser refuses it
            return not language or language[0].rstrip(b".").lower() in self._languages
        return role != "name" and not rest.startswith(b"_:") and sparql.UNKNOWN_VALUE.encode() not in rest


def claim_quads(claims: set[bytes]) -> "list[Quad]":
    """Which property each predicate states: without that no query finds its statements."""
    from pyoxigraph import NamedNode, Quad

    quads = []
    for claim in sorted(claims):
        with contextlib.suppress(
            ValueError
        ):  # no address: the store keeps what dumps say with it, and nobody can ask for it
            text = claim.decode()
            stated = NamedNode(sparql.ENTITY + text.removeprefix(DIRECT) if text.startswith(DIRECT) else text)
            quads.append(Quad(stated, NamedNode(sparql.DIRECT_CLAIM), NamedNode(text)))
    return quads


def _decompressed(path: str, raw: IO[bytes]) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    return cast(IO[bytes], bz2.open(raw)) if path.endswith(".bz2") else raw


def _check_header(path: str, line: bytes) -> None:
    cells = [cell.strip() for cell in line.decode(errors="replace").split("\t")]
    if tuple(cells) != COLUMNS:
        raise UserError(
            f"{path}, line 1: the header is {', '.join(cells)!r}; expected tab-separated columns {', '.join(COLUMNS)}"
        )


def _row(place: str, line: bytes) -> Triple:
    try:
        cells = [cell.strip() for cell in line.decode().split("\t")]
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: it is not UTF-8 text ({error.reason}): convert the file") from error
    if len(cells) != len(COLUMNS):
        raise UserError(f"{place}: {len(cells)} columns where {len(COLUMNS)} belong: {', '.join(COLUMNS)}")
    if not all(cells[:3]):
        raise UserError(f"{place}: subject, relation and object must not be empty; got {cells[:3]}")
    return Triple(subject=cells[0], relation=cells[1], object=cells[2], subject_id=cells[3], object_id=cells[4])


def _searched(iri: Any, text: str) -> "list[Quad]":
    from pyoxigraph import Literal, NamedNode, Quad

    normal = normalise_label(text)
    names = {normal, without_parenthesis(normal)} - {""}
    return [Quad(iri, NamedNode(sparql.SEARCHED_LABEL), Literal(name)) for name in sorted(names)]


def _skipped(counts: Counts, sentence: str) -> None:
    counts.skipped += 1
    counts.first_skipped = counts.first_skipped or sentence
