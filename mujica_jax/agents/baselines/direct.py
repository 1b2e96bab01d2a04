"""The baselines Direct and ChainOfThought, which answer the question without a search.

They differ only in their prompts: ChainOfThought asks the model to reason first. SKR answers like
`Direct` if the model says that it needs no search.
"""

from mujica_jax.agents.baselines.baseline import (
    FROM_KNOWLEDGE,
    REASON_FIRST,
    WRITE_ANSWER,
    Baseline,
    BaselineEpisode,
    Outcome,
    outcome_of,
)

_DIRECT = f"{FROM_KNOWLEDGE}{WRITE_ANSWER}"
_CHAIN_OF_THOUGHT = f"{FROM_KNOWLEDGE}{REASON_FIRST}{WRITE_ANSWER}"


class Direct(Baseline):
    """An agent that answers the question immediately."""

    system_prompt = _DIRECT

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end."""
        return await answer_directly(episode)


class ChainOfThought(Baseline):
    """An agent that reasons about the question and then answers (Wei et al., 2022)."""

    system_prompt = _CHAIN_OF_THOUGHT

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end."""
        return outcome_of(await episode.ask(_CHAIN_OF_THOUGHT, episode.message()))


async def answer_directly(episode: BaselineEpisode) -> Outcome:
    """Let the model answer the question of an episode from its own knowledge."""
    return outcome_of(await episode.ask(_DIRECT, episode.message()))
