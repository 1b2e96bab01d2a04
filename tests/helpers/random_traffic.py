"""Traffic that hypothesis draws, for any generator on an engine whose completions are computed by
hand.
"""

import asyncio
from typing import Any

import jax.numpy as jnp
from flax import nnx
from hypothesis import strategies as st

from mujica_jax.inference.requests import DeadlineError, RequestError, SamplingParams
from tests.helpers.countable_engine import CountableEngine
from tests.helpers.traffic import params, run, streamed

# What the tokens of a small vocabulary say: a character in two parts, tokens of several letters,
# one without text.
PIECES = [b"<stop>", b"a", b"b", b"ab", b"", "é".encode()[:1], "é".encode()[1:], b"aab"]
VOCABULARY = len(PIECES)
STOPS = ["a", "ab", "ba", "aaba", "é", "bé"]


def policy(version: int) -> nnx.State:
    return nnx.State({"policy": jnp.asarray(version)})


def expected(
    engine: CountableEngine, prompt: list[int], wanted: SamplingParams, version: int
) -> tuple[list[int], list[float], str]:
    """Return tokens, log-probabilities and finish reason of a request alone.

    The whole text is searched for stop strings after every token.
    """
    tokens, logprobs = engine.by_hand(prompt, wanted, version)
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] in engine.stop_token_ids.union(wanted.stop_token_ids):
            return tokens[:count], logprobs[:count], "stop"
        text = b"".join(PIECES[token] for token in tokens[:count])
        if any(stop.encode() in text for stop in wanted.stop_strings):
            return tokens[:count], logprobs[:count], "stop_string"
    return tokens, logprobs, "length"


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(1, 2), min_size=1, max_size=16),
        "wanted": st.builds(
            params,
            st.integers(1, 10),
            st.sampled_from([0.0, 1.0]),
            st.integers(0, 3),
            stop_strings=st.lists(st.sampled_from(STOPS), max_size=2).map(tuple),
            stop_token_ids=st.sets(st.integers(1, VOCABULARY - 1), max_size=1).map(tuple),
            deadline_seconds=st.sampled_from([None, None, None, 1e-9, 0.002]),
        ),
        "continues": st.booleans(),  # then it comes back with its completion
        "streams": st.booleans(),
        "cancelled_after": st.none() | st.none() | st.integers(0, 40),  # turns of the loop
    }
)
actions = st.lists(
    st.tuples(st.just("ask"), requests)
    | st.tuples(st.just("wait"), st.integers(1, 60))
    | st.tuples(st.sampled_from(["swap", "reset"]), st.none()),
    max_size=14,
)


engines = st.builds(
    CountableEngine,
    slots=st.integers(1, 3),
    positions=st.just(28),
    decode_steps=st.integers(1, 4),
    vocabulary=st.just(VOCABULARY),
    page_tokens=st.sampled_from([2, 3, 4]),
    pages=st.integers(8, 14),
    prefill_tokens=st.integers(1, 8),
)


def play(actions: list[tuple[str, Any]], engine: CountableEngine, generator: Any) -> None:
    """Do the drawn actions.

    Check that each request gets the result it would get alone, and that the engine holds nothing at
    the end.
    """

    async def ask(
        prompt: list[int], wanted: SamplingParams, continues: bool, streams: bool, version: int
    ) -> None:
        shown: list[int] = []
        try:
            if streams:
                await streamed(generator, prompt, wanted, continues=continues, shown=shown)
                assert shown == expected(engine, prompt, wanted, version)[0]
            else:
                got = await generator.generate(prompt, wanted, continues=continues)
                assert got.policy_version == version
                tokens, logprobs, reason = expected(engine, prompt, wanted, version)
                assert (list(got.token_ids), got.finish_reason) == (tokens, reason)
                if generator.capabilities.log_probabilities:
                    assert list(got.logprobs) == logprobs
                    assert list(got.sampling_logprobs) == [2 * logprob for logprob in logprobs]
                else:
                    assert got.logprobs is None
                    assert got.sampling_logprobs is None
                longer = [*prompt, *tokens, 1]
                if continues and len(longer) + wanted.max_new_tokens <= engine.positions:
                    await ask(longer, wanted, continues, streams, version)
        except DeadlineError:
            assert wanted.deadline_seconds is not None
        except RequestError as error:
            assert "pages of KV cache" in str(error)
            assert (
                -(-(len(prompt) + wanted.max_new_tokens) // engine.page_tokens) > engine.num_pages
            )
        finally:  # whatever was shown is the beginning of what is right
            assert shown == expected(engine, prompt, wanted, version)[0][: len(shown)]

    async def cancel(task: asyncio.Task, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()

    async def main() -> None:
        for action, argument in actions:
            if action == "ask":
                turns = argument["cancelled_after"]
                asking = ask(
                    argument["prompt"],
                    argument["wanted"],
                    continues=argument["continues"],
                    streams=argument["streams"],
                    version=generator.policy_version,
                )
                tasks.append(asyncio.create_task(asking))
                if turns is not None:
                    tasks.append(asyncio.create_task(cancel(tasks[-1], turns)))
            elif action == "wait":
                for _ in range(argument):
                    await asyncio.sleep(0)
            else:
                await asyncio.gather(*tasks, return_exceptions=True)
                await at_rest(generator)
                generator.reset_cache()
                if action == "swap":
                    version = generator.policy_version + 1
                    generator.set_weights(policy(version), version)
                    assert generator.policy_version == engine.policy == version
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        await at_rest(generator)

    tasks: list[asyncio.Task] = []
    run(main())
    assert not engine.tables


async def at_rest(generator: Any) -> None:
    while generator._driver is not None and not generator._driver.done():
        await asyncio.sleep(0)
