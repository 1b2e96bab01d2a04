"""The parts of one training run: what every recipe is given.

A recipe (`methods/`) receives a `Run` and calls functions with it:

| step | functions |
|---|---|
| sample | `runs.sampling.play_attempts`, `play_waves` |
| learn | `runs.learning.train` |
| commit | `runs.versions.commit_policy`, `use_policy` |
| evaluate | `runs.evaluation.finish` |

Each step leaves its result in the run directory before the next one begins, and finds it there
after a restart. So a killed run repeats at most one shard of episodes, the steps since the last
checkpoint, or one evaluation, and ends with the same numbers.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from mujica_jax.agents.faults import FaultGuard
from mujica_jax.config.schema import Config
from mujica_jax.inference.counters import LiveCounters, between
from mujica_jax.learning.profiling import ProfileWindow
from mujica_jax.learning.trainer import Trainer, TrainState
from mujica_jax.models.adapters import fingerprint, with_trained_adapters
from mujica_jax.models.decoder import Decoder
from mujica_jax.report.metrics_log import MetricsLog, NoMetrics
from mujica_jax.report.progress import Progress
from mujica_jax.report.stage_clock import StageClock
from mujica_jax.runs.judge import RunVerdicts, open_judge
from mujica_jax.runs.model import StartingModel
from mujica_jax.runs.parts import (
    check_engine_temperatures,
    make_agent,
    make_generator,
    make_reward,
    open_adapter,
)
from mujica_jax.runtime.compilation_cache import compile_counter
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.task import Task
from mujica_jax.trajectories.store import Store

Section = TypeVar("Section")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reports:
    """Where a run reports what it does: on the console and in the metrics files."""

    progress: Progress
    metrics: MetricsLog | NoMetrics


class Run:
    """The parts of a run. They are made once, by `runs.setup`."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        task: Task,
        model: StartingModel,
        reports: Reports,
        preemption: Preemption,
        reserved_bytes: int = 0,
    ) -> None:
        """Make the parts that the configuration describes.

        `model.load` is called without arguments, and nothing here keeps the arrays that it brings.
        `reserved_bytes` of each chip are for all but keys and values.
        """
        self.config = config
        self.store = store
        self.task = task
        self.tokenizer = model.tokenizer
        self.progress = reports.progress
        self.metrics = reports.metrics
        self.preemption = preemption
        self.decoder = model.decoder  # without its arrays
        self.load_decoder: Callable[[], Decoder] = model.load

        # What plays and rewards episodes.
        self.agent = make_agent(config.agent, self.tokenizer)
        self.faults = FaultGuard(config.faults)
        judge = open_judge(config, RunVerdicts(store), out=store.root)
        self.reward = make_reward(config, task.rule, judge)

        # What learns and samples.
        self.clock = StageClock(compiled=lambda: compile_counter().seconds)
        self.trainer = Trainer(self.decoder.config, config.trainer)
        self.generator = make_generator(self.decoder, config, self.tokenizer, reserved_bytes)
        check_engine_temperatures(self.generator, config, trains=True)
        self.counters = LiveCounters(lambda: self.generator.statistics)
        self.profile = ProfileWindow(config.profile, store.root, self.progress.line)

        # Called some times a second while episodes are played.
        self.on_poll: Callable[[], None] = lambda: None
        # A hash of the weights that adapters are trained on; empty until they were loaded.
        self.base_fingerprint = ""
        # The phase whose checkpoint the run would go on from.
        self.newest_phase = ""

    def initial_state(self) -> TrainState:
        """Load what the run starts from, with the adapter that training goes on from, if any."""
        decoder = self.load_decoder()
        state = self.trainer.initial_state(decoder, seed=self.config.seed)
        adapter = open_adapter(self.config, decoder)
        if self.config.trainer.lora_rank:
            self.base_fingerprint = fingerprint(decoder)
        if adapter is None:
            return state
        return state._replace(params=with_trained_adapters(state.params, adapter))

    @contextlib.contextmanager
    def counted(self, kind: str, step: int) -> Iterator[None]:
        """Write one line of metrics about the engine's work in this block.

        Its numbers are zero if everything was on disk already.
        """
        before = self.generator.statistics
        with self.clock.stage(kind.rpartition("/")[2]):
            yield
        self.metrics.write(kind, step, between(before, self.generator.statistics))

    def poll(self) -> None:
        """Check whether to end; called some times a second while episodes are played.

        Raises PreemptedError when asked to end.
        """
        self.preemption.check()
        self.on_poll()


def method_of(run: Run, kind: type[Section]) -> Section:
    """Return the method's section of the configuration, which is of this kind."""
    assert isinstance(run.config.method, kind), (
        f"method {run.config.method.kind} is not run by this file"
    )
    return run.config.method
