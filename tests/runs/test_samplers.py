"""A trainer and its sampling workers, as separate programs over a bucket."""

import json
import os
import random
import signal
import subprocess
import time

import pytest

from tests.helpers import whole_runs
from tests.helpers.fake_bucket import serving
from tests.helpers.paths import ROOT
from tests.helpers.whole_runs import ADDRESS, CONFIG, DISTURBED, SECONDS, fetched, outcome

EXTERNAL = ["--sampling.workers", "external"]


def begin(bucket, cache, *words: str, **options) -> subprocess.Popen[str]:
    environment = whole_runs.ENVIRONMENT | bucket.environment | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(
        [*DISTURBED, json.dumps([{"words": [*words, "--run", ADDRESS], **options}])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # killed with the program that it forks
    )


def ended(process: subprocess.Popen[str]) -> dict:
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def leases(bucket) -> list[str]:
    return [name for name in bucket.names("bucket", "runs/smoke/rounds/") if "/leases/" in name]


@pytest.mark.slow
@pytest.mark.fault
def test_one_trainer_and_three_samplers_two_of_them_killed_leave_what_one_program_leaves(
    undisturbed, tmp_path
):
    def sampler() -> subprocess.Popen[str]:
        return begin(bucket, tmp_path / "cache", "--lease-seconds", "5", program="sample")

    with serving() as bucket:
        trainer = begin(bucket, tmp_path / "cache", str(CONFIG), *EXTERNAL)
        until = time.monotonic() + SECONDS
        while not bucket.names("bucket", "runs/smoke/config.json"):
            assert trainer.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        killed = [sampler(), sampler()]
        while not leases(bucket):
            assert time.monotonic() < until
            time.sleep(0.05)
        for process in killed:
            time.sleep(random.Random(7).uniform(0.0, 1.0))
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        last = ended(sampler())
        of_trainer = ended(trainer)
        run = fetched(bucket, tmp_path / "run")
        owners = [json.loads(bucket.content("bucket", name))["owner"] for name in leases(bucket)]
    assert last["status"] == 0, last["messages"]
    assert "units" in last["output"], last["messages"]
    assert of_trainer["status"] == 0, of_trainer["messages"]
    assert len(set(owners)) > 1, "a unit was begun by one that was killed"
    workers = [json.loads(file.read_text()) for file in (run / "samplers").glob("*.json")]
    # Whether a unit was under way when its worker was killed is chance: seconds are told, not
    # compared.
    longest = max(worker_record["takeover_seconds"] for worker_record in workers)
    print("taken over after", longest, "seconds")
    numbers = outcome(run)
    alone = undisturbed.outcome
    assert {name: numbers[name] for name in numbers if name != "metrics"} == {
        name: alone[name] for name in alone if name != "metrics"
    }


@pytest.mark.slow
def test_a_worker_samples_through_jetstream_where_the_run_says_so(undisturbed, tmp_path):
    """The worker reads `engine.kind` from the run. The policies are those of the native engine."""
    with serving() as bucket:
        trainer = begin(
            bucket, tmp_path / "cache", str(CONFIG), *EXTERNAL, "--engine.kind", "jetstream"
        )
        until = time.monotonic() + SECONDS
        while not bucket.names("bucket", "runs/smoke/config.json"):
            assert trainer.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        worker = ended(begin(bucket, tmp_path / "cache", program="sample"))
        of_trainer = ended(trainer)
        run = fetched(bucket, tmp_path / "run")
    assert worker["status"] == 0, worker["messages"]
    assert "units" in worker["output"], worker["messages"]
    assert of_trainer["status"] == 0, of_trainer["messages"]
    assert outcome(run)["policies"] == undisturbed.outcome["policies"]


@pytest.mark.slow
def test_asynchronous_rounds_by_a_worker_are_those_of_one_program(tmp_path):
    """There are three rounds.

    The last is sampled by a policy whose phase has left its checkpoint behind.
    """
    words = ["--method.schedule", "asynchronous", "--method.rounds", "3", "--eval.no-control"]
    with serving() as alone:
        assert ended(begin(alone, tmp_path / "cache", str(CONFIG), *words))["status"] == 0
        of_one = outcome(fetched(alone, tmp_path / "alone"))
    with serving() as bucket:
        trainer = begin(bucket, tmp_path / "cache", str(CONFIG), *words, *EXTERNAL)
        while not bucket.names("bucket", "runs/smoke/config.json"):
            time.sleep(0.1)
        worker = ended(begin(bucket, tmp_path / "cache", program="sample"))
        of_trainer = ended(trainer)
        numbers = outcome(fetched(bucket, tmp_path / "run"))
    assert worker["status"] == 0, of_trainer["messages"] + worker["messages"]
    assert of_trainer["status"] == 0, of_trainer["messages"] + worker["messages"]
    assert {name: numbers[name] for name in numbers if name != "metrics"} == {
        name: of_one[name] for name in of_one if name != "metrics"
    }
    assert "sampled by policy 1 (versions behind the newest: 1)" in of_trainer["output"]


@pytest.mark.slow
def test_a_second_trainer_is_refused_while_the_first_one_trains(tmp_path):
    run = ["--run", str(tmp_path / "run")]
    command = [*whole_runs.TRAIN, *run, *EXTERNAL]
    first = subprocess.Popen(
        command, cwd=ROOT, env=whole_runs.ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        while not list(tmp_path.glob("run/trainer/*.json")):
            assert first.poll() is None
            time.sleep(0.1)
        second = whole_runs.start(command)
    finally:
        first.kill()
        first.communicate()
    assert second.returncode == 2
    assert "is already training in" in second.stderr
    assert "stop it first" in second.stderr
    asked = whole_runs.start(
        [*whole_runs.EVAL[:2], "mujica_jax.sample", "--run", str(tmp_path / "elsewhere")]
    )
    assert asked.returncode == 2
    assert "start its trainer first" in asked.stderr
