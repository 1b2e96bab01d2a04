"""The metrics of a run, in `metrics.jsonl`, TensorBoard and Weights & Biases.

A resume counts nothing twice.

Weights & Biases is an optional package, imported when a run asks for it. Every phase has its own
count of steps there, as in the file. A run directory is one run there: a restart finds the
identifier in the directory's `wandb/` and adds the lines that are new. The files of a run in a
bucket are in `./wandb`, and each start is a run of its own there. A line that a kill stops on its
way there is in `metrics.jsonl` alone. In offline mode nothing leaves the machine until
`wandb sync DIR/wandb/offline-run-*`.
"""

import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from mujica_jax.config.schema import MetricsConfig
from mujica_jax.errors import StoreError, StoreUnavailableError, UserError
from mujica_jax.runtime.extras import import_extra
from mujica_jax.storage.io_statistics import IoStatistics
from mujica_jax.storage.local import as_user_error
from mujica_jax.storage.run_directory import AppendedObject, RunPath, atomic_write, open_to_append

KEYS = {"phase", "step", "time"}
TENSORBOARD_SUFFIX = ".metrics"  # tells this file from those of other writers in the same directory
WANDB_FOLDER = "wandb"
WANDB_MODE = "WANDB_MODE"  # wandb's own variable, which counts before the configuration


