"""Retrieval-augmented generation: one search for the question, then the answer."""

from mujica_jax.agents.baselines.baseline import (
    FROM_PASSAGES,
    WRITE_ANSWER,
    Baseline,
    BaselineEpisode,
    Outcome,
    outcome_of,
)

_PROMPT = f"{FROM_PASSAGES}{WRITE_ANSWER}"


class Rag(Baseline):
    """Searches once for the question, and answers from the passages."""

    system_prompt = _PROMPT

    async def play(self, episode: BaselineEpisode) -> Outcome:
        return await answer_from_one_search(episode)


async def answer_from_one_search(episode: BaselineEpisode) -> Outcome:
    """Search for the question of an episode, and answer from the passages.

    Raises RetrievalError.
    """
    passages = await episode.search_passages(episode.question, 0)
    return outcome_of(await episode.ask(_PROMPT, episode.message(passages)))
