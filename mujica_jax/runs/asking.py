"""Let an agent answer a question in a user's own words.

The commands `eval --ask` and `ask` call this module, and so does the Python API.
"""

import asyncio
import dataclasses

from mujica_jax.agents.agent import Agent, Attempt, EnginePolicy, Policy, TwoPolicies, gather_polled
from mujica_jax.config.schema import Config
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Trajectory
from mujica_jax.report.results import question_tree
from mujica_jax.runs.episode_events import EpisodeWatch, OnEvent
from mujica_jax.runs.evaluate import Models, Session, open_session, prepare_tasks, print_notes
from mujica_jax.runs.parts import make_agent
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.asked import AskedQuestion, asked_question


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answerer:
    """An agent and the policy that plays it. Use it from one event loop at a time.

    Attributes:
        agent: The agent.
        policy: The policy that writes its turns.
        tokenizer: The tokenizer of the policy.
        seed: Seed of the episode. It makes no difference, because decoding is greedy.
    """

    agent: Agent
    policy: Policy
    tokenizer: Tokenizer
    seed: int = 0

    async def answer(self, asked: AskedQuestion, on_event: OnEvent | None = None) -> Trajectory:
        """Play an episode with greedy decoding, and return its record.

        `on_event` is called for everything that happens in the episode, as it happens
        (`episode_events.py`). An exception that it raises ends the episode.
        """
        attempt = Attempt(question=asked.question, number=0, seed=self.seed, temperature=0.0)
        if on_event is None:
            return await self.agent.run(attempt, asked.environment, self.policy)

        watch = EpisodeWatch(self.agent, self.tokenizer, asked.environment.kind, on_event)
        watch.started(asked.question)
        trajectory = await self.agent.run(
            attempt, watch.environment(asked.environment), watch.policy(self.policy)
        )
        watch.finished(trajectory)
        return trajectory


def answerer_of(session: Session, config: Config) -> Answerer:
    """Return the agent of a configuration, played by the models of a session."""
    policy: Policy = EnginePolicy(session.generator)
    if session.worker_generator is not None:
        policy = TwoPolicies(policy, EnginePolicy(session.worker_generator))
    return Answerer(
        agent=make_agent(config.agent, session.tokenizer),
        policy=policy,
        tokenizer=session.tokenizer,
        seed=config.seed,
    )


def show_answer(
    config: Config, models: Models, preemption: Preemption, text: str, *, note: str | None = None
) -> None:
    """Answer the user's question with greedy decoding, and show the episode as a tree.

    `note` is a line that is printed first. Raises UserError if the question cannot be asked. This
    is checked before the model is loaded.
    """
    tasks = prepare_tasks([config], is_scored=False)
    asked = asyncio.run(asked_question(tasks[config.task], text))

    session = open_session([config], tasks, models, preemption, samples=0, earlier_scores=None)
    print_notes(session, config, note)
    for sentence in asked.notes:
        session.progress.line(sentence)

    episode = answerer_of(session, config).answer(asked)
    (trajectory,) = asyncio.run(gather_polled([episode], session.preemption.check))
    session.progress.show(question_tree(asked.question, trajectory))
