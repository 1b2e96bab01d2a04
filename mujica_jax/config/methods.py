"""Settings of the methods, of their rewards, and of model endpoints.

A new method's settings are a dataclass that joins the union in `schema.py`.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

from mujica_jax.config.bounds import (
    FloatBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MygoConfig:
    """MyGO: sample trajectories, keep those above a threshold K, and maximise their likelihood."""

    # Method. `--method.kind NAME --help` shows the settings of another method.
    kind: Literal["mygo"] = "mygo"
    implementation: ClassVar[str] = "mujica_jax.methods.mygo:mygo"
    # Number of rounds of sampling and learning after the warm-up.
    rounds: NonNegativeInt
    # Maximum number of attempts at each question in a round (16 in the Mujica-MyGO paper).
    max_attempts: PositiveInt
    # Maximum number of trajectories kept for each question (m, 3 in the Mujica-MyGO paper).
    keep_per_question: PositiveInt
    # Learning rate at the start of the first round. It falls along one cosine over all rounds.
    learning_rate: float
    # Learning rate at the end of the last round.
    end_learning_rate: float
    # Number of passes over the selected trajectories of a round.
    epochs: PositiveInt
    # Policy that samples a round. online: the newest policy. asynchronous: the policy one round
    # earlier, so that sampling and learning can run at the same time. offline: the policy after the
    # warm-up, in all rounds.
    schedule: Literal["online", "asynchronous", "offline"] = "online"
    # How the threshold K changes. rising: K follows the mean reward of the policy. fixed: K stays
    # at initial_threshold. auto: fixed with the offline schedule, where one policy samples all
    # rounds, and rising with the other schedules.
    threshold: Literal["auto", "rising", "fixed"] = "auto"
    # Threshold K before the first round, from 0 to the highest possible reward. A fixed K keeps
    # this value. At 0, every trajectory with a reward above 0 is kept. At the highest reward, only
    # trajectories that reach it are kept.
    initial_threshold: float = 0.0
    # Amount of replay: conversations of earlier rounds and of the warm-up that are mixed into a
    # round. Their number is this multiple of the number of new conversations. 0: no replay.
    replay: NonNegativeFloat

    @property
    def keeps_threshold(self) -> bool:
        """Whether K is the same in all rounds."""
        return self.threshold == "fixed" or (
            self.threshold == "auto" and self.schedule == "offline"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig:
    """Sample a group of attempts at each question, and compare each attempt with its group.

    The policy moves towards attempts that are better than the mean of their group.
    """

    # Method. `--method.kind NAME --help` shows the settings of another method.
    kind: str
    implementation: ClassVar[str] = "mujica_jax.methods.grpo:policy_gradient"
    # Number of rounds. Each round samples sampling.questions_per_round questions with the policy
    # of the round before, and learns from the attempts.
    rounds: NonNegativeInt
    # Number of rounds between two evaluations. The policy is saved at each evaluation.
    rounds_per_evaluation: PositiveInt
    # Number of attempts at each question (the group size).
    group_size: Annotated[int, at_least(2)]
    # Learning rate at the start of the first round. It falls along one cosine over all rounds.
    learning_rate: float
    # Learning rate at the end of the last round.
    end_learning_rate: float
    # Number of passes over the packed rows of a round.
    epochs: PositiveInt
    # Number of packed rows in one update. A round with more rows makes several updates, and a round
    # with fewer rows makes one. 0: trainer.batch_size.
    mini_batch_size: NonNegativeInt = 0
    # Lower clip bound: the ratio of the new to the sampling policy is clipped at 1 - clip_low.
    clip_low: FloatBelowOne = 0.2
    # Upper clip bound: the ratio of the new to the sampling policy is clipped at 1 + clip_high.
    clip_high: NonNegativeFloat = 0.2
    # Upper bound of the importance weights, which correct for rounding differences between engine
    # and trainer. 0: no weights, and ratios use the log-probabilities of the engine.
    importance_cap: NonNegativeFloat = 2.0
    # Whether to leave out groups whose rewards are all equal, and to sample other questions in
    # their place.
    dynamic_sampling: bool = False
    # With dynamic sampling: maximum number of questions in one round, as a multiple of
    # sampling.questions_per_round. Sampling ends earlier when sampling.questions_per_round groups
    # have different rewards.
    max_sampled_batches: PositiveInt = 10
    # Length limit of an attempt, in generated tokens. A longer attempt loses 1 from its reward.
    # Turns that a length limit cut off are learnt like any other, so that the penalty reaches them.
    # 0: no penalty.
    overlong_tokens: NonNegativeInt = 0
    # Number of tokens before overlong_tokens at which the length penalty begins. The penalty rises
    # linearly from 0 to 1 over these tokens.
    overlong_cache_tokens: NonNegativeInt = 0
    # Weight of the KL penalty against the policy at the start of the rounds (beta in DeepSeekMath,
    # equation 3). 0: no penalty.
    kl_coefficient: NonNegativeFloat = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(PolicyGradientConfig):
    """GRPO: sample a group of attempts at each question, and weigh every conversation equally."""

    # Method. `--method.kind NAME --help` shows the settings of another method.
    kind: Literal["grpo"] = "grpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DapoConfig(PolicyGradientConfig):
    """DAPO: sample a group of attempts at each question, and weigh every token equally.

    The upper clip bound is wider than in GRPO. Groups whose rewards are all equal are replaced by
    groups of other questions.
    """

    # Method. `--method.kind NAME --help` shows the settings of another method.
    kind: Literal["dapo"] = "dapo"
    # Upper clip bound: the ratio of the new to the sampling policy is clipped at 1 + clip_high.
    clip_high: NonNegativeFloat = 0.28
    # Whether to leave out groups whose rewards are all equal, and to sample other questions in
    # their place.
    dynamic_sampling: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """A model behind an OpenAI-compatible endpoint. It generates in place of a checkpoint."""

    # Address of the endpoint without /completions or /chat/completions, as in
    # http://localhost:8000/v1. None: no endpoint.
    base_url: str | None = None
    # Name of the model at the endpoint.
    model: str | None = None
    # Protocol. completions: requests and replies are token ids (vLLM and compatible servers). chat:
    # requests are messages and replies are text (all other servers).
    mode: Literal["chat", "completions"] | None = None
    # Folder with tokenizer.json. With completions: the tokenizer of the served model. With chat:
    # any tokenizer with a chat template.
    tokenizer: str | None = None
    # Name of the environment variable that holds the API key. None: no key is sent.
    api_key_variable: str | None = None
    # Maximum number of requests, and of episodes, that run at the same time.
    concurrency: int = 8
    # Time limit of one try of a request, in seconds.
    timeout_seconds: float = 120.0
    # Time limit of a request with all its tries and the waits between them, in seconds.
    deadline_seconds: float = 600.0


NO_ENDPOINT = RemoteConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EviPathConfig:
    """EviPath: a teacher writes one trajectory for each question, and the policy learns them.

    The teacher knows the answer of the question and its evidence.
    """

    # Method. `--method.kind NAME --help` shows the settings of another method.
    kind: Literal["evipath"] = "evipath"
    implementation: ClassVar[str] = "mujica_jax.methods.evipath.method:evipath"
    # What the teacher knows. abductive: the answer and the gold evidence. no_evidence: the answer
    # alone. deductive: neither. In every mode only trajectories with the right answer are learnt.
    mode: Literal["abductive", "no_evidence", "deductive"] = "abductive"
    # Model that writes the trajectories. policy: the policy at the start of the run. checkpoint: a
    # second checkpoint (method.teacher_checkpoint). remote: the endpoint method.remote. scripted:
    # no language model; the script replays the demonstrations of the warm-up (abductive mode only).
    teacher: Literal["policy", "checkpoint", "remote", "scripted"]
    # With teacher checkpoint: a run directory (its latest policy is used), a Hugging Face
    # directory, a GGUF file, or smollm2. Its tokenizer may differ from the tokenizer of the policy.
    teacher_checkpoint: str | None = None
    # With teacher checkpoint: maximum number of tokens in a conversation with the teacher. The
    # teacher needs more than the agent, because its prompt adds worked examples, the answer and the
    # evidence. 0: agent.max_trajectory_tokens.
    teacher_max_tokens: NonNegativeInt = 0
    # With teacher remote: the endpoint of the model that writes the trajectories.
    remote: RemoteConfig = NO_ENDPOINT
    # Prompts of the teacher. auto: agent.prompt if the teacher was trained on the format of the
    # agent, in the warm-up of this run or in another run. Otherwise few_shot. The other values mean
    # the same as in agent.prompt.
    teacher_prompt: Literal["auto", "brief", "zero_shot", "few_shot"] = "auto"
    # Number of correct trajectories to learn. The teacher stops when it has written them. To
    # compare two modes, give both the same number. 0: all.
    trajectories: NonNegativeInt = 0
    # Distractors in addition to the gold evidence, over passages in abductive mode. own: the paragraphs
    # that the data set gives with the question. retrieved: passages found by a search.
    distractors: Literal["own", "retrieved"] = "own"
    # Role whose conversations are learnt. executor: the workers.
    tune: Literal["both", "planner", "executor"] = "both"
    # Maximum number of tries for each turn of the teacher, until the turn passes all checks.
    max_tries: PositiveInt = 3
    # How answers and evidence are compared. words: by word counts, which is enough for the tiny
    # world. Or an embedder: a folder, minilm, or a Hugging Face name.
    embedder: str = "minilm"
    # Cosine similarity above which a piece of evidence supports an answer, from 0 to 1 (tau).
    threshold: float = 0.9
    # Highest learning rate on the teacher's trajectories. It is reached after a linear rise, and
    # then falls along a cosine.
    learning_rate: float
    # Learning rate at the end of the last pass over the teacher's trajectories.
    end_learning_rate: float
    # Number of passes over the trajectories.
    epochs: PositiveInt
    # Share of the updates in which the learning rate rises, at least 0 and below 1.
    warmup_ratio: FloatBelowOne = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecexTreeConfig:
    """DecEx-RAG: grow a search tree for each question, and learn its best chain and its pairs.

    A layer of the tree has two decisions: stop or go on, then answer from memory or search. The two
    choices of a decision are its branches. An execution is the text that carries out a choice: a
    sub-question, a sub-answer, a sub-query or the final answer. Executions are scored by playing
    episodes from them to the end.

    The best chains are learnt by maximum likelihood. Scored siblings form preference pairs, which
    are learnt by DPO. A tree is grown for each of sampling.questions_per_round questions. The agent
    is decex.
    """

    # Method. `--method.kind NAME --help` shows the settings of another method.
    kind: Literal["decex"] = "decex"
    implementation: ClassVar[str] = "mujica_jax.methods.decex.method:decex"
    # Number of turns sampled for each decision and for each execution (k).
    branches: PositiveInt = 3
    # Number of episodes that are played to score one execution (n).
    rollouts: PositiveInt = 4
    # Mean reward above which an answer from memory is good enough, so that nothing is searched.
    skip_above: NonNegativeFloat = 0.6
    # Nodes of a layer that are expanded. pruned: the best branch. unpruned: both branches of a
    # decision, each with its best execution. full: every execution; no episodes are played, because
    # the final answers below an execution give its score.
    expansion: Literal["pruned", "unpruned", "full"] = "pruned"
    # Whether both branches of each decision are scored, so that a pair can prefer either of them.
    # False: a branch that is not expanded costs no episodes and gives no pair.
    score_both_branches: bool = True
    # Endpoint of a second model that writes the tree. The policy still writes sub-answers from
    # memory and sub-queries. Without an endpoint the policy writes the whole tree.
    remote: RemoteConfig = NO_ENDPOINT
    # Budget of a tree, in generated tokens. A tree that has used it up starts no further layer. 0:
    # no limit.
    budget_tokens: NonNegativeInt = 0
    # Whether to learn the best chains. A chain is a path from the root of a tree to the leaf with
    # the best reward.
    sft: bool = True
    # Which chain is learnt if several have the best reward of a tree. most: the one with the most
    # retrievals. least: the one with the fewest.
    retrievals: Literal["most", "least"] = "most"
    # Lowest reward of a best chain that is learnt.
    min_reward: NonNegativeFloat = 0.5
    # Learning rate of maximum likelihood at the start. It falls along a cosine.
    learning_rate: float
    # Learning rate of maximum likelihood at the end.
    end_learning_rate: float
    # Number of passes over the best chains.
    epochs: PositiveInt
    # Whether to learn the preference pairs by DPO.
    dpo: bool = True
    # Whether DPO learns pairs of decisions: stop or go on, answer from memory or search.
    decision_pairs: bool = True
    # Whether DPO learns pairs of executions: sub-questions, sub-answers, sub-queries and final
    # answers.
    execution_pairs: bool = True
    # Strength with which DPO keeps the policy close to the policy before DPO (beta).
    beta: PositiveFloat = 0.1
    # Learning rate of DPO at the start. It falls to 0.
    dpo_learning_rate: PositiveFloat = 5e-7
    # Number of passes over the preference pairs.
    dpo_epochs: PositiveInt = 1


# Names of the rewards that have their own section.
STAGED = "staged"
JUDGE = "judge"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedRewardConfig:
    """The reward `staged` of the paper "Learning When to Search".

    The first stage teaches the policy to search. The second stage teaches it to search only when
    that is needed. The switches are ablations of the paper's table 4, except `format`, which is
    ours.
    """

    # First round of the second stage. The paper does not give this number. The default gives each
    # stage half of the paper's 500 rounds.
    stage_two_round: NonNegativeInt = 251
    # Reward of one search (beta, equations 10 and 11). It is added to a wrong answer in the first
    # stage, and subtracted from a right answer in the second stage.
    beta: NonNegativeFloat = 0.3
    # How an answer is judged as right. exact_match: by the scoring rule of the task. judge: by the
    # model of the section judge, as in the paper.
    correctness: Literal["exact_match", "judge"] = "exact_match"
    # Whether to use one stage instead of two (table 2). In every round, a search then raises the
    # reward of a wrong answer and lowers the reward of a right one.
    unified: bool = False
    # How the similarity of two queries is measured. words: by word counts. Or an embedder: a
    # folder, minilm, or a Hugging Face name.
    embedder: str = "words"
    # Maximum number of words in a query that counts as concise.
    max_query_words: PositiveInt = 10
    # Whether the format is rewarded: 1 for a well-formed episode with an answer, -1 otherwise.
    format: bool = True
    # Whether queries are rewarded: similar queries and queries that are not concise cost reward.
    search: bool = True
    # Whether the answer is rewarded.
    answer: bool = True
    # Whether searches raise the reward of a wrong answer in the first stage.
    stage_one: bool = True
    # Whether searches lower the reward of a right answer in the second stage.
    stage_two: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeConfig(RemoteConfig):
    """A model behind an OpenAI-compatible endpoint that judges answers.

    It decides whether an answer means the same as one of the gold answers.
    """

    # What each help text begins with, because the fields of other endpoints have the same texts.
    help_prefix: ClassVar[str] = "Judge. "
    # Whether the judge reads the question. In the paper "Learning When to Search" it reads only the
    # prediction and the gold answers.
    show_question: bool = False


def needs_judge(reward: str, staged: StagedRewardConfig) -> bool:
    """Return whether the reward of this name asks a judge which answers are right."""
    return reward == JUDGE or (reward == STAGED and staged.answer and staged.correctness == "judge")
