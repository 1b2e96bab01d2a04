"""JetStream's engine interface on our engines, called by hand and by JetStream's own
orchestrator.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mujica_jax.inference.engine.base import Engine
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.models.tokenizer import Tokenizer
from tests.helpers.countable_engine import CountableEngine
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.tiny_engine import (
    PAGE_TOKENS,
    PAGES_A_SLOT,
    decoder,
    log_probs_of,
    make_engine,
    next_token_logits,
    random_tokens,
)
from tests.helpers.traffic import cached, nodes_of

PROGRAM = "tests.helpers.jetstream_orchestrator"
GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, seed=0)


def jetstream() -> Any:
    """Import our module for JetStream late, because it brings TensorFlow: only those who run these
    tests pay for it.
    """
    return importlib.import_module("mujica_jax.inference.jetstream.engine")


def contract() -> Any:
    return importlib.import_module("mujica_jax.inference.jetstream.contract")


def countable(slots: int = 3, **settings: Any) -> CountableEngine:
    return CountableEngine(slots=slots, decode_steps=1, **settings)


def tiny() -> Engine:
    return make_engine(slots=3, decode_steps=1, pages=3 * PAGES_A_SLOT)


def prefilled(engine: Any, tokens: Sequence[int], prefix: Any = None) -> Any:
    """Prefill as JetStream does: the prompt is padded, and a conversation begins with a token of
    its own.
    """
    tokens = [jetstream().NO_TOKEN, *tokens] if prefix is None else list(tokens)
    padded = jnp.asarray([*tokens, *[0] * (64 - len(tokens))])
    weights = engine.load_params()
    return engine.prefill(
        params=weights, existing_prefix=prefix, padded_tokens=padded, true_length=len(tokens)
    )


def steps(engine: Any, state: Any, slot: int, count: int) -> list[int]:
    """Return the tokens of one slot, as long as they are valid."""
    tokens = []
    before = int(state.generated[slot])
    for _ in range(count):
        state, result = engine.generate(engine.load_params(), state)
        data = result.convert_to_numpy().get_result_at_slot(slot)
        if not data.valid[0, 0]:
            break
        tokens.append(int(data.tokens[0, 0]))
        assert data.lengths[0] == before + len(tokens)
    return tokens


def greedy(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the greedy continuation by the decoder's full forward pass."""
    sequence = list(prompt)
    for _ in range(tokens):
        sequence.append(int(next_token_logits(decoder(), sequence)[-1].argmax()))
    return sequence[len(prompt) :]


def assert_nothing_is_held(engine: Any, running: int = 0) -> None:
    pages = engine._pages
    if not running:
        assert pages.free + len(cached(pages)) == pages.count
    assert all(node.users <= running for node in nodes_of(pages))


@pytest.mark.parametrize(
    "length",
    [1, 2, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, PAGE_TOKENS + 2, 3 * PAGE_TOKENS, 33],
)
def test_a_prompt_is_decoded_as_by_the_full_forward_on_both_sides_of_page_borders(length):
    engine = jetstream().JetStreamEngine(tiny(), GREEDY)
    prompt = random_tokens(length, seed=length)
    # computed again, memory is empty
    state = engine.insert(prefilled(engine, prompt), engine.init_decode_state(), slot=1)
    assert steps(engine, state, 1, 2 * PAGE_TOKENS + 1) == greedy(prompt, 2 * PAGE_TOKENS + 1)
    state = engine.insert(prefilled(engine, prompt), state, slot=0)  # from pages
    assert steps(engine, state, 0, 4) == greedy(prompt, 4)


def test_a_prompt_goes_on_from_an_earlier_prefix_without_computing_it_again():
    engine = countable(prefill_tokens=8)
    computed: list[int] = []
    prefill = engine.prefill

    def recorded(rows: list) -> None:
        computed.extend(len(row.tokens) for row in rows)
        prefill(rows)

    engine.prefill = recorded
    jet = jetstream().JetStreamEngine(engine, GREEDY)
    state = jet.init_decode_state()
    opening = [*range(1, 19)]
    ending = [7, 8, 9]
    first = prefilled(jet, opening)
    second = prefilled(jet, ending, first)
    assert computed == [], "a prefix is its token ids"
    state = jet.insert(second, jet.insert(first, state, slot=0), slot=1)
    for slot, prompt in enumerate([opening, [*opening, *ending]]):
        assert state.running[slot].prompt.tolist() == prompt
    tokens_of_slot: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(5):
        state, result = jet.generate(jet.load_params(), state)
        for slot, tokens in tokens_of_slot.items():
            tokens.append(int(result.get_result_at_slot(slot).tokens[0, 0]))
    assert max(computed) == 8, "in chunks"
    # The last token of a prompt is decoded. Four whole pages of the opening are shared, of 4 tokens
    # each.
    assert sum(computed) == 17 + (len(opening) + len(ending) - 1 - 16)
    assert jet.counters().prefilled_tokens == sum(computed)
    assert tokens_of_slot[0] == engine.by_hand(opening, GREEDY)[0][:5]
    assert tokens_of_slot[1] == engine.by_hand([*opening, *ending], GREEDY)[0][:5]


