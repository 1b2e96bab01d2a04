"""What a knowledge graph is asked in SPARQL, and what the rows say: the same texts for our own store and for any
endpoint.

The data are in Wikidata's vocabulary: a property `wikibase:directClaim` says which predicate states it, entities and
properties have `rdfs:label` and `skos:altLabel`. Our store holds what files of other shapes say in these terms too
(`files.py`).

What a triple reads as:

- a label is the one in the first of `languages` that has any, then one without a language;
- an entity without such a label (a Q-id alone says nothing to a model) makes no triple; another IRI reads as its last
  part;
- a date is written `14 November 1961`. Truthy statements do not say how exact a date is, so the first of January reads
  as its year;
- texts in other languages, unknown values, and properties whose values are for machines (MACHINE_TYPES) are left out.

Names and keys come from users and models. They enter a query as terms that pyoxigraph has checked and written, never as
text.
"""

import re
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any

from pyoxigraph import Literal, NamedNode

from mujica_jax.dates import MONTHS
from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph.triples import End, Triple, normalise_label, without_parenthesis

ENTITY = "http://www.wikidata.org/entity/"
DIRECT = "http://www.wikidata.org/prop/direct/"
LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
ALIAS = "http://www.w3.org/2004/02/skos/core#altLabel"
# as `normalise_label` writes it; of files that we named ourselves
SEARCHED_LABEL = "http://www.w3.org/2004/02/skos/core#hiddenLabel"
DIRECT_CLAIM = "http://wikiba.se/ontology#directClaim"
REDIRECT = "http://www.w3.org/2002/07/owl#sameAs"  # from the id of an entity that was merged into another one
PROPERTY_TYPE = "http://wikiba.se/ontology#propertyType"
NAMED = "urn:mujica:named:"  # an entity of which a file says nothing but its label
RELATION = "urn:mujica:relation:"
UNKNOWN_VALUE = "/.well-known/genid/"
MACHINE_TYPES = (
    "ExternalId", "Url", "CommonsMedia", "GeoShape", "TabularData", "Math", "MusicalNotation", "GlobeCoordinate",
    "WikibaseSense", "WikibaseLexeme", "WikibaseForm", "EntitySchema",
)  # fmt: skip
LANGUAGES = ("en", "mul")  # mul: Wikidata's for names that are the same in every language
MAX_NAMESAKES = 1000  # entities of one name that are looked at
PREFIXES = f"""PREFIX wikibase: <http://wikiba.se/ontology#>
PREFIX rdfs: <{LABEL.removesuffix("label")}>
PREFIX skos: <{ALIAS.removesuffix("altLabel")}>
"""
CLAIMS_QUERY = f"{PREFIXES}SELECT ?property WHERE {{ ?property wikibase:directClaim ?claim }} LIMIT 1"

_identifier = re.compile(r"[QP]\d+", re.ASCII)
_language = re.compile(r"[A-Za-z]{1,8}(-[A-Za-z0-9]{1,8})*")
_date = re.compile(r"(-?\d{4,})(?:-(\d\d)(?:-(\d\d)(?:T[\d:.]*)?)?)?(?:Z|[+-]\d\d:\d\d)?")
_control = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_wikidata = re.compile(re.escape(ENTITY) + r"([QP]\d+)", re.ASCII)

Row = Any  # pyoxigraph.QuerySolution: a variable's name to its term, or None


def entity_iri(key: str) -> NamedNode | None:
    """The entity of a Q-id or a full IRI; None for what is neither, and so a name."""
    if _identifier.fullmatch(key):
        return NamedNode(f"{ENTITY}{key}")
    if not key.startswith(("http://", "https://", "urn:")):
        return None
    try:
        return NamedNode(key)
    except ValueError:  # no IRI, whatever it looks like
        return None


def key_of(iri: str) -> str:
    """What `entity_iri` turns back."""
    found = _wikidata.fullmatch(iri)
    return found[1] if found else iri


