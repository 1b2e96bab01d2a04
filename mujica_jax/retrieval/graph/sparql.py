"""SPARQL queries to a knowledge graph, and functions that read their results.

The queries are the same for our own store and for any endpoint. The data must be in Wikidata's
vocabulary: `wikibase:directClaim` connects a property with the predicate of its statements, and
entities and properties have `rdfs:label` and `skos:altLabel`. Our store converts other files into
this vocabulary (`tables.py`, `dumps.py`).

Triples are written for a model as follows:

- An entity or property is written as its label in the first of `languages` that has one, or else as
  its label without a language.
- A Wikidata entity without such a label makes no triple, because its Q-id means nothing to a model.
  Another IRI without a label is written as its last part.
- Dates, numbers, coordinates and other values are written as described in `values.py`.
- Texts in other languages, unknown values, and properties whose values are meant for machines
  (MACHINE_TYPES) are left out.

Names and keys come from users and models. They are put into queries as terms that pyoxigraph has
checked and serialised, never as raw text.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyoxigraph import BlankNode, Literal, NamedNode

from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph.triples import End, Triple, normalise_label, without_parenthesis
from mujica_jax.retrieval.graph.values import ENTITY, one_line, readable, readable_iri

DIRECT = "http://www.wikidata.org/prop/direct/"
LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
ALIAS = "http://www.w3.org/2004/02/skos/core#altLabel"
# Predicate of a name in the form of `normalise_label`. Only tables (`tables.py`) have it.
SEARCHED_LABEL = "http://www.w3.org/2004/02/skos/core#hiddenLabel"
DIRECT_CLAIM = "http://wikiba.se/ontology#directClaim"
# Predicate from the old id of a merged entity to the entity that it was merged into.
REDIRECT = "http://www.w3.org/2002/07/owl#sameAs"
PROPERTY_TYPE = "http://wikiba.se/ontology#propertyType"
# Beginning of the IRI of an entity in a table that has a label but no Q-id.
NAMED = "urn:mujica:named:"
# Beginning of the IRI of a relation in a table.
RELATION = "urn:mujica:relation:"
# Types of properties whose values are meant for machines.
MACHINE_TYPES = (
    "ExternalId", "Url", "CommonsMedia", "GeoShape", "TabularData", "Math", "MusicalNotation",
    "WikibaseSense", "WikibaseLexeme", "WikibaseForm", "EntitySchema",
)  # fmt: skip
# Default languages of labels. Wikidata uses "mul" for names that are the same in every language.
LANGUAGES = ("en", "mul")
# Other language tags under which Wikidata has labels of a language.
LANGUAGE_VARIANTS = {"zh": ("zh-hans", "zh-cn", "zh-hant", "zh-tw", "zh-hk")}
# The largest number of entities of one name that a query returns.
MAX_NAMESAKES = 1000
# The rank of a name that matches only in normalised form (`find_all_query`).
NORMALISED_RANK = 2
PREFIXES = f"""PREFIX wikibase: <http://wikiba.se/ontology#>
PREFIX rdfs: <{LABEL.removesuffix("label")}>
PREFIX skos: <{ALIAS.removesuffix("altLabel")}>
"""
CLAIMS_QUERY = (
    f"{PREFIXES}SELECT ?property WHERE {{ ?property wikibase:directClaim ?claim }} LIMIT 1"
)

_identifier = re.compile(r"[QP]\d+", re.ASCII)
_language = re.compile(r"[A-Za-z]{1,8}(-[A-Za-z0-9]{1,8})*")
_wikidata = re.compile(re.escape(ENTITY) + r"([QP]\d+)", re.ASCII)

# A row of results (pyoxigraph.QuerySolution). It maps the name of a variable to a term or None.
Row = Any


def entity_iri(key: str) -> NamedNode | None:
    """Return the entity with this Q-id or full IRI. Return None if the key is a name instead."""
    if _identifier.fullmatch(key):
        return NamedNode(f"{ENTITY}{key}")
    if not key.startswith(("http://", "https://", "urn:")):
        return None
    try:
        return NamedNode(key)
    except ValueError:
        # It looks like an IRI, but it is not a valid one.
        return None


def key_of(iri: str) -> str:
    """Return the key of an IRI, the inverse of `entity_iri`: a Q-id, or the whole IRI."""
    match = _wikidata.fullmatch(iri)
    return match[1] if match else iri


def check_languages(languages: Sequence[str]) -> None:
    """Raise UserError unless there is at least one language, and all are language tags."""
    for language in languages:
        if not _language.fullmatch(language):
            raise UserError(f"{language!r} is not a language tag: give one such as en, de or pt-br")
    if not languages:
        raise UserError("no language is given: give at least one, such as en")


def languages_for(language: str, available: Sequence[str]) -> tuple[str, ...]:
    """Return the languages of labels in the order of preference, for questions in `language`.

    First comes `language` itself, then "mul" (names that are the same in every language), then
    English, then all other languages of the graph (`available`).
    """
    variants = LANGUAGE_VARIANTS.get(language, ())
    first = LANGUAGES if language == "en" else (language, *variants, "mul", "en")
    return tuple(dict.fromkeys((*first, *available)))


def triples_query(entity: NamedNode, languages: Sequence[str], limit: int) -> str:
    """Return the query for at most `limit` triples of an entity in each direction, with labels.

    It also asks for the label of the entity itself, and for the entity that it was merged into.
    """
    spoken = _spoken(languages)
    outgoing = _direction(f"{entity} ?claim ?other .", languages, limit=limit, inverse=0)
    incoming = _direction(f"?other ?claim {entity} .", languages, limit=limit, inverse=1)
    return f"""{PREFIXES}SELECT ?inverse ?property ?name ?other ?label ?own ?same WHERE {{
  {{ {outgoing}
    UNION
    {incoming}
    OPTIONAL {{ ?property rdfs:label ?name FILTER(LANG(?name) IN ({spoken})) }}
    OPTIONAL {{ ?other rdfs:label ?label FILTER(LANG(?label) IN ({spoken})) }}
  }} UNION {{ {entity} rdfs:label ?own FILTER(LANG(?own) IN ({spoken})) }}
  UNION {{ {entity} <{REDIRECT}> ?same }}
}}"""


def _direction(pattern: str, languages: Sequence[str], *, limit: int, inverse: int) -> str:
    """Return the part of the query for the triples of one direction, which match `pattern`."""
    machine_types = ", ".join(f"wikibase:{name}" for name in MACHINE_TYPES)
    return f"""{{ {{ SELECT ?property ?other WHERE {{
      {pattern}
      ?property wikibase:directClaim ?claim .
      OPTIONAL {{ ?property wikibase:propertyType ?type }}
      FILTER(!BOUND(?type) || ?type NOT IN ({machine_types}))
      FILTER(!isLiteral(?other) || LANG(?other) IN ({_spoken(languages)}))
    }} LIMIT {limit:d} }} BIND({inverse} AS ?inverse) }}"""


def label_query(entity: NamedNode, languages: Sequence[str]) -> str:
    """Return the query for an entity's own label, and for the entity that it was merged into."""
    spoken = _spoken(languages)
    return f"""{PREFIXES}SELECT ?own ?same WHERE {{
  {{ {entity} rdfs:label ?own FILTER(LANG(?own) IN ({spoken})) }}
  UNION {{ {entity} <{REDIRECT}> ?same }}
}}"""


