"""Start whole runs, and compare what they leave behind.

Scores of a model this small are zeros, so outcomes are compared by what was sampled and learnt too:
content checksums of all shards and evaluations, and checksums of all policy files.
"""

import dataclasses
import fcntl
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from mujica_jax.trajectories import shards
from tests.helpers.fake_bucket import FakeBucket
from tests.helpers.paths import HELPERS, ROOT
from tests.helpers.patience import HANG_SECONDS

CONFIG = HELPERS / "smoke_config.py"
TWO_WIKI_CONFIG = HELPERS / "smoke_two_wiki_config.py"
TRAIN = [sys.executable, "-m", "mujica_jax.train", str(CONFIG)]
EVAL = [sys.executable, "-m", "mujica_jax.eval"]
DISTURBED = [sys.executable, "-m", "tests.helpers.disturbed_train"]
# One cache for all of them, kept between test runs, and programs as users compile them: compiling
# takes longer than everything else.
ENVIRONMENT = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    **{
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")
    },
}
ADDRESS = "gs://bucket/runs/smoke"  # of a run in a bucket of `fake_bucket`
SECONDS = HANG_SECONDS
PORT_LOCKS: list[IO[str]] = []


def free_port() -> int:
    """Return a port that no other test gets while this process lives.

    It lies below the ports that a system gives to connections, because it may be used minutes
    later.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        lock = open(Path(tempfile.gettempdir()) / f"mujica_jax-test-port-{port}", "w")  # noqa: SIM115 - it stays open
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as tried:
                tried.bind(("localhost", port))
        except OSError:
            lock.close()
            continue
        PORT_LOCKS.append(lock)
        return port


def start(command: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS
    )


def finished(command: list[str], cwd: Path = ROOT) -> str:
    """Run a program that must succeed. Return what it printed."""
    ended = start(command, cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@dataclasses.dataclass(frozen=True)
class Ended:
    """The outcome of one start of `disturbed_train.py`."""

    status: int  # the exit status, or minus the signal
    output: str
    messages: str
    # by a clock that stands still while other programs have the machine
    cpu_seconds_after_signal: float | None


def disturbed(
    directory: Path | str, *starts: dict[str, Any], preexec_fn: Callable[[], None] | None = None
) -> list[Ended]:
    """Run the starts one after the other, with `--run directory`.

    `disturbed_train.py` lists what a start may hold. `preexec_fn` is called in the process before
    it starts them.
    """
    words = [str(CONFIG), "--run", str(directory)]
    command = [*DISTURBED, json.dumps([{"words": words, **start} for start in starts])]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=SECONDS * len(starts),
        preexec_fn=preexec_fn,
    )
    assert ended.returncode == 0, ended.stderr
    return [Ended(**json.loads(line)) for line in ended.stdout.splitlines()]


def rest(directory: Path | str, **options: Any) -> str:
    """Let the run continue to its end. Return what it printed."""
    (ended,) = disturbed(directory, options)
    assert ended.status == 0, ended.messages
    return ended.output


def closing(output: str) -> str:
    """Return the table at the end of the output, and everything after it."""
    return output[output.index("\nphase ") :]


def json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary(directory: Path) -> dict:
    """Return summary.json without the times of a clock."""
    value = json.loads((directory / "summary.json").read_text())
    del value["seconds"]
    for phase in value["phases"]:
        del phase["seconds"]
    return value


def outcome(directory: Path) -> dict:
    """Return all of a run that must not depend on interruptions."""
    rounds = [json.loads(file.read_text()) for file in sorted(directory.glob("rounds/*/DONE.json"))]
    committed = [
        json.loads(file.read_text()) for file in sorted(directory.glob("policies/*/COMMITTED"))
    ]
    files_of_policies = {}
    for policy in committed:
        checksums = {file["name"]: file["sha256"] for file in policy["files"]}
        files_of_policies[policy["version"]] = checksums
    evaluated = sorted(directory.glob("eval/*.parquet"))
    lines = json_lines(directory / "metrics.jsonl")
    return {
        "summary": summary(directory),
        "shards": {
            entry["name"]: entry["content_sha256"] for done in rounds for entry in done["shards"]
        },
        "thresholds": [done["threshold"] for done in rounds],
        "evaluations": {
            file.name: shards.content_sha256(shards.decode(file.read_bytes(), file.name))
            for file in evaluated
        },
        "policies": files_of_policies,
        # Every line once: nothing is counted twice. Their order is that of the run's starts.
        "metrics": sorted(
            (line["phase"], line["step"], line.get("loss"), line.get("k")) for line in lines
        ),
    }


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    directory: Path
    output: str
    rows: list[list[str]]  # what each update of the learner saw
    outcome: dict


def fetched(fake: FakeBucket, folder: Path) -> Path:
    """Write the run in the bucket to a folder. Return the folder."""
    for name in fake.names("bucket", "runs/smoke/"):
        file = folder / name.removeprefix("runs/smoke/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(fake.content("bucket", name))
    return folder
