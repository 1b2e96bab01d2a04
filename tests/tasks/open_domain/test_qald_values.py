"""QALD's gold answers are what the searched graph prints, so an answer copied from a search result
is correct.
"""

import asyncio
import json
from pathlib import Path

import pytest

from mujica_jax.commands import index
from mujica_jax.config.tasks import QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import score
from mujica_jax.records import Question
from mujica_jax.retrieval.graph.sparql import term_of
from mujica_jax.retrieval.graph.values import WKT
from mujica_jax.tasks.open_domain.qald import build, official_records, read_qald
from mujica_jax.tasks.open_domain.task import RULES
from tests.helpers.little_graph import WD, WDT, XSD, fact, graph_in_memory, label, write_dump
from tests.helpers.shared_data import DATA, needs_data
from tests.helpers.tiny_embedder import tiny_embedder
from tests.retrieval.graph.test_knowledge_graph import answering

RULE = RULES["qald10"]


def typed(value: str, datatype: str) -> dict[str, str]:
    return {"type": "literal", "value": value, "datatype": datatype}


def uri(value: str) -> dict[str, str]:
    return {"type": "uri", "value": value}


# by question: an answer as the official file has it, what the graph prints, and another right
# spelling
GOLD = {
    "died": (typed("1996-06-15T00:00:00Z", f"{XSD}dateTime"), "15 June 1996", "1996-06-15"),
    "opened": (typed("1996-06-15", f"{XSD}date"), "15 June 1996", "June 15, 1996"),
    "founded": (typed("1248-01-01T00:00:00Z", f"{XSD}dateTime"), "1248", "1248-01-01"),
    "killed": (
        typed("-0043-03-15T00:00:00Z", f"{XSD}dateTime"),
        "15 March 44 BC",
        "-0043-03-15T00:00:00Z",
    ),
    "landed": (
        typed("1969-07-20T20:17:40Z", f"{XSD}dateTime"),
        "20 July 1969",
        "1969-07-20T20:17:40Z",
    ),
    "year": (typed("1996", f"{XSD}gYear"), "1996", "1996"),
    "month": (typed("1996-01", f"{XSD}gYearMonth"), "January 1996", "1996-01"),
    "alive": (typed("true", f"{XSD}boolean"), "yes", "true"),
    "people": (typed("+15481363", f"{XSD}decimal"), "15481363", "15,481,363"),
    "area": (typed("+242.860", f"{XSD}decimal"), "242.86", "+242.860"),
    "count": (typed("+05", f"{XSD}integer"), "5", "+05"),
    "floors": (typed("5.0", f"{XSD}double"), "5", "5.0"),
    "speed": (typed("1.0E3", f"{XSD}double"), "1000", "1,000"),
    "place": (typed("Point(114.054 22.535)", WKT), "22.535 N, 114.054 E", "22.535, 114.054"),
    "title": (
        {"type": "literal", "value": "The Purple\n Shore", "xml:lang": "en"},
        "The Purple Shore",
        "",
    ),
    "writer": ({"type": "literal", "value": "Jake Snell"}, "Jake Snell", ""),
    "old style": ({"type": "typed-literal", "value": "+7", "datatype": f"{XSD}integer"}, "7", "+7"),
    "friend": (uri(f"{WD}Q2"), "Ilse Vand", ""),
    "merged": (uri(f"{WD}Q777"), "Ilse Vand", ""),
    "relation": (uri(f"{WDT}P1"), "value", ""),
    "picture": (
        uri("http://commons.wikimedia.org/wiki/Special:FilePath/Purple%20Shore.jpg"),
        "Purple Shore.jpg",
        "http://commons.wikimedia.org/wiki/Special:FilePath/Purple%20Shore.jpg",
    ),
}
NAMELESS = {
    "statement": uri(f"{WD}statement/Q1-8F9A"),
    "blank": {"type": "bnode", "value": "b0"},
    "unlabelled": uri(f"{WD}Q9"),
}
NAMES = [
    label("Q1", "The Purple Shore"),
    label("Q1", "Das violette Ufer", "de"),
    label("Q2", "Ilse Vand", "mul"),
    label("P1", "value"),
    label("P1", "Wert", "de"),
    label("P57", "director"),
    label("P57", "Regie", "de"),
    fact("Q1", "P57", "Q2"),
    f"<{WD}Q777> <http://www.w3.org/2002/07/owl#sameAs> <{WD}Q2> .",
    f"<{WD}Q2> <{WDT}P57> <{WD}Q1> .",
]