def find_query(name: str, languages: Sequence[str]) -> str:
    """Return the query for the entities called `name`.

    Each result has a rank that says what matched: a label (0), an alias (1), a normalised name (2,
    see `normalise_label`), or a normalised name without its closing parenthesis (3).
    """
    names = [Literal(name, language=language) for language in languages]
    names.append(Literal(name))
    normal_name = normalise_label(name)
    names_by_rank = [
        ("rdfs:label", names),
        ("skos:altLabel", names),
        ("skos:hiddenLabel", [Literal(normal_name)]),
        ("skos:hiddenLabel", [Literal(without_parenthesis(normal_name))]),
    ]
    parts = []
    for rank, (predicate, terms) in enumerate(names_by_rank):
        values = " ".join(map(str, terms))
        parts.append(
            f"{{ VALUES ?name {{ {values} }} ?entity {predicate} ?name BIND({rank} AS ?rank) }}"
        )
    return (
        f"{PREFIXES}SELECT ?entity ?rank WHERE {{ {' UNION '.join(parts)} }} LIMIT {MAX_NAMESAKES}"
    )


def find_all_query(names: Sequence[str], languages: Sequence[str]) -> str:
    """Return the query for the entities with any of these names.

    Each result holds the name that matched, and the rank of `find_query` from 0 to 2.
    """
    terms: list[Literal] = []
    for name in names:
        terms += [Literal(name, language=language) for language in languages]
        terms.append(Literal(name))
    normal_names = [Literal(name) for name in sorted({normalise_label(name) for name in names})]
    terms_by_rank = [
        ("rdfs:label", terms),
        ("skos:altLabel", terms),
        ("skos:hiddenLabel", normal_names),
    ]
    parts = []
    for rank, (predicate, values) in enumerate(terms_by_rank):
        listed = " ".join(map(str, values))
        parts.append(
            f"{{ VALUES ?name {{ {listed} }} ?entity {predicate} ?name BIND({rank} AS ?rank) }}"
        )
    limit = MAX_NAMESAKES * len(names)
    return f"{PREFIXES}SELECT ?name ?entity ?rank WHERE {{ {' UNION '.join(parts)} }} LIMIT {limit}"


