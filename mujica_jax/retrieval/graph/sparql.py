"""What a knowledge graph is asked in SPARQL, and what the rows say: the same texts for our own
store and for any endpoint.

The data are in Wikidata's vocabulary: a property `wikibase:directClaim` says which predicate states
it, entities and properties have `rdfs:label` and `skos:altLabel`. Our store holds what files of
other shapes say in these terms too (`files.py`).

What a triple reads as:

- a label is the one in the first of `languages` that has any, then one without a language;
- an entity without such a label (a Q-id alone says nothing to a model) makes no triple; another IRI
  reads as its last part;
- dates, numbers, coordinates and other values are printed as `values.py` says;
- texts in other languages, unknown values, and properties whose values are for machines
  (MACHINE_TYPES) are left out.

Names and keys come from users and models. They enter a query as terms that pyoxigraph has checked
and written, never as text.
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
# as `normalise_label` writes it; of files that we named ourselves
SEARCHED_LABEL = "http://www.w3.org/2004/02/skos/core#hiddenLabel"
DIRECT_CLAIM = "http://wikiba.se/ontology#directClaim"
# from the id of an entity that was merged into another one
REDIRECT = "http://www.w3.org/2002/07/owl#sameAs"
PROPERTY_TYPE = "http://wikiba.se/ontology#propertyType"
NAMED = "urn:mujica:named:"  # an entity of which a file says nothing but its label
RELATION = "urn:mujica:relation:"
MACHINE_TYPES = (
    "ExternalId", "Url", "CommonsMedia", "GeoShape", "TabularData", "Math", "MusicalNotation",
    "WikibaseSense", "WikibaseLexeme", "WikibaseForm", "EntitySchema",
)  # fmt: skip
LANGUAGES = ("en", "mul")  # mul: Wikidata's for names that are the same in every language
# Under which Wikidata writes labels of a language too.
LANGUAGE_VARIANTS = {"zh": ("zh-hans", "zh-cn", "zh-hant", "zh-tw", "zh-hk")}
MAX_NAMESAKES = 1000  # entities of one name that are looked at
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


def languages_for(language: str, available: Sequence[str]) -> tuple[str, ...]:
    """Return the order in which labels are looked for when a question is in `language`.

    That language comes first, then names that are the same in every language, then English, then
    what else the graph has (`available`).
    """
    variants = LANGUAGE_VARIANTS.get(language, ())
    first = LANGUAGES if language == "en" else (language, *variants, "mul", "en")
    return tuple(dict.fromkeys((*first, *available)))


def triples_query(entity: NamedNode, languages: Sequence[str], most: int) -> str:
    """At most `most` triples in each direction with their labels, the entity's own label, and who
    took over from it."""
    spoken = _spoken(languages)
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


def label_query(entity: NamedNode, languages: Sequence[str]) -> str:
    """Return the query for an entity's own label, and for the entity that it was merged into."""
    spoken = _spoken(languages)
    return f"""{PREFIXES}SELECT ?own ?same WHERE {{
  {{ {entity} rdfs:label ?own FILTER(LANG(?own) IN ({spoken})) }}
  UNION {{ {entity} <{REDIRECT}> ?same }}
}}"""