def question(name: str, answers: list, head: str = "result") -> dict:
    texts = [
        {"language": "en", "string": f"What {name}?"},
        {"language": "de", "string": f"Was {name}?"},
    ]
    rows = {"bindings": [{head: answer} for answer in answers]}
    solutions = [{"head": {"vars": [head]}, "results": rows}]
    return {
        "id": name,
        "question": texts,
        "query": {"sparql": "SELECT ?x { wd:Q1 ?p ?x }"},
        "answers": solutions,
    }


def statement(answer: dict[str, str]) -> str:
    return f"<{WD}Q1> <{WDT}P1> {term_of(answer)} ."


def write_questions(folder: Path, questions: list[dict]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "qald_10.json").write_text(json.dumps({"questions": questions}))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a graph that states every gold value of its one film, and its questions."""
    root = tmp_path_factory.mktemp("qald_values")
    questions = [question(name, [answer]) for name, (answer, *_) in GOLD.items()]
    questions += [question(name, [answer]) for name, answer in NAMELESS.items()]
    questions.append(question("both", [GOLD["died"][0], GOLD["friend"][0]]))
    write_questions(root / "data", questions)
    lines = [*NAMES, *(statement(answer) for answer, *_ in GOLD.values())]
    dump = str(write_dump(root / "dump.nt", lines))
    built = [
        "build",
        "--corpus",
        dump,
        "--kind",
        "graph",
        "--languages",
        "en",
        "de",
        "mul",
        "--out",
    ]
    assert index.main([*built, str(root / "graph")]) == 0
    return root


def task(folder: Path, **changes):
    fields = {
        "data_dir": str(folder / "data"),
        "top_k": 50,
        "index": str(folder / "graph"),
        "dev_percent": 0,
    }
    return build(QaldConfig(**{**fields, **changes}))


def by_name(qald) -> dict[str, Question]:
    return {question.id.removeprefix("qald-"): question for question in qald.questions("test")}


def printed_in_search(qald, asked: Question) -> set[str]:
    """Return the objects of the triples that a search from the film shows."""
    (film,) = asked.candidates
    materials = asyncio.run(qald.environment(asked).search("x", film))
    return {material.text.split(", ", maxsplit=2)[2] for material in materials}


def test_every_gold_value_is_what_a_search_prints(folder):
    qald = task(folder)
    questions = by_name(qald)
    shown = printed_in_search(qald, questions["died"])
    for name, (_, printed, _) in GOLD.items():
        assert questions[name].answers[0] == printed, name
        assert questions[name].answer_sets[0][0][0] == printed, name
        assert score(printed, questions[name].answers, RULE).em == 1.0, name
        # This predicate is the object of no statement.
        if name != "relation":
            assert printed in shown, name


def test_an_endpoint_prints_the_same_gold(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = graph_in_memory(folder / "dump.nt", languages=("en", "de", "mul")).store
    with answering(store) as endpoint:
        remote = task(folder, index=f"sparql+{endpoint.base_url}", queries_per_second=1e6)
        assert by_name(remote) == by_name(task(folder))
        asked = by_name(remote)["died"]
        assert printed_in_search(remote, asked) == printed_in_search(task(folder), asked)


@pytest.mark.parametrize("name", [name for name, (_, _, other) in GOLD.items() if other])
def test_another_spelling_of_a_value_is_right_too(folder, name):
    asked = by_name(task(folder))[name]
    assert score(GOLD[name][2], asked.answers, RULE).em == 1.0
    assert score("something else", asked.answers, RULE).em == 0.0


def test_answers_come_first_and_their_other_spellings_after_all_of_them(folder):
    both = by_name(task(folder))["both"]
    assert both.answers == (
        "15 June 1996",
        "Ilse Vand",
        "June 15, 1996",
        "1996-06-15",
        "1996-06-15T00:00:00Z",
    )
    dates = ("15 June 1996", "June 15, 1996", "1996-06-15", "1996-06-15T00:00:00Z")
    assert both.answer_sets == ((dates, ("Ilse Vand",)),)


def test_answers_without_a_name_are_left_out_and_counted(folder):
    qald = task(folder)
    assert {id.removeprefix("qald-") for id in qald.left_out} == set(NAMELESS)


def test_labels_of_gold_candidates_and_search_are_in_the_questions_language(folder):
    german = task(folder, language="de")
    asked = by_name(german)["relation"]
    assert asked.text == "Was relation?"
    assert asked.answers == ("Wert",)
    assert [entity.label for entity in asked.candidates] == ["Das violette Ufer"]
    materials = asyncio.run(german.environment(asked).search("x", asked.candidates[0]))
    assert "Das violette Ufer, Regie, Ilse Vand" in {material.text for material in materials}
    english = by_name(task(folder))["relation"]
    assert english.answers == ("value",)
    assert english.candidates[0].label == "The Purple Shore"


def test_a_crowded_entity_is_ranked_by_the_embedder_that_is_named(folder, tmp_path):
    embedder = str(tiny_embedder(tmp_path / "embedder"))
    plain = task(folder, top_k=3)
    dense = task(folder, top_k=3, retriever="dense", embedder=embedder)
    asked = by_name(plain)["died"]

    def search(qald) -> list[str]:
        return [
            material.text
            for material in asyncio.run(
                qald.environment(asked).search("director", asked.candidates[0])
            )
        ]

    assert "The Purple Shore, director, Ilse Vand" in search(plain)
    assert len(search(dense)) == 3
    assert search(dense) != search(plain)


def test_an_embedder_that_is_not_there_is_one_sentence_before_any_label_is_looked_up(folder):
    with pytest.raises(
        UserError, match="is not a folder: give a folder, minilm, or a Hugging Face name"
    ):
        task(folder, retriever="dense", embedder="nothing that is there")


def test_a_value_that_is_no_term_names_its_question(folder, tmp_path):
    data = write_questions(tmp_path / "data", [question("odd", [typed("5", "no address")])])
    with pytest.raises(UserError, match="question 0: this is not a question of QALD"):
        list(read_qald(data, "en"))


@needs_data
def test_every_literal_of_the_official_file_is_gold_as_a_graph_prints_it(tmp_path):
    """The store normalises what it reads. Gold is made of the text of the official file."""
    terms = []
    for _, value in official_records(DATA / "qald10"):
        (answer,) = value["answers"]
        if "boolean" not in answer:
            (name,) = answer["head"]["vars"]
            terms += [
                row[name] for row in answer["results"]["bindings"] if row[name]["type"] == "literal"
            ]
    counts: dict[str, int] = {}
    for term in terms:
        kind = term.get("datatype", term.get("xml:lang", "plain")).rpartition("#")[2]
        counts[kind] = counts.get(kind, 0) + 1
    expected = {
        "integer": 68,
        "decimal": 10,
        "dateTime": 26,
        "wktLiteral": 1,
        "en": 11,
        "zh-cn": 1,
        "plain": 3,
    }
    assert counts == expected

    records = list(read_qald(str(DATA / "qald10"), "en"))
    gold = [
        (printed, others)
        for record in records
        for (kind, printed), others in zip(record["answers"], record["spellings"], strict=True)
        if kind == "literal" and (printed, others) not in {("yes", ()), ("no", ())}
    ]
    assert len(gold) == len(terms)
    lines = [label("P1", "value")]
    for number, term in enumerate(terms, start=1):
        lines += [
            label(f"Q{number}", f"thing {number}"),
            f"<{WD}Q{number}> <{WDT}P1> {term_of(term)} .",
        ]
    graph = graph_in_memory(
        write_dump(tmp_path / "dump.nt", lines), languages=("en", "mul", "zh-cn")
    )

    async def printed_by_graph() -> list[str]:
        triples_of_terms = [
            await graph.triples_of(f"Q{number}") for number in range(1, len(terms) + 1)
        ]
        return [triples[0].object for triples in triples_of_terms]

    for term, (printed, others), copied in zip(
        terms, gold, asyncio.run(printed_by_graph()), strict=True
    ):
        assert copied == printed, term
        assert score(copied, (printed, *others), RULE).em == 1.0, term
        assert score(term["value"], (printed, *others), RULE).em == 1.0, (
            "the text of the file stays right"
        )
