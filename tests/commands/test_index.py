"""The command line of indexes: numbers as one JSON line, mistakes as one sentence and status 2."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mujica_jax.commands import index
from mujica_jax.runtime.standard_output import READER_GONE
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.shared_data import TWO_WIKI, needs_data
from tests.helpers.tiny_embedder import tiny_embedder, write_corpus

PASSAGES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a corpus, its questions, an embedder, and both kinds of index.

    The second gold title of the questions comes first in BM25.
    """
    root = tmp_path_factory.mktemp("index")
    write_corpus(root / "corpus.jsonl", PASSAGES)
    lines = [
        {"question": f"title {n} word{n}", "supporting_facts": [f"title {n}", ["nowhere", 0]]}
        for n in range(20, 24)
    ]
    (root / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tiny_embedder(root / "tiny")
    assert (
        index.main(
            [
                "build",
                "--corpus",
                str(root / "corpus.jsonl"),
                "--kind",
                "bm25",
                "--out",
                str(root / "bm25"),
            ]
        )
        == 0
    )
    dense = ["--kind", "exact", "--embedder", str(root / "tiny"), "--out", str(root / "dense")]
    assert index.main(["build", "--corpus", str(root / "corpus.jsonl"), *dense]) == 0
    return root


def printed(capsys, *words: str) -> list[dict]:
    capsys.readouterr()
    assert index.main(list(words)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert index.main(list(words)) == 2
    shown = capsys.readouterr()
    last = shown.err.splitlines()[-1]
    assert shown.out == ""
    assert last.startswith("error: ")
    assert "Traceback" not in shown.err
    return last


def test_recall_is_the_share_of_gold_titles(folder, capsys):
    asked = (
        "recall",
        "--index",
        str(folder / "bm25"),
        "--questions",
        str(folder / "questions.jsonl"),
    )
    (recall,) = printed(capsys, *asked, "--k", "1", "40")
    assert recall["recall@40"] == 50.0, "one of two gold titles exists"
    assert 0 < recall["recall@1"] <= 50.0
    assert recall["questions"] == 4
    assert recall["passages"] == PASSAGES
    (dense,) = printed(capsys, "recall", "--index", str(folder / "dense"), *asked[3:], "--k", "40")
    assert dense["recall@40"] == 50.0


@pytest.mark.parametrize("kind", ["bm25", "dense"])
def test_a_query_prints_its_passages_best_first(folder, capsys, kind):
    hits = printed(capsys, "query", "--index", str(folder / kind), "--k", "3", "title 7 word5")
    assert len(hits) == 3
    assert set(hits[0]) == {"score", "position", "id", "title", "text"}
    assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)


def test_a_query_is_a_list_on_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert index.main(["query", "--index", str(folder / "bm25"), "--k", "2", "title 7 word5"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("  1. title ")
    assert "score" in first
    assert rest[0].startswith("     ")
    assert any(line.startswith("  2. title ") for line in rest)


def test_the_former_name_of_a_kind_is_answered_with_the_new_one(capsys):
    with pytest.raises(SystemExit):
        index.main(["build", "--kind", "accelerator", "--corpus", "x", "--out", "y"])
    assert "unknown kind 'accelerator'; did you mean exact?" in capsys.readouterr().err
    for share in ("abc", "1.5"):
        with pytest.raises(SystemExit):
            index.main(["query", "--index", "x", "--recall-target", share, "who?"])
        assert f"{share} is not a number between 0 and 1" in capsys.readouterr().err


def test_an_index_is_asked_with_the_prefixes_it_was_built_with(folder, capsys, tmp_path):
    built = tmp_path / "built"
    from_embeddings = tmp_path / "taken"
    build = [
        "--corpus",
        str(folder / "corpus.jsonl"),
        "--kind",
        "exact",
        "--embedder",
        str(folder / "tiny"),
    ]
    assert index.main(["build", *build, "--prefixes", "e5", "--out", str(built)]) == 0
    assert (
        index.main(
            ["build", "--embeddings", str(built), "--kind", "exact", "--out", str(from_embeddings)]
        )
        == 0
    )
    asked = ("query", "--k", "3", "word5", "--index")
    hits = printed(capsys, *asked, str(built))
    for named in ([], ["--prefixes", "e5"], ["--embedder", str(folder / "tiny")]):
        for place in (built, from_embeddings):
            assert printed(capsys, *asked, str(place), *named) == hits
    assert "was built with the embedder" in refused(capsys, *asked, str(built), "--prefixes", "bge")
    nowhere = refused(capsys, *asked, str(built), "--embedder", str(folder / "nowhere"))
    assert f"was built with the embedder {folder / 'tiny'}, but the embedder" in nowhere
    manifest = json.loads((built / "manifest.json").read_text())
    assert manifest.pop("prefixes") == "e5"
    # Older manifests have no prefixes.
    (built / "manifest.json").write_text(json.dumps(manifest))
    assert "give the embedder of the build, with its prefixes" in refused(
        capsys, *asked, str(built)
    )
    assert printed(capsys, *asked, str(built), "--prefixes", "e5") == hits


def test_an_embedder_that_was_named_from_another_folder_is_found(
    folder, capsys, tmp_path, monkeypatch
):
    build = [
        "build",
        "--corpus",
        str(folder / "corpus.jsonl"),
        "--kind",
        "exact",
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.chdir(folder)
    assert index.main([*build, "--embedder", "tiny"]) == 0
    monkeypatch.chdir(tmp_path)
    assert len(printed(capsys, "query", "--index", "out", "word5")) == 5


def test_a_query_of_a_small_index_needs_no_k(capsys, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 2)
    for kind, embedder in (
        ("bm25", []),
        ("exact", ["--embedder", str(tiny_embedder(tmp_path / "tiny"))]),
    ):
        out = str(tmp_path / kind)
        assert (
            index.main(["build", "--corpus", str(corpus), "--kind", kind, *embedder, "--out", out])
            == 0
        )
        assert len(printed(capsys, "query", "--index", out, "title 0 1")) == 2


def test_who_reads_no_further_ends_a_query_without_a_word(folder):
    reading, writing = os.pipe()
    os.close(reading)
    command = [
        sys.executable,
        "-m",
        "mujica_jax.index",
        "query",
        "--index",
        str(folder / "bm25"),
        "title",
    ]
    with open(writing, "wb") as pipe:
        ended = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=HANG_SECONDS
        )
    assert ended.returncode == READER_GONE
    assert ended.stderr == ""


def test_only_a_build_goes_on_where_it_was(folder, capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(index, "_open_index", interrupted)
    assert index.main(["query", "--index", str(folder / "bm25"), "who?"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupted_build_says_that_it_goes_on(folder, capsys, tmp_path, monkeypatch):
    from mujica_jax.retrieval.text import index as indexes

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(indexes, "build", interrupted)
    words = [
        "build",
        "--corpus",
        str(folder / "corpus.jsonl"),
        "--kind",
        "bm25",
        "--out",
        str(tmp_path / "out"),
    ]
    assert index.main(words) == 130
    assert "run the same command again to continue" in capsys.readouterr().err


@needs_data
@pytest.mark.parametrize(
    ("tokenizer", "recall_at_2", "recall_at_5"),
    [("default", 54.16, 64.60), ("elasticsearch", 50.66, 61.39)],
)
def test_recall_on_2wiki_is_the_published_one(
    tmp_path, capsys, tokenizer, recall_at_2, recall_at_5
):
    corpus = TWO_WIKI / "corpus_6119.json.gz"
    questions = TWO_WIKI / "questions_visible.jsonl.gz"
    build = ["--kind", "bm25", "--tokenizer", tokenizer, "--out", str(tmp_path / "index")]
    assert index.main(["build", "--corpus", str(corpus), *build]) == 0
    (recall,) = printed(
        capsys, "recall", "--index", str(tmp_path / "index"), "--questions", str(questions)
    )
    assert recall["recall@2"] == pytest.approx(recall_at_2, abs=0.1)
    assert recall["recall@5"] == pytest.approx(recall_at_5, abs=0.1)


@pytest.mark.parametrize("command", index.EXAMPLES)
def test_the_help_has_two_examples_before_the_flags(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        index.main([*command.split(), "--help"])
    before_flags = capsys.readouterr().out.partition("options:")[0]
    assert len(index.EXAMPLES[command]) == 2
    for words, meaning in index.EXAMPLES[command].items():
        assert f"{words}\n      {meaning}" in before_flags
        options = index._parser().parse_args(shlex.split(f"{command} {words}"))
        assert callable(options.run)
