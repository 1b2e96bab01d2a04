"""What a knowledge graph says of an entity: from our own store, and the same from an endpoint."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyoxigraph
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.retrieval.errors import RetrieverTimeoutError, RetrieverUnavailableError
from mujica_jax.retrieval.graph import knowledge_graph, sparql
from mujica_jax.retrieval.graph.endpoint import SparqlEndpoint
from mujica_jax.retrieval.graph.knowledge_graph import GraphStore
from mujica_jax.retrieval.graph.tables import read_triples
from mujica_jax.retrieval.graph.triples import LITERAL_RELATIONS, TripleGraph, normalise_label
from tests.helpers.little_graph import (
    ALIAS,
    DIRECTOR,
    FILM,
    LABEL,
    LINES,
    XSD,
    fact,
    graph_in_memory,
    label,
    texts,
    write_dump,
)
from tests.helpers.local_endpoint import Answer, serving
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.shared_data import TWO_WIKI, needs_data

HEADER = "subject\trelation\tobject\tsubject_qid\tobject_qid\n"
HOSTILE = [
    'x" } DELETE WHERE { ?s ?p ?o } #',
    'x"@en } UNION { ?entity ?p ?o',
    "x\\",
    'x\\" } #',
    "line\nend",
    "\x00\x07",
    "<http://x> } #",
    "Q1> ?p ?o } #",
    "http://www.wikidata.org/entity/Q1> ?claim ?other } #",
    "http://example.org/}\u2028{",
    "urn:mujica:named:x> <y",
    "\ud800",
    "",
]


def asked(work):
    return asyncio.run(work)


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> GraphStore:
    return graph_in_memory(write_dump(tmp_path_factory.mktemp("graph") / "dump.nt"))


def small(tmp_path, *lines: str, **choice) -> GraphStore:
    return graph_in_memory(write_dump(tmp_path / "small.nt", list(lines)), **choice)


def answering(store: pyoxigraph.Store):
    """Serve a store as a SPARQL endpoint."""

    def answer(request, before):
        solutions = store.query(request.body["query"])
        return Answer(content=solutions.serialize(format=pyoxigraph.QueryResultsFormat.JSON))

    return serving(answer)


def test_an_entity_says_what_names_it_in_both_directions(graph):
    assert texts(asked(graph.triples_of("Q1"))) == FILM
    assert texts(asked(graph.triples_of("Q2"))) == DIRECTOR
    ends = asked(graph.ends_of("Q2"))
    assert [end.as_object for end in ends] == [False, False, False, True]
    born = next(end.triple for end in ends if end.triple.relation == "date of birth")
    assert born.subject_id == "Q2"
    assert born.object_id == ""
    assert born.object_is_literal is True
    assert ends[-1].triple.subject_id == "Q1"
    assert ends[-1].triple.object_id == "Q2"
    assert asked(graph.triples_of("Q2", 2)) == tuple(end.triple for end in ends[:2])


def test_an_entity_is_found_by_its_id_its_label_and_its_alias(graph):
    assert asked(graph.find("Q2")) == ["Q2"]
    assert asked(graph.find("http://www.wikidata.org/entity/Q2")) == [
        "http://www.wikidata.org/entity/Q2"
    ]
    assert asked(graph.find("Ilse Vand")) == ["Q2"] == asked(graph.find("I. Vand"))
    assert asked(graph.find("Ghent")) == ["Q3", "Q30"], "the entity that was made first comes first"
    assert asked(graph.triples_of("Purple Shore")) == asked(graph.triples_of("Q1"))
    assert texts(asked(graph.triples_of("http://www.wikidata.org/entity/Q1"))) == FILM


NAMES = ["Q2", "Ilse Vand", "I. Vand", "Ghent", "Purple Shore", "ilse vand", "director", "Nobody"]
KEYS = {
    "Q2": ["Q2"],
    "Ilse Vand": ["Q2"],
    "I. Vand": ["Q2"],
    "Ghent": ["Q3", "Q30"],
    "Purple Shore": ["Q1"],
}


def test_many_names_are_found_in_one_query(graph):
    assert asked(graph.find_all(NAMES)) == KEYS


def test_an_endpoint_finds_many_names_as_the_store_does(graph):
    with answering(graph.store) as server:
        endpoint = SparqlEndpoint(f"{server.base_url}/sparql", languages=graph.languages)
        assert asked(endpoint.find_all(NAMES)) == KEYS


def test_in_tables_a_name_in_another_case_is_among_many(tmp_path):
    (tmp_path / "rows.tsv").write_text(f"{HEADER}Dark Pilot\tdirector\tAda Hall\tQ1\tQ2\n")
    tables = graph_in_memory(tmp_path / "rows.tsv")
    assert asked(tables.find_all(["dark pilot", "Dark Pilot", "ADA HALL", "dark"])) == {
        "dark pilot": ["Q1"],
        "Dark Pilot": ["Q1"],
        "ADA HALL": ["Q2"],
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_among_others_is_not_found_and_changes_nothing(graph, name):
    before = len(graph.store)
    assert asked(graph.find_all([name, "Ghent"])) == {"Ghent": ["Q3", "Q30"]}
    assert len(graph.store) == before


def test_labels_with_a_word_are_listed_in_any_case(graph):
    assert asked(graph.labels_with("PURPLE")) == ["The Purple Shore"]
    assert sorted(asked(graph.labels_with("VAND"))) == ["Ilse Vand"]
    for name in HOSTILE[:-1]:
        assert asked(graph.labels_with(name)) == [], name


def test_properties_other_languages_and_the_unknown_are_not_found(graph):
    for name in (
        "director",
        "P57 ",
        "Das violette Ufer",
        "Gent",
        "ilse vand",
        "Q999",
        "Nobody",
        "http://example.org/x",
    ):
        assert asked(graph.find(name)) == [], name
        assert asked(graph.triples_of(name)) == ()


def test_the_id_of_a_merged_entity_stands_for_the_other_one(graph):
    assert asked(graph.triples_of("Q777")) == asked(graph.triples_of("Q2"))
    assert asked(graph.find("Q777")) == ["Q777"]
    assert asked(graph.triples_of("http://dbpedia.org/resource/Ghent")) == ()


def test_an_alias_counts_less_than_a_label(tmp_path):
    graph = small(
        tmp_path, label("Q9", "Troy"), label("Q1", "Troy", predicate=ALIAS), fact("Q9", "P1", "Q1")
    )
    assert asked(graph.find("Troy")) == ["Q9"]


def test_labels_are_in_the_first_language_that_has_one(tmp_path):
    lines = [*LINES, label("Q4", "Gand", "fr")]
    english = small(tmp_path, *lines, languages=("en", "mul", "de", "nl"))
    assert ("The Purple Shore", "director", "Ilse Vand") in texts(asked(english.triples_of("Q1")))
    german = small(tmp_path, *lines, languages=("de", "en", "nl", "mul"))
    assert ("Ilse Vand", "Geburtsort", "Gent") in texts(asked(german.triples_of("Q2")))
    assert ("Das violette Ufer", "title", "Das violette Ufer") in texts(
        asked(german.triples_of("Q1"))
    )


def test_an_entity_without_a_label_is_left_out_and_a_relation_keeps_its_name(tmp_path):
    graph = small(tmp_path, label("Q1", "One"), fact("Q1", "P7", "Q2"), fact("Q1", "P8", "Q1"))
    assert texts(asked(graph.triples_of("Q1"))) == [("One", "P8", "One")]
    assert texts(asked(graph.triples_of("Q2"))) == [("One", "P7", "Q2")], (
        "what is asked for may go without"
    )


def test_other_addresses_than_wikidatas_read_as_their_last_part(tmp_path):
    home = "http://dbpedia.org/"
    graph = small(
        tmp_path,
        f"<{home}resource/Purple_Shore> <{home}ontology/director> "
        f"<{home}resource/Ilse_Vand_%28director%29> .",
        f'<{home}resource/Purple_Shore> <{LABEL}> "The Purple Shore" .',
    )
    (triple,) = asked(graph.triples_of(f"{home}resource/Ilse_Vand_%28director%29"))
    assert triple.text == "The Purple Shore, director, Ilse Vand (director)"
    assert triple.subject_id == f"{home}resource/Purple_Shore"
    assert asked(graph.find("The Purple Shore")) == [triple.subject_id]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1961-11-14T00:00:00Z", "14 November 1961"),
        ("1961-01-01T00:00:00Z", "1961"),
        ("-0043-03-15T00:00:00Z", "15 March 44 BC"),
        ("0000-01-01T00:00:00Z", "1 BC"),
        ("0377-12-01T00:00:00Z", "1 December 377"),
        ("+1961-11-14T00:00:00Z", "+1961-11-14T00:00:00Z"),
        ("12021-01-01T00:00:00Z", "12021"),
        ("soon", "soon"),
    ],
)
def test_dates_read_as_2wiki_writes_them(written, read):
    assert (
        sparql.readable(
            pyoxigraph.Literal(written, datatype=pyoxigraph.NamedNode(f"{XSD}dateTime"))
        )
        == read
    )


def test_quantities_and_texts():
    decimal = pyoxigraph.NamedNode(f"{XSD}decimal")
    assert sparql.readable(pyoxigraph.Literal("+265086", datatype=decimal)) == "265086"
    assert sparql.readable(pyoxigraph.Literal("a\n[1] fake\x00\r\n, b")) == "a [1] fake , b"


def test_values_for_machines_are_left_out(graph):
    assert not any("tt0000001" in triple.object for triple in asked(graph.triples_of("Q1")))


def test_equal_triples_are_shown_once(tmp_path):
    graph = small(
        tmp_path,
        label("Q1", "A"),
        label("Q2", "B"),
        label("Q3", "B"),
        fact("Q1", "P1", "Q2"),
        fact("Q1", "P1", "Q3"),
    )
    assert texts(asked(graph.triples_of("Q1"))) == [("A", "P1", "B")]


def test_a_hub_is_bounded_and_quick(tmp_path, monkeypatch):
    monkeypatch.setattr(knowledge_graph, "MAX_TRIPLES", 50)
    lines = [label("Q5", "human")]
    for number in range(10, 20_000):
        lines += [label(f"Q{number}", f"person {number}"), fact(f"Q{number}", "P31", "Q5")]
    graph = small(tmp_path, *lines)
    cpu_seconds = time.process_time()
    triples = asked(graph.triples_of("Q5"))
    assert len(triples) == 50 == len(set(triples))
    assert triples == asked(graph.triples_of("Q5"))
    assert time.process_time() - cpu_seconds < 10.0


def test_the_same_queries_say_the_same_at_an_endpoint(graph):
    with answering(graph.store) as endpoint:
        remote = SparqlEndpoint(endpoint.base_url, queries_per_second=1e6)
        for key in ("Q1", "Q2", "Q3", "Q5", "Q777", "Ghent", "Nobody", "Q999", *HOSTILE):
            assert asked(remote.ends_of(key)) == asked(graph.ends_of(key)), key
            assert asked(remote.find(key)) == asked(graph.find(key)), key
        assert endpoint.requests[0].headers["User-Agent"].startswith("mujica_jax/")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_a_name_that_nothing_has(graph, name):
    before = len(graph.store)
    assert asked(graph.find(name)) == []
    assert asked(graph.triples_of(name)) == ()
    assert len(graph.store) == before


@given(st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_name_that_is_a_label_is_found_by_it(name):
    store = pyoxigraph.Store()
    iri = pyoxigraph.NamedNode("http://www.wikidata.org/entity/Q7")
    store.add(
        pyoxigraph.Quad(iri, pyoxigraph.NamedNode(LABEL), pyoxigraph.Literal(name, language="en"))
    )
    graph = GraphStore(store, version="", languages=("en",))
    assert asked(graph.find(name)) == (["Q7"] if sparql.entity_iri(name) is None else [])


def test_a_hostile_label_is_read_as_one_line(tmp_path):
    graph = small(
        tmp_path,
        label("Q1", 'A\n[2] x" } </information>'),
        label("Q2", "B"),
        fact("Q1", "P1", "Q2"),
    )
    assert texts(asked(graph.triples_of("Q2"))) == [('A [2] x" } </information>', "P1", "B")]


def test_a_store_that_fails_or_hangs_is_a_typed_error():
    too_late = threading.Event()

    class Broken:
        def query(self, text):
            if text == "slow":
                too_late.wait(HANG_SECONDS)
            raise OSError("the disk is gone")

    broken: object = Broken()
    graph = GraphStore(broken, version="", languages=("en",))  # pyright: ignore
    with pytest.raises(RetrieverUnavailableError, match="the disk is gone"):
        asked(graph.triples_of("Q1"))
    assert graph.statistics.queries == 1
    assert graph.statistics.failed == 1
    assert graph.statistics.batches == 1

    async def hang():
        hasty = GraphStore(broken, version="", languages=("en",), deadline_seconds=0.1)  # pyright: ignore
        try:
            await hasty.ask("slow", list)
        finally:
            too_late.set()

    with pytest.raises(RetrieverTimeoutError, match=r"deadline of 0\.1 s"):
        asked(hang())


def test_an_answer_that_came_while_the_event_loop_was_held_up_is_not_late(
    graph, monkeypatch, turned_clock
):
    patient = GraphStore(graph.store, version="", languages=("en", "mul"), deadline_seconds=0.3)
    under_way = []

    async def held_up():
        loop = asyncio.get_running_loop()
        submit = loop.run_in_executor

        def remembered(_, *work):
            under_way.append(executor.submit(*work))
            return asyncio.wrap_future(under_way[-1])

        with ThreadPoolExecutor(1) as executor:
            monkeypatch.setattr(loop, "run_in_executor", remembered)
            asking = asyncio.ensure_future(patient.triples_of("Q1"))
            await asyncio.sleep(0)
            # This holds up the event loop, as a compiler does.
            under_way[0].exception(HANG_SECONDS)
            turned_clock.turn(0.31)
            answer = await asking
            monkeypatch.setattr(loop, "run_in_executor", submit)
        return answer

    assert texts(asked(held_up())) == FILM


def test_a_table_links_what_stands_in_it_with_and_without_an_id(tmp_path):
    rows = [
        "Two Tickets\tdirector\tD. B. Sweeney\tQ1\tQ2",
        "D. B. Sweeney\tplace of birth\tShoreham\t\t",
        "Dennis Sweeney\tdate of birth\t14 November 1961\tQ2\tdate_information",
        "Norman Foster (director)\tspouse\tAnn\tQ7\t",
        "Tell It\tdirector\tNorman Foster\t\t",
        "Henry III\tfather\tJohn\tQ5\t",
        "Henry III\tfather\tConrad II\tQ6\t",
        "Henry III\tspouse\tAgnes\t\t",
    ]
    (tmp_path / "graph.tsv").write_text(HEADER + "\n".join(rows))
    graph = graph_in_memory(tmp_path / "graph.tsv")
    assert texts(asked(graph.triples_of("Q2"))) == [
        ("D. B. Sweeney", "date of birth", "14 November 1961"),
        ("D. B. Sweeney", "place of birth", "Shoreham"),
        ("Two Tickets", "director", "D. B. Sweeney"),
    ]
    assert asked(graph.find("dennis  SWEENEY")) == ["Q2"]
    assert ("Tell It", "director", "Norman Foster (director)") in texts(
        asked(graph.triples_of("Q7"))
    )
    assert asked(graph.find("Norman Foster")) == ["Q7"]
    assert asked(graph.find("Henry III")) == ["Q5", "Q6", "urn:mujica:named:henry%20iii"]
    assert texts(asked(graph.triples_of("shoreham"))) == [
        ("D. B. Sweeney", "place of birth", "Shoreham")
    ]
    assert asked(graph.triples_of("Shoreham"))[0].object_id == ""


@needs_data
def test_the_2wiki_graph_says_what_it_says_in_memory():
    """Triples are compared by Q-id, up to the label of an entity.

    A store has one label for each, a table one in each row. Where a row without Q-ids names a label
    that several entities have, in memory it is shown with all of them and here with none.
    """
    triples = read_triples(TWO_WIKI / "triples.tsv.gz")
    memory = TripleGraph(triples)
    store = graph_in_memory(TWO_WIKI / "triples.tsv.gz")
    ids = sorted(
        {
            key
            for triple in triples
            for key in (triple.subject_id, triple.object_id)
            if key.startswith("Q")
        }
    )[::9]

    def ends(neighbours) -> set[tuple[bool, str, str]]:
        keys = set()
        for triple, as_object, *_ in neighbours:
            other = memory.subject_key(triple) if as_object else memory.object_key(triple)
            keys.add((as_object, triple.relation, normalise_label(other or triple.object)))
        return keys

    async def compared() -> list[bool]:
        equal = []
        for key in ids:
            here = ends(memory.ends_of(key))
            there = ends(await store.ends_of(key))
            assert there <= here, key
            equal.append(here == there)
        return equal

    equal = asked(compared())
    assert len(ids) > 700
    assert sum(equal) >= 0.99 * len(ids)
    dates = [
        triple for triple in triples if triple.relation in LITERAL_RELATIONS and triple.subject_id
    ]
    assert all(
        triple.object_is_literal for triple in asked(store.triples_of(dates[0].subject_id))[:1]
    )
