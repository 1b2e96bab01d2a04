"""A run directory on a server that somebody else wrote: gcp-storage-emulator. It knows no
preconditions, so nothing here races.

Nor does it say the generation of what is downloaded, as Cloud Storage does and TensorStore asks for
before it changes an object.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server

from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS

PROGRAM = """
import json, sys
from pathlib import Path

import jax
import jax.numpy as jnp
from tests.trajectories.test_store import trajectory, write_weights

from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.report.metrics_log import MetricsLog
from mujica_jax.trajectories.store import open_run, shard_name

store = open_run(sys.argv[1], {"seed": 0})
rows = [trajectory(number) for number in range(3)]
entry = store.write_shard(1, 0, rows)
assert store.write_shard(1, 1, rows[:1]) == store.find_shard(1, 1)
assert store.read_shard(entry) == rows
store.create(shard_name(1, 2), b"rubbish")
reason = store.quarantine(shard_name(1, 2), "it is rubbish")
assert json.loads(reason.read_text())["reason"] == "it is rubbish" and store.find_shard(1, 2) is None
store.write_done(1, [entry], mean_reward=0.5, threshold=None)
assert store.shards(policy_version=2) == [entry]

def write(folder):
    write_weights(folder)
    (folder / "large").write_bytes(bytes(range(256)) * 40_000)

assert store.commit_policy(1, write) and not store.commit_policy(1, write)
assert (store.policy_path(1) / "large").stat().st_size == 256 * 40_000
with MetricsLog(store.root) as metrics:
    for step in range(3):
        metrics.write("learn", step, {"loss": 0.5})
        metrics.flush()
state = {"x": jnp.arange(5.0), "n": jnp.int32(7)}
checkpoints = Checkpoints(store.root / "learning" / "warm-up", keep=1)
with checkpoints:
    checkpoints.save({"x": jnp.zeros(5), "n": jnp.int32(0)}, {"step": 1})
    checkpoints.save(state, {"step": 2})
restored, loop_state = Checkpoints(store.root / "learning" / "warm-up", keep=1).restore_latest(state)
assert loop_state == {"step": 2} and jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, restored))
print(json.dumps({
    "names": [name for name in store.names("") if "arrays/" not in name and "events" not in name],
    "steps": [json.loads(line)["step"] for line in (store.root / "metrics.jsonl").read_text().splitlines()],
}))
"""


@pytest.fixture
def address(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr(objects, "download", functools.partial(_with_generation, objects.download))
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    # Nothing public says which port it was given.
    thread = server._api
    assert thread._httpd is not None
    yield f"http://127.0.0.1:{thread._httpd.server_port}"
    server.stop()


def _with_generation(download, request, response, storage, *others) -> None:
    with contextlib.suppress(NotFound):
        stored = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["X-Goog-Generation"] = stored["generation"]
    download(request, response, storage, *others)


def test_everything_a_run_writes_comes_back(address, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "gs://bucket/run"],
        cwd=ROOT,
        env=os.environ
        | {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}
        | {
            "XDG_CACHE_HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["steps"] == [0, 1, 2]
    assert "rounds/0001/shard-00000.parquet" in reported["names"]
    assert {
        "config.json",
        "metrics.jsonl",
        "policies/000001/COMMITTED",
        "learning/warm-up/000002/COMMITTED",
    } <= set(reported["names"])
