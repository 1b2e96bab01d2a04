"""Open a run: check its configuration, then make or reload its parts.

The configuration is checked against the machine, the task and the model. Errors that can be found
before the run directory is made are reported before that.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mujica_jax.agents.protocol import PromptMode
from mujica_jax.config.methods import (
    DpoConfig,
    EviPathConfig,
    FileMethodConfig,
    MygoConfig,
    SftConfig,
)
from mujica_jax.config.named_objects import implementation, named_object
from mujica_jax.config.schema import Config
from mujica_jax.config.stored import to_dict
from mujica_jax.errors import RunMismatchError, UserError
from mujica_jax.inference.counters import serve_metrics
from mujica_jax.inference.engine.factory import CACHE_DTYPES, check_engine
from mujica_jax.learning.losses.loss import named_loss
from mujica_jax.learning.trainer import Trainer
from mujica_jax.models import quantization
from mujica_jax.models.attention import check_platform
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.lora import check_rank
from mujica_jax.models.sharding import make_mesh, shardings_of
from mujica_jax.report.metrics_log import MetricsLog, NoMetrics, import_wandb
from mujica_jax.report.progress import NoConsole, Progress
from mujica_jax.runs import memory, phases
from mujica_jax.runs.commits import record_commits, recorded_commits, use_recorded_commits
from mujica_jax.runs.judge import open_judge
from mujica_jax.runs.lead import trainer_lease
from mujica_jax.runs.model import StartingModel, decoder_config, new_model, open_model
from mujica_jax.runs.parts import NATIVE_ENGINE, check_prompts, make_reward, open_adapter
from mujica_jax.runs.run import Reports, Run
from mujica_jax.runtime import distributed, provenance
from mujica_jax.runtime.chips import chip_of
from mujica_jax.runtime.compilation_cache import use_compilation_cache
from mujica_jax.runtime.extras import import_extra, require_extra
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.storage.run_directory import RunPath
from mujica_jax.tasks.checks import check_task, from_scratch
from mujica_jax.tasks.content import (
    fingerprint_of_paragraphs,
    fingerprint_of_questions,
    fingerprint_of_searches,
)
from mujica_jax.tasks.task import Task
from mujica_jax.trajectories.messages import (
    fingerprint_of_files,
    read_conversations,
    read_preferences,
)
from mujica_jax.trajectories.store import CONFIG, SUMMARY, Store, open_run

# The file in a run directory that records which questions the task asks and what it searches.
CONTENT = "questions.json"
# The fields of the section `judge` that may change when a run is restarted.
JUDGE_ADDRESS = (
    "base_url",
    "api_key_variable",
    "concurrency",
    "timeout_seconds",
    "deadline_seconds",
)
# All fields of a configuration that may change when a run is restarted.
IGNORED = (
    "run",
    "keep_policies",
    "metrics",
    "profile",
    "distributed",
    "sampling.workers",
    "faults",
    # The content of these files is compared instead (`check_content`).
    "method.data",
    # Only earlier releases have this field.
    "task.index_rows",
    # A mistake in this field is only found when the engine is made. It may be corrected without
    # starting a new run.
    "engine.factory",
    *(f"judge.{field}" for field in JUDGE_ADDRESS),
)


@contextlib.contextmanager
def open_training(config: Config, directory: RunPath, preemption: Preemption) -> Iterator[Run]:
    """Open the run in `directory`, a new one or one that was started before.

    The configuration is checked before a new directory is made, because the directory stores the
    configuration that it was started with. The metrics files are closed when the block ends.
    """
    if (directory / CONFIG).exists():
        use_recorded_commits(Store(directory))
    start = _check(config, directory)
    store, progress = _open_directory(config, start.task, directory)
    record_commits(store)
    for name, commit in recorded_commits(store).items():
        progress.line(f"model {name} of the Hugging Face Hub: commit {commit}")
    with (
        trainer_lease(store, preemption),
        _open_metrics(config, store) as metrics,
        _build(
            start, config, store, Reports(progress=progress, metrics=metrics), preemption
        ) as run,
    ):
        yield run


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Start:
    """The parts that are made while the configuration is checked.

    Attributes:
        task: The task with its questions.
        mesh: The devices that the trainer uses.
        model: The checkpoint that the run starts from. None: the run starts from random weights.
        reserved_bytes: The memory of each chip, in bytes, that the run needs for everything except
            the engine's cache of keys and values.
    """

    task: Task
    mesh: Mesh
    model: StartingModel | None
    reserved_bytes: int


def _check(config: Config, directory: RunPath) -> _Start:
    """Check the configuration against the machine, the task and the model. Writes nothing."""
    # Check the files that the method learns first: this takes seconds, and the others minutes.
    _check_data(config)

    # Check the machine and the task.
    require_packages(config)
    use_compilation_cache()
    _check_machine(config)
    mesh = make_mesh(
        config.trainer.data_parallel_size, config.trainer.fsdp, config.trainer.tensor_parallel_size
    )
    task = build_task(config)
    _check_reward(config, task, directory)
    _check_loss(config)
    _check_start(config, task)

    # Check the model: a checkpoint, or the configured size of a model from scratch.
    model = _open_checkpoint(config, task) if config.init else None
    if model is None:
        size = decoder_config(config, config.model.vocab_tokens, ())
    else:
        size = model.decoder.config
    reserved_bytes = _check_size(config, size, mesh)
    return _Start(task=task, mesh=mesh, model=model, reserved_bytes=reserved_bytes)


def _open_directory(config: Config, task: Task, directory: RunPath) -> tuple[Store, Progress]:
    """Open or make the run directory.

    Print how many phases are already finished, and notes about the task's questions.
    """
    sections = to_dict(config)
    store = distributed.primary_first("the run", lambda: _open_shared(directory, sections))
    distributed.primary_first("the questions", lambda: check_content(store, config, task))
    progress = Progress() if distributed.is_primary() else Progress(NoConsole(), live=False)
    progress.line(f"run directory: {directory}")
    num_phases = sum(name.endswith(".json") for name in store.names(phases.PHASES))
    if num_phases and not store.exists(SUMMARY):
        progress.line(f"continuing this run; finished phases: {num_phases}")
    for sentence in about_questions(task):
        progress.line(sentence)
    return store, progress


@contextlib.contextmanager
def _build(
    start: _Start,
    config: Config,
    store: Store,
    reports: Reports,
    preemption: Preemption,
) -> Iterator[Run]:
    """Make the parts of the run, and close them when the block ends."""
    model = start.model or new_model(config, start.task, store)
    mesh = start.mesh if start.mesh.size > 1 else None
    run = Run(
        config,
        store=store,
        task=start.task,
        model=dataclasses.replace(model, load=functools.partial(model.load, mesh)),
        reports=reports,
        preemption=preemption,
        reserved_bytes=start.reserved_bytes,
    )
    with _served(run):
        yield run
    run.profile.close()


def _check_machine(config: Config) -> None:
    """Check that the devices support the configured attention kernel and number types.

    This is checked before a checkpoint is read.
    """
    check_platform(config.trainer.attention)
    check_dtypes(config)


def _open_checkpoint(config: Config, task: Task) -> StartingModel:
    """Open the checkpoint that the run starts from, and check that prompts and adapter suit it."""
    assert config.init is not None, "this is only called if the configuration names a checkpoint"
    model = open_model(config.init, config.trainer.dtype)
    further_prompts: list[PromptMode] = []
    if config.warmup.source == "few_shot" and config.warmup.steps:
        further_prompts.append("few_shot")
    check_prompts(config.agent, model.tokenizer, task.environment_kind, *further_prompts)
    if config.adapter:
        open_adapter(config, model.load(None))
    return model


def _check_size(config: Config, size: DecoderConfig, mesh: Mesh) -> int:
    """Check that trainer and engine can run a model of this size.

    Returns how many bytes of each chip the run needs for everything except the engine's cache of
    keys and values.
    """
    # Check that the model can be sharded over the mesh.
    if mesh.size > 1:
        shardings_of(nnx.eval_shape(lambda: Decoder(size, rngs=nnx.Rngs(0))), mesh)
    check_rank(size, config.trainer.lora_rank)
    check_engine(
        size,
        config.engine,
        positions=config.agent.max_trajectory_tokens,
        dtype=jnp.dtype(config.trainer.dtype),
    )
    if config.engine.factory is not None:
        named_object(config.engine.factory, setting="engine.factory")
    return _check_memory(config, size)


def _open_metrics(
    config: Config, store: Store
) -> contextlib.AbstractContextManager[MetricsLog | NoMetrics]:
    """Open the metrics files. Only the first process writes metrics."""
    if distributed.is_primary():
        return MetricsLog(store.root, store.io_statistics, config.metrics, to_dict(config))
    return contextlib.nullcontext(NoMetrics())


def open_sampling(config: Config, store: Store, preemption: Preemption, progress: Progress) -> Run:
    """Open a run for a sampling worker.

    The engine uses this host's devices. The policies come from the run directory, where at least
    one must be committed.
    """
    use_compilation_cache()
    use_recorded_commits(store)
    own_devices = dataclasses.replace(
        config.trainer,
        data_parallel_size=1,
        fsdp=1,
        tensor_parallel_size=config.engine.tensor_parallel_size,
        accumulation_steps=1,
    )
    config = dataclasses.replace(config, trainer=own_devices)
    check_dtypes(config)
    newest = distributed.primary_first(
        "a policy is read", lambda: store.policy_path(store.policies()[-1])
    )
    model = open_model(newest / "model", config.trainer.dtype)
    task = build_task(config)
    check_content(store, config, task)
    return Run(
        config,
        store=store,
        task=task,
        model=dataclasses.replace(model, load=functools.partial(model.load, None)),
        reports=Reports(progress=progress, metrics=NoMetrics()),
        preemption=preemption,
    )


def _check_memory(config: Config, size: DecoderConfig) -> int:
    """Return how many bytes of each chip the run needs, without the engine's keys and values.

    Returns 0 if the memory of this kind of device is not known. Raises UserError if the run does
    not fit. The training step is compiled to measure it. Training later finds the compiled step in
    the compilation cache.
    """
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return 0
    trainer = Trainer(size, config.trainer)
    step = trainer.lower_step().compile().memory_analysis()
    statistics = jax.local_devices()[0].memory_stats() or {}
    # So far the chip only holds the task's embedder and index.
    used_bytes = statistics.get("bytes_in_use", 0)
    memory_phases = memory.phases(
        config,
        size,
        trainer,
        step=step.temp_size_in_bytes if step else 0,
        retrieval=used_bytes,
    )
    memory.check_memory(config, memory_phases, chip)
    largest_bytes = max(phase.bytes - phase.parts[memory.CACHE] for phase in memory_phases)
    return largest_bytes - used_bytes


def _check_reward(config: Config, task: Task, directory: RunPath) -> None:
    """Check that the reward's embedder can be loaded and that its judge answers.

    The judge of a finished run is not checked, because the run needs no more rewards.
    """
    judge = open_judge(config, None, out=directory)
    make_reward(config, task.rule, judge)
    if judge is not None and not (directory / SUMMARY).exists():
        judge.check()


def _check_data(config: Config) -> None:
    """Check that every record of the files that the method learns can be read.

    Raises UserError with the file and line of a record that cannot.
    """
    if isinstance(config.method, SftConfig):
        read_conversations(config.method.data)
    elif isinstance(config.method, DpoConfig):
        read_preferences(config.method.data)


def _check_loss(config: Config) -> None:
    """Check that a user's own loss can be imported and used."""
    if isinstance(config.method, MygoConfig | EviPathConfig):
        named_loss(config.method.loss)