def labels_query(word: str, languages: Sequence[str], limit: int) -> str:
    """Return the query for labels that contain a word, in upper or lower case."""
    return f"""{PREFIXES}SELECT DISTINCT ?label WHERE {{
  ?entity rdfs:label ?label
  FILTER(LANG(?label) IN ({_spoken(languages)}))
  FILTER(CONTAINS(LCASE(STR(?label)), {Literal(word.lower())}))
}} LIMIT {limit:d}"""


def exists_query(entity: NamedNode) -> str:
    """Return the query for one statement about an entity, in either direction."""
    return (
        f"SELECT ?claim WHERE {{ {{ {entity} ?claim ?other }} UNION {{ ?other ?claim {entity} }} "
        f"}} LIMIT 1"
    )


def term_of(value: Mapping[str, Any] | None) -> Any:
    """Convert a term of a SPARQL result in JSON into a term of pyoxigraph.

    Return None for a missing value, and for a quoted triple, which cannot be written as text.
    """
    if value is None or value["type"] == "triple":
        return None
    if value["type"] == "bnode":
        return BlankNode(value["value"])
    if value["type"] == "uri":
        return NamedNode(value["value"])
    if value.get("datatype") is not None and "xml:lang" not in value:
        return Literal(value["value"], datatype=NamedNode(value["datatype"]))
    return Literal(value["value"], language=value.get("xml:lang"))


def columns(query: str) -> set[str]:
    """Return the names of the variables in the SELECT clause of one of our queries."""
    selection = query[query.index("SELECT") : query.index("WHERE")]
    return set(re.findall(r"\?(\w+)", selection))


def read_redirect(rows: Iterable[Row]) -> str | None:
    """Return the key of the entity that the queried one was merged into, if any."""
    iris = {row["same"].value for row in rows if hasattr(row["same"], "value")}
    keys = (key_of(iri) for iri in iris if _wikidata.fullmatch(iri))
    return min(keys, key=_natural_order, default=None)


def read_namesakes(rows: Iterable[Row]) -> list[str]:
    """Return the keys of the entities with the best rank, the lowest Q-id first.

    Entities with low Q-ids were created first, and are usually better known.
    """
    ranks: dict[str, int] = {}
    for row in rows:
        iri = row["entity"].value
        rank = int(row["rank"].value)
        # Properties have names too, but are not entities.
        is_property = _wikidata.fullmatch(iri) and not key_of(iri).startswith("Q")
        if not is_property:
            ranks[iri] = min(rank, ranks.get(iri, rank))
    best_rank = min(ranks.values(), default=0)
    keys = [key_of(iri) for iri, rank in ranks.items() if rank == best_rank]
    return sorted(keys, key=_natural_order)


