"""From nothing to a trained policy and back, by the scripts as a user calls them: the machines are
folders here, ssh runs a shell, and the slice is lost in the middle.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_bucket import serving
from tests.helpers.launch.gcloud import end_units
from tests.helpers.whole_runs import ENVIRONMENT, SECONDS, finished, free_port, summary
from tests.launch.test_launch import LAUNCH, Cloud

# Sums over two devices do not depend on who adds them: a job of two processes has one process's
# numbers.
WORDS = """configs/tiny_world.py --trainer.fsdp 2 --trainer.batch-size 8 --task.demonstrations 200
    --task.train-questions 64 --pretraining.steps 10 --pretraining.documents 200 --warmup.steps 120 --method.rounds 1
    --sampling.questions-per-round 8 --sampling.questions-per-shard 4 --method.max-attempts 1
    --method.keep-per-question 1 --eval.questions 8""".split()


@contextlib.contextmanager
def machines(tmp_path: Path) -> Iterator[Cloud]:
    """A cloud whose workers are folders here, with a bucket behind an address of its own."""
    with serving() as bucket:
        cloud_of_folders = Cloud(tmp_path / "cloud")
        cloud_of_folders.environment = (
            ENVIRONMENT
            | bucket.environment
            | {
                **{
                    name: cloud_of_folders.environment[name]
                    for name in ("PATH", "STUB_CLOUD", "STUB_PYTHON")
                },
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "JAX_NUM_CPU_DEVICES": "1",
                "STUB_PORT": str(free_port()),
            }
        )
        cloud_of_folders.bucket = bucket
        yield cloud_of_folders
        for home in cloud_of_folders.folder.glob("worker-*"):
            end_units(home)


@pytest.fixture
def cloud(tmp_path):
    with machines(tmp_path) as cloud_of_folders:
        cloud_of_folders.set(PLATFORM="cpu", EXTRAS="", POLL_SECONDS="1")
        (cloud_of_folders.folder / "workers").write_text("2")
        yield cloud_of_folders


@pytest.mark.slow
def test_a_pod_from_nothing_through_a_preemption_and_back(cloud, tmp_path, monkeypatch):
    assert "mujica: ACTIVE" in cloud.done("create.sh")
    assert "1 x cpu" in cloud.done("setup.sh")
    assert "this checkout is installed on all workers" in cloud.done("setup.sh")
    with (tmp_path / "output").open("w") as output:
        train = subprocess.Popen(
            [str(LAUNCH / "train.sh"), "--env", str(cloud.folder / "env"), *WORDS],
            env=cloud.environment,
            stderr=output,
            start_new_session=True,
        )
        until = time.monotonic() + SECONDS
        while not any(
            "learning/warm-up" in name for name in cloud.bucket.names("my-bucket", "runs/first/")
        ):
            assert train.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < until, (tmp_path / "output").read_text()
            time.sleep(0.2)
        assert "run         first: 2x running" in cloud.done("status.sh")
        cloud.states("SUSPENDED")
        for home in cloud.folder.glob("worker-*"):
            end_units(home)
        assert train.wait(timeout=SECONDS) == 0, (tmp_path / "output").read_text()
    messages = (tmp_path / "output").read_text()
    assert "mujica was preempted (preemption 1 of at most 50)" in messages
    assert "failed" not in messages
    assert "policy      policies/000001" in cloud.done("status.sh")
    assert "continue with" not in cloud.done("logs.sh", "--worker", "0", "--lines", "1")
    assert "greedy" in cloud.done("eval.sh", "--eval.questions", "4")
    assert any("eval-launch/" in name for name in cloud.bucket.names("my-bucket", "runs/first/"))
    cloud.done("delete.sh", "--yes")
    assert "there is no mujica" in cloud.done("delete.sh")

    monkeypatch.setitem(ENVIRONMENT, "JAX_NUM_CPU_DEVICES", "2")
    finished([sys.executable, "-m", "mujica_jax.train", *WORDS, "--run", str(tmp_path / "alone")])
    remote_summary = json.loads(cloud.bucket.content("my-bucket", "runs/first/summary.json"))
    (tmp_path / "summary.json").write_text(json.dumps(remote_summary))
    assert summary(tmp_path) == summary(tmp_path / "alone")
