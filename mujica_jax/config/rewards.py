"""Sections of rewards."""

import dataclasses
from typing import Literal

from mujica_jax.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt
from mujica_jax.config.remote import RemoteConfig

# Rewards with a section of their own.
STAGED = "staged"
JUDGE = "judge"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedRewardConfig:
    """The reward `staged` ("Learning When to Search"). Each switch is an ablation of its table 4,
    `format` is ours."""

    # First round of the second stage. The paper does not say when it begins: each stage has half of
    # its 500 rounds.
    stage_two_round: NonNegativeInt = 251
    beta: NonNegativeFloat = 0.3  # what a search counts
    # What says that an answer is right: an exact match under the task's rule, or the model behind
    # `judge`, as in the paper.
    correctness: Literal["exact_match", "judge"] = "exact_match"
    # Without stages (table 2): in every round searches soften a wrong answer and lessen a right
    # one.
    unified: bool = False
    # What says how alike two queries are: counts of their words, or an embedder (a folder, minilm,
    # a Hugging Face name)
    embedder: str = "words"
    max_query_words: PositiveInt = 10  # of a concise query
    format: bool = True  # without: a malformed episode earns as a well-formed one
    search: bool = True  # without: how searches are written earns nothing
    answer: bool = True  # without: answers earn nothing
    stage_one: bool = True  # without: searches do not soften a wrong answer in the first stage
    stage_two: bool = True  # without: searches do not lessen a right answer in the second stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeConfig(RemoteConfig):
    """A model behind an OpenAI-compatible endpoint that says which answers mean the same as the
    gold ones."""

    # Whether the judge reads the question. "Learning When to Search" shows it the prediction and
    # the references alone.
    show_question: bool = False


def needs_judge(reward: str, staged: StagedRewardConfig) -> bool:
    """Whether a language model says what is right under the reward of this name."""
    return reward == JUDGE or (reward == STAGED and staged.answer and staged.correctness == "judge")
