"""Killed in any phase, between any two writes, or with damaged files: started again, a run ends as
if nothing had been.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.phases import PHASES
from tests.helpers.whole_runs import Ended, disturbed, json_lines, outcome, rest


def killed(directory: Path, *starts: dict[str, Any]) -> list[Ended]:
    """Kill each start at its place; each begins where the one before it was killed."""
    ends = disturbed(directory, *({"signal": "SIGKILL", **start} for start in starts))
    for start, ended in zip(starts, ends, strict=True):
        assert ended.status == -signal.SIGKILL, f"{start}: {ended.output}{ended.messages}"
    assert not (directory / "summary.json").exists()
    return ends


@pytest.mark.slow
@pytest.mark.fault
def test_killed_again_and_again_it_ends_as_if_it_had_not_been(undisturbed, tmp_path):
    """The twenty steps of the first phase are seven, a kill and thirteen.

    Each step sees the rows it would have seen, and all that follows from them has the same
    checksums, bit for bit.
    """
    directory = tmp_path / "run"
    first = tmp_path / "first"
    second = tmp_path / "second"
    ends = killed(
        directory,
        {
            "phase": "pretraining: learning",
            "update": 9,
            "stretch": 7,
            "saved": "learning/pretraining/*/commit_success.txt",  # the last of its two marks
            "rows": str(first),
        },
        {"phase": "warm-up: learning", "update": 40, "rows": str(second)},
        {"phase": "round 1: sampling", "update": 2},
        {"phase": "round 2: evaluating, greedy", "update": 5},
    )
    assert "pretraining: learning: 20/20 steps" in ends[1].output
    assert json_lines(first)[:7] + json_lines(second)[:13] == undisturbed.rows[:20]
    assert len({tuple(rows) for rows in undisturbed.rows[:20]}) == 20
    output = rest(directory)
    # What was done is not done again.
    assert "warm-up: learning" not in output
    assert "round 1: sampling" not in output
    assert outcome(directory) == undisturbed.outcome


@pytest.mark.slow
def test_killed_in_every_phase_it_ends_as_if_it_had_not_been(undisturbed, tmp_path):
    killed(
        tmp_path / "run", *({"phase": phase, "update": update} for phase, update in PHASES.items())
    )
    rest(tmp_path / "run")
    assert outcome(tmp_path / "run") == undisturbed.outcome


@pytest.mark.slow
def test_killed_between_any_two_writes_it_ends_as_if_it_had_not_been(undisturbed, tmp_path):
    # One number for each start. Together they reach into every phase.
    writes = (5, 13, 29, 41, 23, 37)
    killed(tmp_path / "run", *({"write": write} for write in writes))
    rest(tmp_path / "run")
    assert outcome(tmp_path / "run") == undisturbed.outcome


@pytest.mark.slow
def test_damaged_shards_are_named_set_aside_and_sampled_again(undisturbed, copy):
    truncated, flipped, missing = (copy / name for name in list(undisturbed.outcome["shards"])[-3:])
    truncated.write_bytes(truncated.read_bytes()[:-100])
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    missing.unlink()
    output = rest(copy)
    for damaged in (truncated, flipped, missing):
        name = str(damaged.relative_to(copy))
        assert f"{name} is damaged and will be sampled again" in output
        reasons = [json.loads(file.read_text()) for file in copy.glob("quarantine/*/reason.json")]
        assert [reason["shard"] for reason in reasons].count(name) == 1
    assert outcome(copy) == undisturbed.outcome
