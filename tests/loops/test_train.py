"""Whole runs, started as a user starts them: what they leave, and that nothing which happens on the way changes it.

Scores of a model this small are zeros, so outcomes are compared by what was sampled and learnt too: content checksums of all shards and
evaluations, and checksums of all policy files. One undisturbed run serves as the measure of the others.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mujica_jax.report import Phase
from mujica_jax.trajectories import shards

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "loops" / "smoke_config.py"
TWO_WIKI_CONFIG = ROOT / "tests" / "loops" / "smoke_two_wiki_config.py"
TRAIN = [sys.executable, "-m", "mujica_jax.train", str(CONFIG)]
EVAL = [sys.executable, "-m", "mujica_jax.eval"]
DISTURBED = [sys.executable, str(ROOT / "tests" / "loops" / "disturbed_train.py")]
# One cache for all of them, kept between test runs: compiling takes longer than everything else.
ENVIRONMENT = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
}
KILLS = {"warm-up: learning": 40, "round 1: sampling": 12, "round 2: learning": 2, "round 2: evaluating, greedy": 5}
SECONDS = 180  # far more than any of them takes


def start(command: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)


def finished(command: list[str], cwd: Path = ROOT) -> str:
    """What a program that must succeed printed."""
    ended = start(command, cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def closing(output: str) -> str:
    """The table and everything after it."""
    return output[output.index("\nphase ") :]


def json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary(directory: Path) -> dict:
    """summary.json without what a clock said."""
    value = json.loads((directory / "summary.json").read_text())
    del value["seconds"]
    for phase in value["phases"]:
        del phase["seconds"]
    return value


def outcome(directory: Path) -> dict:
    """All that must not depend on what happened on the way."""
    rounds = [json.loads(file.read_text()) for file in sorted(directory.glob("rounds/*/DONE.json"))]
    committed = [json.loads(file.read_text()) for file in sorted(directory.glob("policies/*/COMMITTED"))]
    evaluated = sorted(directory.glob("eval/*.parquet"))
    return {
        "summary": summary(directory),
        "shards": {entry["name"]: entry["content_sha256"] for done in rounds for entry in done["shards"]},
        "thresholds": [done["threshold"] for done in rounds],
        "evaluations": {
            file.name: shards.content_sha256(shards.decode(file.read_bytes(), file.name)) for file in evaluated
        },
        "policies": {
            policy["version"]: {file["name"]: file["sha256"] for file in policy["files"]} for policy in committed
        },
    }


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    directory: Path
    output: str
    outcome: dict


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    output = finished([*DISTURBED, str(CONFIG), "--run", str(directory)])
    return Undisturbed(directory, output, outcome(directory))


@pytest.fixture
def copy(undisturbed, tmp_path) -> Path:
    return shutil.copytree(undisturbed.directory, tmp_path / "run")


def test_a_run_prints_the_table_and_writes_the_summary(undisturbed):
    value = json.loads((undisturbed.directory / "summary.json").read_text())
    assert set(value) == {"task", "method", "seed", "phases", "seconds"}
    assert (value["task"], value["method"], value["seed"]) == ("tiny_world", "mygo", 0)
    assert [phase["name"] for phase in value["phases"]] == ["warm-up", "control", "round 1", "round 2"]
    promised = "name em f1 em_sampled f1_sampled questions trajectories accepted seconds".split()
    for phase in value["phases"]:
        assert set(phase) >= set(promised)
        assert Phase(**phase).questions == 12
    table = closing(undisturbed.output).splitlines()
    assert [line[:7] for line in table if line.startswith(("warm", "control", "round"))] == [
        phase["name"] for phase in value["phases"]
    ]


def test_the_small_run_goes_through_everything_it_is_to_measure(undisturbed):
    """Otherwise the comparisons below compare nothing."""
    found = undisturbed.outcome
    assert len(set(found["shards"].values())) == len(found["shards"]) >= 5  # first attempts and later ones
    models = [files["model/model.safetensors"] for files in found["policies"].values()]
    assert len(set(models)) == len(models) == 3, "the warm-up and both rounds learnt"
    assert [phase["accepted"] > 0 for phase in found["summary"]["phases"][2:]] == [True, True]
    assert len(set(found["evaluations"].values())) == 4
    assert any(phase["searches"] > 0 for phase in found["summary"]["phases"]), "workers took part"


def documented(heading: str) -> set[str]:
    """Names in the table under a heading of docs/metrics.md."""
    part = (ROOT / "docs" / "metrics.md").read_text().partition(f"\n## {heading}")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))


def test_every_metric_that_is_written_is_documented_and_the_other_way_round(undisturbed):
    headings = {"learn": "Learning", "sampling": "The engine", "evaluating": "The engine", "mygo": "MyGO"}
    headings |= {"agreement": "Engine against trainer", "time": "Where the time goes"}
    written: dict[str, set[str]] = {heading: set() for heading in headings.values()}
    for line in json_lines(undisturbed.directory / "metrics.jsonl"):
        written[headings[line["phase"].rpartition("/")[2]]] |= set(line) - {"phase", "step", "time"}
    assert written == {
        heading: documented(heading) - {"device_peak_bytes"}  # a CPU does not say
        for heading in written
    }


def test_engine_and_trainer_agree_on_what_was_sampled(undisturbed):
    lines = [line for line in json_lines(undisturbed.directory / "metrics.jsonl") if line["phase"] == "agreement"]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["compared_tokens"] > 100
        assert line["logprob_difference_max_absolute"] < 1e-4 and abs(line["logprob_kl"]) < 1e-6


def test_the_split_of_the_time_names_every_stage(undisturbed):
    lines = [line for line in json_lines(undisturbed.directory / "metrics.jsonl") if line["phase"] == "time"]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        stages = {name: value for name, value in line.items() if name.endswith("_seconds") and name != "total_seconds"}
        assert sum(stages.values()) == pytest.approx(line["total_seconds"])
        assert line["other_seconds"] < 0.5 * line["total_seconds"]


def test_killed_in_every_phase_it_ends_as_if_it_had_not_been(undisturbed, tmp_path):
    directory = tmp_path / "run"
    command = [str(CONFIG), "--run", str(directory)]
    for stage, update in KILLS.items():
        killed = start([*DISTURBED, "--kill-in", stage, str(update), *command])
        assert killed.returncode == -signal.SIGKILL, f"{stage}: {killed.stdout}{killed.stderr}"
        assert not (directory / "summary.json").exists()
    output = finished([*DISTURBED, *command])
    assert "warm-up: learning" not in output and "round 1: sampling" not in output, "what was done is not done again"
    assert outcome(directory) == undisturbed.outcome
    keys = [(line["phase"], line["step"]) for line in json_lines(directory / "metrics.jsonl")]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_killed_between_any_two_writes_it_ends_as_if_it_had_not_been(undisturbed, tmp_path):
    command = [str(CONFIG), "--run", str(tmp_path / "run")]
    for write in (5, 13, 29, 41, 23, 37):  # of each start: together they reach into every phase
        killed = start([*DISTURBED, "--kill-at-write", str(write), *command])
        assert killed.returncode == -signal.SIGKILL, f"{write}: {killed.stdout}{killed.stderr}"
    finished([*DISTURBED, *command])
    assert outcome(tmp_path / "run") == undisturbed.outcome


def test_interrupted_it_says_how_to_go_on_and_another_seed_gives_another_run(undisturbed, tmp_path):
    running = subprocess.Popen(
        [*TRAIN, "--seed", "1"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until = time.monotonic() + SECONDS
        while not list(tmp_path.glob("runs/*/rounds/0001/plan.json")) and time.monotonic() < until:
            assert running.poll() is None, running.communicate()[1]
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        _, messages = running.communicate(timeout=SECONDS)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "Traceback" not in messages
    again = shlex.split(messages.strip().splitlines()[-1].partition("go on with: ")[2])
    assert again[:3] == ["python", "-m", "mujica_jax.train"] and "--run" in again
    finished([sys.executable, *again[1:]], cwd=tmp_path)
    (directory,) = tmp_path.glob("runs/smoke-*")
    found, measure = outcome(directory), undisturbed.outcome
    assert found["summary"]["seed"] == 1
    for key in ("evaluations", "policies"):
        assert all(found[key][name] != value for name, value in measure[key].items()), key


def test_damaged_shards_are_named_set_aside_and_sampled_again(undisturbed, copy):
    truncated, flipped, missing = (copy / name for name in list(undisturbed.outcome["shards"])[-3:])
    truncated.write_bytes(truncated.read_bytes()[:-100])
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    missing.unlink()
    output = finished([*DISTURBED, str(CONFIG), "--run", str(copy)])
    for damaged in (truncated, flipped, missing):
        name = str(damaged.relative_to(copy))
        assert f"{name} is damaged and sampled again" in output
        reasons = [json.loads(file.read_text()) for file in copy.glob("quarantine/*/reason.json")]
        assert [reason["shard"] for reason in reasons].count(name) == 1
    assert outcome(copy) == undisturbed.outcome


def test_a_finished_run_prints_its_table_again_and_changes_nothing(undisturbed):
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in undisturbed.directory.rglob("*") if path.is_file()}

    before = content()
    output = finished([*TRAIN, "--run", str(undisturbed.directory)])
    assert closing(output) == closing(undisturbed.output)
    assert content() == before


def test_eval_repeats_what_the_run_found(copy):
    printed = finished([*EVAL, "--checkpoint", str(copy)])
    result = json.loads((copy / "eval" / "tiny_world-graph.json").read_text())
    own = json.loads((copy / "eval" / "round-2.json").read_text())
    assert (result["policy"], result["greedy"], result["sampled"]) == (2, own["greedy"], own["sampled"])
    lines = json_lines(copy / "eval" / "tiny_world-graph.predictions.jsonl")
    earlier = json_lines(copy / "eval" / "round-2.predictions.jsonl")
    compared = ("id", "prediction", "stop_reason", "searches")
    assert [[line[key] for key in compared] for line in lines] == [[line[key] for key in compared] for line in earlier]
    rows = dict(line.split()[:2] for line in printed.splitlines() if len(line.split()) == 8)
    questions = {kind: str(score["questions"]) for kind, score in own["greedy"]["by_kind"].items()}
    assert rows == questions | {"all": "12"}


def test_a_policy_that_was_trained_on_a_graph_is_evaluated_on_passages(undisturbed, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    title = "The Purple Shore"
    (data / "corpus.json").write_text(json.dumps([{"title": title, "text": "A film of 1950 by Ada Moss."}]))
    asked = {
        "question": f"Who directed {title}?",
        "answer": "Ada Moss",
        "type": "inference",
        "supporting_facts": [title],
    }
    questions = [json.dumps(asked | {"id": f"question {number}"}) for number in range(40)]
    (data / "questions.jsonl").write_text("\n".join(questions) + "\n")
    of_run = ["--checkpoint", str(undisturbed.directory), "--policy", "0", "--out", str(tmp_path / "results")]
    on_text = ["--task.environment", "text", "--task.data-dir", str(data), "--eval.questions", "1000", "--seed", "5"]
    output = finished([*EVAL, str(TWO_WIKI_CONFIG), *of_run, *on_text])
    result = json.loads((tmp_path / "results" / "two_wiki-text.json").read_text())
    predictions = json_lines(tmp_path / "results" / "two_wiki-text.predictions.jsonl")
    assert [result[key] for key in ("task", "environment", "policy", "seed")] == ["two_wiki", "text", 0, 5]
    assert 0 < result["greedy"]["questions"] == len(predictions) <= 20
    assert f"all {len(predictions)} held-out questions are evaluated; eval.questions is 1000" in output
