"""Drawing a token, against numpy's softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mujica_jax.inference.sampling import BLOCK_TOKENS, sample, uniforms

sample_compiled = jax.jit(sample)
uniforms_compiled = jax.jit(uniforms)
ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
# One token, a part of a block, whole blocks, one over, and more blocks than the triangular product is used for (512).
VOCABULARIES = (1, 5, BLOCK_TOKENS, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, 600 * BLOCK_TOKENS + 7)
SMALL = 70  # a block and six tokens
DRAWS = 128  # rows of one vocabulary share a program
EVENLY = (np.arange(DRAWS) + 0.5) / DRAWS


def draw(logits, temperature, uniform) -> tuple[np.ndarray, np.ndarray]:
    """`sample` on rows of one vocabulary: one row of logits, temperature or uniform number serves all."""
    rows = max(np.ndim(logits) > 1 and len(logits), np.size(temperature), np.size(uniform))
    logits = np.broadcast_to(np.asarray(logits, np.float32), (rows, np.shape(logits)[-1]))
    temperature = np.broadcast_to(np.asarray(temperature, np.float32), rows)
    uniform = np.broadcast_to(np.asarray(uniform, np.float32), rows)
    return tuple(map(np.asarray, sample_compiled(logits, temperature, uniform)))


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def random_logits(vocabulary: int, seed: int = 0, rows: int | None = None, deviation: float = 1.0) -> np.ndarray:
    shape = vocabulary if rows is None else (rows, vocabulary)
    return np.random.default_rng(seed).normal(0, deviation, shape).astype(np.float32)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_temperature_zero_takes_the_most_likely_token(vocabulary):
    logits = random_logits(vocabulary, rows=DRAWS)
    tokens, _ = draw(logits, 0.0, EVENLY)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))


def test_of_equally_likely_tokens_greedy_takes_the_first():
    logits = np.zeros(SMALL)
    logits[[9, 66]] = 3.0
    assert draw(logits, 0.0, [0.0, ALMOST_ONE])[0].tolist() == [9, 9]


def test_greedy_and_drawn_rows_share_a_batch():
    logits = random_logits(SMALL)
    tokens, _ = draw(logits, [0.0, 1.0, 0.0], ALMOST_ONE)
    assert tokens.tolist() == [logits.argmax(), SMALL - 1, logits.argmax()]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_evenly_spaced_uniforms_draw_each_token_as_often_as_its_probability_says(vocabulary, temperature):
    logits = random_logits(vocabulary, deviation=3.0)
    tokens, _ = draw(logits, temperature, EVENLY)
    assert (np.diff(tokens) >= 0).all(), "the cumulative distribution is inverted, so order is kept"
    edges = np.searchsorted(tokens, np.arange(vocabulary), side="right") / DRAWS
    expected = np.cumsum(np.exp(log_softmax(logits / temperature)))
    np.testing.assert_allclose(edges, expected, atol=0.5 / DRAWS + 1e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draws_of_many_requests_follow_the_softmax(temperature):
    draws = 20_000
    logits = random_logits(SMALL, seed=1)
    uniform = uniforms_compiled(np.arange(draws, dtype=np.uint32), np.full(draws, 17, np.int32))
    counts = np.bincount(draw(logits, temperature, uniform)[0], minlength=SMALL)
    expected = draws * np.exp(log_softmax(logits / temperature))
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 112, "69 degrees of freedom exceed 111.06 once in a thousand"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
def test_log_probabilities_are_those_of_the_unmodified_logits(vocabulary, temperature):
    logits = random_logits(vocabulary, rows=DRAWS, deviation=4.0)
    tokens, log_probabilities = draw(logits, temperature, EVENLY)
    assert log_probabilities.dtype == np.float32
    expected = log_softmax(logits)[np.arange(DRAWS), tokens]
    np.testing.assert_allclose(log_probabilities, expected, rtol=1e-6, atol=1e-5)


def test_large_logits_do_not_overflow():
    logits = np.asarray([1e4, 1e4 - 1, -1e4])
    tokens, log_probabilities = draw(logits, 1.0, [0.0, ALMOST_ONE])
    assert tokens.tolist() == [0, 1]
    np.testing.assert_allclose(log_probabilities, log_softmax(logits)[:2], atol=1e-5)


@given(
    allowed=arrays.arrays(bool, SMALL, elements=st.booleans()).filter(np.any),
    uniform=st.lists(st.floats(0, ALMOST_ONE, width=32), min_size=4, max_size=4),
    temperature=st.sampled_from([1e-3, 0.5, 1.0, 50.0]),
    seed=st.integers(0, 1000),
)
@example(allowed=np.arange(SMALL) == 0, uniform=[0.0, ALMOST_ONE] * 2, temperature=1.0, seed=0)
@example(allowed=np.arange(SMALL) == BLOCK_TOKENS, uniform=[0.0, ALMOST_ONE] * 2, temperature=1.0, seed=0)
@settings(max_examples=200, deadline=None)
def test_a_token_of_zero_weight_is_never_drawn(allowed, uniform, temperature, seed):
    logits = np.where(allowed, random_logits(SMALL, seed), -np.inf)
    tokens, log_probabilities = draw(logits, temperature, uniform)
    assert allowed[tokens].all()
    assert np.isfinite(log_probabilities).all()


@pytest.mark.parametrize("allowed", [3, 40, BLOCK_TOKENS, BLOCK_TOKENS + 2])
def test_the_largest_uniform_number_draws_a_token_that_has_weight(allowed):
    """Where the sums of blocks and of tokens round apart, it points behind the last one."""
    logits = random_logits(SMALL, rows=DRAWS, deviation=2.0)
    logits[:, allowed:] = -np.inf
    tokens, log_probabilities = draw(logits, 1.0, ALMOST_ONE)
    assert (tokens < allowed).all()
    assert np.isfinite(log_probabilities).all()


@pytest.mark.parametrize("first", [0, 5, BLOCK_TOKENS, BLOCK_TOKENS + 5])
def test_the_smallest_uniform_number_draws_the_first_token_that_has_weight(first):
    logits = random_logits(SMALL, rows=DRAWS)
    logits[:, :first] = -np.inf
    logits[:, -1] = 9.0  # the mode is another one
    assert (draw(logits, 1.0, 0.0)[0] == first).all()


@given(logits=arrays.arrays(np.float32, SMALL, elements=st.floats(-30, 30, width=32)), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_a_low_temperature_draws_the_mode(logits, seed):
    logits[int(logits.argmax())] += 1.0
    uniform = uniforms_compiled(np.asarray([seed], np.uint32), np.asarray([3], np.int32))
    assert draw(logits, 1e-3, uniform)[0] == logits.argmax()


def test_log_probabilities_are_not_computed_in_half_precision():
    with pytest.raises(AssertionError, match=r"float32"):
        sample(jnp.zeros((1, 4), jnp.bfloat16), jnp.ones(1), jnp.zeros(1))


def test_a_uniform_number_is_a_function_of_seed_and_position_alone():
    seeds, positions = (grid.ravel() for grid in np.meshgrid(np.arange(40, dtype=np.uint32), np.arange(25)))
    positions = positions.astype(np.int32)
    whole = np.asarray(uniforms_compiled(seeds, positions))
    order = np.random.default_rng(0).permutation(len(seeds))
    np.testing.assert_array_equal(np.asarray(uniforms_compiled(seeds[order], positions[order])), whole[order])
    alone = [float(uniforms_compiled(seeds[n : n + 1], positions[n : n + 1])[0]) for n in range(0, 1000, 97)]
    assert alone == whole[::97].tolist()


def test_uniform_numbers_differ_between_seeds_and_between_positions():
    seeds, positions = (grid.ravel() for grid in np.meshgrid(np.arange(40, dtype=np.uint32), np.arange(40)))
    drawn = np.asarray(uniforms_compiled(seeds, positions.astype(np.int32))).reshape(40, 40)
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert abs(drawn.mean() - 0.5) < 0.03, "1,600 uniform numbers: four deviations of their mean are 0.029"
    off_diagonal = ~np.eye(40, dtype=bool)
    assert (drawn != drawn.T)[off_diagonal].all(), "seed 3 at position 5 is not seed 5 at position 3"
    for axis in (0, 1):
        assert (np.diff(drawn, axis=axis) != 0).all()
