"""Evaluate a policy on the held-out questions again: by question kind, greedily and sampled.

    python -m mujica_jax.eval --checkpoint RUN [--policy N] [--section.field value ...]
    python -m mujica_jax.eval CONFIG --checkpoint HF_DIR [--out DIR] [--section.field value ...]

RUN is a run directory: its config.json is the configuration and its latest policy is evaluated. A Hugging Face directory needs the name of
a configuration, as `train` takes it; given with a run, that one replaces the run's own. Flags change what is evaluated: another seed, more
questions, other limits, or the passages of a task whose graph the policy was trained on (`--task.environment text`).

Results go to RUN/eval/<task>-<environment>.json (without a run ./eval, or --out), the greedy predictions beside it as JSON lines.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mujica_jax.config import AgentConfig, Config, EngineConfig, EvalConfig, TaskConfig, TwoWikiConfig
from mujica_jax.config_checks import check
from mujica_jax.config_files import from_dict, load_config, override, take_file
from mujica_jax.errors import UserError

HELP_CONFIG = "tiny_world"  # its values are the defaults that --help shows without a checkpoint
WANTED = "give --checkpoint a run directory or a Hugging Face directory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Evaluate a policy on held-out questions: what is evaluated, and the parts of a configuration that matter to it."""

    checkpoint: str  # a run directory, or a Hugging Face directory together with a configuration name
    policy: int | None = None  # of a run: 0 is the warm-up, N the policy after round N (default: the latest)
    out: str | None = None  # folder of the results (default: RUN/eval, or eval)
    task: TaskConfig
    agent: AgentConfig
    engine: EngineConfig
    eval: EvalConfig
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is evaluated and where that is written down."""

    name: str
    model: Path  # a Hugging Face directory
    version: int
    out: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a mistake of the user's, 130 interrupted."""
    try:
        given, config = command_line(sys.argv[1:] if arguments is None else arguments)
        evaluate(config, find_checkpoint(given))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written; the same command evaluates again", file=sys.stderr)
        return 130
    return 0


def command_line(arguments: Sequence[str]) -> tuple[EvalArguments, Config]:
    """`[CONFIG] --checkpoint DIR [flags]` -> the arguments, and the whole configuration under them."""
    words = list(arguments)
    name = take_file(words)
    checkpoint = _flag_value(words, "--checkpoint")
    if name is None and checkpoint is not None:
        config = _run_config(Path(checkpoint))
    else:
        config = load_config(name or HELP_CONFIG)
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}
    sections = {field.name for field in dataclasses.fields(EvalArguments)} & set(shared)
    defaults = {section: shared[section] for section in sections} | {"checkpoint": _given_or_missing(checkpoint)}
    given = override(EvalArguments(**defaults), words, prog="python -m mujica_jax.eval")
    changed = {section: getattr(given, section) for section in sections}
    if isinstance(given.task, TwoWikiConfig):  # copies are for demonstrations, and of graphs only
        changed["task"] = dataclasses.replace(given.task, augmented_copies=0)
    config = dataclasses.replace(config, **changed)
    check(config)
    return given, config


def find_checkpoint(given: EvalArguments) -> Checkpoint:
    """The policy to evaluate, every file compared with its checksum where it belongs to a run."""
    folder = Path(given.checkpoint)
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: {WANTED}")
    if not _is_run(folder):
        if given.policy is not None:
            raise UserError(f"--policy is {given.policy} and {folder} is no run directory: leave --policy out")
        return Checkpoint(name=str(folder), model=folder, version=0, out=Path(given.out or "eval"))

    from mujica_jax.methods.control import POLICY as CONTROL
    from mujica_jax.trajectories.store import Store

    store = Store(folder)
    version = given.policy
    if version is None:
        version = max((version for version in store.policies() if version != CONTROL), default=None)
    if version is None:
        raise UserError(f"{folder} has no policy yet: go on with the run until its warm-up is done")
    model = store.policy_path(version) / "model"
    return Checkpoint(name=f"policy {version}", model=model, version=version, out=Path(given.out or folder / "eval"))


def evaluate(config: Config, checkpoint: Checkpoint) -> None:
    """Score, print, and write the two files."""
    # Imported here: a mistake in the arguments is answered before JAX has started.
    from flax import nnx

    from mujica_jax.methods.run import make_agent, make_generator, use_weights
    from mujica_jax.methods.scoring import score_policy
    from mujica_jax.methods.start import build_task, load_model, require_packages, use_compilation_cache
    from mujica_jax.models.host_memory import keep_freed_memory
    from mujica_jax.report import Progress, score_table
    from mujica_jax.trajectories.objects import write_over

    _require_writable(checkpoint.out)
    require_packages(config)
    keep_freed_memory()
    use_compilation_cache()
    task = build_task(config)
    tokenizer, decoder = load_model(checkpoint.model, config)
    generator = make_generator(decoder, config, tokenizer)
    use_weights(generator, decoder, nnx.state(decoder), config.engine.weights, checkpoint.version)
    progress = Progress()
    progress.line(f"{checkpoint.name} from {checkpoint.model}, {task.name} ({task.environment.kind})")
    agent = make_agent(config, task, tokenizer)
    scores = score_policy(
        checkpoint.name, agent=agent, generator=generator, task=task, config=config, progress=progress
    )
    summary = scores.summary()
    file = checkpoint.out / f"{task.name}-{task.environment.kind}.json"
    about = {
        "task": task.name,
        "environment": task.environment.kind,
        "checkpoint": str(checkpoint.model),
        "policy": checkpoint.version,
        "seed": config.seed,
        "temperature": config.eval.temperature,
    }
    write_over(file.with_suffix(".predictions.jsonl"), scores.predictions())
    write_over(file, (json.dumps(about | summary, indent=2, allow_nan=False) + "\n").encode())
    progress.show(score_table(summary["greedy"], summary["sampled"]))
    for kind, found in summary.items():
        reasons = ", ".join(f"{reason} {count}" for reason, count in found["stop_reasons"].items())
        progress.line(f"{kind}: {found['searches']:.2f} searches a question; episodes ended: {reasons}")
    progress.line(f"results and predictions: {file}")


def _require_writable(folder: Path) -> None:
    """Asked first: an evaluation takes minutes and its results must have a place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}): choose another folder with --out") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write into {folder}: choose another folder with --out")


def _run_config(folder: Path) -> Config:
    """The configuration a run directory was begun with."""
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: {WANTED}")
    if not _is_run(folder):
        raise UserError(
            f"{folder} is no run directory: a Hugging Face directory is evaluated under a configuration, as in "
            f"`python -m mujica_jax.eval {HELP_CONFIG} --checkpoint {folder}`"
        )
    return from_dict(Config, _json(folder / "config.json")["config"])


def _is_run(folder: Path) -> bool:
    """A run's config.json holds the configuration beside versions; that of a Hugging Face directory is the model's own."""
    file = folder / "config.json"
    return file.is_file() and isinstance(_json(file).get("config"), dict)


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}): restore it or choose another --checkpoint") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no JSON object: restore it or choose another --checkpoint")
    return value


def _flag_value(words: Sequence[str], flag: str) -> str | None:
    """The value of one flag, before the others can be read: they depend on the configuration that it names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(flag)
    try:
        return parser.parse_known_args(words)[0].checkpoint
    except argparse.ArgumentError:  # without its value: the whole command line is refused later, with its usage
        return None


def _given_or_missing(checkpoint: str | None) -> Any:
    if checkpoint is not None:
        return checkpoint
    import tyro  # 0.2 s

    return tyro.MISSING


if __name__ == "__main__":
    raise SystemExit(main())
