"""Policies that report the tokens of their turns while they are decoded."""

import pytest

from mujica_jax.agents.agent import EnginePolicy, StreamingPolicy, TwoPolicies
from mujica_jax.inference.requests import Completion, SamplingParams
from tests.helpers.countable_engine import CountableEngine
from tests.helpers.little_agent import ToldPolicy
from tests.helpers.traffic import make_generator, params, run

PROMPT = [3, 4]


class Whole:
    """A generator that writes whole completions, like one behind an endpoint."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion

    async def generate(self, prompt, params, *, continues=False) -> Completion:
        return self.completion


def reported(
    policy: StreamingPolicy, wanted: SamplingParams, state: object = None
) -> tuple[Completion, list[list[int]]]:
    """Return the completion of a turn, and the token ids that were reported for it."""
    parts: list[list[int]] = []
    streaming = policy.streaming(lambda token_ids: parts.append(list(token_ids)))
    turn = streaming.generate(PROMPT, wanted, state=state, continues=False)
    return run(turn), parts


@pytest.mark.parametrize("stops", [(), ("c",)])
def test_a_streamed_turn_is_the_turn_and_its_tokens_are_reported_before_it_ends(stops):
    wanted = params(12, stop_strings=stops)
    generator = make_generator(CountableEngine(decode_steps=2))
    completion, parts = reported(EnginePolicy(generator), wanted)
    assert completion == run(generator.generate(PROMPT, wanted))
    assert [token for part in parts for token in part] == list(completion.token_ids)
    assert all(len(part) <= 2 for part in parts), "a decode call gives two tokens"


def test_a_generator_that_cannot_stream_reports_nothing_and_answers():
    generator = make_generator(CountableEngine())
    whole = run(generator.generate(PROMPT, params(12)))
    assert reported(EnginePolicy(Whole(whole)), params(12)) == (whole, [])


def test_of_two_models_each_reports_its_own_turns():
    class WorkerState:
        role = "worker"

    planner = EnginePolicy(make_generator(CountableEngine()))
    whole = run(make_generator(CountableEngine()).generate(PROMPT, params(5)))
    both = TwoPolicies(planner, EnginePolicy(Whole(whole)))
    completion, parts = reported(both, params(5))
    assert [token for part in parts for token in part] == list(completion.token_ids)
    assert reported(both, params(5), WorkerState()) == (whole, [])
    # A policy that knows no streams works beside one that does.
    assert isinstance(TwoPolicies(planner, ToldPolicy([])).streaming(print), TwoPolicies)
