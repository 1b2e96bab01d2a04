"""A served agent without a model: the little world and a policy that writes given texts."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence

from mujica_jax.agents.agent import OnTokens
from mujica_jax.errors import UserError
from mujica_jax.inference.background import BackgroundGenerator
from mujica_jax.runs.asking import Answerer
from mujica_jax.tasks.asked import AskedQuestion
from mujica_jax.web.served import ServedAgent, ServedModels
from tests.helpers.little_agent import (
    QUESTION,
    LittleWorld,
    ToldPolicy,
    agent,
    answer,
    read,
    search,
    tokenizer,
)
from tests.helpers.patience import HANG_SECONDS

WHO = "Who is the director of Amber Tide?"
OTHER = "Who is the director of Tin Orchard?"
BORN = "Where was Ilse Vand born?"
READS = {
    WHO: read("[1]", "The director of Amber Tide is Ilse Vand."),
    OTHER: read("[0]", "The director of Tin Orchard is Ilse Vand."),
    BORN: read("[0]", "Ilse Vand was born in Ghent."),
}
PLANS = (search((0, WHO), (1, OTHER)), search((2, BORN)), answer("Ghent"))
NOTE = "'Amber Tide' in the question is Amber Tide (Q0)"
UNKNOWN = "the question names no entity of the graph: did you mean Amber Tide?"


class PausedPolicy(ToldPolicy):
    """A policy that writes each turn when the test lets it, and the same texts in each episode.

    A turn is streamed in two halves.
    """

    def __init__(self, plans: Sequence[str] = PLANS) -> None:
        super().__init__(plans, READS)
        self._all_plans = list(plans)
        # One permit for each planner's turn.
        self.permits = threading.Semaphore(10**6)
        # One permit for the second half of each turn.
        self.halves = threading.Semaphore(10**6)

    def pause(self) -> None:
        """Let no turn of the planner be written before `permits` are released."""
        self.permits = threading.Semaphore(0)

    async def generate(self, prompt, params, *, state, continues):
        if not hasattr(state, "query"):
            await permitted(self.permits)
            if not self._plans:
                self._plans = list(self._all_plans)
        return await super().generate(prompt, params, state=state, continues=continues)

    def streaming(self, on_tokens: OnTokens) -> "HalvedPolicy":
        return HalvedPolicy(self, on_tokens)


class HalvedPolicy:
    """A paused policy that reports the tokens of a turn in two halves."""

    def __init__(self, policy: PausedPolicy, on_tokens: OnTokens) -> None:
        self._policy = policy
        self._on_tokens = on_tokens
        self.version = policy.version

    async def generate(self, prompt, params, *, state, continues):
        whole = await self._policy.generate(prompt, params, state=state, continues=continues)
        middle = len(whole.token_ids) // 2
        self._on_tokens(whole.token_ids[:middle])
        await permitted(self._policy.halves)
        self._on_tokens(whole.token_ids[middle:])
        return whole


async def permitted(permits: threading.Semaphore) -> None:
    """Wait until there is a permit, and take it."""
    for _ in range(int(HANG_SECONDS / 0.01)):
        if permits.acquire(blocking=False):
            return
        await asyncio.sleep(0.01)


class LittleSource:
    """Asks every question as the little world's own, unless it does not name a film."""

    def __init__(self, world: LittleWorld) -> None:
        self._world = world

    async def asked(self, question: str) -> AskedQuestion:
        if "Amber Tide" not in question:
            raise UserError(UNKNOWN)
        return AskedQuestion(question=QUESTION, environment=self._world, notes=(NOTE,))


@contextlib.contextmanager
def served_agent(
    policy: PausedPolicy | None = None, world: LittleWorld | None = None, *, capacity: int = 4
) -> Iterator[ServedModels]:
    """Yield the models of a server, whose generator's thread runs."""
    policy = PausedPolicy() if policy is None else policy
    background = BackgroundGenerator(None, capacity=capacity)
    answerer = Answerer(agent=agent(), policy=policy, tokenizer=tokenizer())
    source = LittleSource(LittleWorld() if world is None else world)
    background.start()
    try:
        yield ServedModels(
            name="little, policy 3",
            background=background,
            agent=ServedAgent(background, {"mujica": answerer}, {"graph": source}),
            tokenizer=tokenizer(),
            examples=(QUESTION.text,),
        )
    finally:
        background.stop()
