"""Maximum likelihood: log-probabilities, gradients and the z-loss, compared with the whole logits."""

import dataclasses
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mujica_jax import kernels
from mujica_jax.learning import log_probs
from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.packing import Batch, pack
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.decoder import Decoder
from tests.helpers.packed_rows import MODEL, random_conversations, tiny_decoder

# p(next | current), one row for each current token.
BIGRAMS = np.array(
    [
        [1 / 2, 1 / 4, 1 / 8, 1 / 8],
        [1 / 8, 1 / 8, 1 / 4, 1 / 2],
        [1 / 4, 1 / 4, 1 / 4, 1 / 4],
        [1 / 8, 1 / 2, 1 / 4, 1 / 8],
    ]
)
BY_HAND = Batch(
    tokens=jnp.array([[0, 1, 2, 0], [3, 1, 0, 1]]),
    segment_ids=jnp.array([[1, 1, 1, 0], [1, 1, 2, 2]]),
    positions=jnp.array([[0, 1, 2, 0], [0, 1, 0, 1]]),
    loss_mask=jnp.array([[False, False, True, False], [False, True, False, True]]),
)
CONVERSATIONS = random_conversations(12)
SEQUENCE_LENGTH = 32


@pytest.fixture(scope="module")
def bigram_model() -> Decoder:
    """Return a decoder whose layers add nothing.

    Its logits depend on the current token alone, up to a constant of 3.
    """
    size = len(BIGRAMS)
    config = dataclasses.replace(
        MODEL,
        vocab_size=size,
        hidden_size=size,
        num_layers=1,
        rms_norm_eps=1e-30,
        tie_word_embeddings=False,
    )
    decoder = tiny_decoder(config)
    decoder.layers.output_kernel[...] = jnp.zeros_like(decoder.layers.output_kernel[...])
    decoder.layers.down_kernel[...] = jnp.zeros_like(decoder.layers.down_kernel[...])
    decoder.embedding[...] = jnp.eye(size)
    decoder.final_norm[...] = jnp.full(
        (size,), 1 / math.sqrt(size)
    )  # the norm of a unit vector has length sqrt(size)
    decoder.head[...] = jnp.asarray(np.log(BIGRAMS.T) + 3.0, jnp.float32)
    return decoder


@pytest.fixture(scope="module")
def batch() -> Batch:
    return pack(CONVERSATIONS, sequence_length=SEQUENCE_LENGTH, seed=0).batch(slice(None))


class Numbers(NamedTuple):
    log_probs: Array
    loss: Array
    counts: dict[str, Array]
    gradient: nnx.State


def compute(graph: nnx.GraphDef, params: nnx.State, batch: Batch) -> Numbers:
    loss, gradient = jax.value_and_grad(lambda p: MLE()(nnx.merge(graph, p), batch)[0])(params)
    return Numbers(
        token_log_probs(nnx.merge(graph, params), batch), loss, MLE().counts(batch), gradient
    )


# Compiling takes nearly all of this file's time: half of it without the backend's optimisations.
QUICKLY = {"static_argnums": 0, "compiler_options": {"xla_backend_optimization_level": 0}}
compiled = jax.jit(compute, **QUICKLY)


def numbers(decoder: Decoder, batch: Batch) -> Numbers:
    return compiled(*nnx.split(decoder), batch)


def numbers_compiled_again(decoder: Decoder, batch: Batch) -> Numbers:
    """Compute the numbers under constants that a test has changed."""
    return jax.jit(lambda *arguments: compute(*arguments), **QUICKLY)(*nnx.split(decoder), batch)


def assert_close(ours: Numbers, expected: Numbers, tolerance: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), ours, expected)


def test_log_probabilities_of_the_batch_worked_by_hand(bigram_model):
    expected = np.log([[1, 1 / 4, 1 / 4, 1], [1, 1 / 2, 1, 1 / 4]])  # 1 where nothing is predicted
    np.testing.assert_allclose(numbers(bigram_model, BY_HAND).log_probs, expected, atol=1e-6)


