"""Engine and trainer are compared token by token: against hand numbers, and with numbers that are
right or wrong on purpose.
"""

import dataclasses
import math

import jax
import numpy as np
import pytest

from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import Trainer
from mujica_jax.records import Conversation
from mujica_jax.runs.mismatch import compared, differences
from tests.helpers.episodes import episode
from tests.helpers.packed_rows import (
    MODEL,
    TRAINER,
    conversation,
    random_conversations,
    tiny_decoder,
)


def sampled(spoken: Conversation, logprobs: list[float]) -> Conversation:
    """Return the conversation with these as the engine's numbers of the model's tokens."""
    remaining = iter(logprobs)
    turns = []
    for turn in spoken.turns:
        if turn.role == "model":
            own_numbers = tuple(next(remaining) for _ in turn.token_ids)
            turns.append(dataclasses.replace(turn, logprobs=own_numbers))
        else:
            turns.append(turn)
    return dataclasses.replace(spoken, turns=tuple(turns))


def test_differences_are_those_of_the_sampled_tokens():
    first = sampled(conversation((1, 2), (3, 4), (5,), (6,)), [-1.0, -2.0, -0.5])
    second = sampled(conversation((7, 8), (9,)), [-3.0])
    rows = pack([first, second], sequence_length=16, seed=0)
    # whoever reads a token that was not sampled sees this
    scores = np.full(rows.tokens.shape, 99.0, np.float32)
    for index, numbers in ((0, {2: -1.0, 3: -2.5, 5: -0.25}), (1, {2: -3.0})):
        row, start = rows.placements[index]
        for offset, number in numbers.items():
            scores[row, start + offset] = number
    comparison = differences([first, second], rows, scores)
    assert comparison["compared_tokens"] == 4
    assert comparison["logprob_difference_mean"] == pytest.approx((0.5 - 0.25) / 4)
    assert comparison["logprob_difference_mean_absolute"] == pytest.approx((0.5 + 0.25) / 4)
    assert comparison["logprob_difference_max_absolute"] == pytest.approx(0.5)
    expected = (math.exp(-0.5) - 1 + 0.5 + math.exp(0.25) - 1 - 0.25) / 4
    assert comparison["logprob_kl"] == pytest.approx(expected)


@pytest.fixture(scope="module")
def trained():
    trainer = Trainer(MODEL, TRAINER)
    return trainer, trainer.initial_state(tiny_decoder())


@pytest.fixture(scope="module")
def right() -> list[Conversation]:
    """Return conversations with the numbers of the same weights.

    They are computed one by one and unpacked.
    """
    decoder = tiny_decoder()
    score = jax.jit(lambda batch: token_log_probs(decoder, batch))
    conversations = []
    for spoken in random_conversations(12, longest=24):
        alone = pack([spoken], sequence_length=32, seed=0)
        numbers = np.asarray(score(alone.batch(slice(None))))[0]
        model = np.array([turn.role == "model" for turn in spoken.turns for _ in turn.token_ids])
        conversations.append(sampled(spoken, numbers[: len(model)][model].tolist()))
    return conversations


def test_the_same_policy_agrees(trained, right):
    comparison = compared(
        *trained, [episode(*right[:5]), episode(*right[5:])], conversations=64, seed=3
    )
    assert comparison["compared_tokens"] == sum(
        len(t.token_ids) for spoken in right for t in spoken.turns if t.logprobs
    )
    assert comparison["logprob_difference_max_absolute"] < 1e-5
    assert abs(comparison["logprob_kl"]) < 1e-6


def test_one_wrong_number_is_seen(trained, right):
    turn = right[4].turns[1]
    assert turn.logprobs is not None
    wrong = dataclasses.replace(turn, logprobs=(turn.logprobs[0] + 0.5, *turn.logprobs[1:]))
    changed = dataclasses.replace(right[4], turns=(right[4].turns[0], wrong, *right[4].turns[2:]))
    comparison = compared(
        *trained, [episode(*right[:4], changed, *right[5:])], conversations=64, seed=3
    )
    assert comparison["logprob_difference_max_absolute"] == pytest.approx(0.5, abs=1e-4)


def test_a_sample_is_bounded_and_drawn_by_the_seed(trained, right):
    def tokens(seed: int) -> tuple[float, ...]:
        return tuple(compared(*trained, [episode(*right)], conversations=3, seed=seed).values())

    assert tokens(1) == tokens(1)
    assert len({tokens(seed) for seed in range(5)}) > 1
    longest = max(
        sum(len(turn.token_ids) for turn in spoken.turns if turn.logprobs) for spoken in right
    )
    assert tokens(1)[-1] <= 3 * longest


def test_what_has_no_numbers_or_fits_no_row_is_left_out(trained, right):
    bare = conversation((1, 2), (3,))
    long = sampled(conversation((1,), tuple(range(40))), [-1.0] * 40)
    assert compared(*trained, [episode(bare, long)], conversations=8, seed=0) == {}
    comparison = compared(*trained, [episode(bare, long, right[0])], conversations=8, seed=0)
    assert comparison["compared_tokens"] == sum(
        len(turn.token_ids) for turn in right[0].turns if turn.logprobs
    )
