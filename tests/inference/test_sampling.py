"""The drawing of a token, compared with numpy's softmax in float64 and the logits warpers of
transformers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mujica_jax.inference.sampling import BLOCK_TOKENS, Filters, Sampled, sample, uniforms

sample_compiled = jax.jit(sample)
uniforms_compiled = jax.jit(uniforms)
ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
# One token, a part of a block, whole blocks, one over, and more blocks than the triangular product
# is used for (512).
VOCABULARIES = (1, 5, BLOCK_TOKENS, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, 600 * BLOCK_TOKENS + 7)
SMALL = 70  # a block and six tokens
DRAWS = 128  # rows of one vocabulary share a program
EVENLY = (np.arange(DRAWS) + 0.5) / DRAWS


def draw(logits, temperature, uniform) -> tuple[np.ndarray, np.ndarray]:
    """Call `sample` on rows of one vocabulary.

    One row of logits, one temperature or one uniform number serves all rows.
    """
    rows = max(np.ndim(logits) > 1 and len(logits), np.size(temperature), np.size(uniform))
    logits = np.broadcast_to(np.asarray(logits, np.float32), (rows, np.shape(logits)[-1]))
    temperature = np.broadcast_to(np.asarray(temperature, np.float32), rows)
    uniform = np.broadcast_to(np.asarray(uniform, np.float32), rows)
    return tuple(map(np.asarray, sample_compiled(logits, temperature, uniform)))[:2]


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def random_logits(
    vocabulary: int, seed: int = 0, rows: int | None = None, deviation: float = 1.0
) -> np.ndarray:
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
def test_evenly_spaced_uniforms_draw_each_token_as_often_as_its_probability_says(
    vocabulary, temperature
):
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
@example(
    allowed=np.arange(SMALL) == BLOCK_TOKENS, uniform=[0.0, ALMOST_ONE] * 2, temperature=1.0, seed=0
)
@settings(max_examples=200, deadline=None)
def test_a_token_of_zero_weight_is_never_drawn(allowed, uniform, temperature, seed):
    logits = np.where(allowed, random_logits(SMALL, seed), -np.inf)
    tokens, log_probabilities = draw(logits, temperature, uniform)
    assert allowed[tokens].all()
    assert np.isfinite(log_probabilities).all()


@pytest.mark.parametrize("allowed", [3, 40, BLOCK_TOKENS, BLOCK_TOKENS + 2])
def test_the_largest_uniform_number_draws_a_token_that_has_weight(allowed):
    """Where the sums of blocks and of tokens round differently, it points behind the last token."""
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


@given(
    logits=arrays.arrays(np.float32, SMALL, elements=st.floats(-30, 30, width=32)),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_a_low_temperature_draws_the_mode(logits, seed):
    logits[int(logits.argmax())] += 1.0
    uniform = uniforms_compiled(np.asarray([seed], np.uint32), np.asarray([3], np.int32))
    assert draw(logits, 1e-3, uniform)[0] == logits.argmax()


def test_log_probabilities_are_not_computed_in_half_precision():
    with pytest.raises(AssertionError, match=r"float32"):
        sample(jnp.zeros((1, 4), jnp.bfloat16), jnp.ones(1), jnp.zeros(1))


def every_pair(num_seeds: int, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seeds and the positions of every pair of both."""
    seeds, positions = np.meshgrid(
        np.arange(num_seeds, dtype=np.uint32), np.arange(num_positions, dtype=np.int32)
    )
    return seeds.ravel(), positions.ravel()


def test_a_uniform_number_is_a_function_of_seed_and_position_alone():
    seeds, positions = every_pair(40, 25)
    whole = np.asarray(uniforms_compiled(seeds, positions))
    order = np.random.default_rng(0).permutation(len(seeds))
    np.testing.assert_array_equal(
        np.asarray(uniforms_compiled(seeds[order], positions[order])), whole[order]
    )
    alone = [
        float(uniforms_compiled(seeds[n : n + 1], positions[n : n + 1])[0])
        for n in range(0, 1000, 97)
    ]
    assert alone == whole[::97].tolist()


