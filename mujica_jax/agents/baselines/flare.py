"""The baseline FLARE, which searches if a sentence has an unlikely token (Jiang et al., 2023).

The query consists of the likely tokens of the sentence. After the search the model writes the
sentence again.
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
    """An agent that reasons sentence by sentence, and searches if a sentence has unlikely tokens.

    It needs log-probabilities, which not every engine provides.
    """

    system_prompt = _PROMPT

    def __init__(self, tokenizer: Tokenizer, config: FlareConfig) -> None:
        super().__init__(tokenizer, config)
        self._max_searches = config.max_searches
        self._max_sentences = config.max_sentences
        self._min_probability = config.min_probability

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end.

        Raises RetrievalError, and UserError if the turns have no log-probabilities.
        """
        sentences: list[str] = []
        passages: list[Material] = []
        for iteration in range(self._max_sentences):
            written = await episode.ask(_PROMPT, episode.message(passages, sentences))
            if written.cut is not None:
                return "", written.cut

            # If the sentence has an unlikely token, search, and let the model write it again.
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

    The query is empty if all tokens of the sentence are likely. If no token is likely, the query is
    the question. Raises UserError if the turn has no log-probabilities.
    """
    assert written.completion is not None, "a turn without a cut has a completion"
    ids = written.completion.token_ids
    logprobs = written.completion.logprobs
    if logprobs is None:
        raise UserError(
            "agent.kind is flare, which needs log-probabilities, but the endpoint returns none: use "
            "an endpoint that returns them, or another agent"
        )

    # Find the bytes of the sentence after the thoughts, because a thought may contain it too.
    pieces = [tokenizer.token_bytes(token) for token in ids]
    sampled = b"".join(pieces)
    sentence = first_sentence(written.text).encode()
    thoughts_end = max((tag.end() for tag in THOUGHT_TAG_BYTES.finditer(sampled)), default=0)
    start = sampled.find(sentence, thoughts_end)
    if start < 0:
        start = sampled.find(sentence)
    # `first_sentence` joins an answer over several lines, and the sampled bytes do not contain the
    # joined form.
    if start < 0:
        return ""
    end = start + len(sentence)

    # From the tokens that overlap with the sentence, keep the likely ones.
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
