"""Mistakes with `python -m mujica_jax.index`: each is one sentence that says what to do, with
status 2.
"""

import json
from pathlib import Path

import pytest

from mujica_jax.commands import index
from mujica_jax.retrieval.service import open_port
from tests.helpers.tiny_embedder import tiny_embedder, write_corpus

PASSAGES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a corpus, its questions, two embedders, and indexes of words and of embeddings."""
    root = tmp_path_factory.mktemp("index")
    corpus = write_corpus(root / "corpus.jsonl", PASSAGES)
    (root / "questions.jsonl").write_text(
        json.dumps({"question": "title 3", "supporting_facts": ["title 3"]})
    )
    (root / "elsewhere.jsonl").write_text(
        json.dumps({"question": "who?", "supporting_facts": ["nobody", "nothing"]})
    )
    (root / "half.jsonl").write_text(
        json.dumps({"question": "who?", "supporting_facts": ["half \ud800"]})
    )
    (root / "goldless.jsonl").write_text('{"question": "who?", "supporting_facts": []}\n')
    (root / "empty.jsonl").write_text("")
    (root / "latin.jsonl").write_bytes('{"title": "Zürich", "text": "x"}'.encode("latin-1"))
    (root / "file").write_text("mine")
    for name, changes in (("tiny", {}), ("other", {"seed": 1}), ("wide", {"hidden_size": 32})):
        tiny_embedder(root / name, **changes)
    build = ["build", "--corpus", str(corpus), "--out"]
    assert index.main([*build, str(root / "words"), "--kind", "bm25"]) == 0
    dense = [*build, str(root / "dense"), "--kind", "exact", "--embedder", str(root / "tiny")]
    assert index.main(dense) == 0
    return root


BUILD = "build --kind bm25 --out OUT --corpus"
RECALL = "recall --index DIR/words --questions"
SERVE = "serve --index DIR/words"
MISTAKES = {
    "query --index DIR/dense --embedder DIR/wide who?": r"(dimension 16), but the embedder DIR/wide has dimension 32",
    "query --index DIR/dense --embedder DIR/other who?": (
        "give the embedder of the build, with its prefixes, or build the index again"
    ),
    "build --kind scann --embeddings DIR/words --out OUT": "is of kind bm25 and has no embeddings",
    f"{BUILD} DIR/empty.jsonl": "there is no passage in it; give a corpus with at least one",
    "estimate --kind bm25 --corpus DIR/empty.jsonl": "give at least one",
    f"{BUILD} DIR/latin.jsonl": "DIR/latin.jsonl is not UTF-8 text",
    f"{BUILD} DIR/words": "--corpus DIR/words holds no document (",
    f"{BUILD} DIR/nowhere.jsonl": "DIR/nowhere.jsonl cannot be read (No such file or directory)",
    "build --kind bm25 --corpus DIR/corpus.jsonl --out DIR/file": "DIR/file cannot be written (File exists)",
    f"{RECALL} DIR/questions.jsonl --k 2 13": "k is 13, but the index holds 12 passages: give 1 to 12",
    f"{RECALL} DIR/questions.jsonl --k 0 2": "k is 0, but the index holds 12 passages",
    f"{RECALL} DIR/elsewhere.jsonl --k 2": "none of the 2 gold titles of DIR/elsewhere.jsonl is a title in DIR/words",
    f"{RECALL} DIR/empty.jsonl": "DIR/empty.jsonl holds no question",
    "query --index DIR/words --k 13 who?": "k is 13",
    "query --index DIR/words --k 0 who?": "k is 0",
    "query --index DIR/words --embedder minilm who?": "--embedder is minilm, but an index of kind bm25 does not use it",
    "query --index DIR/words --prefixes e5 who?": "--prefixes is e5, but an index of kind bm25 does not use it",
    f"{RECALL} DIR/questions.jsonl --recall-target 0.9": "--recall-target is 0.9, but an index of kind bm25 does not",
    "estimate --kind bm25 --corpus DIR/corpus.jsonl --storage int8": "--storage is int8, but an index of kind bm25",
    "estimate --kind bm25 --corpus DIR/corpus.jsonl --embedder no/thing": "--embedder is no/thing, but an index of",
    "estimate --kind scann --corpus DIR/corpus.jsonl --languages xx": "--languages is xx, but an index of kind scann",
    "estimate --kind graph --corpus DIR/graph.tsv --tokenizer default": (
        "--tokenizer is default, but an index of kind graph"
    ),
    "build --kind graph --corpus DIR/graph.tsv --out OUT --chunk-tokens 9": (
        "--chunk-tokens is 9, but an index of kind graph"
    ),
    "build --kind graph --corpus DIR/graph.tsv --out OUT --properties P57": (
        "--properties is P57, but an index of kind graph from tables does not use it"
    ),
    "query --index DIR/words he\udcffllo": r"'he\udcffllo' cannot be written as UTF-8: give whole characters",
    "query --index DIR/dense he\udcffllo": r"'he\udcffllo' cannot be written as UTF-8",
    f"{RECALL} DIR/half.jsonl --k 2": r"DIR/half.jsonl, line 1: 'half \ud800' cannot be written as UTF-8",
    f"{RECALL} DIR/goldless.jsonl": "DIR/goldless.jsonl, line 1: a question needs `question` and a list of gold titles",
    f"{RECALL} DIR/questions.jsonl --index DIR/dense --k 2 13": (
        "k is 13, but the index holds 12 passages: give 1 to 12"
    ),
    "query --index DIR/dense --k 13 who?": "k is 13, but the index holds 12 passages",
    "build --kind exact --corpus DIR/corpus.jsonl --out OUT --tokenizer default": "--tokenizer is default, but",
    "query --index DIR/file who?": "there is no index DIR/file",
    f"{SERVE} --port PORT": "127.0.0.1:PORT cannot be opened (Address already in use): choose another --host or --port",
    f"{SERVE} --port 99999": "127.0.0.1:99999 cannot be opened",
    f"{SERVE} --host nowhere.invalid": "nowhere.invalid:8600 cannot be opened",
    f"{SERVE} --max-waiting 0": "--max-waiting is 0: give at least 1",
    f"{SERVE} --deadline-seconds -1": "--deadline-seconds is -1: give a number of seconds above 0",
    f"{SERVE} --deadline-seconds nan": "--deadline-seconds is nan",
}


@pytest.mark.parametrize("words", list(MISTAKES))
def test_a_mistake_is_one_sentence(folder, tmp_path, capsys, words):
    listener = open_port("127.0.0.1", 0)
    listener.listen()
    with listener:
        known = {
            "DIR": str(folder),
            "OUT": str(tmp_path / "out"),
            "PORT": str(listener.getsockname()[1]),
        }

        def filled(text: str) -> str:
            for name, value in known.items():
                text = text.replace(name, value)
            return text

        assert index.main(filled(words).split()) == 2
    shown = capsys.readouterr()
    last = shown.err.splitlines()[-1]
    assert shown.out == ""
    assert last.startswith("error: ")
    assert "Traceback" not in shown.err
    assert filled(MISTAKES[words]) in last
    assert (folder / "file").read_text() == "mine"
