"""Sample for a run that a trainer leads.

This is one of any number of workers, on any hosts, that come and go as they like.

    python -m mujica_jax.train CONFIG --run gs://BUCKET/PREFIX --sampling.workers external
    python -m mujica_jax.sample --run gs://BUCKET/PREFIX

It reads the configuration that the run was begun with, plays units of the open round until the run
is finished, and ends then. SIGTERM or Ctrl-C ends it at once; what it played is kept, and another
worker plays the rest.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence

import tyro

from mujica_jax.config.command_line import override
from mujica_jax.config.schema import Config
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import UserError
from mujica_jax.report.progress import Progress
from mujica_jax.runtime import provenance
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.runtime.standard_output import run_program
from mujica_jax.storage.leases import Leases
from mujica_jax.storage.run_directory import run_path
from mujica_jax.tasks.data_folder import check_data_dir
from mujica_jax.trajectories.store import CONFIG, Store

PROGRAM = "python -m mujica_jax.sample"
MIN_LEASE_SECONDS = 5.0
MAX_LEASE_SECONDS = 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """Sample for a run that a trainer leads."""

    # directory or gs://BUCKET/PREFIX of a run whose trainer has --sampling.workers external
    run: str
    lease_seconds: float = 60.0  # after which silence of a worker another one plays its unit
    # Where the task's files are on this host: a folder, or tfds:NAME (default: as for the trainer).
    data_dir: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    0: the run is finished or this worker was asked to end. 2: a mistake of the user's. 130: Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    preemption = Preemption(kept_text="finished units are kept")

    def program() -> None:
        options = override(SampleArguments(run=tyro.MISSING), words, prog=PROGRAM)
        if not MIN_LEASE_SECONDS <= options.lease_seconds <= MAX_LEASE_SECONDS:
            raise UserError(
                f"--lease-seconds is {options.lease_seconds} and must lie between "
                f"{MIN_LEASE_SECONDS:g} and {MAX_LEASE_SECONDS:g}: below, a unit under way would "
                "be played twice"
            )
        sample(options, preemption)

    return preemption.exit_status(program)


def sample(options: SampleArguments, preemption: Preemption) -> None:
    """Play units of work until the run is finished."""
    # Imported here: a mistake in the arguments is answered before JAX has started.
    from mujica_jax.methods.mygo_worker import Sampler
    from mujica_jax.runs.setup import open_sampling

    if not (run_path(options.run) / CONFIG).exists():
        raise UserError(
            f"there is no run in {options.run} yet: start its trainer first, or check --run"
        )
    store = Store(options.run)
    config = _config_of(store, options)
    progress = Progress(live=False)

    # Wait for the end of the warm-up, which commits the first policy.
    while not store.policies():
        preemption.check()
        time.sleep(1.0)

    run = open_sampling(config, store, preemption, progress)
    leases = Leases(store, seconds=options.lease_seconds)
    progress.line(f"{leases.owner} samples for {store.root}")
    sampler = Sampler(run, leases)
    try:
        sampler.work()
    finally:
        progress.line(sampler.statistics.in_words())
        statistics = json.dumps(dataclasses.asdict(sampler.statistics)) + "\n"
        store.create(f"samplers/{leases.owner}.json", statistics.encode())


def _config_of(store: Store, options: SampleArguments) -> Config:
    """Return the run's own configuration, with this host's data.

    Raises UserError if this program cannot sample for the run.
    """
    from mujica_jax.runs.lead import TRAINER

    config = from_dict(Config, store.read_json(CONFIG)["config"])
    if config.method.kind != "mygo":
        raise UserError(
            f"the run in {store.root} has method.kind {config.method.kind}: workers sample for "
            "mygo alone"
        )

    # Two revisions may sample differently. Where one of them is unknown, nothing is compared.
    trainer = Leases(store, seconds=options.lease_seconds).newest(TRAINER)
    trainer_revision = trainer.revision if trainer else ""
    revision = provenance.git_revision()
    if trainer_revision and revision and trainer_revision != revision:
        raise UserError(
            f"the trainer of {store.root} is revision {trainer_revision} and this program is "
            f"{revision}: check out the same"
        )

    if options.data_dir is not None:
        if not hasattr(config.task, "data_dir"):
            raise UserError(
                f"--data-dir is {options.data_dir} and the task {config.task.kind} reads no files: "
                "leave it out"
            )
        task = dataclasses.replace(config.task, data_dir=options.data_dir)
        config = dataclasses.replace(config, task=task)
    check_data_dir(config.task)
    return config


if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
