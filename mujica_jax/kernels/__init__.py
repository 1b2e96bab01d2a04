"""Kernels that are faster than the programs that XLA makes.

The models, the engine and the trainer ask three questions, each with the shapes and types at hand:

- `packed_attention`: attention of packed rows, in training and scoring;
- `paged_attention`: attention of a request over its KV cache, in the engine;
- `product`: a few rows times a matrix, in decoding.

The answer is a function of JAX, or None. None means that XLA is as fast here, and the caller takes
its plain path:

    attend = kernels.paged_attention(head_dim=64, dtype=jnp.float32)
    if attend is None:
        ...  # the same by XLA

Today an x86 CPU has such kernels (`kernels/cpu/`), if numba is installed (the extra `cpu`). Without
numba, and on other CPUs, every answer is None. TPUs and GPUs have their own in JAX, and
`models.attention` and `inference.engine.ragged` call those directly. The answer holds for the
device of the mesh under which the caller is traced, or for JAX's default device.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mujica_jax.kernels.cpu import calls as cpu

__all__ = [
    "PACKED_ATTENTION_RESULTS",
    "PackedAttention",
    "PagedAttention",
    "Product",
    "packed_attention",
    "paged_attention",
    "prefers_output_major",
    "product",
    "rows_per_product",
]

# The name that `jax.checkpoint` knows the results of `packed_attention` by. A policy that keeps
# them spares the backward pass a second forward pass.
PACKED_ATTENTION_RESULTS = cpu.PACKED_ATTENTION_RESULTS


@runtime_checkable
class PackedAttention(Protocol):
    """Causal softmax attention inside the segments of packed rows, computed in float32."""

    def __call__(
        self,
        query: Float[Array, "rows time heads head_dim"],
        key: Float[Array, "rows time kv_heads head_dim"],
        value: Float[Array, "rows time kv_heads head_dim"],
        segment_ids: Int[Array, "rows time"],
    ) -> Float[Array, "rows time heads head_dim"]:
        """Return softmax(query key^T / sqrt(head_dim)) value, in the type of `query`.

        A query sees the keys of its own segment up to itself. Equal ids that lie apart are two
        segments. Padding is a segment like any other. There is a gradient.
        """
        ...


@runtime_checkable
class PagedAttention(Protocol):
    """Softmax attention over a KV cache, computed in float32."""

    def __call__(
        self,
        query: Float[Array, "requests time heads head_dim"],
        keys: Float[Array, "cache_rows kv_heads head_dim width"],
        values: Float[Array, "cache_rows kv_heads width head_dim"],
        prefix_keys: Float[Array, "prefixes kv_heads head_dim length"],
        prefix_values: Float[Array, "prefixes kv_heads length head_dim"],
        row_table: Int[Array, "requests 4"],
    ) -> Float[Array, "requests time heads head_dim"]:
        """Return the attention of each request over a shared prefix and a row of the cache.

        `row_table` has four numbers for each request: its cache row; how many tokens of that row
        its first query sees (each further query sees one more); its prefix; how many tokens of the
        prefix it sees. A request that sees 0 tokens of its row gets 0. There is no gradient.
        """
        ...


@runtime_checkable
class Product(Protocol):
    """The product of rows with one or more matrices that are stored output by output."""

    def __call__(
        self, rows: Float[Array, "rows inputs"], *matrices: Float[Array, "_ inputs"]
    ) -> Sequence[Float[Array, "rows _"]]:
        """Return rows @ matrix.T in float32 for each matrix. There is a gradient."""
        ...


def packed_attention(*, platform: str | None = None) -> PackedAttention | None:
    """Return the kernel for packed rows on this platform (None: the caller's).

    It takes any shape and type. Under a mesh call it on each device's own rows.
    """
    if (platform or _platform()) != "cpu" or not cpu.is_available():
        return None
    return cpu.packed_attention


def paged_attention(*, head_dim: int, dtype: DTypeLike) -> PagedAttention | None:
    """Return the kernel for a KV cache of this type.

    It is None under a mesh: XLA cannot split a kernel over devices.
    """
    if not _is_single_cpu() or not cpu.is_available():
        return None
    return cpu.paged_attention if cpu.can_attend(head_dim=head_dim, dtype=dtype) else None


def product(*, rows: int, inputs: int, outputs: Sequence[int], dtype: DTypeLike) -> Product | None:
    """Return what multiplies [rows, inputs] with matrices of [outputs, inputs].

    `outputs` has the number of outputs of each matrix.
    """
    if _platform() != "cpu" or not cpu.is_available():
        return None
    if _is_single_cpu() and cpu.can_multiply(
        rows=rows, inputs=inputs, outputs=outputs, dtype=dtype
    ):
        return cpu.products
    if cpu.is_matrix_first_faster(rows=rows, outputs=outputs, dtype=dtype):
        return cpu.matrix_first_products
    return None


def prefers_output_major(*, inputs: int, outputs: int, dtype: DTypeLike) -> bool:
    """Return whether a decoder that multiplies few rows should store a matrix as [outputs, inputs].

    Then `product` takes it. Elsewhere it stays [inputs, outputs], for a plain product by XLA.
    """
    if not _is_single_cpu() or not cpu.is_available():
        return False
    return cpu.is_large(inputs=inputs, outputs=outputs, dtype=dtype)


def rows_per_product() -> int:
    """Return how many rows keep a large product busy.

    512 rows fill the matrix unit of a TPU. A CPU multiplies 256 as fast.
    """
    return 256 if _platform() == "cpu" else 512


def _platform() -> str:
    """Return the platform of what is being traced.

    It may be compiled for a device that is not here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def _is_single_cpu() -> bool:
    """Return whether what is being traced runs on one CPU device, without a mesh."""
    return jax.sharding.get_abstract_mesh().empty and _platform() == "cpu"
