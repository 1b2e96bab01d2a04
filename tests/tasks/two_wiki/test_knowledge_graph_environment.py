"""2WikiMultihopQA over a graph on disk or behind an endpoint: what is searched, what is
demonstrated, what fails.
"""

import asyncio
import json
from pathlib import Path

import pyoxigraph
import pytest

from mujica_jax.commands import index
from mujica_jax.errors import UserError
from mujica_jax.http.retry import RetryPolicy
from mujica_jax.metrics import score
from mujica_jax.records import Entity, StopReason
from mujica_jax.retrieval.errors import RetrievalError, RetrieverUnavailableError
from mujica_jax.retrieval.graph.dumps import claim_quads
from mujica_jax.retrieval.graph.endpoint import SparqlEndpoint
from mujica_jax.retrieval.graph.knowledge_graph import GraphStore
from mujica_jax.tasks.environment import GraphEnvironment
from mujica_jax.tasks.two_wiki import task as two_wiki
from tests.helpers.little_agent import ToldPolicy, answer, play, read
from tests.helpers.little_agent import search as search_call
from tests.helpers.little_graph import WDT, date, fact, graph_in_memory, label, write_dump
from tests.helpers.local_endpoint import Answer, serving
from tests.helpers.shared_data import TWO_WIKI, needs_data
from tests.helpers.tiny_embedder import tiny_embedder, write_corpus
from tests.retrieval.graph.test_index import HEADER
from tests.tasks.two_wiki.test_task import BRICKS, config, search, world_of

