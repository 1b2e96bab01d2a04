import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed_rows import MODEL, random_conversations

from mujica_jax.learning import losses
from mujica_jax.learning.losses import mle_loss, token_log_probs
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.layers import causal_self_attention
from mujica_jax.trajectories.packing import Batch, pack

# p(next | current), one row for each current token.
BIGRAMS = np.array(
    [[1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 8, 1 / 8, 1 / 4, 1 / 2], [1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 8, 1 / 2, 1 / 4, 1 / 8]]
)
BY_HAND = Batch(
    tokens=jnp.array([[0, 1, 2, 0], [3, 1, 0, 1]]),
    segment_ids=jnp.array([[1, 1, 1, 0], [1, 1, 2, 2]]),
    positions=jnp.array([[0, 1, 2, 0], [0, 1, 0, 1]]),
    loss_mask=jnp.array([[False, False, True, False], [False, True, False, True]]),
)


@pytest.fixture(scope="module")
def bigram_model() -> Decoder:
    """A decoder whose layers add nothing, so that logits depend on the current token alone, up to a constant of 3."""
    size = len(BIGRAMS)
    config = dataclasses.replace(
        MODEL, vocab_size=size, hidden_size=size, num_layers=1, rms_norm_eps=1e-30, tie_word_embeddings=False
    )
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    decoder.layers.output_kernel[...] = jnp.zeros_like(decoder.layers.output_kernel[...])
    decoder.layers.down_kernel[...] = jnp.zeros_like(decoder.layers.down_kernel[...])
    decoder.embedding[...] = jnp.eye(size)
    decoder.final_norm[...] = jnp.full((size,), 1 / math.sqrt(size))  # the norm of a unit vector has length sqrt(size)
    decoder.head[...] = jnp.asarray(np.log(BIGRAMS.T) + 3.0, jnp.float32)
    return decoder


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(MODEL, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return jax.tree.map(jnp.asarray, pack(random_conversations(20), row_tokens=32, seed=0).batch(slice(None)))


def gradient(decoder: Decoder, batch: Batch) -> nnx.State:
    graph, params = nnx.split(decoder)
    return jax.grad(lambda params: mle_loss(nnx.merge(graph, params), batch)[0])(params)


def test_log_probabilities_of_the_batch_worked_by_hand(bigram_model):
    expected = np.log([[1, 1 / 4, 1 / 4, 1], [1, 1 / 2, 1, 1 / 4]])  # 1 where nothing is predicted
    np.testing.assert_allclose(token_log_probs(bigram_model, BY_HAND), expected, atol=1e-6)


def test_the_loss_of_the_batch_worked_by_hand(bigram_model):
    loss, metrics = mle_loss(bigram_model, BY_HAND)
    # p(2 | 1) = 1/4 in the first row; p(1 | 3) = 1/2 and p(1 | 0) = 1/4 in the second: 2 + 1 + 2 bits over 3 tokens
    assert float(loss) == pytest.approx(5 / 3 * math.log(2), abs=1e-6)
    assert float(metrics["loss"]) == float(loss)
    assert int(metrics["trained_tokens"]) == 3


def test_log_probabilities_are_those_of_the_whole_logits(decoder, batch):
    hidden = decoder(batch.tokens, batch.positions, causal_self_attention(batch.segment_ids))
    logits = np.asarray(decoder.logits(hidden), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.zeros(batch.tokens.shape)
    for row, time in np.argwhere(np.asarray(batch.positions) > 0):
        expected[row, time] = log_probs[row, time - 1, batch.tokens[row, time]]
    np.testing.assert_allclose(token_log_probs(decoder, batch), expected, atol=1e-5)


def test_packed_equals_unpacked(decoder):
    conversations = random_conversations(20)
    packed = pack(conversations, row_tokens=64, seed=0)
    together, _ = mle_loss(decoder, jax.tree.map(jnp.asarray, packed.batch(slice(None))))
    alone, trained_tokens = 0.0, 0
    log_prob = jax.jit(lambda batch: mle_loss(decoder, batch))
    for one in conversations:
        loss, metrics = log_prob(pack([one], row_tokens=32, seed=0).batch(slice(None)))
        alone += float(loss) * int(metrics["trained_tokens"])
        trained_tokens += int(metrics["trained_tokens"])
    assert float(together) == pytest.approx(alone / trained_tokens, abs=1e-5)


@pytest.mark.parametrize("positions", [1, 7 * 8, 10_000])
def test_the_size_of_the_chunks_changes_nothing(decoder, batch, positions, monkeypatch):
    expected, by_parameter = token_log_probs(decoder, batch), gradient(decoder, batch)
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", positions)
    np.testing.assert_allclose(token_log_probs(decoder, batch), expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient(decoder, batch), by_parameter)


def test_a_deep_model_scans_to_the_same_numbers(decoder, batch, monkeypatch):
    loss, by_parameter = mle_loss(decoder, batch)[0], gradient(decoder, batch)
    monkeypatch.setattr(losses, "UNROLLED_LAYERS", 0)
    assert float(mle_loss(decoder, batch)[0]) == pytest.approx(float(loss), abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient(decoder, batch), by_parameter)


def test_only_wanted_tokens_are_scored(decoder, batch):
    wanted = batch.loss_mask & (batch.positions > 5)
    expected = np.where(wanted, token_log_probs(decoder, batch), 0.0)
    np.testing.assert_allclose(token_log_probs(decoder, batch, wanted), expected, atol=1e-6)


def test_logits_before_untrained_targets_get_no_gradient(bigram_model):
    # Token 2 stands only before padding, token 0 before an untrained 1 (first row) and a trained 1 (second row).
    by_logit = np.asarray(gradient(bigram_model, BY_HAND)["head"][...]).T  # current, next
    assert np.all(by_logit[2] == 0.0)
    # of -log p(1 | 0) / 3 by the logits after 0: (p - one-hot) / 3, once, though the pair stands there twice
    np.testing.assert_allclose(by_logit[0], (BIGRAMS[0] - np.eye(4)[1]) / 3, atol=1e-6)


def test_a_target_that_is_not_trained_changes_nothing(decoder, batch):
    last_of_row = jnp.sum(batch.segment_ids > 0, axis=1) - 1
    rows = jnp.arange(len(last_of_row))
    untrained = batch._replace(loss_mask=batch.loss_mask.at[rows, last_of_row].set(False))
    changed = untrained._replace(tokens=batch.tokens.at[rows, last_of_row].add(1) % MODEL.vocab_size)
    assert float(mle_loss(decoder, changed)[0]) == float(mle_loss(decoder, untrained)[0])


def test_a_batch_without_trained_tokens_has_loss_and_gradient_zero(decoder, batch):
    nothing = batch._replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    loss, metrics = mle_loss(decoder, nothing)
    assert float(loss) == 0.0
    assert int(metrics["trained_tokens"]) == 0
    assert all(np.all(np.asarray(leaf) == 0.0) for leaf in jax.tree.leaves(gradient(decoder, nothing)))


def test_no_more_logits_than_a_chunk_exist_at_a_time(batch):
    config = dataclasses.replace(MODEL, vocab_size=9973)
    rows, time = 16, 256
    shape = jax.ShapeDtypeStruct((rows, time), jnp.int32)
    whole = Batch(shape, shape, shape, jax.ShapeDtypeStruct((rows, time), bool))
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    loss_of = lambda params, batch: mle_loss(nnx.merge(graph, params), batch)[0]  # noqa: E731
    program = str(jax.make_jaxpr(jax.grad(loss_of))(params, whole))
    with_vocab = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[((?:\d+,)*9973)\]", program)]
    assert with_vocab, "the program holds logits under the name this test looks for"
    assert max(with_vocab) == losses.CHUNK_POSITIONS * 9973
