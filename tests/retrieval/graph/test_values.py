"""A value of RDF has one printed form, whatever file, store or endpoint it comes from."""

import asyncio
from pathlib import Path

import pyoxigraph
import pytest

from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.endpoint import SparqlEndpoint
from mujica_jax.retrieval.graph.tables import read_triples
from mujica_jax.retrieval.graph.triples import TripleGraph
from mujica_jax.retrieval.graph.values import WKT, readable, readable_iri, spellings, value_in_text
from tests.helpers.little_graph import WD, WDT, WIKIBASE, XSD, graph_in_memory, label, write_dump
from tests.retrieval.graph.test_index import HEADER
from tests.retrieval.graph.test_knowledge_graph import answering

VALUES = [  # datatype, text, printed form
    ("dateTime", "1996-06-15T00:00:00Z", "15 June 1996"),
    ("dateTime", "1996-06-15T14:30:59.5+02:00", "15 June 1996"),
    ("dateTime", "1996-01-01T00:00:00Z", "1996"),
    ("dateTime", "1996-01-01T00:00:00.000+01:00", "1996"),
    ("dateTime", "1996-01-01T09:30:00Z", "1 January 1996"),
    ("dateTime", "-0043-03-15T00:00:00Z", "15 March 44 BC"),
    ("dateTime", "-0043-01-01T00:00:00Z", "44 BC"),
    ("dateTime", "-7000-01-01T00:00:00Z", "7000 BC"),
    ("dateTime", "-13798000000-01-01T00:00:00Z", "13798000000 BC"),
    ("dateTime", "-0500-06-15T00:00:00Z", "15 June 501 BC"),
    ("gYear", "-0500", "501 BC"),
    ("dateTime", "0000-01-01T00:00:00Z", "1 BC"),
    ("dateTime", "1996-00-00T00:00:00Z", "1996"),
    ("dateTime", "1996-06-00T00:00:00Z", "June 1996"),
    ("dateTime", "12021-02-03T00:00:00Z", "3 February 12021"),
    ("dateTimeStamp", "1996-06-15T00:00:00Z", "15 June 1996"),
    ("date", "1996-06-15", "15 June 1996"),
    ("date", "1996-06-15Z", "15 June 1996"),
    ("date", "1996-01-01", "1996"),
    ("gYear", "1996", "1996"),
    ("gYear", "0079", "79"),
    ("gYear", "-0043", "44 BC"),
    ("gYearMonth", "1996-06", "June 1996"),
    ("gYearMonth", "1996-01", "January 1996"),
    ("gMonthDay", "--06-15", "15 June"),
    ("gMonth", "--06", "June"),
    ("gDay", "---15", "15"),
    ("date", "soon", "soon"),
    ("boolean", "true", "yes"),
    ("boolean", "1", "yes"),
    ("boolean", "false", "no"),
    ("boolean", "0", "no"),
    ("boolean", "maybe", "maybe"),
    ("integer", "5", "5"),
    ("integer", "+5", "5"),
    ("integer", "007", "7"),
    ("integer", "-0", "0"),
    ("int", "-12", "-12"),
    ("long", "15481363", "15481363"),
    ("nonNegativeInteger", "0", "0"),
    ("decimal", "+157", "157"),
    ("decimal", "+242.860", "242.86"),
    ("decimal", "5.0", "5"),
    ("decimal", "-0.50", "-0.5"),
    ("decimal", ".5", "0.5"),
    ("double", "1.0E3", "1000"),
    ("double", "1.5E-2", "0.015"),
    ("double", "1.0E40", "1E+40"),
    ("double", "INF", "INF"),
    ("float", "2.50", "2.5"),
    ("decimal", "many", "many"),
    ("string", "+157", "+157"),
    ("duration", "P1Y", "P1Y"),
]
POINTS = [
    ("Point(114.054 22.535)", "22.535 N, 114.054 E"),
    ("POINT (-70.50 -33.0)", "33 S, 70.5 W"),
    ("<http://www.wikidata.org/entity/Q405> Point(23.47 0.67)", "0.67 N, 23.47 E"),
    ("Point(0 0)", "0 N, 0 E"),
    ("Point Z(1 2 3)", "2 N, 1 E"),
    ("LINESTRING(1 2, 3 4)", "LINESTRING(1 2, 3 4)"),
]
CASES = [(f"{XSD}{datatype}", text, printed) for datatype, text, printed in VALUES]
CASES += [(WKT, text, printed) for text, printed in POINTS]


