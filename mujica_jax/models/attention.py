"""Causal attention inside segments, with the fastest kernel of each platform.

    out_t = sum over s of softmax_s(query_t . key_s / sqrt(head_dim)) value_s

    s runs over the tokens up to t, t included, that are in the same segment as t.

Each query head shares its key and value head with heads / kv_heads - 1 other query heads.

Implementations (`trainer.attention`):

    splash   TPU: the splash attention kernel of JAX
    cudnn    NVIDIA GPU: cuDNN's flash attention
    blocks   CPU: `kernels.packed_attention`, for long rows on a CPU that has this kernel
    xla      any platform, in plain JAX

All of them take query [batch, time, heads, head_dim], key and value [batch, time, kv_heads,
head_dim] and segment ids [batch, time], and sum in float32. Segment 0 is padding. Its output is
zero and has no gradient. `learning.log_probs` calls `causal_self_attention` for training and
scoring.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mujica_jax import kernels
from mujica_jax.config.checks import SPLASH_LANES
from mujica_jax.errors import UserError
from mujica_jax.models.layers import Attend, LayerIndex
from mujica_jax.models.sharding import RULES
from mujica_jax.runtime.extras import how_to_install

Implementation = Literal["auto", "xla", "blocks", "splash", "cudnn"]

# Shortest row, in tokens, for which "auto" takes `kernels.packed_attention` on a CPU. In shorter
# rows the kernel has too little to skip.
LONG_ROW = 512
# `_xla` cuts the queries of a row into blocks and skips all keys after a block. Smaller blocks skip
# more products, but each block is a computation of its own. So a block has at least
# MIN_BLOCK_TOKENS tokens, and a row has at most MAX_BLOCKS blocks.
MIN_BLOCK_TOKENS = 64
MAX_BLOCKS = 8

# Tokens in a block of splash attention. This is MaxText's default. The scores of a block take one
# megabyte in float32.
SPLASH_BLOCK = 512
# Score of a token that a query must not see. It is finite: the difference of two such scores is 0,
# while the difference of two infinities would be NaN.
MASKED_SCORE = -1e30


def causal_self_attention(
    segment_ids: Int[Array, "batch time"], implementation: Implementation = "auto"
) -> Attend:
    """Return the callback `attend` for training and scoring (`layers.Attend`).

    It has no cache and does the same in every layer.
    """

    def attend(layer_index: LayerIndex, query: Array, key: Array, value: Array) -> Array:
        return segment_attention(query, key, value, segment_ids, implementation)

    return attend


def segment_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time kv_heads head_dim"],
    value: Float[Array, "batch time kv_heads head_dim"],
    segment_ids: Int[Array, "batch time"],
    implementation: Implementation = "auto",
) -> Float[Array, "batch time heads head_dim"]:
    """Return, for each token, the attention over itself and the earlier tokens of its segment.

    This is softmax(query key^T / sqrt(head_dim)) value. It is 0 for padding.
    """
    attend: dict[str, Callable[..., Array]] = {
        "xla": _xla,
        "blocks": _blocks,
        "splash": _splash,
        "cudnn": _cudnn,
    }
    chosen = resolve(implementation, time=query.shape[1])
    mixed = attend[chosen](query, key, value, segment_ids)
    return jnp.where((segment_ids != 0)[:, :, None, None], mixed, jnp.zeros((), mixed.dtype))


def resolve(
    implementation: Implementation, *, time: int, platform: str | None = None
) -> Literal["xla", "blocks", "splash", "cudnn"]:
    """Return the implementation that "auto" stands for on a platform.

    This is the platform's own kernel if it supports rows of `time` tokens, else XLA. Without
    `platform` it is the platform of this process. Any other implementation is returned as it is.
    """
    if implementation != "auto":
        return implementation
    platform = platform or jax.default_backend()
    if platform == "gpu":
        return "cudnn"
    if platform == "tpu" and time % SPLASH_LANES == 0:
        return "splash"
    if time >= LONG_ROW and kernels.packed_attention(platform=platform) is not None:
        return "blocks"
    return "xla"


def check_platform(implementation: Implementation) -> None:
    """Check that a kernel that the user chose runs on the platform of this process.

    Raises UserError if it does not. Compiling ahead of time for another platform does not call
    this function.
    """
    platform = jax.default_backend()
    needed = {"blocks": "cpu", "splash": "tpu", "cudnn": "gpu"}.get(implementation, platform)
    if platform != needed:
        raise UserError(
            f"trainer.attention {implementation} runs on {needed}, but this is {platform}: use "
            "auto, which chooses the fastest kernel of the platform"
        )
    if implementation == "blocks" and kernels.packed_attention() is None:
        raise UserError(
            "trainer.attention blocks needs an x86 CPU and the package numba: "
            f"{how_to_install('cpu')}, or use auto"
        )


def _xla(query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
    """Compute attention in plain JAX, block of queries by block of queries.

    Heads are moved before time, and the query heads that share a key head are the rows of one
    product. On CPU this is three times faster than products of [batch, time, heads, head_dim].
    """
    batch, time, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    sharing = heads // kv_heads
    queries = (
        (query / math.sqrt(head_dim))
        .reshape(batch, time, kv_heads, sharing, head_dim)
        .transpose(0, 2, 3, 1, 4)
    )
    keys = key.transpose(0, 2, 1, 3)
    values = value.transpose(0, 2, 1, 3)

    # Split into blocks and concatenate them again. The gradient of a split is a concatenation. The
    # gradient of a slice would be a sum over the whole length.
    block_tokens = max(MIN_BLOCK_TOKENS, -(-time // MAX_BLOCKS))
    cuts = [*range(block_tokens, time, block_tokens)]
    query_blocks = jnp.split(queries, cuts, axis=3)
    key_blocks = jnp.split(keys, cuts, axis=2)
    value_blocks = jnp.split(values, cuts, axis=2)

    # Each block of queries attends to the keys from the beginning of the row to the end of the
    # block.
    mixed_blocks = []
    for block, start in enumerate((0, *cuts)):
        stop = min(start + block_tokens, time)
        causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
        visible = causal & (segment_ids[:, start:stop, None] == segment_ids[:, None, :stop])
        bias = jnp.tile(jnp.where(visible, 0.0, MASKED_SCORE), (1, sharing, 1))[:, None]
        rows = query_blocks[block].reshape(batch, kv_heads, -1, head_dim)
        earlier_keys = jnp.concatenate(key_blocks[: block + 1], axis=2)
        earlier_values = jnp.concatenate(value_blocks[: block + 1], axis=2)
        mixed = softmax_mix(rows, earlier_keys, earlier_values, bias)
        mixed_blocks.append(mixed.reshape(batch, kv_heads, sharing, stop - start, head_dim))
    return jnp.concatenate(mixed_blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(query.shape)


def softmax_mix(
    queries: Float[Array, "batch kv_heads rows head_dim"],
    keys: Float[Array, "batch kv_heads keys head_dim"],
    values: Float[Array, "batch kv_heads keys head_dim"],
    bias: Float[Array, "batch 1 #rows keys"],
) -> Float[Array, "batch kv_heads rows head_dim"]:
    """Return softmax(queries keys^T + bias) values, computed in float32.

    `queries` are already divided by sqrt(head_dim). `bias` is 0 where a query sees a key, and
    `MASKED_SCORE` elsewhere.

    The division by the sum of the weights comes after the second product, which saves the backward
    pass a sum over keys. The mask is an added bias, which saves the backward pass a select.
    """
    scores = jnp.matmul(queries, keys.mT, preferred_element_type=jnp.float32) + bias
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(values.dtype)


def _blocks(query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
    """Compute attention by `kernels.packed_attention`. Each device handles its own rows."""
    attend = kernels.packed_attention()
    if attend is None:
        raise ValueError("this device has no kernel for packed rows; use the implementation 'xla'")
    return _on_each_device(attend, kv_heads=key.shape[2])(query, key, value, segment_ids)


def _cudnn(query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
    """Compute attention by cuDNN's flash attention, with a mask for causality and segments.

    cuDNN supports only 16-bit floats. Other types use JAX's implementation by XLA.
    """
    time = query.shape[1]
    causal = jnp.tril(jnp.ones((time, time), bool))
    visible = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
    is_narrow = query.dtype in (jnp.bfloat16, jnp.float16)
    return jax.nn.dot_product_attention(
        query, key, value, mask=visible[:, None], implementation="cudnn" if is_narrow else "xla"
    )


def _splash(
    query: Array, key: Array, value: Array, segment_ids: Array, *, interpret: bool = False
) -> Array:
    """Compute attention by the TPU's splash kernel, which skips the blocks above the diagonal.

    The compiler cannot split a kernel over devices. So each device runs it on its own rows and
    heads. `interpret` runs the kernel without a TPU, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def attend(query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
        time, heads, head_dim = query.shape[1:]
        kv_heads = key.shape[2]
        sharing = heads // kv_heads

        # All blocks have the same size, which divides the length of the rows.
        block_tokens = math.gcd(SPLASH_BLOCK, time)
        block_sizes: dict[str, Any] = {}
        for field in dataclasses.fields(splash.BlockSizes):
            if field.name.startswith("block_"):
                block_sizes[field.name] = block_tokens
        kernel = splash.make_splash_mqa_single_device(
            masks.MultiHeadMask([masks.CausalMask((time, time))] * sharing),
            block_sizes=splash.BlockSizes(**block_sizes),
            interpret=interpret,
        )

        # Move heads before time, and group the query heads by the key head that they share.
        scaled = (query / math.sqrt(head_dim)).astype(query.dtype)
        grouped = scaled.reshape(*scaled.shape[:2], kv_heads, sharing, head_dim)
        queries = grouped.transpose(0, 2, 3, 1, 4)
        keys = key.transpose(0, 2, 1, 3)
        values = value.transpose(0, 2, 1, 3)

        def attend_row(queries: Array, keys: Array, values: Array, segments: Array) -> Array:
            segment_ids = splash.SegmentIds(q=segments, kv=segments)
            over_heads = jax.vmap(functools.partial(kernel, segment_ids=segment_ids))
            return over_heads(queries, keys, values)  # pyright: ignore[reportReturnType]

        # [batch, kv_heads, sharing, time, head_dim]
        mixed = jax.vmap(attend_row)(queries, keys, values, segment_ids)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)

    attend_on_devices = _on_each_device(attend, kv_heads=key.shape[2])
    return attend_on_devices(query, key, value, segment_ids)


def _on_each_device(attend: Callable[..., Array], *, kv_heads: int) -> Callable[..., Array]:
    """Return a function that runs `attend` on each device, with the rows of that device.

    If the size of the mesh axis `tensor` divides the number of key heads, the heads are split over
    this axis too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    row_axes = tuple(axis for axis in RULES["batch"].mesh_axes if mesh.shape.get(axis, 1) > 1)
    tensor = mesh.shape.get("tensor", 1)
    if not row_axes and tensor == 1:
        return attend

    heads_axis = "tensor" if tensor > 1 and kv_heads % tensor == 0 else None
    states = PartitionSpec(row_axes or None, None, heads_axis, None)
    segments = PartitionSpec(row_axes or None, None)
    return jax.shard_map(
        attend,
        in_specs=(states, states, states, segments),
        out_specs=states,
        check_vma=False,
    )
