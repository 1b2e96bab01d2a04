"""The lines of `metrics.jsonl` to Weights & Biases, for those who have it: an optional package,
imported when a run asks for it.

Every phase has its own count of steps, as in the file. A run directory is one run there: a restart
finds the identifier in the directory's `wandb/` and adds to it the lines that are new. The files of
a run in a bucket are in `./wandb`, and each start is a run of its own there. What a kill took
between a line and its arrival is in `metrics.jsonl` alone. In offline mode nothing leaves the
machine until `wandb sync DIR/wandb/offline-run-*`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mujica_jax.config.schema import MetricsConfig
from mujica_jax.errors import UserError
from mujica_jax.runtime.extras import import_extra
from mujica_jax.storage.run_directory import RunPath

FOLDER = "wandb"
MODE = "WANDB_MODE"  # wandb's own variable, which goes before the configuration


def import_wandb(config: MetricsConfig) -> Any:
    return import_extra("wandb", f"metrics.wandb {config.wandb}", otherwise=", or set it to off")


class WandbLog:
    """One run at Weights & Biases, or its files in the run directory."""

    def __init__(self, config: MetricsConfig, directory: RunPath, about: Mapping[str, Any]) -> None:
        """`about` is the run's configuration, which is shown beside its curves."""
        wandb = import_wandb(config)
        mode = os.environ.get(MODE, config.wandb)
        # wandb keeps its files on local disk.
        local_directory = directory if isinstance(directory, Path) else None
        # The identifier that wandb gave this run directory: its folders are named run-TIME-ID and
        # offline-run-TIME-ID.
        identifier = None
        if local_directory is not None:
            earlier_folders = sorted((local_directory / FOLDER).glob("*run-*-*"))
            if earlier_folders:
                identifier = earlier_folders[-1].name.rpartition("-")[2]
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                name=directory.name,
                id=identifier,
                dir=str(local_directory or Path()),
                mode=mode,
                resume="allow",
                config=dict(about),
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, ValueError) as error:
            raise UserError(
                f"wandb does not start in mode {mode} ({str(error).splitlines()[0]}): log in with "
                "`wandb login`, or set metrics.wandb to offline or off"
            ) from error
        self._phases: set[str] = set()

    def add(self, line: Mapping[str, Any], scalars: Mapping[str, float], number: int) -> None:
        """Add one line. `number` counts the lines of the run, also those of earlier starts: wandb
        drops a line whose number does not rise."""
        phase = line["phase"]
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step", hidden=True)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        values = {f"{phase}/{name}": value for name, value in scalars.items()}
        self._run.log({f"{phase}/step": line["step"], **values}, step=number)

    def close(self) -> None:
        self._run.finish()
