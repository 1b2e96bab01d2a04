"""Sample trajectories for a training run, as one of several workers.

A trainer leads the run. Any number of workers may sample for it, on any hosts, and they may start
and stop at any time.

    python -m mujica_jax.train CONFIG --run gs://BUCKET/PREFIX --sampling.workers external
    python -m mujica_jax.sample --run gs://BUCKET/PREFIX

A worker reads the configuration of the run from its directory. Each round is divided into units of
work, which are groups of questions. The worker plays units of the current round until the run is
finished. SIGTERM or Ctrl-C ends it at once. Its finished units are kept, and other workers play the
rest.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence

import tyro

from mujica_jax.config.command_line import override
from mujica_jax.config.program_help import ProgramHelp, program_name
from mujica_jax.config.schema import Config
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import UserError
from mujica_jax.report.progress import Progress
from mujica_jax.runtime import provenance
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.storage.leases import Leases
from mujica_jax.storage.run_directory import run_path
from mujica_jax.tasks.data_folder import check_data_dir
from mujica_jax.trajectories.store import CONFIG, Store

HELP = ProgramHelp(
    summary="Sample trajectories for a training run, as one of several workers. The trainer of the "
    "run must have been started with --sampling.workers external.",
    usage="--run DIR [flags]",
    examples={
        "--run gs://BUCKET/PREFIX": "Sample for a run whose directory is in a bucket.",
        "--run runs/first --data-dir /data/2wiki": "Sample on a host that has the task's files in "
        "another folder.",
    },
    common={"Flags": ("run", "data_dir", "lease_seconds")},
)
MIN_LEASE_SECONDS = 5.0
MAX_LEASE_SECONDS = 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """Sample trajectories for a training run, as one of several workers."""

    # Directory of the run, local or gs://BUCKET/PREFIX. Its trainer must have been started with
    # --sampling.workers external.
    run: str
    # Time in seconds after which other workers take over the questions of a worker that is silent.
    lease_seconds: float = 60.0
    # Where this host has the files of the task: a folder, or tfds:NAME. The default is the setting
    # of the trainer.
    data_dir: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    - 0: the run is finished, or SIGTERM ended this worker.
    - 2: the user made a mistake.
    - 130: Ctrl-C ended the program.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    preemption = Preemption(kept_text="finished units are kept")

    def program() -> None:
        defaults = SampleArguments(run=tyro.MISSING)
        options = override(defaults, words, prog=program_name("sample"), program=HELP)
        if not MIN_LEASE_SECONDS <= options.lease_seconds <= MAX_LEASE_SECONDS:
            raise UserError(
                f"--lease-seconds is {options.lease_seconds} and must be between "
                f"{MIN_LEASE_SECONDS:g} and {MAX_LEASE_SECONDS:g}: with a shorter lease, two "
                "workers would play the same unit"
            )
        sample(options, preemption)

    return preemption.exit_status(program)


def sample(options: SampleArguments, preemption: Preemption) -> None:
    """Play units of work until the run is finished."""
    # These imports start JAX. They come late so that mistakes in the arguments are reported fast.
    from mujica_jax.methods.mygo_worker import Sampler
    from mujica_jax.runs.setup import open_sampling

    if not (run_path(options.run) / CONFIG).exists():
        raise UserError(
            f"there is no run in {options.run} yet: start its trainer first, or check --run"
        )
    store = Store(options.run)
    config = _config_of(store, options)
    progress = Progress(live=False)

    # Wait until the trainer's warm-up has committed the first policy.
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
    """Return the configuration of the run, with this host's folder of data.

    Raises UserError if this program cannot sample for the run.
    """
    from mujica_jax.runs.lead import TRAINER

    config = from_dict(Config, store.read_json(CONFIG)["config"])
    if config.method.kind != "mygo":
        raise UserError(
            f"the run in {store.root} has method.kind {config.method.kind}, but workers only sample "
            "for mygo: let the training program sample"
        )

    # Two revisions of the program may sample differently. If one is unknown, they cannot be
    # compared.
    trainer = Leases(store, seconds=options.lease_seconds).newest(TRAINER)
    trainer_revision = trainer.revision if trainer else ""
    revision = provenance.git_revision()
    if trainer_revision and revision and trainer_revision != revision:
        raise UserError(
            f"the trainer of {store.root} is revision {trainer_revision}, but this program is "
            f"revision {revision}: check out the trainer's revision"
        )

    if options.data_dir is not None:
        if not hasattr(config.task, "data_dir"):
            raise UserError(
                f"--data-dir is {options.data_dir}, but the task {config.task.kind} reads no files: "
                "leave --data-dir out"
            )
        task = dataclasses.replace(config.task, data_dir=options.data_dir)
        config = dataclasses.replace(config, task=task)
    check_data_dir(config.task)
    return config