BRICK = Entity(id="Q21", label="a lego brickumentary")
ROWS = [
    "A Lego Brickumentary\tcountry of origin\tAmerican\tQ21\tQ30",
    "A Lego Brickumentary\tcountry of origin\tDanish\tQ21\tQ35",
    "The Night Sitter\tcountry of origin\tAmerican\tQ22\tQ30",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a data folder of one question.

    The index of its graph says more of its first entity.
    """
    root = tmp_path_factory.mktemp("two_wiki")
    (root / "dev.json").write_text(json.dumps([BRICKS]))
    (root / "triples.tsv").write_text(HEADER + "\n".join(ROWS))
    further_rows = [
        "A Lego Brickumentary\tpublication date\t31 July 2015\tQ21\tdate_information",
        "Tom\tfan of\tNobody\t\t",
    ]
    (root / "more.tsv").write_text(HEADER + "\n".join([*ROWS, *further_rows]))
    assert (
        index.main(
            [
                "build",
                "--corpus",
                str(root / "more.tsv"),
                "--kind",
                "graph",
                "--out",
                str(root / "index"),
            ]
        )
        == 0
    )
    return root


def task(folder: Path, **changes) -> two_wiki.TwoWiki:
    return two_wiki.build(config(folder, hold_out_percent=1, **changes))


def test_the_index_is_searched_and_the_data_folder_is_demonstrated(folder):
    searched = task(folder, index=str(folder / "index"), split_dev_files=True)
    assert isinstance(world_of(searched), GraphEnvironment)
    materials = search(world_of(searched), "x", BRICK)
    assert {material.text for material in materials} == {
        "a lego brickumentary, country of origin, American",
        "a lego brickumentary, country of origin, Danish",
        "a lego brickumentary, publication date, 31 July 2015",
    }, "under the name that the caller gives it"
    by_text = {material.text.split(", ")[2]: material for material in materials}
    assert by_text["American"].entities == (BRICK, Entity(id="Q30", label="American"))
    assert by_text["31 July 2015"].entities == (BRICK,)
    shown = list(searched.demonstrations())
    assert isinstance(shown[0][1], GraphEnvironment)
    assert len(search(shown[0][1], "x", BRICK)) == 2, "of the data folder's graph"
    plain = task(folder, split_dev_files=True)
    assert [q for q, _ in shown] == [q for q, _ in plain.demonstrations()]
    assert list(searched.tokenizer_text()) == list(plain.tokenizer_text())
    assert next(searched.pretraining_documents(0)) == next(plain.pretraining_documents(0))


def test_both_graphs_show_the_same(folder, tmp_path):
    built = [
        "build",
        "--corpus",
        str(folder / "triples.tsv"),
        "--kind",
        "graph",
        "--out",
        str(tmp_path / "same"),
    ]
    assert index.main(built) == 0
    plain = task(folder)
    searched = task(folder, index=str(tmp_path / "same"))
    for key, name in (("Q21", "A"), ("Q22", "B"), ("Q30", "C"), ("The Night Sitter", "D")):
        from_folder, from_index = (
            search(world_of(two_wiki_task), "x", Entity(id=key, label=name))
            for two_wiki_task in (plain, searched)
        )
        assert sorted(map(str, from_folder)) == sorted(map(str, from_index))
        assert from_folder


def test_an_id_that_the_graph_does_not_know_is_searched_by_its_label(folder, tmp_path):
    environment = world_of(task(folder, index=str(folder / "index")))
    (material,) = search(environment, "x", Entity(id="Q999", label="tom"))
    assert material.text == "tom, fan of, Nobody"
    twins = [f"Tom\tborn in\tPlace {number}\tQ{number}\t" for number in (1, 2)]
    (tmp_path / "twins.tsv").write_text(HEADER + "\n".join(twins))
    ambiguous = GraphEnvironment(graph_in_memory(tmp_path / "twins.tsv"), 5)
    assert search(ambiguous, "x", Entity(id="Q999", label="Tom")) == (), "two are called so"


def test_a_name_is_searched_on_and_an_unknown_entity_has_no_materials(folder):
    environment = world_of(task(folder, index=str(folder / "index")))
    (material,) = search(environment, "x", Entity(id="Nobody", label="Nobody"))
    assert material.entities == (Entity(id="Tom", label="Tom"), Entity(id="Nobody", label="Nobody"))
    assert search(environment, "x", Entity(id="Q999", label="X")) == ()
    with pytest.raises(RetrievalError, match="the search names no entity"):
        search(environment, "x", None)
    assert isinstance(environment, GraphEnvironment)
    assert environment.statistics.queries == 2
    assert environment.statistics.failed == 0


def test_a_gold_date_is_right_as_the_data_and_as_a_graph_of_wikidata_write_it(tmp_path):
    """The data say April 27, 1961, and a dump of Wikidata 1961-04-27T00:00:00Z."""
    record = {
        "_id": "d1",
        "type": "compositional",
        "question": "When did the director of Taxi! die?",
        "entity_ids": "Q11_Q2",
        "supporting_facts": [["Taxi!", 0], ["Roy Del Ruth", 0]],
        "evidences": [
            ["Taxi!", "director", "Roy Del Ruth"],
            ["Roy Del Ruth", "date of death", "April 27, 1961"],
        ],
        "evidences_id": [["Q11", "director", "Q2"], ["Q2", "date of death", "date_information"]],
        "answer": "April 27, 1961",
    }
    (tmp_path / "dev.json").write_text(json.dumps([record]))
    lines = [
        label("Q2", "Roy Del Ruth"),
        label("P570", "date of death"),
        fact("Q2", "P570", date("1961-04-27T00:00:00Z")),
    ]
    built = ["build", "--corpus", str(write_dump(tmp_path / "dump.nt", lines)), "--kind", "graph"]
    assert index.main([*built, "--out", str(tmp_path / "index")]) == 0
    for changes, shown in (
        ({}, "April 27, 1961"),
        ({"index": str(tmp_path / "index")}, "27 April 1961"),
    ):
        two_wiki_task = two_wiki.build(config(tmp_path, hold_out_percent=99, **changes))
        (asked,) = [
            *two_wiki_task.questions("dev"),
            *two_wiki_task.questions("test"),
            *two_wiki_task.questions("train"),
        ]
        materials = search(world_of(two_wiki_task), "x", Entity(id="Q2", label="Roy Del Ruth"))
        assert f"Roy Del Ruth, date of death, {shown}" in {material.text for material in materials}
        assert score(shown, asked.answers, "two_wiki").em == 1.0


def test_a_crowded_entity_shows_what_fits(folder, tmp_path):
    index_folder = str(folder / "index")
    (material,) = search(
        world_of(task(folder, index=index_folder, top_k=1)), "publication date?", BRICK
    )
    assert material.text.endswith("31 July 2015")
    dense = task(
        folder,
        index=index_folder,
        retriever="dense",
        embedder=str(tiny_embedder(tmp_path / "embedder")),
        top_k=1,
    )
    assert len(search(world_of(dense), "word7", BRICK)) == 1


def test_an_endpoint_is_searched_and_its_failure_is_the_searchs(
    turned_clock, folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = graph_in_memory(folder / "more.tsv").store

    def say(request, before):
        return Answer(
            content=store.query(request.body["query"]).serialize(
                format=pyoxigraph.QueryResultsFormat.JSON
            )
        )

    with serving(say) as endpoint:
        address = f"sparql+{endpoint.base_url}"
        remote = task(folder, index=address)
        local = task(folder, index=str(folder / "index"))
        assert search(world_of(remote), "x", BRICK) == search(world_of(local), "x", BRICK)
        slow = task(folder, index=address, queries_per_second=2.0)
        start_time = turned_clock.now
        search(world_of(slow), "x", Entity(id="Q35", label="Denmark"))
        search(world_of(slow), "x", Entity(id="Q30", label="America"))
        assert turned_clock.now - start_time > 0.49, "half a second apart"
        endpoint.answer = lambda request, before: Answer(status=500)
        assert len(search(world_of(remote), "x", BRICK)) == 3, "what was asked once is kept"
        hasty = SparqlEndpoint(address, policy=RetryPolicy(max_attempts=2, first_wait_seconds=0.01))
        with pytest.raises(RetrieverUnavailableError):
            search(GraphEnvironment(hasty, 5), "x", BRICK)
        assert hasty.statistics.failed == 1


def test_an_episode_ends_where_the_endpoint_fails():
    lines = [
        label("Q0", "Amber Tide"),
        label("Q1", "Ilse Vand"),
        label("P57", "director"),
        fact("Q0", "P57", "Q1"),
    ]
    store = pyoxigraph.Store()
    store.load("\n".join(lines), pyoxigraph.RdfFormat.N_TRIPLES)
    store.extend(claim_quads({f"{WDT}P57".encode()}))
    well = GraphEnvironment(GraphStore(store, version="", languages=("en",)), 5)
    plan = search_call((0, "Who directed it?"))
    reads = {"Who directed it?": read("[0]", "Ilse Vand directed it.")}
    played = play(ToldPolicy([plan, answer("Ilse Vand")], reads), well)
    assert played.stop_reason is StopReason.ANSWERED
    assert "director" in str(played.searches[0])
    with serving(lambda request, before: Answer(status=500)) as endpoint:
        broken = SparqlEndpoint(
            endpoint.base_url, policy=RetryPolicy(max_attempts=2, first_wait_seconds=0.01)
        )
        played = play(ToldPolicy([plan, answer("Ilse Vand")], reads), GraphEnvironment(broken, 5))
    assert played.stop_reason is StopReason.RETRIEVER_FAILED
    assert played.reward == 0


def test_mistakes_are_one_sentence(folder, tmp_path):
    graph = str(folder / "index")
    words = str(tmp_path / "words")
    corpus = str(write_corpus(tmp_path / "corpus.jsonl", 20))
    assert index.main(["build", "--corpus", corpus, "--kind", "bm25", "--out", words]) == 0
    for changes, message in (
        (
            {"index": words},
            "the index .*words is of kind bm25, but a graph is needed: give an index of kind graph",
        ),
        (
            {"index": "http://host:8600"},
            r"is the address of a passage service: give sparql\+http://host:8600",
        ),
        ({"index": str(tmp_path / "nowhere")}, "there is no index"),
        (
            {"environment": "text", "index": graph},
            r"task\.environment is text, but task\.index .*index is a graph",
        ),
        (
            {"environment": "text", "index": "sparql+http://host/sparql"},
            r"task\.environment is text, but task\.index sparql\+",
        ),
    ):
        with pytest.raises(UserError, match=message):
            task(folder, **changes)


@needs_data
def test_2wiki_over_an_index_of_its_graph_finds_the_evidence(tmp_path):
    """The table lacks the Q-ids of half of the entities, which questions have.

    These are found by their labels.
    """
    triples = str(TWO_WIKI / "triples.tsv.gz")
    assert (
        index.main(
            ["build", "--corpus", triples, "--kind", "graph", "--out", str(tmp_path / "index")]
        )
        == 0
    )
    plain, searched = (
        two_wiki.build(config(TWO_WIKI, top_k=50, **changes))
        for changes in ({}, {"index": str(tmp_path / "index")})
    )
    questions = searched.questions("test")[:150]
    assert questions == plain.questions("test")[:150]

    async def shown(two_wiki_task: two_wiki.TwoWiki) -> list[set[str]]:
        texts = []
        for question in questions:
            for entity in question.candidates:
                materials = await world_of(two_wiki_task).search("", entity)
                texts.append({material.text for material in materials})
        return texts

    over_index = asyncio.run(shown(searched))
    over_table = asyncio.run(shown(plain))
    assert len(over_index) > 200
    assert all(over_index)
    same = sum(
        from_index == from_folder
        for from_index, from_folder in zip(over_index, over_table, strict=True)
    )
    assert same > 0.9 * len(over_index), "others differ in how the other end is written"