def _check_start(config: Config, task: Task) -> None:
    """Check that the configuration suits the start of the run: a checkpoint or random weights."""
    has_demonstrations = bool(config.warmup.steps or config.eval.control)
    is_scripted = config.warmup.source == "scripted" and has_demonstrations
    if is_scripted or not config.init:
        from_scratch(task)
    if config.warmup.source == "few_shot" and not config.init:
        raise UserError(
            "warmup.source is few_shot, but no checkpoint is given, and a model with random "
            "weights cannot answer questions: name a checkpoint with --init, or use "
            "--warmup.source scripted"
        )
    if config.trainer.lora_rank and config.init is None:
        raise UserError(
            f"trainer.lora_rank is {config.trainer.lora_rank}, but no checkpoint is given, and "
            "adapters only suit a trained model: name a checkpoint with --init, or set "
            "trainer.lora_rank to 0"
        )
    if config.adapter and not config.init:
        raise UserError(
            f"adapter is {config.adapter}, but no checkpoint is given: name the checkpoint that "
            "the adapter was trained on with --init"
        )
    if config.init and config.pretraining.steps:
        raise UserError(
            f"init is {config.init}, but the configuration {config.name} pre-trains for "
            f"{config.pretraining.steps} steps, and its learning rates are for a model from "
            "scratch: use a configuration for checkpoints, such as "
            "configs/two_wiki_text_smollm2.py, or set --pretraining.steps 0 and your own learning "
            "rates"
        )