def test_what_prompts_inserted_together_begin_with_is_computed_once_and_the_rest_in_one_call():
    engine = countable(slots=3, prefill_tokens=64)
    calls: list[list[int]] = []
    prefill = engine.prefill

    def recorded(rows: list) -> None:
        calls.append([len(row.tokens) for row in rows])
        prefill(rows)

    engine.prefill = recorded
    jet = jetstream().JetStreamEngine(engine, GREEDY)
    state = jet.init_decode_state()
    shared = [*range(1, 14)]  # three whole pages and a token
    prompts = [[*shared, first, 3] for first in (5, 6, 7)]
    for slot, prompt in enumerate(prompts):
        state = jet.insert(prefilled(jet, prompt), state, slot=slot)
    state, result = jet.generate(jet.load_params(), state)
    assert calls == [[14], [2, 2]]
    tokens = [int(result.get_result_at_slot(slot).tokens[0, 0]) for slot in range(3)]
    assert tokens == [engine.by_hand(prompt, GREEDY)[0][0] for prompt in prompts]


def test_slots_that_are_filled_again_and_again_leak_no_page():
    engine = countable(slots=3, pages=3 * 16)
    jet = jetstream().JetStreamEngine(engine, GREEDY)
    state = jet.init_decode_state()
    draw = np.random.default_rng(0)
    for number in range(60):
        prompt = [1 + number % 3, *draw.integers(0, 20, draw.integers(1, 50)).tolist()]
        slot = number % 2
        state = jet.insert(prefilled(jet, prompt), state, slot=slot)
        wanted = engine.by_hand(prompt, GREEDY)[0][:3][: 64 - len(prompt)]
        assert steps(jet, state, slot, len(wanted)) == wanted
    for slot in range(2):
        state = jet.insert(jetstream().Prefix(()), state, slot=slot)
    jet.generate(jet.load_params(), state)
    assert_nothing_is_held(jet)


def test_a_slot_that_stops_is_not_valid_any_more_and_gives_its_pages_back():
    engine = countable()
    prompt = next([token] for token in range(20) if 0 in engine.by_hand([token], GREEDY)[0][1:])
    jet = jetstream().JetStreamEngine(engine, GREEDY)
    state = jet.insert(prefilled(jet, prompt), jet.init_decode_state(), slot=0)
    expected = engine.by_hand(prompt, GREEDY)[0]
    assert steps(jet, state, 0, 40) == expected
    assert expected[-1] == 0
    assert_nothing_is_held(jet)
    assert jet.build_tokenizer(jet.get_tokenizer()).stop_tokens == {0}


def test_a_slot_generates_no_more_than_it_may_and_than_there_are_positions():
    engine = countable(positions=32)
    engine.stop_token_ids = frozenset()
    for params, prompt, expected in (
        (GREEDY, [3] * 30, 2),
        (SamplingParams(max_new_tokens=4, temperature=0.0, seed=0), [3], 4),
    ):
        jet = jetstream().JetStreamEngine(engine, params)
        state = jet.insert(prefilled(jet, prompt), jet.init_decode_state(), slot=0)
        assert len(steps(jet, state, 0, 40)) == expected


@pytest.mark.parametrize(
    "tokens",
    [[], [3, 20], [3, -5], [3] * 63, [3] * 70],
    ids=["empty", "high", "low", "full", "cut"],
)
def test_a_prompt_that_cannot_be_served_is_answered_with_no_token(tokens):
    """An exception would end JetStream's process."""
    engine = countable(positions=63)
    jet = jetstream().JetStreamEngine(engine, GREEDY)
    padded = np.asarray([jetstream().NO_TOKEN, *tokens][-64:], float)
    refused = jet.prefill(
        params=jet.load_params(), padded_tokens=padded, true_length=1 + len(tokens)
    )
    assert refused.tokens == ()
    state = jet.insert(prefilled(jet, [3, 4]), jet.init_decode_state(), slot=0)
    state = jet.insert(refused, state, slot=1)
    assert prefilled(jet, [5], refused).tokens == ()
    assert steps(jet, state, 1, 3) == []
    assert steps(jet, state, 0, 3) == engine.by_hand([3, 4], GREEDY)[0][1:4], "the others go on"


