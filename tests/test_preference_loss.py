import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import random_conversations

from mujica_jax.learning.losses.preference import Pairs, dpo_loss
from mujica_jax.trajectories.packing import pack

# One conversation of three trained tokens in the first row, two of one in the second.
SEGMENTS = np.array([[1, 1, 1, 1], [1, 1, 2, 2]])
TRAINED = np.array([[False, True, True, True], [False, True, False, True]])
REFERENCE = np.log([[1.0, 0.5, 0.5, 0.25], [1.0, 0.5, 1.0, 0.5]]).astype(np.float32)
# Gains in bits: 1 + 1 + 0 = 2 for the first conversation, -1 for the second, 3 for the third.
LOG_PROBS = jnp.asarray(REFERENCE + math.log(2) * np.array([[0, 1, 1, 0], [0, -1, 0, 3]]), jnp.float32)
FIRST, SECOND, THIRD, NONE = [0, 0], [1, 0], [1, 2], [-1, -1]
PAIRS = Pairs(np.array([FIRST, SECOND]), np.array([SECOND, THIRD]))


def loss(log_probs: jax.Array = LOG_PROBS, pairs: Pairs = PAIRS, beta: float = 0.5):
    return dpo_loss(log_probs, REFERENCE, SEGMENTS, TRAINED, pairs, beta=beta)


def test_the_loss_of_the_batch_worked_by_hand():
    # Margins 0.5 (2 - (-1)) = 1.5 bits and 0.5 (-1 - 3) = -2 bits: -log sigmoid is log(1 + 2^-1.5) and log(1 + 2^2).
    value, metrics = loss()
    assert float(value) == pytest.approx((math.log(1 + 2**-1.5) + math.log(5)) / 2)
    assert float(metrics["margin"]) == pytest.approx(math.log(2) * (1.5 - 2) / 2)
    assert float(metrics["right_share"]) == 0.5 and int(metrics["pairs"]) == 2


def test_the_gradient_worked_by_hand():
    # d loss / d gain: -beta sigmoid(-margin) / pairs for the chosen one, and its opposite for the rejected one.
    first, second = (0.5 / 2 * 2**-margin / (1 + 2**-margin) for margin in (1.5, -2.0))
    expected = np.array([[0, -first, -first, -first], [0, first - second, 0, second]])
    np.testing.assert_allclose(jax.grad(lambda now: loss(now)[0])(LOG_PROBS), expected, rtol=1e-5)


def test_the_gradient_is_finite_differences():
    gradient, step = np.asarray(jax.grad(lambda now: loss(now)[0])(LOG_PROBS)), 1e-2
    for place in np.ndindex(gradient.shape):
        moved = np.zeros_like(REFERENCE)
        moved[place] = step
        difference = float(loss(LOG_PROBS + moved)[0] - loss(LOG_PROBS - moved)[0]) / (2 * step)
        assert difference == pytest.approx(float(gradient[place]), abs=2e-5)


def test_where_nothing_was_learnt_the_loss_is_that_of_a_coin():
    value, _ = dpo_loss(jnp.asarray(REFERENCE), REFERENCE, SEGMENTS, TRAINED, PAIRS)
    assert float(value) == pytest.approx(math.log(2))


def test_beta_scales_the_margin():
    assert float(loss(beta=1.0)[1]["margin"]) == pytest.approx(2 * float(loss(beta=0.5)[1]["margin"]))


def test_a_margin_far_off_is_finite():
    value, gradient = jax.value_and_grad(lambda now: loss(now, beta=1e4)[0])(LOG_PROBS)
    assert math.isfinite(float(value)) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize("junk", [jnp.nan, jnp.inf, 1e30])
def test_untrained_tokens_change_nothing_whatever_they_hold(junk):
    value, gradient = jax.value_and_grad(lambda now: loss(now)[0])(LOG_PROBS)
    same, gradient_of_full = jax.value_and_grad(lambda now: loss(now)[0])(jnp.where(TRAINED, LOG_PROBS, junk))
    assert float(same) == float(value)
    np.testing.assert_array_equal(gradient_of_full, gradient)
    assert np.all(np.asarray(gradient)[~TRAINED] == 0.0)


def test_rows_of_pairs_that_fill_up_count_nothing():
    filled = Pairs(np.array([FIRST, SECOND, NONE]), np.array([SECOND, THIRD, NONE]))
    assert float(loss(pairs=filled)[0]) == pytest.approx(float(loss()[0]))
    nothing = Pairs(np.array([NONE]), np.array([NONE]))
    value, gradient = jax.value_and_grad(lambda now: loss(now, nothing)[0])(LOG_PROBS)
    assert float(value) == 0.0 and np.all(np.asarray(gradient) == 0.0)


def test_packed_equals_separate():
    conversations = random_conversations(8)
    draw = np.random.default_rng(0)
    now, then = ([draw.normal(size=40) for _ in conversations] for _ in range(2))

    def value(rows) -> float:
        filled = [np.zeros(rows.tokens.shape, np.float32) for _ in range(2)]
        for index, (row, start) in enumerate(rows.placements):
            place = slice(start, start + len(conversations[index].token_ids))
            for array, given in zip(filled, (now, then), strict=True):
                array[row, place] = given[index][: place.stop - place.start]
        pairs = Pairs(rows.placements[::2], rows.placements[1::2])
        return float(dpo_loss(jnp.asarray(filled[0]), filled[1], rows.segment_ids, rows.loss_mask, pairs)[0])

    packed, alone = (pack(conversations, row_tokens=tokens, seed=1) for tokens in (96, 31))
    assert packed.num_rows < alone.num_rows
    assert value(packed) == pytest.approx(value(alone), abs=1e-6)
