"""The metrics of a run: `metrics.jsonl` and TensorBoard files, nothing counted twice after a resume."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mujica_jax.errors import StoreError

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

KEYS = {"phase", "step", "time"}
TENSORBOARD_SUFFIX = ".metrics"  # tells this file from those of other writers in the same directory
TENSORBOARD_FLUSH_SECONDS = 10


class MetricsLog:
    """Appends to `metrics.jsonl`, one object a line, and the numbers among its values to a TensorBoard file beside it.

    A line is {"phase", "step", "time", ...values}. (phase, step) is its key: a resumed run that comes past a step again finds it in
    the file and writes nothing. Within a phase steps rise. A last line that a kill cut short is removed at opening. The TensorBoard
    file follows from the lines: it is made with the first number written, anew after a resume, since a kill loses what its writer
    still held.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "metrics.jsonl"
        directory.mkdir(parents=True, exist_ok=True)
        self._earlier = _last_steps(self._path)  # of each phase, written by earlier runs
        self._last_step = dict(self._earlier)
        self._file = self._path.open("a", encoding="utf-8", newline="\n")
        self._tensorboard: SummaryWriter | None = None

    def write(self, phase: str, step: int, values: Mapping[str, Any]) -> bool:
        """Append one line; False where an earlier run has written it. Values are strings, or numbers (anything `float` takes)."""
        if step <= self._earlier.get(phase, -1):
            return False
        last = self._last_step.get(phase, -1)
        assert step > last, f"metrics of phase {phase}: step {step} comes after step {last}; steps rise"
        assert not KEYS & set(values), "phase, step and time are the line's own fields"
        line = {"phase": phase, "step": step, "time": round(time.time(), 3)}
        line |= {name: _json_value(value) for name, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step[phase] = step
        self._draw(line)
        return True

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, line: dict[str, Any]) -> None:
        if self._tensorboard is not None:
            _add_scalars(self._tensorboard, line)
        elif _scalars(line):
            import tensorboardX

            for outdated in self._directory.glob(f"events.*{TENSORBOARD_SUFFIX}"):
                outdated.unlink()
            self._tensorboard = tensorboardX.SummaryWriter(
                str(self._directory), flush_secs=TENSORBOARD_FLUSH_SECONDS, filename_suffix=TENSORBOARD_SUFFIX
            )
            for written in self._path.read_text(encoding="utf-8").splitlines():  # ends with `line`
                _add_scalars(self._tensorboard, json.loads(written))


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in KEYS and not isinstance(value, str)}


def _add_scalars(writer: "SummaryWriter", line: Mapping[str, Any]) -> None:
    for name, value in _scalars(line).items():
        writer.add_scalar(f"{line['phase']}/{name}", value, line["step"], line["time"])


def _last_steps(path: Path) -> dict[str, int]:
    """The last step of each phase in a metrics file, after removing a last line without its end."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    steps: dict[str, int] = {}
    for number, text in enumerate(content[:whole].splitlines(), start=1):
        try:
            line = json.loads(text)
            steps[line["phase"]] = int(line["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path}, line {number}: not an object with phase and step ({text[:60]!r}); remove the line to go on"
            ) from error
    return steps


def _json_value(value: Any) -> int | float | str:
    """Strings and integers as they are, anything else as a float; JSON has no word for nan and inf: they become strings."""
    if isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
