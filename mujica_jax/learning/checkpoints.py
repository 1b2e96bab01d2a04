"""Checkpoints of training: parameters, optimiser state, step and the state of the loop.

    directory/000007/arrays/      the arrays of the state, written by Orbax
    directory/000007/about/       the state of the loop, a small JSON object, written by Orbax
    directory/000007/COMMITTED    size and checksum of every file in arrays/ and about/

Orbax's `CheckpointManager` numbers the checkpoints, writes them in the background and removes all
but the newest `keep`.

This module writes COMMITTED after all other files, because Orbax restores most flipped bits without
an error. A checkpoint is ignored if it has no COMMITTED, or if its files differ from the list in
COMMITTED. The newest checkpoint before it is then used. On local disk the checksums are SHA-256. In
a bucket they are the CRC32C that the service computes when it stores a file, so the files need not
be read.

A save stops the loop while the arrays are copied to host memory. (On CPU nothing is copied: a step
does not reuse a buffer that is still being written to disk.) Only one save runs at a time. The next
save, a restore, `finish` and the end of a `with` block wait for it, and raise its error if it
failed. The methods use this module around their calls of `learning.trainer.fit`.
"""

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, TypeVar

import jax
import orbax.checkpoint as orbax
from etils import epath

from mujica_jax.errors import StoreUnavailableError, UserError
from mujica_jax.learning.optimizer import path_name
from mujica_jax.runtime import distributed
from mujica_jax.storage.io_statistics import IoStatistics
from mujica_jax.storage.local import as_user_error, require_space
from mujica_jax.storage.manifest import COMMITTED, describe_folder, json_bytes
from mujica_jax.storage.run_directory import RunPath, atomic_write, run_path

# Upper bound of the size of a checkpoint's files other than arrays, in bytes.
FILES_BYTES = 500_000
# Digits in the name of a checkpoint's folder.
NUMBER_DIGITS = 6
# The file by which Orbax marks a checkpoint as complete.
ORBAX_COMMITTED = "commit_success.txt"
# Folders of a checkpoint whose files COMMITTED lists.
ITEMS = ("arrays/", "about/")
# Part of the error that TensorStore raises after its last attempt. The reason follows it.
TENSORSTORE_GAVE_UP = "retry attempts failed: "
# Functions of Orbax that log an error which `Checkpoints.finish` raises, too.
RAISED_BY_FINISH = {"_thread_func", "_finalize_checkpoint", "wait_until_finished"}
State = TypeVar("State")
_log = logging.getLogger(__name__)


def _is_not_raised_by_finish(record: logging.LogRecord) -> bool:
    """Return whether a record of Orbax's log is shown.

    Orbax logs the errors of its threads with a traceback. `finish` raises the same errors, and the
    user then sees one sentence, so these records are hidden.
    """
    return record.funcName not in RAISED_BY_FINISH


