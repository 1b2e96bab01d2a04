"""Train an agent from Python."""

import dataclasses
import functools
import html
import signal
import time
from collections.abc import Mapping
from typing import Any

from mujica_jax.api.blocking import outside_event_loop
from mujica_jax.api.overrides import Overrides, as_config, as_words, parsed
from mujica_jax.api.policy import Policy, load
from mujica_jax.config.checks import check_training
from mujica_jax.config.command_line import override
from mujica_jax.config.schema import Config
from mujica_jax.report.results import PhaseRow, closing_table
from mujica_jax.report.text import plain
from mujica_jax.runs import training
from mujica_jax.runtime import distributed
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.data_folder import check_data_dir


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainedRun:
    """A finished run. It prints as its closing table.

    Attributes:
        directory: The run directory, with policies, trajectories and metrics.
        summary: The content of the run's summary.json: task, method and the scores of each phase.
    """

    directory: str
    summary: Mapping[str, Any]

    @property
    def phases(self) -> tuple[PhaseRow, ...]:
        """The rows of the closing table: scores and costs of each phase."""
        return tuple(PhaseRow(**phase) for phase in self.summary["phases"])

    def policy(self, version: int | None = None) -> Policy:
        """Return a policy of the run, by default the newest one.

        Raises UserError if the run has no such policy.
        """
        return load(self.directory, policy=version)

    def __repr__(self) -> str:
        """Return the closing table and the run directory."""
        return f"{plain(closing_table(self.phases))}run directory: {self.directory}"

    def _repr_html_(self) -> str:
        """Return the same for a notebook. All texts are escaped."""
        return f"<pre>{html.escape(repr(self))}</pre>"


def train(
    config: Config | str = "tiny_world",
    overrides: Overrides | None = None,
    *,
    run: str | None = None,
) -> TrainedRun:
    """Train a run, and return it when it is finished.

    If a run is stopped, by Ctrl-C or by a crash, call this again with the same arguments and its
    directory as `run`. It continues where it stopped. Progress is printed.

    Args:
        config: A configuration, a name in configs/, or a file.
        overrides: Changes to the configuration: {"method.rounds": 1}, or the words of a command
            line: ["--method.rounds", "1"].
        run: The run directory, local or gs://BUCKET/PREFIX. None: a new directory below ./runs.

    Raises:
        UserError: The configuration is wrong, or `run` belongs to another configuration.

    >>> import mujica_jax as mj
    >>> few_steps = {
    ...     "pretraining.steps": 2,
    ...     "warmup.steps": 2,
    ...     "method.rounds": 1,
    ...     "sampling.questions_per_round": 8,
    ...     "sampling.questions_per_shard": 8,
    ...     "eval.questions": 8,
    ... }
    >>> trained = mj.train("tiny_world", few_steps, run="trained")  # doctest: +ELLIPSIS
    run directory: trained
    ...
    >>> trained.policy()
    Policy(policy 1, trained/policies/000001/model)
    """
    words = as_words(overrides)
    if run is not None:
        words += ["--run", run]
    full_config = parsed(words, lambda: override(as_config(config), words, prog="mujica_jax.train"))
    check_training(full_config)
    preemption = Preemption()
    return outside_event_loop(
        functools.partial(_train, full_config, preemption),
        interrupt=functools.partial(preemption.on_notice, signal.SIGINT),
    )


def _train(config: Config, preemption: Preemption) -> TrainedRun:
    """Train a run. No event loop runs in this thread."""
    distributed.start(config.distributed, preemption.on_notice)
    check_data_dir(config.task)
    # All processes of a job use the directory that process 0 chooses.
    new_directory = f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = config.run or distributed.broadcast("run directory", lambda: new_directory)
    summary = training.train(config, directory, preemption)
    return TrainedRun(directory=directory, summary=summary)
