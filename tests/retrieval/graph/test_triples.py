import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph.tables import read_triples
from mujica_jax.retrieval.graph.triples import Triple, TripleGraph
from tests.helpers.shared_data import TWO_WIKI, needs_data

HEADER = "subject\trelation\tobject\tsubject_qid\tobject_qid\n"


def triple(
    subject: str, relation: str, value: str, subject_id: str = "", object_id: str = ""
) -> Triple:
    return Triple(
        subject=subject, relation=relation, object=value, subject_id=subject_id, object_id=object_id
    )


TICKETS = triple("Two Tickets to Paradise", "director", "D. B. Sweeney", "Q1", "Q2")
BORN = triple("D. B. Sweeney", "date of birth", "November 14, 1961", "Q2", "date_information")
PLAYED = triple("D. B. Sweeney", "place of birth", "Shoreham")  # the same man without his Q-id
FILMS = [
    TICKETS,
    BORN,
    PLAYED,
    triple("Tell It to the Judge", "director", "Norman Foster"),
    triple("Norman Foster (director)", "date of birth", "December 13, 1903"),
    triple("Henry III", "father", "Conrad II", "Q3", "Q4"),
    triple("Henry III", "father", "John", "Q5", "Q6"),
    triple("Priest (2011 film)", "director", "Scott Stewart"),
    triple("Priest (1994 film)", "director", "Antonia Bird"),
]


@pytest.fixture(scope="module")
def graph() -> TripleGraph:
    return TripleGraph(FILMS)


def triples_of(graph: TripleGraph, key: str, limit: int | None = None) -> list[Triple]:
    return [end.triple for end in graph.ends_of(key, limit)]


def test_triples_come_in_both_directions_subjects_first(graph):
    assert triples_of(graph, "Q2") == [BORN, PLAYED, TICKETS]
    assert graph.ends_of("Q2") == [
        (BORN, False, "Q2", None),
        (PLAYED, False, "Q2", "Shoreham"),
        (TICKETS, True, "Q1", "Q2"),
    ]


def test_a_limit_cuts_the_same_order(graph):
    assert triples_of(graph, "Q2", limit=2) == triples_of(graph, "Q2")[:2]
    assert triples_of(graph, "Q2", limit=0) == []


def test_an_id_finds_rows_without_ids_that_name_its_label(graph):
    assert PLAYED in triples_of(graph, "Q2")
    assert graph.subject_key(PLAYED) == "Q2"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Q1", "Q1"),
        ("Two Tickets to Paradise", "Q1"),
        ("two  tickets TO paradise", "Q1"),
        ("Two Tickets To Paradise (Film)", "Q1"),
        ("Norman Foster", "Norman Foster"),
        ("norman foster (DIRECTOR)", "Norman Foster (director)"),
        ("Shoreham", "Shoreham"),
        ("November 14, 1961", None),
        ("Nobody", None),
    ],
)
def test_find(graph, name, key):
    assert graph.find(name) == key


def test_a_label_links_to_itself_with_a_parenthesis_but_two_parentheses_do_not_link(graph):
    assert (
        len(triples_of(graph, "Norman Foster"))
        == len(triples_of(graph, "Norman Foster (director)"))
        == 2
    )
    assert [fact.object for fact in triples_of(graph, "Priest (2011 film)")] == ["Scott Stewart"]
    assert [fact.object for fact in triples_of(graph, "Priest")] == [
        "Scott Stewart",
        "Antonia Bird",
    ]


def test_a_label_of_two_entities_is_its_own_key_and_finds_both(graph):
    assert graph.find("Henry III") == "Henry III"
    assert {fact.object for fact in triples_of(graph, "Henry III")} == {"Conrad II", "John"}
    assert [fact.object for fact in triples_of(graph, "Q3")] == ["Conrad II"]


def test_dates_are_no_entities(graph):
    assert BORN.object_is_literal
    assert graph.object_key(BORN) is None
    assert graph.object_key(TICKETS) == "Q2"
    assert triples_of(graph, "November 14, 1961") == []


def test_equal_triples_are_shown_once():
    twice = TripleGraph(
        [
            triple("A", "father", "B"),
            triple("A", "father", "B", "Q1", "Q2"),
            triple("A", "father", "A"),
        ]
    )
    assert [fact.text for fact in triples_of(twice, "A")] == ["A, father, B", "A, father, A"]


def test_reading_and_its_refusals(tmp_path):
    path = tmp_path / "triples.tsv.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(
            HEADER
            + " Agatha\tspouse\tSamuel of Bulgaria\tQ1\tQ2\n\nTaxi!\tdirector\tRoy Del Ruth\t\t\n"
        )
    assert read_triples(path) == [
        triple("Agatha", "spouse", "Samuel of Bulgaria", "Q1", "Q2"),
        triple("Taxi!", "director", "Roy Del Ruth"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\n", "line 1: the header is"),
        (
            HEADER + "A\tfather\tB\tQ1\tQ2\nA\tfather\tB\n",
            "line 3: the line has 3 columns instead of 5",
        ),
        (HEADER + "A\t\tB\tQ1\tQ2\n", "line 2: subject, relation and object must not be empty"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "triples.tsv"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"triples\.tsv, {message}"):
        read_triples(path)


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    path = tmp_path / "triples.tsv"
    path.write_text("\ufeff" + HEADER + "A\tr\tB\tQ1\tQ2\n", encoding="utf-8")
    assert read_triples(path) == [triple("A", "r", "B", "Q1", "Q2")]


def test_a_missing_file_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_triples(tmp_path / "triples.tsv")


NAMES = st.sampled_from(["Ann", "ann", "Ann (actor)", "Bob", "Bob (film)", "Cid"])
IDS = st.sampled_from(["", "", "Q1", "Q2"])


@given(
    st.lists(
        st.builds(triple, NAMES, st.sampled_from(["father", "date of birth"]), NAMES, IDS, IDS),
        max_size=8,
    )
)
def test_every_triple_is_found_from_both_of_its_ends(triples):
    graph = TripleGraph(triples)
    for expected in triples:
        keys = [graph.subject_key(expected), expected.subject, expected.subject_id]
        if (object_key := graph.object_key(expected)) is not None:
            keys += [object_key, expected.object, expected.object_id]
        for key in filter(None, keys):
            assert expected.text in {shown.text for shown in triples_of(graph, key)}
            assert graph.find(key) is not None


@needs_data
def test_the_2wiki_graph():
    triples = read_triples(TWO_WIKI / "triples.tsv.gz")
    graph = TripleGraph(triples)
    assert len(graph.triples) == len(triples) == 9951
    assert graph.find("Two Tickets To Paradise (Film)") == "Q200728"
    assert [fact.text for fact in triples_of(graph, "Taxi!")] == ["Taxi!, director, Roy Del Ruth"]


def test_entities_are_listed_under_each_of_their_labels(graph):
    entities = [(entity.id, entity.label) for entity in graph.entities()]
    assert ("Q1", "Two Tickets to Paradise") in entities
    assert ("Norman Foster", "Norman Foster") in entities
    assert [id for id, label in entities if label == "Henry III"] == ["Q3", "Q5"]
    assert [id for id, label in entities if label == "D. B. Sweeney"] == ["Q2"]
    assert all(label != "November 14, 1961" for _, label in entities), "a date is no entity"
