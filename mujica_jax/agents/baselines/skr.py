"""The baseline SKR: the model decides whether it needs a search (prompt of Wang et al., 2023)."""

from mujica_jax.agents import protocol
from mujica_jax.agents.baselines.baseline import Baseline, BaselineEpisode, Outcome
from mujica_jax.agents.baselines.direct import answer_directly
from mujica_jax.agents.baselines.rag import answer_from_one_search
from mujica_jax.records import StopReason

_PROMPT = (
    "Do you need to look something up to answer the question? Write Yes or No inside <answer> "
    "... </answer>."
)


class Skr(Baseline):
    """An agent that asks the model whether it needs a search, and answers with or without one."""

    system_prompt = _PROMPT

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end. Raises RetrievalError."""
        written = await episode.ask(_PROMPT, episode.message())
        if written.cut is not None:
            return "", written.cut
        reply = protocol.parse_answer(written.text)
        if reply is None:
            return "", StopReason.NO_ACTION

        if reply.casefold().startswith("no"):
            return await answer_directly(episode)
        return await answer_from_one_search(episode)
