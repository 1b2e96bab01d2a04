"""The baseline Iter-RetGen, which alternates searches and answers (Shao et al., 2023).

Each query is the question followed by the last reply with its reasoning.
"""

from mujica_jax.agents import protocol
from mujica_jax.agents.baselines.baseline import (
    FROM_PASSAGES,
    REASON_FIRST,
    WRITE_ANSWER,
    Baseline,
    BaselineEpisode,
    Outcome,
    outcome_of,
    without_tags,
)
from mujica_jax.agents.episode import Written
from mujica_jax.config.agents import IterRetGenConfig
from mujica_jax.models.tokenizer import Tokenizer

_PROMPT = f"{FROM_PASSAGES}{REASON_FIRST}{WRITE_ANSWER}"


class IterRetGen(Baseline):
    """An agent that alternates searches and answers. The last answer counts."""

    system_prompt = _PROMPT

    def __init__(self, tokenizer: Tokenizer, config: IterRetGenConfig) -> None:
        super().__init__(tokenizer, config)
        self._max_searches = config.max_searches

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end. Raises RetrievalError."""
        written = Written(text="")
        for iteration in range(self._max_searches):
            query = protocol.one_line(f"{episode.question} {without_tags(written.text)}")
            passages = await episode.search_passages(query, iteration)
            written = await episode.ask(_PROMPT, episode.message(passages))
            if written.cut is not None:
                break
        return outcome_of(written)