def check_languages(languages: Sequence[str]) -> None:
    for language in languages:
        if not _language.fullmatch(language):
            raise UserError(f"{language!r} is no language tag: write it as en, de or pt-br")
    if not languages:
        raise UserError("no language is given: give at least one, as in en")


def triples_query(entity: NamedNode, languages: Sequence[str], most: int) -> str:
    """At most `most` triples in each direction with their labels, the entity's own label, and who took over from it."""
    spoken = ", ".join(f'"{language}"' for language in (*languages, ""))
    outgoing, incoming = (
        f"""{{ {{ SELECT ?property ?other WHERE {{
      {pattern}
      ?property wikibase:directClaim ?claim .
      OPTIONAL {{ ?property wikibase:propertyType ?type }}
      FILTER(!BOUND(?type) || ?type NOT IN ({", ".join(f"wikibase:{name}" for name in MACHINE_TYPES)}))
      FILTER(!isLiteral(?other) || LANG(?other) IN ({spoken}))
    }} LIMIT {most:d} }} BIND({inverse} AS ?inverse) }}"""
        for pattern, inverse in ((f"{entity} ?claim ?other .", 0), (f"?other ?claim {entity} .", 1))
    )
    return f"""{PREFIXES}SELECT ?inverse ?property ?name ?other ?label ?own ?same WHERE {{
  {{ {outgoing}
    UNION
    {incoming}
    OPTIONAL {{ ?property rdfs:label ?name FILTER(LANG(?name) IN ({spoken})) }}
    OPTIONAL {{ ?other rdfs:label ?label FILTER(LANG(?label) IN ({spoken})) }}
  }} UNION {{ {entity} rdfs:label ?own FILTER(LANG(?own) IN ({spoken})) }}
  UNION {{ {entity} <{REDIRECT}> ?same }}
}}"""


def find_query(name: str, languages: Sequence[str]) -> str:
    """Entities called `name`: by label (0), by alias (1), by the label in lower case (2), by that without its closing
    parenthesis (3).
    """
    names = [*(Literal(name, language=language) for language in languages), Literal(name)]
    normal = normalise_label(name)
    ways = [
        ("rdfs:label", names),
        ("skos:altLabel", names),
        ("skos:hiddenLabel", [Literal(normal)]),
        ("skos:hiddenLabel", [Literal(without_parenthesis(normal))]),
    ]
    parts = [
        f"{{ VALUES ?name {{ {' '.join(map(str, terms))} }} ?entity {predicate} ?name BIND({rank} AS ?rank) }}"
        for rank, (predicate, terms) in enumerate(ways)
    ]
    return f"{PREFIXES}SELECT ?entity ?rank WHERE {{ {' UNION '.join(parts)} }} LIMIT {MAX_NAMESAKES}"


def exists_query(entity: NamedNode) -> str:
    return f"SELECT ?claim WHERE {{ {{ {entity} ?claim ?other }} UNION {{ ?other ?claim {entity} }} }} LIMIT 1"


def columns(query: str) -> set[str]:
    """The variables that one of our queries asks for."""
    return set(re.findall(r"\?(\w+)", query[query.index("SELECT") : query.index("WHERE")]))


def read_redirect(rows: Iterable[Row]) -> str | None:
    """The key of the entity that took over from the one that was asked for, if any."""
    found = {row["same"].value for row in rows if hasattr(row["same"], "value")}
    return min((key_of(iri) for iri in found if _wikidata.fullmatch(iri)), key=_natural, default=None)


def read_namesakes(rows: Iterable[Row]) -> list[str]:
    """Keys of the entities that are called best, the lowest Q-id first: the entities that were made first are the
    better known ones.
    """
    ranks: dict[str, int] = {}
    for row in rows:
        iri, rank = row["entity"].value, int(row["rank"].value)
        # Properties have names too, and are no entities.
        if not _wikidata.fullmatch(iri) or key_of(iri).startswith("Q"):
            ranks[iri] = min(rank, ranks.get(iri, rank))
    best = min(ranks.values(), default=0)
    return sorted((key_of(iri) for iri, rank in ranks.items() if rank == best), key=_natural)


