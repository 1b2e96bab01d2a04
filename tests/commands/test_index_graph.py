"""Graphs on the command line: build, ask, estimate; mistakes are one sentence and status 2."""

import json
import sys
from pathlib import Path

import pyoxigraph
import pytest

from mujica_jax.commands import index
from tests.commands.test_index import printed, refused
from tests.helpers.little_graph import DIRECTOR, graph_in_memory, write_dump
from tests.helpers.local_endpoint import Answer, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A dump and its index."""
    root = tmp_path_factory.mktemp("graph")
    dump = str(write_dump(root / "dump.nt.gz"))
    assert (
        index.main(["build", "--corpus", dump, "--kind", "graph", "--out", str(root / "index")])
        == 0
    )
    return root


def shown(capsys, *words: str) -> list[tuple[str, str, str]]:
    return [
        (triple["subject"], triple["relation"], triple["object"])
        for triple in printed(capsys, *words)
    ]


@pytest.mark.parametrize(
    "name", ["Q2", "Ilse Vand", "I. Vand", "http://www.wikidata.org/entity/Q2"]
)
def test_an_entity_prints_its_triples(folder, capsys, name):
    assert shown(capsys, "query", "--index", str(folder / "index"), name) == DIRECTOR
    assert (
        shown(capsys, "query", "--index", str(folder / "index"), name, "--k", "2") == DIRECTOR[:2]
    )
    (first, *_) = printed(capsys, "query", "--index", str(folder / "index"), name)
    assert first["subject_id"] == "Q2"
    assert first["object_id"] == "Q3"
    assert first["literal"] is False


def test_on_a_terminal_triples_are_a_list_and_a_graph_is_served_by_its_store(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert index.main(["query", "--index", str(folder / "index"), "Q2"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "  1. Ilse Vand | place of birth | Ghent"
    message = refused(capsys, "serve", "--index", str(folder / "index"))
    assert (
        f"oxigraph serve-read-only --location {folder}/index/graph --bind 127.0.0.1:8600" in message
    )


def test_a_name_of_several_entities_says_so(folder, capsys):
    assert (
        printed(capsys, "query", "--index", str(folder / "index"), "Ghent")[0]["subject_id"] == "Q3"
    )
    index.main(["query", "--index", str(folder / "index"), "Ghent"])
    assert (
        "2 entities are called 'Ghent'; these are the triples of Q3, and not those of Q30"
        in capsys.readouterr().err
    )


def test_an_endpoint_prints_the_same(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = graph_in_memory(folder / "dump.nt.gz").store

    def answer(request, before):
        return Answer(
            content=store.query(request.body["query"]).serialize(
                format=pyoxigraph.QueryResultsFormat.JSON
            )
        )

    with serving(answer) as endpoint:
        assert (
            shown(capsys, "query", "--index", f"sparql+{endpoint.base_url}", "Ilse Vand")
            == DIRECTOR
        )
    assert "failed 3 times" in refused(
        capsys, "query", "--index", f"sparql+{endpoint.base_url}", "Ilse Vand"
    )


def test_properties_and_languages_reach_the_build(folder, capsys, tmp_path):
    build = (
        "build",
        "--corpus",
        str(folder / "dump.nt.gz"),
        "--kind",
        "graph",
        "--out",
        str(tmp_path / "index"),
    )
    assert index.main([*build, "--properties", "P57", "P19", "--languages", "DE", "mul", "en"]) == 0
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert manifest["properties"] == ["P19", "P57"]
    assert manifest["languages"] == ["de", "mul", "en"]
    assert shown(capsys, "query", "--index", str(tmp_path / "index"), "Q2") == [
        ("Ilse Vand", "Geburtsort", "Ghent"),
        ("Das violette Ufer", "director", "Ilse Vand"),
    ]


def test_an_estimate_is_one_line(folder, capsys):
    (estimate,) = printed(
        capsys, "estimate", "--corpus", str(folder / "dump.nt.gz"), "--kind", "graph"
    )
    assert estimate["triples"] == 8
    assert estimate["names"] == 14
    assert estimate["disk_bytes"]["graph"] > 0


def test_an_estimate_leaves_out_what_a_build_leaves_out(folder, capsys, tmp_path):
    (tmp_path / "bad.tsv").write_text(
        "subject\trelation\tobject\tsubject_qid\tobject_qid\nA\tr\tB\tQ1\tQ2\nbroken line\n"
    )
    command = ("estimate", "--kind", "graph", "--corpus", str(tmp_path / "bad.tsv"))
    assert "bad.tsv, line 3: the line has 1 columns instead of 5" in refused(capsys, *command)
    (estimate,) = printed(capsys, *command, "--skip")
    assert estimate["triples"] == 1


def test_mistakes_are_one_sentence(folder, capsys, tmp_path):
    graph = str(folder / "index")
    dump = str(folder / "dump.nt.gz")
    out = str(tmp_path / "out")
    for unknown in ("Q999", "Nobody", 'x" } DELETE', "http://example.org/x y"):
        assert f"{graph} knows no entity" in refused(capsys, "query", "--index", graph, unknown)
    assert "k is 0: give at least 1" in refused(capsys, "query", "--index", graph, "Q2", "--k", "0")
    assert "--embedder is x, but an index of kind graph does not use it" in refused(
        capsys, "query", "--index", graph, "Q2", "--embedder", "x"
    )
    (tmp_path / "questions.jsonl").write_text('{"question": "who?", "supporting_facts": ["a"]}\n')
    recall = ("recall", "--index", graph, "--questions", str(tmp_path / "questions.jsonl"))
    assert "is of kind graph and holds no passages" in refused(capsys, *recall)
    build = ("build", "--out", out, "--kind", "graph")
    assert "--kind is graph, but there are no triples: give files of them to --corpus" in refused(
        capsys, *build
    )
    assert "--tokenizer is default, but an index of kind graph does not use it" in refused(
        capsys, *build, "--corpus", dump, "--tokenizer", "default"
    )
    assert "--embedder is x, but an index of kind graph" in refused(
        capsys, *build, "--corpus", dump, "--embedder", "x"
    )
    assert "'director' is not a property" in refused(
        capsys, *build, "--corpus", dump, "--properties", "director"
    )
    assert "corpus.json is not a file of triples" in refused(
        capsys, *build, "--corpus", "corpus.json"
    )
    assert "--languages is en de, but an index of kind bm25 does not use it" in refused(
        capsys,
        "build",
        "--out",
        out,
        "--kind",
        "bm25",
        "--corpus",
        "x.json",
        "--languages",
        "en",
        "de",
    )
    assert "--passages is 7, but a graph has no passages" in refused(
        capsys, "estimate", "--corpus", dump, "--kind", "graph", "--passages", "7"
    )
    assert "is not a file of triples" in refused(
        capsys, "estimate", "--corpus", "corpus.json", "--kind", "graph"
    )