def test_what_is_not_finite_ends_its_slot_alone():
    engine = countable()
    engine.broken_seed = 1  # of the second request
    jet = jetstream().JetStreamEngine(engine, GREEDY)
    state = jet.insert(prefilled(jet, [3, 4]), jet.init_decode_state(), slot=0)
    state = jet.insert(prefilled(jet, [3, 4]), state, slot=1)
    assert steps(jet, state, 1, 3) == []
    assert steps(jet, state, 0, 3) == engine.by_hand([3, 4], GREEDY)[0][1:4]


def test_a_prompt_that_is_not_finite_leaves_no_page_that_others_could_read():
    """The second request reads pages of the first before anyone has seen a logit."""
    engine = countable()
    engine.broken_seed = 0  # of the first request
    jet = jetstream().JetStreamEngine(engine, GREEDY)
    prompt = [*range(1, 15)]  # three whole pages and a part
    state = jet.init_decode_state()
    state = jet.insert(prefilled(jet, prompt), state, slot=0)
    state = jet.insert(prefilled(jet, prompt), state, slot=1)
    state, result = jet.generate(jet.load_params(), state)
    assert [result.get_result_at_slot(slot).valid[0, 0] for slot in range(2)] == [0, 1]
    assert_nothing_is_held(jet, running=1)
    state = jet.insert(jetstream().Prefix(()), state, slot=1)
    engine.broken_seed = 2  # of the third
    state = jet.insert(prefilled(jet, [19, *prompt]), state, slot=0)
    assert steps(jet, state, 0, 3) == []
    assert not any(19 in node.tokens for node in nodes_of(jet._pages))


def test_a_prefix_is_nothing_to_delete_or_to_move():
    jet = jetstream().JetStreamEngine(countable(), GREEDY)
    prefix = prefilled(jet, [3, 4])
    assert jax.tree.leaves(prefix) == []
    jax.tree_map(lambda leaf: leaf.delete(), prefix)  # as JetStream does: the alias stands
    assert jax.device_put(prefix, jet.get_prefix_destination_sharding()).tokens == (3, 4)


def test_sampled_requests_have_seeds_of_their_own():
    engine = countable()
    jet = jetstream().JetStreamEngine(
        engine, SamplingParams(max_new_tokens=40, temperature=1.0, seed=5)
    )
    state = jet.init_decode_state()
    for number in range(3):
        state = jet.insert(prefilled(jet, [3, 4]), state, slot=0)
        wanted = SamplingParams(max_new_tokens=4, temperature=1.0, seed=5 + number)
        assert steps(jet, state, 0, 4) == engine.by_hand([3, 4], wanted)[0]


# --- inserted with the request's own sampling ---


