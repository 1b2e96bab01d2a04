"""Whole runs of DAPO with staged rewards and of GRPO with a reference: what they print and leave,
and that a killed one ends with the same numbers.
"""

import json
import signal
from pathlib import Path

import pytest

from tests.helpers.paths import HELPERS, ROOT
from tests.helpers.whole_runs import closing, disturbed, json_lines, outcome, rest

DAPO = str(HELPERS / "smoke_dapo_config.py")
KILLED = {  # phase: progress report at which it is killed
    "round 1: sampling": 5,
    "round 1: learning": 2,
    "round 2: sampling": 3,
    "round 2: learning": 1,
    "committing policy 2": 0,
    "round 2: evaluating, greedy": 2,
    "round 3: sampling": 9,
    "round 3: learning": 1,
    "control: learning": 2,
}


def words(directory: Path, *flags: str) -> dict:
    return {"words": [DAPO, "--run", str(directory), *flags]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("dapo") / "run"
    return directory, rest(directory, **words(directory))


@pytest.mark.slow
def test_a_run_of_dapo_ends_with_the_table(undisturbed):
    directory, output = undisturbed
    table = closing(output).splitlines()
    names = ["warm-up", "control", "round 2", "round 3"]
    assert [line[:7] for line in table if line.startswith(("warm", "control", "round"))] == names
    lines = [
        line
        for line in json_lines(directory / "metrics.jsonl")
        if line["phase"] == "policy_gradient"
    ]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["steps"] > 0 for line in lines), (
        "otherwise the comparison below compares nothing"
    )
    learnt = [
        line for line in json_lines(directory / "metrics.jsonl") if line["phase"] == "round 1/learn"
    ]
    assert {"clipped_share", "mean_ratio"} <= set(learnt[0])
    assert len(list(directory.glob("learning/round-*"))) == 1, (
        "checkpoints of rounds that are past leave"
    )
    assert rest(directory, **words(directory)).endswith(closing(output))


@pytest.mark.slow
def test_every_metric_of_a_round_is_documented(undisturbed):
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    lines = [
        line
        for line in json_lines(undisturbed[0] / "metrics.jsonl")
        if line["phase"] == "policy_gradient"
    ]
    names = {
        name
        for line in lines
        for name in set(line) - {"phase", "step", "time"}
        if not name.startswith("reward_")
    }
    assert {name for name in names if f"| `{name}` |" not in page} == set()


@pytest.mark.slow
def test_a_killed_run_of_dapo_ends_with_the_same_numbers(undisturbed, tmp_path):
    directory = tmp_path / "run"
    starts = [
        {**words(directory), "signal": "SIGKILL", "phase": phase, "update": update}
        for phase, update in KILLED.items()
    ]
    ends = disturbed(directory, *starts)
    assert [ended.status for ended in ends] == [-signal.SIGKILL] * len(starts), [
        ended.messages for ended in ends
    ]
    rest(directory, **words(directory))
    assert outcome(directory) == outcome(undisturbed[0])


@pytest.mark.slow
def test_grpo_keeps_its_distance_to_policy_0(tmp_path):
    directory = tmp_path / "run"
    flags = "--method.kind grpo --method.kl-coefficient 0.01 --reward f1 --eval.no-control".split()
    starts = [
        {
            **words(directory, *flags),
            "signal": "SIGKILL",
            "phase": "round 2: learning",
            "update": 2,
        },
        words(directory, *flags),
    ]
    killed, ended = disturbed(directory, *starts)
    assert killed.status == -signal.SIGKILL, ended.messages
    assert ended.status == 0, ended.messages
    lines = [
        line for line in json_lines(directory / "metrics.jsonl") if line["phase"].endswith("/learn")
    ]
    distance = {line["phase"]: line["reference_kl"] for line in lines if "reference_kl" in line}
    assert set(distance) >= {"round 1/learn", "round 2/learn"}
    assert distance["round 2/learn"] > 0
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["method"] == "grpo"
    assert [row["name"] for row in summary["phases"]] == ["warm-up", "round 2", "round 3"]
