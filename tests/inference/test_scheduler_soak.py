"""Two thousand requests of all kinds on a real engine: all are answered, nothing is left behind,
and a sample is right.
"""

import asyncio
import gc
from pathlib import Path

import numpy as np
import pytest

from mujica_jax.inference.requests import Completion, DeadlineError, SamplingParams
from mujica_jax.inference.sequence import SequenceState
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.tiny_engine import MODEL, PAGES_A_SLOT, SLOTS, make_engine
from tests.helpers.traffic import (
    assert_nothing_is_held,
    complete_all,
    letter,
    make_generator,
    params,
    streamed,
)

REQUESTS = 2000
WARM_UP = 1000
CHECKED = 60
AT_ONCE = 24  # more than there are slots and places in the queue
# 24 KB a request after the warm-up; the compiler's own memory moves by a few MB
GROWTH_BYTES = 24 * 2**20
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * 4096


def request(n: int) -> tuple[list[int], SamplingParams, str]:
    """Return the prompt, the parameters and the fate of a request, drawn from its number alone."""
    random = np.random.default_rng(n)
    beginning = np.random.default_rng(random.integers(3)).integers(0, MODEL.vocab_size, 80)[
        : random.integers(0, 80)
    ]
    prompt = [
        *beginning.tolist(),
        *random.integers(0, MODEL.vocab_size, random.integers(1, 20)).tolist(),
    ]
    filters = [{}, {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}][random.integers(5)]
    stops = [(), (), ("a", "zq"), (letter(3).decode() + letter(4).decode(),)][random.integers(4)]
    fate = str(random.choice(["whole", "whole", "streamed", "cancelled", "late"]))
    wanted = params(
        int(random.integers(1, 16)),
        float(random.choice([0.0, 0.7, 1.0])),
        seed=n,
        stop_strings=stops,
        stop_token_ids=tuple(random.integers(0, MODEL.vocab_size, random.integers(0, 3)).tolist()),
        deadline_seconds=float(random.uniform(1e-4, 0.05)) if fate == "late" else None,
        **filters,
    )
    return prompt, wanted, fate


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="the memory of a process is read from Linux's /proc")
def test_two_thousand_mixed_requests_end_and_leave_nothing_behind():
    generator = make_generator(make_engine(pages=2 * PAGES_A_SLOT))
    outcomes: dict[int, Completion | tuple[int, ...] | BaseException] = {}

    async def serve_request(n: int, room: asyncio.Semaphore) -> None:
        prompt, wanted, fate = request(n)
        async with room:
            if fate == "streamed":
                while generator.statistics.waiting >= 2 * SLOTS:
                    await asyncio.sleep(0.001)
                outcomes[n] = tuple(await streamed(generator, prompt, wanted))
                return
            task = asyncio.create_task(generator.generate(prompt, wanted))
            if fate == "cancelled":
                for _ in range(int(np.random.default_rng(n).integers(60))):
                    await asyncio.sleep(0)
                task.cancel()
            (outcomes[n],) = await asyncio.gather(task, return_exceptions=True)

    async def main(first: int, last: int) -> None:
        room = asyncio.Semaphore(AT_ONCE)
        await asyncio.wait_for(
            asyncio.gather(*(serve_request(n, room) for n in range(first, last))), HANG_SECONDS
        )
        while generator._driver is not None and not generator._driver.done():
            await asyncio.sleep(0)

    asyncio.run(main(0, WARM_UP))
    after_warm_up = resident_bytes()
    asyncio.run(main(WARM_UP, REQUESTS))
    growth = resident_bytes() - after_warm_up
    assert growth < GROWTH_BYTES, (
        f"{growth / 2**20:.0f} MiB more after {REQUESTS - WARM_UP} further requests"
    )
    assert not [item for item in gc.get_objects() if isinstance(item, SequenceState)]
    assert_nothing_is_held(generator)
    assert generator.statistics.evicted_pages > 100

    assert len(outcomes) == REQUESTS
    allowed = {"late": DeadlineError, "cancelled": asyncio.CancelledError}
    for n, outcome in outcomes.items():
        _, _, fate = request(n)
        assert isinstance(outcome, (Completion, tuple, allowed.get(fate, ()))), (fate, outcome)
    kinds = [type(outcome) for outcome in outcomes.values()]
    for kind in (Completion, tuple, asyncio.CancelledError, DeadlineError):
        assert kinds.count(kind) > 20, kind

    answered = [n for n, outcome in outcomes.items() if isinstance(outcome, (Completion, tuple))]
    alone = make_generator(make_engine(pages=2 * PAGES_A_SLOT), prefix_reuse=False)
    for n in np.random.default_rng(0).choice(answered, CHECKED, replace=False).tolist():
        prompt, wanted, _ = request(n)
        (expected,) = complete_all(alone, [(prompt, wanted)])
        outcome = outcomes[n]
        if isinstance(outcome, tuple):
            assert outcome == expected.token_ids
        else:
            assert outcome.token_ids == expected.token_ids
            assert outcome.finish_reason == expected.finish_reason
            np.testing.assert_allclose(outcome.logprobs, expected.logprobs, atol=1e-4)
