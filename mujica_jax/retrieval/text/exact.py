"""Maximum-inner-product search on JAX devices. Every embedding is scored.

The embeddings are split over the devices by rows. Each device scores its rows in blocks and keeps
the k best. Then the best rows of all devices are merged.

By default the result is that of a stable sort of all scores: rows with equal scores are in corpus
order. With a recall target, the k best of each block come from `jax.lax.approx_max_k` (Chern et
al., 2022). TPUs compute this approximately, without a sort. Other platforms compute it exactly.
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

# Name of the only axis of the mesh.
ROWS = "rows"
# Number of rows that a device scores at once. With 256 queries, their scores take 16 MiB.
BLOCK_ROWS = 16_384
# The largest number of queries in one call of the compiled program. The number of queries and k are
# rounded up to powers of two, so that few programs are compiled.
MAX_QUERIES = 256
# The number of rows in a block is a multiple of this, the lane width of a TPU.
LANES = 128


class ExactSearch:
    """A search over embeddings in the memory of JAX devices."""

    def __init__(
        self, embeddings: Embeddings, mesh: Mesh | None = None, recall_target: float | None = None
    ) -> None:
        """Put the embeddings on the devices of `mesh`, whose only axis is `rows`.

        Without a mesh, all devices of this process are used. With a recall target (below 1), the
        search may be approximate.
        """
        self.mesh = rows_mesh() if mesh is None else mesh
        self.rows = len(embeddings)
        self._recall_target = recall_target
        self._block_rows, self._padded_rows = layout(self.rows, self.mesh.size)
        self._vectors = self._place(embeddings.vectors)
        self._scales = None if embeddings.scales is None else self._place(embeddings.scales)

    def _place(self, values: np.ndarray) -> Array:
        """Copy rows from disk to the devices, one device at a time, padded with zeros."""

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
        """Return the scores and positions of the k best rows of each query, best first.

        `k` must not exceed the number of rows.
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
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def rows_mesh(devices: Any = None) -> Mesh:
    """Return a mesh with the single axis `rows`, by default over all devices of this process.

    In a job of several processes, each process searches on its own devices.
    """
    if devices is None:
        devices = jax.local_devices()
    return jax.make_mesh((len(devices),), (ROWS,), devices=devices, axis_types=(AxisType.Auto,))


def free_device_bytes() -> int | None:
    """Return the free memory of one device of this process, in bytes.

    Return None if the device does not report it, as CPUs.
    """
    statistics = jax.local_devices()[0].memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics["bytes_in_use"]


def device_bytes(rows: int, row_bytes: int, devices: int) -> int:
    """Return the bytes that rows of `row_bytes` each take on each device, with padding."""
    return layout(rows, devices)[1] // devices * row_bytes


def layout(rows: int, devices: int) -> tuple[int, int]:
    """Return the number of rows in a block, and the number of all rows with padding.

    With the padding, every device has the same number of blocks.
    """
    rows_per_device = -(-rows // devices)
    block_rows = min(BLOCK_ROWS, -(-rows_per_device // LANES) * LANES)
    blocks_per_device = -(-rows_per_device // block_rows)
    return block_rows, devices * block_rows * blocks_per_device


@functools.cache
def search_program(
    mesh: Mesh, block_rows: int, k: int, recall_target: float | None
) -> Callable[..., Any]:
    """Return the jitted search for the k best rows. It is compiled once for each shape of queries.

    Its arguments are the vectors [rows, dimension], their scales [rows] or None, the queries
    [queries, dimension], and the number of rows without padding. It returns scores and positions,
    both [queries, k].
    """
    return jax.jit(_Program(mesh, block_rows, k=k, recall_target=recall_target).search)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The search for the k best rows: in blocks on each device, then over all devices."""

    mesh: Mesh
    block_rows: int
    k: int
    # None searches exactly.
    recall_target: float | None

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

        # Gather the best rows of every device, and merge them.
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
            """Merge the best rows of one block into the best so far."""
            start = block * self.block_rows
            rows = jax.lax.dynamic_slice_in_dim(vectors, start, self.block_rows)
            scores = self._scores(queries, rows.astype(jnp.float32))
            if scales is not None:
                scores = scores * jax.lax.dynamic_slice_in_dim(scales, start, self.block_rows)

            # Padding rows get the score -inf, so that they are never among the best.
            positions = first_row + start + jnp.arange(self.block_rows, dtype=jnp.int32)
            scores = jnp.where(positions < count, scores, -jnp.inf)

            # Append the block to the best of earlier blocks. For equal scores, top_k takes the
            # first one, which has the lower position.
            block_scores, places = self._best_of_block(scores)
            all_scores = jnp.concatenate([best[0], block_scores], axis=1)
            all_positions = jnp.concatenate([best[1], positions[places]], axis=1)
            return _best_of(all_scores, all_positions, k=self.k), None

        shape = (queries.shape[0], self.k)
        no_rows = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32))
        # The scan's carry differs between devices, so its start must be marked as varying too.
        no_rows = jax.lax.pcast(no_rows, (ROWS,), to="varying")
        best, _ = jax.lax.scan(add_block, no_rows, jnp.arange(device_rows // self.block_rows))
        return best

    def _scores(self, queries: Array, rows: Array) -> Array:
        """Return the inner products, [queries, rows].

        Exact search multiplies in float32, in which bfloat16 values and int8 integers are exact.
        Approximate search may also round the queries.
        """
        is_exact = self.recall_target is None
        precision = jax.lax.Precision.HIGHEST if is_exact else jax.lax.Precision.DEFAULT
        return jnp.matmul(queries, rows.T, precision=precision)

    def _best_of_block(self, scores: Array) -> tuple[Array, Array]:
        """Return the best scores of a block and their places in the block.

        Both are [queries, k], or [queries, block_rows] if the block has fewer than k rows.
        """
        block_k = min(self.k, self.block_rows)
        if self.recall_target is None:
            return jax.lax.top_k(scores, block_k)
        return jax.lax.approx_max_k(scores, block_k, recall_target=self.recall_target)


def _best_of(scores: Array, positions: Array, k: int) -> tuple[Array, Array]:
    """Return the k best scores of each query and their positions, both [queries, k]."""
    best_scores, places = jax.lax.top_k(scores, k)
    return best_scores, jnp.take_along_axis(positions, places, axis=1)