class Checkpoints:
    """The checkpoints in one directory.

    In a run with several processes, all of them see the same directory, and all of them call every
    method.
    """

    def __init__(
        self, directory: str | PurePath, *, keep: int, io_statistics: IoStatistics | None = None
    ) -> None:
        """Open a directory, and remove incomplete checkpoints.

        `keep` is the number of newest checkpoints that are not removed. `io_statistics` collects
        the seconds and bytes of every save and restore.
        """
        assert keep >= 1, f"keep is {keep} and must be at least 1"
        path = run_path(directory)
        self.directory: RunPath = path.absolute() if isinstance(path, Path) else path
        self.io_statistics = IoStatistics() if io_statistics is None else io_statistics
        # Number of the checkpoint that is being written, if there is one.
        self._saving: int | None = None
        self._save_start_time = 0.0
        # Seconds that the last save took. It ran in the background, beside training steps.
        self.seconds_a_save = 0.0
        logging.getLogger("absl").addFilter(_is_not_raised_by_finish)
        if distributed.is_primary():
            self._remove_torn()
        distributed.barrier("torn checkpoints are removed")

        options = orbax.CheckpointManagerOptions(
            max_to_keep=keep,
            step_format_fixed_length=NUMBER_DIGITS,
            create=False,
            # Write into the final folder, on local disk as in a bucket. A checkpoint is complete
            # when it has both COMMITTED and Orbax's own mark.
            atomicity_options=orbax.options.AtomicityOptions(
                mode=orbax.options.AtomicityMode.COMMIT_FILE
            ),
            async_options=orbax.AsyncOptions(post_finalization_callback=self._commit),
        )
        handlers = {
            "arrays": orbax.StandardCheckpointHandler(),
            "about": orbax.JsonCheckpointHandler(),
        }
        with _as_user_error(self.directory):
            self._manager = orbax.CheckpointManager(
                self.directory, item_handlers=handlers, options=options
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for a save that still runs.

        Without this, a save that still runs at exit would fail, because its thread pools are gone
        by then. If an error ends one of several processes, the function does not wait: the save
        needs all processes, and `distributed.abort` ends this process without waiting for threads.
        """
        if error is not None and distributed.processes() > 1:
            return
        try:
            self.finish()
        except Exception:
            if error is None:
                raise
            _log.warning("a checkpoint in %s was not written", self.directory, exc_info=True)

    def finish(self) -> None:
        """Wait until the running save, if there is one, is committed. Raises its error."""
        if self._saving is None:
            return
        try:
            with _as_user_error(self._folder(self._saving)):
                self._manager.wait_until_finished()
        finally:
            self._saving = None
        distributed.barrier("the checkpoint is committed")

    def save(self, state: Any, loop_state: dict[str, Any]) -> None:
        """Start to write a checkpoint, and remove all but the newest `keep` when it is written.

        `loop_state` is a JSON object. The function returns as soon as a training step may consume
        `state`. Writing continues in the background. Raises UserError if the disk is too small.
        """
        self.finish()
        number = (self._manager.latest_step() or 0) + 1
        arrays = _flatten(state)
        with _as_user_error(self._folder(number)):
            self.directory.mkdir(parents=True, exist_ok=True)
            if isinstance(self.directory, Path):
                arrays_bytes = sum(array.nbytes for array in arrays.values())
                require_space(self.directory, arrays_bytes + FILES_BYTES)

            self._saving = number
            self._save_start_time = time.monotonic()
            items = orbax.args.Composite(
                arrays=orbax.args.StandardSave(arrays),
                about=orbax.args.JsonSave(loop_state),
            )
            self._manager.save(number, args=items, force=True)

    def restore_latest(self, template: State) -> tuple[State, dict[str, Any]] | None:
        """Return the state and the loop state of the newest intact checkpoint, or None.

        `template` has the structure, shapes, types and shardings of the state. Its leaves are
        arrays or `jax.ShapeDtypeStruct`s. Raises UserError if the checkpoint has other shapes or
        types, because it then belongs to another model.
        """
        self.finish()
        for number in sorted(self._manager.all_steps(), reverse=True):
            folder = self._folder(number)
            files = _files(folder)
            if _committed_files(folder) != files:
                _log.warning("checkpoint %s is damaged and is ignored", folder)
                continue

            template_arrays = _flatten(template)
            size_bytes = sum(file["bytes"] for file in files)
            with self.io_statistics.timed("read", size_bytes), _as_user_error(folder):
                saved_arrays = self._manager.item_metadata(number)["arrays"]
                _refuse_other_arrays(folder, saved_arrays, template_arrays)
                abstract = jax.tree.map(orbax.utils.to_shape_dtype_struct, template_arrays)
                items = orbax.args.Composite(
                    arrays=orbax.args.StandardRestore(abstract),
                    about=orbax.args.JsonRestore(),
                )
                restored = self._manager.restore(number, args=items)

            leaves = [restored["arrays"][name] for name in template_arrays]
            state = jax.tree.unflatten(jax.tree.structure(template), leaves)
            return state, restored["about"]
        return None

    def _folder(self, number: int) -> RunPath:
        """Return the folder of a checkpoint."""
        return self.directory / f"{number:0{NUMBER_DIGITS}d}"

    def _commit(self) -> None:
        """Mark the checkpoint as committed, and measure the save.

        A thread of Orbax calls this when all files are written, and before older checkpoints are
        removed.
        """
        if distributed.is_primary() and self._saving is not None:
            size_bytes = _commit(self._folder(self._saving))
            self.seconds_a_save = time.monotonic() - self._save_start_time
            self.io_statistics.add("write", self.seconds_a_save, size_bytes)

    def _remove_torn(self) -> None:
        """Remove incomplete checkpoints, which killed processes have left. All else stays."""
        if not self.directory.exists():
            return
        with _as_user_error(self.directory):
            for folder in list(self.directory.iterdir()):
                is_checkpoint = re.fullmatch(rf"\d{{{NUMBER_DIGITS},}}", folder.name)
                marks = (folder / COMMITTED, folder / ORBAX_COMMITTED)
                if is_checkpoint and not all(mark.exists() for mark in marks):
                    _log.warning("checkpoint %s is incomplete and is removed", folder)
                    epath.Path(folder).rmtree()


def _flatten(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by their paths.

    So the files of a checkpoint depend only on these names, and not on the classes of the state.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    flat = {path_name(path): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the state have the same path"
    return flat


@contextlib.contextmanager
def _as_user_error(folder: RunPath) -> Iterator[None]:
    """Turn an error of the disk or the bucket into a UserError of one sentence.

    The error that TensorStore raises after its last attempt becomes a StoreUnavailableError.
    """
    try:
        with as_user_error(folder):
            yield
    except ValueError as error:
        _, is_of_store, reason = str(error).partition(TENSORSTORE_GAVE_UP)
        if not is_of_store:
            raise
        raise StoreUnavailableError(
            f"{folder} could not be written or read after several attempts, because of: "
            f"{reason.strip()[:200]}; check that the bucket can be reached and start the same "
            "command again"
        ) from error


def _commit(folder: RunPath) -> int:
    """Write COMMITTED, the list of a checkpoint's files, and return their size in bytes."""
    files = _files(folder)
    atomic_write(folder / COMMITTED, json_bytes({"files": files}))
    return sum(file["bytes"] for file in files)


def _files(folder: RunPath) -> list[dict[str, Any]]:
    """Return name, size and checksum of every file in arrays/ and about/."""
    if isinstance(folder, Path):
        files = describe_folder(folder)
    else:
        files = []
        for name, info in folder.objects().items():
            files.append({"name": name, "bytes": info.bytes, "crc32c": info.crc32c})
    return [file for file in files if file["name"].startswith(ITEMS)]


def _committed_files(folder: RunPath) -> list[dict[str, Any]] | None:
    """Return the files that COMMITTED lists, or None if COMMITTED is missing or damaged."""
    try:
        return json.loads((folder / COMMITTED).read_text())["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _refuse_other_arrays(folder: RunPath, saved: Any, template: dict[str, Any]) -> None:
    """Check that a checkpoint has the names, shapes and types of the template.

    Both `saved` and `template` map the path of each array to its shape and type. Raises UserError.
    """
    for name in sorted({*saved, *template}):
        saved_shape = list(saved[name].shape) if name in saved else None
        own_shape = list(template[name].shape) if name in template else None
        if saved_shape != own_shape:
            raise UserError(
                f"checkpoint {folder} holds another model: {name} is {_shape_text(saved_shape)} "
                f"there and {_shape_text(own_shape)} in this run; use the model of the checkpoint, "
                "or another run directory"
            )
    for name, leaf in template.items():
        saved_dtype = str(saved[name].dtype)
        if saved_dtype != str(leaf.dtype):
            raise UserError(
                f"checkpoint {folder} keeps {name} in {saved_dtype}, and this run in {leaf.dtype}: "
                "set trainer.parameter_dtype and trainer.first_moment_dtype as they were, or use "
                "another run directory"
            )


def _shape_text(shape: list[int] | None) -> str:
    """Return a shape as a phrase for error messages. None is an array that is missing."""
    return "absent" if shape is None else f"of shape {shape}"
