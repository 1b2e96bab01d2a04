"""One training run: its parts, and the three things every method does with them: sample a unit of
work, learn, evaluate.

Each of the three leaves its result in the run directory before the next one begins and finds it
there after a restart, so a killed run repeats at most one shard of episodes, the steps since the
last checkpoint, or one evaluation, and ends with the same numbers.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flax import nnx

from mujica_jax.agents.agent import Agent, Attempt, EnginePolicy, OnEpisode, run_episodes
from mujica_jax.agents.faults import FaultGuard
from mujica_jax.config.schema import Config, TrainerConfig
from mujica_jax.errors import StoreError
from mujica_jax.inference.counters import LiveCounters, between
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.profiling import ProfileWindow
from mujica_jax.learning.trainer import Trainer, TrainState
from mujica_jax.methods import phases
from mujica_jax.methods.evaluation import Scores, held_out_questions, right_ones, score_policy
from mujica_jax.methods.judge import RunVerdicts, open_judge
from mujica_jax.methods.learning_phase import train_phase
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
from mujica_jax.runtime.compile_counter import compile_counter
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
        """`decoder` is what the run starts from, without its arrays; `load` brings them, and
        nothing here keeps them. `reserved_bytes` of each chip are for all but keys and values."""
        self.config, self.store, self.task, self.tokenizer = config, store, task, tokenizer
        self.progress, self.metrics, self.preemption = progress, metrics, preemption
        self.agent = make_agent(config.agent, tokenizer)
        self.faults = FaultGuard(config.faults)
        self.reward = make_reward(
            config, task.rule, open_judge(config, RunVerdicts(store), out=store.root)
        )
        self.clock = StageClock(compiled=lambda: compile_counter().seconds)
        self.trainer = Trainer(decoder.config, config.trainer)
        self.generator = make_generator(decoder, config, tokenizer, reserved_bytes)
        check_engine_temperatures(self.generator, config, trains=True)
        self.counters = LiveCounters(lambda: self.generator.statistics)
        self.profile = ProfileWindow(config.profile, store.root, progress.line)
        self._decoder, self._load = decoder, load
        self.on_poll: Callable[[], None] = lambda: (
            None
        )  # while episodes are played, some times a second
        self._base = ""  # fingerprint of what adapters are trained on
        self.newest_phase = ""  # phase whose checkpoint the run would go on from

    def initial_state(self) -> TrainState:
        decoder = self._load()
        state = self.trainer.initial_state(decoder, seed=self.config.seed)
        adapter = open_adapter(self.config, decoder)
        if self.config.trainer.lora_rank:
            self._base = fingerprint(decoder)
        return (
            state
            if adapter is None
            else state._replace(params=with_trained_adapters(state.params, adapter))
        )

    def use_policy(self, state: GetState, version: int) -> None:
        """Sample from this state, which the policy of this version is. One that would have to be
        restored stays where it is: its policy is read."""
        absent = isinstance(state, PhaseState) and not state.is_here and self._is_committed(version)
        with self.clock.stage("weight_sync"):
            self.generator.release_weights()
            weights = (
                nnx.state(self._committed(version)) if absent else self.trainer.policy(state())
            )
            use_weights(self.generator, self._decoder, weights, self.config.engine.weights, version)

    def committed_state(self, version: int) -> TrainState:
        """The weights of a committed policy for `Trainer.score`, without an optimiser."""
        return self.trainer.initial_state(self._committed(version))._replace(opt_state=())

    def _committed(self, version: int) -> Decoder:
        folder = distributed.primary_first(
            "a policy is read", lambda: self.store.policy_path(version)
        )
        _, load = open_checkpoint(folder / "model", dtype=self.config.trainer.dtype)
        return load(self.trainer.mesh, self.config.trainer.dtype)

    def _is_committed(self, version: int) -> bool:
        return distributed.broadcast(f"policy {version}", lambda: version in self.store.policies())

    def commit_policy(self, state: GetState, version: int) -> None:
        """Write the policy in the compute type as a Hugging Face directory, and beside it what of
        it is an adapter, with the configuration. The first process writes; the others help to
        gather it. Checkpoints of the phases before leave, and so do policies beyond
        `keep_policies`."""
        self.preemption.enter(f"committing policy {version}")
        name = f"policy {version}"
        if distributed.broadcast(name, lambda: version <= max(self.store.policies(), default=-1)):
            return
        rank, alpha = self.config.trainer.lora_rank, self.config.trainer.lora_alpha
        dtype = self.config.trainer.dtype
        decoder = nnx.merge(nnx.graphdef(self._decoder), self.trainer.policy(state()))
        adapters = adapter_tensors(decoder, trained_adapters(state().params)) if rank else {}
        if rank and not self._base:  # the state came from a checkpoint
            self._base = fingerprint(self._load())
        if not distributed.is_primary():
            gather_checkpoint(decoder)
            distributed.barrier(name)
            return

        def write(directory: Path) -> None:
            save_checkpoint(decoder, directory / "model", tokenizer=self.tokenizer, dtype=dtype)
            if rank:
                config = json.dumps({"config": dataclasses.asdict(self.config)}, indent=2)
                save_adapter(
                    adapters,
                    directory / "adapter",
                    alpha=alpha,
                    base=self._base,
                    name=str(self.config.init),
                )
                (directory / "adapter" / CONFIG).write_text(config + "\n")

        with self.clock.stage("saving"):
            self.store.commit_policy(version, write)
            self.remove_past_checkpoints()
            if self.config.keep_policies:
                for past in self.store.policies()[: -self.config.keep_policies]:
                    self.store.remove_policy(past)
        distributed.barrier(name)

    def remove_past_checkpoints(self) -> None:
        """Of all phases before the newest; the control begins with the warm-up's. Called by the
        first process, when the newest phase is whole."""
        kept = (
            {self.newest_phase, phases.WARM_UP.name}
            if self.config.eval.control
            else {self.newest_phase}
        )
        held = {"/".join(file.split("/")[:2]) for file in self.store.names(f"{phases.LEARNING}/")}
        for name in sorted(held - {learning_folder(name) for name in kept}):
            self.store.remove_folder(name)

    @contextlib.contextmanager
    def counted(self, kind: str, step: int) -> Iterator[None]:
        """Writes one line of metrics about the engine's work in this block. It is zero if all was
        on disk already."""
        before = self.generator.statistics
        with self.clock.stage(kind.rpartition("/")[2]):
            yield
        self.metrics.write(kind, step, between(before, self.generator.statistics))

    def compare(
        self, state: GetState, trajectories: Sequence[Trajectory], round_number: int, version: int
    ) -> None:
        """Write how far the engine's log-probabilities are from the trainer's; `state` is what was
        sampled from, which the policy of this version is. One that would have to be restored stays
        where it is: its policy is read."""
        conversations = self.config.metrics.compared_conversations
        written = distributed.broadcast(
            phases.MISMATCH, lambda: self.metrics.has(phases.MISMATCH, round_number)
        )
        if not conversations or written:
            return
        absent = isinstance(state, PhaseState) and not state.is_here and self._is_committed(version)
        with self.clock.stage("scoring"):
            self.generator.release_weights()
            scored = self.committed_state(version) if absent else state()
            seed = self.config.seed + round_number
            found = compared(
                self.trainer, scored, trajectories, conversations=conversations, seed=seed
            )
        if found:
            self.metrics.write(phases.MISMATCH, round_number, found)

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
        """One unit of work: play the attempts and write their shard, or read the shard that an
        earlier run left. `concurrency`: episodes at a time, where another model than the engine's
        writes."""
        entry, trajectories = self.sample_waves(
            round_number,
            shard,
            lambda past: () if past else attempts,
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
        """A unit of work whose attempts depend on those before: `wave(trajectories so far)` gives
        the next ones, or none.

        The engine's slots are emptied first, so that a unit is a function of its attempts and the
        policy alone. For the same reason a preemption keeps nothing of the unit under way: its
        rest, played without the others, would be rounded differently. What is returned is what the
        store holds: another process may have been first. None if there was nothing to play."""

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
        """A unit of work: what an earlier run left of it, each passed to `on_read`, or else what
        `play` gives now, as the store then holds it."""
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
        """A unit of work that another program plays, when it is there; a damaged one is waited for
        again."""
        while (entry := self.intact_shard(round_number, shard)) is None:
            self.preemption.check()
            time.sleep(AWAIT_SECONDS)
        trajectories = self.store.read_shard(entry)
        for trajectory in trajectories:
            on_episode(trajectory)
        return entry, trajectories

    def poll(self) -> None:
        """Called some times a second while episodes are played. Raises Preempted when asked to
        end."""
        self.preemption.check()
        self.on_poll()

    def read_shards(self, entries: Sequence[ShardEntry]) -> list[Trajectory] | None:
        """The trajectories of a finished round. If a shard is damaged or missing: None, and the
        round is open again."""
        trajectories: list[Trajectory] | None = []
        for entry in entries:
            try:
                found = self.store.read_shard(entry)
            except StoreError as damage:
                self._set_aside(entry.name, damage)
                trajectories = None
            else:
                trajectories = None if trajectories is None else trajectories + found
        return trajectories

    def intact_shard(self, round_number: int, shard: int) -> ShardEntry | None:
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
        what: str = "conversations",
        row_tokens: int | None = None,
    ) -> list[Conversation]:
        """Conversations that train anything and fit a row (None: the trainer's); how many do not
        fit is said."""
        trained = [conversation for conversation in conversations if any(conversation.loss_mask)]
        limit = row_tokens or self.config.trainer.row_tokens
        kept = [conversation for conversation in trained if len(conversation.token_ids) <= limit]
        if too_long := len(trained) - len(kept):
            self.progress.line(
                f"{too_long} of {len(trained)} {what} exceed {limit} tokens and are left out"
            )
        return kept

    def learn(
        self,
        name: str,
        start: GetState,
        rows: Callable[[], PackedRows],
        *,
        steps: int,
        peak: float,
        end_value: float,
        warmup_steps: int = 0,
        stretch: tuple[float, float] = (0.0, 1.0),
        loss: Loss | None = None,
        config: TrainerConfig | None = None,
        over: str | None = None,
    ) -> PhaseState:
        """Train for `steps` updates from `start()`, whose buffers are reused, or go on from the
        last checkpoint of this phase. Of a phase that is written down, nothing is read before its
        state is called for.

        The learning rate follows `optimizer.schedule`; `stretch` is this phase's part of a cosine
        that several phases share. `loss` is one of `learning.losses`, whose columns `rows` carry;
        None is maximum likelihood. `config` has this phase's own rows. `over` is the file that says
        that the phase is over (None: that of its evaluation). A preemption saves the step it comes
        at."""
        file = over or phase_file(name)
        is_past = distributed.broadcast(f"{name} is over", lambda: self.store.exists(file))
        rates = schedule(
            peak=peak,
            end_value=end_value,
            total_steps=steps,
            warmup_steps=warmup_steps,
            stretch=stretch,
        )
        made_by = functools.partial(
            train_phase, self, name, start, rows, steps=steps, rates=rates, loss=loss
        )
        state = PhaseState(lambda: made_by(config=config or self.config.trainer))
        if not is_past:
            state()
        return state

    def finish_phase(
        self,
        phase: Phase,
        state: GetState,
        *,
        began: float,
        trajectories: int = 0,
        accepted: int = 0,
        forward_tokens: int = 0,
        trained_slots: int = 0,
    ) -> PhaseResult:
        """Evaluate greedily and sampled on the held-out questions and write the phase down, or read
        it back."""
        name, step = phase.name, phase.step
        file = phase_file(name)
        if not distributed.broadcast(file, lambda: self.store.exists(file)):
            self.use_policy(state, step)
            with self.counted(f"{phase.prefix}{phases.EVALUATING}", step):
                scores = score_policy(
                    name,
                    agent=self.agent,
                    reward=self.reward.at(step),
                    faults=self.faults,
                    generator=self.generator,
                    task=self.task,
                    config=self.config,
                    progress=self.progress,
                    concurrency=self.config.engine.slots,
                    preemption=self.preemption,
                    live=self.counters.figures,
                    gather=lambda kind, own: gather(self.store, f"{name} {kind}", own),
                )
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
                seconds=time.monotonic() - began,
            )
            result = PhaseResult(
                row=row, forward_tokens=forward_tokens, trained_slots=trained_slots
            )
            if distributed.is_primary():
                self._write_scores(name, scores)
                # Before the phase counts as done: a restart skips a phase that is done.
                seconds = {f"{stage}_seconds": taken for stage, taken in self.clock.take().items()}
                total = {"total_seconds": sum(seconds.values())}
                self.metrics.write(f"{phase.prefix}{phases.TIME}", step, seconds | total)
                searched = dataclasses.asdict(statistics_of(self.task, scores.questions))
                self.metrics.write(f"{phase.prefix}{phases.RETRIEVAL}", step, searched)
                self.metrics.flush()
                self.store.write_json_once(file, dataclasses.asdict(result))
            distributed.barrier(f"{name} is written down")
        found = self.store.read_json(file)
        self._write_io_statistics(name)
        return PhaseResult(**{**found, "row": PhaseRow(**found["row"])})

    def _write_io_statistics(self, name: str) -> None:
        """What the run directory took since the phase before, in seconds and bytes; once for each
        phase."""
        if self.metrics.write(f"{name}/store", 0, self.store.io_statistics.summary()):
            self.store.io_statistics.reset()
            self.metrics.flush()

    def _write_scores(self, name: str, scores: Scores) -> None:
        folder = f"eval/{name.replace(' ', '-')}"
        self.store.write_json_once(f"{folder}.json", scores.summary())
        self.store.create(f"{folder}.predictions.jsonl", scores.predictions())
        self.store.create(f"{folder}.parquet", shards.encode(scores.greedy.trajectories))

    def solved_question(self, name: str) -> tuple[Question, Trajectory] | None:
        """A held-out question that the policy of a phase solved greedily: the one with most
        searches."""
        path = f"eval/{name.replace(' ', '-')}.parquet"
        trajectories = shards.decode(self.store.read(path), path)
        questions = {
            question.id: question for question in held_out_questions(self.task, self.config)
        }
        solved = right_ones(questions.values(), trajectories, self.task.rule)
        if not solved:
            return None
        chosen = max(solved, key=lambda trajectory: len(trajectory.searches))
        return questions[chosen.question_id], chosen