def test_the_loss_of_the_batch_worked_by_hand(bigram_model):
    _, loss, counts, _ = numbers(bigram_model, BY_HAND)
    # p(2 | 1) = 1/4 in the first row; p(1 | 3) = 1/2 and p(1 | 0) = 1/4 in the second: 2 + 1 + 2
    # bits over 3 tokens
    assert float(loss) == pytest.approx(5 / 3 * math.log(2), abs=1e-6)
    assert int(counts["trained_tokens"]) == 3


def test_the_z_loss_of_the_batch_worked_by_hand(bigram_model):
    # The head's rows are log p + 3, so that every logit vector has the log-normaliser 3: 9 z_loss
    # more, over any number of tokens.
    graph, params = nnx.split(bigram_model)
    loss, _ = jax.jit(lambda params: MLE(z_loss=0.1)(nnx.merge(graph, params), BY_HAND))(params)
    assert float(loss) == pytest.approx(5 / 3 * math.log(2) + 0.1 * 9, abs=1e-5)


def test_the_gradient_of_the_z_loss_is_that_of_its_formula(decoder, batch, monkeypatch):
    """The expected gradient is automatic differentiation of the whole logits.

    Chunks are two positions a row, so that some hold trained tokens and some none.
    """
    monkeypatch.setattr(kernels, "rows_per_product", lambda: 2 * len(batch.tokens))
    graph, params = nnx.split(decoder)

    def plain(params: nnx.State, batch: Batch) -> Array:
        model = nnx.merge(graph, params)
        logits = model.logits(
            model(batch.tokens, batch.positions, causal_self_attention(batch.segment_ids))
        )[:, :-1]
        normalizers = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
        log_probs = (
            jnp.take_along_axis(logits, batch.tokens[:, 1:, None], axis=-1)[..., 0] - normalizers
        )
        losses = -log_probs + 0.3 * normalizers**2
        return jnp.sum(losses * batch.loss_mask[:, 1:]) / jnp.sum(batch.loss_mask)

    def ours(params: nnx.State, batch: Batch) -> Array:
        return MLE(z_loss=0.3)(nnx.merge(graph, params), batch)[0]

    options = QUICKLY["compiler_options"]
    expected = jax.jit(jax.value_and_grad(plain), compiler_options=options)(params, batch)
    result = jax.jit(jax.value_and_grad(ours), compiler_options=options)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), result, expected)