def typed(datatype: str, text: str) -> pyoxigraph.Literal:
    return pyoxigraph.Literal(text, datatype=pyoxigraph.NamedNode(datatype))


@pytest.mark.parametrize(("datatype", "text", "printed"), CASES)
def test_a_literal_has_one_printed_form(datatype, text, printed):
    assert readable(typed(datatype, text)) == printed
    assert sparql.readable is readable, (
        "the triples of every graph are written by the same function"
    )


@pytest.mark.parametrize(("datatype", "text", "printed"), CASES)
def test_the_store_prints_a_literal_as_an_endpoint_that_keeps_its_text_does(
    datatype, text, printed, tmp_path
):
    """Our store normalises numbers and times before they are printed.

    Other stores give the text of the dump.
    """
    statement = f"<{WD}Q1> <{WDT}P1> {typed(datatype, text)} ."
    graph = graph_in_memory(
        write_dump(tmp_path / "dump.nt", [label("Q1", "One"), label("P1", "value"), statement])
    )
    (triple,) = asyncio.run(graph.triples_of("Q1"))
    assert triple.object == printed
    assert triple.literal is True


@pytest.mark.parametrize(
    ("datatype", "text", "expected"),
    [
        (
            "dateTime",
            "1996-06-15T00:00:00Z",
            ["15 June 1996", "June 15, 1996", "1996-06-15", "1996-06-15T00:00:00Z"],
        ),
        ("date", "1996-06-15", ["15 June 1996", "June 15, 1996", "1996-06-15"]),
        (
            "date",
            "1996-01-01",
            ["1996", "1 January 1996", "January 1, 1996", "January 1996", "1996-01-01"],
        ),
        ("date", "1996-06-01", ["1 June 1996", "June 1, 1996", "June 1996", "1996-06-01"]),
        ("gYear", "1996", ["1996"]),
        ("gMonthDay", "--06-15", ["15 June", "June 15", "--06-15"]),
        ("decimal", "+15481363.0", ["15481363", "15,481,363", "+15481363.0"]),
        ("boolean", "1", ["yes", "true", "1"]),
        ("string", "a\n b", ["a b"]),
    ],
)
def test_the_other_spellings_of_a_value_follow_its_printed_form(datatype, text, expected):
    assert list(spellings(typed(f"{XSD}{datatype}", text))) == expected


def test_a_round_year_before_christ_has_both_readings():
    """Wikidata shifts years by one, but not centuries and decades."""
    assert spellings(typed(f"{XSD}dateTime", "-7000-01-01T00:00:00Z"))[:2] == ("7000 BC", "7001 BC")
    assert spellings(typed(f"{XSD}dateTime", "-0480-01-01T00:00:00Z"))[:2] == ("481 BC", "480 BC")
    assert "43 BC" not in spellings(typed(f"{XSD}dateTime", "-0043-01-01T00:00:00Z"))


def test_coordinates_and_their_spellings():
    coordinates = spellings(typed(WKT, "Point(114.054 22.535)"))
    assert coordinates == ("22.535 N, 114.054 E", "22.535, 114.054", "Point(114.054 22.535)")


@pytest.mark.parametrize(
    ("iri", "text"),
    [
        ("http://dbpedia.org/resource/Ilse_Vand_%28director%29", "Ilse Vand (director)"),
        (
            "http://commons.wikimedia.org/wiki/Special:FilePath/Purple%20Shore.jpg",
            "Purple Shore.jpg",
        ),
        ("https://www.example.org/", "www.example.org"),
        (f"{WD}Q42", ""),
        (f"{WD}statement/Q42-8F9A", ""),
        ("http://www.wikidata.org/.well-known/genid/12ab", ""),
    ],
)
def test_an_address_reads_as_its_last_part(iri, text):
    assert readable_iri(iri) == text


