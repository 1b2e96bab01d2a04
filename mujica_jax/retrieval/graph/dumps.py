"""Choose and load the lines of an N-Triples file, such as Wikidata's truthy dump.

A graph takes these lines:

- labels and aliases in the chosen languages;
- redirects, from the id of a merged entity to the entity that it was merged into;
- statements: with the chosen properties if there are any, or else with `prop/direct/...` in
  Wikidata's dumps, and with every predicate outside the vocabularies of DESCRIBING in other files.

Texts in other languages, blank nodes and unknown values are left out silently.

This module chooses the lines, and the store parses them. One case is refused here: a quoted triple
inside a quoted triple. The store's parser has no limit on their depth, so a deep one would end the
process.
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

# Vocabularies that describe the data itself. Lines with these predicates are not statements.
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
# Predicates of labels and aliases.
NAMES = (sparql.LABEL.encode(), sparql.ALIAS.encode())
# Predicates that describe properties.
SCHEMA = (sparql.DIRECT_CLAIM.encode(), sparql.PROPERTY_TYPE.encode())

# Role of a line with nested quoted triples. Its text must not reach the parser.
NESTED = "nested"
# Opens a quoted triple. As a line of its own it is a syntax error, so the parser refuses it.
QUOTE = b"<<"

_text = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_line = re.compile(rb"\s*(<[^>]*>|_:\S+)\s*<([^>]*)>\s*(.*)", re.DOTALL)


class Line(NamedTuple):
    """A chosen line."""

    # Line number in the file, from 1.
    number: int
    # The line with its line break.
    text: bytes
    # "name", "schema", "redirect", "statement", NESTED, or "none" for a line that is no triple.
    role: str


class Lines:
    """A loader that chooses and loads the lines of one file of N-Triples."""

    def __init__(self, path: str, spec: GraphSpec, counts: Counts) -> None:
        self._path = path
        self._skip = spec.skip
        self._counts = counts
        self._languages = frozenset(language.lower().encode() for language in spec.languages)
        self._predicates = spec.predicates
        # Roles by predicate, cached.
        self._roles: dict[bytes, str] = {}

    def choose(self, piece: Piece, claims: set[bytes]) -> list[Line]:
        """Return the chosen lines of a piece. Predicates of statements are added to `claims`."""
        lines = []
        for number, text in piece.numbered:
            parts = _parts(text)
            if parts is None:
                is_comment = text.lstrip().startswith(b"#")
                if text.strip() and not is_comment:
                    # Keep a broken line, so that the parser reports it.
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

        Raises UserError with the first line that is no triple. With `skip`, such lines are counted
        instead.
        """
        try:
            content = b"".join(line.text for line in lines)
            store.bulk_load(content, RdfFormat.N_TRIPLES, lenient=True)
        except SyntaxError:
            valid_lines = [line for line in lines if self._is_valid(line)]
            assert len(valid_lines) < len(lines), "the lines fail together, but not one by one"
            self.load(store, valid_lines)
        else:
            self._counts.triples += sum(line.role == "statement" for line in lines)
            self._counts.names += sum(line.role == "name" for line in lines)

    def _is_valid(self, line: Line) -> bool:
        """Return whether a line is a triple.

        With `skip`, a line that is not a triple is counted. Without, it raises UserError.
        """
        try:
            list(parse(line.text, RdfFormat.N_TRIPLES, lenient=True))
            return True
        except SyntaxError as error:
            if line.role == NESTED:
                reason = "a quoted triple in a quoted triple"
            else:
                reason = str(error).partition(": ")[2].partition(" (line")[0] or str(error)
            sentence = f"{self._path}, line {line.number:,}: not a triple in N-Triples ({reason})"
            if not self._skip:
                raise UserError(
                    f"{sentence}: correct it, or leave such lines out with --skip"
                ) from error
            self._counts.skip(sentence)
            return False

    def _role(self, predicate: bytes) -> str:
        """Return the role of lines with this predicate: name, schema, redirect, statement, none."""
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
        """Return whether the graph takes a line with this object.

        `rest` is the part of the line after the predicate. The object of a redirect must be an
        entity of Wikidata. The object of a name must be a text. A text must be in a chosen
        language, or have no language.
        """
        if role == "redirect":
            return rest.startswith(b"<" + sparql.ENTITY.encode())
        if rest.startswith(b'"'):
            suffix = rest[rest.rfind(b'"') + 1 :]
            if not suffix.startswith(b"@"):
                return True
            words = suffix[1:].split(maxsplit=1)
            if not words:
                # The line ends here. Keep it, so that the parser reports it.
                return True
            return words[0].rstrip(b".").lower() in self._languages
        return role != "name" and not rest.startswith(b"_:") and UNKNOWN_VALUE.encode() not in rest


def _parts(line: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return the subject, the predicate and the rest of a line, or None if it is no triple.

    The subject begins with `<` or `_:`. It may lack its closing bracket, which nobody needs.
    """
    # Find the usual form without a regular expression, which is slower.
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
    """Return the quads that connect each predicate of `claims` with its property.

    Queries find the statements of a predicate only through these quads.
    """
    quads = []
    for claim in sorted(claims):
        # A predicate that is not a valid IRI gets no quad. The store keeps its statements, but no
        # query finds them.
        with contextlib.suppress(ValueError):
            predicate = claim.decode()
            is_direct = predicate.startswith(sparql.DIRECT)
            name = sparql.ENTITY + predicate.removeprefix(sparql.DIRECT) if is_direct else predicate
            quads.append(
                Quad(NamedNode(name), NamedNode(sparql.DIRECT_CLAIM), NamedNode(predicate))
            )
    return quads
