"""The baseline IRCoT, which searches with each sentence of its reasoning (Trivedi et al., 2023)."""

from mujica_jax.agents import protocol
from mujica_jax.agents.baselines.baseline import (
    FROM_PASSAGES,
    WRITE_ANSWER,
    Baseline,
    BaselineEpisode,
    Outcome,
    first_sentence,
    outcome_of,
    without_tags,
)
from mujica_jax.config.agents import IrcotConfig
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason

_PROMPT = (
    f"{FROM_PASSAGES}You are shown the reasoning so far. Write its next sentence, on one line, "
    "which names the fact that comes next; each sentence is used to search for more passages.\n"
    f"When nothing is missing: {WRITE_ANSWER}"
)


class Ircot(Baseline):
    """An agent that reasons sentence by sentence and searches with each sentence."""

    system_prompt = _PROMPT

    def __init__(self, tokenizer: Tokenizer, config: IrcotConfig) -> None:
        super().__init__(tokenizer, config)
        self._max_searches = config.max_searches

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end. Raises RetrievalError."""
        sentences: list[str] = []
        passages = list(await episode.search_passages(episode.question, 0))
        for iteration in range(1, self._max_searches + 1):
            written = await episode.ask(_PROMPT, episode.message(passages, sentences))
            if written.cut is not None:
                return "", written.cut

            sentence = first_sentence(written.text)
            if protocol.opens("answer", sentence) or iteration == self._max_searches:
                return outcome_of(written)
            if not sentence:
                return "", StopReason.NO_ACTION
            sentences.append(protocol.one_line(without_tags(sentence)))

            # The newest passages come first, because the next sentence needs them most.
            shown_texts = {material.text for material in passages}
            results = await episode.search_passages(sentences[-1], iteration)
            new_passages = [material for material in results if material.text not in shown_texts]
            passages = new_passages + passages
        return "", StopReason.ITERATION_LIMIT
