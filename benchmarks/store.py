"""Shards and bytes a second of the run directory: local disk beside a bucket.

    python benchmarks/store.py [--shards 40] [--rows 64] [--turn-tokens 300] [--policy-bytes 64000000] \\
        [--bucket gs://BUCKET/PREFIX]

Writes shards of random trajectories (a planner and two workers of three turns each), reads each
back as a run does, with every check, and writes and fetches one policy. Prints one JSON line: what
was measured, then for both places shards and megabytes a second. Writing is `write_shard`: the
Parquet file and its checksums are made anew each time (`encode_shards_per_second` is that part
alone). Without --bucket it is the server of the tests in a process of its own on this machine: the
costs of the client and of one connection, no network. A prefix of a real bucket gets a folder of
its own, which is left there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.records import Conversation, StopReason, Trajectory, Turn
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.store import Store

ROOT = Path(__file__).resolve().parents[1]
SERVER = "tests.helpers.fake_bucket"


def trajectory(draw: np.random.Generator, number: int, turn_tokens: int) -> Trajectory:
    def turn(role: str, trained: bool) -> Turn:
        token_ids = draw.integers(0, 150_000, turn_tokens).tolist()
        text = "".join(map(chr, draw.integers(97, 123, 4 * turn_tokens)))
        logprobs = None
        if trained:
            numbers = -draw.exponential(size=turn_tokens).astype(np.float32)
            logprobs = tuple(numbers.tolist())
        return Turn(
            role=role,  # pyright: ignore[reportArgumentType]
            token_ids=tuple(token_ids),
            text=text,
            logprobs=logprobs,
            trained=trained,
        )

    turns = (turn("context", False), turn("model", True), turn("context", False))
    worker = Conversation(role="worker", turns=turns)
    return Trajectory(
        question_id=f"question {number}",
        attempt=0,
        policy_version=0,
        seed=number,
        conversations=(Conversation(role="planner", turns=turns), worker, worker),
        answer="Ada Crane",
        reward=1.0,
        rewards_by_part={"f1": 1.0},
        stop_reason=StopReason.ANSWERED,
        searches=(),
        seconds=1.0,
    )


def measured(
    store: Store, rows: Sequence[Trajectory], count: int, policy: bytes
) -> dict[str, float]:

    def write_policy(folder: Path) -> None:
        (folder / "weights").write_bytes(policy)

    start_time = time.perf_counter()
    entries = [store.write_shard(1, shard, rows) for shard in range(count)]
    write_seconds = time.perf_counter() - start_time
    start_time = time.perf_counter()
    for entry in entries:
        assert len(store.read_shard(entry)) == len(rows)
    read_seconds = time.perf_counter() - start_time
    start_time = time.perf_counter()
    store.commit_policy(0, write_policy)
    commit_seconds = time.perf_counter() - start_time
    start_time = time.perf_counter()
    store.policy_path(0)
    fetch_seconds = time.perf_counter() - start_time
    size = sum(entry.bytes for entry in entries) / 1e6
    return {
        "write_shards_per_second": round(count / write_seconds, 2),
        "write_megabytes_per_second": round(size / write_seconds, 2),
        "read_shards_per_second": round(count / read_seconds, 2),
        "read_megabytes_per_second": round(size / read_seconds, 2),
        "policy_write_megabytes_per_second": round(len(policy) / 1e6 / commit_seconds, 1),
        "policy_read_megabytes_per_second": round(len(policy) / 1e6 / fetch_seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turn-tokens", type=int, default=300)
    parser.add_argument("--policy-bytes", type=int, default=64_000_000)
    parser.add_argument("--bucket", default=None)
    arguments = parser.parse_args()
    draw = np.random.default_rng(0)
    rows = [trajectory(draw, number, arguments.turn_tokens) for number in range(arguments.rows)]
    policy = draw.bytes(arguments.policy_bytes)
    # The first call imports pyarrow.
    size = len(shards.encode(rows))
    start_time = time.perf_counter()
    shards.encode(rows)
    shards.content_sha256(rows)
    encoding = time.perf_counter() - start_time
    result: dict[str, object] = {
        "shards": arguments.shards,
        "rows_per_shard": arguments.rows,
        "bytes_per_shard": size,
        "policy_bytes": len(policy),
        "encode_shards_per_second": round(1 / encoding, 2),
    }
    with tempfile.TemporaryDirectory() as place:
        # a policy is fetched, whatever is cached on this machine
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        result["disk"] = measured(Store(f"{place}/run"), rows, arguments.shards, policy)
        server = None
        try:
            if arguments.bucket is None:
                server = subprocess.Popen(
                    [sys.executable, "-m", SERVER],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert server.stdout is not None
                os.environ |= json.loads(server.stdout.readline())
            address = arguments.bucket or "gs://bucket"
            store = Store(f"{address}/store-benchmark-{os.urandom(4).hex()}")
            result["bucket"] = measured(store, rows, arguments.shards, policy)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        finally:
            if server is not None:
                # The server ends with its input.
                server.communicate()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
