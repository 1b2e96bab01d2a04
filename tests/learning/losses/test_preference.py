"""The loss of DPO, worked out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.learning.losses.preference import DPO
from mujica_jax.learning.packing import Batch, PackedRows, pack
from tests.helpers.packed_rows import random_conversations

# Two pairs: in the first row conversations of two and one trained tokens, in the second two of one.
SEGMENTS = np.array([[1, 1, 1, 2, 2], [1, 1, 2, 2, 0]])
TRAINED = np.array([[False, True, True, False, True], [False, True, False, True, False]])
PAIRS = np.array([[1, 1, 1, -1, -1], [1, 1, -1, -1, 0]], np.float32)
REFERENCE = np.log([[1.0, 0.5, 0.5, 1.0, 0.25], [1.0, 0.5, 1.0, 0.5, 1.0]]).astype(np.float32)
# Gains in bits: 1 + 1 = 2 and -1 for the first pair, -1 and 3 for the second.
LOG_PROBS = jnp.asarray(
    REFERENCE + math.log(2) * np.array([[0, 1, 1, 0, -1], [0, -1, 0, 3, 0]]), jnp.float32
)


def loss(log_probs: jax.Array = LOG_PROBS, pairs: np.ndarray = PAIRS, beta: float = 0.5):
    columns = {"pairs": pairs, "reference_log_probs": REFERENCE}
    batch = Batch(np.zeros_like(SEGMENTS), SEGMENTS, np.zeros_like(SEGMENTS), TRAINED, columns)
    dpo = DPO(beta=beta)
    value, metrics = dpo.of(log_probs, batch, dpo.counts(batch))
    return value, metrics | dpo.counts(batch)


def test_the_loss_of_the_batch_worked_by_hand():
    # Margins 0.5 (2 - (-1)) = 1.5 bits and 0.5 (-1 - 3) = -2 bits: -log sigmoid is log(1 + 2^-1.5)
    # and log(1 + 2^2).
    value, metrics = loss()
    assert float(value) == pytest.approx((math.log(1 + 2**-1.5) + math.log(5)) / 2)
    assert float(metrics["margin"]) == pytest.approx(math.log(2) * (1.5 - 2) / 2)
    assert float(metrics["accuracy"]) == 0.5
    assert int(metrics["pairs"]) == 2


def test_the_gradient_worked_by_hand():
    # d loss / d gain: -beta sigmoid(-margin) / pairs for the chosen one, and its opposite for the
    # rejected one.
    first = 0.5 / 2 * 2**-1.5 / (1 + 2**-1.5)
    second = 0.5 / 2 * 2**2.0 / (1 + 2**2.0)
    expected = np.array([[0, -first, -first, 0, first], [0, -second, 0, second, 0]])
    np.testing.assert_allclose(jax.grad(lambda now: loss(now)[0])(LOG_PROBS), expected, rtol=1e-5)


def test_the_gradient_is_finite_differences():
    gradient = np.asarray(jax.grad(lambda now: loss(now)[0])(LOG_PROBS))
    step = 1e-2
    for place in np.ndindex(gradient.shape):
        moved = np.zeros_like(REFERENCE)
        moved[place] = step
        difference = float(loss(LOG_PROBS + moved)[0] - loss(LOG_PROBS - moved)[0]) / (2 * step)
        assert difference == pytest.approx(float(gradient[place]), abs=2e-5)


def test_where_nothing_was_learnt_the_loss_is_that_of_a_coin():
    assert float(loss(jnp.asarray(REFERENCE))[0]) == pytest.approx(math.log(2))


def test_beta_scales_the_margin():
    assert float(loss(beta=1.0)[1]["margin"]) == pytest.approx(
        2 * float(loss(beta=0.5)[1]["margin"])
    )


def test_a_margin_far_off_is_finite():
    value, gradient = jax.value_and_grad(lambda now: loss(now, beta=1e4)[0])(LOG_PROBS)
    assert math.isfinite(float(value))
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("junk", [jnp.nan, jnp.inf, 1e30])
def test_untrained_tokens_change_nothing_whatever_they_hold(junk):
    value, gradient = jax.value_and_grad(lambda now: loss(now)[0])(LOG_PROBS)
    same, gradient_of_full = jax.value_and_grad(lambda now: loss(now)[0])(
        jnp.where(TRAINED, LOG_PROBS, junk)
    )
    assert float(same) == float(value)
    np.testing.assert_array_equal(gradient_of_full, gradient)
    assert np.all(np.asarray(gradient)[~TRAINED] == 0.0)


def test_where_no_pairs_are_loss_and_gradient_are_zero():
    value, gradient = jax.value_and_grad(lambda now: loss(now, np.zeros_like(PAIRS))[0])(LOG_PROBS)
    assert float(value) == 0.0
    assert np.all(np.asarray(gradient) == 0.0)


def test_packed_equals_separate():
    conversations = random_conversations(16, longest=16)
    draw = np.random.default_rng(0)
    dpo = DPO(beta=0.1)
    lengths = [len(conversation.token_ids) for conversation in conversations]
    columns = {}
    for name in ("now", "reference_log_probs"):
        columns[name] = [draw.normal(size=length) for length in lengths]

    def value(rows: PackedRows) -> float:
        batch = rows.batch(slice(None), dpo.columns)
        return float(dpo.of(jnp.asarray(rows.columns["now"]), batch, dpo.counts(batch))[0])

    packed = pack(conversations, sequence_length=96, seed=1, columns=columns, pairs=True)
    alone = pack(conversations, sequence_length=32, seed=1, columns=columns, pairs=True)
    assert packed.num_rows < alone.num_rows
    assert value(packed) == pytest.approx(value(alone), abs=1e-6)
