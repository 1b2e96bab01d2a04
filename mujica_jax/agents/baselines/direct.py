"""Answers without a search: the question alone, with or without reasoning first.

They are one file because they differ in their prompt only. SKR answers like `Direct` where the
model says that it needs no search.
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
    """Answers the question alone."""

    system_prompt = _DIRECT

    async def play(self, episode: BaselineEpisode) -> Outcome:
        return await answer_directly(episode)


class ChainOfThought(Baseline):
    """Reasons about the question alone, then answers (Wei et al., 2022)."""

    system_prompt = _CHAIN_OF_THOUGHT

    async def play(self, episode: BaselineEpisode) -> Outcome:
        return outcome_of(await episode.ask(_CHAIN_OF_THOUGHT, episode.message()))


async def answer_directly(episode: BaselineEpisode) -> Outcome:
    """Answer the question of an episode from what the model knows."""
    return outcome_of(await episode.ask(_DIRECT, episode.message()))
