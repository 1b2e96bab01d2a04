"""ScaNN's files written in chunks, so that the embeddings of a corpus are never in memory as a whole.

ScaNN's own builder takes float32 of all rows and copies them: four times the bytes of bfloat16 and more. Here it is
given a sample, and partitions and codebook come of that. Under these it then assigns and hashes chunk after chunk, as
it does with all rows at once, and what it finds is put together in the files that its loader reads; a test compares
them with those of its own builder.

    FOLDER/trained/          what ScaNN learned from the sample
    FOLDER/trained.json      written after it: checksums and parameters
    FOLDER/index/            hashed_dataset.npy [rows, blocks] uint8, a code of four bits a block;
                             datapoint_to_token.npy [rows] int32, the partition;
                             int8_dataset.npy [rows, dimension], round(x * multiplier); and the trained files
    FOLDER/hashed.json       how many rows are there: a killed build goes on behind them

The most memory is taken by the sample, a few times in float32.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mujica_jax.retrieval.manifest import read_json, write_json
from mujica_jax.retrieval.text.embeddings import Embeddings
from mujica_jax.retrieval.text.scann_search import ScannParameters, package
from mujica_jax.storage.manifest import sha256_of

CHUNK_ROWS = 32_768
MAX_INTEGER = 127
HASHES, PARTITIONS, EIGHT_BITS = "hashed_dataset.npy", "datapoint_to_token.npy", "int8_dataset.npy"  # a row a passage
MULTIPLIERS = "int8_multipliers.npy"  # [dimension]
CHUNK = "chunk.npy"
# What ScaNN's loader is told of a chunk: with a codebook and partitions there, it computes codes and nothing else.
CHUNK_ASSETS = """
assets { asset_type: AH_CENTERS asset_path: "ah_codebook.pb" }
assets { asset_type: PARTITIONER asset_path: "serialized_partitioner.pb" }
assets { asset_type: DATASET_NPY asset_path: "chunk.npy" }
"""


def write_scann(
    embeddings: Embeddings,
    parameters: ScannParameters,
    folder: Path,
    on_rows: Callable[[int], None] = lambda done: None,
) -> Path:
    """The folder with the whole index, inside `folder`. Goes on with what an earlier start left there, if that had the
    same parameters.
    """
    index, trained = folder / "index", folder / "trained"
    about = dataclasses.asdict(parameters) | {"rows": len(embeddings), "dimension": embeddings.dimension}
    if not _is_trained(folder, about):
        shutil.rmtree(folder, ignore_errors=True)
        trained.mkdir(parents=True)
        index.mkdir()
        if parameters.leaves:
            _train(embeddings, parameters, trained)
        else:
            made = package().builder(embeddings.float32(), 1, "dot_product").score_brute_force()
            _serialize(made.build(), trained)
        sums = {path.name: sha256_of(path) for path in sorted(trained.iterdir())}
        write_json(folder / "trained.json", {"about": about, "files": sums})
    if parameters.leaves:
        _hash(embeddings, parameters, folder, on_rows)
    for path in trained.iterdir():
        shutil.copyfile(path, index / path.name)
    return index


def _is_trained(folder: Path, about: dict[str, Any]) -> bool:
    """Whether an earlier start has done it, for the same parameters, and all of it is there."""
    if not (folder / "trained.json").exists():
        return False
    said = read_json(folder / "trained.json")
    paths = {folder / "trained" / name: sum for name, sum in said["files"].items()}
    return said["about"] == about and all(path.exists() and sha256_of(path) == sum for path, sum in paths.items())


def _train(embeddings: Embeddings, parameters: ScannParameters, folder: Path) -> None:
    """Partitions and codebook of a sample, and the multipliers of all rows."""
    chosen = np.random.default_rng(0).choice(len(embeddings), parameters.training_rows, replace=False)
    chosen.sort()
    sample = np.empty((len(chosen), embeddings.dimension), np.float32)
    largest = np.zeros(embeddings.dimension, np.float32)
    for start, rows in embeddings.chunks(CHUNK_ROWS):
        first, last = np.searchsorted(chosen, (start, start + len(rows)))
        sample[first:last] = rows[chosen[first:last] - start]
        np.maximum(largest, np.abs(rows).max(axis=0), out=largest)
    made = package().builder(sample, 1, "dot_product")
    made = made.tree(
        parameters.leaves,
        parameters.leaves_searched,
        training_sample_size=len(sample),
        spherical=parameters.spherical,
        random_init=False,  # by k-means++, which draws the same centres each time; the other way does not
    )
    made = made.score_ah(
        parameters.dimensions_a_block,
        anisotropic_quantization_threshold=parameters.anisotropic_threshold,
        training_sample_size=len(sample),
    )
    _serialize(made.reorder(parameters.reordered, quantize=True).build(), folder)
    for name in (HASHES, PARTITIONS, EIGHT_BITS):  # of the sample
        (folder / name).unlink()
    largest[largest == 0] = MAX_INTEGER
    np.save(folder / MULTIPLIERS, MAX_INTEGER / largest)


def _hash(embeddings: Embeddings, parameters: ScannParameters, folder: Path, on_rows: Callable[[int], None]) -> None:
    """A chunk counts once its bytes are on disk and `hashed.json` says so."""
    done = read_json(folder / "hashed.json")["rows"] if (folder / "hashed.json").exists() else 0
    multipliers = np.load(folder / "trained" / MULTIPLIERS)
    on_rows(done)
    for start, rows in embeddings.chunks(CHUNK_ROWS, done):
        found = _hashed(rows, folder) | {EIGHT_BITS: np.rint(rows * multipliers).astype(np.int8)}
        for name, values in found.items():
            _put(folder / "index" / name, values, start, len(embeddings))
        write_json(folder / "hashed.json", {"rows": start + len(rows)})
        on_rows(start + len(rows))


def _hashed(rows: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """Codes and partitions of some rows, by ScaNN under what it has learned."""
    given, made = folder / "trained" / CHUNK, folder / "chunk"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    np.save(given, rows)
    searcher = package().ScannSearcher(package().scann_pybind.ScannNumpy(str(given.parent), CHUNK_ASSETS))
    _serialize(searcher, made)
    found = {name: np.load(made / name) for name in (HASHES, PARTITIONS)}
    given.unlink()
    shutil.rmtree(made)
    return found


def _serialize(searcher: Any, folder: Path) -> None:
    """Raises OSError where ScaNN cannot write."""
    try:
        searcher.serialize(str(folder), relative_path=True)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _put(path: Path, rows: np.ndarray, start: int, of: int) -> None:
    """Some rows of a .npy file, which has its full size on the disk from the first ones on. Raises OSError where that
    is full.
    """
    file = np.lib.format.open_memmap(path, "r+" if start else "w+", rows.dtype, (of, *rows.shape[1:]))
    if not start:  # a page that is written and has no place on the disk would end the process by a signal
        with open(path, "r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, path.stat().st_size)
    file[start : start + len(rows)] = rows
    file.flush()
