"""The CPU kernels as JAX functions, and the shapes and types for which they are faster than XLA.

`compiled.py` contains the kernels. This module registers them with XLA, and adds output shapes and
gradients. `mujica_jax.kernels` chooses between these functions and XLA.
"""

import functools
import importlib
import importlib.util
import platform
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

PACKED_ATTENTION_RESULTS = "packed_attention_results"

# `paged_attention` needs a head dimension that is a multiple of this.
HEAD_DIM_STEP = 8
# `products` needs a number of inputs that is a multiple of this.
PRODUCT_STEP = 16

# With more rows than this, XLA is as fast as `products`.
MAX_KERNEL_ROWS = 192

# XLA packs a matrix (copies it into a faster layout) before each product. For a matrix with fewer
# elements than this, packing takes no measurable time.
LARGE_MATRIX_NUMBERS = 50_000

# Up to this number of rows, XLA takes longer to pack the second matrix of a product than to
# multiply.
MAX_MATRIX_FIRST_ROWS = 16


@functools.cache
def is_available() -> bool:
    """Return whether the kernels can run on this machine.

    They are written for x86 processors, and they need numba, which compiles them.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return is_x86 and importlib.util.find_spec("numba") is not None


def can_attend(*, head_dim: int, dtype: DTypeLike) -> bool:
    """Return whether `paged_attention` supports keys and values of this size and type."""
    return dtype == jnp.float32 and head_dim % HEAD_DIM_STEP == 0


def can_multiply(*, rows: int, inputs: int, outputs: Sequence[int], dtype: DTypeLike) -> bool:
    """Return whether `products` supports these shapes and this type, and is faster than XLA.

    `outputs` holds the number of outputs of each matrix.
    """
    if dtype != jnp.float32 or inputs % PRODUCT_STEP or rows > MAX_KERNEL_ROWS:
        return False
    return all(
        count >= PRODUCT_STEP and is_large(inputs=inputs, outputs=count, dtype=dtype)
        for count in outputs
    )


def is_matrix_first_faster(*, rows: int, outputs: Sequence[int], dtype: DTypeLike) -> bool:
    """Return whether `matrix_first_products` is faster than XLA's rows @ matrix.T."""
    return dtype == jnp.float32 and rows <= MAX_MATRIX_FIRST_ROWS <= min(outputs)


def is_large(*, inputs: int, outputs: int, dtype: DTypeLike) -> bool:
    """Return whether a matrix is so large that XLA's packing of it takes noticeable time."""
    return dtype == jnp.float32 and inputs * outputs >= LARGE_MATRIX_NUMBERS


def paged_attention(
    query: Float[Array, "requests time heads head_dim"],
    keys: Float[Array, "cache_rows kv_heads head_dim width"],
    values: Float[Array, "cache_rows kv_heads width head_dim"],
    prefix_keys: Float[Array, "prefixes kv_heads head_dim length"],
    prefix_values: Float[Array, "prefixes kv_heads length head_dim"],
    row_table: Int[Array, "requests 4"],
) -> Float[Array, "requests time heads head_dim"]:
    """See `kernels.PagedAttention`."""
    kernel = jax.ffi.ffi_call(_registered("paged_attention"), _float32(query.shape))
    mixed = kernel(query.astype(jnp.float32), keys, values, prefix_keys, prefix_values, row_table)
    return mixed.astype(query.dtype)


@jax.custom_vjp
def products(
    rows: Float[Array, "rows inputs"], *matrices: Float[Array, "_ inputs"]
) -> Sequence[Float[Array, "rows _"]]:
    """Return rows @ matrix.T in float32 for each matrix.

    `can_multiply` must be True for the shapes. For other shapes the results are incomplete.
    """
    shapes = [_float32((rows.shape[0], matrix.shape[0])) for matrix in matrices]
    return jax.ffi.ffi_call(_registered("products"), shapes)(rows, *matrices)


def _products_forward(
    rows: Array, *matrices: Array
) -> tuple[Sequence[Array], tuple[Array, Sequence[Array]]]:
    """Return the products, and the operands for the backward pass."""
    return products(rows, *matrices), (rows, matrices)


def _products_backward(
    operands: tuple[Array, Sequence[Array]], gradients: Sequence[Array]
) -> tuple[Array, ...]:
    """Return the gradients of the rows and of each matrix."""
    rows, matrices = operands
    rows_gradient = sum(
        gradient @ matrix for gradient, matrix in zip(gradients, matrices, strict=True)
    )
    return (rows_gradient, *(gradient.T @ rows for gradient in gradients))  # pyright: ignore[reportReturnType]


products.defvjp(_products_forward, _products_backward)


