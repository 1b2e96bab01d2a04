"""One training run: its parts, and the three things every method does with them: sample a unit of
work, learn, evaluate.

Each of the three leaves its result in the run directory before the next one begins and finds it
there after a restart, so a killed run repeats at most one shard of episodes, the steps since the
last checkpoint, or one evaluation, and ends with the same numbers.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from flax import nnx

from mujica_jax.agents.agent import Agent, Attempt, EnginePolicy, OnEpisode, run_episodes
from mujica_jax.agents.faults import FaultGuard
from mujica_jax.config.schema import Config, TrainerConfig
from mujica_jax.errors import StoreError
from mujica_jax.inference.counters import LiveCounters, between
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.profiling import ProfileWindow
from mujica_jax.learning.trainer import Trainer, TrainState
from mujica_jax.methods import phases
from mujica_jax.methods.evaluation import PolicyEvaluator, Scores, held_out_questions, right_ones
from mujica_jax.methods.judge import RunVerdicts, open_judge
from mujica_jax.methods.learning_phase import LearningPlan, train_phase
from mujica_jax.methods.mismatch import compared
from mujica_jax.methods.parts import (
    check_engine_temperatures,
    make_agent,
    make_generator,
    make_reward,
    open_adapter,
    statistics_of,
    use_weights,
)
from mujica_jax.methods.phases import (
    GetState,
    Phase,
    PhaseResult,
    PhaseState,
    learning_folder,
    phase_file,
)
from mujica_jax.methods.shares import gather
from mujica_jax.models.adapters import (
    adapter_tensors,
    fingerprint,
    save_adapter,
    trained_adapters,
    with_trained_adapters,
)
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import gather_checkpoint, open_checkpoint, save_checkpoint
from mujica_jax.records import Conversation, Question, Trajectory
from mujica_jax.report.metrics_log import MetricsLog, NoMetrics
from mujica_jax.report.progress import Progress
from mujica_jax.report.results import PhaseRow
from mujica_jax.report.stage_clock import StageClock
from mujica_jax.runtime import distributed
from mujica_jax.runtime.compilation_cache import compile_counter
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.task import Task
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.packing import PackedRows
from mujica_jax.trajectories.store import CONFIG, ShardEntry, Store, shard_name

AWAIT_SECONDS = 0.5  # between two looks for what other programs sample
KEPT_SHARDS = "finished shards are kept and the one under way is sampled again"


class Run:
    """The parts of a run, made once by `train`: store, task, tokenizer, agent, trainer, engine and
    reports."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        task: Task,
        tokenizer: Tokenizer,
        decoder: Decoder,
        load: Callable[[], Decoder],
        progress: Progress,
        metrics: MetricsLog | NoMetrics,
        preemption: Preemption,
        reserved_bytes: int = 0,
    ) -> None:
        """Make the parts of a run that its configuration describes.

        `decoder` is what the run starts from, without its arrays. `load` brings the arrays, and
        nothing here keeps them. `reserved_bytes` of each chip are for all but keys and values."""
        self.config = config
        self.store = store
        self.task = task
        self.tokenizer = tokenizer
        self.progress = progress
        self.metrics = metrics
        self.preemption = preemption
        self._decoder = decoder
        self._load = load

        # What plays and rewards episodes.
        self.agent = make_agent(config.agent, tokenizer)
        self.faults = FaultGuard(config.faults)
        judge = open_judge(config, RunVerdicts(store), out=store.root)
        self.reward = make_reward(config, task.rule, judge)

        # What learns and samples.
        self.clock = StageClock(compiled=lambda: compile_counter().seconds)
        self.trainer = Trainer(decoder.config, config.trainer)
        self.generator = make_generator(decoder, config, tokenizer, reserved_bytes)
        check_engine_temperatures(self.generator, config, trains=True)
        self.counters = LiveCounters(lambda: self.generator.statistics)
        self.profile = ProfileWindow(config.profile, store.root, progress.line)

        # Called some times a second while episodes are played.
        self.on_poll: Callable[[], None] = lambda: None
        self._base_fingerprint = ""  # of what adapters are trained on
        self.newest_phase = ""  # phase whose checkpoint the run would go on from

    def initial_state(self) -> TrainState:
        """Load what the run starts from, with the adapter that training goes on from, if any."""
        decoder = self._load()
        state = self.trainer.initial_state(decoder, seed=self.config.seed)
        adapter = open_adapter(self.config, decoder)
        if self.config.trainer.lora_rank:
            self._base_fingerprint = fingerprint(decoder)
        if adapter is None:
            return state
        return state._replace(params=with_trained_adapters(state.params, adapter))

    def use_policy(self, state: GetState, version: int) -> None:
        """Sample from this state, whose policy has this version.

        If the state is not in memory, load the committed policy instead."""
        reads_committed = _is_absent(state) and self._is_committed(version)
        with self.clock.stage("weight_sync"):
            self.generator.release_weights()
            if reads_committed:
                weights = nnx.state(self._load_committed(version))
            else:
                weights = self.trainer.policy(state())
            use_weights(
                self.generator,
                self._decoder,
                weights,
                storage=self.config.engine.weights,
                version=version,
            )

    def committed_state(self, version: int) -> TrainState:
        """Load the weights of a committed policy for `Trainer.score`, without an optimiser."""
        state = self.trainer.initial_state(self._load_committed(version))
        return state._replace(opt_state=())

    def _load_committed(self, version: int) -> Decoder:
        """Load a committed policy over the trainer's mesh."""
        folder = distributed.primary_first(
            "a policy is read", lambda: self.store.policy_path(version)
        )
        _, load = open_checkpoint(folder / "model", dtype=self.config.trainer.dtype)
        return load(self.trainer.mesh, self.config.trainer.dtype)

    def _is_committed(self, version: int) -> bool:
        return distributed.broadcast(f"policy {version}", lambda: version in self.store.policies())

    def commit_policy(self, state: GetState, version: int) -> None:
        """Write the policy in the compute type as a Hugging Face directory.

        Where adapters are trained, the adapter stands beside it, with the configuration. The first
        process writes; the others help to gather the policy. Checkpoints of the phases before are
        removed, and so are policies beyond `keep_policies`."""
        self.preemption.enter(f"committing policy {version}")
        name = f"policy {version}"
        if distributed.broadcast(name, lambda: version <= max(self.store.policies(), default=-1)):
            return

        decoder = nnx.merge(nnx.graphdef(self._decoder), self.trainer.policy(state()))
        trains_adapters = self.config.trainer.lora_rank > 0
        adapters: dict[str, np.ndarray] = {}
        if trains_adapters:
            adapters = adapter_tensors(decoder, trained_adapters(state().params))
            if not self._base_fingerprint:  # the state came from a checkpoint
                self._base_fingerprint = fingerprint(self._load())
        if not distributed.is_primary():
            gather_checkpoint(decoder)
            distributed.barrier(name)
            return

        def write(directory: Path) -> None:
            save_checkpoint(
                decoder,
                directory / "model",
                tokenizer=self.tokenizer,
                dtype=self.config.trainer.dtype,
            )
            if trains_adapters:
                self._write_adapter(directory / "adapter", adapters)

        with self.clock.stage("saving"):
            self.store.commit_policy(version, write)
            self.remove_past_checkpoints()
            if self.config.keep_policies:
                for past_version in self.store.policies()[: -self.config.keep_policies]:
                    self.store.remove_policy(past_version)
        distributed.barrier(name)

    def _write_adapter(self, directory: Path, adapters: Mapping[str, np.ndarray]) -> None:
        """Write an adapter, with the run's configuration beside it."""
        config = json.dumps({"config": dataclasses.asdict(self.config)}, indent=2)
        save_adapter(
            adapters,
            directory,
            alpha=self.config.trainer.lora_alpha,
            base=self._base_fingerprint,
            name=str(self.config.init),
        )
        (directory / CONFIG).write_text(config + "\n")

    def remove_past_checkpoints(self) -> None:
        """Remove the checkpoints of all phases before the newest.

        Those of the warm-up stay for the control, which begins with them. Called by the first
        process, when the newest phase is whole."""
        phase_names = {self.newest_phase}
        if self.config.eval.control:
            phase_names.add(phases.WARM_UP.name)
        needed_folders = {learning_folder(name) for name in phase_names}
        files = self.store.names(f"{phases.LEARNING}/")
        stored_folders = {"/".join(file.split("/")[:2]) for file in files}
        for folder in sorted(stored_folders - needed_folders):
            self.store.remove_folder(folder)

    @contextlib.contextmanager
    def counted(self, kind: str, step: int) -> Iterator[None]:
        """Write one line of metrics about the engine's work in this block.

        Its numbers are zero if everything was on disk already."""
        before = self.generator.statistics
        with self.clock.stage(kind.rpartition("/")[2]):
            yield
        self.metrics.write(kind, step, between(before, self.generator.statistics))

    def compare(
        self, state: GetState, trajectories: Sequence[Trajectory], round_number: int, version: int
    ) -> None:
        """Write how far the engine's log-probabilities are from the trainer's.

        `state` is what was sampled from; its policy has this version. If the state is not in
        memory, load the committed policy instead."""
        num_conversations = self.config.metrics.compared_conversations
        is_written = distributed.broadcast(
            phases.MISMATCH, lambda: self.metrics.has(phases.MISMATCH, round_number)
        )
        if not num_conversations or is_written:
            return

        reads_committed = _is_absent(state) and self._is_committed(version)
        with self.clock.stage("scoring"):
            self.generator.release_weights()
            scored_state = self.committed_state(version) if reads_committed else state()
            differences = compared(
                self.trainer,
                scored_state,
                trajectories,
                conversations=num_conversations,
                seed=self.config.seed + round_number,
            )
        if differences:
            self.metrics.write(phases.MISMATCH, round_number, differences)

    def sample(
        self,
        round_number: int,
        shard: int,
        attempts: Sequence[Attempt],
        on_episode: OnEpisode,
        *,
        agent: Agent | None = None,
        concurrency: int | None = None,
    ) -> tuple[ShardEntry, list[Trajectory]]:
        """Play a unit of work and write its shard, or read the shard that an earlier run left.

        `concurrency` is the number of episodes at a time, where another model than the engine's
        writes."""

        def next_wave(played: Sequence[Trajectory]) -> Sequence[Attempt]:
            """Return all attempts, once."""
            return () if played else attempts

        entry, trajectories = self.sample_waves(
            round_number,
            shard,
            next_wave,
            on_episode,
            agent=agent,
            concurrency=concurrency,
        )
        assert entry is not None, "a unit of work has attempts"
        return entry, trajectories

    def sample_waves(
        self,
        round_number: int,
        shard: int,
        wave: Callable[[Sequence[Trajectory]], Sequence[Attempt]],
        on_episode: OnEpisode,
        *,
        agent: Agent | None = None,
        concurrency: int | None = None,
    ) -> tuple[ShardEntry | None, list[Trajectory]]:
        """Play a unit of work whose attempts depend on those before.

        `wave(trajectories so far)` returns the next attempts, or none at the end.

        The engine's slots are emptied first, so that a unit is a function of its attempts and the
        policy alone. For the same reason a preemption keeps nothing of the unit under way: its
        rest, played without the others, would be rounded differently. What is returned is what the
        store holds, because another process may have been first. The entry is None if there was
        nothing to play."""

        def play() -> list[Trajectory]:
            trajectories: list[Trajectory] = []
            while attempts := wave(trajectories):
                trajectories += asyncio.run(
                    run_episodes(
                        agent or self.agent,
                        attempts,
                        self.task.environment,
                        EnginePolicy(self.generator),
                        reward=self.reward.at(round_number),
                        play=self.faults.play,
                        concurrency=concurrency or self.config.engine.slots,
                        on_episode=on_episode,
                        poll=self.poll,
                    )
                )
            return trajectories

        return self.stored(round_number, shard, play, on_episode)

    def stored(
        self,
        round_number: int,
        shard: int,
        play: Callable[[], list[Trajectory]],
        on_read: OnEpisode = lambda trajectory: None,
    ) -> tuple[ShardEntry | None, list[Trajectory]]:
        """Read the unit of work that an earlier run left, or play it and return what is stored.

        Each trajectory that is read is passed to `on_read`."""
        entry = self.intact_shard(round_number, shard)
        if entry is not None:
            trajectories = self.store.read_shard(entry)
            for trajectory in trajectories:
                on_read(trajectory)
            return entry, trajectories
        self.generator.reset_cache()
        trajectories = play()
        if not trajectories:
            return None, []
        with self.clock.stage("saving"):
            entry = self.store.write_shard(round_number, shard, trajectories)
            return entry, self.store.read_shard(entry)

    def await_shard(
        self, round_number: int, shard: int, on_episode: OnEpisode
    ) -> tuple[ShardEntry, list[Trajectory]]:
        """Wait for a unit of work that another program plays, and read it.

        A damaged one is waited for again."""
        entry = self.intact_shard(round_number, shard)
        while entry is None:
            self.preemption.check()
            time.sleep(AWAIT_SECONDS)
            entry = self.intact_shard(round_number, shard)
        trajectories = self.store.read_shard(entry)
        for trajectory in trajectories:
            on_episode(trajectory)
        return entry, trajectories

    def poll(self) -> None:
        """Check whether to end; called some times a second while episodes are played.

        Raises Preempted when asked to end."""
        self.preemption.check()
        self.on_poll()

    def read_shards(self, entries: Sequence[ShardEntry]) -> list[Trajectory] | None:
        """Return the trajectories of a finished round.

        If a shard is damaged or missing, return None: the round is open again."""
        trajectories: list[Trajectory] = []
        is_intact = True
        for entry in entries:
            try:
                trajectories += self.store.read_shard(entry)
            except StoreError as damage:
                self._set_aside(entry.name, damage)
                is_intact = False
        return trajectories if is_intact else None

    def intact_shard(self, round_number: int, shard: int) -> ShardEntry | None:
        """Find a shard in the store. A damaged one is set aside and counts as missing."""
        try:
            return self.store.find_shard(round_number, shard)
        except StoreError as damage:
            self._set_aside(shard_name(round_number, shard), damage)
            return None

    def _set_aside(self, name: str, damage: StoreError) -> None:
        reason = self.store.quarantine(name, str(damage))
        self.progress.line(
            f"{name} is damaged and sampled again; it is kept in {reason.parent}. {damage}"
        )

    def fitting(
        self,
        conversations: Sequence[Conversation],
        noun: str = "conversations",
        row_tokens: int | None = None,
    ) -> list[Conversation]:
        """Return the conversations that train anything and fit a row.

        A line says how many do not fit. `row_tokens` is the length of a row (None: the trainer's),
        and `noun` is what the line calls the conversations."""
        limit = row_tokens or self.config.trainer.row_tokens
        trained = [conversation for conversation in conversations if any(conversation.loss_mask)]
        fitting = [conversation for conversation in trained if len(conversation.token_ids) <= limit]
        num_too_long = len(trained) - len(fitting)
        if num_too_long:
            self.progress.line(
                f"{num_too_long} of {len(trained)} {noun} exceed {limit} tokens and are left out"
            )
        return fitting

    def learn(
        self,
        name: str,
        start: GetState,
        rows: Callable[[], PackedRows],
        *,
        plan: LearningPlan,
        loss: Loss | None = None,
        config: TrainerConfig | None = None,
        end_file: str | None = None,
    ) -> PhaseState:
        """Train a phase from `start()`, or go on from its last checkpoint.

        The buffers of `start()` are reused. Nothing is read of a phase that is written down before
        its state is called for. A preemption saves the step it comes at.

        `rows` returns the training rows; it is not called for a phase that is over. `loss` is one
        of `learning.losses`, whose columns the rows carry (None: maximum likelihood). `config` is
        the trainer's configuration with this phase's own rows (None: the run's). `end_file` is the
        file that says that the phase is over (None: the file of its evaluation)."""
        file = end_file or phase_file(name)
        is_over = distributed.broadcast(f"{name} is over", lambda: self.store.exists(file))

        def train() -> TrainState:
            return train_phase(
                self,
                name,
                start,
                rows,
                plan=plan,
                loss=loss,
                config=config or self.config.trainer,
            )

        state = PhaseState(train)
        if not is_over:
            state()
        return state

    def finish_phase(
        self,
        phase: Phase,
        state: GetState,
        *,
        start_time: float,
        trajectories: int = 0,
        accepted: int = 0,
        forward_tokens: int = 0,
        trained_slots: int = 0,
    ) -> PhaseResult:
        """Evaluate a phase on the held-out questions and write it down, or read it back.

        The evaluation is greedy and sampled. `start_time` is the reading of `time.monotonic` when
        the phase began."""
        name = phase.name
        file = phase_file(name)
        if not distributed.broadcast(file, lambda: self.store.exists(file)):
            self.use_policy(state, phase.step)
            with self.counted(f"{phase.prefix}{phases.EVALUATING}", phase.step):
                scores = self._score(phase)
            assert scores.sampled is not None, "a run scores both"
            row = PhaseRow(
                name=name,
                em=scores.greedy.score.em,
                f1=scores.greedy.score.f1,
                em_sampled=scores.sampled.score.em,
                f1_sampled=scores.sampled.score.f1,
                questions=scores.greedy.score.questions,
                left_out=scores.left_out,
                trajectories=trajectories,
                accepted=accepted,
                tokens=forward_tokens,
                searches=scores.greedy.searches,
                by_kind=scores.greedy.summary()["by_kind"],
                seconds=time.monotonic() - start_time,
            )
            result = PhaseResult(
                row=row, forward_tokens=forward_tokens, trained_slots=trained_slots
            )
            if distributed.is_primary():
                self._write_scores(name, scores)
                # Before the phase counts as done: a restart skips a phase that is done.
                self._write_phase_metrics(phase, scores)
                self.store.write_json_once(file, dataclasses.asdict(result))
            distributed.barrier(f"{name} is written down")

        stored_result = self.store.read_json(file)
        self._write_io_statistics(name)
        row = PhaseRow(**stored_result["row"])
        return PhaseResult(**{**stored_result, "row": row})

    def _score(self, phase: Phase) -> Scores:
        """Score the policy that the engine holds on the held-out questions."""

        def gather_scored(kind: str, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
            return gather(self.store, f"{phase.name} {kind}", trajectories)

        evaluator = PolicyEvaluator(
            name=phase.name,
            agent=self.agent,
            reward=self.reward.at(phase.step),
            faults=self.faults,
            generator=self.generator,
            task=self.task,
            config=self.config,
            progress=self.progress,
            concurrency=self.config.engine.slots,
            preemption=self.preemption,
            live=self.counters.figures,
            gather=gather_scored,
        )
        return evaluator.run()

    def _write_phase_metrics(self, phase: Phase, scores: Scores) -> None:
        """Write where the time of a phase went, and what its evaluation searched."""
        seconds = {f"{stage}_seconds": spent for stage, spent in self.clock.take().items()}
        total = {"total_seconds": sum(seconds.values())}
        self.metrics.write(f"{phase.prefix}{phases.TIME}", phase.step, seconds | total)
        statistics = statistics_of(self.task, scores.questions)
        self.metrics.write(
            f"{phase.prefix}{phases.RETRIEVAL}", phase.step, dataclasses.asdict(statistics)
        )
        self.metrics.flush()

    def _write_io_statistics(self, name: str) -> None:
        """Write what the run directory took since the phase before, in seconds and bytes.

        This is done once for each phase."""
        if self.metrics.write(f"{name}/store", 0, self.store.io_statistics.summary()):
            self.store.io_statistics.reset()
            self.metrics.flush()

    def _write_scores(self, name: str, scores: Scores) -> None:
        """Write a phase's scores, predictions and greedy trajectories."""
        stem = f"eval/{name.replace(' ', '-')}"
        self.store.write_json_once(f"{stem}.json", scores.summary())
        self.store.create(f"{stem}.predictions.jsonl", scores.predictions())
        self.store.create(f"{stem}.parquet", shards.encode(scores.greedy.trajectories))

    def solved_question(self, name: str) -> tuple[Question, Trajectory] | None:
        """Return a held-out question that the policy of a phase solved greedily, or None.

        It is the one with most searches."""
        path = f"eval/{name.replace(' ', '-')}.parquet"
        trajectories = shards.decode(self.store.read(path), path)
        questions = {
            question.id: question for question in held_out_questions(self.task, self.config)
        }
        solved = right_ones(questions.values(), trajectories, self.task.rule)
        if not solved:
            return None
        most_searched = max(solved, key=lambda trajectory: len(trajectory.searches))
        return questions[most_searched.question_id], most_searched


def _is_absent(state: GetState) -> bool:
    """Whether a state would have to be restored."""
    return isinstance(state, PhaseState) and not state.is_here
