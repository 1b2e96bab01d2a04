"""Kernels of our own for a CPU, as functions of JAX (`cpu_kernels`). On a mesh and in other types
decoding's are left to XLA, with the same numbers but for rounding; attention of packed rows
computes in float32, on each device of a mesh.
"""

import functools
import importlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

ATTENTION_STEP, PRODUCT_STEP = 8, 16  # channels that a kernel takes at a time
ATTENDED = "attended"  # the name of what a backward pass needs of `packed_attention`
KERNEL_ROWS = 192  # with more, XLA multiplies as fast
LARGE_MATRIX = {
    "float32": 50_000,
    "bfloat16": 300_000,
}  # numbers: XLA packs a smaller one in no time


def on_cpu() -> bool:
    """Whether what is traced is for a CPU."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform if device else jax.default_backend()) == "cpu"


def can_attend(head_dim: int, dtype: DTypeLike) -> bool:
    """Whether `attention` takes keys and values of this kind here."""
    return _alone() and dtype == jnp.float32 and head_dim % ATTENTION_STEP == 0


def can_multiply(rows: Array, *matrices: Array) -> bool:
    """Whether `products` takes these, and is faster."""
    wide = all(array.dtype == jnp.float32 for array in (rows, *matrices))
    least = LARGE_MATRIX["float32"]
    large = all(matrix.size >= least and matrix.shape[0] >= PRODUCT_STEP for matrix in matrices)
    return (
        _alone()
        and wide
        and large
        and rows.shape[1] % PRODUCT_STEP == 0
        and rows.shape[0] <= KERNEL_ROWS
    )


def attention(
    query: Float[Array, "rows time heads head_dim"],
    keys: Float[Array, "places kv_heads head_dim width"],
    values: Float[Array, "places kv_heads width head_dim"],
    prefix_keys: Float[Array, "prefixes kv_heads head_dim length"],
    prefix_values: Float[Array, "prefixes kv_heads length head_dim"],
    of_rows: Int[Array, "rows 4"],
) -> Float[Array, "rows time heads head_dim"]:
    """Softmax attention of each row over a prefix and a place of the memory, in float32.

    `of_rows`: the place; how many tokens of it the first query of the row sees (each further query
    sees one more, a row that sees none becomes 0); the prefix; how many tokens of that."""
    kernel = jax.ffi.ffi_call(_registered("attend"), jax.ShapeDtypeStruct(query.shape, jnp.float32))
    mixed = kernel(query.astype(jnp.float32), keys, values, prefix_keys, prefix_values, of_rows)
    return mixed.astype(query.dtype)


@jax.custom_vjp
def products(
    rows: Float[Array, "rows inputs"], *matrices: Float[Array, "_ inputs"]
) -> Sequence[Array]:
    """rows @ matrix.T in float32 for each, of shapes that `can_multiply` admits: others are not
    computed whole."""
    results = [
        jax.ShapeDtypeStruct((rows.shape[0], matrix.shape[0]), jnp.float32) for matrix in matrices
    ]
    return jax.ffi.ffi_call(_registered("multiply"), results)(rows, *matrices)


products.defvjp(
    lambda rows, *matrices: (products(rows, *matrices), (rows, matrices)),
    lambda saved, gradients: (
        sum(gradient @ matrix for gradient, matrix in zip(gradients, saved[1], strict=True)),
        *(gradient.T @ saved[0] for gradient in gradients),
    ),
)


@jax.custom_vjp
def packed_attention(
    query: Float[Array, "rows time heads head_dim"],
    key: Float[Array, "rows time kv_heads head_dim"],
    value: Float[Array, "rows time kv_heads head_dim"],
    segment_ids: Int[Array, "rows time"],
) -> Float[Array, "rows time heads head_dim"]:
    """As `attention.segment_attention`, of segments without gaps, in float32."""
    return _packed_forward(query, key, value, segment_ids)[0]


def _packed_forward(
    query: Array, key: Array, value: Array, segment_ids: Array
) -> tuple[Array, tuple[Array, ...]]:
    """To the kernels all rows are one, in which a segment ends where its row does. What a backward
    pass needs of the result has a name, for `Decoder.with_memory` to keep it."""
    changes = (segment_ids != jnp.roll(segment_ids, 1, axis=1)).at[:, 0].set(True).reshape(1, -1)
    begins = jax.lax.cummax(
        jnp.where(changes, jnp.arange(changes.size, dtype=jnp.int32), 0), axis=1
    )
    given = *map(_one_row, (query, key, value)), begins
    normalizers = jax.ShapeDtypeStruct((1, query.shape[2], changes.size, 1), jnp.float32)
    kernel = jax.ffi.ffi_call(_registered("mix_packed"), (_like(given[0]), normalizers))
    results = checkpoint_name(kernel(*given), ATTENDED)
    return results[0].reshape(query.shape).astype(query.dtype), (*given, *results)


def _packed_backward(saved: tuple[Array, ...], gradient: Array) -> tuple[Array | None, ...]:
    query, key = saved[:2]
    kernel = jax.ffi.ffi_call(_registered("pull_packed"), (_like(query),) * 3)
    of_query, *in_parts = kernel(*saved, _one_row(gradient))
    of_keys = (parts.reshape(*key.shape[:3], -1, key.shape[3]).sum(axis=3) for parts in in_parts)
    found = (of_one.astype(gradient.dtype) for of_one in (of_query, *of_keys))
    return *(of_one.reshape(*gradient.shape[:2], *of_one.shape[2:]) for of_one in found), None


packed_attention.defvjp(_packed_forward, _packed_backward)


def _one_row(
    array: Float[Array, "rows time heads head_dim"],
) -> Float[Array, "1 tokens heads head_dim"]:
    return array.astype(jnp.float32).reshape(1, -1, *array.shape[2:])


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jnp.float32)


def _alone() -> bool:
    return jax.sharding.get_abstract_mesh().empty and on_cpu()


@functools.cache
def _registered(kernel: str) -> str:
    """Its name for XLA. numba compiles at the first use on a machine, in ten seconds, and keeps
    that on disk."""
    # numba takes a second to import
    kernels = importlib.import_module("mujica_jax.models.cpu_kernels")
    name = f"mujica_jax_{kernel}"
    jax.ffi.register_ffi_target(
        name, jax.ffi.pycapsule(kernels.address(getattr(kernels, kernel))), platform="cpu"
    )
    return name