def _open_shared(directory: RunPath, sections: dict[str, Any]) -> Store:
    """Open the run directory that the job's first process has opened or made.

    Raises UserError if this process does not see that directory. Otherwise it would train in a
    directory of its own on another disk.
    """
    if not distributed.is_primary() and not Store(directory).exists(CONFIG):
        raise UserError(
            f"process {distributed.process()} on {distributed.host()} finds no run in {directory}, "
            "although process 0 has started one there: give a --run directory that all hosts share"
        )
    return open_run(directory, sections, ignore=IGNORED)


def check_content(store: Store, config: Config, task: Task) -> None:
    """Check that the task's questions and search data are the same as when the run was started.

    The first start of the run stores their counts and checksums. If the questions changed later,
    stored trajectories would be scored against the answers of other questions.

    Raises RunMismatchError if they changed.
    """
    train_questions = task.questions("train")
    eval_questions = task.questions(config.eval.split)[: config.eval.questions]
    content = {
        "training questions": (
            f"{len(train_questions)}, {fingerprint_of_questions(train_questions)}"
        ),
        "evaluation questions": (
            f"{len(eval_questions)}, {fingerprint_of_questions(eval_questions)}"
        ),
        "searched": fingerprint_of_searches(task, eval_questions),
    }
    if _reads_own_paragraphs(config):
        content["paragraphs of the training questions"] = fingerprint_of_paragraphs(
            task, train_questions
        )
    if isinstance(config.method, FileMethodConfig):
        content["method.data"] = fingerprint_of_files(config.method.data)
    store.write_json_once(CONTENT, content)

    first_content = store.read_json(CONTENT)
    differences = provenance.differences(first_content, content, ignore=())
    if differences:
        place = (
            getattr(config.task, "data_dir", None)
            or getattr(config.task, "index", None)
            or config.task.kind
        )
        raise RunMismatchError(
            f"{store.root} was started with other data than {place} holds now (count and "
            f"checksum): {'; '.join(differences)}; give the same data, or choose another --run "
            "directory"
        )


