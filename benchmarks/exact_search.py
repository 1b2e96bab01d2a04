"""Exact search over random embeddings in the memory of the devices that are here; prints one JSON
line.

    python benchmarks/exact_search.py [--rows 10000000 --dimension 1024 --queries 256 --k 10]

The roof is the time in which the devices' memory can be read once: every call reads all embeddings,
whatever the number of queries. It is measured beside the search, as a sum over a large array.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mujica_jax.retrieval.text.exact import ExactSearch
from mujica_jax.retrieval.text.vectors import Embeddings
from mujica_jax.runtime.chips import fastest_seconds

DRAWN_ROWS = 65_536  # repeated: what the rows hold does not matter here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (("rows", 10_000_000), ("dimension", 1024), ("queries", 256), ("k", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    draw = np.random.default_rng(0)
    drawn = draw.standard_normal((min(DRAWN_ROWS, given.rows), given.dimension), np.float32).astype(
        ml_dtypes.bfloat16
    )
    vectors = np.resize(drawn, (given.rows, given.dimension))
    queries = draw.standard_normal((given.queries, given.dimension), np.float32)
    began = time.perf_counter()
    index = ExactSearch(Embeddings(vectors))
    index.search(queries[:1], given.k)
    loaded = time.perf_counter() - began
    together = fastest_seconds(lambda: index.search(queries, given.k), spend_seconds=5.0)
    single = fastest_seconds(lambda: index.search(queries[:1], given.k), spend_seconds=5.0)
    long, total = jnp.ones(64 << 20), jax.jit(jnp.sum)
    bandwidth = (
        long.nbytes / fastest_seconds(lambda: total(long).block_until_ready()) * index.mesh.size
    )
    roof = vectors.nbytes / bandwidth
    result = {
        "rows": given.rows,
        "dimension": given.dimension,
        "load_seconds": round(loaded, 1),
        "queries_per_second": round(given.queries / together, 1),
        "one_query_milliseconds": round(1e3 * single, 2),
        "memory_gigabytes_per_second": round(bandwidth / 1e9, 1),
        "share_of_roof_one_query": round(roof / single, 3),
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
