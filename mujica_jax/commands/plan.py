"""Print what a configuration needs, and whether it fits the chips. No device is needed.

    python -m mujica_jax.plan [CONFIG] [--chips v5e:4x8 ...] [--section.field value ...]

The flags are those of `train`. The sizes follow from the shapes of the weights, as in the check
that `train` makes on a TPU (`runs/memory.py`). Without `--compile`, the memory of the training step
is a lower bound: the gradient, and the inputs of the layers.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mujica_jax.config.bounds import NonNegativeFloat
from mujica_jax.config.checks import check
from mujica_jax.config.command_line import override, take_file
from mujica_jax.config.files import load_config
from mujica_jax.config.methods import (
    DapoConfig,
    DecexTreeConfig,
    EviPathConfig,
    GrpoConfig,
    MygoConfig,
)
from mujica_jax.config.program_help import ProgramHelp, program_name
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError, nearest

if TYPE_CHECKING:
    from mujica_jax.learning.losses.loss import Loss
    from mujica_jax.learning.trainer import Trainer
    from mujica_jax.models.families import DecoderConfig
    from mujica_jax.runs.memory import PhaseMemory
    from mujica_jax.runtime.chips import Chip

DEFAULT_CONFIG = "tiny_world"
HELP = ProgramHelp(
    summary="Print what a configuration needs, and whether it fits the chips: parameters, bytes on "
    "each chip in each phase, tokens of a step, updates, and what a run writes. No device is "
    "needed.",
    usage="[CONFIG] [--chips TOPOLOGY ...] [flags of train]",
    examples={
        "two_wiki_text_v5e --chips v5e:4x8": "Check Qwen2.5-7B on 32 chips.",
        "two_wiki_text_v5e --chips v5e:2x4 v6e:2x4 --trainer.lora-rank 16": "Compare chips for "
        "training with adapters.",
    },
    default_config=DEFAULT_CONFIG,
    common={
        "Plan": ("chips", "compile", "retrieval_gigabytes"),
        "Model": ("init", "trainer.lora_rank", "model.num_layers", "model.hidden_size"),
        "Method": ("method.kind", "method.rounds", "warmup.steps", "keep_policies"),
        "Sizes": (
            "trainer.batch_size",
            "trainer.sequence_length",
            "trainer.accumulation_steps",
            "trainer.remat",
            "trainer.dtype",
            "trainer.parameter_dtype",
            "trainer.data_parallel_size",
            "trainer.fsdp",
            "trainer.tensor_parallel_size",
            "engine.max_num_seqs",
            "engine.cache_gigabytes",
            "engine.tensor_parallel_size",
            "agent.max_trajectory_tokens",
        ),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """A configuration, and what it is planned for."""

    # Topologies to plan for, such as v5e:4x8. Without this flag, all known chips are compared, as
    # many as the mesh of the configuration has devices.
    chips: tuple[str, ...] = ()
    # Whether to compile the training step for each topology, to measure its memory. This needs the
    # package libtpu and takes minutes for a large model.
    compile: bool = False
    # Memory on each chip, in gigabytes, for the embedder and for an index of kind exact that is
    # searched on the chips. `index estimate` computes the size of an index.
    retrieval_gigabytes: NonNegativeFloat = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The chips that a run is planned for."""

    # How the table calls them, such as v5e:4x8.
    name: str
    chip: "Chip"
    count: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    - 0: the plan was printed, whether or not it fits.
    - 2: the user made a mistake.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        plan(parse(words))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str]) -> PlanConfig:
    """Return the configuration of a command line `[CONFIG] [flags]`."""
    words = list(arguments)
    config = load_config(take_file(words) or DEFAULT_CONFIG)
    options = override(PlanConfig(**vars(config)), words, prog=program_name("plan"), program=HELP)
    if options.compile and not options.chips:
        raise UserError(
            "--compile compiles for a topology, but --chips names none: add --chips v5e:4x8 or "
            "another topology"
        )
    check(on_one_device(options))
    return options


def on_one_device(config: PlanConfig) -> PlanConfig:
    """Return the configuration with a mesh of one device.

    What a run needs as a whole does not depend on the mesh.
    """
    trainer = dataclasses.replace(
        config.trainer, data_parallel_size=1, fsdp=1, tensor_parallel_size=1
    )
    return dataclasses.replace(config, trainer=trainer)


