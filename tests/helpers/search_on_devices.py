"""Compare exact and approximate search over eight virtual devices with numpy; print JSON.

Started by `test_exact.py`.
"""

import json

import jax
import numpy as np

from mujica_jax.retrieval.text import exact
from mujica_jax.retrieval.text.dense import best_rows
from mujica_jax.retrieval.text.vectors import compressed


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    exact.BLOCK_ROWS = 128
    draw = np.random.default_rng(1)
    vectors = draw.normal(size=(2003, 24)).astype(np.float32)
    queries = draw.normal(size=(6, 24)).astype(np.float32)
    searches = 0
    differing = 0
    largest = 0.0
    on_each = 0
    for storage in ("bfloat16", "int8"):
        embeddings = compressed(vectors, storage)
        expected_scores, expected = best_rows(queries, embeddings.float32(), 9)
        for recall_target in (None, 0.95):
            search = exact.ExactSearch(embeddings, recall_target=recall_target)
            scores, positions = search.search(queries, 9)
            differing += int((positions != expected).sum())
            largest = max(largest, float(np.abs(scores - expected_scores).max()))
            on_each = search._vectors.addressable_shards[0].data.shape[0]
            searches += 1
    report = {
        "devices": len(jax.devices()),
        "rows_on_each": on_each,
        "searches": searches,
        "differing_positions": differing,
        "largest_difference": largest,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
