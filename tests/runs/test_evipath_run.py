"""Whole runs of EviPath: killed in synthesis and in learning, and with planner and worker as two
models.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import HELPERS
from tests.helpers.whole_runs import EVAL, disturbed, finished, json_lines, outcome, summary

CONFIG = HELPERS / "smoke_evipath_config.py"


def started(directory: Path, *flags: str, **options: Any) -> str:
    """Start the run once, killed where `options` say so, and return how it ended."""
    (ended,) = disturbed(
        directory, {"words": [str(CONFIG), "--run", str(directory), *flags], **options}
    )
    assert ended.status == (-signal.SIGKILL if options else 0), ended.messages
    return ended.output


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["0", "12"], ids=["all right trajectories", "twelve of them"])
def test_killed_in_synthesis_and_in_learning_it_ends_as_if_it_had_not_been(tmp_path, wanted):
    bound = ("--method.trajectories", wanted)
    started(tmp_path / "undisturbed", *bound)
    killed = tmp_path / "killed"
    started(killed, *bound, signal="SIGKILL", phase="evipath: synthesis", update=10)
    assert [file.name for file in sorted((killed / "rounds" / "0001").iterdir())] == [
        "plan.json",
        "shard-00000.parquet",
    ]
    started(killed, *bound, signal="SIGKILL", phase="evipath: learning", update=12, stretch=5)
    assert (killed / "rounds" / "0001" / "DONE.json").exists()
    assert not (killed / "policies" / "000001").exists()
    output = started(killed, *bound)
    assert "evipath: synthesis:" not in output, "what was done is not done again"
    assert outcome(killed) == outcome(tmp_path / "undisturbed")
    (line,) = (line for line in json_lines(killed / "metrics.jsonl") if line["phase"] == "evipath")
    kept_trajectories = int(wanted) or 16
    assert line["right"] == 16
    assert line["kept"] == kept_trajectories
    assert line["planner_rows"] == kept_trajectories
    assert line["worker_rows"] > kept_trajectories


@pytest.mark.slow
def test_planner_and_executor_are_tuned_as_two_models(tmp_path):
    """There is no warm-up. The model that they start from is the first row of the table."""
    rows = {}
    for tune in ("planner", "executor"):
        started(tmp_path / tune, "--method.tune", tune, "--eval.no-control", "--warmup.steps", "0")
        assert [row["name"] for row in summary(tmp_path / tune)["phases"]] == ["warm-up", "evipath"]
        (line,) = (
            line
            for line in json_lines(tmp_path / tune / "metrics.jsonl")
            if line["phase"] == "evipath"
        )
        rows[tune] = line["planner_rows"], line["worker_rows"]
    assert rows["planner"][0] == 16
    assert rows["planner"][1] == 0
    assert rows["executor"][0] == 0
    assert rows["executor"][1] > 16
    shown = finished(
        [
            *EVAL,
            "--checkpoint",
            str(tmp_path / "planner"),
            "--worker",
            str(tmp_path / "executor"),
            "--eval.questions",
            "4",
        ]
    )
    assert "EM" in shown
