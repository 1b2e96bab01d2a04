"""Checkpoints of training: parameters, optimiser state, step, and a small dictionary of the loop around them.

    directory/000007/arrays/      Orbax, one array a leaf
    directory/000007/COMMITTED    JSON: loop state, metric, shapes and types, size and checksum of every file of the arrays; written last,
                                  whole or not at all

A checkpoint without COMMITTED, or whose files are not what it lists, is ignored, and the one before it is used. The files are checked
before Orbax opens them, because Orbax restores most flipped bits without a word: their SHA-256 on local disk, in a bucket the CRC32C
that the service keeps of what it has stored, for which nothing is read. Numbers only count up, so nothing is ever overwritten; the
last `keep` stay, and the one with the highest metric where saves are given one.

A save holds the loop while the arrays are copied to the host; a thread writes, checks and commits them. (On CPU there is no copy: a step
does not reuse a buffer that the writer still looks at.) One save is under way at a time: the next one, a restore, `finish` and the end of a
`with` block wait for it and raise what went wrong in it. Called by the methods around `learning.trainer.fit`. Orbax is imported on
first use: 0.3 s.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, TypeVar

import jax

from mujica_jax.errors import UserError
from mujica_jax.learning.optimizer import path_name
from mujica_jax.runtime import distributed
from mujica_jax.storage.io_statistics import Costs
from mujica_jax.storage.objects import COMMITTED, explained, file_description, require_space, sync
from mujica_jax.storage.run_directory import RunPath, run_path

FILES_BYTES = 500_000  # what the small files of a checkpoint take on disk at most
State = TypeVar("State")
_log = logging.getLogger(__name__)


class _ToldByFinish(logging.Filter):
    """Orbax logs what its thread raised, with a traceback. `finish` raises the same, and a full disk is worth one sentence."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.funcName != "_thread_func"


_TOLD_BY_FINISH = _ToldByFinish()  # one: a logger keeps each filter once


class Checkpoints:
    """The checkpoints of one directory. Every process of a multi-host run sees the same directory and calls every method."""

    def __init__(self, directory: str | PurePath, *, keep: int, costs: Costs | None = None) -> None:
        """`costs` is told the seconds and bytes of every save and restore."""
        assert keep >= 1, "keep at least one checkpoint"
        self.directory = _absolute(run_path(directory))
        self.keep = keep
        self.costs = Costs() if costs is None else costs
        self._number = max(self._numbers(), default=0)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        distributed.barrier("checkpoints are listed")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever ends the block, a save under way is finished first: at exit its threads would find their executors gone. Not where an
        error ends one of several processes: a save needs them all, and `distributed.abort` runs no thread's end."""
        if error is not None and distributed.processes() > 1:
            return
        try:
            self.finish()
        except Exception:
            if error is None:
                raise
            _log.warning("a checkpoint in %s was not written", self.directory, exc_info=True)

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is committed; raises what it raised."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        under_way.result()
        distributed.barrier("the checkpoint is committed")

    def save(self, state: Any, loop_state: dict[str, Any], *, metric: float | None = None) -> None:
        """Begin to write a checkpoint, after which those beyond the last `keep` and the best are removed.

        `loop_state` holds what JSON holds. Of `metric`, more is better. Returns when `state` may be consumed.
        """
        import orbax.checkpoint as orbax

        self.finish()
        self._number += 1
        folder = self._folder(self._number)
        arrays = _flatten(state)
        with explained(folder):
            self.directory.mkdir(parents=True, exist_ok=True)
        if isinstance(self.directory, Path):
            require_space(self.directory, sum(array.nbytes for array in arrays.values()) + FILES_BYTES)
        manifest = {
            "loop_state": loop_state,
            "metric": metric,
            "shapes": {name: list(array.shape) for name, array in arrays.items()},
            "types": {name: str(array.dtype) for name, array in arrays.items()},
        }
        json.dumps(manifest, allow_nan=False)  # what JSON does not hold is refused here, not in the thread
        logging.getLogger("absl").addFilter(_TOLD_BY_FINISH)
        with _explained(folder):
            writer = orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())
            writer.save(folder / "arrays", args=orbax.args.StandardSave(arrays))
            self._under_way = self._thread.submit(self._commit_when_written, writer, folder, manifest)

    def _commit_when_written(self, writer: Any, folder: RunPath, manifest: dict[str, Any]) -> None:
        with self.costs.writing(), _explained(folder):
            try:
                writer.wait_until_finished()
            finally:
                writer.close()
            if jax.process_index() == 0:
                files = _files(folder)
                self.costs.add_bytes(written=sum(file["bytes"] for file in files))
                _commit(folder, manifest | {"files": files})
                self._remove_old()

    def restore_latest(self, template: State) -> tuple[State, dict[str, Any]] | None:
        """The newest intact checkpoint, with the structure, types and shardings of `template` (arrays or `jax.ShapeDtypeStruct`s).

        None if there is none. A checkpoint of other shapes or types is an error: the run directory belongs to another model.
        """
        self.finish()
        return self._restore_first(sorted(self._numbers(), reverse=True), template)

    def restore_best(self, template: State) -> tuple[State, dict[str, Any]] | None:
        """As `restore_latest`, for the intact checkpoint with the highest metric."""
        self.finish()
        return self._restore_first(self._best_first(), template)

    def _restore_first(self, numbers: Iterable[int], template: State) -> tuple[State, dict[str, Any]] | None:
        for number in numbers:
            folder = self._folder(number)
            manifest = _manifest(folder)
            if manifest is None:
                _log.warning("checkpoint %s is incomplete or damaged and is ignored", folder)
                continue
            _refuse_other_arrays(folder, manifest, template)
            with self.costs.reading(), _explained(folder):
                state = _restore(folder, template)
            self.costs.add_bytes(read=sum(file["bytes"] for file in manifest["files"]))
            return state, manifest["loop_state"]
        return None

    def _numbers(self) -> list[int]:
        """Numbers of all checkpoints, complete or not."""
        if not self.directory.exists():
            return []
        with explained(self.directory):
            return [int(folder.name) for folder in self.directory.iterdir() if folder.name.isdigit()]

    def _folder(self, number: int) -> RunPath:
        return self.directory / f"{number:06d}"

    def _remove_old(self) -> None:
        """Keep the last complete ones and the best. Incomplete ones are older than the one just written: nobody will finish them."""
        numbers = sorted(self._numbers(), reverse=True)
        complete = [number for number in numbers if (self._folder(number) / COMMITTED).exists()]
        for number in set(numbers) - {*complete[: self.keep], *self._best_first()[:1]}:
            _remove(self._folder(number))

    def _best_first(self) -> list[int]:
        """Complete checkpoints that have a metric, the newer of two equal ones first."""
        marks = {number: _mark(self._folder(number)) for number in self._numbers()}
        metrics = {number: mark.get("metric") for number, mark in marks.items() if mark is not None}
        return sorted(
            (n for n, metric in metrics.items() if metric is not None), key=lambda n: (metrics[n], n), reverse=True
        )


