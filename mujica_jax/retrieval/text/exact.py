"""Maximum-inner-product search on the devices of JAX: embeddings split over them by rows, every row
looked at.

Each device scores its rows block by block and keeps the k best; the best of all devices are merged.
`exact` finds what sorting all scores finds, ties in the order of the corpus; with a recall target
the k best of a block come from `jax.lax.approx_max_k` (Chern et al., 2022), which TPUs compute
without a sort and other platforms exactly.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from mujica_jax.retrieval.text.embeddings import Embeddings

ROWS = "rows"  # the one axis of the mesh
BLOCK_ROWS = 16_384  # scored at once: with 256 queries the scores take 16 MiB
# in one call of the program; their number and k are rounded up to a power of two, so that few
# programs are compiled
MAX_QUERIES = 256
LANES = 128


class ExactSearch:
    """Embeddings in the memory of some devices."""

    def __init__(
        self, embeddings: Embeddings, mesh: Mesh | None = None, recall_target: float | None = None
    ) -> None:
        """On all devices of this process unless a mesh with the one axis `rows` is given; a recall
        target allows approximate search.
        """
        self.mesh = rows_mesh() if mesh is None else mesh
        self.rows, self._recall_target = len(embeddings), recall_target
        self._block_rows, padded = layout(self.rows, self.mesh.size)
        split = NamedSharding(self.mesh, PartitionSpec(ROWS))

        def placed(values: np.ndarray) -> Array:
            """Copied from the disk to the devices part by part."""

            def part(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(padded)
                found = np.asarray(values[start : min(stop, self.rows)])
                missing = stop - start - len(found)
                return (
                    np.pad(found, [(0, missing), *[(0, 0)] * (found.ndim - 1)])
                    if missing
                    else found
                )

            return jax.make_array_from_callback((padded, *values.shape[1:]), split, part)

        self._vectors = placed(embeddings.vectors)
        self._scales = None if embeddings.scales is None else placed(embeddings.scales)

    def search(
        self, queries: Float[np.ndarray, "queries dimension"], k: int
    ) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
        """Scores and positions of the k best rows, best first. `k` is at most the number of
        rows."""
        assert 1 <= k <= self.rows, f"k is {k} of {self.rows} rows"
        scores, positions = (
            np.zeros((len(queries), k), np.float32),
            np.zeros((len(queries), k), np.int32),
        )
        program = search_program(
            self.mesh, self._block_rows, min(_power_of_two(k), self.rows), self._recall_target
        )
        for start in range(0, len(queries), MAX_QUERIES):
            part = queries[start : start + MAX_QUERIES]
            padded = np.zeros((_power_of_two(len(part)), queries.shape[1]), np.float32)
            padded[: len(part)] = part
            found = program(self._vectors, self._scales, padded, self.rows)
            scores[start : start + len(part)], positions[start : start + len(part)] = (
                np.asarray(of)[: len(part), :k] for of in found
            )
        return scores, positions


def _power_of_two(number: int) -> int:
    """The next one: few sizes are few programs."""
    return 1 << (number - 1).bit_length()


def rows_mesh(devices: Any = None) -> Mesh:
    devices = (
        jax.local_devices() if devices is None else devices
    )  # each process of a job searches for itself
    return jax.make_mesh((len(devices),), (ROWS,), devices=devices, axis_types=(AxisType.Auto,))


def layout(rows: int, devices: int) -> tuple[int, int]:
    """Rows of a block, and rows in all with padding: every device has as many blocks of equal
    size."""
    of_device = -(-rows // devices)
    block = min(BLOCK_ROWS, -(-of_device // LANES) * LANES)
    return block, devices * block * -(-of_device // block)


@functools.cache
def search_program(
    mesh: Mesh, block_rows: int, k: int, recall_target: float | None
) -> Callable[..., Any]:
    """jit of (vectors [rows, dimension], scales [rows] or None, queries [queries, dimension], rows
    that count) -> scores, positions.
    """
    # Products of float32: a bfloat16 vector is exact in it, and so is an integer. Approximate
    # search may round queries too.
    precision = jax.lax.Precision.HIGHEST if recall_target is None else jax.lax.Precision.DEFAULT

    def best_of(scores: Array, positions: Array, count: int) -> tuple[Array, Array]:
        found, places = jax.lax.top_k(scores, count)
        return found, jnp.take_along_axis(positions, places, axis=1)

    def on_device(
        vectors: Array, scales: Array | None, queries: Array, count: Array
    ) -> tuple[Array, Array]:
        of_device = vectors.shape[0]
        first = jax.lax.axis_index(ROWS) * of_device

        def scored(block: Array) -> tuple[Array, Array]:
            """[queries, at most k] of one block."""
            start = block * block_rows
            rows = jax.lax.dynamic_slice_in_dim(vectors, start, block_rows).astype(jnp.float32)
            scores = jnp.matmul(queries, rows.T, precision=precision)
            if scales is not None:
                scores = scores * jax.lax.dynamic_slice_in_dim(scales, start, block_rows)
            positions = first + start + jnp.arange(block_rows, dtype=jnp.int32)
            scores = jnp.where(positions < count, scores, -jnp.inf)
            if recall_target is None:
                found, places = jax.lax.top_k(scores, min(k, block_rows))
            else:
                found, places = jax.lax.approx_max_k(
                    scores, min(k, block_rows), recall_target=recall_target
                )
            return found, positions[places]

        def step(best: tuple[Array, Array], block: Array) -> tuple[tuple[Array, Array], None]:
            found, positions = scored(
                block
            )  # behind the earlier ones: of equal scores the first position wins
            merged = (
                jnp.concatenate([best[0], found], axis=1),
                jnp.concatenate([best[1], positions], axis=1),
            )
            return best_of(merged[0], merged[1], k), None

        shape = (queries.shape[0], k)
        nothing = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
        nothing = jax.lax.pcast(nothing, (ROWS,), to="varying")  # each device has its own best
        best, _ = jax.lax.scan(step, nothing, jnp.arange(of_device // block_rows))
        return best

    def search(
        vectors: Array,
        scales: Array | None,
        queries: Float[Array, "queries dimension"],
        count: Array,
    ) -> tuple[Float[Array, "queries k"], Int[Array, "queries k"]]:
        split, whole, merged = PartitionSpec(ROWS), PartitionSpec(), PartitionSpec(None, ROWS)
        by_device = jax.shard_map(
            on_device, mesh=mesh, in_specs=(split, split, whole, whole), out_specs=merged
        )
        found = by_device(vectors, scales, queries, count)
        scores, positions = jax.lax.with_sharding_constraint(found, NamedSharding(mesh, whole))
        return best_of(scores, positions, k)

    return jax.jit(search)
