"""Sections of methods; each joins the union in `schema.py`."""

import dataclasses
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class MygoConfig:
    """MyGO: rounds of sample, select above a rising threshold, maximise likelihood."""

    kind: Literal["mygo"] = "mygo"
    implementation: ClassVar[str] = "mujica_jax.methods.mygo:mygo"
    rounds: int
    max_attempts: int  # attempts a question (16 in the paper)
    keep_per_question: int  # m, trajectories kept a question (3 in the paper)
    learning_rate: float
    end_learning_rate: float
    epochs: int  # passes over a round's selected trajectories
    replay: float  # rows of earlier rounds and of the warm-up mixed in, as a share of the new rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecexTreeConfig:
    """DecEx-RAG: a search tree for each question, maximum likelihood on the best chains, DPO on what was scored.
    `sampling` says how many questions there are. The agent is decex.
    """

    kind: Literal["decex"] = "decex"
    implementation: ClassVar[str] = "mujica_jax.methods.decex:decex"
    branches: int = 3  # k, turns sampled for a decision or an execution
    rollouts: int = 4  # n, episodes that score an execution
    skip_above: float = 0.6  # mean reward of an answer from memory above which nothing is searched for
    # What stays of a layer: the best branch; both branches of a decision, each with its best execution; every execution
    # (nothing is scored by episodes then).
    expansion: Literal["pruned", "unpruned", "full"] = "pruned"
    budget_tokens: int = 0  # a tree that has generated so many begins no other layer; 0: no bound
    sft: bool = True  # learn the best chains
    retrievals: Literal["most", "least"] = "most"  # of the chains with a tree's best reward, the one that is learnt
    min_reward: float = 0.5  # a best chain below it is not learnt
    learning_rate: float
    end_learning_rate: float
    epochs: int
    dpo: bool = True  # learn the preference pairs
    decision_pairs: bool = True  # stop or go on, memory or search
    execution_pairs: bool = True  # sub-questions, sub-answers, sub-queries, final answers
    beta: float = 0.1
    dpo_learning_rate: float = 5e-7  # at first; it falls to 0
    dpo_epochs: int = 1
