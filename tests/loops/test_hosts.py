"""Whole runs by a job of two processes: it ends as one process on the same mesh does, and where one host fails the
others say so.
"""

import contextlib
import json
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from whole_runs import CONFIG, DISTURBED, ENVIRONMENT, ROOT, SECONDS, Ended, free_port, json_lines, outcome

from mujica_jax.trajectories import shards

# Two devices: a sum of two numbers does not depend on who adds them, so that losses, and all that follows from them,
# are equal to the bit.
MESH = ("--trainer.fsdp", "2")

MOST_SECONDS = 30.0  # from the signal to the end of the process that got it

pytestmark = pytest.mark.slow


def jobs(
    directory: Path, processes: int, *disturbances: tuple[int, dict[str, Any]], flags: Sequence[str] = ()
) -> list[list[Ended]]:
    """How the processes of each job ended, one job after the other. Of each, one process may be disturbed
    (`disturbed_train.py`).
    """
    starts: list[list[dict[str, Any]]] = [[] for _ in range(processes)]
    for which, disturbance in disturbances:
        words = [str(CONFIG), "--run", str(directory), *MESH, "--distributed.deadline-seconds", "60", *flags]
        if processes > 1:
            words += ["--distributed.coordinator", f"localhost:{free_port()}"]
            words += ["--distributed.processes", str(processes)]
        for process, starts_of_process in enumerate(starts):
            number = ["--distributed.process", str(process)] if processes > 1 else []
            here = process == which % processes
            starts_of_process.append({"words": [*words, *number], **(disturbance if here else {})})
    environment = ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(2 // processes)}
    with contextlib.ExitStack() as left:
        ended = []
        started = []
        for starts_of_process in starts:
            output, messages = (left.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            command = [*DISTURBED, json.dumps(starts_of_process)]
            program = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=messages, text=True)
            left.callback(program.kill)
            started.append((program, output, messages))
        for program, output, messages in started:
            status = program.wait(timeout=5 * SECONDS)
            output.seek(0)
            messages.seek(0)
            assert status == 0, messages.read()
            ended.append([Ended(**json.loads(line)) for line in output])
    return [list(of_job) for of_job in zip(*ended, strict=True)]


def job(
    directory: Path, processes: int, *flags: str, which: int = -1, disturbance: dict[str, Any] | None = None
) -> list[Ended]:
    (ended,) = jobs(directory, processes, (which, disturbance or {}), flags=flags)
    return ended


def numbers(directory: Path) -> dict:
    """The outcome, with what was said in the evaluations: their log-probabilities are rounded as the questions are
    dealt out.
    """
    found = outcome(directory)
    del found["evaluations"]
    files = sorted((directory / "eval").glob("*.parquet"))
    said = [[c for t in shards.decode(f.read_bytes(), f.name) for c in t.conversations] for f in files]
    assert len(said) == 4
    return found | {"said": [[[turn.token_ids for turn in c.turns] for c in spoken] for spoken in said]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("alone") / "run"
    (ended,) = job(directory, 1)
    assert ended.status == 0, ended.messages
    return directory


def test_two_hosts_end_with_the_numbers_of_one(alone, tmp_path):
    directory = tmp_path / "run"
    first, second = job(directory, 2)
    assert (first.status, second.status) == (0, 0), first.messages + second.messages
    assert numbers(directory) == numbers(alone)
    assert "\nphase " in first.output and "run directory" not in second.output, "one of them writes and shows"
    times = [line for line in json_lines(directory / "metrics.jsonl") if line["phase"] == "time"]
    assert [line["weight_sync_seconds"] > 0 for line in times] == [True] * 3, "the warm-up and two rounds"


@pytest.mark.fault
def test_one_host_that_is_killed_ends_the_other_and_one_or_two_go_on(alone, tmp_path):
    directory = tmp_path / "run"
    kill = {"signal": "SIGKILL", "phase": "round 1: first attempts, the share of this host", "update": 1}
    first, second = job(directory, 2, "--distributed.deadline-seconds", "20", disturbance=kill)
    assert second.status == -9
    assert f"process 1 on {socket.gethostname()} is lost" in first.messages
    assert first.status not in (0, 2)
    (only,) = job(directory, 1, disturbance={"signal": "SIGKILL", "phase": "round 2: sampling", "update": 1})
    assert only.status == -9 and "warm-up: learning" not in only.output, only.messages
    assert (directory / "policies" / "000001" / "COMMITTED").exists() and not (directory / "summary.json").exists()
    first, second = job(directory, 2)
    assert (first.status, second.status) == (0, 0), first.messages + second.messages
    assert numbers(directory) == numbers(alone)


def test_a_notice_to_one_host_ends_both_in_any_phase_and_the_job_goes_on(alone, tmp_path):
    """Where they share the work each ends where it is, in training both before the same step."""
    directory = tmp_path / "run"
    phases = (
        (1, "warm-up: learning", 40),
        (1, "round 1: first attempts, the share of this host", 1),
        (0, "round 1: learning", 2),
        (0, "committing policy 1", 0),
        (1, "round 2: evaluating, sampled", 0),
    )
    notices = [(which, {"signal": "SIGTERM", "phase": phase, "update": update}) for which, phase, update in phases]
    *stopped, (first, second) = jobs(directory, 2, *notices, (0, {}))
    for (which, phase, _), ended in zip(phases, stopped, strict=True):
        assert [process.status for process in ended] == [0, 0], f"{phase}: {ended[0].messages}{ended[1].messages}"
        said = [process.messages.strip().splitlines()[-1] for process in ended]
        assert "preempted in" in said[which] and "go on with: python -m mujica_jax.train" in said[which], said
        if phase == "warm-up: learning":
            steps = [line.partition("learning; ")[2].partition(" is saved")[0] for line in said]
            # The notice comes at the 40th update of the console: one a step, and one more every ten steps.
            assert steps[0] == steps[1] and int(steps[0].split()[1]) >= 37
        seconds = ended[which].seconds_after_signal
        assert seconds is not None and seconds < MOST_SECONDS, phase
        assert not any("Traceback" in process.messages for process in ended), (
            f"{phase}: {ended[0].messages}{ended[1].messages}"
        )
        assert "\nphase " not in ended[0].output, "it had not ended"
    assert (first.status, second.status) == (0, 0), first.messages + second.messages
    assert numbers(directory) == numbers(alone)


def test_a_mistake_is_told_once_by_each_process(tmp_path):
    first, second = job(tmp_path / "run", 2, "--trainer.data", "2")
    assert (first.status, second.status) == (2, 2)
    for ended in (first, second):
        assert "needs 4 devices and 2 are available" in ended.messages
        assert "Traceback" not in ended.messages
