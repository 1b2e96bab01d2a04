"""Sections of methods, of their rewards, and of the models that both may ask.

Each method joins the union in `schema.py`.
"""

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
class PolicyGradientConfig:
    """Rounds that sample a group of attempts at each question and compare each with its group.

    The policy then moves towards attempts above their group's mean.
    """

    kind: str
    implementation: ClassVar[str] = "mujica_jax.methods.grpo:policy_gradient"
    # batches of sampling.questions_per_round questions, each sampled from the policy of the one
    # before
    rounds: NonNegativeInt
    # rounds between two evaluations, each with a policy that is kept
    rounds_per_evaluation: PositiveInt
    group_size: Annotated[int, at_least(2)]  # attempts a question
    learning_rate: float  # at first; one cosine over all rounds
    end_learning_rate: float  # where it ends
    epochs: PositiveInt  # passes over a round's rows
    # How many rows one update sees. A round of more rows makes several updates, and a round of
    # fewer makes one. 0: trainer.batch_size.
    mini_batch_size: NonNegativeInt = 0
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
    """DAPO: every token counts the same, and the upper clip is wider.

    Groups whose rewards are all equal teach nothing: other questions replace them.
    """

    kind: Literal["dapo"] = "dapo"
    # how far above 1 the ratio to the policy that sampled may count
    clip_high: NonNegativeFloat = 0.28
    # groups whose rewards are all equal are left out, and other questions sampled
    dynamic_sampling: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """A model behind an OpenAI-compatible endpoint, which writes in place of a checkpoint."""

    # what stands before /completions or /chat/completions, as in http://localhost:8000/v1
    base_url: str | None = None
    model: str | None = None  # its name at the endpoint
    # completions: token ids there and back, for vLLM and what speaks like it; chat: messages there,
    # text back, for everything else
    mode: Literal["chat", "completions"] | None = None
    # folder with tokenizer.json: with completions the served model's own, with chat any that has a
    # chat template
    tokenizer: str | None = None
    api_key_variable: str | None = None  # environment variable that holds the API key
    concurrency: int = 8  # requests under way at the same time, and episodes
    timeout_seconds: float = 120.0  # for one try of a request
    deadline_seconds: float = 600.0  # for a request with its waiting and all its tries


NO_ENDPOINT = RemoteConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EviPathConfig:
    """EviPath: a teacher writes a trajectory for each question, and the trajectories are learnt.

    The question's answer and its evidence lead the teacher.
    """

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
class DecexTreeConfig:
    """DecEx-RAG: a search tree for each question, and learning from its chains and pairs.

    The best chains are learnt by maximum likelihood, scored pairs by DPO. `sampling` says how many
    questions there are. The agent is decex.
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


# Rewards with a section of their own.
STAGED = "staged"
JUDGE = "judge"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedRewardConfig:
    """The reward `staged` ("Learning When to Search").

    Each switch is an ablation of the paper's table 4; `format` is ours.
    """

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
    """A model behind an OpenAI-compatible endpoint that judges answers.

    It says which answers mean the same as the gold ones.
    """

    # Whether the judge reads the question. "Learning When to Search" shows it the prediction and
    # the references alone.
    show_question: bool = False


def needs_judge(reward: str, staged: StagedRewardConfig) -> bool:
    """Return whether a language model says what is right under the reward of this name."""
    return reward == JUDGE or (reward == STAGED and staged.answer and staged.correctness == "judge")
