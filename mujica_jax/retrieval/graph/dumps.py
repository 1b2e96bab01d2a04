"""N-Triples, as Wikidata's truthy dump: the lines that a graph takes.

These are labels and aliases in the chosen languages, ids of merged entities, and statements: in
Wikidata's dumps `prop/direct/...`, in others every predicate outside the vocabularies that describe
data (DESCRIBING), or the chosen ones. Texts in other languages, blank nodes and unknown values are
left out without a word. Lines are chosen here and parsed by the store, but for those whose object
is a quoted triple with another one in it: they are refused here, for the store's parser has no
bound on how deep it goes and ends the process.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from pyoxigraph import NamedNode, Quad, RdfFormat, Store, parse

from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.files import Counts, GraphSpec, Piece
from mujica_jax.retrieval.graph.values import UNKNOWN_VALUE

DESCRIBING = (
    b"http://www.wikidata.org/",
    b"http://wikiba.se/",
    b"http://schema.org/",
    b"https://schema.org/",
    b"http://www.w3.org/1999/02/22-rdf-syntax-ns#",
    b"http://www.w3.org/2000/01/rdf-schema#",
    b"http://www.w3.org/2002/07/owl#",
    b"http://www.w3.org/2004/02/skos/core#",
    b"http://www.w3.org/ns/",
    b"http://creativecommons.org/ns#",
)
NAMES = (sparql.LABEL.encode(), sparql.ALIAS.encode())
SCHEMA = (sparql.DIRECT_CLAIM.encode(), sparql.PROPERTY_TYPE.encode())

NESTED = "nested"  # the role of a line that no parser may see
QUOTE = b"<<"  # opens a quoted triple, and no parser takes it for a line

_text = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_line = re.compile(rb"\s*(<[^>]*>|_:\S+)\s*<([^>]*)>\s*(.*)", re.DOTALL)


class Line(NamedTuple):
    """A line that a graph takes."""

    number: int
    text: bytes
    role: str


class Lines:
    """Chooses and loads the lines of one file of N-Triples."""

    def __init__(self, path: str, spec: GraphSpec, counts: Counts) -> None:
        self._path = path
        self._skip = spec.skip
        self._counts = counts
        self._languages = frozenset(language.lower().encode() for language in spec.languages)
        self._predicates = spec.predicates
        self._roles: dict[bytes, str] = {}  # by predicate

    def choose(self, piece: Piece, claims: set[bytes]) -> list[Line]:
        """Return the lines that the graph takes. Predicates of statements are added to `claims`."""
        lines = []
        for number, text in piece.numbered:
            parts = _parts(text)
            if parts is None:
                is_comment = text.lstrip().startswith(b"#")
                if text.strip() and not is_comment:
                    # The parser will refuse it.
                    lines.append(Line(number, text, "none"))
                continue

            subject, predicate, rest = parts
            role = self._roles.get(predicate)
            if role is None:
                role = self._role(predicate)
                self._roles[predicate] = role
            if role == "none" or subject[:2] == b"_:" or not self._is_wanted(rest, role):
                continue
            if rest[:2] == QUOTE and _text.sub(b"", rest).count(QUOTE) > 1:
                lines.append(Line(number, QUOTE + b"\n", NESTED))
                continue
            lines.append(Line(number, text, role))
            if role == "statement":
                claims.add(predicate)
        return lines

    def load(self, store: Store, lines: Sequence[Line]) -> None:
        """Load lines into the store, and count them.

        Raises UserError naming the first line that is no triple.
        """
        try:
            content = b"".join(line.text for line in lines)
            store.bulk_load(content, RdfFormat.N_TRIPLES, lenient=True)
        except SyntaxError:
            valid_lines = [line for line in lines if self._is_valid(line)]
            assert len(valid_lines) < len(lines), "a piece cannot be read and each of its lines can"
            self.load(store, valid_lines)
        else:
            self._counts.triples += sum(line.role == "statement" for line in lines)
            self._counts.names += sum(line.role == "name" for line in lines)

    def _is_valid(self, line: Line) -> bool:
        """Return whether a line is a triple. Any other line is counted, or raises UserError."""
        try:
            list(parse(line.text, RdfFormat.N_TRIPLES, lenient=True))
            return True
        except SyntaxError as error:
            if line.role == NESTED:
                reason = "a quoted triple in a quoted triple"
            else:
                reason = str(error).partition(": ")[2].partition(" (line")[0] or str(error)
            sentence = f"{self._path}, line {line.number:,}: no triple in N-Triples ({reason})"
            if not self._skip:
                raise UserError(
                    f"{sentence}: mend it, or leave such lines out with --skip"
                ) from error
            self._counts.skip(sentence)
            return False

    def _role(self, predicate: bytes) -> str:
        """Return what lines with this predicate are: name, schema, redirect, statement or none."""
        if predicate in NAMES:
            return "name"
        if predicate in SCHEMA:
            return "schema"
        if predicate == sparql.REDIRECT.encode() and predicate not in self._predicates:
            return "redirect"
        if self._predicates:
            return "statement" if predicate in self._predicates else "none"
        if predicate.startswith(sparql.DIRECT.encode()):
            return "statement"
        return "none" if predicate.startswith(DESCRIBING) else "statement"

    def _is_wanted(self, rest: bytes, role: str) -> bool:
        """Return whether the object of a line is one that the graph takes.

        `rest` is the line behind the predicate. A text is in a chosen language or in none. The
        object of a name is a text, and that of a redirect an entity of Wikidata's.
        """
        if role == "redirect":
            return rest.startswith(b"<" + sparql.ENTITY.encode())
        if rest.startswith(b'"'):
            suffix = rest[rest.rfind(b'"') + 1 :]
            if not suffix.startswith(b"@"):
                return True
            words = suffix[1:].split(maxsplit=1)
            if not words:
                # The line is cut there: the parser refuses it.
                return True
            return words[0].rstrip(b".").lower() in self._languages
        return role != "name" and not rest.startswith(b"_:") and UNKNOWN_VALUE.encode() not in rest


def _parts(line: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return the subject, the predicate and the rest of a line, or None where it has none.

    The subject begins with `<` or `_:`; its end is not needed.
    """
    # The usual form is recognised without a regular expression, which takes longer.
    subject_end = line.find(b">")
    if line[:1] == b"<" and line[subject_end : subject_end + 3] == b"> <":
        predicate_start = subject_end + 3
        predicate_end = line.find(b">", predicate_start)
        predicate = line[predicate_start:predicate_end]
        return line[:subject_end], predicate, line[predicate_end + 1 :].lstrip()

    match = _line.match(line)
    if match is None:
        return None
    subject, predicate, rest = match.groups()
    return subject, predicate, rest


def claim_quads(claims: set[bytes]) -> list[Quad]:
    """Return the quads that say which property each predicate states.

    Without them no query finds a predicate's statements.
    """
    quads = []
    for claim in sorted(claims):
        # A predicate that is no address gets no quad. The store keeps its statements, but no query
        # can name it.
        with contextlib.suppress(ValueError):
            predicate = claim.decode()
            is_direct = predicate.startswith(sparql.DIRECT)
            name = sparql.ENTITY + predicate.removeprefix(sparql.DIRECT) if is_direct else predicate
            quads.append(
                Quad(NamedNode(name), NamedNode(sparql.DIRECT_CLAIM), NamedNode(predicate))
            )
    return quads