def test_log_probabilities_are_those_of_the_whole_logits(decoder, batch):
    @jax.jit
    def whole_logits(batch: Batch) -> Array:
        return decoder.logits(
            decoder(batch.tokens, batch.positions, causal_self_attention(batch.segment_ids))
        )

    logits = np.asarray(whole_logits(batch), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.zeros(batch.tokens.shape)
    for row, time in np.argwhere(batch.positions > 0):
        expected[row, time] = log_probs[row, time - 1, batch.tokens[row, time]]
    np.testing.assert_allclose(numbers(decoder, batch).log_probs, expected, atol=1e-5)


def test_packed_equals_unpacked(decoder):
    rows = pack(CONVERSATIONS, sequence_length=SEQUENCE_LENGTH, seed=0)
    alone = [
        pack([conversation], sequence_length=SEQUENCE_LENGTH, seed=0).batch(slice(None))
        for conversation in CONVERSATIONS
    ]
    packed = numbers(decoder, rows.batch(slice(None)))
    unpacked = numbers(decoder, jax.tree.map(lambda *arrays: np.concatenate(arrays), *alone))
    for index, (row, start) in enumerate(rows.placements):
        tokens = len(CONVERSATIONS[index].token_ids)
        in_its_row = packed.log_probs[row, start : start + tokens]
        np.testing.assert_allclose(in_its_row, unpacked.log_probs[index, :tokens], atol=1e-5)
    assert rows.num_rows < len(CONVERSATIONS)
    assert_close(packed._replace(log_probs=unpacked.log_probs), unpacked)


@pytest.mark.parametrize("positions", [40, 10_000])
def test_the_size_of_the_chunks_changes_nothing(decoder, batch, positions, monkeypatch):
    monkeypatch.setattr(kernels, "rows_per_product", lambda: positions)
    assert_close(numbers_compiled_again(decoder, batch), numbers(decoder, batch))


def test_the_gradient_is_that_of_the_whole_logits(decoder, batch, monkeypatch):
    """Chunks are two positions a row, so that some hold trained tokens and some none."""
    monkeypatch.setattr(kernels, "rows_per_product", lambda: 2 * len(batch.tokens))
    graph, params = nnx.split(decoder)

    def whole(params: nnx.State, batch: Batch) -> Array:
        model = nnx.merge(graph, params)
        logits = model.logits(
            model(batch.tokens, batch.positions, causal_self_attention(batch.segment_ids))
        )
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        chosen = jnp.take_along_axis(log_probs, batch.tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(chosen * batch.loss_mask[:, 1:]) / jnp.sum(batch.loss_mask)

    expected = jax.jit(jax.grad(whole), compiler_options=QUICKLY["compiler_options"])(params, batch)
    assert_close(numbers_compiled_again(decoder, batch).gradient, expected)


def test_a_frozen_head_has_its_logits_once_and_gives_the_same_gradient(decoder, batch):
    """With adapters, only weights in the layers are trained.

    A trained head computes its logits again, and the product of its gradient.
    """
    graph, head, others = nnx.split(decoder, nnx.PathContains("embedding"), ...)
    vocabulary = rf"\b{decoder.config.vocab_size}\b.*= dot_general"

    def loss(others: nnx.State, head: nnx.State, z_loss: float = 0.0) -> Array:
        return MLE(z_loss=z_loss)(nnx.merge(graph, head, others), batch)[0]

    frozen_head = jax.grad(loss, argnums=0)
    trained_head = jax.grad(loss, argnums=(0, 1))
    trained_head_with_z_loss = jax.grad(functools.partial(loss, z_loss=0.1), argnums=(0, 1))

    options = QUICKLY["compiler_options"]
    gradient = jax.jit(frozen_head, compiler_options=options)(others, head)
    expected, _ = jax.jit(trained_head, compiler_options=options)(others, head)
    assert_close(gradient, expected)

    def products_with_the_head(function: Callable) -> int:
        return len(re.findall(vocabulary, str(jax.make_jaxpr(function)(others, head))))

    assert products_with_the_head(frozen_head) == 1
    assert products_with_the_head(trained_head) == 3
    assert products_with_the_head(trained_head_with_z_loss) == 3


def test_devices_without_a_trained_token_have_their_part_of_the_gradient():
    """The head is split over the devices."""
    program = """
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 4)

from mujica_jax.learning.log_probs import Mode, _target_scores
from mujica_jax.models.sharding import make_mesh

draw = np.random.default_rng(0)
head = draw.normal(size=(64, 32)).astype(np.float32)
hidden = draw.normal(size=(4, 16, 32)).astype(np.float32)
targets = draw.integers(0, 64, (4, 16))
wanted = np.zeros((4, 16), bool)
wanted[0, 3:9] = True
wanted[1, 2] = True


def total(head, hidden, mode):
    log_probs = _target_scores(head, hidden, targets, jnp.asarray(wanted), mode)[0]
    return -0.3 * log_probs.sum()


gradient = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2)
expected = gradient(head, hidden, Mode(False))
for data, fsdp in ((1, 4), (2, 2), (4, 1)):
    with jax.set_mesh(make_mesh(data, fsdp, 1)):
        result = gradient(head, hidden, Mode(False))
    assert all(np.allclose(*pair, atol=1e-6) for pair in zip(result, expected)), (data, fsdp)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("platform", "collective"), [("cpu", "all_reduce"), ("cuda", "reduce_scatter")]
)
def test_gloo_scatters_no_sum_of_the_heads_gradient(platform, collective):
    """Gloo's reduce-scatter sometimes gives the first process wrong sums.

    Accelerators keep it because it moves half as much.
    """
    whole = PartitionSpec()
    split = PartitionSpec(None, "fsdp")
    mesh = AbstractMesh((2,), ("fsdp",))
    values = jax.ShapeDtypeStruct((3, 8), jnp.float32, sharding=NamedSharding(mesh, whole))
    summed = functools.partial(log_probs._sum_to_parts, table_axes=("fsdp",))
    summed = jax.shard_map(summed, mesh=mesh, in_specs=whole, out_specs=split, check_vma=False)
    lowered = jax.jit(summed).trace(values).lower(lowering_platforms=(platform,)).as_text()
    assert re.findall("all_reduce|reduce_scatter", lowered) == [collective]


def test_a_loss_may_leave_the_normalizers_out(decoder, batch):
    def gradient(**options: bool) -> nnx.State:
        def total(decoder: Decoder) -> Array:
            return 0.3 * log_probs.token_scores(decoder, batch, None, **options).log_probs.sum()

        return nnx.jit(nnx.grad(total))(decoder)

    expected = gradient(normalized=False)
    assert_close(gradient(normalized=True), expected)


def test_a_deep_model_scans_to_the_same_numbers(decoder, batch, monkeypatch):
    monkeypatch.setattr(log_probs, "UNROLLED_LAYERS", 0)
    assert_close(numbers_compiled_again(decoder, batch), numbers(decoder, batch))


def test_only_wanted_tokens_are_scored(decoder, batch):
    wanted = jnp.asarray(batch.loss_mask & (batch.positions > 5))
    expected = np.where(wanted, numbers(decoder, batch).log_probs, 0.0)
    scored = jax.jit(lambda batch: token_log_probs(decoder, batch, wanted))(batch)
    np.testing.assert_allclose(scored, expected, atol=1e-6)


def test_logits_before_untrained_targets_get_no_gradient(bigram_model):
    # Token 2 stands only before padding, token 0 before an untrained 1 (first row) and a trained 1
    # (second row).
    by_logit = np.asarray(numbers(bigram_model, BY_HAND).gradient["head"][...]).T  # current, next
    assert np.all(by_logit[2] == 0.0)
    # of -log p(1 | 0) / 3 by the logits after 0: (p - one-hot) / 3, once, though the pair stands
    # there twice
    np.testing.assert_allclose(by_logit[0], (BIGRAMS[0] - np.eye(4)[1]) / 3, atol=1e-6)


def test_a_target_that_is_not_trained_changes_nothing(decoder, batch):
    last_of_row = np.sum(batch.segment_ids > 0, axis=1) - 1
    rows = np.arange(len(last_of_row))
    mask = batch.loss_mask.copy()
    tokens = batch.tokens.copy()
    mask[rows, last_of_row] = False
    tokens[rows, last_of_row] = (tokens[rows, last_of_row] + 1) % MODEL.vocab_size
    before = numbers(decoder, batch._replace(loss_mask=mask))
    after = numbers(decoder, batch._replace(loss_mask=mask, tokens=tokens))
    assert float(after.loss) == float(before.loss)
    assert_close(after._replace(log_probs=before.log_probs), before, tolerance=0.0)


def test_a_batch_without_trained_tokens_has_loss_and_gradient_zero(decoder, batch):
    _, loss, counts, gradient = numbers(
        decoder, batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    )
    assert float(loss) == 0.0
    assert int(counts["trained_tokens"]) == 0
    assert all(np.all(np.asarray(leaf) == 0.0) for leaf in jax.tree.leaves(gradient))


def test_no_more_logits_than_a_chunk_exist_at_a_time(batch):
    config = dataclasses.replace(MODEL, vocab_size=9973)
    rows = 16
    time = 256
    shape = jax.ShapeDtypeStruct((rows, time), jnp.int32)
    whole = Batch(shape, shape, shape, jax.ShapeDtypeStruct((rows, time), bool))
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def loss_of(params: nnx.State, batch: Batch) -> Array:
        return MLE()(nnx.merge(graph, params), batch)[0]

    program = str(jax.make_jaxpr(jax.grad(loss_of))(params, whole))
    with_vocab = [
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"f32\[((?:\d+,)*9973)\]", program)
    ]
    assert with_vocab, "the program holds logits under the name this test looks for"
    assert max(with_vocab) == kernels.rows_per_product() * 9973
    heads = re.findall(rf"\[((?:\d+,)*9973,{MODEL.hidden_size})\]", program)
    assert set(heads) == {f"9973,{MODEL.hidden_size}"}, (
        "a head for every chunk would fill the memory"
    )
