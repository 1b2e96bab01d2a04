"""Log-probabilities of the tokens in packed rows.

    log p(x_t | x_<t) = logits_t-1[x_t] - logsumexp(logits_t-1)

x_<t are the tokens before x_t in its segment, and logits_t-1 are the logits that predict x_t.

An array of logits [rows, time, vocab] would be too large, so it is never made. Instead:

1. In each row, the positions that have to be scored are moved to the front.
2. The rows are cut into chunks of positions. A loop computes the logits of one chunk of all rows at
   a time.
3. A chunk without a position to score is skipped.

So the cost of the head follows the number of trained tokens, although all shapes are static. These
are a quarter to a third of the tokens of an agent's conversation. If the head is trained, the
backward pass computes the logits of each chunk again. If the head is frozen, it does not.

The losses call this module, and so does `learning.trainer` for scoring.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mujica_jax import kernels
from mujica_jax.learning.packing import Batch
from mujica_jax.models.attention import Implementation, causal_self_attention
from mujica_jax.models.decoder import Decoder, Remat, scores
from mujica_jax.models.sharding import RULES

# Largest number of layers that run in a Python loop and store their activations. On CPU a step is
# then 12% faster than with `lax.scan`, which copies the weights and activations of every layer.
# Deeper models use a scan and compute activations again in the backward pass. The size of the
# program then does not grow with depth, and memory grows less.
UNROLLED_LAYERS = 4


class Mode(NamedTuple):
    """Settings that are the same for all chunks."""

    # Whether the log-normalisers are returned too.
    normalized: bool
    # Mesh axes over which the columns of the head are split. Empty if each device has all of it.
    table_axes: tuple[str, ...] = ()


class TokenScores(NamedTuple):
    """Scores of each token, in float32. Tokens that are not scored have 0."""

    # log p(x_t | x_<t).
    log_probs: Float[Array, "rows time"]
    # logsumexp(logits_t-1), of the logits that predict x_t.
    log_normalizers: Float[Array, "rows time"]


class _ChunkScores(NamedTuple):
    """Scores of the positions of one chunk, or of all chunks with a leading dimension.

    Each position has the scores of the token that it predicts.
    """

    log_probs: Float[Array, "*chunks rows chunk"]
    log_normalizers: Float[Array, "*chunks rows chunk"] | None
    # d log p / d hidden, for the backward pass.
    log_prob_by_hidden: Float[Array, "*chunks rows chunk hidden"] | None


class _Residuals(NamedTuple):
    """The values of the forward pass that the backward pass needs."""

    # The part of the head that this device stores. None if the head is frozen.
    table: Float[Array, "vocab part"] | None
    # The whole head, in the type of the products.
    whole_table: Float[Array, "vocab hidden"]
    log_prob_by_hidden: Float[Array, "chunks rows chunk hidden"]
    hidden: Float[Array, "chunks rows chunk hidden"]
    targets: Int[Array, "chunks rows chunk"]
    mask: Bool[Array, "chunks rows chunk"]


def token_log_probs(
    decoder: Decoder,
    batch: Batch,
    token_mask: Bool[Array, "rows time"] | None = None,
    *,
    attention: Implementation = "auto",
    remat: Remat | Literal["auto"] = "auto",
) -> Float[Array, "rows time"]:
    """Return the log-probability of each token given the tokens before it in its segment.

    The result is float32. Padding and the first token of each segment have 0. With `token_mask`
    only the marked tokens are scored, and all others have 0.
    """
    return token_scores(
        decoder, batch, token_mask, attention=attention, remat=remat, normalized=False
    ).log_probs


def token_scores(
    decoder: Decoder,
    batch: Batch,
    token_mask: Bool[Array, "rows time"] | None,
    *,
    attention: Implementation = "auto",
    remat: Remat | Literal["auto"] = "auto",
    normalized: bool,
) -> TokenScores:
    """Return the log-probability of each token and, if `normalized`, its log-normaliser.

    Without `normalized` all log-normalisers are 0 and cost nothing. `token_mask` marks the tokens
    to score, and None scores all tokens. "auto" for `remat` is "none" for up to `UNROLLED_LAYERS`
    layers, else "full".
    """
    tokens = jnp.asarray(batch.tokens)
    segments = jnp.asarray(batch.segment_ids)
    positions = jnp.asarray(batch.positions)

    # Position t predicts token t + 1. Its mask says whether this token belongs to the same segment
    # and has to be scored. The last position predicts nothing. It stays, with the mask False, so
    # that `time` divides into chunks.
    is_same_segment = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    mask = is_same_segment if token_mask is None else is_same_segment & token_mask[:, 1:]
    mask = jnp.pad(mask, ((0, 0), (0, 1)))
    targets = jnp.roll(tokens, -1, axis=1)

    is_deep = decoder.config.num_layers > UNROLLED_LAYERS
    if remat == "auto":
        remat = "full" if is_deep else "none"
    attend = causal_self_attention(segments, attention)
    hidden = decoder(tokens, positions, attend, scan=is_deep, remat=remat)

    mode = Mode(normalized=normalized)
    log_probs, normalizers = _target_scores(decoder.head_table(), hidden, targets, mask, mode)
    # The score at position t belongs to token t + 1. Column 0 gets the 0 of the last position.
    return TokenScores(
        log_probs=jnp.roll(log_probs, 1, axis=1),
        log_normalizers=jnp.roll(normalizers, 1, axis=1),
    )


def _target_scores(
    table: Float[Array, "vocab hidden"],
    hidden: Float[Array, "rows time hidden"],
    targets: Int[Array, "rows time"],
    mask: Bool[Array, "rows time"],
    mode: Mode,
) -> tuple[Float[Array, "rows time"], Float[Array, "rows time"]]:
    """Return log p of the targets under the logits of `hidden`, and the log-normalisers.

    `table` is the head, and `hidden` are the hidden states after the final norm. Both results are 0
    for positions that are not in `mask`.

    On a mesh, `shard_map` makes each device loop over the chunks of its own rows. The head is then
    gathered once, and its gradient is summed over devices once. Without `shard_map` the compiler
    would do both for every chunk. If the head is split over devices, each device gets only its part
    of the summed gradient. This moves half as many bytes as giving the whole sum to every device.
    The compiler still handles the mesh axis `tensor`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    row_axes = tuple(axis for axis in RULES["batch"].mesh_axes if mesh.shape.get(axis, 1) > 1)
    if not row_axes:
        return _chunked_scores(table, hidden, targets, mask, mode=mode)

    table_axes = tuple(axis for axis in RULES["embed"].mesh_axes if axis in row_axes)
    num_parts = math.prod(mesh.shape[axis] for axis in table_axes)
    if table.shape[1] % num_parts:
        table_axes = ()

    score_own_rows: Any = functools.partial(
        _chunked_scores, mode=mode._replace(table_axes=table_axes)
    )
    rows_spec = PartitionSpec(row_axes)
    table_spec = PartitionSpec(None, table_axes)
    return jax.shard_map(
        score_own_rows,
        in_specs=(table_spec, rows_spec, rows_spec, rows_spec),
        out_specs=(rows_spec, rows_spec),
        axis_names=set(row_axes),
        check_vma=False,
    )(table, hidden, targets, mask)


