"""Whole runs whose retriever fails: what they print, that a killed one ends with the same numbers,
and the end of one whose retriever is down for good.
"""

import json
from pathlib import Path

import pytest

from mujica_jax.trajectories import shards
from tests.helpers.paths import HELPERS
from tests.helpers.whole_runs import ENVIRONMENT, closing, disturbed, json_lines, outcome, rest

FAILING_SHARE = "MUJICA_FAILING_PERCENT"  # environment variable of `faulty_world.py`
FAULTY = str(HELPERS / "smoke_faulty.py")
KILLED = {  # phase: progress report at which it is killed
    "warm-up: evaluating, greedy": 3,
    "round 1: sampling": 5,
    "round 2: sampling": 1,
    "round 2: evaluating, sampled": 2,
}


def words(directory: Path, *flags: str) -> dict:
    return {"words": [FAULTY, "--run", str(directory), *flags]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("faulty") / "run"
    return directory, rest(directory, **words(directory))


@pytest.mark.slow
def test_a_run_whose_retriever_fails_now_and_then_leaves_out_and_counts(undisturbed):
    directory, output = undisturbed
    stored = [
        trajectory
        for file in sorted(directory.glob("rounds/*/*.parquet"))
        for trajectory in shards.decode(file.read_bytes(), file.name)
    ]
    failed = [trajectory for trajectory in stored if trajectory.is_environment_fault]
    assert 0 < len(failed) < len(stored)
    assert {trajectory.reward for trajectory in failed} == {0.0}
    lines = [line for line in json_lines(directory / "metrics.jsonl") if line["phase"] == "mygo"]
    assert sum(line["left_out"] for line in lines) == len(failed)
    assert sum(line["trajectories"] for line in lines) == len(stored)
    for line in lines:
        first = [
            t
            for t in stored
            if t.policy_version == line["step"] - 1 and t.attempt == 0 and t.is_rewarded
        ]
        assert line["mean_reward"] == pytest.approx(sum(t.reward for t in first) / len(first))
    phases = json.loads((directory / "summary.json").read_text())["phases"]
    assert all(phase["left_out"] > 0 and 0 < phase["questions"] < 12 for phase in phases)
    assert "left out" in closing(output).splitlines()[1]
    assert "episodes are left out of the scores because a search failed" in output


@pytest.mark.slow
def test_a_killed_run_whose_retriever_fails_ends_with_the_same_numbers(undisturbed, tmp_path):
    directory = tmp_path / "run"
    starts = [
        {**words(directory), "signal": "SIGKILL", "phase": phase, "update": update}
        for phase, update in KILLED.items()
    ]
    ends = disturbed(directory, *starts)
    assert [end.status for end in ends] == [-9] * len(KILLED), [end.messages for end in ends]
    output = rest(directory, **words(directory))
    assert outcome(directory) == outcome(undisturbed[0])
    assert closing(output).split("minutes")[0] == closing(undisturbed[1]).split("minutes")[0]


@pytest.mark.slow
def test_a_run_whose_retriever_is_down_ends_with_a_sentence_and_goes_on_when_it_is_back(
    undisturbed, tmp_path, monkeypatch
):
    directory = tmp_path / "run"
    monkeypatch.setitem(ENVIRONMENT, FAILING_SHARE, "100")
    flags = words(directory, "--faults.max-in-a-row", "4")
    (ended,) = disturbed(directory, flags)
    assert ended.status == 2
    assert "Traceback" not in ended.messages
    message = " ".join(ended.messages.split())
    assert "a search failed in 5 attempts in a row (each was played 2 times)" in message
    monkeypatch.delitem(ENVIRONMENT, FAILING_SHARE)
    rest(directory, **words(directory))
    assert outcome(directory) == outcome(undisturbed[0])
