"""The metrics of a run: lines and TensorBoard files, and what reaches Weights & Biases offline."""

import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from mujica_jax.config.schema import MetricsConfig
from mujica_jax.errors import StoreError, UserError
from mujica_jax.report.metrics_log import MetricsLog, import_wandb
from tests.helpers.extras import needs
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS

WRITE = """
import pathlib, sys
from mujica_jax.config.schema import MetricsConfig
from mujica_jax.report.metrics_log import MetricsLog
config = MetricsConfig(wandb="offline", wandb_project="somewhere")
with MetricsLog(pathlib.Path(sys.argv[1]), config=config, run_config={"seed": 5}) as log:
    for step in range(int(sys.argv[2]), int(sys.argv[3])):
        log.write("warm-up/learn", step, {"loss": step / 4, "note": "text"})
"""


def lines_of(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_one_object_a_line(tmp_path):
    with MetricsLog(tmp_path) as log:
        assert log.write("warm-up", 1, {"loss": 2.5, "phase_of_moon": "new"})
        assert log.write("warm-up", 2, {"loss": 2.25})
    first, second = lines_of(tmp_path)
    assert first | {"time": 0} == {
        "phase": "warm-up",
        "step": 1,
        "time": 0,
        "loss": 2.5,
        "phase_of_moon": "new",
    }
    assert first["time"] <= second["time"] <= time.time() + 1


def test_a_resumed_run_counts_nothing_twice(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 58):
            log.write("warm-up", step, {"loss": 1.0})
    with MetricsLog(tmp_path) as log:
        written = [log.write("warm-up", step, {"loss": 1.0}) for step in range(51, 61)]
        assert log.write("round-1", 1, {"loss": 1.0})
    assert written == [False] * 7 + [True] * 3
    keys = [(line["phase"], line["step"]) for line in lines_of(tmp_path)]
    assert keys == [("warm-up", step) for step in range(1, 61)] + [("round-1", 1)]


def test_a_line_cut_short_by_a_kill_is_written_again(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("warm-up", 1, {"loss": 1.0})
        log.write("warm-up", 2, {"loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with MetricsLog(tmp_path) as log:
        assert not log.write("warm-up", 1, {"loss": 1.0})
        assert log.write("warm-up", 2, {"loss": 1.0})
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize("line", ["{broken", "[1, 2]", '{"step": 1}', "\xff"])
def test_a_line_that_is_no_metric_is_named(tmp_path, line):
    good = '{"phase": "warm-up", "step": 1, "time": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes((good + line + "\n" + good).encode("latin-1"))
    with pytest.raises(StoreError, match=r"metrics\.jsonl, line 2"):
        MetricsLog(tmp_path)


def test_steps_of_a_phase_rise(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("warm-up", 5, {"loss": 1.0})
        with pytest.raises(AssertionError, match="step 5 comes after step 5"):
            log.write("warm-up", 5, {"loss": 1.0})


def test_nan_stays_valid_json(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("warm-up", 1, {"loss": math.nan, "gradient_norm": math.inf})
    (line,) = lines_of(tmp_path)
    assert line["loss"] == "nan"
    assert line["gradient_norm"] == "inf"


def test_array_scalars_are_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    with MetricsLog(tmp_path) as log:
        log.write("warm-up", 1, {"loss": numpy.float32(0.5)})
    assert lines_of(tmp_path)[0]["loss"] == 0.5


def scalars_of(directory) -> list[tuple[str, int, float]]:
    """Return tag, step and value of everything in the directory's event files.

    The record format is read by hand.
    """
    scalars = []
    for path in directory.glob("events.*"):
        content = path.read_bytes()
        at = 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            # length, its checksum, data, its checksum
            event = Event.FromString(content[at + 12 : at + 12 + size])
            scalars += [
                (value.tag, event.step, value.simple_value) for value in event.summary.value
            ]
            at += 16 + size
    return scalars


def test_without_tensorboard_there_is_no_such_file(tmp_path):
    with MetricsLog(tmp_path, config=MetricsConfig(tensorboard=False)) as log:
        log.write("warm-up", 1, {"loss": 0.125})
    assert not list(tmp_path.glob("events.*"))
    assert len(lines_of(tmp_path)) == 1


def test_what_is_written_is_known(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("warm-up", 3, {"loss": 1.0})
        assert log.has("warm-up", 2)
        assert log.has("warm-up", 3)
    with MetricsLog(tmp_path) as log:
        assert log.has("warm-up", 3)
        assert not log.has("warm-up", 4)
        assert not log.has("round-1", 1)


def test_a_tensorboard_file_appears_with_the_first_number(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("warm-up", 1, {"note": "no number here"})
        assert not list(tmp_path.glob("events.*"))
        log.write("warm-up", 2, {"loss": 0.125, "note": "one here"})
    assert scalars_of(tmp_path) == [("warm-up/loss", 2, 0.125)]


def test_tensorboard_has_every_line_once_after_a_kill_and_a_resume(tmp_path):
    program = (
        "import os, pathlib, sys; from mujica_jax.report.metrics_log import MetricsLog; log = "
        "MetricsLog(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1, 21): log.write('warm-up', step, {'loss': step / 4})\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert killed.returncode == -9
    # A file of another program stays.
    (tmp_path / "events.out.tfevents.1.other").write_bytes(b"")
    with MetricsLog(tmp_path) as log:
        for step in range(15, 26):
            log.write("warm-up", step, {"loss": step / 4})
    assert scalars_of(tmp_path) == [("warm-up/loss", step, step / 4) for step in range(1, 26)]
    assert (tmp_path / "events.out.tfevents.1.other").exists()


# Weights & Biases


def wandb_pieces(content: bytes) -> Iterator[bytes]:
    """Yield the records of a `.wandb` file.

    It has LevelDB's log format behind a header of 7 bytes, in blocks of 32 KiB.
    """
    at = 7
    record = b""
    while at + 7 <= len(content):
        # No header begins in the last bytes of a block.
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        # checksum, length; whole, first, middle or last piece
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def wandb_records(directory: Path) -> list[tuple[str, dict]]:
    """Return of each file the identifier of the run, and what was logged with every line."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for file in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        for piece in wandb_pieces(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(piece)
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                records.append((file.stem.partition("-")[2], values))
    return records


@needs("wandb", "wandb")
@pytest.mark.slow
def test_offline_every_line_arrives_once_and_a_restart_goes_on_as_the_same_run(tmp_path):
    # The second start comes past steps that are written.
    for first, after in ((1, 4), (2, 6)):
        command = [sys.executable, "-c", WRITE, str(tmp_path), str(first), str(after)]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=HANG_SECONDS, cwd=ROOT
        )
        assert ended.returncode == 0, ended.stderr
    records = wandb_records(tmp_path)
    assert len({identifier for identifier, _ in records}) == 1
    keys = ("warm-up/learn/step", "warm-up/learn/loss")
    assert [tuple(values[key] for key in keys) for _, values in records] == [
        (step, step / 4) for step in range(1, 6)
    ]
    assert [values["_step"] for _, values in records] == list(range(5)), (
        "wandb drops what does not rise"
    )
    assert all("warm-up/learn/note" not in values for _, values in records), (
        "texts are in metrics.jsonl alone"
    )


def test_without_the_package_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        UserError, match=r"metrics.wandb online needs the package wandb, .*install -e '.\[wandb\]'"
    ):
        import_wandb(MetricsConfig(wandb="online"))
