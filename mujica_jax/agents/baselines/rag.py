"""The baseline RAG (retrieval-augmented generation): one search, then the answer."""

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
    """An agent that searches once for the question and answers from the passages."""

    system_prompt = _PROMPT

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end. Raises RetrievalError."""
        return await answer_from_one_search(episode)


async def answer_from_one_search(episode: BaselineEpisode) -> Outcome:
    """Search once for the question of an episode, and let the model answer from the passages.

    Raises RetrievalError.
    """
    passages = await episode.search_passages(episode.question, 0)
    return outcome_of(await episode.ask(_PROMPT, episode.message(passages)))