def read_all_namesakes(names: Sequence[str], rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the keys of the entities with each of `names`, as `read_namesakes` orders them.

    Names without an entity are left out.
    """
    # Rank 2 compared normalised names, and ranks 0 and 1 the names themselves.
    rows_of_name: dict[str, list[Row]] = {}
    rows_of_normal_name: dict[str, list[Row]] = {}
    for row in rows:
        is_normalised = int(row["rank"].value) == NORMALISED_RANK
        by_name = rows_of_normal_name if is_normalised else rows_of_name
        by_name.setdefault(row["name"].value, []).append(row)

    keys: dict[str, list[str]] = {}
    for name in names:
        exact_rows = rows_of_name.get(name, [])
        normalised_rows = rows_of_normal_name.get(normalise_label(name), [])
        keys_of_name = read_namesakes([*exact_rows, *normalised_rows])
        if keys_of_name:
            keys[name] = keys_of_name
    return keys


def read_labels(rows: Iterable[Row]) -> list[str]:
    """Return the labels of the results."""
    return [one_line(row["label"].value) for row in rows]


def read_label(rows: Iterable[Row], languages: Sequence[str]) -> str | None:
    """Return the entity's label in the first of `languages` that has one, or None.

    It is written as in the triples of `read_ends`.
    """
    labels = {_ranked_label(row["own"], languages) for row in rows if row["own"] is not None}
    return min(labels)[1] if labels else None


def read_ends(rows: Iterable[Row], entity: NamedNode, languages: Sequence[str]) -> list[End]:
    """Return the triples of an entity, without duplicates and in a fixed order.

    Triples with the entity as subject come first. Within each direction, triples are sorted by
    property and then by label.
    """
    rows = list(rows)
    statements = _statements(rows)
    labels = _best_labels(rows, entity, languages)

    # Write each statement as a triple.
    sortable_ends = []
    for inverse, iri, other in statements:
        sortable_end = _sortable_end(inverse, iri, other, entity=entity.value, labels=labels)
        if sortable_end is not None:
            sortable_ends.append(sortable_end)

    # If several triples have the same text, keep the first.
    sortable_ends.sort(key=lambda pair: pair[0])
    ends: dict[str, End] = {}
    for _, end in sortable_ends:
        ends.setdefault(end.triple.text, end)
    return list(ends.values())


def _statements(rows: Iterable[Row]) -> list[tuple[bool, str, Any]]:
    """Return the statements in the rows as (inverse, property, other end), without duplicates.

    A row whose other end has no value, such as a quoted triple, gives no statement.
    """
    # A dictionary serves as an ordered set.
    statements: dict[tuple[bool, str, Any], None] = {}
    for row in rows:
        if row["property"] is not None and hasattr(row["other"], "value"):
            inverse = row["inverse"].value in ("1", "true")
            statements[inverse, row["property"].value, row["other"]] = None
    return list(statements)


def _best_labels(
    rows: Iterable[Row], entity: NamedNode, languages: Sequence[str]
) -> dict[str, str]:
    """Return the label of each IRI in the first of `languages` that has one."""
    ranked_labels: dict[str, set[tuple[int, str]]] = {}

    def note_label(iri: str, label: Any) -> None:
        if label is not None:
            ranked_labels.setdefault(iri, set()).add(_ranked_label(label, languages))

    for row in rows:
        note_label(entity.value, row["own"])
        if row["property"] is None:
            continue
        note_label(row["property"].value, row["name"])
        if hasattr(row["other"], "value") and not _is_literal(row["other"]):
            note_label(row["other"].value, row["label"])
    return {iri: min(labels)[1] for iri, labels in ranked_labels.items()}


def _sortable_end(
    inverse: bool, relation: str, other: Any, *, entity: str, labels: dict[str, str]
) -> tuple[Any, End] | None:
    """Return the sort key and the triple of a statement.

    Return None if the other end has no text, such as an entity without a label.
    """
    is_literal = _is_literal(other)
    if is_literal:
        other_text = readable(other)
    else:
        other_text = labels.get(other.value) or readable_iri(other.value)
    if not other_text:
        return None
    entity_text = labels.get(entity) or readable_iri(entity) or key_of(entity)
    relation_text = labels.get(relation) or readable_iri(relation) or key_of(relation)

    # The entity is the subject. In an inverse statement it is the object.
    entity_end = (entity_text, _id(entity))
    other_end = (other_text, "" if is_literal else _id(other.value))
    subject, subject_id = other_end if inverse else entity_end
    object_text, object_id = entity_end if inverse else other_end
    triple = Triple(
        subject=subject,
        relation=relation_text,
        object=object_text,
        subject_id=subject_id,
        object_id=object_id,
        literal=is_literal,
    )
    sort_key = (inverse, _natural_order(key_of(relation)), other_text, other.value)
    return sort_key, End.of(triple, inverse)


def _spoken(languages: Sequence[str]) -> str:
    """Return the accepted values of LANG() in a query: the languages, and "" for none."""
    return ", ".join(f'"{language}"' for language in (*languages, ""))


def _ranked_label(label: Any, languages: Sequence[str]) -> tuple[int, str]:
    """Return the rank of a label's language, and the label, for sorting.

    A label without one of the languages ranks last.
    """
    place = languages.index(label.language) if label.language in languages else len(languages)
    return place, one_line(label.value)


def _id(iri: str) -> str:
    """Return the id of an entity for a `Triple`. It is empty if the entity only has a label."""
    return "" if iri.startswith(NAMED) else key_of(iri)


def _natural_order(key: str) -> tuple[Any, ...]:
    """Return the sort key of an entity's key, so that Q9 comes before Q10."""
    if _identifier.fullmatch(key):
        return 0, int(key[1:]), ""
    return 1, 0, key


def _is_literal(term: Any) -> bool:
    return hasattr(term, "datatype")
