"""Write the metrics of a run to `metrics.jsonl`, TensorBoard and Weights & Biases.

A run that is resumed does not write a step twice.

Weights & Biases is an optional package, which is imported only if the configuration asks for it. As
in `metrics.jsonl`, every phase counts its own steps. A run directory on local disk is one run at
Weights & Biases: a restart finds the run's identifier in the directory's `wandb/` folder and adds
the new lines. If the run directory is in a bucket, the folder is `./wandb`, and each start becomes
a separate run. If a run is killed while it sends a line, that line is only in `metrics.jsonl`. In
offline mode nothing leaves the machine until you call `wandb sync DIR/wandb/offline-run-*`.
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

# The fields that each line has besides its values.
KEYS = {"phase", "step", "time"}
# The end of our TensorBoard file's name. Other programs may write such files into the directory.
TENSORBOARD_SUFFIX = ".metrics"
WANDB_FOLDER = "wandb"
# wandb's own environment variable. It overrides the configuration.
WANDB_MODE = "WANDB_MODE"


class MetricsLog:
    """A log that writes metrics to `metrics.jsonl` and to a TensorBoard file beside it.

    Each line of `metrics.jsonl` is one JSON object: {"phase", "step", "time", ...values}. Phase and
    step identify the line. If a resumed run repeats a step, the line is already there, and nothing
    is written. Steps rise within a phase. If a kill cut the last line short, the line is removed
    when the file is opened.

    The TensorBoard file holds the numbers of all lines, but not the text values. It is created when
    the first number is written. After a resume it is created again from the lines, because the kill
    may have come after the line and before the TensorBoard file was written.

    On local disk each line is in the files as soon as it is written, and a full disk raises an
    error at that line. In a bucket, lines wait some seconds before they are uploaded. Callers call
    `flush` before they store anything that a resumed run continues from.
    """

    def __init__(
        self,
        directory: RunPath,
        io_statistics: IoStatistics | None = None,
        config: MetricsConfig | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files.

        Weights & Biases shows `run_config`, the settings of the run, beside the curves.
        """
        config = MetricsConfig() if config is None else config
        self._directory = directory
        self._has_tensorboard = config.tensorboard
        self._io_statistics = IoStatistics() if io_statistics is None else io_statistics
        self._path = directory / "metrics.jsonl"
        with as_user_error(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            # The last step of each phase that earlier starts of the run wrote.
            self._earlier_steps = _last_steps(self._path)
            self._lines = self._path.read_bytes().count(b"\n") if self._path.exists() else 0
        self._file = open_to_append(self._path)
        self._last_step = dict(self._earlier_steps)
        self._tensorboard: _TensorBoard | None = None
        self._wandb: WandbLog | None = None
        if config.wandb != "off":
            self._wandb = WandbLog(config, directory, run_config or {})

    def has(self, phase: str, step: int) -> bool:
        """Return whether this step of the phase, or a later one, is already written."""
        return step <= self._last_step.get(phase, -1)

    def write(self, phase: str, step: int, values: Mapping[str, Any]) -> bool:
        """Append one line, and return whether it was written.

        Returns False if an earlier start of the run already wrote this step. Each value is a string
        or something that `float` accepts.
        """
        if step <= self._earlier_steps.get(phase, -1):
            return False
        last_step = self._last_step.get(phase, -1)
        assert step > last_step, (
            f"metrics of phase {phase}: step {step} comes after step {last_step}, but steps must "
            "rise"
        )
        assert not KEYS & set(values), "no value may be called phase, step or time"

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
        """Write all waiting lines to the file. Lines that still wait are lost if the process dies.

        Only a file in a bucket has lines that wait.
        """
        if isinstance(self._file, AppendedObject):
            with self._io_statistics.timed("write"):
                self._file.flush()

    def close(self) -> None:
        """Write the waiting lines, and close all files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Closing writes to the store. If the store did not answer, do not wait for it again.
        if kind is not StoreUnavailableError:
            self.close()

    def _write_tensorboard(self, line: dict[str, Any]) -> None:
        """Add a line to the TensorBoard file. The first line with a number creates the file."""
        if self._tensorboard is not None:
            self._tensorboard.add(line)
            return
        if not _scalars(line):
            return

        # Create the file from all lines in metrics.jsonl; `line` is the last of them.
        for outdated in self._directory.glob(f"events.*{TENSORBOARD_SUFFIX}*"):
            outdated.unlink()
        self._file.flush()
        self._tensorboard = _TensorBoard(self._directory)
        for text in self._path.read_text(encoding="utf-8").splitlines():
            self._tensorboard.add(json.loads(text))


class NoMetrics:
    """A log that writes nothing, for all processes but the first. Only the first writes metrics."""

    def write(self, phase: str, step: int, values: Mapping[str, Any]) -> bool:
        return False

    def has(self, phase: str, step: int) -> bool:
        return False

    def flush(self) -> None:
        pass


def import_wandb(config: MetricsConfig) -> Any:
    """Import wandb. Raises UserError, with the extra to install, if it is not installed."""
    return import_extra("wandb", f"metrics.wandb {config.wandb}", otherwise=", or set it to off")


class WandbLog:
    """A log in one run at Weights & Biases. In offline mode it only writes local files."""

    def __init__(
        self, config: MetricsConfig, directory: RunPath, run_config: Mapping[str, Any]
    ) -> None:
        """Start the run at Weights & Biases, or continue it.

        Weights & Biases shows `run_config`, the settings of the run, beside the curves.
        """
        wandb = import_wandb(config)
        mode = os.environ.get(WANDB_MODE, config.wandb)
        # wandb can only keep its files on local disk.
        local_directory = directory if isinstance(directory, Path) else None
        # Find the identifier that wandb gave this run before. It is the end of the names of wandb's
        # folders: run-TIME-ID and offline-run-TIME-ID.
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
        """Add one line of metrics.

        `line` is the line of `metrics.jsonl`, and `scalars` are its numbers. `number` is the number
        of lines before it, including those of earlier starts. It must rise, because wandb drops
        other lines.
        """
        phase = line["phase"]
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step", hidden=True)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        values = {f"{phase}/{name}": value for name, value in scalars.items()}
        self._run.log({f"{phase}/step": line["step"], **values}, step=number)

    def close(self) -> None:
        """Finish the run at Weights & Biases."""
        self._run.finish()


class _TensorBoard:
    """A TensorBoard event file, written in the caller's thread.

    tensorboardX's SummaryWriter passes events to its own thread through a bounded queue. On a full
    disk that thread ends, and the queue then blocks the run forever. This class avoids that.
    """

    def __init__(self, directory: RunPath) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}{TENSORBOARD_SUFFIX}"
        self._file = open_to_append(directory / name)
        self._write(wall_time=time.time(), file_version="brain.Event:2")

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of `metrics.jsonl`."""
        from tensorboardX.summary import scalar

        for name, value in _scalars(line).items():
            self._write(
                wall_time=line["time"],
                step=line["step"],
                summary=scalar(f"{line['phase']}/{name}", value),
            )

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        """Write one event in the TFRecord format.

        The format is: the length of the data, a checksum of the length, the data, and a checksum of
        the data.
        """
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        from tensorboardX.record_writer import masked_crc32c

        data = Event(**fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        length_checksum = struct.pack("<I", masked_crc32c(length))
        data_checksum = struct.pack("<I", masked_crc32c(data))
        _append(self._file, length + length_checksum + data + data_checksum)


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a line that are numbers, without its phase, step and time."""
    return {
        name: value
        for name, value in line.items()
        if name not in KEYS and not isinstance(value, str)
    }


def _append(file: FileIO | AppendedObject, data: bytes) -> None:
    """Write all bytes. One call of `write` on an unbuffered file may write only a part of them."""
    while data:
        written_bytes = file.write(data)
        data = data[written_bytes:]


def _last_steps(path: RunPath) -> dict[str, int]:
    """Return the last step of each phase in a metrics file.

    If the last line is incomplete, it is removed from the file. Raises StoreError if another line
    cannot be read.
    """
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
                f"{path}, line {number}: not a JSON object with phase and step ({text[:60]!r}); "
                "remove this line to continue the run"
            ) from error
    return steps


def _json_value(value: Any) -> int | float | str:
    """Return a value that JSON can hold.

    Strings and integers stay as they are, and all other values become floats. JSON has no NaN and
    no infinity, so these become strings.
    """
    if isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
