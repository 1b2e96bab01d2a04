"""FLARE: search when a sentence has an unlikely token (Jiang et al., 2023).

The search is for the likely tokens of the sentence. Then the sentence is written again.
"""

import itertools
import math

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
from mujica_jax.agents.episode import Written
from mujica_jax.config.agents import FlareConfig
from mujica_jax.errors import UserError
from mujica_jax.models.thoughts import THOUGHT_TAG_BYTES
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason
from mujica_jax.tasks.task import Material

_PROMPT = (
    f"{FROM_PASSAGES}You are shown the reasoning so far. Write its next sentence, on one line.\n"
    f"When nothing is missing: {WRITE_ANSWER}"
)


class Flare(Baseline):
    """Reasons sentence by sentence, and searches if a sentence is unlikely.

    It reads log-probabilities, which not every engine gives.
    """

    system_prompt = _PROMPT

    def __init__(self, tokenizer: Tokenizer, config: FlareConfig) -> None:
        super().__init__(tokenizer, config)
        self._max_searches = config.max_searches
        self._max_sentences = config.max_sentences
        self._min_probability = config.min_probability

    async def play(self, episode: BaselineEpisode) -> Outcome:
        sentences: list[str] = []
        passages: list[Material] = []
        for iteration in range(self._max_sentences):
            written = await episode.ask(_PROMPT, episode.message(passages, sentences))
            if written.cut is not None:
                return "", written.cut

            # A sentence with an unlikely token is written again after a search.
            query = _likely_words(
                written,
                tokenizer=episode.tokenizer,
                question=episode.question,
                min_probability=self._min_probability,
            )
            if query and len(episode.searches) < self._max_searches:
                passages = list(await episode.search_passages(query, iteration))
                written = await episode.ask(_PROMPT, episode.message(passages, sentences))
                if written.cut is not None:
                    return "", written.cut

            sentence = first_sentence(written.text)
            if protocol.opens("answer", sentence):
                return outcome_of(written)
            if not sentence:
                return "", StopReason.NO_ACTION
            sentences.append(protocol.one_line(without_tags(sentence)))
        return "", StopReason.ITERATION_LIMIT


def _likely_words(
    written: Written, *, tokenizer: Tokenizer, question: str, min_probability: float
) -> str:
    """Return the query of FLARE: the sentence without the tokens below `min_probability`.

    The query is empty if all tokens of the sentence are likely, and the question if none is.
    Raises UserError where the turn has no log-probabilities.
    """
    assert written.completion is not None, "a turn that is not cut was written"
    ids = written.completion.token_ids
    logprobs = written.completion.logprobs
    if logprobs is None:
        raise UserError(
            "agent.kind is flare, which reads log-probabilities, and the endpoint gives none"
        )

    # Find the bytes of the sentence behind the thoughts: a thought may say the same.
    pieces = [tokenizer.token_bytes(token) for token in ids]
    sampled = b"".join(pieces)
    sentence = first_sentence(written.text).encode()
    thoughts_end = max((tag.end() for tag in THOUGHT_TAG_BYTES.finditer(sampled)), default=0)
    start = sampled.find(sentence, thoughts_end)
    if start < 0:
        start = sampled.find(sentence)
    # An answer over several lines is joined to one line, so the bytes do not hold it.
    if start < 0:
        return ""
    end = start + len(sentence)

    # Keep the likely ones of the tokens that overlap with the sentence.
    boundaries = [0, *itertools.accumulate(map(len, pieces))]
    sentence_places = [
        place
        for place in range(len(ids))
        if boundaries[place + 1] > start and boundaries[place] < end
    ]
    min_logprob = math.log(min_probability)
    likely_ids = [ids[place] for place in sentence_places if logprobs[place] >= min_logprob]
    if len(likely_ids) == len(sentence_places):
        return ""
    return protocol.one_line(without_tags(tokenizer.decode(likely_ids))) or question
