"""Load tables of triples, which are tab-separated files with the columns COLUMNS.

Entities with a Q-id are those of Wikidata. The first label of an entity in the files is its label,
and its other labels are aliases.

A subject or object without a Q-id is matched by name. If exactly one entity with a Q-id has this
name in the files, it is that entity. Case, spacing and a closing parenthesis do not matter.
Otherwise it becomes an entity of its own.

An object without a Q-id may be a value in the notation of RDF (`1961-11-14T00:00:00Z`, `+157`,
`Point(114.1 22.5)`). It is then written as described in `values.py`.
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
    """A table of triples, as quads for the store of a graph.

    The names of all rows of all files must be stored before the first statement, because statements
    look entities up by name.
    """

    def __init__(self, store: Store, path: str, skip: bool, counts: Counts) -> None:
        self._store = store
        self._path = path
        self._skip = skip
        self._counts = counts

    def names(self, piece: Piece) -> list[Quad]:
        """Return the quads of the labels and aliases of all entities that have Q-ids."""
        label = NamedNode(sparql.LABEL)
        alias = NamedNode(sparql.ALIAS)
        quads = []
        # The label of each entity by key: its first name in the files, here or in the store.
        labels: dict[str, str] = {}
        for row in _rows(self._path, piece, Counts(), skip=self._skip):
            for text, key in self._ends(row):
                iri = sparql.entity_iri(key)
                if iri is None:
                    continue
                if not labels.get(key):
                    labels[key] = next(self._texts(iri, sparql.LABEL), text)
                predicate = label if text == labels[key] else alias
                quads.append(Quad(iri, predicate, Literal(text)))
                quads += _searched_labels(iri, text)
        return quads

    def statements(self, piece: Piece) -> list[Quad]:
        """Return the quads of the statements, and of the names of entities without a Q-id."""
        label = NamedNode(sparql.LABEL)
        claim = NamedNode(sparql.DIRECT_CLAIM)
        quads = []
        for row in _rows(self._path, piece, self._counts, skip=self._skip):
            # Find the entities. An unknown entity without a Q-id gets an IRI of its own.
            iris = []
            for text, key in self._ends(row):
                iri = sparql.entity_iri(key) or self._entity_called(text)
                if iri is None:
                    iri = NamedNode(sparql.NAMED + _quoted(normalise_label(text)))
                    quads.append(Quad(iri, label, Literal(text)))
                    quads += _searched_labels(iri, text)
                iris.append(iri)

            # Add the triple, and the name of its relation.
            relation = NamedNode(sparql.RELATION + _quoted(row.relation))
            has_entity_object = len(iris) == 2
            quads.append(
                Quad(iris[0], relation, iris[1] if has_entity_object else Literal(row.object))
            )
            quads.append(Quad(relation, claim, relation))
            quads.append(Quad(relation, label, Literal(row.relation)))
        return quads

    def _ends(self, row: Triple) -> list[tuple[str, str]]:
        """Return the (text, key) of the subject, and of the object if it is an entity."""
        ends = [(row.subject, row.subject_id)]
        if not row.object_is_literal:
            ends.append((row.object, row.object_id))
        return ends

    def _entity_called(self, text: str) -> Any:
        """Return the entity with a Q-id that has this name, or None if there is not exactly one.

        Names are compared without case and spacing. If none matches, they are also compared without
        a closing parenthesis.
        """
        searched_label = NamedNode(sparql.SEARCHED_LABEL)
        full_name = normalise_label(text)
        for name in (full_name, without_parenthesis(full_name)):
            quads = self._store.quads_for_pattern(None, searched_label, Literal(name))
            subjects: list[Any] = [quad.subject for quad in quads]
            entities = [
                iri
                for iri in subjects
                if not iri.value.startswith(sparql.NAMED)
                and (name == full_name or self._is_called(iri, name))
            ]
            if entities:
                return entities[0] if len(entities) == 1 else None
        return None

    def _is_called(self, iri: Any, name: str) -> bool:
        """Return whether a label or an alias is this name, without case and spacing."""
        texts = (*self._texts(iri, sparql.LABEL), *self._texts(iri, sparql.ALIAS))
        return any(normalise_label(text) == name for text in texts)

    def _texts(self, iri: Any, predicate: str) -> Iterator[str]:
        """Yield the texts of an entity under one predicate."""
        for quad in self._store.quads_for_pattern(iri, NamedNode(predicate), None):
            if isinstance(quad.object, Literal):
                yield quad.object.value


def read_triples(path: str | Path) -> list[Triple]:
    """Return all triples of a table, in order. Raises UserError for the first wrong line."""
    rows: list[Triple] = []
    for piece in pieces(str(path)):
        rows.extend(_rows(str(path), piece, Counts(), skip=False))
    return rows


def _rows(path: str, piece: Piece, counts: Counts, *, skip: bool) -> Iterator[Triple]:
    """Yield the triple of each line.

    With `skip`, a line that cannot be read is counted. Without, it raises UserError.
    """
    for number, line in piece.numbered:
        if number == 1:
            _check_header(path, line)
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


def _check_header(path: str, line: bytes) -> None:
    """Raise UserError unless the first line names the columns."""
    cells = tuple(cell.strip() for cell in line.decode(errors="replace").split("\t"))
    if cells != COLUMNS:
        columns = ", ".join(COLUMNS)
        raise UserError(
            f"{path}, line 1: the header is {', '.join(cells)!r}; expected tab-separated "
            f"columns {columns}"
        )


def _row(place: str, line: bytes) -> Triple:
    """Return the triple of a line. Raises UserError with the place if it is not one."""
    try:
        cells = [cell.strip() for cell in line.decode().split("\t")]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: it is not UTF-8 text ({error.reason}): convert the file"
        ) from error
    if len(cells) != len(COLUMNS):
        raise UserError(
            f"{place}: the line has {len(cells)} columns instead of {len(COLUMNS)}: give "
            f"{', '.join(COLUMNS)}"
        )
    if not all(cells[:3]):
        raise UserError(f"{place}: subject, relation and object must not be empty; got {cells[:3]}")

    subject, relation, object_text, subject_id, object_id = cells
    value = value_in_text(object_text) if object_id in ("", LITERAL_ID) else None
    return Triple(
        subject=subject,
        relation=relation,
        object=object_text if value is None else readable(value),
        subject_id=subject_id,
        object_id=object_id,
        literal=value is not None,
    )


def _searched_labels(iri: Any, text: str) -> list[Quad]:
    """Return the quads for a search by name without its exact spelling.

    They hold the normalised name, and the normalised name without a closing parenthesis.
    """
    full_name = normalise_label(text)
    names = {full_name, without_parenthesis(full_name)} - {""}
    return [Quad(iri, NamedNode(sparql.SEARCHED_LABEL), Literal(name)) for name in sorted(names)]


def _quoted(text: str) -> str:
    """Return a text in the form of a part of an IRI."""
    return urllib.parse.quote(text, safe="")
