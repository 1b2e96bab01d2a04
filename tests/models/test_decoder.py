"""Facts about the decoder that hold for any weights; that the mathematics is the right one is shown
in `parity/`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mujica_jax.models.attention import causal_self_attention, segment_attention
from mujica_jax.models.decoder import Decoder, unstacked
from mujica_jax.models.families import DecoderConfig, Llama3RopeScaling, to_hugging_face
from mujica_jax.models.layers import (
    OutputMajor,
    output_major_product,
    projections,
)
from tests.helpers.tiny_models import filled_decoder

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=100.0,
    rope_scaling=Llama3RopeScaling(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=128,
    eos_token_ids=(0,),
    bos_token_id=None,
    initializer_range=0.2,
)
PROJECTIONS = [weight.name for weight in projections(CONFIG)]
# Everything but the ones in the second table changes what the network computes.
PERTURBED = {
    "family": "qwen3",
    "vocab_size": 65,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 6,
    "rope_theta": 200.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-1,
    "tie_word_embeddings": False,
}
RECORDED = {
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
    "eos_token_ids": (1,),
    "bos_token_id": 2,
}
SCALING_PERTURBED = {
    "factor": 8.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 32,
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 20)))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return filled_decoder(CONFIG)


@pytest.fixture(scope="module")
def logits() -> jax.Array:
    return _fresh_logits(CONFIG)


def _fresh_logits(config: DecoderConfig) -> jax.Array:
    graph, state = nnx.split(filled_decoder(config))
    return jax.jit(lambda state: _logits(nnx.merge(graph, state)))(state)


def _logits(decoder, tokens=TOKENS, segment_ids=None, positions=None, **options):
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    return decoder.logits(decoder(tokens, positions, causal_self_attention(segment_ids), **options))


_compiled_logits = nnx.jit(_logits, static_argnames=("scan", "remat"))


def test_the_tables_of_perturbations_cover_every_field():
    assert PERTURBED.keys() | RECORDED.keys() == {
        field.name for field in dataclasses.fields(DecoderConfig)
    }
    assert SCALING_PERTURBED.keys() == {
        field.name for field in dataclasses.fields(Llama3RopeScaling)
    }


@pytest.mark.parametrize("name", PERTURBED)
def test_every_field_changes_the_logits(logits, name):
    other = _fresh_logits(dataclasses.replace(CONFIG, **{name: PERTURBED[name]}))
    assert other.shape != logits.shape or jnp.abs(other - logits).max() > 1e-3


@pytest.mark.parametrize("name", SCALING_PERTURBED)
def test_every_field_of_rope_scaling_changes_the_logits(logits, name):
    scaling = dataclasses.replace(CONFIG.rope_scaling, **{name: SCALING_PERTURBED[name]})
    other = _fresh_logits(dataclasses.replace(CONFIG, rope_scaling=scaling))
    assert jnp.abs(other - logits).max() > 1e-4


@pytest.mark.parametrize("name", RECORDED)
def test_every_other_field_is_written_to_the_checkpoint(name):
    assert to_hugging_face(
        dataclasses.replace(CONFIG, **{name: RECORDED[name]})
    ) != to_hugging_face(CONFIG)


def test_fresh_matrices_have_the_configured_deviation_and_norms_are_one():
    fresh = Decoder(dataclasses.replace(CONFIG, family="qwen2"), rngs=nnx.Rngs(0))
    for weights in (
        fresh.embedding[...],
        fresh.layers.gate_kernel[...],
        fresh.layers.output_kernel[...],
    ):
        assert abs(weights.std() - CONFIG.initializer_range) < 0.1 * CONFIG.initializer_range
        assert abs(weights.mean()) < 0.1 * CONFIG.initializer_range
    assert (fresh.final_norm[...] == 1).all()
    assert (fresh.layers.mlp_norm[...] == 1).all()
    assert (fresh.layers.query_bias[...] == 0).all()
    assert not (fresh.layers.gate_kernel[0] == fresh.layers.gate_kernel[1]).all(), (
        "layers must not start alike"
    )


def test_scan_and_loop_give_the_same_logits(decoder):
    looped, scanned = (_compiled_logits(decoder, scan=scan) for scan in (False, True))
    np.testing.assert_allclose(looped, scanned, atol=2e-5)


@pytest.mark.parametrize(("output_major", "tolerance"), [((), 0.0), (PROJECTIONS, 2e-5)])
def test_arrays_a_layer_give_the_loops_logits(decoder, output_major, tolerance):
    graph, weights = nnx.split(decoder)
    layers = unstacked(weights, decoder.config, output_major=frozenset(output_major))
    kernels = jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, OutputMajor))
    assert sum(isinstance(leaf, OutputMajor) for leaf in kernels) == len(output_major)
    apart = nnx.merge(graph, layers)
    looped, of_layers = (_compiled_logits(model, scan=False) for model in (decoder, apart))
    np.testing.assert_allclose(looped, of_layers, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rows", [3, 64, 65])
def test_a_product_by_output_major_weights_is_the_same_with_few_rows_and_many(rows):
    rows, weights = (
        jax.random.normal(jax.random.key(seed), shape)
        for seed, shape in enumerate([(rows, 24), (96, 24)])
    )
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 1e-5)):
        few = rows.astype(dtype)
        matrix = weights.astype(dtype)
        product = jax.jit(output_major_product)(few, matrix)
        expected = np.asarray(few, np.float64) @ np.asarray(matrix, np.float64).T
        assert product.dtype == jnp.float32
        np.testing.assert_allclose(product, expected, atol=tolerance)
        gradients = jax.grad(
            lambda few, matrix: output_major_product(few, matrix).sum(), argnums=(0, 1)
        )(few, matrix)
        wide = (np.asarray(matrix, np.float64).sum(0), np.asarray(few, np.float64).sum(0))
        for gradient, row in zip(gradients, wide, strict=True):
            np.testing.assert_allclose(
                gradient, np.broadcast_to(row, gradient.shape), rtol=0.01, atol=0.05
            )


def test_the_loop_names_layers_by_python_integers(decoder):
    calls = []

    def attend(layer_index, query, key, value):
        calls.append((layer_index, query.shape, key.shape, value.shape))
        return query

    decoder(TOKENS, jnp.zeros_like(TOKENS), attend, scan=False)
    assert calls == [(index, (2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8)) for index in (0, 1)]


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("scan", [True, False])
def test_recomputing_layers_leaves_the_gradient_alone(decoder, scan, remat):
    def gradient(**options):
        return nnx.jit(nnx.grad(lambda decoder: jnp.square(_logits(decoder, **options)).mean()))(
            decoder
        )

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        gradient(scan=True),
        gradient(scan=scan, remat=remat),
    )


def test_less_is_kept_the_more_is_recomputed(decoder):
    """A layer keeps all activations, only the products with weights, or only its input."""

    def numbers_kept(remat) -> int:
        def loss(decoder):
            return jnp.square(_logits(decoder, scan=True, remat=remat)).mean()

        _, backward = jax.vjp(loss, decoder)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    assert numbers_kept("none") > numbers_kept("dots") > numbers_kept("full")


def test_packed_rows_equal_separate_rows(decoder):
    """One row holds two sequences of 12 and 8 tokens, with padding at its end."""
    packed = jnp.concatenate(
        [TOKENS[:1, :12], TOKENS[1:, :8], jnp.zeros((1, 4), jnp.int32)], axis=1
    )
    segment_ids = jnp.asarray([[1] * 12 + [2] * 8 + [0] * 4])
    positions = jnp.asarray([[*range(12), *range(8), *[0] * 4]])
    logits = _compiled_logits(decoder, packed, segment_ids, positions)
    np.testing.assert_allclose(
        logits[0, :12], _compiled_logits(decoder, TOKENS[:1, :12])[0], atol=1e-5
    )
    np.testing.assert_allclose(
        logits[0, 12:20], _compiled_logits(decoder, TOKENS[1:, :8])[0], atol=1e-5
    )
    assert jnp.isfinite(logits).all()


def test_no_logit_depends_on_a_later_token(decoder):
    """The derivative is exactly zero, not small.

    The embedded tokens are shifted by `offset` and the logits at each position differentiated.
    """
    length = TOKENS.shape[1]

    def logit_sums(offset):
        shifted = nnx.merge(*nnx.split(decoder))
        shifted.embed = lambda tokens: decoder.embed(tokens) + offset
        return _logits(shifted, TOKENS[:1]).sum(axis=-1)[0]

    jacobian = jax.jit(jax.jacrev(logit_sums))(jnp.zeros((1, length, CONFIG.hidden_size)))
    influence = jnp.abs(jacobian).sum(axis=(1, 3))
    assert (jnp.triu(influence, k=1) == 0).all()
    assert (jnp.diagonal(influence) > 0).all()


def _attention_by_definition(query, key, value, segment_ids):
    """Compute attention head by head and position by position, in numpy."""
    batch, time, heads, head_dim = query.shape
    output = np.zeros(query.shape, np.float32)
    for row, position, head in np.ndindex(batch, time, heads):
        if segment_ids[row, position] == 0:
            continue
        visible = [
            other
            for other in range(position + 1)
            if segment_ids[row, other] == segment_ids[row, position]
        ]
        shared = head // (heads // key.shape[2])
        scores = (
            np.asarray([query[row, position, head] @ key[row, other, shared] for other in visible])
            / head_dim**0.5
        )
        weights = np.exp(scores - scores.max())
        output[row, position, head] = weights / weights.sum() @ value[row, visible, shared]
    return output


def test_segment_attention_follows_its_definition_over_several_blocks():
    draw = np.random.default_rng(1)
    query, key, value = (
        draw.normal(size=(2, 150, heads, 6)).astype(np.float32) for heads in (4, 2, 2)
    )
    segment_ids = np.asarray([[1] * 70 + [2] * 80, [1] * 30 + [2] * 50 + [0] * 70])
    ours = segment_attention(*map(jnp.asarray, (query, key, value, segment_ids)))
    np.testing.assert_allclose(
        ours, _attention_by_definition(query, key, value, segment_ids), atol=1e-5
    )


def test_padding_gives_finite_output_and_no_gradient():
    draw = np.random.default_rng(2)
    inputs = tuple(jnp.asarray(draw.normal(size=(1, 8, 2, 4)), jnp.float32) for _ in range(3))
    segment_ids = jnp.asarray([[1, 1, 1, 0, 0, 0, 0, 0]])
    output, pullback = jax.vjp(lambda *a: segment_attention(*a, segment_ids), *inputs)
    gradients = pullback(jnp.ones_like(output))
    assert jnp.isfinite(output).all()
    assert (output[:, 3:] == 0).all()
    assert all(jnp.isfinite(g).all() and (g[:, 3:] == 0).all() for g in gradients)


def test_large_scores_do_not_overflow():
    huge = jnp.full((1, 4, 1, 2), 1e4, jnp.float32)
    value = jnp.arange(8.0).reshape(1, 4, 1, 2)
    output = segment_attention(huge, huge, value, jnp.ones((1, 4), jnp.int32))
    np.testing.assert_allclose(output[0, :, 0, 0], [0.0, 1.0, 2.0, 3.0], atol=1e-6)


def test_bfloat16_computes_close_to_float32_and_returns_float32_logits(decoder):
    narrow = filled_decoder(CONFIG, dtype=jnp.bfloat16)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(narrow)))
    computed = _compiled_logits(narrow)
    expected = _compiled_logits(decoder)
    assert computed.dtype == jnp.float32
    assert jnp.abs(computed - expected).mean() < 0.05 * jnp.abs(expected).mean()
