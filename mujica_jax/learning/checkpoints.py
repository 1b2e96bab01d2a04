"""Checkpoints of training: parameters, optimiser state, step, and a small dictionary of the loop around them.

    directory/000007/arrays/      Orbax, one array a leaf
    directory/000007/COMMITTED    JSON: loop state, shapes, size and SHA-256 of every file of the arrays; written last, by rename

A checkpoint without COMMITTED, or whose files are not what it lists, is ignored, and the one before it is used. The files are checked
before Orbax opens them, because Orbax restores most flipped bits without a word. Numbers only count up, so nothing is ever
overwritten; the last `keep` stay. A save of 0.3 million parameters takes about 60 ms on two cores, so saving is synchronous: what was
saved is what the step left. Called by the methods around `learning.trainer.fit`. Orbax is imported on first use: 0.3 s.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, TypeVar

import jax

from mujica_jax import distributed
from mujica_jax.errors import UserError
from mujica_jax.interrupts import interrupts_deferred
from mujica_jax.learning.optimizer import path_name
from mujica_jax.trajectories.objects import explained, file_description, require_space, sync

COMMITTED = "COMMITTED"
FILES_BYTES = 500_000  # what the small files of a checkpoint take on disk at most
State = TypeVar("State")
_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one directory. Every process of a multi-host run sees the same directory and calls every method."""

    def __init__(self, directory: str | Path, *, keep: int) -> None:
        assert keep >= 1, "keep at least one checkpoint"
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._number = max(self._numbers(), default=0)
        distributed.meet("checkpoints are listed")

    def save(self, state: Any, loop_state: dict[str, Any]) -> None:
        """Write a checkpoint and remove those beyond the last `keep`. `loop_state` holds what JSON holds."""
        import orbax.checkpoint as orbax

        self._number += 1
        folder = self._folder(self._number)
        arrays = _flatten(state)
        with explained(folder):
            self.directory.mkdir(parents=True, exist_ok=True)
        require_space(self.directory, sum(array.nbytes for array in arrays.values()) + FILES_BYTES)
        with (
            interrupts_deferred(),
            explained(folder),
            orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer,
        ):
            checkpointer.save(folder / "arrays", args=orbax.args.StandardSave(arrays))
        if jax.process_index() == 0:
            shapes = {name: list(array.shape) for name, array in arrays.items()}
            with explained(folder):
                _commit(folder, {"loop_state": loop_state, "shapes": shapes, "files": _files(folder)})
                self._remove_old()
        distributed.meet("the checkpoint is committed")

    def restore_latest(self, template: State) -> tuple[State, dict[str, Any]] | None:
        """The newest intact checkpoint, with the structure, types and shardings of `template` (arrays or `jax.ShapeDtypeStruct`s).

        None if there is none. A checkpoint of another model shape is an error: the run directory belongs to another model.
        """
        for number in sorted(self._numbers(), reverse=True):
            folder = self._folder(number)
            manifest = _manifest(folder)
            if manifest is None:
                _log.warning("checkpoint %s is incomplete or damaged and is ignored", folder)
                continue
            _refuse_other_shapes(folder, manifest["shapes"], template)
            return _restore(folder, template), manifest["loop_state"]
        return None

    def _numbers(self) -> list[int]:
        """Numbers of all checkpoints, complete or not."""
        if not self.directory.exists():
            return []
        with explained(self.directory):
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


def _commit(folder: Path, manifest: dict[str, Any]) -> None:
    unfinished = folder / f"{COMMITTED}.unfinished"
    unfinished.write_text(json.dumps(manifest, sort_keys=True, allow_nan=False))
    sync(unfinished)
    unfinished.rename(folder / COMMITTED)
    sync(folder)


def _files(folder: Path) -> list[dict[str, Any]]:
    """Every file of the arrays, with its size and checksum."""
    paths = sorted(path for path in (folder / "arrays").rglob("*") if path.is_file())
    return [file_description(path, str(path.relative_to(folder))) for path in paths]


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What COMMITTED says, or None if the checkpoint is not complete and as it was written."""
    try:
        manifest = json.loads((folder / COMMITTED).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return manifest if manifest["files"] == _files(folder) else None


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


def _restore(folder: Path, template: State) -> State:
    import orbax.checkpoint as orbax

    wanted = _flatten(template)
    abstract = jax.tree.map(orbax.utils.to_shape_dtype_struct, wanted)
    with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(folder / "arrays", args=orbax.args.StandardRestore(abstract))
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in wanted])
