"""N-Triples, as Wikidata's truthy dump: the lines that a graph keeps.

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


class Kept(NamedTuple):
    number: int
    text: bytes
    role: str


class Lines:
    """The lines of N-Triples that a graph keeps."""

    def __init__(self, path: str, spec: GraphSpec, counts: Counts) -> None:
        self._path, self._skip, self._counts = path, spec.skip, counts
        self._languages = frozenset(language.lower().encode() for language in spec.languages)
        self._predicates = spec.predicates
        self._roles: dict[bytes, str] = {}

    def kept(self, piece: Piece, claims: set[bytes]) -> list[Kept]:
        """Predicates of statements are added to `claims`."""
        kept, roles = [], self._roles
        for number, line in piece.numbered:
            place = line.find(b">")
            if line[:1] == b"<" and line[place : place + 3] == b"> <":  # as dumps write it
                end = line.find(b">", place + 3)
                subject, predicate, rest = (
                    line[:place],
                    line[place + 3 : end],
                    line[end + 1 :].lstrip(),
                )
            elif found := _line.match(line):
                subject, predicate, rest = found.groups()
            else:
                if line.strip() and not line.lstrip().startswith(b"#"):
                    kept.append(Kept(number, line, "none"))  # to be refused by the parser
                continue
            role = roles.get(predicate)
            if role is None:
                role = roles[predicate] = self._role(predicate)
            if role == "none" or subject[:2] == b"_:" or not self._is_wanted(rest, role):
                continue
            if rest[:2] == b"<<" and _text.sub(b"", rest).count(QUOTE) > 1:
                kept.append(Kept(number, QUOTE + b"\n", NESTED))
                continue
            kept.append(Kept(number, line, role))
            if role == "statement":
                claims.add(predicate)
        return kept

    def load(self, store: Store, kept: Sequence[Kept]) -> None:
        """Into the store, and counts them. Raises UserError naming the first line that is no
        triple."""
        try:
            store.bulk_load(b"".join(line.text for line in kept), RdfFormat.N_TRIPLES, lenient=True)
        except SyntaxError:
            whole = [line for line in kept if self._is_whole(line)]
            assert len(whole) < len(kept), "a piece cannot be read and each of its lines can"
            self.load(store, whole)
        else:
            self._counts.triples += sum(line.role == "statement" for line in kept)
            self._counts.names += sum(line.role == "name" for line in kept)

    def _is_whole(self, line: Kept) -> bool:
        try:
            list(parse(line.text, RdfFormat.N_TRIPLES, lenient=True))
            return True
        except SyntaxError as error:
            what = str(error).partition(": ")[2].partition(" (line")[0] or str(error)
            if line.role == NESTED:
                what = "a quoted triple in a quoted triple"
            sentence = f"{self._path}, line {line.number:,}: no triple in N-Triples ({what})"
            if not self._skip:
                raise UserError(
                    f"{sentence}: mend it, or leave such lines out with --skip"
                ) from error
            self._counts.skip(sentence)
            return False

    def _role(self, predicate: bytes) -> str:
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
        """The object: a text in a chosen language or in none, for names a text, for redirects an
        entity of Wikidata's.
        """
        if role == "redirect":
            return rest.startswith(b"<" + sparql.ENTITY.encode())
        if rest.startswith(b'"'):
            after = rest[rest.rfind(b'"') + 1 :]
            if not after.startswith(b"@"):
                return True
            language = after[1:].split(maxsplit=1)[
                :1
            ]  # none where the line is cut there: the parser refuses it
            return not language or language[0].rstrip(b".").lower() in self._languages
        return role != "name" and not rest.startswith(b"_:") and UNKNOWN_VALUE.encode() not in rest


def claim_quads(claims: set[bytes]) -> list[Quad]:
    """Which property each predicate states: without that no query finds its statements."""
    quads = []
    for claim in sorted(claims):
        # Of what is no address: the store keeps what dumps say with it, and nobody can ask for it.
        with contextlib.suppress(ValueError):
            text = claim.decode()
            stated = (
                sparql.ENTITY + text.removeprefix(sparql.DIRECT)
                if text.startswith(sparql.DIRECT)
                else text
            )
            quads.append(Quad(NamedNode(stated), NamedNode(sparql.DIRECT_CLAIM), NamedNode(text)))
    return quads
