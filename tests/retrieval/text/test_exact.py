"""Search on the accelerator finds what numpy finds, on one device and on eight."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mujica_jax.retrieval.text import exact
from mujica_jax.retrieval.text.dense import best_rows
from mujica_jax.retrieval.text.exact import ExactSearch, layout
from mujica_jax.retrieval.text.vectors import Embeddings, compressed
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS

DRAW = np.random.default_rng(0)
VECTORS = DRAW.normal(size=(1001, 24)).astype(np.float32)
QUERIES = DRAW.normal(size=(5, 24)).astype(np.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(exact, "BLOCK_ROWS", 128)


@pytest.mark.parametrize("recall_target", [None, 0.9])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_what_numpy_finds(storage, recall_target):
    """On a CPU approximate search is exact. What it costs a TPU in recall cannot be seen here."""
    embeddings = compressed(VECTORS, storage)
    scores, positions = ExactSearch(embeddings, recall_target=recall_target).search(QUERIES, 7)
    expected_scores, expected = best_rows(QUERIES, embeddings.float32(), 7)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 300])
def test_padding_is_never_found(rows):
    # every score is below the zero of a padded row
    embeddings = compressed(-np.abs(VECTORS[:rows]), "bfloat16")
    scores, positions = ExactSearch(embeddings).search(np.abs(QUERIES), rows)
    np.testing.assert_array_equal(np.sort(positions, axis=1), np.tile(np.arange(rows), (5, 1)))
    assert np.isfinite(scores).all()


def test_ties_are_in_the_order_of_the_corpus():
    embeddings = compressed(np.ones((400, 24), np.float32), "bfloat16")
    _, positions = ExactSearch(embeddings).search(QUERIES, 300)
    np.testing.assert_array_equal(positions, np.tile(np.arange(300), (5, 1)))


def test_more_queries_than_a_call_takes(monkeypatch):
    monkeypatch.setattr(exact, "MAX_QUERIES", 4)
    queries = DRAW.normal(size=(11, 24)).astype(np.float32)
    embeddings = Embeddings(compressed(VECTORS, "bfloat16").vectors)
    _, positions = ExactSearch(embeddings).search(queries, 3)
    np.testing.assert_array_equal(positions, best_rows(queries, embeddings.float32(), 3)[1])


def test_a_new_k_is_seldom_a_new_program():
    embeddings = Embeddings(compressed(VECTORS[:300], "bfloat16").vectors)
    search = ExactSearch(embeddings)
    before = exact.search_program.cache_info().currsize
    for k in (33, 34, 50, 63, 64):
        scores, positions = search.search(QUERIES, k)
        assert scores.shape == positions.shape == (5, k)
        np.testing.assert_array_equal(positions, best_rows(QUERIES, embeddings.float32(), k)[1])
    assert exact.search_program.cache_info().currsize == before + 1


@pytest.mark.parametrize(
    ("rows", "devices"), [(1, 1), (1, 8), (128 * 8, 8), (128 * 8 + 1, 8), (10_000, 3)]
)
def test_every_device_has_as_many_whole_blocks(rows, devices):
    block, padded = layout(rows, devices)
    assert padded >= rows
    assert padded % (devices * block) == 0
    assert block % 128 == 0


def test_eight_devices_find_what_numpy_finds():
    finished = subprocess.run(
        [sys.executable, "-m", "tests.helpers.search_on_devices"],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        },
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert finished.returncode == 0, finished.stderr
    measured = json.loads(finished.stdout)
    assert measured["devices"] == 8
    assert measured["rows_on_each"] == 256
    assert measured["searches"] == 4
    assert measured["differing_positions"] == 0
    assert measured["largest_difference"] < 1e-5