def plan(options: PlanConfig) -> None:
    """Print the plan."""
    targets = targets_of(options)
    _use_virtual_devices(max(target.count for target in targets))

    # These imports start JAX. They come late so that mistakes in the arguments are reported fast.
    from mujica_jax.learning.trainer import Trainer

    model = model_of(options)
    trainer = Trainer(model, on_one_device(options).trainer, devices=_devices(1))
    for line in summary_lines(options, model, trainer):
        print(line)
    for target in targets:
        print()
        try:
            for line in target_lines(options, model, target):
                print(line)
        except UserError as error:
            print(f"{target.name}: {error}")


def model_of(config: Config) -> "DecoderConfig":
    """Return the sizes of the model: of the checkpoint, or of the section `model`.

    A configuration that does not pre-train is for a checkpoint. Without `--init` it is planned for
    one with an output matrix of its own, which most large checkpoints have.
    """
    from mujica_jax.models.gguf import checkpoint_folder
    from mujica_jax.models.weights import load_config as load_model_config
    from mujica_jax.runs.model import decoder_config

    if config.init is not None:
        return load_model_config(checkpoint_folder(config.init))
    size = decoder_config(config, config.model.vocab_tokens, ())
    return size if is_from_scratch(config) else dataclasses.replace(size, tie_word_embeddings=False)


def is_from_scratch(config: Config) -> bool:
    """Return whether the configuration trains a model with random weights."""
    return config.init is None and config.pretraining.steps > 0


def summary_lines(config: PlanConfig, model: "DecoderConfig", trainer: "Trainer") -> list[str]:
    """Return what a run needs on any chips."""
    from mujica_jax.runs import memory

    parameters, trained = memory.count_parameters(trainer)
    trained_words = "all trained" if trained == parameters else f"{trained:,} trained"
    rows = {
        "model": f"{model.family}, {model.num_layers} layers of width {model.hidden_size}: "
        f"{parameters:,} parameters, {trained_words}",
        "weights": weights_in_words(config),
        "step": f"{config.trainer.batch_size} rows x {config.trainer.sequence_length:,} tokens = "
        f"{config.trainer.tokens_per_step:,} tokens in one update",
        "updates": updates_in_words(config),
        "sampling": sampling_in_words(config),
        "disk": disk_in_words(config, trainer),
    }
    if getattr(config.task, "retriever", "") == "dense" and not config.retrieval_gigabytes:
        rows["search"] = (
            f"the embedder {getattr(config.task, 'embedder', '')} and an index on the chips are not counted: give "
            "their size with --retrieval-gigabytes"
        )
    width = max(map(len, rows)) + 2
    return [f"{config.name} ({config.method.kind} on {config.task.kind})", ""] + [
        f"{name.ljust(width)}{text}" for name, text in rows.items()
    ]


def weights_in_words(config: Config) -> str:
    """Return where the weights come from, and how exact their number is."""
    if config.init is not None:
        return f"from {config.init}"
    if is_from_scratch(config):
        return "random, with a tokenizer of the largest size"
    return "a checkpoint with an output matrix of its own; --init reads the exact sizes"


def updates_in_words(config: Config) -> str:
    """Return how many updates the phases make, as far as it is known before the run."""
    parts = []
    if config.init is None and config.pretraining.steps:
        parts.append(f"{config.pretraining.steps:,} of pre-training")
    if config.warmup.steps:
        parts.append(f"at most {config.warmup.steps:,} of warm-up")
    passes = f"{config.method.epochs} pass{'' if config.method.epochs == 1 else 'es'}"
    rounds = getattr(config.method, "rounds", 1)
    batch_size = getattr(config.method, "mini_batch_size", 0) or config.trainer.batch_size
    parts.append(
        f"then in each of {rounds} round{'' if rounds == 1 else 's'} {passes} over the packed rows, "
        f"{batch_size} rows in an update"
    )
    return ", ".join(parts)


def sampling_in_words(config: Config) -> str:
    """Return how many attempts the method samples at most."""
    method = config.method
    questions = config.sampling.questions_per_round
    if isinstance(method, MygoConfig):
        attempts = method.rounds * questions * method.max_attempts
        return (
            f"at most {method.rounds} rounds x {questions:,} questions x {method.max_attempts} "
            f"attempts = {attempts:,} attempts"
        )
    if isinstance(method, GrpoConfig | DapoConfig):
        factor = method.max_sampled_batches if method.dynamic_sampling else 1
        attempts = method.rounds * questions * method.group_size * factor
        factor_words = f" x {factor} batches" if factor > 1 else ""
        return (
            f"at most {method.rounds} rounds x {questions:,} questions x {method.group_size} "
            f"attempts{factor_words} = {attempts:,} attempts"
        )
    if isinstance(method, EviPathConfig):
        return "one trajectory of the teacher for each training question"
    if isinstance(method, DecexTreeConfig):
        return f"{questions:,} trees, {method.rollouts} episodes for each scored execution"
    return "as the method decides"


