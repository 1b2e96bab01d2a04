"""A knowledge graph in memory: triples found by the entity they name, in either direction.

An entity's key is its Q-id where the file gives one, else its label. The same entity can stand in
one row with its Q-id and in the next without, "Norman Foster" in one and "Norman Foster (director)"
in the other; so

- a Q-id finds the rows that carry it, and rows without Q-ids that name one of its labels;
- a label finds every row that names it.

Two labels name the same where they are equal up to case and spacing, or one is the other without
its closing parenthesis.
"""

import dataclasses
import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

from mujica_jax.records import Evidence
from mujica_jax.retrieval.statistics import Counted

COLUMNS = ("subject", "relation", "object", "subject_qid", "object_qid")
LITERAL_ID = "date_information"  # what 2WikiMultihopQA writes where a Q-id would stand for a date
LITERAL_RELATIONS = frozenset(
    {"date of birth", "date of death", "publication date", "inception", "point in time"}
)

_closing_parenthesis = re.compile(r"\s*\([^()]*\)$")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Triple(Evidence):
    """`subject_id` and `object_id` are Q-ids or empty; a literal object (a date) is no entity, and
    known by its relation, by its id, or because the source says so (`literal`).
    """

    literal: bool = False

    @property
    def text(self) -> str:
        return f"{self.subject}, {self.relation}, {self.object}"

    @property
    def object_is_literal(self) -> bool:
        return self.literal or self.relation in LITERAL_RELATIONS or self.object_id == LITERAL_ID


class End(NamedTuple):
    """A triple as one of its two entities has it."""

    triple: Triple
    as_object: bool  # whether the entity is the triple's object
    subject_key: str
    object_key: str | None  # None for a literal

    @classmethod
    def of(cls, triple: Triple, as_object: bool) -> "End":
        """Of a triple whose ids are there wherever they are known."""
        found = None if triple.object_is_literal else triple.object_id or triple.object
        return cls(triple, as_object, triple.subject_id or triple.subject, found)


class TripleGraph(Counted):
    """Triples with an index by entity; about 20 microseconds a triple to build, a few to look an
    entity up."""

    def __init__(self, triples: Iterable[Triple]) -> None:
        super().__init__()
        self.triples = tuple(triples)
        self._ends_of_id: dict[str, list[tuple[int, bool]]] = {}  # (row, whether as object)
        self._ends_of_name: dict[str, list[tuple[int, bool]]] = {}
        self._names_of_bare_name: dict[str, dict[str, None]] = {}  # dicts as ordered sets
        self._labels_of_id: dict[str, dict[str, None]] = {}
        self._ids_of_label: dict[str, dict[str, None]] = {}
        self._labels_of_name: dict[str, dict[str, None]] = {}
        for row, triple in enumerate(self.triples):
            self._add(row, False, triple.subject, triple.subject_id)
            if not triple.object_is_literal:
                self._add(row, True, triple.object, triple.object_id)

    @functools.cached_property
    def version(self) -> str:
        """A hash of all triples, in their order."""
        digest = hashlib.sha256()
        for triple in self.triples:
            digest.update(repr(triple).encode(errors="surrogatepass"))
        return digest.hexdigest()[:16]

    def ends_of(self, entity_id: str, limit: int | None = None) -> list[End]:
        """Triples that name the entity, as subject before as object, in file order, no two alike;
        at most `limit` of them.

        `entity_id` is a Q-id or a label as `find`, `subject_key` and `object_key` return it; an
        unknown one has no triples.
        """
        found: dict[str, End] = {}
        for row, as_object in self._ends(entity_id):
            if limit is not None and len(found) >= limit:
                break
            triple = self.triples[row]
            if triple.text not in found:
                found[triple.text] = End(
                    triple, as_object, self.subject_key(triple), self.object_key(triple)
                )
        return list(found.values())

    def find(self, name: str) -> str | None:
        """The key of the entity called `name`: a Q-id, else an exact label, a label up to case and
        spacing, or one up to a closing parenthesis. A label that several Q-ids share is its own
        key. None where nothing is called so.
        """
        if name in self._ends_of_id:
            return name
        if name in self._ids_of_label:
            return self._key(name)
        names = [normalise_label(name), *self._linked_names(normalise_label(name))]
        labels = [label for linked in names for label in self._labels_of_name.get(linked, ())]
        keys = dict.fromkeys(self._key(label) for label in labels)
        return next(iter(keys), None)

    def subject_key(self, triple: Triple) -> str:
        return triple.subject_id or self._key(triple.subject)

    def object_key(self, triple: Triple) -> str | None:
        """None for a literal."""
        return None if triple.object_is_literal else triple.object_id or self._key(triple.object)

    def _add(self, row: int, as_object: bool, label: str, identifier: str) -> None:
        name = normalise_label(label)
        self._ends_of_name.setdefault(name, []).append((row, as_object))
        self._labels_of_name.setdefault(name, {})[label] = None
        bare = without_parenthesis(name)
        if bare and bare != name:
            self._names_of_bare_name.setdefault(bare, {})[name] = None
        ids = self._ids_of_label.setdefault(label, {})
        if identifier:
            self._ends_of_id.setdefault(identifier, []).append((row, as_object))
            self._labels_of_id.setdefault(identifier, {})[label] = None
            ids[identifier] = None

    def _ends(self, entity_id: str) -> list[tuple[int, bool]]:
        """Rows in which the entity is the subject, then those in which it is the object, each with
        which it is."""
        if entity_id in self._ends_of_id:
            ends = list(self._ends_of_id[entity_id])
            names = {normalise_label(label) for label in self._labels_of_id[entity_id]}
            ends += [end for end in self._ends_named(names) if not self._identifier(*end)]
        else:
            ends = self._ends_named({normalise_label(entity_id)})
        return sorted(ends, key=lambda end: (end[1], end[0]))

    def _ends_named(self, names: set[str]) -> list[tuple[int, bool]]:
        linked = names.union(*(self._linked_names(name) for name in names))
        return [end for name in linked for end in self._ends_of_name.get(name, ())]

    def _linked_names(self, name: str) -> list[str]:
        bare = without_parenthesis(name)
        if bare and bare != name:
            return [bare] if bare in self._ends_of_name else []
        return list(self._names_of_bare_name.get(name, ()))

    def _identifier(self, row: int, as_object: bool) -> str:
        return self.triples[row].object_id if as_object else self.triples[row].subject_id

    def _key(self, label: str) -> str:
        """The Q-id where exactly one is known under this label, else the label."""
        ids = self._ids_of_label.get(label, {})
        return next(iter(ids)) if len(ids) == 1 else label


def normalise_label(label: str) -> str:
    """Case, spacing and Unicode form away: titles in questions are often written In Title Case."""
    return " ".join(unicodedata.normalize("NFKC", label).casefold().split())


def without_parenthesis(label: str) -> str:
    """ "Norman Foster" of "Norman Foster (director)"."""
    return _closing_parenthesis.sub("", label)