def _flatten(state: Any) -> dict[str, Any]:
    """Every leaf under its path, so that what lies on disk depends on no class of ours."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    flat = {path_name(path): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "every leaf has a path of its own"
    return flat


def _absolute(directory: RunPath) -> RunPath:
    if isinstance(directory, Path):
        return directory.absolute()
    from mujica_jax.storage.gcs_path import limit_tensorstore

    limit_tensorstore()
    return directory


@contextlib.contextmanager
def _explained(folder: RunPath) -> Iterator[None]:
    """What is wrong with the disk or the bucket, in a sentence for the user."""
    if isinstance(folder, Path):
        with explained(folder):
            yield
        return
    from mujica_jax.storage.gcs_path import tensorstore_explained

    with tensorstore_explained(folder):
        yield


def _remove(folder: RunPath) -> None:
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:  # without its mark first: what a kill leaves of it is an incomplete checkpoint
        (folder / COMMITTED).unlink(missing_ok=True)
        folder.rmtree()


def _commit(folder: RunPath, manifest: dict[str, Any]) -> None:
    content = json.dumps(manifest, sort_keys=True, allow_nan=False)
    if not isinstance(folder, Path):
        (folder / COMMITTED).write_over(content.encode())
        return
    unfinished = folder / f"{COMMITTED}.unfinished"
    unfinished.write_text(content)
    sync(unfinished)
    unfinished.rename(folder / COMMITTED)
    sync(folder)


def _files(folder: RunPath) -> list[dict[str, Any]]:
    """Every file of the arrays, with its size and checksum."""
    if not isinstance(folder, Path):
        return folder.description("arrays")
    paths = sorted(path for path in (folder / "arrays").rglob("*") if path.is_file())
    return [file_description(path, str(path.relative_to(folder))) for path in paths]


def _manifest(folder: RunPath) -> dict[str, Any] | None:
    """What COMMITTED says, or None if the checkpoint is not complete and as it was written."""
    manifest = _mark(folder)
    return manifest if manifest is not None and manifest["files"] == _files(folder) else None


def _mark(folder: RunPath) -> dict[str, Any] | None:
    try:
        return json.loads((folder / COMMITTED).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _refuse_other_arrays(folder: RunPath, manifest: dict[str, Any], template: Any) -> None:
    leaves = _flatten(template)
    saved, wanted = manifest["shapes"], {name: list(leaf.shape) for name, leaf in leaves.items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise UserError(
                f"checkpoint {folder} holds another model: {name} is {_words(saved.get(name))} there and "
                f"{_words(wanted.get(name))} in this run: use the model it was made with, or another run directory"
            )
    for name, kept in manifest.get("types", {}).items():
        if kept != str(leaves[name].dtype):
            raise UserError(
                f"checkpoint {folder} keeps {name} in {kept}, and this run in {leaves[name].dtype}: leave trainer.parameter_dtype and "
                "trainer.first_moment_dtype as they were, or use another run directory"
            )


def _words(shape: list[int] | None) -> str:
    return "absent" if shape is None else f"of shape {shape}"


def _restore(folder: RunPath, template: State) -> State:
    import orbax.checkpoint as orbax

    wanted = _flatten(template)
    abstract = jax.tree.map(orbax.utils.to_shape_dtype_struct, wanted)
    with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(folder / "arrays", args=orbax.args.StandardRestore(abstract))
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in wanted])