def disk_in_words(config: Config, trainer: "Trainer") -> str:
    """Return what a run writes, without its trajectories, which are small in comparison."""
    from mujica_jax.runs import memory

    policies = num_policies(config)
    parameters, trained = memory.count_parameters(trainer)
    # A policy has its adapters merged.
    adapters = trained if config.trainer.lora_rank else 0
    bytes_per_number = {"float32": 4, "bfloat16": 2}[config.trainer.dtype]
    policy_bytes = (parameters - adapters) * bytes_per_number
    stored = policies if config.keep_policies == 0 else min(policies, config.keep_policies)
    checkpoint_bytes = memory.checkpoint_bytes(trainer)
    return (
        f"{stored} policies of {_size(policy_bytes)}, and a checkpoint of {_size(checkpoint_bytes)}: "
        f"{_size(stored * policy_bytes + checkpoint_bytes)}"
    )


def num_policies(config: Config) -> int:
    """Return how many policies a run commits: one after the warm-up, and those of the method."""
    method = config.method
    rounds = getattr(method, "rounds", 1)
    rounds_per_policy = getattr(method, "rounds_per_evaluation", 1)
    return 1 + math.ceil(rounds / rounds_per_policy)


def target_lines(options: PlanConfig, model: "DecoderConfig", target: Target) -> list[str]:
    """Return the memory of each phase on these chips, and the verdict.

    Raises UserError if the configuration does not suit this number of chips.
    """
    from mujica_jax.learning.trainer import Trainer
    from mujica_jax.runs import memory

    config = with_mesh(options, target)
    check(config)
    devices = _topology_devices(target) if options.compile else _devices(target.count)
    trainer = Trainer(model, config.trainer, loss=_loss(config), devices=devices)
    if options.compile:
        compiled = trainer.lower_step().compile().memory_analysis()
        assert compiled is not None, "the compiler for TPUs reports memory"
        step_bytes = compiled.temp_size_in_bytes
    else:
        step_bytes = memory.gradient_bytes(trainer) + memory.layer_input_bytes(trainer)
    phases = memory.phases(
        config,
        model,
        trainer,
        step=step_bytes,
        retrieval=int(options.retrieval_gigabytes * 1e9),
    )

    changed = config.trainer.fsdp != options.trainer.fsdp
    fsdp_words = f", with --trainer.fsdp {config.trainer.fsdp}" if changed else ""
    lines = [
        f"{target.name}{fsdp_words}: GB per chip. A {target.chip.name} has "
        f"{target.chip.memory_bytes / 1e9:.1f} GB",
        *phase_table(phases),
    ]
    lines += _step_lines(options, trainer)
    lines.append(_cache_line(config, model))
    try:
        memory.check_memory(config, phases, target.chip)
    except UserError as error:
        lines.append(f"does not fit: {error}")
    else:
        lines.append(_fits_line(options, phases, target.chip))
    return lines


def phase_table(phases: "Sequence[PhaseMemory]") -> list[str]:
    """Return the gigabytes of each phase, by part, as lines of a table."""
    names: list[str] = []
    for phase in phases:
        for part, part_bytes in phase.parts.items():
            if part_bytes and part not in names:
                names.append(part)
    heads = ["phase", "sum", *names]
    rows = []
    for phase in phases:
        cells = [phase.name, _gigabytes(phase.bytes)]
        for name in names:
            part_bytes = phase.parts.get(name, 0)
            cells.append(_gigabytes(part_bytes) if part_bytes else "")
        rows.append(cells)
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _step_lines(options: PlanConfig, trainer: "Trainer") -> list[str]:
    """Return what the training step contains, unless it was compiled."""
    from mujica_jax.runs import memory

    if options.compile:
        return []
    gradient = _gigabytes(memory.gradient_bytes(trainer))
    inputs = _gigabytes(memory.layer_input_bytes(trainer))
    return [
        f"training step: at least {gradient} of gradients and {inputs} of layer inputs; the "
        "compiled step needs more"
    ]


def _cache_line(config: Config, model: "DecoderConfig") -> str:
    """Return what the keys and values of conversations take."""
    from mujica_jax.runs import memory

    one_bytes = memory.conversations_bytes(config, model, 1)
    all_bytes = memory.conversations_bytes(config, model, config.engine.max_num_seqs)
    limit = config.engine.cache_gigabytes
    limit_words = f"limited to {limit:g} GB" if limit else "the memory that nothing else needs"
    return (
        f"KV cache: {_size(one_bytes)} for a conversation of "
        f"{config.agent.max_trajectory_tokens:,} tokens, {_size(all_bytes)} for "
        f"{config.engine.max_num_seqs} of them ({limit_words})"
    )


