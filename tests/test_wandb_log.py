"""Weights & Biases, offline: what reaches its files, and that a restarted run goes on as the same
one."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import HANG_SECONDS

from mujica_jax.config.schema import MetricsConfig
from mujica_jax.errors import UserError
from mujica_jax.report.wandb_log import import_wandb

ROOT = Path(__file__).resolve().parent.parent
WRITE = """
import pathlib, sys
from mujica_jax.config.schema import MetricsConfig
from mujica_jax.report.metrics_log import MetricsLog
config = MetricsConfig(wandb="offline", wandb_project="somewhere")
with MetricsLog(pathlib.Path(sys.argv[1]), config=config, about={"seed": 5}) as log:
    for step in range(int(sys.argv[2]), int(sys.argv[3])):
        log.write("warm-up/learn", step, {"loss": step / 4, "note": "text"})
"""


def pieces(content: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format behind a header of 7 bytes, in blocks of
    32 KiB."""
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no header begins in the last bytes of a block
            at += 32768 - at % 32768
            continue
        # checksum, length; whole, first, middle or last piece
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def records(directory: Path) -> list[tuple[str, dict]]:
    """(identifier of the run, what was logged with every line), read from all of its files."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        for piece in pieces(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(piece)
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                found.append((file.stem.partition("-")[2], values))
    return found


@pytest.mark.slow
def test_offline_every_line_arrives_once_and_a_restart_goes_on_as_the_same_run(tmp_path):
    for first, after in ((1, 4), (2, 6)):  # the second start comes past steps that are written
        command = [sys.executable, "-c", WRITE, str(tmp_path), str(first), str(after)]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=HANG_SECONDS, cwd=ROOT
        )
        assert ended.returncode == 0, ended.stderr
    found = records(tmp_path)
    assert len({identifier for identifier, _ in found}) == 1
    keys = ("warm-up/learn/step", "warm-up/learn/loss")
    assert [tuple(values[key] for key in keys) for _, values in found] == [
        (step, step / 4) for step in range(1, 6)
    ]
    assert [values["_step"] for _, values in found] == list(range(5)), (
        "wandb drops what does not rise"
    )
    assert all("warm-up/learn/note" not in values for _, values in found), (
        "texts are in metrics.jsonl alone"
    )


def test_without_the_package_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        UserError, match=r"metrics.wandb online needs the package wandb .*install -e '.\[wandb\]'"
    ):
        import_wandb(MetricsConfig(wandb="online"))
