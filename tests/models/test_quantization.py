"""Eight-bit weights against the float model and against numpy's own dequantised products."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.inference.engine.base import PrefillRow, SlotState
from mujica_jax.models.layers import IntegerProduct, projections
from mujica_jax.models.quantization import engine_weights
from tests.helpers.tiny_engine import (
    MODEL,
    SLOTS,
    decoded,
    decoder,
    make_engine,
    next_token_logits,
    pages_of_slot,
    random_tokens,
)

CONTRACTED = {weight.name: weight.inputs for weight in projections(MODEL)}
TOKENS = random_tokens(40)
# Mean error over mean size of the logits of a random model; 0.013 and 0.055 were seen. int8 divides
# a channel's largest weight into 127 equal steps, fp8 keeps four binary digits of every weight.
RELATIVE_ERROR = {"int8": 0.03, "fp8": 0.12}


@pytest.fixture(scope="module", params=["int8", "fp8"])
def storage(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def weights(storage) -> nnx.State:
    return stored(storage)


@functools.cache
def stored(storage, dtype=jnp.float32) -> nnx.State:
    return engine_weights(nnx.state(decoder()), MODEL, storage, dtype)


@functools.cache
def dequantised_model(storage: str):
    """Return a plain decoder whose matrices are values times scale, multiplied by numpy."""
    other = nnx.clone(decoder())
    for name in CONTRACTED:
        kernel = stored(storage)["layers"][name].get_value()
        values = np.asarray(kernel.qvalue).astype(np.float32) * np.asarray(kernel.scale)
        getattr(other.layers, name)[...] = jnp.asarray(values)
    return other


@pytest.mark.parametrize("name", CONTRACTED)
def test_every_weight_is_rounded_to_the_nearest_step_of_its_output_channel(storage, weights, name):
    kernel = np.asarray(getattr(decoder().layers, name)[...])
    stored_kernel = weights["layers"][name].get_value()
    largest = np.abs(kernel).max(axis=tuple(range(1, 1 + CONTRACTED[name])), keepdims=True)
    np.testing.assert_allclose(
        stored_kernel.scale, largest / {"int8": 127.5, "fp8": 448.0}[storage], rtol=1e-6
    )
    scale = np.asarray(stored_kernel.scale)
    if storage == "int8":
        half_a_step = scale / 2
    else:  # three bits behind the leading one; below 2^-6 the steps stay as they are
        half_a_step = (
            np.maximum(2.0 ** np.floor(np.log2(np.abs(kernel / scale))), 2.0**-6) * 2.0**-4 * scale
        )
    error = np.abs(np.asarray(stored_kernel.qvalue).astype(np.float32) * scale - kernel)
    assert (error <= 1.0001 * half_a_step).all()


def test_logits_are_those_of_the_rounded_weights_and_near_those_of_the_model(storage, weights):
    quantized_logits = next_token_logits(nnx.merge(nnx.graphdef(decoder()), weights), TOKENS)
    np.testing.assert_allclose(
        quantized_logits, next_token_logits(dequantised_model(storage), TOKENS), atol=1e-4
    )
    expected = next_token_logits(decoder(), TOKENS)
    error = np.abs(quantized_logits - expected).mean() / np.abs(expected).mean()
    assert 0 < error < RELATIVE_ERROR[storage]


def test_a_product_of_integers_worked_by_hand():
    """The rows are [127.5, -51] and zeros, the channels of weights [2.55, 1.02] and [0, -0.255].

    Their steps are 1, 0.02 and 0.002: the largest number of a row or channel is 127 steps and not
    127.5.
    """
    kernel = qwix.quantize(
        jnp.asarray([[2.55, 0.0], [1.02, -0.255]]), jnp.int8, channelwise_axes=(1,)
    )
    rows = jnp.asarray([[127.5, -51.0], [0.0, 0.0]])
    product = IntegerProduct(kernel).product(rows, 1)
    expected = [[(127 * 127 - 51 * 51) * 0.02, 51 * 127 * 0.002], [0.0, 0.0]]
    np.testing.assert_allclose(product, expected, rtol=1e-5)


def greedily(weights: nnx.State) -> list[int]:
    """Return the twelve tokens that an engine of these weights draws after TOKENS."""
    engine = make_engine()
    engine.set_weights(weights)
    engine.prefill([PrefillRow(0, pages_of_slot(0), 0, TOKENS[:-1])])
    state = SlotState.idle(SLOTS)
    state.token[0] = TOKENS[-1]
    state.position[0] = len(TOKENS) - 1
    state.remaining[0] = 12
    return decoded(engine, state)[0][0]


def test_with_rounded_rows_logits_stay_near_those_of_the_model():
    """They stay near in the engine too, token by token."""
    weights = stored("w8a8")
    plain = stored("int8")["layers"]["gate_kernel"].get_value()
    kernel = weights["layers"]["gate_kernel"].get_value()
    np.testing.assert_array_equal(kernel.kernel.qvalue, plain.qvalue)
    rounded = nnx.merge(nnx.graphdef(decoder()), weights)
    rounded_logits = next_token_logits(rounded, TOKENS)
    expected = next_token_logits(decoder(), TOKENS)
    assert 0 < np.abs(rounded_logits - expected).mean() / np.abs(expected).mean() < 0.05
    drawn = greedily(weights)
    logits = next_token_logits(rounded, [*TOKENS, *drawn])
    assert drawn == logits[len(TOKENS) - 1 : -1].argmax(axis=-1).tolist()
    assert len(drawn) == 12


def test_matrices_take_a_quarter_and_nothing_else_changes(storage, weights):
    plain = nnx.state(decoder())
    for name in CONTRACTED:
        before = plain["layers"][name].get_value()
        after = weights["layers"][name].get_value()
        assert 4 * after.qvalue.nbytes == before.nbytes
        assert after.scale.shape[0] == MODEL.num_layers
        assert after.scale.nbytes < after.qvalue.nbytes
    others = [path for path, _ in nnx.to_flat_state(plain) if path[-1] not in CONTRACTED]
    assert ("embedding",) in others
    assert ("layers", "mlp_norm") in others
    arrays_before = dict(nnx.to_flat_state(plain))
    arrays_after = dict(nnx.to_flat_state(weights))
    for path in others:
        np.testing.assert_array_equal(arrays_after[path][...], arrays_before[path][...])


def test_the_copy_shares_no_memory_with_what_is_trained(storage):
    trained = jax.tree.map(jnp.copy, nnx.state(decoder()))
    copy = engine_weights(trained, MODEL, storage, jnp.float32)
    # as a training step does that reuses its buffers
    jax.tree.map(lambda array: array.delete(), trained)
    assert all(not array.is_deleted() for array in jax.tree.leaves(copy))


def test_everything_else_is_kept_in_the_compute_type(storage):
    narrow = stored(storage, jnp.bfloat16)
    assert narrow["embedding"].dtype == narrow["final_norm"].dtype == jnp.bfloat16
    assert narrow["layers"]["gate_kernel"].get_value().scale.dtype == jnp.float32
    plain = stored("compute", jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(plain)} == {jnp.dtype(jnp.bfloat16)}


def test_an_engine_samples_greedily_what_the_rounded_model_would(storage, weights):
    sampled = greedily(weights)
    logits = next_token_logits(dequantised_model(storage), [*TOKENS, *sampled])
    assert sampled == logits[len(TOKENS) - 1 : -1].argmax(axis=-1).tolist()
    assert len(sampled) == 12


def test_without_the_package_the_extra_is_named(storage, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    other = dataclasses.replace(MODEL, num_layers=1)
    with pytest.raises(
        UserError,
        match=f"engine.weights {storage} needs the package qwix.*install the extra `qwix`",
    ):
        engine_weights(nnx.state(decoder(other)), other, storage, jnp.float32)
