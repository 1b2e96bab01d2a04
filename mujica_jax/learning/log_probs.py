"""Log-probabilities of packed tokens.

    log p(x_t | x_<t) = logits_t-1[x_t] - logsumexp(logits_t-1)                (x_<t: the prefix inside the segment)

Logits of [rows, time, vocab] are never made. In each row the positions whose log-probability is
wanted are moved to the front, then all rows walk together through chunks of positions: a chunk
without any wanted position costs nothing. So the head costs what the trained tokens need (a quarter
to a third of an agent's conversation), with static shapes. Only a head that is trained, by a loss
that is more than a mean of log-probabilities, computes its logits again in the backward pass.
Called by the losses and by `learning.trainer`, which scores with it.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.models.attention import Implementation, causal_self_attention
from mujica_jax.models.cpu_calls import on_cpu
from mujica_jax.models.decoder import Decoder, Remat, scores
from mujica_jax.models.layers import matrix_product
from mujica_jax.models.sharding import RULES
from mujica_jax.trajectories.packing import Batch

# Positions whose logits one device holds at a time. 512 rows keep a matrix unit busy; their float32
# logits take 0.3 GB at a vocabulary of 152k. A CPU multiplies fewer as fast, and of the last chunk
# half is for nothing.
CHUNK_POSITIONS, CPU_CHUNK_POSITIONS = 512, 256

# Up to this depth the layers are unrolled and keep their activations: on CPU a step is then 12%
# faster than under `lax.scan`, which copies every layer's weights and residuals. Deeper models scan
# and recompute, so that neither program nor memory grows with depth.
UNROLLED_LAYERS = 4


class Mode(NamedTuple):
    """What is asked of the walk, the same for all of its chunks."""

    normalized: bool  # with the normalizers
    # each wanted log-probability weighs the same in the loss, whatever it is; not with `normalized`
    uniform: bool
    parts: tuple[
        str, ...
    ] = ()  # mesh axes over which the table's columns are split; none if it is whole


class TokenScores(NamedTuple):
    """Of each token given its prefix in its segment, float32; 0 where undefined or not wanted."""

    log_probs: Float[Array, "rows time"]
    log_normalizers: Float[Array, "rows time"]  # logsumexp of the logits that predict the token


def token_log_probs(
    decoder: Decoder,
    batch: Batch,
    wanted: Bool[Array, "rows time"] | None = None,
    *,
    attention: Implementation = "auto",
    remat: Remat | Literal["auto"] = "auto",
) -> Float[Array, "rows time"]:
    """log p of each token given its prefix in its segment, float32; 0 where undefined (padding, the
    first token of a segment).

    `wanted` limits the work to some tokens (0 elsewhere)."""
    return token_scores(
        decoder, batch, wanted, attention=attention, remat=remat, normalized=False
    ).log_probs


def token_scores(
    decoder: Decoder,
    batch: Batch,
    wanted: Bool[Array, "rows time"] | None,
    *,
    attention: Implementation = "auto",
    remat: Remat | Literal["auto"] = "auto",
    normalized: bool,
    uniform: bool = False,
) -> TokenScores:
    """Without `normalized` the normalizers are all 0 and cost nothing. `uniform`: the loss is a
    multiple of the sum of all log-probabilities, as a mean is; then the forward pass knows the
    gradient but for that number."""
    tokens, segments, positions = map(
        jnp.asarray, (batch.tokens, batch.segment_ids, batch.positions)
    )
    predicted = (segments[:, 1:] == segments[:, :-1]) & (
        segments[:, 1:] != 0
    )  # position t predicts token t + 1
    if wanted is not None:
        predicted &= wanted[:, 1:]
    # The last position predicts nothing: it is carried along so that time keeps a length that
    # divides into chunks.
    predicted = jnp.pad(predicted, ((0, 0), (0, 1)))
    targets = jnp.roll(tokens, -1, axis=1)
    deep = decoder.config.num_layers > UNROLLED_LAYERS
    kept: Remat = ("full" if deep else "none") if remat == "auto" else remat
    hidden = decoder(
        tokens, positions, causal_self_attention(segments, attention), scan=deep, remat=kept
    )
    mode = Mode(normalized, uniform)
    log_probs, normalizers = _target_scores(decoder.head_table(), hidden, targets, predicted, mode)
    # Column 0 receives the last position's 0.
    return TokenScores(jnp.roll(log_probs, 1, axis=1), jnp.roll(normalizers, 1, axis=1))


def _target_scores(
    table: Float[Array, "vocab hidden"],
    hidden: Float[Array, "rows time hidden"],
    targets: Int[Array, "rows time"],
    wanted: Bool[Array, "rows time"],
    mode: Mode,
) -> tuple[Float[Array, "rows time"], Float[Array, "rows time"]]:
    """log p of `targets` under the logits of `hidden`, and the normalizers of these logits; 0 where
    not wanted.

    Each device walks through the rows it holds: the head is gathered once and its gradient summed
    once, where the compiler, left alone, would do both in every chunk. A head that is split over
    devices comes in parts and its gradient leaves in parts, a sum that moves half as much as one
    that everybody gets whole. The tensor axis stays the compiler's."""
    mesh = jax.sharding.get_abstract_mesh()
    split = tuple(axis for axis in RULES["batch"].mesh_axes if mesh.shape.get(axis, 1) > 1)
    if not split:
        return _chunked_scores(table, hidden, targets, wanted, mode=mode)
    parts = tuple(axis for axis in RULES["embed"].mesh_axes if axis in split)
    if table.shape[1] % math.prod(mesh.shape[axis] for axis in parts):
        parts = ()
    walk: Any = functools.partial(_chunked_scores, mode=mode._replace(parts=parts))
    rows, head = PartitionSpec(split), PartitionSpec(None, parts)
    return jax.shard_map(
        walk,
        in_specs=(head, rows, rows, rows),
        out_specs=(rows, rows),
        axis_names=set(split),
        check_vma=False,
    )(table, hidden, targets, wanted)


