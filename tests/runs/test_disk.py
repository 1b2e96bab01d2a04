"""A disk that takes nothing more, or nothing at all: one sentence, exit status 2; with room again
the run ends as if nothing had been.
"""

import ctypes
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.helpers.whole_runs import Ended, disturbed, outcome, rest

PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE = 1
SMALL_FILE_BYTES = 40_000  # enough for a shard, and not for a model


def refused(ended: Ended, words: str) -> None:
    assert ended.status == 2, f"{ended.output}{ended.messages}"
    message = ended.messages.strip().splitlines()[-1]
    assert message.startswith("error: cannot use ")
    assert words in message
    assert "Traceback" not in ended.messages


@pytest.mark.slow
@pytest.mark.fault
def test_a_disk_that_fills_up_during_saves(undisturbed, tmp_path):
    """It fills up while the learner's state, its mark or shards are written.

    The state is written by a library in C++.
    """
    directory = tmp_path / "run"
    large, mark, shard = disturbed(
        directory,
        {"file_bytes": SMALL_FILE_BYTES},
        {"full": "disk", "write": 2},
        {"full": "disk", "write": 30},
    )
    refused(large, "raise the limit (ulimit -f)")
    refused(mark, "no space is left there")
    refused(shard, "no space is left there")
    rest(directory)
    assert outcome(directory) == undisturbed.outcome


@pytest.mark.slow
def test_a_disk_that_is_full_again_and_again(undisturbed, tmp_path):
    directory = tmp_path / "run"
    # One number for each start, which goes on where the one before it ended.
    writes = (3, 15, 24, 27, 30, 30)
    ends = disturbed(directory, *({"full": "disk", "write": write} for write in writes))
    for ended in ends:
        refused(ended, "no space is left there")
    assert (directory / "rounds" / "0001" / "DONE.json").exists()
    assert not (directory / "summary.json").exists()
    rest(directory)
    assert outcome(directory) == undisturbed.outcome


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_small_file_system_that_is_full(undisturbed, tmp_path):
    """The system's own refusal comes wherever it comes first. Then the disk grows."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        (full,) = disturbed(disk / "run", {})
        assert full.status == 2, full.messages
        assert "Traceback" not in full.messages, full.messages
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        rest(disk / "run")
        assert outcome(disk / "run") == undisturbed.outcome
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def unprivileged() -> None:
    """Make permissions count for a program that root starts."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


@pytest.mark.slow
def test_a_run_directory_that_is_read_only_is_named_and_nothing_is_changed(undisturbed, copy):
    # Without it there is something to write.
    (copy / "summary.json").unlink()

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}

    before = content()
    paths = [copy, *copy.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        (ended,) = disturbed(copy, {}, preexec_fn=unprivileged)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert ended.status == 2, ended.messages
    assert content() == before, ended.messages
    assert ended.messages.startswith("error: cannot use ")
    assert "permission is denied" in ended.messages
    rest(copy)
    assert outcome(copy) == undisturbed.outcome
