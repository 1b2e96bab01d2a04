"""Packing: every conversation whole in its own segment, full rows, columns at their tokens, pairs
side by side.
"""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from mujica_jax.errors import UserError
from mujica_jax.learning.packing import PackedRows, pack, sampled_log_probs, too_long
from mujica_jax.records import Conversation
from tests.helpers.packed_rows import conversation, random_conversations

SEQUENCE_LENGTH = 16
turns = st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=1, max_size=SEQUENCE_LENGTH)


def conversation_of(tokens: list[tuple[int, bool]]) -> Conversation:
    """Return a conversation with one token a turn."""
    turns = [(token,) for token, _ in tokens]
    return conversation(*turns, trained=tuple(trained for _, trained in tokens))


conversations = turns.map(conversation_of)
batches_of_conversations = st.lists(conversations, max_size=12)


def slots(rows: PackedRows, index: int, conversation: Conversation) -> tuple[int, slice]:
    row, start = rows.placements[index]
    return int(row), slice(int(start), int(start) + len(conversation.token_ids))


@hypothesis.settings(deadline=None)  # a busy machine is no fault
@hypothesis.given(batches_of_conversations, st.integers(0, 5))
def test_every_conversation_stands_whole_in_a_segment_of_its_own(conversations, seed):
    rows = pack(conversations, sequence_length=SEQUENCE_LENGTH, seed=seed)
    segments = set()
    for index, item in enumerate(conversations):
        row, place = slots(rows, index, item)
        assert rows.tokens[row, place].tolist() == item.token_ids
        assert rows.positions[row, place].tolist() == list(range(len(item.token_ids)))
        (segment,) = set(rows.segment_ids[row, place].tolist())
        assert np.sum(rows.segment_ids[row] == segment) == len(item.token_ids)
        segments.add((row, segment))
    assert len(segments) == len(conversations)
    assert np.sum(rows.segment_ids > 0) == sum(len(item.token_ids) for item in conversations)


@hypothesis.settings(deadline=None)  # a busy machine is no fault
@hypothesis.given(batches_of_conversations, st.integers(0, 5))
def test_the_mask_is_the_conversations_own_except_for_its_first_token(conversations, seed):
    rows = pack(conversations, sequence_length=SEQUENCE_LENGTH, seed=seed)
    for index, item in enumerate(conversations):
        row, place = slots(rows, index, item)
        assert rows.loss_mask[row, place].tolist() == [False, *item.loss_mask[1:]]
    assert rows.trained_tokens == sum(sum(item.loss_mask[1:]) for item in conversations)
    assert not rows.loss_mask[rows.segment_ids == 0].any()


@hypothesis.settings(deadline=None)  # a busy machine is no fault
@hypothesis.given(batches_of_conversations)
def test_segments_are_numbered_from_one_without_gaps_and_padding_comes_last(conversations):
    rows = pack(conversations, sequence_length=SEQUENCE_LENGTH, seed=0)
    for segment_ids in rows.segment_ids:
        used = segment_ids[segment_ids > 0]
        assert (segment_ids[: len(used)] > 0).all()
        assert set(np.diff(used).tolist()) <= {0, 1}
        assert used[0] == 1


def test_packing_is_a_function_of_the_seed():
    conversations = random_conversations(40)
    first = pack(conversations, sequence_length=32, seed=3)
    same_seed = pack(conversations, sequence_length=32, seed=3)
    other_seed = pack(conversations, sequence_length=32, seed=4)
    np.testing.assert_array_equal(first.tokens, same_seed.tokens)
    assert not np.array_equal(first.placements, other_seed.placements)


def test_rows_of_mixed_lengths_are_nearly_full():
    rows = pack(random_conversations(500, longest=80), sequence_length=128, seed=0)
    assert rows.efficiency > 0.95
    assert rows.efficiency == np.mean(rows.segment_ids > 0)


def test_rows_are_95_percent_full_at_realistic_lengths():
    """Lengths are lognormal with median 350 and at most 2,048 tokens, in rows of 2,048, as in
    `benchmarks/train_tokens.py`.
    """
    lengths = np.random.default_rng(0).lognormal(np.log(350), 0.7, 2000)
    lengths = lengths[(lengths >= 1) & (lengths <= 2048)].astype(int)
    assert 300 < np.median(lengths) < 400
    assert lengths.max() > 1500
    rows = pack(
        [conversation((1,), (2,) * (length - 1)) for length in lengths if length > 1],
        sequence_length=2048,
        seed=0,
    )
    assert rows.efficiency >= 0.95


