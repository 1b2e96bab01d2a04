"""A little knowledge graph in the form of a Wikidata dump, with the oddities of real dumps."""

import gzip
from pathlib import Path

import pyoxigraph

from mujica_jax.retrieval.graph.files import GraphSpec
from mujica_jax.retrieval.graph.index import Loaded, load
from mujica_jax.retrieval.graph.knowledge_graph import GraphStore

WD = "http://www.wikidata.org/entity/"
WDT = "http://www.wikidata.org/prop/direct/"
LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
ALIAS = "http://www.w3.org/2004/02/skos/core#altLabel"
XSD = "http://www.w3.org/2001/XMLSchema#"
SAME_AS = "http://www.w3.org/2002/07/owl#sameAs"
WIKIBASE = "http://wikiba.se/ontology#"


def label(entity: str, text: str, language: str = "en", predicate: str = LABEL) -> str:
    return f"<{WD}{entity}> <{predicate}> {pyoxigraph.Literal(text, language=language)} ."


def fact(subject: str, relation: str, value: str) -> str:
    """Return a triple as N-Triples writes it. `value` is a Q-id or a term in that notation."""
    term = f"<{WD}{value}>" if value.startswith("Q") else value
    return f"<{WD}{subject}> <{WDT}{relation}> {term} ."


def date(text: str) -> str:
    return f'"{text}"^^<{XSD}dateTime>'


LINES = [
    label("Q1", "The Purple Shore"),
    label("Q1", "Das violette Ufer", "de"),
    label("Q1", "Purple Shore", predicate=ALIAS),
    label("Q1", "The Purple Shore", predicate="http://schema.org/name"),
    label("Q2", "Ilse Vand", "mul"),
    label("Q2", "I. Vand", predicate=ALIAS),
    label("Q3", "Ghent"),
    label("Q30", "Ghent"),
    label("Q4", "Gent", "nl"),
    label("Q5", "human"),
    label("P57", "director"),
    label("P19", "place of birth"),
    label("P19", "Geburtsort", "de"),
    label("P569", "date of birth"),
    label("P31", "instance of"),
    label("P345", "database ID"),
    label("P1082", "population"),
    label("P1476", "title"),
    f"<{WD}P345> <{WIKIBASE}propertyType> <{WIKIBASE}ExternalId> .",
    f"<{WD}P57> <{WIKIBASE}propertyType> <{WIKIBASE}WikibaseItem> .",
    fact("Q1", "P57", "Q2"),
    fact("Q1", "P345", '"tt0000001"'),
    fact("Q1", "P1476", '"Das violette Ufer"@de'),
    fact("Q1", "P1476", '"The Purple Shore, a film"@en'),
    fact("Q2", "P19", "Q3"),
    fact("Q2", "P19", "Q4"),
    fact("Q2", "P569", date("1961-11-14T00:00:00Z")),
    fact("Q2", "P31", "Q5"),
    fact("Q2", "P22", "<http://www.wikidata.org/.well-known/genid/1234abcd>"),
    fact("Q2", "P25", "_:b0"),
    fact("Q3", "P1082", f'"+265086"^^<{XSD}decimal>'),
    f"<{WD}Q777> <{SAME_AS}> <{WD}Q2> .",
    f"<{WD}Q3> <{SAME_AS}> <http://dbpedia.org/resource/Ghent> .",
    f"<https://en.wikipedia.org/wiki/Ghent> <http://schema.org/about> <{WD}Q3> .",
    f"<{WD}Q2> <http://www.w3.org/1999/02/22-rdf-syntax-ns#type> <{WIKIBASE}Item> .",
    f"<{WD}Q2> <http://www.wikidata.org/prop/direct-normalized/P345> <https://www.imdb.com/nm1> .",
]
FILM = [
    ("The Purple Shore", "director", "Ilse Vand"),
    ("The Purple Shore", "title", "The Purple Shore, a film"),
]
DIRECTOR = [
    ("Ilse Vand", "place of birth", "Ghent"),
    ("Ilse Vand", "instance of", "human"),
    ("Ilse Vand", "date of birth", "14 November 1961"),
    ("The Purple Shore", "director", "Ilse Vand"),
]


def write_dump(path: Path, lines: list[str] = LINES) -> Path:
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def graph_in_memory(*files: str | Path, **spec) -> GraphStore:
    """Return what an index of these files would hold."""
    store = pyoxigraph.Store()
    made_of = GraphSpec(files=tuple(map(str, files)), **spec)
    for _ in load(store, made_of, Loaded()):
        pass
    return GraphStore(store, version="", languages=made_of.languages)


def texts(triples) -> list[tuple[str, str, str]]:
    return [(triple.subject, triple.relation, triple.object) for triple in triples]