def _reads_own_paragraphs(config: Config) -> bool:
    """Return whether training uses the paragraphs that come with the questions.

    This is the case if the agent searches these paragraphs, or if EviPath draws distractors from
    them.
    """
    is_distractor = getattr(config.task, "setting", None) == "distractor"
    return is_distractor or getattr(config.method, "distractors", None) == "own"


@contextlib.contextmanager
def _served(run: Run) -> Iterator[None]:
    """Serve the engine's counters to Prometheus during a block, if `metrics.port` is set."""
    if not run.config.metrics.port:
        yield
        return
    port, close = serve_metrics(run.counters, port=run.config.metrics.port)
    run.progress.line(f"engine metrics for Prometheus: http://127.0.0.1:{port}/metrics")
    try:
        yield
    finally:
        close()


def build_task(config: Config, *, learns: bool = True, is_scored: bool = True) -> Task:
    """Build the configured task, and check that it has questions.

    If the task `is_scored`, the evaluated split needs questions. If the run `learns`, the training
    split needs them too. Raises UserError if such a split is empty.
    """
    task = implementation(config.task)(config.task)
    eval_split = config.eval.split
    check_task(task, config.task.kind, ("train", eval_split) if learns else (eval_split,))
    num_training = len(task.questions("train"))
    num_evaluated = len(task.questions(eval_split))
    if is_scored and not num_evaluated and not learns:
        raise UserError(
            f"task {task.name} has no {eval_split} questions: choose another --eval.split, or "
            "change the share of questions that is held out"
        )
    if learns and not (num_training and num_evaluated):
        hint = "" if num_training else without_training(task)
        raise UserError(
            f"task {task.name} has {num_training} training questions and {num_evaluated} "
            f"{eval_split} questions, but training needs both: give it more data, or change the "
            f"share of questions that is held out{hint}"
        )
    return task