def test_a_call_gives_several_tokens_and_each_slot_has_its_own_sampling_and_limit():
    engine = CountableEngine(slots=2, decode_steps=4)
    engine.stop_token_ids = frozenset()
    jet = jetstream().JetStreamEngine(engine)
    state = jet.init_decode_state()
    wanted = [
        SamplingParams(max_new_tokens=6, temperature=1.0, seed=7),
        SamplingParams(max_new_tokens=3, temperature=0.0, seed=0),
    ]
    for slot, sampling in enumerate(wanted):
        state = jet.insert(prefilled(jet, [3, 4]), state, slot, sampling=sampling)
    valid = [[], []]
    tokens = [[], []]
    for _ in range(2):
        state, result = jet.generate(jet.load_params(), state)
        for slot in range(2):
            data = result.get_result_at_slot(slot)
            valid[slot] += data.valid[0].tolist()
            tokens[slot] += data.tokens[0, data.valid[0].astype(bool)].tolist()
            assert data.lengths[0] == len(tokens[slot])
    assert valid == [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
    assert tokens == [engine.by_hand([3, 4], sampling)[0] for sampling in wanted]
    assert_nothing_is_held(jet)


def test_an_insert_without_room_says_so_and_finds_it_when_a_slot_is_freed():
    engine = CountableEngine(slots=2, decode_steps=1, pages=16)  # 64 tokens
    engine.stop_token_ids = frozenset()
    jet = jetstream().JetStreamEngine(engine)
    state = jet.init_decode_state()
    sampling = SamplingParams(max_new_tokens=10, temperature=0.0, seed=0)
    state = jet.insert(prefilled(jet, [3] * 30), state, 0, sampling=sampling)  # ten pages
    with pytest.raises(
        contract().NoRoomError, match="need 10 pages of KV cache, but only 16 of 16 are available"
    ):
        # not computed yet, and counted
        jet.insert(prefilled(jet, [4] * 30), state, 1, sampling=sampling)
    state, _ = jet.generate(jet.load_params(), state)
    with pytest.raises(
        contract().NoRoomError, match="need 10 pages of KV cache, but only 6 of 16 are available"
    ):
        jet.insert(prefilled(jet, [4] * 30), state, 1, sampling=sampling)
    jet.free_resource(0)
    assert_nothing_is_held(jet)
    state = jet.insert(prefilled(jet, [4] * 30), state, 1, sampling=sampling)
    assert steps(jet, state, 1, 10) == engine.by_hand([4] * 30, sampling)[0]


def test_without_sampling_for_all_requests_an_insert_brings_its_own():
    jet = jetstream().JetStreamEngine(countable())
    with pytest.raises(ValueError, match="insert with sampling=SamplingParams"):
        jet.insert(prefilled(jet, [3]), jet.init_decode_state(), slot=0)


def test_load_params_replaces_the_policy():
    engine = countable()
    jet = jetstream().JetStreamEngine(engine, GREEDY)
    old = jet.load_params()
    assert jet.load_params() is old
    new = jet.load_params(nnx.State({"policy": jnp.asarray(3)}))
    state = jet.insert(prefilled(jet, [3, 4]), jet.init_decode_state(), slot=0)
    assert steps(jet, state, 0, 3) == engine.by_hand([3, 4], GREEDY, policy=3)[0][:3]
    with pytest.raises(ValueError, match="the result of load_params"):
        jet.generate(old, state)
    assert jet.load_params() is new


@pytest.mark.parametrize(
    "engine, params, sentence",
    [
        (lambda: CountableEngine(decode_steps=3), GREEDY, "decodes 3 steps per call"),
        (lambda: countable(pages=47), GREEDY, "47 pages, but its 3 slots need 48"),
        (
            countable,
            SamplingParams(max_new_tokens=4, temperature=0.0, seed=0, stop_strings=("x",)),
            "stop strings",
        ),
    ],
)
def test_settings_that_jetstream_cannot_work_with_are_refused(engine, params, sentence):
    with pytest.raises(ValueError, match=sentence):
        jetstream().JetStreamEngine(engine(), params)


def test_foreign_weights_and_states_are_refused():
    jet = jetstream().JetStreamEngine(countable(), GREEDY)
    old = jet.init_decode_state()
    jet.init_decode_state()
    with pytest.raises(ValueError, match="the result of load_params"):
        jet.generate({}, old)
    with pytest.raises(ValueError, match="was replaced"):
        jet.generate(jet.load_params(), old)


def test_texts_are_encoded_as_prompts_and_decoded_token_by_token():
    tokenizer = Tokenizer.train(iter(["plain"]), 300)
    jet = jetstream().JetStreamEngine(countable(), GREEDY, tokenizer=tokenizer)
    wrapped = jet.build_tokenizer(jet.get_tokenizer())
    padded, length = wrapped.encode(
        "a é", is_bos=True, max_prefill_length=jet.max_prefill_length, jax_padding=False
    )
    ids = tokenizer.encode_trusted("a é")
    assert padded.tolist() == [
        jetstream().NO_TOKEN,
        *ids,
        *[0] * (16 - length),
    ]
    assert length == 1 + len(ids)
    pieces = [wrapped.decode([id]) for id in ids]
    assert pieces[0] == "a"
    assert pieces[-2:] == ["<0xC3>", "<0xA9>"]
    assert (
        jetstream()
        .JetStreamTokenizer(None, frozenset({0}))
        .encode("a é", is_bos=True, max_prefill_length=16)[1]
        == 1
    )


def test_jetstreams_orchestrator_gives_the_tokens_of_our_generator():
    """It runs in its own process: JetStream's threads end theirs on any fault, and it takes over
    the logging.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(
        [sys.executable, "-m", PROGRAM],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=environment,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert len(report["generator"]) == 8
    assert min(map(len, report["generator"])) > 1
    assert report["orchestrator"] == report["generator"]
    prompts = report["prompts"]
    answers = report["generator"]
    best = [
        greedy(prompt, len(answer)) for prompt, answer in zip(prompts[:2], answers[:2], strict=True)
    ]
    assert best == answers[:2]
    assert np.isfinite(log_probs_of(decoder(), prompts[0] + answers[0], len(answers[0]))).all()
    assert report["refused"] == [], "a prompt that cannot be served has an empty answer"
