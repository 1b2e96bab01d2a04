"""ScaNN finds nearly what numpy finds, wherever its files lie, and its faults are one sentence."""

import dataclasses
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from mujica_jax.commands import index
from mujica_jax.errors import UserError
from mujica_jax.retrieval.text import index as indexes
from mujica_jax.retrieval.text import scann_package
from mujica_jax.retrieval.text.dense import best_rows
from mujica_jax.retrieval.text.scann import (
    ScannParameters,
    ScannSearch,
    parameters_for,
    write_scann,
)
from mujica_jax.retrieval.text.scann_package import (
    KERNELS,
    kernels_allowed,
    package,
    usable_kernels,
)
from mujica_jax.retrieval.text.vectors import Storage, compressed
from tests.helpers.tiny_embedder import tiny_embedder, write_corpus

pytest.importorskip(
    "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
)

ROWS = 4000
PARAMETERS = parameters_for(ROWS, of_length_1=True)


def search_over(
    vectors: np.ndarray, folder: Path, parameters: ScannParameters, storage: Storage = "bfloat16"
) -> ScannSearch:
    return ScannSearch.load(
        write_scann(compressed(vectors, storage), parameters, folder), len(vectors), parameters
    )


@pytest.fixture(scope="module")
def clustered() -> tuple[np.ndarray, np.ndarray]:
    """Return vectors around 60 centres, and queries beside some of them."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(60, 32))
    vectors = centres[draw.integers(0, 60, ROWS)] + 0.6 * draw.normal(size=(ROWS, 32))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[:50] + 0.05 * draw.normal(size=(50, 32))
    return vectors.astype(np.float32), queries.astype(np.float32)


@pytest.fixture(scope="module")
def built(clustered, tmp_path_factory) -> ScannSearch:
    return search_over(clustered[0], tmp_path_factory.mktemp("scann") / "index", PARAMETERS)


def test_nearly_all_of_what_numpy_finds(built, clustered):
    vectors, queries = clustered
    scores, positions = built.search(queries, 10)
    expected_scores, expected = best_rows(queries, vectors, 10)
    shared = [
        len(set(ours) & set(theirs)) for ours, theirs in zip(positions, expected, strict=True)
    ]
    assert np.mean(shared) / 10 > 0.95
    assert (np.diff(scores, axis=1) <= 0).all()
    np.testing.assert_allclose(scores[:, 0], expected_scores[:, 0], atol=0.02)


def test_the_files_may_be_moved(clustered, tmp_path):
    folder = write_scann(compressed(clustered[0], "bfloat16"), PARAMETERS, tmp_path / "scann")
    before = ScannSearch.load(folder, ROWS, PARAMETERS)
    shutil.move(folder, tmp_path / "moved")
    after = ScannSearch.load(tmp_path / "moved", ROWS, PARAMETERS)
    for ours, theirs in zip(
        after.search(clustered[1], 7), before.search(clustered[1], 7), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert before.search(clustered[1][:0], 7)[1].shape == (0, 7)


def test_the_kernels_that_the_processor_has_are_used_and_find_the_same(
    clustered, tmp_path, monkeypatch
):
    if not (kernels := usable_kernels()):
        pytest.skip("this processor has neither AVX2 nor AVX-512")
    folder = write_scann(compressed(clustered[0], "bfloat16"), PARAMETERS, tmp_path / "scann")
    allowed = [kernels_allowed(package(), name) for name in kernels]
    assert all(variable.value for variable in allowed), (
        "ScaNN falls back to SSE4: does it have other variables now?"
    )
    wide = ScannSearch.load(folder, ROWS, PARAMETERS).search(clustered[1], 10)
    monkeypatch.setattr(scann_package, "usable_kernels", lambda: [])
    try:
        for variable in allowed:
            variable.value = False
        narrow = ScannSearch.load(folder, ROWS, PARAMETERS).search(clustered[1], 10)
    finally:
        for variable in allowed:
            variable.value = True
    np.testing.assert_allclose(wide[0], narrow[0], atol=1e-5)
    # Rows that are equally near may change places.
    assert (wide[1] == narrow[1]).mean() > 0.99


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("sse4_1 sse4_2 avx", []),
        ("avx avx2 fma f16c bmi1 bmi2", ["avx2"]),
        ("avx avx2 fma f16c bmi1 bmi2 avx512f avx512cd avx512er", ["avx2"]),  # Knights Landing
        (" ".join(sorted(KERNELS["avx512"])), ["avx2", "avx512"]),
    ],
)
def test_a_processor_gets_only_kernels_that_it_can_run(flags, expected, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t\t:\n\nprocessor\t: 1\n")
    assert usable_kernels(cpuinfo) == expected
    assert usable_kernels(tmp_path / "missing") == []


def test_fewer_than_k_in_the_leaves_are_marked(clustered, tmp_path):
    narrow = dataclasses.replace(PARAMETERS, leaves_searched=1)
    scores, positions = search_over(clustered[0], tmp_path / "scann", narrow, "int8").search(
        clustered[1], 2000
    )
    assert (positions[:, 0] >= 0).all()
    assert (positions[:, -1] == -1).all()
    assert (positions < ROWS).all()
    for row in positions:
        marked = row[row >= 0]
        assert len(set(marked)) == len(marked) < 2000
    assert (scores[positions < 0] == -np.inf).all()


@pytest.mark.parametrize("rows", [1, 3, 1023])
def test_a_small_corpus_is_searched_exactly(rows, tmp_path):
    vectors = np.random.default_rng(1).normal(size=(rows, 8)).astype(np.float32)
    search = search_over(vectors, tmp_path / "scann", parameters_for(rows, of_length_1=False))
    stored = compressed(vectors, "bfloat16").float32()
    k = min(rows, 5)
    np.testing.assert_array_equal(
        search.search(vectors[:3], k)[1], best_rows(vectors[:3], stored, k)[1]
    )


@pytest.mark.parametrize(
    ("rows", "leaves", "searched"),
    [(1023, 0, 0), (6119, 78, 78), (100_000, 316, 95), (10**6, 1000, 300)],
)
def test_parameters_follow_from_the_size(rows, leaves, searched):
    parameters = parameters_for(rows, of_length_1=True)
    assert parameters.leaves == leaves
    assert parameters.leaves_searched == searched
    assert parameters.training_rows <= rows
    assert parameters.spherical == (leaves > 0)
    assert not parameters_for(rows, of_length_1=False).spherical


@pytest.fixture
def folders(tmp_path) -> tuple[list[str], Path]:
    """Return the command that builds a ScaNN index of 1,100 passages, and its directory.

    The embeddings are those of another index.
    """
    corpus = write_corpus(tmp_path / "corpus.jsonl", 1100)
    embedder = str(tiny_embedder(tmp_path / "tiny"))
    exact = ["build", "--corpus", str(corpus), "--kind", "exact", "--embedder", embedder]
    assert index.main([*exact, "--out", str(tmp_path / "exact")]) == 0
    built = [
        "build",
        "--embeddings",
        str(tmp_path / "exact"),
        "--kind",
        "scann",
        "--out",
        str(tmp_path / "scann"),
    ]
    return built, tmp_path / "scann"


def test_faults_of_scann_are_one_sentence(folders, monkeypatch, capsys):
    command, folder = folders
    assert index.main(command) == 0
    with pytest.raises(UserError, match="is of kind scann, which does not use it"):
        indexes.open_index(folder, recall_target=0.9)
    (folder / "scann" / "ah_codebook.pb").write_bytes(b"")
    with pytest.raises(UserError, match=r"ah_codebook\.pb has 0 bytes"):
        indexes.open_index(folder)
    with pytest.raises(UserError, match="cannot be loaded by ScaNN"):
        ScannSearch.load(folder / "nothing", 5, PARAMETERS)
    monkeypatch.setitem(sys.modules, "scann.scann_ops.py", None)
    with pytest.raises(UserError, match=r"ScaNN cannot be imported on .*: use --kind exact, which"):
        search_over(
            np.ones((4, 8), np.float32), folder / "other", parameters_for(4, of_length_1=False)
        )
