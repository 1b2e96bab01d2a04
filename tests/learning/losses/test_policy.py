"""The losses of GRPO and DAPO, worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.policy import DAPO, GRPO, group_advantages
from mujica_jax.learning.packing import Batch, PackedRows, pack
from tests.helpers.packed_rows import random_conversations

# Three conversations in two rows: one of three trained tokens, two of one.
SEGMENTS = np.array([[1, 1, 1, 1], [1, 1, 2, 2]])
TRAINED = np.array([[False, True, True, True], [False, True, False, True]])
RATIOS = np.array([[1.0, 1.0, 1.5, 0.5], [1.0, 2.0, 1.0, 0.5]])
ADVANTAGES = np.array([[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, 2.0, 2.0]])
SAMPLED = np.log([[1.0, 0.5, 0.25, 0.5], [1.0, 0.125, 1.0, 0.25]]).astype(np.float32)
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def log_probs(ratios: np.ndarray = RATIOS) -> jax.Array:
    return jnp.asarray(SAMPLED + np.log(ratios), jnp.float32)


def value_of(
    loss: Loss,
    now: jax.Array,
    advantages: np.ndarray = ADVANTAGES,
    trained: np.ndarray = TRAINED,
    **columns,
):
    columns |= {"sampled_log_probs": SAMPLED, "advantages": advantages}
    batch = Batch(np.zeros_like(SEGMENTS), SEGMENTS, np.zeros_like(SEGMENTS), trained, columns)
    value, metrics = loss.of(now, batch, loss.counts(batch))
    return value, metrics | loss.counts(batch)


def grpo(
    now: jax.Array, advantages: np.ndarray = ADVANTAGES, clip: dict[str, float] = CLIP, **columns
):
    return value_of(GRPO(**clip), now, advantages, **columns)


def dapo(
    now: jax.Array, advantages: np.ndarray = ADVANTAGES, clip: dict[str, float] = CLIP, **columns
):
    return value_of(DAPO(**clip), now, advantages, **columns)


# The objectives of the trained tokens of the batch above, by hand:
#   first row, A = 1:      ratio 1 -> min(1, 1) = 1;  1.5 -> min(1.5, 1.3) = 1.3;  0.5 -> min(0.5, 0.8) = 0.5
#   second row, A = -1:    ratio 2 -> min(-2, -1.3) = -2
#   second row, A = 2:     ratio 0.5 -> min(2 x 0.5, 2 x 0.8) = 1


def test_dapo_of_the_batch_worked_by_hand():
    loss, metrics = dapo(log_probs())
    assert float(loss) == pytest.approx(-(1 + 1.3 + 0.5 - 2 + 1) / 5)
    assert float(metrics["clipped_share"]) == pytest.approx(1 / 5)
    assert float(metrics["mean_ratio"]) == pytest.approx((1 + 1.5 + 0.5 + 2 + 0.5) / 5)
    assert int(metrics["trained_tokens"]) == 5


def test_grpo_of_the_batch_worked_by_hand():
    loss, metrics = grpo(log_probs())
    assert float(loss) == pytest.approx(-((1 + 1.3 + 0.5) / 3 - 2 + 1) / 3)
    assert int(metrics["conversations"]) == 3


def test_the_kl_term_worked_by_hand():
    # r = p_reference / p is 2 at the first row's last token and 1 elsewhere: KL = 2 - log 2 - 1
    # there, a third of the mean of its conversation.
    reference = np.asarray(log_probs()) + np.log(
        [[1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]
    ).astype(np.float32)
    loss, metrics = value_of(
        GRPO(**CLIP, kl_coefficient=0.5), log_probs(), reference_log_probs=reference
    )
    divergence = 1 - np.log(2)
    assert float(loss) == pytest.approx(float(grpo(log_probs())[0]) + 0.5 * divergence / 3 / 3)
    assert float(metrics["reference_kl"]) == pytest.approx(divergence / 5)
    loss, _ = value_of(DAPO(**CLIP, kl_coefficient=0.5), log_probs(), reference_log_probs=reference)
    assert float(loss) == pytest.approx(float(dapo(log_probs())[0]) + 0.5 * divergence / 5)


def test_importance_weights_weigh_the_objective_and_not_the_kl_term():
    # The objectives above times 2, 1, 1 / 2, 1 and 0; the KL term as it was.
    weights = np.array([[np.nan, 2.0, 1.0, 0.5], [np.nan, 1.0, np.nan, 0.0]])
    by_token = [2 * 1, 1.3, 0.5 * 0.5, -2, 0.0]
    loss, _ = value_of(
        DAPO(**CLIP, importance_weighted=True), log_probs(), importance_weights=weights
    )
    assert float(loss) == pytest.approx(-sum(by_token) / 5)
    reference = np.asarray(log_probs()) + np.log(
        [[1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]
    ).astype(np.float32)
    loss, _ = value_of(
        GRPO(**CLIP, importance_weighted=True, kl_coefficient=0.5),
        log_probs(),
        reference_log_probs=reference,
        importance_weights=weights,
    )
    expected = -(sum(by_token[:3]) / 3 - 2 + 0.0) / 3
    assert float(loss) == pytest.approx(expected + 0.5 * (1 - np.log(2)) / 3 / 3)


def test_gradients_worked_by_hand():
    """d objective / d log p is ratio x A where nothing is clipped."""
    per_token = np.array([[0, 1.0, 0, 0.5], [0, -2.0, 0, 1.0]])
    np.testing.assert_allclose(
        jax.grad(lambda now: dapo(now)[0])(log_probs()), -per_token / 5, rtol=1e-6
    )
    weights = np.array([[0, 1 / 9, 1 / 9, 1 / 9], [0, 1 / 3, 0, 1 / 3]])
    np.testing.assert_allclose(
        jax.grad(lambda now: grpo(now)[0])(log_probs()), -per_token * weights, rtol=1e-6
    )


@pytest.mark.parametrize("loss_of", [grpo, dapo])
def test_gradients_are_finite_differences(loss_of):
    ratios = np.array([[1.0, 0.9, 1.25, 0.85], [1.0, 1.7, 1.0, 0.6]])
    gradient = np.asarray(jax.grad(lambda now: loss_of(now)[0])(log_probs(ratios)))
    step = 1e-2
    for place in np.ndindex(gradient.shape):
        moved = np.zeros_like(ratios)
        moved[place] = step
        up, _ = loss_of(log_probs(ratios * np.exp(moved)))
        down, _ = loss_of(log_probs(ratios * np.exp(-moved)))
        assert float(up - down) / (2 * step) == pytest.approx(float(gradient[place]), abs=2e-5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [
        (1.0, 1.3 - 1e-4, True),
        (1.0, 1.3 + 1e-4, False),  # probable enough
        (1.0, 0.1, True),  # a good token that became improbable is pulled back
        (-1.0, 0.8 + 1e-4, True),
        (-1.0, 0.8 - 1e-4, False),  # improbable enough
        (-1.0, 9.0, True),
        (0.0, 9.0, False),
        (0.0, 0.1, False),
    ],
)
def test_at_the_edges_of_the_clip(advantage, ratio, moves):
    ratios = np.where(TRAINED, ratio, 1.0)
    advantages = np.full_like(ADVANTAGES, advantage)
    gradient = jax.grad(lambda now: dapo(now, advantages)[0])(log_probs(ratios))
    expected = np.where(TRAINED, -ratio * advantage / 5 if moves else 0.0, 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_a_ratio_on_the_bound_is_not_clipped():
    at_bound = log_probs(np.full_like(RATIOS, 1.0))
    gradient = jax.grad(lambda now: dapo(now, clip={"clip_low": 0.0, "clip_high": 0.0})[0])(
        at_bound
    )
    np.testing.assert_allclose(gradient, np.where(TRAINED, -ADVANTAGES / 5, 0.0), rtol=1e-6)


def test_both_bounds_are_used():
    low = dapo(log_probs(), clip={"clip_low": 0.6, "clip_high": 0.3})[0]
    negative = -ADVANTAGES
    assert float(low) == float(dapo(log_probs())[0]), "good tokens know the upper bound alone"
    assert float(dapo(log_probs(), negative)[0]) != float(
        dapo(log_probs(), negative, {"clip_low": 0.4, "clip_high": 0.3})[0]
    )
    assert float(dapo(log_probs())[0]) != float(
        dapo(log_probs(), clip={"clip_low": 0.2, "clip_high": 0.4})[0]
    )


@pytest.mark.parametrize("loss_of", [grpo, dapo])
@pytest.mark.parametrize("junk", [jnp.nan, jnp.inf, -jnp.inf, 1e30])
def test_untrained_tokens_change_nothing_whatever_they_hold(loss_of, junk):
    value, gradient = jax.value_and_grad(lambda now: loss_of(now)[0])(log_probs())
    full = jnp.where(TRAINED, log_probs(), junk)
    same, gradient_of_full = jax.value_and_grad(lambda now: loss_of(now)[0])(full)
    assert float(same) == float(value)
    np.testing.assert_array_equal(gradient_of_full, gradient)
    assert np.all(np.asarray(gradient)[~TRAINED] == 0.0)


def test_nothing_trained_is_loss_and_gradient_zero():
    nothing = np.zeros_like(TRAINED)
    for loss_of in (
        lambda now: grpo(now, trained=nothing)[0],
        lambda now: dapo(now, trained=nothing)[0],
    ):
        value, gradient = jax.value_and_grad(loss_of)(log_probs())
        assert float(value) == 0.0
        assert np.all(np.asarray(gradient) == 0.0)


def test_packed_equals_separate():
    conversations = random_conversations(9)
    draw = np.random.default_rng(0)
    values = draw.normal(size=len(conversations))
    lengths = [len(conversation.token_ids) for conversation in conversations]
    now = [draw.normal(size=length) for length in lengths]
    then = [draw.normal(size=length) for length in lengths]

    def losses(rows: PackedRows) -> list[float]:
        batch = rows.batch(slice(None), ["sampled_log_probs", "advantages"])
        return [
            float(loss.of(jnp.asarray(rows.columns["now"]), batch, loss.counts(batch))[0])
            for loss in (GRPO(**CLIP), DAPO(**CLIP))
        ]

    columns = {"sampled_log_probs": then, "advantages": values, "now": now}
    packed = pack(conversations, sequence_length=96, seed=1, columns=columns)
    alone = pack(conversations, sequence_length=31, seed=1, columns=columns)
    assert packed.num_rows < alone.num_rows
    assert losses(packed) == pytest.approx(losses(alone), abs=1e-6)


def test_advantages_of_groups_worked_by_hand():
    # Mean 1/2 and deviation 1/2; mean 1 and deviation sqrt((1 + 0 + 0 + 1) / 4) = sqrt(1/2).
    rewards = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 2.0]])
    by_hand = np.array([[1.0, -1.0, 1.0, -1.0], [-np.sqrt(2), 0.0, 0.0, np.sqrt(2)]])
    np.testing.assert_allclose(group_advantages(rewards), by_hand)


def test_a_group_of_equal_rewards_teaches_nothing():
    assert np.all(group_advantages(np.full((2, 3), 0.1)) == 0.0)