def _chunked_scores(
    table: Float[Array, "vocab part"],
    hidden: Float[Array, "rows time hidden"],
    targets: Int[Array, "rows time"],
    wanted: Bool[Array, "rows time"],
    *,
    mode: Mode,
) -> tuple[Float[Array, "rows time"], Float[Array, "rows time"]]:
    rows, time = targets.shape
    chunk = min(time, max(1, (CPU_CHUNK_POSITIONS if on_cpu() else CHUNK_POSITIONS) // rows))
    chunks = -(-time // chunk)
    # Wanted positions first, the others after them, both in their order: where each position goes,
    # and which one comes from where.
    before, others_before = jnp.cumsum(wanted, axis=1), jnp.cumsum(~wanted, axis=1)
    place = jnp.where(wanted, before, before[:, -1:] + others_before) - 1
    order = jnp.zeros_like(place).at[jnp.arange(rows)[:, None], place].set(jnp.arange(time)[None])

    def in_chunks(array: Array) -> Array:
        moved = jnp.take_along_axis(
            array, order.reshape(rows, time, *[1] * (array.ndim - 2)), axis=1
        )
        padded = jnp.pad(moved, ((0, 0), (0, chunks * chunk - time), *[(0, 0)] * (array.ndim - 2)))
        return jnp.moveaxis(padded.reshape(rows, chunks, chunk, *array.shape[2:]), 1, 0)

    def in_rows(walked: Array) -> Float[Array, "rows time"]:
        moved = jnp.moveaxis(walked, 0, 1).reshape(rows, chunks * chunk)[:, :time]
        return jnp.where(wanted, jnp.take_along_axis(moved, place, axis=1), 0.0)

    walked: Any = _walk(mode, table, in_chunks(hidden), in_chunks(targets), in_chunks(wanted))
    log_probs, normalizers = walked
    return in_rows(log_probs), in_rows(normalizers) if mode.normalized else jnp.zeros_like(
        wanted, jnp.float32
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _walk(
    mode: Mode,
    table: Float[Array, "vocab part"],
    hidden: Float[Array, "chunks rows chunk hidden"],
    targets: Int[Array, "chunks rows chunk"],
    wanted: Bool[Array, "chunks rows chunk"],
) -> tuple[Float[Array, "chunks rows chunk"], Float[Array, "chunks rows chunk"] | None]:
    """log p of the targets and, where asked for, the normalizers, chunk after chunk; a chunk in
    which nothing is wanted is 0 and costs nothing.

    The gradient is written out because the derived one would keep the whole head for every chunk: a
    conditional hands all that its backward pass needs out of the loop, the loop stacks it, and at a
    vocabulary of 152k that was a gigabyte for 512 tokens. And since upstream is one number a
    position, the forward pass leaves the gradient by the hidden states but for that number, which
    saves a frozen head half of its products. Where it is one number for all positions, the forward
    pass leaves the head's gradient too, which saves a trained one a quarter."""
    narrow = _narrow(table, hidden, mode.parts)
    return _forward(mode, narrow, hidden, targets, wanted, differentiated=False)[1][:2]


def _narrow(table: Array, hidden: Array, parts: tuple[str, ...]) -> Array:
    narrow = table.astype(hidden.dtype)  # before it is gathered: that moves half as much
    return jax.lax.all_gather(narrow, parts, axis=1, tiled=True) if parts else narrow


def _forward(
    mode: Mode, narrow: Array, *chunks: Array, differentiated: bool, head: Array | None = None
) -> tuple[Array | None, tuple[Array, Array | None, Array | None]]:
    """The sum of d log p / d head where `head` is zeros, and then log p, normalizers and d log p /
    d hidden [chunks, rows, chunk, hidden], the last two where asked for."""

    def one_chunk(head: Array | None, chunk_of: tuple[Array, ...]) -> Any:
        hidden, targets, wanted = chunk_of

        def some(head: Array | None) -> Any:
            logits = scores(narrow, hidden)
            chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            normalizers = jax.nn.logsumexp(logits, axis=-1)
            pulled = None
            if differentiated:
                pull = _pull(logits, targets)
                pulled = matrix_product(pull.astype(narrow.dtype), narrow).reshape(hidden.shape)
                if head is not None:
                    head = _add_gradient(head, jnp.where(wanted.reshape(-1, 1), pull, 0.0), hidden)
            return head, (chosen - normalizers, normalizers if mode.normalized else None, pulled)

        def nothing(head: Array | None) -> Any:
            zeros, pulled = (
                jnp.zeros(targets.shape, jnp.float32),
                jnp.zeros_like(hidden) if differentiated else None,
            )
            return head, (zeros, zeros if mode.normalized else None, pulled)

        return jax.lax.cond(wanted.any(), some, nothing, head)

    return jax.lax.scan(one_chunk, head, chunks)


def _pull(
    logits: Float[Array, "rows chunk vocab"], targets: Int[Array, "rows chunk"]
) -> Float[Array, "positions vocab"]:
    """d log p[target] / d logits = onehot(target) - softmax(logits)"""
    at_target = targets[..., None] == jnp.arange(logits.shape[-1])
    return (at_target - jax.nn.softmax(logits, axis=-1)).reshape(-1, logits.shape[-1])


def _add_gradient(head: Array, pull: Float[Array, "positions vocab"], hidden: Array) -> Array:
    """In float32: over chunks in one place, over devices outside or, where the head is in parts, in
    `_summed`."""
    states = hidden.reshape(-1, hidden.shape[-1])
    return head + jnp.matmul(pull.astype(hidden.dtype).T, states, preferred_element_type=head.dtype)


def _summed(head: Array, parts: tuple[str, ...]) -> Array:
    """Over devices, to each its part. On CPU the sum is made whole first: between processes XLA
    scatters it by gloo, which now and then gives the first one wrong numbers where parts have
    megabytes (jax-ml/jax#40830)."""

    def scattered(head: Array) -> Array:
        return jax.lax.psum_scatter(head, parts, scatter_dimension=1, tiled=True)

    def cut(head: Array) -> Array:
        width = head.shape[1] // jax.lax.axis_size(parts)
        return jax.lax.dynamic_slice_in_dim(
            jax.lax.psum(head, parts), jax.lax.axis_index(parts) * width, width, axis=1
        )

    return jax.lax.platform_dependent(head, cpu=cut, default=scattered) if parts else head


def _walk_forward(
    mode: Mode, *given: CustomVJPPrimal
) -> tuple[tuple[Array, Array | None], tuple[Any, ...]]:
    table, *chunks = (one.value for one in given)
    trained, narrow = given[0].perturbed, _narrow(table, chunks[0], mode.parts)
    head = jnp.zeros_like(narrow, jnp.float32) if trained and mode.uniform else None
    head, (log_probs, normalizers, pulled) = _forward(
        mode, narrow, *chunks, differentiated=True, head=head
    )
    if head is not None:
        head = _summed(head, mode.parts)
    return (log_probs, normalizers), (table if trained else None, head, narrow, pulled, *chunks)


def _walk_backward(
    mode: Mode, kept: tuple[Any, ...], upstream: tuple[Any, Any]
) -> tuple[Array | None, ...]:
    """d normalizer / d logits = softmax(logits)"""
    table, head, narrow, pulled, hidden, targets, wanted = kept
    of_log_probs, of_normalizers = (  # a loss may leave one of them out
        jnp.zeros(given.shape, jnp.float32) if isinstance(given, SymbolicZero) else given
        for given in upstream
    )
    states = of_log_probs[..., None] * pulled
    if mode.normalized:
        states += of_normalizers[..., None] * (narrow[targets] - pulled)
    if table is None:
        return None, states.astype(hidden.dtype), None, None
    if head is not None:
        weight = of_log_probs.reshape(-1)[jnp.argmax(wanted)]
        if mode.parts:  # of those whose sum the part is, 0 where nothing is wanted
            most, least = jax.lax.pmax(weight, mode.parts), jax.lax.pmin(weight, mode.parts)
            weight = jnp.where(most > 0, most, least)
        return (weight * head).astype(table.dtype), states.astype(hidden.dtype), None, None

    def one_chunk(head: Array, chunk_of: Any) -> tuple[Array, None]:
        hidden, targets, wanted, of_log_probs, of_normalizers = chunk_of

        def some(head: Array) -> Array:
            logits = scores(narrow, hidden)
            pull = _pull(logits, targets) * of_log_probs.reshape(-1, 1)
            if mode.normalized:
                pull += (jax.nn.softmax(logits, axis=-1) * of_normalizers[..., None]).reshape(
                    pull.shape
                )
            return _add_gradient(head, pull, hidden)

        return jax.lax.cond(wanted.any(), some, lambda head: head, head), None

    chunks = (hidden, targets, wanted, of_log_probs, of_normalizers)
    head, _ = jax.lax.scan(one_chunk, jnp.zeros_like(narrow, jnp.float32), chunks)
    # The layers need only the states. They wait, or a compiler keeps the whole head until they are
    # done.
    head, states = jax.lax.optimization_barrier((head, states))
    return _summed(head, mode.parts).astype(table.dtype), states.astype(hidden.dtype), None, None


_walk.defvjp(_walk_forward, _walk_backward, symbolic_zeros=True)
