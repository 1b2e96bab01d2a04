"""Time the list of trajectories of the viewer, over a generated run.

    python benchmarks/viewer.py [--rows 100000] [--tokens 400] [--run DIR]

The run is written by the package's own writer, in shards of 1,000 trajectories with four attempts
at each question. Then a client sends each request to the application several times. The first
request reads and checks all shards; the later ones find the columns in memory. The script prints
one JSON line for each kind of request: the seconds of the first, and the median and the slowest of
the repeats.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx

from mujica_jax.records import Conversation, Search, StopReason, Trajectory, Turn
from mujica_jax.retrieval.service import address_of, make_server, open_port
from mujica_jax.trajectories.store import open_run
from mujica_jax.web.app import create_app

ROWS_PER_SHARD = 1000
ATTEMPTS = 4
KINDS = ("compositional", "comparison", "bridge_comparison", "inference")
REQUESTS = {
    "first page": "",
    "reward range": "reward_min=0.4&reward_max=0.8",
    "stop reason": "stop_reason=no_action",
    "question kind": "kind=comparison",
    "kept": "kept=true",
    "searches": "searches_min=2&searches_max=3",
    "text in question or answer": "text=film+number+1234",
    "sorted by reward": "sort=reward&descending=true",
    "sorted by question, page 1,000": "sort=question&offset=50000",
    "all filters at once": (
        "kept=false&reward_min=0.1&stop_reason=answered&kind=inference&searches_min=1&text=film"
        "&sort=seconds"
    ),
}


def trajectory(number: int, tokens: int, rng: random.Random) -> Trajectory:
    """Return a trajectory with two searches of three passages, and about this many tokens."""
    context = Turn(
        role="context", token_ids=tuple(rng.choices(range(50_000), k=tokens // 4)), text="context"
    )
    sampled = rng.choices(range(50_000), k=tokens // 4)
    model = Turn(
        role="model",
        token_ids=tuple(sampled),
        text="<search> a sub-question </search>",
        logprobs=tuple(-rng.random() for _ in sampled),
        trained=True,
    )
    conversation = Conversation(role="planner", turns=(context, model))
    worker = Conversation(role="worker", turns=(context, model))
    search = Search(
        iteration=0,
        query=f"Who directed film number {number}?",
        materials=tuple(f"Passage {rng.random()} " + "with some words " * 20 for _ in range(3)),
        selected=(0,),
        sentence="A sentence.",
        found=True,
    )
    is_answered = rng.random() < 0.9
    return Trajectory(
        question_id=f"question-{number // ATTEMPTS:06d}",
        attempt=number % ATTEMPTS,
        policy_version=0,
        seed=number,
        conversations=(conversation, worker),
        answer=f"answer {rng.randrange(10_000)}" if is_answered else "",
        reward=round(rng.random(), 3) if is_answered else 0.0,
        rewards_by_part={"f1": 0.5},
        counts={"malformed_workers": 0.0},
        stop_reason=StopReason.ANSWERED if is_answered else StopReason.NO_ACTION,
        searches=(search,) * rng.randrange(5),
        seconds=rng.random() * 10,
    )


def write_run(directory: Path, rows: int, tokens: int) -> None:
    """Write a run with one finished round."""
    rng = random.Random(0)
    store = open_run(directory, {"name": "generated", "run": None})
    entries = []
    kept = []
    for start in range(0, rows, ROWS_PER_SHARD):
        numbers = range(start, min(start + ROWS_PER_SHARD, rows))
        trajectories = [trajectory(number, tokens, rng) for number in numbers]
        entries.append(store.write_shard(1, start // ROWS_PER_SHARD, trajectories))
        kept += [[t.question_id, t.attempt] for t in trajectories if t.reward > 0.7]
    lines = []
    for number in range(-(-rows // ATTEMPTS)):
        question = {
            "id": f"question-{number:06d}",
            "kind": KINDS[number % len(KINDS)],
            "question": f"Who directed film number {number}, and where was that person born?",
            "answers": ["answer 1"],
            "gold_passages": [{"title": "A title", "text": "words " * 60, "by_title": False}],
        }
        lines.append(json.dumps(question) + "\n")
    store.create("rounds/0001/questions.jsonl", "".join(lines).encode())
    store.write_json_once("rounds/0001/kept.json", {"kept": kept})
    store.write_done(1, entries, mean_reward=0.5, threshold=0.7)


def time_requests(directory: Path, repeats: int) -> None:
    """Print the seconds of each kind of request to a server of this run."""
    app = create_app([str(directory)])
    server_socket = open_port("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with httpx.Client(base_url=address_of(server_socket), timeout=600) as client:
        for name, query in REQUESTS.items():
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                path = f"/api/runs/{directory.name}/trajectories?{query}"
                answer = client.get(path).raise_for_status().json()
                seconds.append(time.perf_counter() - start)
            result = {
                "request": name,
                "rows": answer["all"],
                "matching": answer["matching"],
                "first_seconds": round(seconds[0], 3),
                "median_seconds": round(statistics.median(seconds[1:]), 3),
                "slowest_repeat_seconds": round(max(seconds[1:]), 3),
            }
            print(json.dumps(result), flush=True)
    server.should_exit = True
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="trajectories (default: 100000)")
    parser.add_argument(
        "--tokens", type=int, default=400, help="tokens of a trajectory (default: 400)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="requests of each kind (default: 5)")
    parser.add_argument(
        "--run", metavar="DIR", help="keep the generated run here, or use the one that is here"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(options.run or f"{temporary}/generated")
        if not (directory / "config.json").exists():
            start = time.perf_counter()
            write_run(directory, options.rows, options.tokens)
            shard_bytes = sum(file.stat().st_size for file in directory.rglob("*.parquet"))
            written = {
                "written_seconds": round(time.perf_counter() - start, 1),
                "shard_megabytes": round(shard_bytes / 1e6, 1),
            }
            print(json.dumps(written), flush=True)
        time_requests(directory, options.repeats)


if __name__ == "__main__":
    main()
