"""SIGTERM in any phase: the run saves, says how to go on, exits 0 in time, and ends as if it had
not been preempted.
"""

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.phases import PHASES, next_phase
from tests.helpers.whole_runs import (
    CONFIG,
    ENVIRONMENT,
    EVAL,
    SECONDS,
    Ended,
    disturbed,
    finished,
    json_lines,
    outcome,
    rest,
)

MOST_CPU_SECONDS = 30.0  # from the signal to the end of the process
# What the default tests look at.
THIN = (
    "pretraining: learning",
    "round 1: sampling",
    "committing policy 1",
    "round 2: evaluating, greedy",
)


def preempted(directory: Path, phases: Sequence[str]) -> list[Ended]:
    """Start a run once a phase, each time asked to end there.

    Where all else of a phase ends in the same call of the engine, the phase is finished.
    """
    starts = [
        {
            "signal": "SIGTERM",
            "phase": phase,
            "update": PHASES[phase],
            "rows": f"{directory}.rows-{number}",
        }
        for number, phase in enumerate(phases)
    ]
    ends = disturbed(directory, *starts)
    for phase, ended in zip(phases, ends, strict=True):
        message = ended.messages.strip().splitlines()[-1]
        assert ended.status == 0, f"{phase}: {ended.output}{ended.messages}"
        where, _, what_is_kept = message.removeprefix("preempted ").partition("; ")
        expected = [f"in {phase}", f"in {next_phase(phase)}"]
        # The first notice may come before the phase has begun.
        if phase == next(iter(PHASES)):
            expected.append("before anything began")
        assert where in expected, message
        assert what_is_kept, message
        command = shlex.split(message.partition("continue with: ")[2])
        assert command == ["python", "-m", "mujica_jax.train", str(CONFIG), "--run", str(directory)]
        assert ended.cpu_seconds_after_signal is not None
        assert ended.cpu_seconds_after_signal < MOST_CPU_SECONDS
    return ends


@pytest.mark.slow
@pytest.mark.fault
def test_preempted_in_every_kind_of_phase_it_ends_as_if_it_had_not_been(undisturbed, tmp_path):
    learning, sampling, committing, evaluating = preempted(tmp_path / "run", THIN)
    step = int(learning.messages.partition("learning; step ")[2].split()[0])
    assert 7 <= step < 20
    assert f"step {step} of 20 is saved" in learning.messages
    first, second = (json_lines(tmp_path / f"run.rows-{number}") for number in range(2))
    # The second start went on where the first ended.
    assert first == undisturbed.rows[:step]
    assert second[: 20 - step] == undisturbed.rows[step:20]
    assert "finished shards are kept, and the current shard is sampled again" in sampling.messages
    rest(tmp_path / "run")
    assert outcome(tmp_path / "run") == undisturbed.outcome


@pytest.mark.slow
def test_preempted_in_every_phase_it_ends_as_if_it_had_not_been(undisturbed, tmp_path):
    # after the last one there is nothing left to poll
    preempted(tmp_path / "run", list(PHASES)[:-1])
    rest(tmp_path / "run")
    assert outcome(tmp_path / "run") == undisturbed.outcome


@pytest.mark.slow
def test_killed_while_it_obeys_it_ends_as_if_it_had_not_been(undisturbed, tmp_path):
    """SIGKILL follows SIGTERM before the save is done. A torn file is not used."""
    directory = tmp_path / "run"
    phase = {"signal": "SIGTERM", "phase": "warm-up: learning"}
    starts = [{**phase, "update": 10 * write, "then_write": write} for write in (1, 2, 3)]
    ends = disturbed(directory, *starts)
    assert [ended.status for ended in ends] == [-signal.SIGKILL] * 3, ends
    marks = ("COMMITTED", "commit_success.txt")
    saved = list((directory / "learning" / "warm-up").iterdir())
    torn = [folder for folder in saved if not all((folder / mark).exists() for mark in marks)]
    assert torn, "the save was interrupted half-way"
    rest(directory)
    assert outcome(directory) == undisturbed.outcome