def _fits_line(options: PlanConfig, phases: "Sequence[PhaseMemory]", chip: "Chip") -> str:
    """Return the verdict for a chip that has enough memory for what is known."""
    from mujica_jax.runs.memory import STEP

    if options.compile:
        free_bytes = chip.memory_bytes - max(phase.bytes for phase in phases)
        return f"fits: {_size(free_bytes)} are free in the fullest phase"
    (learning,) = [phase for phase in phases if STEP in phase.parts]
    step_bytes = chip.memory_bytes - (learning.bytes - learning.parts[STEP])
    return f"fits if the training step takes at most {_size(step_bytes)}; --compile measures it"


def targets_of(options: PlanConfig) -> list[Target]:
    """Return the chips that `--chips` names, or all known chips. Raises UserError."""
    from mujica_jax.runtime.chips import CHIPS

    trainer = options.trainer
    mesh_size = trainer.data_parallel_size * trainer.fsdp * trainer.tensor_parallel_size
    if not options.chips:
        return [
            Target(name=f"{mesh_size} x {chip.name}", chip=chip, count=mesh_size) for chip in CHIPS
        ]
    chips = {chip.name: chip for chip in CHIPS}
    targets = []
    for name in options.chips:
        chip_name, _, sizes = name.partition(":")
        if chip_name not in chips:
            raise UserError(f"unknown chip {chip_name!r} in --chips; {nearest(chip_name, chips)}")
        if not all(size.isdigit() and int(size) > 0 for size in sizes.split("x")):
            raise UserError(
                f"--chips {name} is not a topology: write the chip and its grid, as in "
                f"{chip_name}:4x8"
            )
        count = math.prod(int(size) for size in sizes.split("x"))
        targets.append(Target(name=name, chip=chips[chip_name], count=count))
    return targets


def with_mesh(config: PlanConfig, target: Target) -> PlanConfig:
    """Return the configuration with a mesh of as many devices as there are chips.

    `trainer.fsdp` is changed if that is possible. Raises UserError otherwise.
    """
    trainer = config.trainer
    other_axes = trainer.data_parallel_size * trainer.tensor_parallel_size
    if target.count % other_axes:
        raise UserError(
            f"the configuration splits the model over data_parallel_size x tensor_parallel_size = "
            f"{other_axes} devices, which does not divide {target.count} chips: change one of them"
        )
    if config.engine.tensor_parallel_size > target.count:
        raise UserError(
            f"engine.tensor_parallel_size is {config.engine.tensor_parallel_size}, but there are "
            f"{target.count} chips: lower it"
        )
    fsdp = target.count // other_axes
    return dataclasses.replace(config, trainer=dataclasses.replace(trainer, fsdp=fsdp))


def _use_virtual_devices(count: int) -> None:
    """Let JAX have this many devices on the CPU. They only describe the mesh.

    Raises UserError if JAX has already started in this process with fewer devices.
    """
    # With libtpu, JAX would look for a TPU, and would wait for other processes that use libtpu.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        available = len(jax.devices("cpu"))
        if available < count:
            raise UserError(
                f"the plan describes a mesh of {count} devices, but JAX has already started with "
                f"{available}: plan in a process of its own"
            ) from error


def _devices(count: int) -> list:
    """Return this many virtual devices."""
    import jax

    return jax.devices("cpu")[:count]


def _topology_devices(target: Target) -> list:
    """Return the devices of a topology that is not attached. Raises UserError without libtpu."""
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(topology_name=target.name, platform="tpu")
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--compile cannot describe {target.name} ({reason}): install libtpu, and name a "
            "topology that exists"
        ) from error
    return list(description.devices)


def _loss(config: Config) -> "Loss | None":
    """Return the loss of the method's training step. None stands for maximum likelihood."""
    from mujica_jax.learning.losses.preference import DPO
    from mujica_jax.methods.grpo import loss_of

    if isinstance(config.method, GrpoConfig | DapoConfig):
        return loss_of(config.method)
    if isinstance(config.method, DecexTreeConfig) and config.method.dpo:
        return DPO(beta=config.method.beta)
    return None


def _gigabytes(count: int) -> str:
    """Return a number of bytes in gigabytes, with two decimals."""
    return f"{count / 1e9:.2f}"


def _size(count: int) -> str:
    """Return a number of bytes in words, such as "15.2 GB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"