def read_ends(rows: Iterable[Row], entity: NamedNode, languages: Sequence[str]) -> list[End]:
    """Triples in a fixed order, no two alike: as subject before as object, by property, by label."""
    labels: dict[str, set[tuple[int, str]]] = {}
    found: dict[tuple[bool, str, Any], None] = {}
    order = {language: place for place, language in enumerate(languages)}

    def note(iri: str, label: Any) -> None:
        if label is not None:
            labels.setdefault(iri, set()).add((order.get(label.language, len(order)), _line(label.value)))

    for row in rows:
        if row["own"] is not None:
            note(entity.value, row["own"])
        if row["property"] is None:
            continue
        note(row["property"].value, row["name"])
        if hasattr(row["other"], "value"):  # no blank node
            found[row["inverse"].value in ("1", "true"), row["property"].value, row["other"]] = None
            if not _is_literal(row["other"]):
                note(row["other"].value, row["label"])
    best = {iri: min(names)[1] for iri, names in labels.items()}
    ends = [end for inverse, iri, other in found if (end := _end(inverse, iri, other, entity.value, best))]
    ends.sort(key=lambda pair: pair[0])
    unlike: dict[str, End] = {}
    for _, end in ends:
        unlike.setdefault(end.triple.text, end)
    return list(unlike.values())


def _end(inverse: bool, relation: str, other: Any, entity: str, labels: dict[str, str]) -> tuple[Any, End] | None:
    """The triple with what it is sorted by; None where it cannot be read."""
    literal = _is_literal(other)
    text = readable(other) if literal else labels.get(other.value) or _last_part(other.value)
    if not text:
        return None
    own = labels.get(entity) or _last_part(entity) or key_of(entity)
    name = labels.get(relation) or _last_part(relation) or key_of(relation)
    ends = [(own, _id(entity)), (text, "" if literal else _id(other.value))]
    (subject, key), (found, found_key) = reversed(ends) if inverse else ends
    triple = Triple(subject=subject, relation=name, object=found, subject_id=key, object_id=found_key, literal=literal)
    return (inverse, _natural(key_of(relation)), text, other.value), End.of(triple, inverse)


def readable(literal: Literal) -> str:
    kind = literal.datatype.value.rpartition("#")[2]
    if kind in ("dateTime", "date", "gYear", "gYearMonth") and (found := _date.fullmatch(literal.value)):
        year, month, day = (int(part or 0) for part in found.groups())
        written = f"{year}" if year > 0 else f"{1 - year} BC"  # the year before 1 is 0000
        if month in (0, 1) and day in (0, 1):
            return written
        return " ".join([*([str(day)] if day else ()), MONTHS[month - 1], written]) if 1 <= month <= 12 else written
    if kind in ("decimal", "integer"):
        return literal.value.removeprefix("+")
    return _line(literal.value)


def _id(iri: str) -> str:
    """As `Triple` has it: empty for an entity that has a label alone."""
    return "" if iri.startswith(NAMED) else key_of(iri)


def _last_part(iri: str) -> str:
    """`Norman Foster` of http://example.org/resource/Norman_Foster; empty where it says nothing."""
    if _wikidata.fullmatch(iri) or UNKNOWN_VALUE in iri:
        return ""
    part = re.split(r"[/#:]", iri.rstrip("/#"))[-1]
    return _line(urllib.parse.unquote(part).replace("_", " "))


def _natural(key: str) -> tuple[Any, ...]:
    """Q9 before Q10."""
    return (0, int(key[1:]), "") if _identifier.fullmatch(key) else (1, 0, key)


def _line(text: str) -> str:
    """One line: a label with a line end in it could pass for two materials."""
    return " ".join(_control.sub(" ", text).split())


def _is_literal(term: Any) -> bool:
    return hasattr(term, "datatype")
