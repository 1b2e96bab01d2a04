"""Kernels for operations that they compute faster than XLA.

Three functions choose the kernel for an operation. Models, engine and trainer call them with the
shapes and types of the operation:

- `packed_attention` is for attention over packed rows, in training and scoring.
- `paged_attention` is for attention of requests over their KV cache, in the engine.
- `product` is for the product of a few rows with matrices, in decoding.

Each function returns a JAX function, or None. None means that XLA is at least as fast, and the
caller uses plain JAX operations:

    attend = kernels.paged_attention(head_dim=64, dtype=jnp.float32)
    if attend is None:
        ...  # compute the same with jax.numpy

Only x86 CPUs have such kernels (`kernels/cpu/`), and they need numba (the extra `cpu`). Everywhere
else the functions return None. The kernels for TPUs and GPUs are part of JAX, and
`models.attention` and `inference.engine.ragged` call them directly.

The choice is made while JAX traces the caller. It holds for the device of the current mesh, or for
JAX's default device if there is no mesh.
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

# The name of the results of `packed_attention` for `jax.checkpoint`. If a checkpoint policy keeps
# these results, the backward pass does not compute the attention a second time.
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

        A segment is a run of equal `segment_ids`. If other ids are between two runs of the same id,
        they are two segments. Each query sees the keys of its own segment up to its own position.
        Padding is treated as a segment too. The function is differentiable.
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

        `row_table` has four columns. The first two are the index of the cache row and the number of
        its tokens that the first query sees. The last two are the index of the prefix and the
        number of its tokens that all queries see. Each query after the first sees one more token of
        the row. If a request sees 0 tokens of its row, its result is 0. The function is not
        differentiable.
        """
        ...


@runtime_checkable
class Product(Protocol):
    """The product of rows with one or more matrices that are stored as [outputs, inputs]."""

    def __call__(
        self, rows: Float[Array, "rows inputs"], *matrices: Float[Array, "_ inputs"]
    ) -> Sequence[Float[Array, "rows _"]]:
        """Return rows @ matrix.T in float32 for each matrix. The function is differentiable."""
        ...


def packed_attention(*, platform: str | None = None) -> PackedAttention | None:
    """Return the attention kernel for packed rows, or None if there is none.

    `platform` is "cpu", "gpu" or "tpu". The default is the platform that is being traced. The kernel
    accepts any shape and type. With a mesh, call it on the rows of each device (`jax.shard_map`).
    """
    if (platform or _platform()) != "cpu" or not cpu.is_available():
        return None
    return cpu.packed_attention


def paged_attention(*, head_dim: int, dtype: DTypeLike) -> PagedAttention | None:
    """Return the attention kernel for a KV cache, or None if there is none.

    `head_dim` and `dtype` describe the keys and values in the cache. Returns None with a mesh,
    because XLA cannot split a kernel over devices.
    """
    if not _is_single_cpu() or not cpu.is_available():
        return None
    return cpu.paged_attention if cpu.can_attend(head_dim=head_dim, dtype=dtype) else None


def product(*, rows: int, inputs: int, outputs: Sequence[int], dtype: DTypeLike) -> Product | None:
    """Return a faster function for products of [rows, inputs] with [outputs, inputs], or None.

    `outputs` holds the number of outputs of each matrix. `dtype` is the type of all operands.
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

    `product` needs this layout. If the result is False, store the matrix as [inputs, outputs], for
    a product by XLA.
    """
    if not _is_single_cpu() or not cpu.is_available():
        return False
    return cpu.is_large(inputs=inputs, outputs=outputs, dtype=dtype)


def rows_per_product() -> int:
    """Return how many rows a large product needs to run at full speed on this platform.

    512 rows fill the matrix unit of a TPU. On a CPU, 256 rows are as fast.
    """
    return 256 if _platform() == "cpu" else 512


def _platform() -> str:
    """Return the platform of the program that is being traced.

    The program may be compiled for a device that is not in this machine. So look at the mesh first.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def _is_single_cpu() -> bool:
    """Return whether the program that is being traced runs on one CPU device, without a mesh."""
    return jax.sharding.get_abstract_mesh().empty and _platform() == "cpu"
