"""QALD-10's official records over a local graph made of triples that their answers name."""

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from mujica_jax.commands import index
from mujica_jax.config.tasks import QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.runs.evaluation import summarise
from mujica_jax.tasks.asked import asked_question
from mujica_jax.tasks.open_domain.qald import build, read_qald
from tests.helpers.little_agent import ToldPolicy, agent, answer, attempt, read, search
from tests.helpers.shared_data import DATA, needs_data

HEADER = "subject\trelation\tobject\tsubject_qid\tobject_qid\n"
TRIPLES = [  # of three questions: a school, a franchise's author, and one that is answered by yes
    ("Allen Ginsberg", "educated at", "Eastside High School", "Q6711", "Q14705485"),
    ("Eastside High School", "instance of", "high school", "Q14705485", "Q9826"),
    ("Brooke Raboutou", "place of birth", "Boulder", "Q2926117", "Q192517"),
    ("Colin Duffy", "place of birth", "Ohio", "Q87192979", "Q1397"),
    ("U.S. state", "country", "United States", "Q35657", "Q30"),
]


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qald")
    (folder / "triples.tsv").write_text(HEADER + "".join("\t".join(row) + "\n" for row in TRIPLES))
    built = [
        "build",
        "--corpus",
        str(folder / "triples.tsv"),
        "--kind",
        "graph",
        "--out",
        str(folder / "graph"),
    ]
    assert index.main(built) == 0
    return folder / "graph"


def task(graph: Path | None, **changes):
    fields = {
        "data_dir": str(DATA / "qald10"),
        "top_k": 5,
        "index": None if graph is None else str(graph),
    }
    return build(QaldConfig(**{**fields, **changes}))


@needs_data
def test_the_official_records_are_read():
    records = list(read_qald(str(DATA / "qald10"), "en"))
    assert len(records) == 276
    first = records[0]
    assert (
        first["text"]
        == "Which animal participated in a military operation with the Australian Defence Force?"
    )
    assert first["answers"] == (("uri", "http://www.wikidata.org/entity/Q93208"),)
    assert first["entities"] == ("Q16521", "Q645883", "Q625657")
    assert next(read_qald(str(DATA / "qald10"), "de"))["text"].startswith("Welches Tier war")
    assert sum(("literal", "yes") in record["answers"] for record in records) > 10


@needs_data
def test_questions_whose_answers_the_graph_knows_are_asked_and_played(graph):
    task_of_graph = task(graph, dev_percent=0)
    questions = {question.text: question for question in task_of_graph.questions("test")}
    assert len(questions) + len(task_of_graph.left_out) == 276
    assert not task_of_graph.questions("dev")
    school = questions["Which High School did Allen Ginsberg attend?"]
    assert school.answers == ("Eastside High School",)
    assert [(entity.id, entity.label) for entity in school.candidates] == [
        ("Q6711", "Allen Ginsberg"),
        ("Q9826", "high school"),
    ]
    state = questions["are brooke raboutou and colin duffy from same state of the usa?"]
    assert state.answers == ("yes",)
    assert len(state.candidates) == 3
    policy = ToldPolicy(
        [search((0, "Where?")), answer("Eastside High School")],
        {"Where?": read("[0]", "At Eastside High School.")},
    )
    played = asyncio.run(agent().run(attempt(school), task_of_graph.environment(school), policy))
    assert played.searches[0].materials == ("Allen Ginsberg, educated at, Eastside High School",)
    summary = summarise([school], [played], task_of_graph.rule).summary()
    assert summary["em"] == 100.0
    assert summary["set_f1"] == 100.0
    assert summary["gerbil_macro_f1"] == 100.0


def test_what_a_task_lacks_is_said(graph, tmp_path):
    with pytest.raises(UserError, match=r"needs a graph of Wikidata, but task\.index is None"):
        task(None)
    with pytest.raises(UserError, match=r"put qald_10\.json from KGQA/QALD-10 there"):
        task(graph, data_dir=str(tmp_path))
    file = tmp_path / "qald_10.json.gz"
    file.write_bytes(gzip.compress(b"[]"))
    with pytest.raises(UserError, match="is not a file of QALD"):
        task(graph, data_dir=str(tmp_path))
    file.write_bytes(gzip.compress(json.dumps({"questions": [{"id": 1, "question": []}]}).encode()))
    with pytest.raises(UserError, match="question 0: this is not a question of QALD"):
        task(graph, data_dir=str(tmp_path))
    record = {
        "id": 1,
        "question": [{"language": "en", "string": "Who?"}],
        "query": {"sparql": "ASK {wd:Q1 ?a wd:Q2}"},
    }
    file.write_bytes(
        gzip.compress(
            json.dumps({"questions": [record | {"answers": [{"boolean": True}]}]}).encode()
        )
    )
    with pytest.raises(UserError, match="lacks the entities of all 1 questions"):
        task(graph, data_dir=str(tmp_path))


@needs_data
def test_a_question_of_a_user_starts_from_the_entities_that_it_names(graph):
    asked = asyncio.run(asked_question(task(graph), "which school was allen ginsberg at?"))
    assert [(entity.id, entity.label) for entity in asked.question.candidates] == [
        ("Q6711", "Allen Ginsberg")
    ]
    materials = asyncio.run(asked.environment.search("school", asked.question.candidates[0]))
    assert [material.text for material in materials] == [
        "Allen Ginsberg, educated at, Eastside High School"
    ]


@needs_data
def test_a_question_of_a_user_about_nothing_in_the_graph_is_told_the_nearest_labels(graph):
    with pytest.raises(UserError, match=r"did you mean Allen Ginsberg\?"):
        asyncio.run(asked_question(task(graph), "Where was Allen Ginsburg born?"))
