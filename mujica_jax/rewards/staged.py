"""The reward `staged` of "Learning When to Search" (section 3.3).

It trains an agent that decides itself whether to search.

    total  = answer + search + format                                        (equation 12)
    format = 1 if every turn is well-formed and the episode has an answer,
             else -1                                                         (equation 6)
    search = -(mean cosine similarity over all pairs of queries)
             if there are several searches                                   (equations 7 to 9)
             0 if there is no search or its query is concise, else -1
    answer, first stage  = 1 if right, else -1 + beta searches               (equation 10)
    answer, second stage = 1 - beta searches if right, else -1               (equation 11)
    answer, unified      = 1 - beta searches if right,
                           else -1 + beta searches                           (table 2)

The first stage teaches the agent to search. The second stage teaches it to search only if it must.
With the setting `unified` there are no stages, as in table 2 of the paper. The paper describes this
reward only in words.

Differences from the paper:

- Equation 8 divides the sum over pairs by N (N - 1). The result is half of the mean that the text
  describes. Here it is the mean.
- An answer is right if it is an exact match under the rule of the task. The paper asks a language
  model; the setting `correctness` with the value `judge` does the same here.
- The paper does not publish its rules for a concise query. `is_concise` implements our own.
- If a stage is switched off, the answer's part in that stage is 1 or -1, independent of the number
  of searches. Section 4.5 describes its ablations this way.
- The similarity of two queries is a parameter (`retrieval.text.similarity`). It uses word counts,
  or an embedder as in the paper.

With equation 10 as printed, a wrong answer in the first stage earns more than 0 if the episode has
at least four searches.
"""

import re
import statistics
from collections.abc import Callable, Sequence

from mujica_jax.config.methods import StagedRewardConfig
from mujica_jax.metrics import Score
from mujica_jax.records import Reward, StopReason, Trajectory

# Returns the similarity of a text to each of the other texts, between -1 and 1.
Similarity = Callable[[str, Sequence[str]], list[float]]

_WORD = re.compile(r"\w+")
QUESTION_WORDS = frozenset(
    "who whom whose what which when where why how is are was were do does did can please tell find "
    "give".split()
)
PREPOSITIONS = frozenset("about at by for from in into of on to with".split())


def staged_reward(
    answer: Score,
    trajectory: Trajectory,
    *,
    well_formed: bool,
    stage: int,
    config: StagedRewardConfig,
    similarity: Similarity | None,
) -> Reward:
    """Return the reward with its parts. Parts that are switched off are absent.

    `stage` is 1 or 2. `similarity` may be None if the part `search` is switched off.
    """
    queries = [search.query for search in trajectory.searches]
    parts: dict[str, float] = {}
    if config.answer:
        parts["answer"] = answer_reward(
            right=answer.em == 1.0, searches=len(queries), stage=stage, config=config
        )
    if config.search:
        assert similarity is not None, "the part `search` needs a similarity of queries"
        parts["search"] = search_reward(
            queries, max_words=config.max_query_words, similarity=similarity
        )
    if config.format:
        is_answered = trajectory.stop_reason is StopReason.ANSWERED
        parts["format"] = 1.0 if well_formed and is_answered else -1.0
    return Reward(total=sum(parts.values()), parts=parts)


def best_reward(config: StagedRewardConfig) -> float:
    """Return the highest possible total: a right, well-formed answer without a search."""
    return float(config.answer) + float(config.format)


def answer_reward(*, right: bool, searches: int, stage: int, config: StagedRewardConfig) -> float:
    """Return the part for the answer, by equation 10 or 11.

    With the setting `unified`, both equations apply at once.
    """
    cost = config.beta * searches
    is_softened = config.unified or (stage == 1 and config.stage_one)
    is_lessened = config.unified or (stage == 2 and config.stage_two)
    if right:
        return 1.0 - cost if is_lessened else 1.0
    return -1.0 + cost if is_softened else -1.0


def search_reward(queries: Sequence[str], *, max_words: int, similarity: Similarity) -> float:
    """Return the part for the searches, by equations 7 to 9."""
    if len(queries) > 1:
        return -mean_similarity(queries, similarity)
    return 0.0 if all(is_concise(query, max_words) for query in queries) else -1.0


def mean_similarity(queries: Sequence[str], similarity: Similarity) -> float:
    """Return the mean similarity over all pairs of queries. There must be at least two queries."""
    similarities: list[float] = []
    for index, query in enumerate(queries[:-1]):
        similarities += similarity(query, queries[index + 1 :])
    return statistics.fmean(similarities)


def is_concise(query: str, max_words: int) -> bool:
    """Return whether a query is concise, that is, consists of a few keywords.

    A concise query has at most `max_words` words. It does not end with a question mark, does not
    begin with a question word, and has no preposition at either end.
    """
    words = _WORD.findall(query.casefold())
    has_valid_length = 0 < len(words) <= max_words
    if not has_valid_length or query.rstrip().endswith("?"):
        return False
    begins_well = words[0] not in QUESTION_WORDS | PREPOSITIONS
    ends_well = words[-1] not in PREPOSITIONS
    return begins_well and ends_well