class MetricsLog:
    """A log of metrics in `metrics.jsonl`, one object a line, and in a TensorBoard file beside it.

    The TensorBoard file has the numbers among the values of a line.

    A line is {"phase", "step", "time", ...values}. (phase, step) is its key: a resumed run that
    repeats a step finds it in the file and writes nothing. Within a phase steps rise. A last line
    that a kill cut short is removed at opening. The TensorBoard file follows from the lines: it is
    made with the first number written, and again after a resume, since the kill may have come
    between the two. On local disk nothing is held back: what was written is in the files, and a
    full disk is an error at that line. In a bucket lines wait some seconds for an upload; `flush`
    is called before anything is written that a resumed run goes on from.
    """

    def __init__(
        self,
        directory: RunPath,
        io_statistics: IoStatistics | None = None,
        config: MetricsConfig | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files. `run_config` is shown beside the curves at Weights & Biases."""
        config = MetricsConfig() if config is None else config
        self._directory = directory
        self._has_tensorboard = config.tensorboard
        self._io_statistics = IoStatistics() if io_statistics is None else io_statistics
        self._path = directory / "metrics.jsonl"
        with as_user_error(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            # The last step of each phase that earlier runs wrote.
            self._earlier_steps = _last_steps(self._path)
            self._lines = self._path.read_bytes().count(b"\n") if self._path.exists() else 0
        self._file = open_to_append(self._path)
        self._last_step = dict(self._earlier_steps)
        self._tensorboard: _TensorBoard | None = None
        self._wandb: WandbLog | None = None
        if config.wandb != "off":
            self._wandb = WandbLog(config, directory, run_config or {})

    def has(self, phase: str, step: int) -> bool:
        """Return whether this step, or a later one of its phase, is written."""
        return step <= self._last_step.get(phase, -1)

    def write(self, phase: str, step: int, values: Mapping[str, Any]) -> bool:
        """Append one line. Return False if an earlier run wrote it.

        Values are strings, or what `float` takes.
        """
        if step <= self._earlier_steps.get(phase, -1):
            return False
        last_step = self._last_step.get(phase, -1)
        assert step > last_step, (
            f"metrics of phase {phase}: step {step} comes after step {last_step}; steps rise"
        )
        assert not KEYS & set(values), "phase, step and time are the line's own fields"

        line = {"phase": phase, "step": step, "time": round(time.time(), 3)}
        line |= {name: _json_value(value) for name, value in values.items()}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        with as_user_error(self._path), self._io_statistics.timed("write", len(data)):
            _append(self._file, data)
            if self._has_tensorboard:
                self._write_tensorboard(line)
        if self._wandb is not None:
            self._wandb.add(line, _scalars(line), self._lines)
        self._lines += 1
        self._last_step[phase] = step
        return True

    def flush(self) -> None:
        """Bring all lines into the file. Until then they may be lost with the process."""
        if isinstance(self._file, AppendedObject):
            with self._io_statistics.timed("write"):
                self._file.flush()

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A store that did not answer has been waited for long enough.
        if kind is not StoreUnavailableError:
            self.close()

    def _write_tensorboard(self, line: dict[str, Any]) -> None:
        """Add a line to the TensorBoard file, which is made with the first number."""
        if self._tensorboard is not None:
            self._tensorboard.add(line)
            return
        if not _scalars(line):
            return

        # Make the file from all lines so far; `line` is the last of them.
        for outdated in self._directory.glob(f"events.*{TENSORBOARD_SUFFIX}*"):
            outdated.unlink()
        self._file.flush()
        self._tensorboard = _TensorBoard(self._directory)
        for text in self._path.read_text(encoding="utf-8").splitlines():
            self._tensorboard.add(json.loads(text))


class NoMetrics:
    """Stands in for a MetricsLog in every process of a job but the first, which writes for all."""

    def write(self, phase: str, step: int, values: Mapping[str, Any]) -> bool:
        return False

    def has(self, phase: str, step: int) -> bool:
        return False

    def flush(self) -> None:
        pass


def import_wandb(config: MetricsConfig) -> Any:
    """Import the package. Raises UserError naming its extra where it is missing."""
    return import_extra("wandb", f"metrics.wandb {config.wandb}", otherwise=", or set it to off")


class WandbLog:
    """One run at Weights & Biases, or its files in the run directory."""

    def __init__(
        self, config: MetricsConfig, directory: RunPath, run_config: Mapping[str, Any]
    ) -> None:
        """Start the run, or continue it. `run_config` is shown beside its curves."""
        wandb = import_wandb(config)
        mode = os.environ.get(WANDB_MODE, config.wandb)
        # wandb keeps its files on local disk.
        local_directory = directory if isinstance(directory, Path) else None
        # The identifier that wandb gave this run directory: its folders are named run-TIME-ID and
        # offline-run-TIME-ID.
        identifier = None
        if local_directory is not None:
            earlier_folders = sorted((local_directory / WANDB_FOLDER).glob("*run-*-*"))
            if earlier_folders:
                identifier = earlier_folders[-1].name.rpartition("-")[2]
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                name=directory.name,
                id=identifier,
                dir=str(local_directory or Path()),
                mode=mode,
                resume="allow",
                config=dict(run_config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, ValueError) as error:
            raise UserError(
                f"wandb does not start in mode {mode} ({str(error).splitlines()[0]}): log in with "
                "`wandb login`, or set metrics.wandb to offline or off"
            ) from error
        self._phases: set[str] = set()

    def add(self, line: Mapping[str, Any], scalars: Mapping[str, float], number: int) -> None:
        """Add one line.

        `number` counts the lines of the run, also those of earlier starts: wandb drops a line whose
        number does not rise.
        """
        phase = line["phase"]
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step", hidden=True)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        values = {f"{phase}/{name}": value for name, value in scalars.items()}
        self._run.log({f"{phase}/step": line["step"], **values}, step=number)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """An event file, written in this thread.

    tensorboardX's SummaryWriter hands events to a thread of its own through a bounded queue. On a
    full disk that thread ends, and the queue then blocks the run for ever.
    """

    def __init__(self, directory: RunPath) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}{TENSORBOARD_SUFFIX}"
        self._file = open_to_append(directory / name)
        self._write(wall_time=time.time(), file_version="brain.Event:2")

    def add(self, line: Mapping[str, Any]) -> None:
        from tensorboardX.summary import scalar

        for name, value in _scalars(line).items():
            self._write(
                wall_time=line["time"],
                step=line["step"],
                summary=scalar(f"{line['phase']}/{name}", value),
            )

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        """Write one event, framed as in TFRecord files.

        The frame is: length, its checksum, data, their checksum.
        """
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        from tensorboardX.record_writer import masked_crc32c

        data = Event(**fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        length_checksum = struct.pack("<I", masked_crc32c(length))
        data_checksum = struct.pack("<I", masked_crc32c(data))
        _append(self._file, length + length_checksum + data + data_checksum)


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, without its key and time."""
    return {
        name: value
        for name, value in line.items()
        if name not in KEYS and not isinstance(value, str)
    }


def _append(file: FileIO | AppendedObject, data: bytes) -> None:
    """Write all bytes. An unbuffered file may take a part at a time."""
    while data:
        written_bytes = file.write(data)
        data = data[written_bytes:]


def _last_steps(path: RunPath) -> dict[str, int]:
    """Return the last step of each phase in a metrics file. Remove a last line without its end."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole_bytes = content.rfind(b"\n") + 1
    if whole_bytes < len(content):
        atomic_write(path, content[:whole_bytes])

    steps: dict[str, int] = {}
    for number, text in enumerate(content[:whole_bytes].splitlines(), start=1):
        try:
            line = json.loads(text)
            steps[line["phase"]] = int(line["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path}, line {number}: not an object with phase and step ({text[:60]!r}); remove "
                "the line to go on"
            ) from error
    return steps


def _json_value(value: Any) -> int | float | str:
    """Return strings and integers as they are, and all else as a float.

    NaN and infinity, which JSON lacks, become strings.
    """
    if isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
