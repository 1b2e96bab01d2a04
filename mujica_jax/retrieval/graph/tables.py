"""Tab-separated triples with the columns COLUMNS, and as a graph on disk keeps them.

Entities with Q-ids are Wikidata's, under the first label that is met, the others being aliases. An
end without a Q-id is the entity with one that alone is called so in these files, up to case,
spacing and a closing parenthesis, else an entity of its own. An object without a Q-id that spells a
value as RDF does (`1961-11-14T00:00:00Z`, `+157`, `Point(114.1 22.5)`) is that value, and is
printed as every graph prints it (`values.py`).
"""

import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyoxigraph import Literal, NamedNode, Quad, Store

from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.files import Counts, Piece, pieces
from mujica_jax.retrieval.graph.triples import (
    COLUMNS,
    LITERAL_ID,
    Triple,
    normalise_label,
    without_parenthesis,
)
from mujica_jax.retrieval.graph.values import readable, value_in_text


class Table:
    """Quads of tab-separated rows, for one graph. Names of all rows are put there before the first
    statement."""

    def __init__(self, store: Store, path: str, skip: bool, counts: Counts) -> None:
        self._store, self._path, self._skip, self._counts = store, path, skip, counts

    def names(self, piece: Piece) -> list[Quad]:
        """Labels of the entities that have Q-ids: the first one that is met, then others."""
        label, alias, quads = NamedNode(sparql.LABEL), NamedNode(sparql.ALIAS), []
        called: dict[str, str] = {}
        for row in _rows(self._path, piece, Counts(), skip=self._skip):
            for text, key in self._ends(row):
                iri = sparql.entity_iri(key)
                if iri is None:
                    continue
                first = called[key] = called.get(key) or next(self._texts(iri, sparql.LABEL), text)
                quads.append(Quad(iri, label if text == first else alias, Literal(text)))
                quads += _searched(iri, text)
        return quads

    def statements(self, piece: Piece) -> list[Quad]:
        label, claim, quads = NamedNode(sparql.LABEL), NamedNode(sparql.DIRECT_CLAIM), []
        for row in _rows(self._path, piece, self._counts, skip=self._skip):
            relation = NamedNode(sparql.RELATION + urllib.parse.quote(row.relation, safe=""))
            iris = []
            for text, key in self._ends(row):
                iri = sparql.entity_iri(key) or self._called(text)
                if iri is None:
                    iri = NamedNode(
                        sparql.NAMED + urllib.parse.quote(normalise_label(text), safe="")
                    )
                    quads += [Quad(iri, label, Literal(text)), *_searched(iri, text)]
                iris.append(iri)
            found = iris[1] if len(iris) == 2 else Literal(row.object)
            quads.append(Quad(iris[0], relation, found))
            quads += [Quad(relation, claim, relation), Quad(relation, label, Literal(row.relation))]
        return quads

    def _ends(self, row: Triple) -> list[tuple[str, str]]:
        return [
            (row.subject, row.subject_id),
            *([] if row.object_is_literal else [(row.object, row.object_id)]),
        ]

    def _called(self, text: str) -> Any:
        """The entity with a Q-id that alone is called so, up to case and spacing, or else up to a
        closing parenthesis.
        """
        searched, normal = NamedNode(sparql.SEARCHED_LABEL), normalise_label(text)
        for name in (normal, without_parenthesis(normal)):
            quads = self._store.quads_for_pattern(None, searched, Literal(name))
            subjects: list[Any] = [quad.subject for quad in quads]
            found = [
                iri
                for iri in subjects
                if not iri.value.startswith(sparql.NAMED)
                and (name == normal or self._is_called(iri, name))
            ]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def _is_called(self, iri: Any, name: str) -> bool:
        texts = (*self._texts(iri, sparql.LABEL), *self._texts(iri, sparql.ALIAS))
        return any(normalise_label(text) == name for text in texts)

    def _texts(self, iri: Any, predicate: str) -> Iterator[str]:
        for quad in self._store.quads_for_pattern(iri, NamedNode(predicate), None):
            if isinstance(quad.object, Literal):
                yield quad.object.value


def read_triples(path: str | Path) -> list[Triple]:
    """All rows of a table, in order. Raises UserError for the first one that cannot be read."""
    return [
        row for piece in pieces(str(path)) for row in _rows(str(path), piece, Counts(), skip=False)
    ]


def _rows(path: str, piece: Piece, counts: Counts, *, skip: bool) -> Iterator[Triple]:
    """The triple of each line. One that cannot be read is counted with `skip`, else raises
    UserError."""
    for number, line in piece.numbered:
        if number == 1:
            cells = tuple(cell.strip() for cell in line.decode(errors="replace").split("\t"))
            if cells != COLUMNS:
                columns = ", ".join(COLUMNS)
                raise UserError(
                    f"{path}, line 1: the header is {', '.join(cells)!r}; expected tab-separated "
                    f"columns {columns}"
                )
        elif line.strip():
            try:
                row = _row(f"{path}, line {number:,}", line)
            except UserError as error:
                if not skip:
                    raise
                counts.skip(error)
            else:
                counts.triples += 1
                yield row


def _row(place: str, line: bytes) -> Triple:
    try:
        cells = [cell.strip() for cell in line.decode().split("\t")]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: it is not UTF-8 text ({error.reason}): convert the file"
        ) from error
    if len(cells) != len(COLUMNS):
        raise UserError(
            f"{place}: {len(cells)} columns where {len(COLUMNS)} belong: {', '.join(COLUMNS)}"
        )
    if not all(cells[:3]):
        raise UserError(f"{place}: subject, relation and object must not be empty; got {cells[:3]}")
    value = value_in_text(cells[2]) if cells[4] in ("", LITERAL_ID) else None
    return Triple(
        subject=cells[0],
        relation=cells[1],
        object=cells[2] if value is None else readable(value),
        subject_id=cells[3],
        object_id=cells[4],
        literal=value is not None,
    )


def _searched(iri: Any, text: str) -> list[Quad]:
    normal = normalise_label(text)
    names = {normal, without_parenthesis(normal)} - {""}
    return [Quad(iri, NamedNode(sparql.SEARCHED_LABEL), Literal(name)) for name in sorted(names)]