@pytest.mark.slow
def test_eval_that_is_asked_to_end_writes_no_result(undisturbed, tmp_path):
    command = [
        *EVAL,
        "--checkpoint",
        str(undisturbed.directory),
        "--out",
        str(tmp_path / "results"),
    ]
    command += ["--eval.questions", "16"]
    evaluating = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert evaluating.stdout is not None
        assert evaluating.stdout.readline().startswith("evaluating policy 2 from ")
        evaluating.send_signal(signal.SIGTERM)
        _, messages = evaluating.communicate(timeout=SECONDS)
    finally:
        evaluating.kill()
    assert evaluating.returncode == 0, messages
    assert "preempted" in messages
    assert messages.strip().endswith("run the same command again to continue")
    assert not [
        file for file in (tmp_path / "results").iterdir() if not file.name.startswith(".parts-")
    ]


def results_in(folder: Path) -> dict[str, bytes]:
    """Return the files of results in a folder, by name."""
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.suffix in (".json", ".jsonl")
    }


@pytest.mark.slow
def test_eval_that_is_killed_goes_on_to_the_same_predictions(undisturbed, tmp_path):
    """It is killed after each of the first three of four parts.

    The parts are greedy and sampled, of 64 and 36 questions.
    """
    asked = ["--eval.questions", "100", "--task.dev-questions", "100"]
    command = [*EVAL, "--checkpoint", str(undisturbed.directory), *asked, "--out"]
    finished([*command, str(tmp_path / "whole")])
    for parts in (1, 2, 3):
        evaluating = subprocess.Popen(
            [*command, str(tmp_path / "killed")],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + SECONDS
        while (
            len(list((tmp_path / "killed").glob(".parts-*/*.parquet"))) < parts
            and time.monotonic() < until
        ):
            assert evaluating.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        evaluating.kill()
        assert evaluating.wait() == -signal.SIGKILL
    output = finished([*command, str(tmp_path / "killed")])
    assert "sampled: 100/100 episodes" in output
    results = [results_in(tmp_path / folder) for folder in ("whole", "killed")]
    (name,) = [name for name in results[0] if name.endswith(".json")]
    scores = [json.loads(scores_of_run.pop(name)) for scores_of_run in results]
    for scores_of_run in scores:
        del scores_of_run["greedy"]["seconds"]
        del scores_of_run["sampled"]["seconds"]
    assert scores[0] == scores[1]
    assert results[0] == results[1]
    assert not list((tmp_path / "killed").glob(".parts-*")), "what is done is not kept twice"


@pytest.mark.slow
def test_agents_are_compared_and_two_models_play_as_users_ask(undisturbed, tmp_path):
    command = [
        *EVAL,
        "--checkpoint",
        str(undisturbed.directory),
        "--eval.questions",
        "8",
        "--out",
        str(tmp_path),
    ]
    output = finished([*command, "--agents", "direct", "chain_of_thought", "--plot"])
    assert "comparison: " in output
    rows = json.loads((tmp_path / "comparison-dev.json").read_text())
    assert [row["agent"] for row in rows] == ["mujica", "direct", "chain_of_thought"]
    for row, name in zip(rows, ("graph", "graph-direct", "graph-chain-of-thought"), strict=True):
        result = json.loads((tmp_path / f"tiny_world-{name}-dev.json").read_text())
        assert result["greedy"]["em"] == row["em"]
        assert result["greedy"]["tokens"] == row["tokens"]
        assert result["settings"]["agent"]["kind"] == row["agent"]
    assert (tmp_path / "comparison-dev.md").exists()
    assert (tmp_path / "comparison-dev.png").exists()
    finished([*command, "--worker", str(undisturbed.directory)])
    result = json.loads((tmp_path / "tiny_world-graph-dev.json").read_text())
    assert result["worker"].startswith(str(undisturbed.directory))
    assert result["greedy"]["em"] == rows[0]["em"], "the same model in both places"
