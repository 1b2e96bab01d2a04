"""Checkpoints of training: parameters, optimiser state, step, and a small dictionary of the loop around them.

    directory/000007/arrays/      Orbax, one array a leaf
    directory/000007/COMMITTED    JSON: loop state, shapes, a checksum an array, size of every file; written last, by rename

A checkpoint without COMMITTED, or whose files have other sizes, or whose arrays have other checksums (a flipped bit passes Orbax
unnoticed), is ignored, and the one before it is used. Numbers only count up, so nothing is ever overwritten; the last `keep` stay.
A save of 0.3 million parameters takes about 60 ms on two cores, so saving is synchronous: what was saved is what the step left.
Called by the methods around `learning.trainer.fit`. Orbax is imported on first use: `eval` and `sample` need not pay its 0.3 s.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array

from mujica_jax.errors import UserError
from mujica_jax.learning.optimizer import path_name
from mujica_jax.trajectories.objects import explained, sync

COMMITTED = "COMMITTED"
State = TypeVar("State")
_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one directory. Every process of a multi-host run sees the same directory and calls every method."""

    def __init__(self, directory: str | Path, *, keep: int) -> None:
        assert keep >= 1, "keep at least one checkpoint"
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._number = max(self._numbers(), default=0)
        _meet_other_processes("checkpoints are listed")

    def save(self, state: Any, loop_state: dict[str, Any]) -> None:
        """Write a checkpoint and remove those beyond the last `keep`. `loop_state` holds what JSON holds."""
        import orbax.checkpoint as orbax

        self._number += 1
        folder = self._folder(self._number)
        arrays = _flatten(state)
        with explained(folder), orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(folder / "arrays", args=orbax.args.StandardSave(arrays))
        manifest = {
            "loop_state": loop_state,
            "shapes": {name: list(array.shape) for name, array in arrays.items()},
            "checksums": _checksums(arrays),
        }
        if jax.process_index() == 0:
            with explained(folder):
                _commit(folder, manifest | {"file_bytes": _file_bytes(folder)})
                self._remove_old()
        _meet_other_processes("the checkpoint is committed")

    def restore_latest(self, template: State) -> tuple[State, dict[str, Any]] | None:
        """The newest intact checkpoint, with the structure, types and shardings of `template` (arrays or `jax.ShapeDtypeStruct`s).

        None if there is none. A checkpoint of another model shape is an error: the run directory belongs to another model.
        """
        for number in sorted(self._numbers(), reverse=True):
            folder = self._folder(number)
            manifest = _manifest(folder)
            if manifest is None:
                _log.warning("checkpoint %s is incomplete and is ignored", folder)
                continue
            _refuse_other_shapes(folder, manifest["shapes"], template)
            state = _restore(folder, manifest["checksums"], template)
            if state is not None:
                return state, manifest["loop_state"]
        return None

    def _numbers(self) -> list[int]:
        """Numbers of all checkpoints, complete or not."""
        if not self.directory.exists():
            return []
        return [int(folder.name) for folder in self.directory.iterdir() if folder.name.isdigit()]

    def _folder(self, number: int) -> Path:
        return self.directory / f"{number:06d}"

    def _remove_old(self) -> None:
        """Keep the last complete ones. Incomplete ones are older than the one just written: nobody will finish them."""
        kept = 0
        for number in sorted(self._numbers(), reverse=True):
            complete = (self._folder(number) / COMMITTED).exists()
            if complete and kept < self.keep:
                kept += 1
            else:
                shutil.rmtree(self._folder(number))


def _flatten(state: Any) -> dict[str, Any]:
    """Every leaf under its path, so that what lies on disk depends on no class of ours."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    flat = {path_name(path): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "every leaf has a path of its own"
    return flat


def _checksums(arrays: dict[str, Array]) -> dict[str, int]:
    """Sum of each array's bit patterns modulo 2^32, which any flipped bit changes. Every process adds up its own shards, on the host."""

    def of_shards(array: Array) -> int:
        bits = np.dtype(f"uint{8 * array.dtype.itemsize}")
        shards = [np.asarray(shard.data) for shard in array.addressable_shards if shard.replica_id == 0]
        return sum(int(shard.view(bits).sum(dtype=np.uint64)) for shard in shards) % 2**32

    sums = np.array([of_shards(array) for array in arrays.values()], np.uint32)
    if jax.process_count() > 1:
        sums = multihost_utils.process_allgather(sums).sum(axis=0, dtype=np.uint32)
    return dict(zip(arrays, sums.tolist(), strict=True))


def _commit(folder: Path, manifest: dict[str, Any]) -> None:
    unfinished = folder / f"{COMMITTED}.unfinished"
    unfinished.write_text(json.dumps(manifest, sort_keys=True, allow_nan=False))
    sync(unfinished)
    unfinished.rename(folder / COMMITTED)
    sync(folder)


def _file_bytes(folder: Path) -> dict[str, int]:
    """Size of every file of the arrays."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in (folder / "arrays").rglob("*") if path.is_file()}


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What COMMITTED says, or None if the checkpoint is not complete."""
    try:
        manifest = json.loads((folder / COMMITTED).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return manifest if manifest["file_bytes"] == _file_bytes(folder) else None


def _refuse_other_shapes(folder: Path, saved: dict[str, list[int]], template: Any) -> None:
    wanted = {name: list(leaf.shape) for name, leaf in _flatten(template).items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise UserError(
                f"checkpoint {folder} holds another model: {name} is {_words(saved.get(name))} there and "
                f"{_words(wanted.get(name))} in this run: use the model it was made with, or another run directory"
            )


def _words(shape: list[int] | None) -> str:
    return "absent" if shape is None else f"of shape {shape}"


def _restore(folder: Path, checksums: dict[str, int], template: State) -> State | None:
    """The arrays of a checkpoint, or None if they are damaged."""
    import orbax.checkpoint as orbax

    abstract = jax.tree.map(orbax.utils.to_shape_dtype_struct, _flatten(template))
    try:
        with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
            arrays = checkpointer.restore(folder / "arrays", args=orbax.args.StandardRestore(abstract))
    except (ValueError, KeyError, OSError) as error:  # what a damaged file makes Orbax and TensorStore raise
        _log.warning("checkpoint %s cannot be read and is ignored: %s", folder, error)
        return None
    damaged = [name for name, value in _checksums(arrays).items() if value != checksums[name]]
    if damaged:
        _log.warning("checkpoint %s is damaged (%s has another checksum) and is ignored", folder, damaged[0])
        return None
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in _flatten(template)])


def _meet_other_processes(where: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)