def _chunked_scores(
    table: Float[Array, "vocab part"],
    hidden: Float[Array, "rows time hidden"],
    targets: Int[Array, "rows time"],
    mask: Bool[Array, "rows time"],
    *,
    mode: Mode,
) -> tuple[Float[Array, "rows time"], Float[Array, "rows time"]]:
    """Compute `_target_scores` chunk by chunk, with the positions in `mask` in the first chunks.

    `table` is the part of the head that this device stores, [vocab, hidden / devices].
    """
    rows, time = targets.shape
    # Take as few positions as keep a product efficient, because on average half of the last chunk
    # is wasted. The float32 logits of 512 positions take 0.3 GB at a vocabulary of 152,000.
    chunk = min(time, max(1, kernels.rows_per_product() // rows))
    num_chunks = -(-time // chunk)

    # Order the positions of each row: first those in the mask, then the others. `destinations` has
    # the new place of each position, and `sources` the position for each new place.
    masked_counts = jnp.cumsum(mask, axis=1)
    other_counts = jnp.cumsum(~mask, axis=1)
    destinations = jnp.where(mask, masked_counts, masked_counts[:, -1:] + other_counts) - 1
    sources = jnp.zeros_like(destinations)
    row_numbers = jnp.arange(rows)[:, None]
    sources = sources.at[row_numbers, destinations].set(jnp.arange(time)[None])

    def in_chunks(array: Array) -> Array:
        """Reorder [rows, time, ...] and cut it into [chunks, rows, chunk, ...]."""
        trailing = array.shape[2:]
        indices = sources.reshape(rows, time, *[1] * len(trailing))
        moved = jnp.take_along_axis(array, indices, axis=1)
        padding = (0, num_chunks * chunk - time)
        padded = jnp.pad(moved, ((0, 0), padding, *[(0, 0)] * len(trailing)))
        return jnp.moveaxis(padded.reshape(rows, num_chunks, chunk, *trailing), 1, 0)

    def in_rows(chunks: Array) -> Float[Array, "rows time"]:
        """Undo `in_chunks`, and set positions outside of the mask to 0."""
        moved = jnp.moveaxis(chunks, 0, 1).reshape(rows, num_chunks * chunk)[:, :time]
        return jnp.where(mask, jnp.take_along_axis(moved, destinations, axis=1), 0.0)

    chunk_scores: Any = _score_chunks(
        mode, table, in_chunks(hidden), in_chunks(targets), in_chunks(mask)
    )
    log_probs, normalizers = chunk_scores
    if mode.normalized:
        return in_rows(log_probs), in_rows(normalizers)
    return in_rows(log_probs), jnp.zeros_like(mask, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score_chunks(
    mode: Mode,
    table: Float[Array, "vocab part"],
    hidden: Float[Array, "chunks rows chunk hidden"],
    targets: Int[Array, "chunks rows chunk"],
    mask: Bool[Array, "chunks rows chunk"],
) -> tuple[Float[Array, "chunks rows chunk"], Float[Array, "chunks rows chunk"] | None]:
    """Return log p of the targets and, if `mode.normalized`, the log-normalisers, chunk by chunk.

    A chunk whose mask is empty gets zeros and costs nothing.

        z                    = table h
        log p                = z[x] - logsumexp(z)
        d log p / d z        = onehot(x) - softmax(z)
        d log p / d h        = table^T (d log p / d z)
        d logsumexp(z) / d z = softmax(z)
        d logsumexp(z) / d h = table[x] - d log p / d h

        gradient of h        = u (d log p / d h) + v (d logsumexp(z) / d h)
        gradient of table    = sum over positions of (u (d log p / d z) + v softmax(z)) h^T

    How to read it: a position has the hidden state h, the logits z and the target x. u and v are
    the gradients of the loss with respect to log p and to the log-normaliser logsumexp(z).

    The gradient is written out to save memory. With automatic differentiation, the conditional that
    skips a chunk would return everything that its backward pass needs, the head included. The loop
    would stack this over all chunks, with a copy of the head for each of them. At a vocabulary of
    152,000 this took a gigabyte for 512 tokens.

    The forward pass stores d log p / d h. So the backward pass needs no product if the head is
    frozen. If the head is trained, it computes the logits again for the gradient of the table.
    """
    whole_table = _gather_table(table, hidden.dtype, mode.table_axes)
    chunk_scores = _scan_chunks(mode, whole_table, (hidden, targets, mask), with_gradient=False)
    return chunk_scores.log_probs, chunk_scores.log_normalizers


def _gather_table(
    table: Float[Array, "vocab part"], dtype: DTypeLike, table_axes: tuple[str, ...]
) -> Float[Array, "vocab hidden"]:
    """Return the whole head in `dtype`, gathered from the devices that store its parts."""
    # Cast before gathering: bfloat16 moves half as many bytes as float32.
    narrow = table.astype(dtype)
    return jax.lax.all_gather(narrow, table_axes, axis=1, tiled=True) if table_axes else narrow


def _scan_chunks(
    mode: Mode,
    whole_table: Float[Array, "vocab hidden"],
    chunks: tuple[Array, Array, Array],
    *,
    with_gradient: bool,
) -> _ChunkScores:
    """Return the scores of all chunks.

    `chunks` are the hidden states [chunks, rows, chunk, hidden], the targets and the mask, both
    [chunks, rows, chunk]. With `with_gradient` the scores include d log p / d hidden.
    """

    def score_chunk(chunk: tuple[Array, Array, Array]) -> _ChunkScores:
        hidden, targets, mask = chunk

        def score() -> _ChunkScores:
            logits = scores(whole_table, hidden)
            target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            normalizers = jax.nn.logsumexp(logits, axis=-1)
            by_hidden = None
            if with_gradient:
                by_logits = _log_prob_by_logits(logits, targets).astype(whole_table.dtype)
                by_hidden = (by_logits @ whole_table).reshape(hidden.shape)
            return _ChunkScores(
                log_probs=target_logits - normalizers,
                log_normalizers=normalizers if mode.normalized else None,
                log_prob_by_hidden=by_hidden,
            )

        def skip() -> _ChunkScores:
            zeros = jnp.zeros(targets.shape, jnp.float32)
            return _ChunkScores(
                log_probs=zeros,
                log_normalizers=zeros if mode.normalized else None,
                log_prob_by_hidden=jnp.zeros_like(hidden) if with_gradient else None,
            )

        return jax.lax.cond(mask.any(), score, skip)

    return jax.lax.map(score_chunk, chunks)


def _log_prob_by_logits(
    logits: Float[Array, "rows chunk vocab"], targets: Int[Array, "rows chunk"]
) -> Float[Array, "positions vocab"]:
    """Return d log p[target] / d logits = onehot(target) - softmax(logits)."""
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    return (is_target - jax.nn.softmax(logits, axis=-1)).reshape(-1, logits.shape[-1])


def _sum_to_parts(
    table_gradient: Float[Array, "vocab hidden"], table_axes: tuple[str, ...]
) -> Float[Array, "vocab part"]:
    """Sum the gradient of the table over devices, and return this device's part of the columns.

    On CPU each device first computes the whole sum and then cuts out its part. The direct way would
    be reduce-scatter. Between processes on CPU, XLA runs it with gloo, which occasionally gives the
    first process wrong numbers for parts of some megabytes (jax-ml/jax#40830).
    """
    if not table_axes:
        return table_gradient

    def scatter_sum(table_gradient: Array) -> Array:
        return jax.lax.psum_scatter(table_gradient, table_axes, scatter_dimension=1, tiled=True)

    def cut_whole_sum(table_gradient: Array) -> Array:
        width = table_gradient.shape[1] // jax.lax.axis_size(table_axes)
        whole_sum = jax.lax.psum(table_gradient, table_axes)
        start = jax.lax.axis_index(table_axes) * width
        return jax.lax.dynamic_slice_in_dim(whole_sum, start, width, axis=1)

    return jax.lax.platform_dependent(table_gradient, cpu=cut_whole_sum, default=scatter_sum)


def _scores_and_residuals(
    mode: Mode,
    table: CustomVJPPrimal,
    hidden: CustomVJPPrimal,
    targets: CustomVJPPrimal,
    mask: CustomVJPPrimal,
) -> tuple[tuple[Array, Array | None], _Residuals]:
    """Return the scores of all chunks, and the residuals for the backward pass.

    This is the forward pass of `_score_chunks` under differentiation.
    """
    whole_table = _gather_table(table.value, hidden.value.dtype, mode.table_axes)

    chunk_scores = _scan_chunks(
        mode, whole_table, (hidden.value, targets.value, mask.value), with_gradient=True
    )
    residuals = _Residuals(
        table=table.value if table.perturbed else None,
        whole_table=whole_table,
        log_prob_by_hidden=chunk_scores.log_prob_by_hidden,  # pyright: ignore[reportArgumentType]
        hidden=hidden.value,
        targets=targets.value,
        mask=mask.value,
    )
    return (chunk_scores.log_probs, chunk_scores.log_normalizers), residuals


def _gradients_of_scores(
    mode: Mode, residuals: _Residuals, upstream: tuple[Any, Any]
) -> tuple[Array | None, ...]:
    """Return the gradients of the table, the hidden states, the targets and the mask.

    This is the backward pass of `_score_chunks`, and `upstream` holds u and v of its formulas. The
    gradient is None for targets and mask, and for a frozen table.
    """
    log_prob_weights = _with_zeros(upstream[0])
    normalizer_weights = _with_zeros(upstream[1])

    by_hidden = residuals.log_prob_by_hidden
    hidden_gradient = log_prob_weights[..., None] * by_hidden
    if mode.normalized:
        hidden_gradient += normalizer_weights[..., None] * (
            residuals.whole_table[residuals.targets] - by_hidden
        )

    table_gradient = None
    if residuals.table is not None:
        table_gradient = _table_gradient(mode, residuals, log_prob_weights, normalizer_weights)
        # The backward pass of the layers needs only the gradient of the hidden states. The barrier
        # makes it wait for the gradient of the table. Otherwise a compiler may keep the whole head
        # in memory until the layers are done.
        table_gradient, hidden_gradient = jax.lax.optimization_barrier(
            (table_gradient, hidden_gradient)
        )
        table_gradient = _sum_to_parts(table_gradient, mode.table_axes)
        table_gradient = table_gradient.astype(residuals.table.dtype)

    return table_gradient, hidden_gradient.astype(residuals.hidden.dtype), None, None


def _with_zeros(upstream: Any) -> Any:
    """Return an upstream gradient as an array: zeros if the loss does not use that result."""
    if isinstance(upstream, SymbolicZero):
        return jnp.zeros(upstream.shape, jnp.float32)
    return upstream


def _table_gradient(
    mode: Mode,
    residuals: _Residuals,
    log_prob_weights: Float[Array, "chunks rows chunk"],
    normalizer_weights: Float[Array, "chunks rows chunk"] | None,
) -> Float[Array, "vocab hidden"]:
    """Return the gradient of the whole table over the rows of this device, in float32.

    The function computes the logits of each chunk again. For each position it adds
    (u (d log p / d z) + v softmax(z)) h^T, as in `_score_chunks`. `log_prob_weights` are u and
    `normalizer_weights` are v.
    """
    whole_table = residuals.whole_table

    def add_chunk(table_gradient: Array, chunk: Any) -> tuple[Array, None]:
        hidden, targets, mask, log_prob_weights, normalizer_weights = chunk

        def add(table_gradient: Array) -> Array:
            logits = scores(whole_table, hidden)
            by_logits = _log_prob_by_logits(logits, targets) * log_prob_weights.reshape(-1, 1)
            if mode.normalized:
                by_normalizers = jax.nn.softmax(logits, axis=-1) * normalizer_weights[..., None]
                by_logits += by_normalizers.reshape(by_logits.shape)
            return table_gradient + jnp.matmul(
                by_logits.astype(hidden.dtype).T,
                hidden.reshape(-1, hidden.shape[-1]),
                preferred_element_type=table_gradient.dtype,
            )

        def skip(table_gradient: Array) -> Array:
            return table_gradient

        return jax.lax.cond(mask.any(), add, skip, table_gradient), None

    chunks = (
        residuals.hidden,
        residuals.targets,
        residuals.mask,
        log_prob_weights,
        normalizer_weights,
    )
    table_gradient, _ = jax.lax.scan(add_chunk, jnp.zeros_like(whole_table, jnp.float32), chunks)
    return table_gradient


_score_chunks.defvjp(_scores_and_residuals, _gradients_of_scores, symbolic_zeros=True)
