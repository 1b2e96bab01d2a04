"""The kernels of a CPU as functions of JAX, and the shapes and types for which they are faster.

`compiled.py` holds the kernels. This file gives them shapes, gradients and names for XLA.
`mujica_jax.kernels` chooses between them and XLA.
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

# A head's dimension and the inner length of a product are multiples of these.
HEAD_DIM_STEP = 8
PRODUCT_STEP = 16

# With more rows XLA multiplies as fast.
MAX_KERNEL_ROWS = 192

# A smaller matrix is packed by XLA in no time.
LARGE_MATRIX_NUMBERS = 50_000

# Up to so many rows XLA packs the second matrix of a product for longer than it multiplies.
MAX_MATRIX_FIRST_ROWS = 16


@functools.cache
def is_available() -> bool:
    """Whether the kernels run here.

    They are written for x86 processors, and compiled by numba, which must be installed.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return is_x86 and importlib.util.find_spec("numba") is not None


def can_attend(*, head_dim: int, dtype: DTypeLike) -> bool:
    """Return whether `paged_attention` takes keys and values of this kind."""
    return dtype == jnp.float32 and head_dim % HEAD_DIM_STEP == 0


def can_multiply(*, rows: int, inputs: int, outputs: Sequence[int], dtype: DTypeLike) -> bool:
    """Return whether `products` takes these shapes and is faster than XLA."""
    if dtype != jnp.float32 or inputs % PRODUCT_STEP or rows > MAX_KERNEL_ROWS:
        return False
    return all(
        count >= PRODUCT_STEP and is_large(inputs=inputs, outputs=count, dtype=dtype)
        for count in outputs
    )


def is_matrix_first_faster(*, rows: int, outputs: Sequence[int], dtype: DTypeLike) -> bool:
    """Return whether `matrix_first_products` is faster than rows @ matrix.T by XLA."""
    return dtype == jnp.float32 and rows <= MAX_MATRIX_FIRST_ROWS <= min(outputs)


def is_large(*, inputs: int, outputs: int, dtype: DTypeLike) -> bool:
    """Return whether XLA takes long to pack a matrix of this size."""
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
    """Return rows @ matrix.T in float32 for each matrix, of shapes that `can_multiply` admits.

    Other shapes are not computed whole.
    """
    shapes = [_float32((rows.shape[0], matrix.shape[0])) for matrix in matrices]
    return jax.ffi.ffi_call(_registered("products"), shapes)(rows, *matrices)


def _products_forward(
    rows: Array, *matrices: Array
) -> tuple[Sequence[Array], tuple[Array, Sequence[Array]]]:
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
    """Return rows @ matrix.T in float32 for each matrix, by XLA, which reads the matrix as it lies.

    Of two matrices XLA on a CPU first packs the second one, in every call. With few rows that takes
    longer than the product, so here the matrix is the first one (docs/lab/experiments.md). One barrier keeps
    XLA from turning the product round again. The other one lets later operations read the result
    row by row.
    """
    last_axes = (((1,), (1,)), ((), ()))
    results = []
    for matrix in matrices:
        columns = jax.lax.dot_general(matrix, rows, last_axes, preferred_element_type=jnp.float32)
        results.append(jax.lax.optimization_barrier(jax.lax.optimization_barrier(columns).T))
    return results


class _PackedResiduals(NamedTuple):
    """What the backward pass of `packed_attention` needs. All rows are one row of tokens."""

    query: Float[Array, "1 tokens heads head_dim"]
    key: Float[Array, "1 tokens kv_heads head_dim"]
    value: Float[Array, "1 tokens kv_heads head_dim"]
    segment_starts: Int[Array, "1 tokens"]  # for each token, the first one of its segment
    mixed: Float[Array, "1 tokens heads head_dim"]
    normalizers: Float[Array, "1 heads tokens 1"]  # logsumexp of a query's scores


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
    """Return the mixed values and the residuals.

    To the kernel all rows are one, in which a segment ends where its row does. The results have a
    name, by which `Decoder` keeps them for the backward pass.
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
    """Return the gradients of query, key and value.

    The kernel gives keys and values one gradient for each head of queries. The heads that share a
    head of keys are summed here.
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
    return array.astype(jnp.float32).reshape(1, -1, *array.shape[2:])


def _float32(shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


@functools.cache
def _registered(kernel: str) -> str:
    """Return the name by which XLA knows a kernel of `compiled.py`, and register it if it is new.

    At the first use on a machine numba compiles for ten seconds and keeps the result on disk.
    """
    # numba takes a second to import
    compiled = importlib.import_module("mujica_jax.kernels.cpu.compiled")
    name = f"mujica_jax_{kernel}"
    capsule = jax.ffi.pycapsule(compiled.address(getattr(compiled, kernel)))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return name