def find_query(name: str, languages: Sequence[str]) -> str:
    """Entities called `name`: by label (0), by alias (1), by the label in lower case (2), by that
    without its closing parenthesis (3).
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
        f"{{ VALUES ?name {{ {' '.join(map(str, terms))} }} ?entity {predicate} ?name BIND({rank} "
        f"AS ?rank) }}"
        for rank, (predicate, terms) in enumerate(ways)
    ]
    return (
        f"{PREFIXES}SELECT ?entity ?rank WHERE {{ {' UNION '.join(parts)} }} LIMIT {MAX_NAMESAKES}"
    )


def exists_query(entity: NamedNode) -> str:
    return (
        f"SELECT ?claim WHERE {{ {{ {entity} ?claim ?other }} UNION {{ ?other ?claim {entity} }} "
        f"}} LIMIT 1"
    )


def term_of(said: Mapping[str, Any] | None) -> Any:
    """Return a term of a SPARQL result in JSON as pyoxigraph has it.

    The result is None for what is not there, and for a quoted triple: no text can be made of it.
    """
    if said is None or said["type"] == "triple":
        return None
    if said["type"] == "bnode":
        return BlankNode(said["value"])
    if said["type"] == "uri":
        return NamedNode(said["value"])
    if said.get("datatype") is not None and "xml:lang" not in said:
        return Literal(said["value"], datatype=NamedNode(said["datatype"]))
    return Literal(said["value"], language=said.get("xml:lang"))


def columns(query: str) -> set[str]:
    """The variables that one of our queries asks for."""
    return set(re.findall(r"\?(\w+)", query[query.index("SELECT") : query.index("WHERE")]))


def read_redirect(rows: Iterable[Row]) -> str | None:
    """The key of the entity that took over from the one that was asked for, if any."""
    found = {row["same"].value for row in rows if hasattr(row["same"], "value")}
    return min(
        (key_of(iri) for iri in found if _wikidata.fullmatch(iri)), key=_natural, default=None
    )


def read_namesakes(rows: Iterable[Row]) -> list[str]:
    """Keys of the entities that are called best, the lowest Q-id first: the entities that were made
    first are the better known ones.
    """
    ranks: dict[str, int] = {}
    for row in rows:
        iri, rank = row["entity"].value, int(row["rank"].value)
        # Properties have names too, and are no entities.
        if not _wikidata.fullmatch(iri) or key_of(iri).startswith("Q"):
            ranks[iri] = min(rank, ranks.get(iri, rank))
    best = min(ranks.values(), default=0)
    return sorted((key_of(iri) for iri, rank in ranks.items() if rank == best), key=_natural)


def read_label(rows: Iterable[Row], languages: Sequence[str]) -> str | None:
    """Return the entity's label in the first of `languages` that has one, as `read_ends` writes
    it."""
    labels = {_ranked_label(row["own"], languages) for row in rows if row["own"] is not None}
    return min(labels)[1] if labels else None


def read_ends(rows: Iterable[Row], entity: NamedNode, languages: Sequence[str]) -> list[End]:
    """Triples in a fixed order, no two alike: as subject before as object, by property, by
    label."""
    labels: dict[str, set[tuple[int, str]]] = {}
    found: dict[tuple[bool, str, Any], None] = {}

    def note(iri: str, label: Any) -> None:
        if label is not None:
            labels.setdefault(iri, set()).add(_ranked_label(label, languages))

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
    ends = [
        end
        for inverse, iri, other in found
        if (end := _end(inverse, iri, other, entity.value, best))
    ]
    ends.sort(key=lambda pair: pair[0])
    unlike: dict[str, End] = {}
    for _, end in ends:
        unlike.setdefault(end.triple.text, end)
    return list(unlike.values())


def _end(
    inverse: bool, relation: str, other: Any, entity: str, labels: dict[str, str]
) -> tuple[Any, End] | None:
    """The triple with what it is sorted by; None where it cannot be read."""
    literal = _is_literal(other)
    text = readable(other) if literal else labels.get(other.value) or readable_iri(other.value)
    if not text:
        return None
    own = labels.get(entity) or readable_iri(entity) or key_of(entity)
    name = labels.get(relation) or readable_iri(relation) or key_of(relation)
    ends = [(own, _id(entity)), (text, "" if literal else _id(other.value))]
    (subject, key), (found, found_key) = reversed(ends) if inverse else ends
    triple = Triple(
        subject=subject,
        relation=name,
        object=found,
        subject_id=key,
        object_id=found_key,
        literal=literal,
    )
    return (inverse, _natural(key_of(relation)), text, other.value), End.of(triple, inverse)


def _spoken(languages: Sequence[str]) -> str:
    """What LANG() may be: one of the languages, or none."""
    return ", ".join(f'"{language}"' for language in (*languages, ""))


def _ranked_label(label: Any, languages: Sequence[str]) -> tuple[int, str]:
    """Return a label that sorts by the place of its language. A label without a known language
    sorts last."""
    place = languages.index(label.language) if label.language in languages else len(languages)
    return place, one_line(label.value)


def _id(iri: str) -> str:
    """As `Triple` has it: empty for an entity that has a label alone."""
    return "" if iri.startswith(NAMED) else key_of(iri)


def _natural(key: str) -> tuple[Any, ...]:
    """Q9 before Q10."""
    return (0, int(key[1:]), "") if _identifier.fullmatch(key) else (1, 0, key)


def _is_literal(term: Any) -> bool:
    return hasattr(term, "datatype")
