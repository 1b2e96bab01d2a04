"""ScaNN's files in chunks are those of its own builder; a killed build goes on and ends with the
same bytes; memory stays small.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mujica_jax.commands import index
from mujica_jax.errors import UserError
from mujica_jax.retrieval.estimates import scann_building_bytes
from mujica_jax.retrieval.text import index as indexes
from mujica_jax.retrieval.text import scann, scann_package
from mujica_jax.retrieval.text.scann import ScannParameters
from mujica_jax.retrieval.text.scann_package import package
from mujica_jax.retrieval.text.vectors import Embeddings, compressed
from tests.helpers.killed_build import HASHED_ROWS, kill_at, small_chunks
from tests.helpers.paths import ROOT
from tests.helpers.tiny_embedder import tiny_embedder, write_corpus

pytest.importorskip(
    "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
)

ROWS = 3000
DIMENSION = 33
PARAMETERS = ScannParameters(leaves=40, leaves_searched=8, training_rows=ROWS, reordered=50)


@pytest.fixture(scope="module")
def embeddings() -> Embeddings:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(50, DIMENSION))[draw.integers(0, 50, ROWS)] + draw.normal(
        size=(ROWS, DIMENSION)
    )
    # This column has no largest value.
    vectors[:, 5] = 0
    return compressed(
        (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), "bfloat16"
    )


@pytest.mark.parametrize("spherical", [False, True])
def test_the_files_are_those_of_scanns_own_builder(embeddings, tmp_path, monkeypatch, spherical):
    monkeypatch.setattr(scann_package, "CHUNK_ROWS", 1100)
    parameters = dataclasses.replace(PARAMETERS, spherical=spherical)
    progress: list[int] = []
    ours = scann.write_scann(embeddings, parameters, tmp_path / "ours", progress.append)
    assert progress == [0, 1100, 2200, ROWS]
    whole = package().builder(embeddings.float32(), 1, "dot_product")
    whole = whole.tree(40, 8, training_sample_size=ROWS, spherical=spherical, random_init=False)
    whole = whole.score_ah(2, anisotropic_quantization_threshold=0.2, training_sample_size=ROWS)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    whole.reorder(50, quantize=True).build().serialize(str(theirs), relative_path=True)
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in ours.iterdir()) == names
    for name in names:
        # The division of multipliers rounds the last bit otherwise.
        if name == scann_package.MULTIPLIERS:
            np.testing.assert_allclose(np.load(ours / name), np.load(theirs / name), rtol=1e-6)
        elif name.endswith(".npy"):
            np.testing.assert_array_equal(
                np.load(ours / name), np.load(theirs / name), err_msg=name
            )
        else:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def test_what_was_learned_for_something_else_is_learned_again(embeddings, tmp_path, monkeypatch):
    trained: list[int] = []
    train = scann._train

    def counted(*arguments):
        trained.append(1)
        train(*arguments)

    monkeypatch.setattr(scann, "_train", counted)
    folder = tmp_path / "scann"
    for expected, leaves in ((1, 40), (1, 40), (2, 41), (2, 41)):
        scann.write_scann(embeddings, dataclasses.replace(PARAMETERS, leaves=leaves), folder)
        assert len(trained) == expected


def test_a_file_has_all_its_room_before_a_row_is_written(tmp_path):
    """A full disk is an error at that point. A mapped page without room would end the process."""
    rows = np.ones((10, 1024), np.int8)
    path = tmp_path / "rows.npy"
    scann_package._write_rows(path, rows, 0, 1000)
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 1000 * 1024
    scann_package._write_rows(path, 2 * rows, 10, 1000)
    np.testing.assert_array_equal(np.load(path)[:30, 0], np.repeat([1, 2, 0], 10))


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> Path:
    """Return an index of 1,100 passages, whose embeddings others take."""
    root = tmp_path_factory.mktemp("exact")
    corpus = write_corpus(root / "corpus.jsonl", 1100)
    embedder = tiny_embedder(root / "tiny")
    build = ["build", "--corpus", str(corpus), "--kind", "exact", "--embedder", str(embedder)]
    assert index.main([*build, "--out", str(root / "exact")]) == 0
    return root / "exact"


def command(exact: Path, out: Path) -> list[str]:
    return ["build", "--embeddings", str(exact), "--kind", "scann", "--out", str(out)]


MOMENTS = [
    # The index is trained, and `trained.json` is not written yet.
    ("text.scann.write_json", 1, 0),
    # The codes of the first chunk are written, its partitions are not.
    ("text.scann_package._write_rows", 2, 0),
    # The second chunk is written, and `hashed.json` does not count it yet.
    ("text.scann_package.write_json", 2, HASHED_ROWS),
    # Half of what was learned lies beside the codes.
    ("text.scann.shutil.copyfile", 3, 1100),
    # Everything but the manifest is written.
    ("text.index.commit", 1, None),
]


@pytest.mark.parametrize(
    ("function", "call", "hashed"),
    [
        MOMENTS[2],
        *(pytest.param(*moment, marks=pytest.mark.slow) for moment in (*MOMENTS[:2], *MOMENTS[3:])),
    ],
)
def test_a_killed_build_goes_on_and_ends_with_the_same_bytes(
    exact, tmp_path, monkeypatch, function, call, hashed
):
    small_chunks(monkeypatch)
    whole = tmp_path / "whole"
    folder = tmp_path / "killed"
    assert index.main(command(exact, whole)) == 0
    kill_at(function, call, command(exact, folder))
    with pytest.raises(UserError, match="is half-built"):
        indexes.open_index(folder)
    progress = folder / ".scann.new" / "hashed.json"
    assert (
        hashed is None
        or (json.loads(progress.read_text())["rows"] if progress.exists() else 0) == hashed
    )
    assert index.main(command(exact, folder)) == 0
    assert not (folder / ".scann.new").exists()
    for path in (whole / "scann").iterdir():
        assert (folder / "scann" / path.name).read_bytes() == path.read_bytes(), path.name
    queries = ["word1 word2", "word50"]
    assert indexes.open_index(folder).search(queries, 20) == indexes.open_index(whole).search(
        queries, 20
    )


PEAK = """
import sys
from pathlib import Path
import numpy as np
from mujica_jax.retrieval.estimates import scann_building_bytes
from mujica_jax.retrieval.text.scann import ScannParameters, write_scann
from mujica_jax.retrieval.text.scann_package import package
from mujica_jax.retrieval.text.vectors import open_embeddings

def kibibytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1])

folder, rows, dimension = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
package()
embeddings = open_embeddings(folder, rows, dimension, "bfloat16")
parameters = ScannParameters(leaves=100, leaves_searched=10, training_rows=5000, reordered=100)
write_scann(open_embeddings(folder, 6000, dimension, "bfloat16"), parameters, folder / "small")
Path("/proc/self/clear_refs").write_text("5")
before = kibibytes("VmRSS")
write_scann(embeddings, parameters, folder / "large")
print((kibibytes("VmHWM") - before) * 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Only a chunk is held of the rows outside of the sample.

    ScaNN's own builder takes four times their bytes and more.
    """
    rows = 200_000
    dimension = 128
    draw = np.random.default_rng(0)
    size = rows * dimension * 2
    with open(tmp_path / "embeddings.bfloat16", "wb") as file:
        for _ in range(0, rows, 10_000):
            file.write(draw.normal(size=(10_000, dimension)).astype(ml_dtypes.bfloat16).tobytes())
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), str(rows), str(dimension)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2 * size
    parameters = ScannParameters(leaves=100, leaves_searched=10, training_rows=5000, reordered=100)
    estimated = scann_building_bytes(parameters, rows, dimension)
    assert estimated / 2 < int(run.stdout) < 2 * estimated, (
        "as `index estimate` says, within a factor of two"
    )
