"""Run JetStream's own driver and orchestrator on our engine, as JetStream's tests use them.

Started by inference/jetstream/test_engine.py.

Prints one line: prompts, the tokens that our generator gives, and those that came through
JetStream.
"""

import asyncio
import json
import logging

from mujica_jax.inference.jetstream.engine import JetStreamEngine
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.inference.scheduler import BatchedGenerator
from tests.helpers.tiny_engine import PAGE_TOKENS, PAGES_A_SLOT, make_engine, random_tokens

SLOTS = 4
MAX_TOKENS = 150
LENGTHS = (
    1,
    PAGE_TOKENS - 1,
    PAGE_TOKENS,
    PAGE_TOKENS + 1,
    20,
    33,
    40,
    5,
)  # of prompts; more than there are slots
SHARED = random_tokens(2 * PAGE_TOKENS + 3, seed=99)


def prompts() -> list[list[int]]:
    """Return eight prompts. Every second one shares its beginning with others."""
    return [
        [*(SHARED if number % 2 else []), *random_tokens(length, seed=number)]
        for number, length in enumerate(LENGTHS)
    ]


def params(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, seed=0)


async def by_generator() -> list[list[int]]:
    generator = BatchedGenerator(make_engine(slots=SLOTS), prefix_reuse=True)
    asked = [
        generator.generate(prompt, params(9 + number)) for number, prompt in enumerate(prompts())
    ]
    return [list(completion.token_ids) for completion in await asyncio.gather(*asked)]


async def by_orchestrator() -> tuple[list[list[int]], list[int]]:
    from jetstream.core import orchestrator
    from jetstream.core.proto import jetstream_pb2

    logging.getLogger().setLevel(logging.WARNING)
    engine = JetStreamEngine(
        make_engine(slots=SLOTS, decode_steps=1, pages=SLOTS * PAGES_A_SLOT), params(MAX_TOKENS)
    )
    weights = engine.load_params()
    driver = orchestrator.Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[weights],
        generate_params=[weights],
        interleaved_mode=True,
    )
    client = orchestrator.LLMOrchestrator(driver=driver)

    async def ask(prompt: list[int], max_tokens: int) -> list[int]:
        content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt)
        request = jetstream_pb2.DecodeRequest(token_content=content, max_tokens=max_tokens)
        return [
            id
            async for part in client.Decode(request)
            for id in part.stream_content.samples[0].token_ids
        ]

    # JetStream's driver asserts that something runs in a moment when its other thread may just have
    # ended the last request, and a failed assertion ends the process: so something runs all the
    # time.
    others = asyncio.ensure_future(ask([1, 2, 3], MAX_TOKENS))
    answers = await asyncio.gather(
        *(ask(prompt, 9 + number) for number, prompt in enumerate(prompts()))
    )
    refused = await ask([10**6], 5)
    assert not others.done(), "make MAX_TOKENS larger"
    assert (await client.HealthCheck(jetstream_pb2.HealthCheckRequest())).is_live
    driver.stop()
    others.cancel()
    return list(answers), refused


def main() -> None:
    generator = asyncio.run(by_generator())
    orchestrator, refused = asyncio.run(by_orchestrator())
    report = {
        "prompts": prompts(),
        "generator": generator,
        "orchestrator": orchestrator,
        "refused": refused,
    }
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