def without_training(task: Task) -> str:
    """Return the end of an error message that explains why there are no training questions.

    It is empty for tasks without official dev files.
    """
    if not hasattr(getattr(task, "config", None), "split_dev_files"):
        return ""
    return (
        ". Questions in files called dev* are never trained on: add files called train*, or set "
        "--task.split-dev-files if your files are only a sample of the dataset"
    )


def about_questions(task: Task) -> list[str]:
    """Return notes about the task's questions, to print at the start.

    They say how many questions are left out, and what is special about the others.
    """
    sentences = []
    if left_out(task):
        sentences.append(left_out(task))
    sentences += [note for note in getattr(task, "notes", ()) if note]
    shown = getattr(task, "shown", "")
    if shown:
        sentences.append(f"a search shows {shown} that belong to the question")
    return sentences


def left_out(task: Task) -> str:
    """Return a sentence about questions that cannot be asked; empty if all can be asked."""
    names = getattr(task, "left_out", ())
    if not names:
        return ""
    examples = ", ".join(names[:3])
    if len(names) > 3:
        examples += ", ..."
    return (
        f"{len(names)} questions cannot be asked ({examples}): they lack required fields, or the "
        "graph, the corpus or their own passages do not contain what they need"
    )


def require_packages(config: Config) -> None:
    """Check that the optional packages that the configuration needs are installed."""
    if config.engine.kind == "jetstream":
        require_extra("jetstream", "engine.kind jetstream", otherwise=NATIVE_ENGINE)
    if config.engine.weights != "compute":
        import_extra("qwix", f"engine.weights {config.engine.weights}")
    if config.metrics.wandb != "off":
        import_wandb(config.metrics)


def check_dtypes(config: Config) -> None:
    """Check that this platform can compute with the configured number types.

    Each type is tried with a small matrix product, because a table of platforms would be out of
    date soon. Raises UserError if one fails.
    """
    type_of_field = {
        "trainer.dtype": config.trainer.dtype,
        "engine.cache_dtype": CACHE_DTYPES.get(config.engine.cache_dtype, config.trainer.dtype),
        "engine.weights": quantization.TYPES.get(config.engine.weights, config.trainer.dtype),
    }
    # Try each type only once: every try compiles a program.
    tried: set[jnp.dtype] = set()
    for field, type_name in type_of_field.items():
        dtype = jnp.dtype(type_name)
        if dtype in tried:
            continue
        tried.add(dtype)
        try:
            _product_in(dtype).block_until_ready()
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
            platform = jax.default_backend()
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{field} needs {dtype.name}, but {platform} cannot compute with it ({reason}): "
                "choose another type"
            ) from error


def _product_in(dtype: jnp.dtype) -> jax.Array:
    """Multiply two matrices that are stored in this type, as the engine and the trainer do."""
    compute_dtype = jnp.float32 if dtype.itemsize == 1 else dtype

    def product(matrix: jax.Array) -> jax.Array:
        return matrix.astype(dtype).astype(compute_dtype) @ matrix.astype(compute_dtype)

    return jax.jit(product)(jnp.ones((8, 8)))
