"""Sections of rewards."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedRewardConfig:
    """The reward `staged` ("Learning When to Search"). Each switch is an ablation of its table 4, `format` is ours."""

    stage_two_round: int = 250  # first round of the second stage: half of the paper's 500, which does not say when
    beta: float = 0.3  # what a search counts
    # What says how alike two queries are: counts of their words, or an embedder (a folder, minilm, a Hugging Face name)
    embedder: str = "words"
    max_query_words: int = 10  # of a concise query
    format: bool = True  # without: a malformed episode earns as a well-formed one
    search: bool = True  # without: how searches are written earns nothing
    answer: bool = True  # without: answers earn nothing
    stage_one: bool = True  # without: searches do not soften a wrong answer in the first stage
    stage_two: bool = True  # without: searches do not lessen a right answer in the second stage
