"""The rewards of "Learning When to Search" (section 3.3).

They train an agent that decides itself whether to search.

    total  = answer + search + format                                        (equation 12)
    format = 1 if every turn has one of the permitted shapes and the episode
             is answered, else -1                                            (equation 6)
    search = -(mean cosine similarity of the queries' pairs)
             with more than one search                                       (equations 7 to 9)
             0 if the query is concise or there is none, else -1
    answer, first stage  = 1 if right, else -1 + beta searches               (equation 10)
    answer, second stage = 1 - beta searches if right, else -1               (equation 11)
    answer, unified      = 1 - beta searches if right,
                           else -1 + beta searches                           (table 2)

The first stage teaches to search, the second one to leave it where it is not needed. With `unified`
there are no stages, as in the paper's table 2; the paper gives that reward in words only.
Differences from the paper:

- Equation 8 divides the sum over pairs by N (N - 1), half of the mean that the text describes; this
  is the mean.
- An answer is right if it is an exact match under the task's rule. The paper asks a language model,
  which `correctness` judge does here.
- The rules of a concise query are not published; `is_concise` has ours.
- A stage that is switched off gives 1 or -1 whatever was searched, as section 4.5 describes its
  ablations.
- How alike two queries are comes from outside (`retrieval.text.similarity`): counts of words, or an
  embedder, as the paper has it.

As printed, a wrong answer of the first stage earns more than 0 from four searches on.
"""

import re
import statistics
from collections.abc import Callable, Sequence

from mujica_jax.config.methods import StagedRewardConfig
from mujica_jax.metrics import Score
from mujica_jax.records import Reward, StopReason, Trajectory

Similarity = Callable[[str, Sequence[str]], list[float]]  # of a text to each of the others: -1 to 1

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
    """Return the reward with its parts. A part that is switched off is absent."""
    queries = [search.query for search in trajectory.searches]
    parts: dict[str, float] = {}
    if config.answer:
        parts["answer"] = answer_reward(
            right=answer.em == 1.0, searches=len(queries), stage=stage, config=config
        )
    if config.search:
        assert similarity is not None, "the part `search` compares queries"
        parts["search"] = search_reward(
            queries, max_words=config.max_query_words, similarity=similarity
        )
    if config.format:
        is_answered = trajectory.stop_reason is StopReason.ANSWERED
        parts["format"] = 1.0 if well_formed and is_answered else -1.0
    return Reward(total=sum(parts.values()), parts=parts)


def best_reward(config: StagedRewardConfig) -> float:
    """Return the best total there is: right, well-formed and without a search."""
    return float(config.answer) + float(config.format)


def answer_reward(*, right: bool, searches: int, stage: int, config: StagedRewardConfig) -> float:
    """Return the answer's part by equation 10 or 11, or by both at once if there are no stages."""
    cost = config.beta * searches
    is_softened = config.unified or (stage == 1 and config.stage_one)
    is_lessened = config.unified or (stage == 2 and config.stage_two)
    if right:
        return 1.0 - cost if is_lessened else 1.0
    return -1.0 + cost if is_softened else -1.0


def search_reward(queries: Sequence[str], *, max_words: int, similarity: Similarity) -> float:
    if len(queries) > 1:
        return -mean_similarity(queries, similarity)
    return 0.0 if all(is_concise(query, max_words) for query in queries) else -1.0


def mean_similarity(queries: Sequence[str], similarity: Similarity) -> float:
    """Return the mean similarity over the pairs of two or more queries."""
    similarities: list[float] = []
    for index, query in enumerate(queries[:-1]):
        similarities += similarity(query, queries[index + 1 :])
    return statistics.fmean(similarities)


def is_concise(query: str, max_words: int) -> bool:
    """Return whether a query consists of keywords.

    Such a query is no question, has no preposition at either end and at most `max_words` words.
    """
    words = _WORD.findall(query.casefold())
    has_valid_length = 0 < len(words) <= max_words
    if not has_valid_length or query.rstrip().endswith("?"):
        return False
    begins_well = words[0] not in QUESTION_WORDS | PREPOSITIONS
    ends_well = words[-1] not in PREPOSITIONS
    return begins_well and ends_well