def test_uniform_numbers_differ_between_seeds_and_between_positions():
    seeds, positions = every_pair(40, 40)
    drawn = np.asarray(uniforms_compiled(seeds, positions)).reshape(40, 40)
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert abs(drawn.mean() - 0.5) < 0.03, (
        "1,600 uniform numbers: four deviations of their mean are 0.029"
    )
    off_diagonal = ~np.eye(40, dtype=bool)
    assert (drawn != drawn.T)[off_diagonal].all(), (
        "seed 3 at position 5 is not seed 5 at position 3"
    )
    for axis in (0, 1):
        assert (np.diff(drawn, axis=axis) != 0).all()


# --- filters, against the logits warpers of transformers ---

FILTERS = {
    "top_k 1": {"top_k": 1},
    "top_k 5": {"top_k": 5},
    "top_k all": {"top_k": SMALL},
    "top_k more than all": {"top_k": 10 * SMALL},
    "top_p tiny": {"top_p": 1e-6},
    "top_p half": {"top_p": 0.5},
    "top_p nearly all": {"top_p": 0.999},
    "min_p 0.05": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 12, "top_p": 0.6},
    "top_k and min_p": {"top_k": 8, "min_p": 0.2},
    "top_p and min_p": {"top_p": 0.8, "min_p": 0.1},
    "all three": {"top_k": 20, "top_p": 0.7, "min_p": 0.02},
    "none": {},
}


def filters_of(rows: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
    )


def draw_filtered(logits: np.ndarray, temperature: float, uniform, filters: Filters) -> Sampled:
    rows = len(logits)
    temperatures = np.full(rows, temperature, np.float32)
    return Sampled(
        *map(
            np.asarray,
            sample_compiled(logits, temperatures, np.asarray(uniform, np.float32), filters),
        )
    )