def test_columns_stand_at_the_tokens_they_belong_to():
    conversations = random_conversations(12)
    of_conversation = np.arange(1.0, 13.0)
    of_token = []
    for number, item in enumerate(conversations):
        of_token.append([number + place / 100 for place in range(len(item.token_ids))])
    rows = pack(
        conversations,
        sequence_length=64,
        seed=0,
        columns={"of_conversation": of_conversation, "of_token": of_token},
    )
    for index, item in enumerate(conversations):
        row, place = slots(rows, index, item)
        assert set(rows.columns["of_conversation"][row, place].tolist()) == {of_conversation[index]}
        np.testing.assert_array_equal(
            rows.columns["of_token"][row, place], np.asarray(of_token[index], np.float32)
        )
    assert all(np.all(column[rows.segment_ids == 0] == 0.0) for column in rows.columns.values())
    np.testing.assert_array_equal(
        rows.tokens, pack(conversations, sequence_length=64, seed=0).tokens
    )


def test_the_sampled_log_probabilities_are_those_of_the_turns():
    context, sampled = conversation((1, 2), (3,)).turns
    of_engine = dataclasses.replace(sampled, logprobs=(-0.5,))
    assert sampled_log_probs([Conversation(role="worker", turns=(context, of_engine))]) == [
        [0.0, 0.0, -0.5]
    ]
    with pytest.raises(UserError, match="a trained turn of 1 tokens has no log-probabilities"):
        sampled_log_probs([Conversation(role="worker", turns=(context, sampled))])


def test_a_pair_stands_in_one_row_side_by_side():
    conversations = random_conversations(40)
    rows = pack(
        conversations, sequence_length=96, seed=0, columns={"number": np.arange(40)}, pairs=True
    )
    numbers = []
    for pair in range(20):
        row, chosen = slots(rows, 2 * pair, conversations[2 * pair])
        other_row, rejected = slots(rows, 2 * pair + 1, conversations[2 * pair + 1])
        assert row == other_row
        assert chosen.stop == rejected.start
        (number,) = set(rows.columns["pairs"][row, chosen].tolist())
        assert set(rows.columns["pairs"][row, rejected].tolist()) == {-number}
        assert set(rows.columns["number"][row, rejected].tolist()) == {2 * pair + 1}
        numbers.append((row, number))
    assert len(set(numbers)) == 20
    assert {number for _, number in numbers} >= {1, 2}


def test_a_pair_longer_than_a_row_is_refused_though_each_of_it_fits():
    conversations = [
        conversation((1,) * 9, (2,)),
        conversation((1,) * 5, (2,) * 2),
        *[conversation((1,), (2,))] * 2,
    ]
    assert too_long(conversations, SEQUENCE_LENGTH) == 0
    assert too_long(conversations, SEQUENCE_LENGTH, pairs=True) == 1
    with pytest.raises(
        UserError, match=r"a pair of 17 tokens does not fit into a row of 16 tokens"
    ):
        pack(conversations, sequence_length=SEQUENCE_LENGTH, seed=0, pairs=True)


def test_more_conversations_than_one_window_lose_nothing():
    conversations = random_conversations(1500, longest=8)
    rows = pack(conversations, sequence_length=64, seed=0)
    assert sorted(rows.tokens[rows.segment_ids > 0].tolist()) == sorted(
        token for item in conversations for token in item.token_ids
    )


def test_a_conversation_longer_than_a_row_is_refused_with_both_lengths():
    conversations = [conversation((1, 2, 3)), conversation((1,) * 9, (2,) * 8)]
    assert too_long(conversations, SEQUENCE_LENGTH) == 1
    with pytest.raises(UserError, match=r"17 tokens does not fit into a row of 16 tokens"):
        pack(conversations, sequence_length=SEQUENCE_LENGTH, seed=0)


def test_no_conversations_make_no_rows():
    rows = pack([], sequence_length=SEQUENCE_LENGTH, seed=0)
    assert rows.num_rows == 0
    assert rows.sequence_length == SEQUENCE_LENGTH
    assert rows.efficiency == 1.0
    assert rows.trained_tokens == 0


def test_a_batch_is_the_chosen_rows():
    rows = pack(random_conversations(40), sequence_length=32, seed=0)
    batch = rows.batch(np.array([2, 0]))
    np.testing.assert_array_equal(batch.tokens, rows.tokens[[2, 0]])
    np.testing.assert_array_equal(batch.loss_mask, rows.loss_mask[[2, 0]])