def matrix_first_products(
    rows: Float[Array, "rows inputs"], *matrices: Float[Array, "_ inputs"]
) -> Sequence[Float[Array, "rows _"]]:
    """Return rows @ matrix.T in float32 for each matrix, computed by XLA without packing the matrix.

    In each product on a CPU, XLA first packs the second operand. With few rows, packing the matrix
    takes longer than multiplying. So this function computes (matrix @ rows.T).T, where the matrix
    is the first operand (docs/lab/experiments.md). The inner optimization barrier keeps XLA from
    swapping the operands back. The outer one stores the transposed result, so that later operations
    read it row by row.
    """
    last_axes = (((1,), (1,)), ((), ()))
    results = []
    for matrix in matrices:
        columns = jax.lax.dot_general(matrix, rows, last_axes, preferred_element_type=jnp.float32)
        results.append(jax.lax.optimization_barrier(jax.lax.optimization_barrier(columns).T))
    return results


class _PackedResiduals(NamedTuple):
    """The inputs of the backward pass of `packed_attention`, with all rows joined into one row."""

    query: Float[Array, "1 tokens heads head_dim"]
    key: Float[Array, "1 tokens kv_heads head_dim"]
    value: Float[Array, "1 tokens kv_heads head_dim"]
    # For each token, the index of the first token of its segment.
    segment_starts: Int[Array, "1 tokens"]
    # The result of the forward pass.
    mixed: Float[Array, "1 tokens heads head_dim"]
    # The logsumexp of the scores of each query.
    normalizers: Float[Array, "1 heads tokens 1"]


@jax.custom_vjp
def packed_attention(
    query: Float[Array, "rows time heads head_dim"],
    key: Float[Array, "rows time kv_heads head_dim"],
    value: Float[Array, "rows time kv_heads head_dim"],
    segment_ids: Int[Array, "rows time"],
) -> Float[Array, "rows time heads head_dim"]:
    """See `kernels.PackedAttention`."""
    return _packed_attention_forward(query, key, value, segment_ids)[0]


def _packed_attention_forward(
    query: Array, key: Array, value: Array, segment_ids: Array
) -> tuple[Array, _PackedResiduals]:
    """Return the mixed values, and the residuals for the backward pass.

    The kernel gets all rows joined into one row. The end of a row also ends a segment. The results
    are named for `jax.checkpoint`, so that `Decoder` can keep them for the backward pass.
    """
    is_start = segment_ids != jnp.roll(segment_ids, 1, axis=1)
    is_start = is_start.at[:, 0].set(True).reshape(1, -1)
    tokens = is_start.size
    starts = jnp.where(is_start, jnp.arange(tokens, dtype=jnp.int32), 0)
    segment_starts = jax.lax.cummax(starts, axis=1)

    operands = (_as_one_row(query), _as_one_row(key), _as_one_row(value), segment_starts)
    shapes = (_float32(operands[0].shape), _float32((1, query.shape[2], tokens, 1)))
    kernel = jax.ffi.ffi_call(_registered("packed_attention"), shapes)
    mixed, normalizers = checkpoint_name(kernel(*operands), PACKED_ATTENTION_RESULTS)
    residuals = _PackedResiduals(*operands, mixed, normalizers)
    return mixed.reshape(query.shape).astype(query.dtype), residuals


def _packed_attention_backward(
    residuals: _PackedResiduals, gradient: Float[Array, "rows time heads head_dim"]
) -> tuple[Array, Array, Array, None]:
    """Return the gradients of query, key and value, and None for the segment ids.

    The kernel returns one gradient of the keys and values for each query head. The query heads that
    share a key and value head are summed here.
    """
    shape = _float32(residuals.query.shape)
    kernel = jax.ffi.ffi_call(_registered("packed_attention_gradient"), (shape, shape, shape))
    by_query, by_key, by_value = kernel(*residuals, _as_one_row(gradient))

    rows, time = gradient.shape[:2]
    _, tokens, kv_heads, head_dim = residuals.key.shape

    def sum_sharing_heads(by_heads: Array) -> Array:
        return by_heads.reshape(1, tokens, kv_heads, -1, head_dim).sum(axis=3)

    def in_rows(one_row: Array) -> Array:
        return one_row.astype(gradient.dtype).reshape(rows, time, *one_row.shape[2:])

    key_gradient = in_rows(sum_sharing_heads(by_key))
    value_gradient = in_rows(sum_sharing_heads(by_value))
    return in_rows(by_query), key_gradient, value_gradient, None


packed_attention.defvjp(_packed_attention_forward, _packed_attention_backward)


def _as_one_row(
    array: Float[Array, "rows time heads head_dim"],
) -> Float[Array, "1 tokens heads head_dim"]:
    """Join all rows into one row, in float32."""
    return array.astype(jnp.float32).reshape(1, -1, *array.shape[2:])


def _float32(shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


@functools.cache
def _registered(kernel: str) -> str:
    """Register a kernel of `compiled.py` with XLA at its first use. Return its registered name.

    At the first use on a machine, numba compiles for ten seconds and caches the result on disk.
    """
    # Import the kernels only when they are used, because importing numba takes a second.
    compiled = importlib.import_module("mujica_jax.kernels.cpu.compiled")
    name = f"mujica_jax_{kernel}"
    capsule = jax.ffi.pycapsule(compiled.address(getattr(compiled, kernel)))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return name