def warped(
    logits: np.ndarray,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
):
    """Return the logits after transformers' warpers, -inf where a token may not be drawn."""
    warpers = [transformers.TemperatureLogitsWarper(float(temperature))]
    warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [transformers.MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.from_numpy(logits.astype(np.float64))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.numpy()


def drawn_of_one(logits: np.ndarray, temperature: float, chosen: dict) -> set[int]:
    """Return all tokens that evenly spaced uniform numbers draw.

    The logits make each allowed token likely enough to be hit.
    """
    rows = np.broadcast_to(logits, (DRAWS * 16, len(logits)))
    uniform = (np.arange(len(rows)) + 0.5) / len(rows)
    return set(
        draw_filtered(rows, temperature, uniform, filters_of(len(rows), **chosen)).token.tolist()
    )


@pytest.mark.parametrize("chosen", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_tokens_that_filters_allow_are_those_of_transformers(temperature, chosen):
    for seed in range(3):
        # no token is less likely than one in 2,000
        logits = random_logits(SMALL, seed=seed, deviation=temperature)
        allowed = np.flatnonzero(np.isfinite(warped(logits[None], temperature, **chosen)[0]))
        assert drawn_of_one(logits, temperature, chosen) == set(allowed.tolist())


@pytest.mark.parametrize("chosen", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_sampling_log_probabilities_are_the_log_softmax_of_the_filtered_logits(temperature, chosen):
    logits = random_logits(SMALL, seed=4, rows=DRAWS, deviation=2.0)
    drawn = draw_filtered(logits, temperature, EVENLY, filters_of(DRAWS, **chosen))
    expected = log_softmax(warped(logits, temperature, **chosen))[np.arange(DRAWS), drawn.token]
    assert np.isfinite(expected).all(), "a token was drawn that transformers would not draw"
    np.testing.assert_allclose(drawn.sampling_logprob, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", FILTERS.values(), ids=FILTERS)
def test_log_probabilities_stay_those_of_the_policy_whatever_is_filtered(chosen):
    logits = random_logits(SMALL, seed=5, rows=DRAWS, deviation=2.0)
    drawn = draw_filtered(logits, 0.7, EVENLY, filters_of(DRAWS, **chosen))
    np.testing.assert_allclose(
        drawn.logprob, log_softmax(logits)[np.arange(DRAWS), drawn.token], rtol=1e-6, atol=1e-5
    )


@given(
    logits=arrays.arrays(
        np.float32, SMALL, elements=st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 1.5])
    ),
    top_k=st.integers(0, SMALL + 1),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_of_tokens_that_are_equally_likely_all_or_none_may_be_drawn(logits, top_k, top_p, min_p):
    """transformers cuts a tie at top_p where its sort left it.

    Ours allows what it allows, and every token as likely as the least likely of them.
    """
    filtered = warped(logits[None], 1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    theirs = np.isfinite(filtered[0])
    drawn_tokens = drawn_of_one(logits, 1.0, {"top_k": top_k, "top_p": top_p, "min_p": min_p})
    assert {float(logit) for logit in logits[sorted(drawn_tokens)]} == set(logits[theirs].tolist())
    assert drawn_tokens == set(np.flatnonzero(logits >= logits[theirs].min()).tolist())


@pytest.mark.parametrize(
    "chosen", [{"top_k": 6}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7}]
)
def test_draws_of_many_requests_follow_the_filtered_distribution(chosen):
    draws = 20_000
    logits = random_logits(SMALL, seed=1)
    rows = np.broadcast_to(logits, (draws, SMALL))
    uniform = uniforms_compiled(np.arange(draws, dtype=np.uint32), np.full(draws, 17, np.int32))
    tokens = draw_filtered(rows, 0.8, uniform, filters_of(draws, **chosen)).token
    expected = draws * np.exp(log_softmax(warped(logits[None], 0.8, **chosen)[0]))
    counts = np.bincount(tokens, minlength=SMALL)
    allowed = expected > 0
    assert counts[~allowed].sum() == 0
    freedom = allowed.sum() - 1
    chi_square = ((counts - expected)[allowed] ** 2 / expected[allowed]).sum()
    assert chi_square < freedom + 4.5 * np.sqrt(2 * freedom) + 6, "further than once in a thousand"


def test_a_share_too_small_for_a_float_leaves_the_most_likely_token():
    logits = random_logits(SMALL, rows=DRAWS)
    drawn = draw_filtered(logits, 1.0, EVENLY, filters_of(DRAWS, top_p=1e-60))
    np.testing.assert_array_equal(drawn.token, logits.argmax(axis=-1))
    np.testing.assert_array_equal(drawn.sampling_logprob, 0.0)


@pytest.mark.parametrize(
    "temperature", [float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)]
)
def test_the_smallest_and_the_largest_temperature_give_numbers(temperature):
    logits = random_logits(SMALL, rows=DRAWS)
    drawn = draw_filtered(logits, temperature, EVENLY, filters_of(DRAWS))
    assert np.isfinite(drawn.logprob).all()
    assert np.isfinite(drawn.sampling_logprob).all()
    if temperature < 1:
        np.testing.assert_array_equal(drawn.token, logits.argmax(axis=-1))
    else:
        np.testing.assert_allclose(drawn.sampling_logprob, -np.log(SMALL), rtol=1e-6)


def test_filters_of_one_row_change_no_other():
    logits = random_logits(SMALL, rows=DRAWS, deviation=2.0)
    mixed = filters_of(DRAWS)
    mixed.top_k[::3] = 2
    mixed.top_p[::5] = 0.3
    mixed.min_p[::7] = 0.5
    untouched = (mixed.top_k == 0) & (mixed.top_p == 1) & (mixed.min_p == 0)
    ours = draw_filtered(logits, 1.3, EVENLY, mixed)
    theirs = Sampled(
        *map(
            np.asarray, sample_compiled(logits, np.full(DRAWS, 1.3, np.float32), np.float32(EVENLY))
        )
    )
    for values, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(values[untouched], expected[untouched])
    assert (ours.token != theirs.token)[~untouched].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_show_in_the_log_probability_of_their_row_alone(bad):
    logits = random_logits(SMALL, rows=4)
    logits[1, 7] = bad
    drawn = draw_filtered(logits, 1.0, EVENLY[:4], filters_of(4, top_k=3, top_p=0.9))
    assert np.isfinite(drawn.logprob).tolist() == [True, False, True, True]
