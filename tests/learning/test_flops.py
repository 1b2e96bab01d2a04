"""The operations of a training step, compared with numbers worked out by hand."""

from mujica_jax.learning.packing import pack
from mujica_jax.learning.throughput import attended_pairs, training_flops
from tests.helpers.packed_rows import MODEL, conversation

ROWS = pack([conversation((1, 2), (3, 4, 5)), conversation((6,), (7,))], sequence_length=8, seed=0)
# One layer: query, key, value and output of 16 x 2 heads x 8, and three matrices of 16 x 24.
IN_LAYER = 4 * 256 + 3 * 384


def test_operations_are_counted_by_the_formula():
    """8 slots meet the layer, 4 trained tokens the head of 48 x 16.

    5 tokens attend to 15 and 2 to 3, over 2 heads of 8.
    """
    pairs = attended_pairs(ROWS.segment_ids)
    assert pairs == 15 + 3
    expected = 6 * 8 * IN_LAYER + 6 * 4 * 48 * 16 + 12 * 2 * 8 * 18
    assert (
        training_flops(MODEL, slots=8, trained_tokens=ROWS.trained_tokens, pairs=pairs) == expected
    )


def test_with_adapters_frozen_weights_have_no_gradient_of_their_own():
    """At rank 2 there are 2 x (inputs + outputs) numbers beside each matrix, of 16 + 16 four times
    and of 16 + 24 three times.
    """
    adapters = 2 * (4 * 32 + 3 * 40)
    expected = 8 * (4 * IN_LAYER + 6 * adapters) + 4 * 4 * 48 * 16
    assert training_flops(MODEL, slots=8, trained_tokens=4, pairs=0, lora_rank=2) == expected
