"""Whole runs in a bucket that fails now and then: what they leave is what a run on local disk
leaves.
"""

import json
import signal
from pathlib import Path

import pytest

from tests.helpers import whole_runs
from tests.helpers.fake_bucket import Fault, Request, serving
from tests.helpers.whole_runs import (
    ADDRESS,
    CONFIG,
    EVAL,
    Ended,
    closing,
    disturbed,
    fetched,
    finished,
    json_lines,
    outcome,
)

KILLS = {"warm-up: learning": 40, "round 1: sampling": 12, "round 2: learning": 2}


@pytest.fixture
def fake(monkeypatch, tmp_path):
    with serving() as bucket:
        places = {**bucket.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        monkeypatch.setattr(whole_runs, "ENVIRONMENT", whole_runs.ENVIRONMENT | places)
        yield bucket


def starts(*options: dict) -> list[Ended]:
    return disturbed(
        Path(), *({"words": [str(CONFIG), "--run", ADDRESS], **start} for start in options)
    )


def now_and_then(request: Request) -> Fault | None:
    if request.nth % 31 == 0:
        return "lost answer"
    return "503" if request.nth % 17 == 0 else None


@pytest.mark.slow
@pytest.mark.fault
def test_killed_and_resumed_in_a_bucket_that_fails_now_and_then_it_ends_as_on_local_disk(
    undisturbed, fake, tmp_path
):
    fake.faults = now_and_then
    *killed, ended = starts(
        *(
            {"signal": "SIGKILL", "phase": phase, "update": update}
            for phase, update in KILLS.items()
        ),
        {},
    )
    assert [ended.status for ended in killed] == [-signal.SIGKILL] * 3, killed
    assert ended.status == 0, ended.messages
    output = ended.output
    # What was done is not done again.
    assert "warm-up: learning" not in output
    assert "round 1: sampling" not in output
    run = fetched(fake, tmp_path / "run")
    assert outcome(run) == undisturbed.outcome
    assert [line.split()[:5] for line in closing(output).splitlines()[:7]] == [
        line.split()[:5] for line in closing(undisturbed.output).splitlines()[:7]
    ]
    lines = json_lines(run / "metrics.jsonl")
    costs = [line for line in lines if line["phase"].endswith("/store")]
    assert sum(line["repeated_requests"] for line in costs) > 0
    assert len(costs) == 4
    assert all(line["write_bytes"] > 1000 and line["write_seconds"] > 0 for line in costs)
    assert not [name for name in fake.names("bucket") if ".part-" in name]

    before = {name: stored.content for (_, name), stored in fake.objects.items()}
    (repeated,) = starts({})
    assert closing(repeated.output) == closing(output)
    assert {name: stored.content for (_, name), stored in fake.objects.items()} == before, (
        "a finished run changes nothing"
    )

    finished([*EVAL, "--checkpoint", ADDRESS])
    result = json.loads(fake.content("bucket", "runs/smoke/eval/tiny_world-graph-dev.json"))
    own = json.loads(fake.content("bucket", "runs/smoke/eval/round-2.json"))
    assert result["policy"] == 2
    assert result["checkpoint"] == f"{ADDRESS}/policies/000002/model"
    predicted = len(
        fake.content(
            "bucket", "runs/smoke/eval/tiny_world-graph-dev.predictions.jsonl"
        ).splitlines()
    )
    assert predicted == own["greedy"]["questions"] == result["greedy"]["questions"] == 12


@pytest.mark.slow
def test_damaged_shards_in_a_bucket_are_named_set_aside_and_sampled_again(
    undisturbed, fake, tmp_path
):
    for file in undisturbed.directory.rglob("*"):
        if file.is_file():
            fake.put(
                "bucket", f"runs/smoke/{file.relative_to(undisturbed.directory)}", file.read_bytes()
            )
    truncated, missing = list(undisturbed.outcome["shards"])[-2:]
    fake.put(
        "bucket",
        f"runs/smoke/{truncated}",
        fake.content("bucket", f"runs/smoke/{truncated}")[:-100],
    )
    del fake.objects["bucket", f"runs/smoke/{missing}"]
    (ended,) = starts({})
    assert ended.status == 0, ended.messages
    run = fetched(fake, tmp_path / "run")
    for name in (truncated, missing):
        assert f"{name} is damaged and will be sampled again" in ended.output
        reasons = [json.loads(file.read_text()) for file in run.glob("quarantine/*/reason.json")]
        assert [reason["shard"] for reason in reasons].count(name) == 1
    assert outcome(run) == undisturbed.outcome