def test_a_table_prints_the_values_that_it_spells_as_rdf_does(tmp_path):
    rows = [
        ("Ann", "born on", "1961-11-14T00:00:00Z", "Q1", ""),
        ("Ann", "date of death", "+1999-01-01T00:00:00Z", "Q1", "date_information"),
        ("Ann", "height", "+170", "Q1", ""),
        ("Ann", "grave", "Point(3.72 51.05)", "Q1", ""),
        ("Ann", "played in", "1917", "Q1", ""),
        ("Ann", "played in", "2001-01-01", "Q1", "Q9"),
    ]
    file = tmp_path / "graph.tsv"
    file.write_text(HEADER + "".join("\t".join(row) + "\n" for row in rows))
    expected = {"14 November 1961", "1999", "170", "51.05 N, 3.72 E", "1917", "2001-01-01"}
    store = graph_in_memory(file)
    stored = asyncio.run(store.triples_of("Q1"))
    in_memory = [end.triple for end in TripleGraph(read_triples(file)).ends_of("Q1")]
    for triples in (stored, in_memory):
        assert {triple.object for triple in triples} == expected
        literals = {triple.object for triple in triples if triple.object_is_literal}
        assert literals == expected - {"1917", "2001-01-01"}, "a film may be called 1917"
    assert value_in_text("3 June 1961") is None


def test_coordinates_are_among_the_triples_and_files_are_not(tmp_path):
    lines = [
        label("Q1", "Shenzhen"),
        label("P625", "coordinate location"),
        label("P18", "image"),
        f"<{WD}P625> <{WIKIBASE}propertyType> <{WIKIBASE}GlobeCoordinate> .",
        f"<{WD}P18> <{WIKIBASE}propertyType> <{WIKIBASE}CommonsMedia> .",
        f'<{WD}Q1> <{WDT}P625> "Point(114.054 22.535)"^^<{WKT}> .',
        f"<{WD}Q1> <{WDT}P18> <http://commons.wikimedia.org/wiki/Special:FilePath/City.jpg> .",
    ]
    (triple,) = asyncio.run(
        graph_in_memory(write_dump(tmp_path / "dump.nt", lines)).triples_of("Q1")
    )
    assert triple.text == "Shenzhen, coordinate location, 22.535 N, 114.054 E"


LABELS = [
    label("Q1", "Cologne"),
    label("Q1", "Köln", "de"),
    label("Q1", "科隆", "zh-hans"),
    label("Q2", "Ilse Vand", "mul"),
    label("Q3", "Only English"),
    label("Q4", "Sólo español", "es"),
    label("Q5", "Old Name"),
    f"<{WD}Q777> <http://www.w3.org/2002/07/owl#sameAs> <{WD}Q5> .",
]


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        (
            "en",
            ["Cologne", "Ilse Vand", "Only English", "Sólo español", "Old Name", "Old Name", None],
        ),
        ("de", ["Köln", "Ilse Vand", "Only English", "Sólo español", "Old Name", "Old Name", None]),
        ("zh", ["科隆", "Ilse Vand", "Only English", "Sólo español", "Old Name", "Old Name", None]),
    ],
)
def test_labels_come_in_the_preferred_language_then_english_then_any(
    tmp_path: Path, language, expected
):
    dump = write_dump(tmp_path / "dump.nt", [*LABELS, f"<{WD}Q1> <{WDT}P1> <{WD}Q4> ."])
    graph = graph_in_memory(dump, languages=("es", "de", "en", "mul", "zh-hans"))
    graph.prefer_language(language)

    async def labels(asked_graph) -> list[str | None]:
        return [
            await asked_graph.label_of(key)
            for key in ("Q1", "Q2", "Q3", "Q4", "Q5", "Q777", "Q999")
        ]

    assert asyncio.run(labels(graph)) == expected

    with answering(graph.store) as endpoint:
        remote = SparqlEndpoint(
            endpoint.base_url, queries_per_second=1e6, languages=("en", "mul", "es")
        )
        remote.prefer_language(language)
        assert asyncio.run(labels(remote)) == expected
