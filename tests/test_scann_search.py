"""ScaNN finds nearly what numpy finds, is saved and loaded without building, and its index is rebuilt cleanly after a kill."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_embedder import tiny_embedder, write_corpus

from mujica_jax import index
from mujica_jax.errors import UserError
from mujica_jax.retrieval import indexes, scann_search
from mujica_jax.retrieval.dense import best_rows
from mujica_jax.retrieval.embeddings import compressed
from mujica_jax.retrieval.scann_search import ScannSearch, parameters_for

pytest.importorskip("scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone")

ROOT = Path(__file__).resolve().parent.parent
ROWS = 4000


@pytest.fixture(scope="module")
def clustered() -> tuple[np.ndarray, np.ndarray]:
    """Vectors around 60 centres, and queries beside some of them."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(60, 32))
    vectors = centres[draw.integers(0, 60, ROWS)] + 0.6 * draw.normal(size=(ROWS, 32))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[:50] + 0.05 * draw.normal(size=(50, 32))
    return vectors.astype(np.float32), queries.astype(np.float32)


@pytest.fixture(scope="module")
def built(clustered) -> ScannSearch:
    return ScannSearch.build(compressed(clustered[0], "bfloat16"), parameters_for(ROWS))


def test_nearly_all_of_what_numpy_finds(built, clustered):
    vectors, queries = clustered
    scores, positions = built.search(queries, 10)
    expected_scores, expected = best_rows(queries, vectors, 10)
    found = [len(set(ours) & set(theirs)) for ours, theirs in zip(positions, expected, strict=True)]
    assert np.mean(found) / 10 > 0.95
    assert (np.diff(scores, axis=1) <= 0).all()
    np.testing.assert_allclose(scores[:, 0], expected_scores[:, 0], atol=0.02)


def test_saved_and_loaded_without_building(built, clustered, tmp_path, monkeypatch):
    built.save(tmp_path / "scann")
    shutil.move(tmp_path / "scann", tmp_path / "moved")
    monkeypatch.setattr(ScannSearch, "build", None)
    loaded = ScannSearch.load(tmp_path / "moved", ROWS, parameters_for(ROWS))
    for ours, theirs in zip(loaded.search(clustered[1], 7), built.search(clustered[1], 7), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert built.search(clustered[1][:0], 7)[1].shape == (0, 7)


def test_fewer_than_k_in_the_leaves_are_marked(clustered):
    few = parameters_for(ROWS)
    narrow = ScannSearch.build(
        compressed(clustered[0], "int8"),
        scann_search.ScannParameters(leaves=few.leaves, leaves_searched=1, training_rows=ROWS, reordered=100),
    )
    scores, positions = narrow.search(clustered[1], 2000)
    assert (positions[:, 0] >= 0).all() and (positions[:, -1] == -1).all() and (positions < ROWS).all()
    for row in positions:
        kept = row[row >= 0]
        assert len(set(kept)) == len(kept) < 2000
    assert (scores[positions < 0] == -np.inf).all()


@pytest.mark.parametrize("rows", [1, 3, 1023])
def test_a_small_corpus_is_searched_exactly(rows):
    vectors = np.random.default_rng(1).normal(size=(rows, 8)).astype(np.float32)
    search = ScannSearch.build(compressed(vectors, "bfloat16"), parameters_for(rows))
    kept = compressed(vectors, "bfloat16").float32()
    k = min(rows, 5)
    np.testing.assert_array_equal(search.search(vectors[:3], k)[1], best_rows(vectors[:3], kept, k)[1])


@pytest.mark.parametrize(("rows", "leaves", "searched"), [(1023, 0, 0), (6119, 78, 78), (10**6, 1000, 100)])
def test_parameters_follow_from_the_size(rows, leaves, searched):
    found = parameters_for(rows)
    assert (found.leaves, found.leaves_searched) == (leaves, searched)
    assert found.training_rows <= rows


@pytest.fixture
def folders(tmp_path) -> tuple[list[str], Path]:
    """The command that builds a ScaNN index of 1,100 passages, and its directory; the embeddings are those of another index."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", 1100)
    embedder = str(tiny_embedder(tmp_path / "tiny"))
    exact = ["build", "--corpus", str(corpus), "--kind", "accelerator", "--embedder", embedder]
    assert index.main([*exact, "--out", str(tmp_path / "exact")]) == 0
    built = ["build", "--embeddings", str(tmp_path / "exact"), "--kind", "scann", "--out", str(tmp_path / "scann")]
    return built, tmp_path / "scann"


KILLED = """
import sys, time
from mujica_jax import index
from mujica_jax.retrieval.scann_search import ScannSearch
save = ScannSearch.save
def slowly(self, folder):
    save(self, folder)
    time.sleep(60)
ScannSearch.save = slowly
index.main(sys.argv[1:])
"""


def test_a_kill_while_scann_writes_leaves_nothing_that_counts(folders):
    command, folder = folders
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", KILLED, *command], env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (folder / ".scann.new" / "scann_assets.pbtxt").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(UserError, match="is half-built"):
        indexes.open_index(folder)
    (folder / ".scann.new" / "scann_assets.pbtxt").write_text("half of it")
    assert index.main(command) == 0
    opened, exact = indexes.open_index(folder), indexes.open_index(folder.parent / "exact")
    assert not (folder / ".scann.new").exists()
    texts = [passage.contents for passage in opened.passages[:20]]
    ours, theirs = (of.search(texts, 20) for of in (opened, exact))
    nearest = [hits[0][0] in dict(candidates) for hits, candidates in zip(theirs, ours, strict=True)]
    assert sum(nearest) >= 18  # the vectors of a random embedder lie close together


def test_faults_of_scann_are_one_sentence(folders, monkeypatch, capsys):
    command, folder = folders
    assert index.main(command) == 0
    with pytest.raises(UserError, match="is of kind scann, which has its own"):
        indexes.open_index(folder, recall_target=0.9)
    (folder / "scann" / "ah_codebook.pb").write_bytes(b"")
    with pytest.raises(UserError, match=r"ah_codebook\.pb has 0 bytes"):
        indexes.open_index(folder)
    with pytest.raises(UserError, match="cannot be loaded by ScaNN"):
        ScannSearch.load(folder / "nothing", 5, parameters_for(5))
    monkeypatch.setitem(sys.modules, "scann.scann_ops.py", None)
    with pytest.raises(UserError, match=r"ScaNN cannot be imported .*use an index of kind accelerator elsewhere"):
        ScannSearch.build(compressed(np.ones((4, 8), np.float32), "bfloat16"), parameters_for(4))
