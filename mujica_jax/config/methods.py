"""Sections of methods; each joins the union in `schema.py`."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from mujica_jax.config.bounds import (
    BELOW_ONE,
    FloatBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
)
from mujica_jax.config.remote import RemoteConfig

NO_ENDPOINT = RemoteConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MygoConfig:
    """MyGO: rounds of sample, select above a rising threshold, maximise likelihood."""

    kind: Literal["mygo"] = "mygo"
    implementation: ClassVar[str] = "mujica_jax.methods.mygo:mygo"
    rounds: NonNegativeInt  # of sampling and learning after the warm-up
    max_attempts: PositiveInt  # attempts a question (16 in the paper)
    keep_per_question: PositiveInt  # m, trajectories kept a question (3 in the paper)
    learning_rate: float  # at first; one cosine over all rounds
    end_learning_rate: float  # where it ends
    epochs: PositiveInt  # passes over a round's selected trajectories
    # Which policy samples a round: the newest one, the one before it (so that sampling and learning
    # can go on at once), or the warm-up's for all rounds.
    schedule: Literal["online", "asynchronous", "offline"] = "online"
    # rising: K follows the policy's mean reward. fixed: K stays at initial_threshold. auto: fixed
    # offline, where one policy samples all rounds, and else rising.
    threshold: Literal["auto", "rising", "fixed"] = "auto"
    # K before the first round, from 0 to the best reward. If K is fixed, it stays there in all
    # rounds: at 0 everything that earns anything is kept, at the best reward only what reaches it.
    initial_threshold: float = 0.0
    # rows of earlier rounds and of the warm-up mixed in, as a share of the new rows
    replay: NonNegativeFloat

    @property
    def keeps_threshold(self) -> bool:
        """Whether K is the same in all rounds."""
        return self.threshold == "fixed" or (
            self.threshold == "auto" and self.schedule == "offline"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EviPathConfig:
    """EviPath: a teacher writes a trajectory for each question, led by its answer and its evidence;
    they are learnt."""

    kind: Literal["evipath"] = "evipath"
    implementation: ClassVar[str] = "mujica_jax.methods.evipath.method:evipath"
    # What the teacher is given: answer and gold evidence, the answer alone, or neither. What it
    # answers wrongly is not learnt in any of them.
    mode: Literal["abductive", "no_evidence", "deductive"] = "abductive"
    # The language model that writes: the policy that the run starts with, a second checkpoint, or
    # the model behind `remote`. scripted is no language model: the script replays the warm-up's
    # demonstrations, in abductive mode alone.
    teacher: Literal["policy", "checkpoint", "remote", "scripted"]
    # With teacher checkpoint: a run directory (its latest policy), a Hugging Face directory, a GGUF
    # file, or smollm2. Its tokenizer may differ from the policy's.
    teacher_checkpoint: str | None = None
    # How many tokens a conversation with a second checkpoint may hold. Beside the agent's own
    # prompt there are worked examples, answer and evidence. 0: agent.max_trajectory_tokens.
    teacher_max_tokens: NonNegativeInt = 0
    remote: RemoteConfig = NO_ENDPOINT
    # How the teacher reads the agent's prompts. auto: as the agent does where the teacher was
    # trained on its format (by this run's warm-up, or as a run of its own), otherwise with worked
    # examples.
    teacher_prompt: Literal["auto", "brief", "zero_shot", "few_shot"] = "auto"
    # How many right trajectories are learnt. Synthesis ends when it has them. 0: all. Give two
    # modes the same number to compare them.
    trajectories: NonNegativeInt = 0
    # The noise that a worker reads beside the gold evidence, over passages in abductive mode. own:
    # the paragraphs that the data set gives with the question; retrieved: what a search finds.
    distractors: Literal["own", "retrieved"] = "own"
    tune: Literal["both", "planner", "executor"] = "both"  # whose conversations are learnt
    max_tries: PositiveInt = 3  # of each turn of the teacher, until it is as it must be
    # What answers and evidence are compared by: words (how often each occurs, for worlds from
    # scratch), or an embedder: a folder, minilm, or a Hugging Face name.
    embedder: str = "minilm"
    threshold: float = 0.9  # cosine above which evidence counts as that of an answer (tau)
    learning_rate: float  # the highest
    end_learning_rate: float  # where it ends
    epochs: PositiveInt  # passes over the trajectories
    warmup_ratio: FloatBelowOne = 0.1  # share of the steps in which the learning rate rises


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig:
    """Rounds of: sample a group of attempts at each question, compare each attempt with its group,
    climb."""

    kind: str
    implementation: ClassVar[str] = "mujica_jax.methods.grpo:policy_gradient"
    # batches of sampling.questions_per_round questions, each sampled from the policy of the one
    # before
    rounds: NonNegativeInt
    rounds_per_phase: PositiveInt  # rounds between two evaluations, each with a policy that is kept
    group_attempts: Annotated[int, at_least(2)]  # attempts a question
    learning_rate: float  # at first; one cosine over all rounds
    end_learning_rate: float  # where it ends
    epochs: PositiveInt  # passes over a round's rows
    # How many rows one update sees. A round of more rows makes several updates, and a round of
    # fewer makes one. 0: trainer.rows_per_step.
    rows_per_update: NonNegativeInt = 0
    # how far below 1 the ratio to the policy that sampled may count
    clip_low: Annotated[float, at_least(0), BELOW_ONE] = 0.2
    clip_high: NonNegativeFloat = 0.2  # and how far above
    # Bound of the weights that make up for what engine and trainer compute differently; 0: no
    # weights, and ratios to the engine's numbers.
    importance_cap: NonNegativeFloat = 2.0
    # Groups whose rewards are all equal are left out, and other questions are sampled in their
    # place ...
    dynamic_sampling: bool = False
    # ... until the batch is full, or so many batches of questions were sampled
    max_sampled_batches: PositiveInt = 10
    # Above 0: a trajectory of more than this many generated tokens loses 1. It is learnt with its
    # cut turn, so the punishment reaches what was too long ...
    overlong_tokens: NonNegativeInt = 0
    # ... and the loss begins so many tokens earlier, rising evenly
    overlong_cache_tokens: NonNegativeInt = 0
    # of the distance to the policy that the rounds began with
    kl_coefficient: NonNegativeFloat = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(PolicyGradientConfig):
    """GRPO: every conversation counts the same."""

    kind: Literal["grpo"] = "grpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DapoConfig(PolicyGradientConfig):
    """DAPO: every token counts the same, the upper clip is wider, groups that teach nothing are
    replaced."""

    kind: Literal["dapo"] = "dapo"
    # how far above 1 the ratio to the policy that sampled may count
    clip_high: NonNegativeFloat = 0.28
    # groups whose rewards are all equal are left out, and other questions sampled
    dynamic_sampling: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecexTreeConfig:
    """DecEx-RAG: a search tree for each question, maximum likelihood on the best chains, DPO on
    what was scored. `sampling` says how many questions there are. The agent is decex.
    """

    kind: Literal["decex"] = "decex"
    implementation: ClassVar[str] = "mujica_jax.methods.decex.method:decex"
    branches: PositiveInt = 3  # k, turns sampled for a decision or an execution
    rollouts: PositiveInt = 4  # n, episodes that score an execution
    # mean reward of an answer from memory above which nothing is searched for
    skip_above: NonNegativeFloat = 0.6
    # What stays of a layer: the best branch; both branches of a decision, each with its best
    # execution; every execution (nothing is scored by episodes then).
    expansion: Literal["pruned", "unpruned", "full"] = "pruned"
    # Score both branches of each decision, so that pairs can prefer either. With False, a pruned
    # branch costs no episodes and gives no pair.
    score_both_branches: bool = True
    # The endpoint of a second model that writes all of a tree except the executions of retrieval
    # decisions. Without an endpoint the policy writes all.
    remote: RemoteConfig = NO_ENDPOINT
    # a tree that has generated so many begins no other layer; 0: no bound
    budget_tokens: NonNegativeInt = 0
    # learn the best chains: paths from root to leaf, where a leaf has a tree's best reward
    sft: bool = True
    # of the chains with a tree's best reward, the one that is learnt
    retrievals: Literal["most", "least"] = "most"
    min_reward: NonNegativeFloat = 0.5  # a best chain below it is not learnt
    learning_rate: float  # of maximum likelihood, at first
    end_learning_rate: float  # where it ends
    epochs: PositiveInt  # passes over the best chains
    dpo: bool = True  # learn the preference pairs
    decision_pairs: bool = True  # stop or go on, memory or search
    execution_pairs: bool = True  # sub-questions, sub-answers, sub-queries, final answers
    beta: PositiveFloat = 0.1  # of DPO: how much the distance to the policy before it counts
    dpo_learning_rate: PositiveFloat = 5e-7  # at first; it falls to 0
    dpo_epochs: PositiveInt = 1  # passes over the pairs
