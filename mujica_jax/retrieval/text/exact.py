"""Maximum-inner-product search on the devices of JAX, which scores every row.

The embeddings are split over the devices by rows. Each device scores its rows block by block and
keeps the k best; the best of all devices are merged. `exact` finds what sorting all scores finds,
with equal scores in the order of the corpus. With a recall target the k best of a block come from
`jax.lax.approx_max_k` (Chern et al., 2022), which TPUs compute without a sort and other platforms
exactly.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from mujica_jax.retrieval.text.vectors import Embeddings

ROWS = "rows"  # the one axis of the mesh
BLOCK_ROWS = 16_384  # scored at once: with 256 queries the scores take 16 MiB
# Queries in one call of the program. Their number and k are rounded up to a power of two, so that
# few programs are compiled.
MAX_QUERIES = 256
LANES = 128


class ExactSearch:
    """Embeddings in the memory of some devices."""

    def __init__(
        self, embeddings: Embeddings, mesh: Mesh | None = None, recall_target: float | None = None
    ) -> None:
        """Put the embeddings on the devices of `mesh`, whose one axis is `rows`.

        Without a mesh these are all devices of this process. A recall target allows approximate
        search.
        """
        self.mesh = rows_mesh() if mesh is None else mesh
        self.rows = len(embeddings)
        self._recall_target = recall_target
        self._block_rows, self._padded_rows = layout(self.rows, self.mesh.size)
        self._vectors = self._place(embeddings.vectors)
        self._scales = None if embeddings.scales is None else self._place(embeddings.scales)

    def _place(self, values: np.ndarray) -> Array:
        """Copy rows from the disk to the devices part by part, padded with zeros."""

        def rows_of_device(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self._padded_rows)
            rows = np.asarray(values[start : min(stop, self.rows)])
            missing_rows = stop - start - len(rows)
            if missing_rows == 0:
                return rows
            padding = [(0, missing_rows), *[(0, 0)] * (rows.ndim - 1)]
            return np.pad(rows, padding)

        shape = (self._padded_rows, *values.shape[1:])
        split = NamedSharding(self.mesh, PartitionSpec(ROWS))
        return jax.make_array_from_callback(shape, split, rows_of_device)

    def search(
        self, queries: Float[np.ndarray, "queries dimension"], k: int
    ) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
        """Return the scores and positions of the k best rows, best first.

        `k` is at most the number of rows.
        """
        assert 1 <= k <= self.rows, f"k is {k} of {self.rows} rows"
        scores = np.zeros((len(queries), k), np.float32)
        positions = np.zeros((len(queries), k), np.int32)
        program_k = min(_power_of_two(k), self.rows)
        program = search_program(self.mesh, self._block_rows, program_k, self._recall_target)
        for start in range(0, len(queries), MAX_QUERIES):
            batch = queries[start : start + MAX_QUERIES]
            size = len(batch)
            padded = np.zeros((_power_of_two(size), queries.shape[1]), np.float32)
            padded[:size] = batch
            best_scores, best_positions = program(self._vectors, self._scales, padded, self.rows)
            scores[start : start + size] = np.asarray(best_scores)[:size, :k]
            positions[start : start + size] = np.asarray(best_positions)[:size, :k]
        return scores, positions


def _power_of_two(number: int) -> int:
    """Return the next power of two: few sizes are few programs."""
    return 1 << (number - 1).bit_length()


def rows_mesh(devices: Any = None) -> Mesh:
    """Return a mesh with the one axis `rows`, by default over all devices of this process.

    Each process of a job searches for itself.
    """
    if devices is None:
        devices = jax.local_devices()
    return jax.make_mesh((len(devices),), (ROWS,), devices=devices, axis_types=(AxisType.Auto,))


def free_device_bytes() -> int | None:
    """Return the free memory of a device of this process; None where it does not tell, as CPUs."""
    statistics = jax.local_devices()[0].memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics["bytes_in_use"]


def device_bytes(rows: int, row_bytes: int, devices: int) -> int:
    """Return the bytes that rows of this size take on each of the devices, with padding."""
    return layout(rows, devices)[1] // devices * row_bytes


def layout(rows: int, devices: int) -> tuple[int, int]:
    """Return the rows of a block, and the rows in all with padding.

    Every device has equally many blocks of this size.
    """
    rows_per_device = -(-rows // devices)
    block_rows = min(BLOCK_ROWS, -(-rows_per_device // LANES) * LANES)
    blocks_per_device = -(-rows_per_device // block_rows)
    return block_rows, devices * block_rows * blocks_per_device


@functools.cache
def search_program(
    mesh: Mesh, block_rows: int, k: int, recall_target: float | None
) -> Callable[..., Any]:
    """Return the jitted search for the k best rows, compiled once for each shape of queries.

    It maps (vectors [rows, dimension], scales [rows] or None, queries [queries, dimension], number
    of rows that count) to scores and positions, both [queries, k].
    """
    return jax.jit(_Program(mesh, block_rows, k=k, recall_target=recall_target).search)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The search for the k best rows: block by block on each device, then over all devices."""

    mesh: Mesh
    block_rows: int
    k: int
    recall_target: float | None  # None: exact search

    def search(
        self,
        vectors: Array,
        scales: Array | None,
        queries: Float[Array, "queries dimension"],
        count: Array,
    ) -> tuple[Float[Array, "queries k"], Int[Array, "queries k"]]:
        """Return the k best of the first `count` rows over all devices."""
        by_rows = PartitionSpec(ROWS)
        on_all_devices = PartitionSpec()
        search_devices = jax.shard_map(
            self._search_device,
            mesh=self.mesh,
            in_specs=(by_rows, by_rows, on_all_devices, on_all_devices),
            out_specs=PartitionSpec(None, ROWS),
        )
        best = search_devices(vectors, scales, queries, count)

        # Gather the best of every device, and merge them.
        best = jax.lax.with_sharding_constraint(best, NamedSharding(self.mesh, on_all_devices))
        scores, positions = best
        return _best_of(scores, positions, k=self.k)

    def _search_device(
        self, vectors: Array, scales: Array | None, queries: Array, count: Array
    ) -> tuple[Array, Array]:
        """Return the k best rows of one device, [queries, k]."""
        device_rows = vectors.shape[0]
        first_row = jax.lax.axis_index(ROWS) * device_rows

        def add_block(best: tuple[Array, Array], block: Array) -> tuple[tuple[Array, Array], None]:
            """Merge the best of one block into the best so far."""
            start = block * self.block_rows
            rows = jax.lax.dynamic_slice_in_dim(vectors, start, self.block_rows)
            scores = self._scores(queries, rows.astype(jnp.float32))
            if scales is not None:
                scores = scores * jax.lax.dynamic_slice_in_dim(scales, start, self.block_rows)

            # Padding never wins.
            positions = first_row + start + jnp.arange(self.block_rows, dtype=jnp.int32)
            scores = jnp.where(positions < count, scores, -jnp.inf)

            # A block stands behind the earlier ones: of equal scores the first position wins.
            block_scores, places = self._best_of_block(scores)
            all_scores = jnp.concatenate([best[0], block_scores], axis=1)
            all_positions = jnp.concatenate([best[1], positions[places]], axis=1)
            return _best_of(all_scores, all_positions, k=self.k), None

        shape = (queries.shape[0], self.k)
        no_rows = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32))
        # Each device has its own best.
        no_rows = jax.lax.pcast(no_rows, (ROWS,), to="varying")
        best, _ = jax.lax.scan(add_block, no_rows, jnp.arange(device_rows // self.block_rows))
        return best

    def _scores(self, queries: Array, rows: Array) -> Array:
        """Return the inner products, [queries, rows].

        Products are of float32: a bfloat16 vector is exact in it, and so is an integer. Approximate
        search may round queries too.
        """
        is_exact = self.recall_target is None
        precision = jax.lax.Precision.HIGHEST if is_exact else jax.lax.Precision.DEFAULT
        return jnp.matmul(queries, rows.T, precision=precision)

    def _best_of_block(self, scores: Array) -> tuple[Array, Array]:
        """Return the best scores of a block with their places in it, [queries, at most k]."""
        block_k = min(self.k, self.block_rows)
        if self.recall_target is None:
            return jax.lax.top_k(scores, block_k)
        return jax.lax.approx_max_k(scores, block_k, recall_target=self.recall_target)


def _best_of(scores: Array, positions: Array, k: int) -> tuple[Array, Array]:
    """Return the k best scores of each query with their positions."""
    best_scores, places = jax.lax.top_k(scores, k)
    return best_scores, jnp.take_along_axis(positions, places, axis=1)
