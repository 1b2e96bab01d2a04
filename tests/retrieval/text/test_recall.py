"""The recall of a ScaNN index beside exact search, as its build prints it, is what brute force
says.
"""

import importlib.util
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mujica_jax.commands import index
from mujica_jax.retrieval.text import index as indexes
from mujica_jax.retrieval.text import recall
from mujica_jax.retrieval.text.vectors import compressed
from tests.helpers.tiny_embedder import FIELDS, tiny_embedder, write_corpus

LINE = r"recall@(\d+) compared with exact search: ([\d.]+)% \(with ([\d,]+) passages as queries\)"
PASSAGES = 1500  # so many that ScaNN learns partitions
needs_scann = pytest.mark.skipif(
    importlib.util.find_spec("scann") is None,
    reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone",
)


class Listed:
    """A search that finds the positions of a list."""

    def __init__(self, positions: list[list[int]]) -> None:
        self.positions = np.array(positions)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        positions = self.positions[:, :k]
        return np.zeros(positions.shape, np.float32), positions


def test_the_share_of_neighbours_that_are_found_is_counted_without_the_query_itself():
    """Five numbers lie on a line, and k is 4, so that all others are neighbours.

    0 finds three of four, 1 all, 2 two, 3 none and 4 one: 10 of 20.
    """
    embeddings = compressed(np.arange(1.0, 6.0, dtype=np.float32)[:, None], "bfloat16")
    search = Listed(
        [
            [0, 1, 2, 3, -1],
            [0, 1, 2, 3, 4],
            [2, 0, 1, -1, -1],
            [3, -1, -1, -1, -1],
            [1, 4, -1, -1, -1],
        ]
    )
    assert recall.measure_beside_exact(search, embeddings) == {
        "percent": 50.0,
        "k": 4,
        "queries": 5,
    }


def test_only_the_nearest_count(monkeypatch):
    """Each finds itself beside the neighbour with the largest product.

    That is 3 for 0 to 2, and 2 for 3.
    """
    monkeypatch.setattr(recall, "NEIGHBOURS", 1)
    embeddings = compressed(np.array([[1.0], [2.0], [3.0], [4.0]], np.float32), "bfloat16")
    search = Listed([[3, 0], [1, 3], [2, 1], [3, 2]])
    assert recall.measure_beside_exact(search, embeddings) == {
        "percent": 75.0,
        "k": 1,
        "queries": 4,
    }
    assert (
        recall.measure_beside_exact(Listed([[0]]), compressed(np.ones((1, 2), np.float32), "int8"))[
            "queries"
        ]
        == 1
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build a corpus, an embedder, and an exact index."""
    root = tmp_path_factory.mktemp("recall")
    corpus = write_corpus(root / "corpus.jsonl", PASSAGES)
    embedder = tiny_embedder(root / "tiny")
    exact = ["build", "--corpus", str(corpus), "--kind", "exact", "--embedder", str(embedder)]
    assert index.main([*exact, "--out", str(root / "exact")]) == 0
    return root


def build(root: Path, out: Path) -> list[str]:
    return ["build", "--embeddings", str(root / "exact"), "--kind", "scann", "--out", str(out)]


def brute_force(folder: Path) -> float:
    """Return the recall by all products at once, sorted. ScaNN is asked query by query."""
    vectors = np.fromfile(folder / "embeddings.bfloat16", ml_dtypes.bfloat16).astype(np.float64)
    vectors = vectors.reshape(PASSAGES, FIELDS["hidden_size"])
    products = vectors @ vectors.T
    np.fill_diagonal(products, -np.inf)
    nearest = np.argsort(-products, axis=1)[:, :10]
    opened = indexes.open_index(folder)
    queries = np.random.default_rng(0).choice(PASSAGES, 500, replace=False)
    hits = 0
    for query in queries:
        (neighbours,) = opened.search_encoded(vectors[query : query + 1].astype(np.float32), 11)
        others = [position for position, _ in neighbours if position != query]
        hits += len(set(others[:10]) & set(nearest[query].tolist()))
    return 100 * hits / 5000


@needs_scann
@pytest.mark.parametrize("rows_at_once", [32_768, 400])
def test_the_printed_recall_is_that_of_brute_force(
    built, tmp_path, capsys, monkeypatch, rows_at_once
):
    monkeypatch.setattr(recall, "SCORED_ROWS", rows_at_once)
    assert index.main(build(built, tmp_path / "scann")) == 0
    (line,) = re.findall(LINE, capsys.readouterr().err)
    expected = brute_force(tmp_path / "scann")
    assert 50 < expected < 100, "what is compared says something"
    assert line[0] == "10"
    assert line[2] == "500"
    assert float(line[1]) == pytest.approx(expected, abs=0.1)
    manifest = json.loads((tmp_path / "scann" / "manifest.json").read_text())
    assert manifest["recall"] == {"percent": float(line[1]), "k": 10, "queries": 500}

    # The same command again prints it, and measures nothing.
    monkeypatch.setattr(indexes, "measure_beside_exact", None)
    assert index.main(build(built, tmp_path / "scann")) == 0
    assert re.findall(LINE, capsys.readouterr().err) == [line]


@needs_scann
@pytest.mark.parametrize(
    "before", [None, 3, {"percent": "99"}, {"percent": None, "k": 10, "queries": 5}]
)
def test_an_index_without_a_recall_is_measured_when_it_is_built_again(
    built, tmp_path, capsys, before
):
    """An earlier release left none. The version of the index stays."""
    assert index.main(build(built, tmp_path / "scann")) == 0
    (first,) = re.findall(LINE, capsys.readouterr().err)
    file = tmp_path / "scann" / "manifest.json"
    manifest = json.loads(file.read_text())
    changed = {name: value for name, value in manifest.items() if name != "recall"}
    file.write_text(json.dumps(changed if before is None else changed | {"recall": before}))
    assert index.main(build(built, tmp_path / "scann")) == 0
    assert re.findall(LINE, capsys.readouterr().err) == [first]
    assert json.loads(file.read_text()) == manifest


@needs_scann
def test_an_index_that_is_larger_than_the_free_memory_is_built_and_not_measured(
    built, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(indexes, "available_bytes", lambda: 1000)
    assert index.main(build(built, tmp_path / "scann")) == 0
    messages = capsys.readouterr().err
    assert (
        "recall compared with exact search was not measured: loading the index may take 0.0 GB of "
        "memory, but" in messages
    )
    manifest = json.loads((tmp_path / "scann" / "manifest.json").read_text())
    assert "recall" not in manifest
    monkeypatch.undo()
    assert index.main(build(built, tmp_path / "scann")) == 0
    assert re.search(LINE, capsys.readouterr().err)
    assert indexes.open_index(tmp_path / "scann").version == manifest["version"]
