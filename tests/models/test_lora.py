"""Adapters against the same computation with the products written out, and the merged model against
transformers.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.lora import adapted, check_rank, merged
from mujica_jax.models.weights import save_checkpoint
from tests.helpers.packed_rows import MODEL as ONE_LAYER
from tests.helpers.tiny_models import filled_decoder

MODEL = dataclasses.replace(ONE_LAYER, num_layers=2, num_heads=4, num_kv_heads=2)
RANK = 3
ALPHA = 12.0
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 12)))
KERNELS = [f"{name}_kernel" for name in ("query", "key", "value", "output", "gate", "up", "down")]


@pytest.fixture(scope="module")
def plain() -> Decoder:
    return filled_decoder(MODEL)


@pytest.fixture(scope="module")
def fresh(plain) -> Decoder:
    return adapted(plain, rank=RANK, alpha=ALPHA, key=jax.random.key(0))


@pytest.fixture(scope="module")
def trained(fresh) -> Decoder:
    """Return a decoder as after some training: A and B are both random."""
    return filled(fresh)


def filled(decoder: Decoder) -> Decoder:
    draw = np.random.default_rng(1)
    other = nnx.clone(decoder)
    adapters = nnx.state(other, nnx.LoRAParam)
    nnx.update(
        other,
        jax.tree.map(
            lambda leaf: jnp.asarray(draw.normal(0, 0.3, leaf.shape), leaf.dtype), adapters
        ),
    )
    return other


def logits(decoder: Decoder, **options) -> np.ndarray:
    return np.asarray(_logits(*nnx.split(decoder), **options))


@functools.partial(jax.jit, static_argnames=("graph", "scan", "remat"))
def _logits(graph, weights, **options) -> jax.Array:
    whole = nnx.merge(graph, weights)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return whole.logits(
        whole(TOKENS, positions, causal_self_attention(jnp.ones_like(TOKENS)), **options)
    )


def by_hand(plain: Decoder, trained: Decoder) -> Decoder:
    """Return the plain decoder with W + (alpha / rank) A B, summed layer by layer in float64."""
    other = nnx.clone(plain)
    for name in KERNELS:
        kernel = np.asarray(getattr(plain.layers, name)[...], np.float64)
        a, b = (
            np.asarray(getattr(trained.layers, f"{name}_lora_{part}")[...], np.float64)
            for part in "ab"
        )
        changed = [
            kernel[layer] + (ALPHA / RANK * a[layer] @ b[layer]).reshape(kernel.shape[1:])
            for layer in range(MODEL.num_layers)
        ]
        getattr(other.layers, name)[...] = jnp.asarray(np.stack(changed), jnp.float32)
    return other


def test_fresh_adapters_change_nothing(plain, fresh):
    # another program rounds in other places
    np.testing.assert_allclose(logits(fresh), logits(plain), atol=3e-6)
    unchanged = nnx.state(merged(fresh, rank=RANK, alpha=ALPHA))
    jax.tree.map(np.testing.assert_array_equal, unchanged, nnx.state(plain))


@pytest.mark.parametrize(
    "options", [{}, {"scan": False}, {"remat": "full"}, {"remat": "dots"}], ids=str
)
def test_adapters_add_their_product_to_every_projection(plain, trained, options):
    expected = logits(by_hand(plain, trained))
    assert np.abs(expected - logits(plain)).max() > 0.5
    np.testing.assert_allclose(logits(trained, **options), expected, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_each_adapter_counts(trained, name):
    other = nnx.clone(trained)
    adapter = getattr(other.layers, f"{name}_lora_b")
    adapter[...] = jnp.zeros_like(adapter[...])
    assert np.abs(logits(other) - logits(trained)).max() > 1e-3


def test_merging_gives_the_same_decoder_without_adapters(plain, trained):
    alone = merged(trained, rank=RANK, alpha=ALPHA)
    assert type(alone.layers) is type(plain.layers)
    assert nnx.graphdef(alone) == nnx.graphdef(plain)
    jax.tree.map(
        lambda ours, expected: np.testing.assert_allclose(ours, expected, atol=1e-5),
        nnx.state(alone),
        nnx.state(by_hand(plain, trained)),
    )


def test_adapters_are_stacked_and_differ_between_layers(fresh):
    adapters = {path[-1]: leaf for path, leaf in nnx.to_flat_state(nnx.state(fresh, nnx.LoRAParam))}
    assert set(adapters) == {f"{name}_lora_{part}" for name in KERNELS for part in "ab"}
    assert adapters["output_kernel_lora_a"].shape == (2, 4 * 8, RANK)
    assert adapters["key_kernel_lora_b"].shape == (2, RANK, 2 * 8)
    for name, leaf in adapters.items():
        if name.endswith("_a"):
            assert not (leaf[...][0] == leaf[...][1]).any()
        else:
            assert (leaf[...] == 0).all()


def test_base_weights_are_shared(plain, fresh):
    assert fresh.layers.gate_kernel[...] is plain.layers.gate_kernel[...]
    assert fresh.embedding[...] is plain.embedding[...]


def test_an_adapted_decoder_computes_in_bfloat16(trained):
    narrow = filled(
        adapted(
            filled_decoder(MODEL, dtype=jnp.bfloat16), rank=RANK, alpha=ALPHA, key=jax.random.key(0)
        )
    )
    expected = logits(trained)
    assert 0 < np.abs(logits(narrow) - expected).mean() < 0.05 * np.abs(expected).mean()


def test_transformers_reads_the_merged_export(trained, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    save_checkpoint(merged(trained, rank=RANK, alpha=ALPHA), tmp_path / "merged")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32
    )
    merged_logits = theirs(torch.asarray(np.asarray(TOKENS, np.int64))).logits.detach().numpy()
    np.testing.assert_allclose(merged_logits, logits(trained), atol=1e-4)


def test_a_rank_above_the_smallest_side_is_refused():
    check_rank(MODEL, 16)
    with pytest.raises(
        UserError, match=r"lora_rank is 17, but query_kernel .* 16 x 32: use a rank of at most 16"
    ):
        check_rank(MODEL, 17)


@pytest.mark.parametrize(("remat", "products", "mixed"), [("dots", 3, 1), ("full", 5, 2)])
@pytest.mark.parametrize("kind", [nnx.Param, nnx.LoRAParam])
def test_what_a_backward_pass_computes_again(plain, trained, kind, remat, products, mixed):
    """With "dots" no product with a weight is computed again, with adapters too.

    Nor is the attention of our own kernel. A layer multiplies to the width of its MLP for gate and
    up, and for the gradient before down.
    """
    graph, chosen, rest = nnx.split(trained if kind is nnx.LoRAParam else plain, kind, ...)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)

    def loss(weights):
        attend = causal_self_attention(jnp.ones_like(TOKENS), "blocks")
        return nnx.merge(graph, weights, rest)(TOKENS, positions, attend, remat=remat).sum()

    program = jax.jit(jax.grad(loss)).lower(chosen).as_text()
    to_mlp = rf"stablehlo.dot_general.*-> tensor<{TOKENS.size}x{MODEL.intermediate_size}xf32>"
    assert len(re.findall(to_mlp, program)) == products
    assert program.count("@mujica_jax_packed_attention(") == mixed
