"""The `Run` object: all parts of one training run.

A recipe (a training method in `methods/`) receives a `Run` and passes it to these functions:

| step | functions |
|---|---|
| sample | `runs.sampling.play_attempts`, `play_waves` |
| learn | `runs.learning.train` |
| commit | `runs.versions.commit_policy`, `use_policy` |
| evaluate | `runs.evaluation.finish` |

Each step stores its result in the run directory before the next step begins. After a restart the
step reads the stored result instead of computing it again. A run that was killed therefore repeats
at most one shard of episodes, the training steps since the last checkpoint, or one evaluation. It
ends with the same numbers as a run that was never killed.
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
    """The two outputs of a run: its progress on the console, and its metrics in files."""

    progress: Progress
    metrics: MetricsLog | NoMetrics


class Run:
    """The parts of a run. `runs.setup` makes one `Run` for each start of a training run."""

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

        `model.load` is called without arguments, and nothing here keeps the arrays that it returns.
        `reserved_bytes` is the memory of each chip, in bytes, that the engine leaves free for
        everything except its cache of keys and values.
        """
        self.config = config
        self.store = store
        self.task = task
        self.tokenizer = model.tokenizer
        self.progress = reports.progress
        self.metrics = reports.metrics
        self.preemption = preemption
        # The structure of the model, without its arrays. `load_decoder` returns it with its arrays.
        self.decoder = model.decoder
        self.load_decoder: Callable[[], Decoder] = model.load

        # The parts that play episodes and reward them.
        self.agent = make_agent(config.agent, self.tokenizer)
        self.faults = FaultGuard(config.faults)
        judge = open_judge(config, RunVerdicts(store), out=store.root)
        self.reward = make_reward(config, task.rule, judge)

        # The parts that learn, and the engine that samples.
        self.clock = StageClock(compiled=lambda: compile_counter().seconds)
        self.trainer = Trainer(self.decoder.config, config.trainer)
        self.generator = make_generator(self.decoder, config, self.tokenizer, reserved_bytes)
        check_engine_temperatures(self.generator, config, trains=True)
        self.counters = LiveCounters(lambda: self.generator.statistics)
        self.profile = ProfileWindow(config.profile, store.root, self.progress.line)

        # A function that is called a few times per second while episodes are played.
        self.on_poll: Callable[[], None] = lambda: None
        # A hash of the base weights that adapters are trained on. Empty until they are loaded.
        self.base_fingerprint = ""
        # The name of the newest phase. After a restart the run continues from its checkpoint.
        self.newest_phase = ""

    def initial_state(self) -> TrainState:
        """Return the training state that the run starts from.

        It holds the configured checkpoint, or random weights. If the configuration names an
        adapter, the adapter's weights are loaded too.
        """
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
        """Write one line of metrics about the work that the engine does in this block.

        The numbers are zero if the block reads everything from disk.
        """
        before = self.generator.statistics
        with self.clock.stage(kind.rpartition("/")[2]):
            yield
        self.metrics.write(kind, step, between(before, self.generator.statistics))

    def poll(self) -> None:
        """Check whether the run was asked to stop, and call `on_poll`.

        This is called a few times per second while episodes are played. Raises PreemptedError if
        the run was asked to stop.
        """
        self.preemption.check()
        self.on_poll()


def method_of(run: Run, kind: type[Section]) -> Section:
    """Return the `method` section of the configuration, after checking that its class is `kind`."""
    assert isinstance(run.config.method, kind), (
        f"the method is {run.config.method.kind}, and this recipe needs a {kind.__name__}"
    )
    return run.config.method
