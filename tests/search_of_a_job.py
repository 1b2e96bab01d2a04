"""One process of a job whose processes share out the rows of an index; prints JSON. Started by
`test_job_search.py`.

python tests/search_of_a_job.py PORT PROCESSES PROCESS"""

import json
import sys
from multiprocessing.connection import Client

import jax
import numpy as np

from mujica_jax.config.schema import DistributedConfig
from mujica_jax.errors import UserError
from mujica_jax.retrieval.text import exact
from mujica_jax.retrieval.text.dense import best_rows
from mujica_jax.retrieval.text.job_search import JobSearch
from mujica_jax.retrieval.text.vectors import compressed
from mujica_jax.runtime import distributed


def stranger(address: tuple[str, int]) -> str:
    try:
        Client(address, authkey=b"another secret").close()
    except Exception as error:
        return type(error).__name__
    return "let in"


def main(port: str, processes: str, process: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    joining = DistributedConfig(
        coordinator=f"localhost:{port}", processes=int(processes), process=int(process)
    )
    distributed.start(joining, on_preemption=lambda signal: None)
    exact.BLOCK_ROWS = 128
    draw = np.random.default_rng(1)
    vectors = draw.normal(size=(2003, 24)).astype(np.float32)
    vectors[1500] = vectors[3]  # the same score in two shares
    queries = np.random.default_rng(10 + int(process)).normal(size=(6, 24)).astype(np.float32)
    queries[0] = vectors[3]
    largest = 0.0
    for storage in ("bfloat16", "int8"):
        embeddings = compressed(vectors, storage)
        search = JobSearch(embeddings)
        for k in (9, 1200):  # more than a share has
            # each in its own time: the others need not search
            for number in range(1 + 2 * int(process)):
                scores, positions = search.search(queries[number:], k)
                expected, _ = best_rows(queries[number:], embeddings.float32(), k)
                there = np.take_along_axis(
                    queries[number:] @ embeddings.float32().T, positions, axis=1
                )
                assert all(len(set(of)) == k for of in positions.tolist())
                largest = max(
                    largest, np.abs(scores - expected).max(), np.abs(scores - there).max()
                )
                if number == 0:
                    assert positions[0, :2].tolist() == [3, 1500], (
                        "of equal scores the first row wins"
                    )
    first = next(iter(search._others.values()))[0]
    said = {
        "rows_here": search._own.rows,
        "largest_difference": float(largest),
        "stranger": stranger(first),
    }
    distributed.barrier("all have searched")
    try:
        JobSearch(compressed(vectors[:1], "bfloat16"))
    except UserError as error:
        said["too_few"] = str(error)
    print(json.dumps(said), flush=True)
    distributed.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
