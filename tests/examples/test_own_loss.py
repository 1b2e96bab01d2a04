"""The loss with equal conversations, against a number worked out by hand."""

import jax.numpy as jnp
import pytest

from examples.own_loss.losses import EqualConversations
from mujica_jax.learning.packing import Batch

# A row with a conversation of three tokens and one of two, and padding; a row with one conversation.
BATCH = Batch(
    tokens=jnp.zeros((2, 6), int),
    segment_ids=jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]]),
    positions=jnp.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]),
    loss_mask=jnp.array(
        [[False, True, True, False, True, False], [False, False, False, True, True, True]]
    ),
)
LOG_PROBS = jnp.array([[0.0, -1.0, -3.0, 0.0, -4.0, 0.0], [0.0, 0.0, 0.0, -3.0, -3.0, -6.0]])


def test_the_loss_is_the_mean_over_conversations_of_their_means():
    loss = EqualConversations()
    counts = loss.counts(BATCH)
    assert {name: int(count) for name, count in counts.items()} == {
        "trained_tokens": 6,
        "conversations": 3,
    }
    value, metrics = loss.of(LOG_PROBS, BATCH, counts)
    # The means of the conversations are 2, 4 and 4.
    assert float(value) == pytest.approx((2 + 4 + 4) / 3)
    assert metrics == {}


def test_the_losses_of_the_rows_add_up_to_that_of_the_batch():
    loss = EqualConversations()
    counts = loss.counts(BATCH)
    whole, _ = loss.of(LOG_PROBS, BATCH, counts)
    parts = [
        loss.of(
            LOG_PROBS[row : row + 1], Batch(*(field[row : row + 1] for field in BATCH[:4])), counts
        )[0]
        for row in range(2)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole))
