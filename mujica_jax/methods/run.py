"""One training run: its parts, and the three things every method does with them: sample a unit of work, learn, evaluate.

Each of the three leaves its result in the run directory before the next one begins and finds it there after a restart, so a killed
run repeats at most one shard of episodes, the steps since the last checkpoint, or one evaluation, and ends with the same numbers.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mujica_jax.agents.evaluation import Evaluation, evaluate
from mujica_jax.agents.mujica import Attempt, EnginePolicy, Mujica, run_episodes
from mujica_jax.config import Config
from mujica_jax.errors import StoreError
from mujica_jax.inference.engine import Engine
from mujica_jax.inference.generator import BatchedGenerator
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.trainer import StepMetrics, Trainer, TrainState, fit
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import save_checkpoint
from mujica_jax.records import Question, Trajectory
from mujica_jax.report import MetricsLog, Phase, Progress
from mujica_jax.rewards import f1_reward
from mujica_jax.tasks.task import Task
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.packing import PackedRows
from mujica_jax.trajectories.store import ShardEntry, Store, shard_name

# 0.02 suits widths of thousands: at width 64 a copying task was learnt three times slower with it, and with 0.125 not at all.
INITIALIZER_RANGE = 0.05
SAVE_EVERY_SECONDS = 15.0  # of training: what a kill may cost; a save takes about 60 ms for the tiny models


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """What a phase left: its row of the table, and what it computed, so that the control can be given as much."""

    phase: Phase
    forward_tokens: int  # tokens that went through the model once, while sampling
    trained_slots: int  # row slots that went forward and backward


class Run:
    """The parts of a run, made once by `train`: store, task, tokenizer, agent, trainer and engine."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        task: Task,
        tokenizer: Tokenizer,
        decoder: Decoder,
        progress: Progress,
        metrics: MetricsLog,
    ) -> None:
        self.config, self.store, self.task, self.tokenizer = config, store, task, tokenizer
        self.progress, self.metrics = progress, metrics
        self.agent = Mujica(
            tokenizer, config.agent, lambda answer, question: f1_reward(answer, question.answers, task.rule)
        )
        self.trainer = Trainer(decoder.config, config.trainer)
        self.generator = make_generator(decoder, config, tokenizer)
        self._initial = decoder

    def initial_state(self) -> TrainState:
        return self.trainer.initial_state(self._initial)

    def use_policy(self, state: TrainState, version: int) -> None:
        """Let the engine sample from these weights. They are copied: training reuses its buffers."""
        dtype = self._initial.dtype
        weights = jax.tree.map(lambda array: jnp.array(array, dtype), state.params)
        self.generator.set_weights(weights, version)

    def commit_policy(self, state: TrainState, version: int) -> None:
        """Write the policy as a Hugging Face directory."""

        def write(directory: Path) -> None:
            save_checkpoint(self.trainer.decoder(state), directory / "model")
            self.tokenizer.save(directory / "model")

        self.store.commit_policy(version, write)

    def sample(
        self,
        round_number: int,
        shard: int,
        attempts: Sequence[Attempt],
        on_episode: Callable[[Trajectory], None],
        *,
        agent: Mujica | None = None,
    ) -> tuple[ShardEntry, list[Trajectory]]:
        """One unit of work: play the attempts and write their shard, or read the shard that an earlier run left."""

        def waves(earlier: Sequence[Trajectory]) -> Sequence[Attempt]:
            return [] if earlier else attempts

        entry, trajectories = self.sample_waves(round_number, shard, waves, on_episode, agent=agent)
        assert entry is not None, "a unit of work has attempts"
        return entry, trajectories

    def sample_waves(
        self,
        round_number: int,
        shard: int,
        wave: Callable[[Sequence[Trajectory]], Sequence[Attempt]],
        on_episode: Callable[[Trajectory], None],
        *,
        agent: Mujica | None = None,
    ) -> tuple[ShardEntry | None, list[Trajectory]]:
        """A unit of work whose attempts depend on those before: `wave(trajectories so far)` gives the next ones, or none.

        The engine's slots are emptied first, so that a unit is a function of its attempts and the policy alone. What is returned is
        what the store holds: another process may have been first. None if there was nothing to play.
        """
        entry = self._intact_shard(round_number, shard)
        if entry is not None:
            trajectories = self.store.read_shard(entry)
            for trajectory in trajectories:
                on_episode(trajectory)
            return entry, trajectories
        self.generator.forget()
        trajectories = []
        while attempts := wave(trajectories):
            trajectories += asyncio.run(
                run_episodes(
                    agent or self.agent,
                    attempts,
                    self.task.environment,
                    EnginePolicy(self.generator),
                    policy_version=self.generator.policy_version,
                    concurrency=self.config.engine.slots,
                    on_episode=on_episode,
                )
            )
        if not trajectories:
            return None, []
        entry = self.store.write_shard(round_number, shard, trajectories)
        return entry, self.store.read_shard(entry)

    def _intact_shard(self, round_number: int, shard: int) -> ShardEntry | None:
        try:
            return self.store.find_shard(round_number, shard)
        except StoreError as damage:
            name = shard_name(round_number, shard)
            self.store.quarantine(name, str(damage))
            self.progress.line(f"{name} was damaged and is sampled again: {damage}")
            return None

    def learn(
        self,
        name: str,
        start: Callable[[], TrainState],
        rows: Callable[[], PackedRows],
        *,
        steps: int,
        peak: float,
        floor: float,
        warmup_steps: int = 0,
    ) -> TrainState:
        """Train for `steps` updates from `start()`, or go on from the last checkpoint of this phase."""
        checkpoints = Checkpoints(self.store.root / "learning" / name.replace(" ", "-"), keep=1)
        found = checkpoints.restore_latest(self.trainer.abstract_state())
        # A step reuses its state's buffers; what `start` returns stays whole for whoever else begins from it.
        state = self.trainer.next_phase(jax.tree.map(jnp.copy, start())) if found is None else found[0]
        done = int(state.step)
        if done >= steps:
            return state
        packed = rows()
        slots = self.config.trainer.rows_per_step * packed.row_tokens
        began, begun_at = time.monotonic(), done
        last_save = began

        with self.progress.stage(f"{name}: learning", total=steps, unit="steps", done=done) as stage:

            def on_step(metrics: StepMetrics) -> None:
                speed = slots * packed.efficiency * (metrics.step - begun_at) / (time.monotonic() - began)
                stage.update(metrics.step, loss=metrics.loss, tokens_per_second=round(speed))
                if metrics.step % 10 == 0 or metrics.step == steps:
                    values = dataclasses.asdict(metrics) | {"tokens_per_second": speed, "packing": packed.efficiency}
                    self.metrics.write(f"{name}/learn", values.pop("step"), values)

            # A save is due by the clock, but what a restart repeats is the same steps with the same batches either way.
            while done < steps:
                stretch = min(steps, done + self._steps_a_stretch)
                result = fit(
                    self.trainer,
                    state,
                    packed,
                    schedule=schedule(peak=peak, floor=floor, total_steps=steps, warmup_steps=warmup_steps),
                    steps=stretch,
                    seed=self.config.seed,
                    on_step=on_step,
                )
                state, done = result.state, result.steps
                if done == steps or time.monotonic() - last_save > SAVE_EVERY_SECONDS:
                    checkpoints.save(state, {"phase": name, "steps": steps})
                    last_save = time.monotonic()
        return state

    _steps_a_stretch = 25

    def finish_phase(
        self,
        name: str,
        state: TrainState,
        version: int,
        *,
        began: float,
        trajectories: int = 0,
        accepted: int = 0,
        forward_tokens: int = 0,
        trained_slots: int = 0,
    ) -> PhaseResult:
        """Evaluate greedily and sampled on the held-out questions and write the phase down; read it where it is written."""
        file = f"phases/{name.replace(' ', '-')}.json"
        if not self.store.exists(file):
            questions = self.task.questions("test")[: self.config.eval.questions]
            self.use_policy(state, version)
            greedy = self._evaluate(name, questions, version, temperature=0.0)
            sampled = self._evaluate(name, questions, version, temperature=self.config.eval.temperature)
            phase = Phase(
                name=name,
                em=greedy.em,
                f1=greedy.f1,
                em_sampled=sampled.em,
                f1_sampled=sampled.f1,
                questions=len(questions),
                trajectories=trajectories,
                accepted=accepted,
                searches=greedy.searches,
                by_kind=greedy.summary()["by_kind"],
                seconds=time.monotonic() - began,
            )
            result = PhaseResult(phase=phase, forward_tokens=forward_tokens, trained_slots=trained_slots)
            self._write_evaluation(name, questions, greedy, sampled)
            self.store.write_json_once(file, dataclasses.asdict(result))
        found = self.store.read_json(file)
        return PhaseResult(**{**found, "phase": Phase(**found["phase"])})

    def _evaluate(self, name: str, questions: Sequence[Question], version: int, *, temperature: float) -> Evaluation:
        self.generator.forget()
        right = done = 0
        kind = "greedy" if temperature == 0 else "sampled"
        with self.progress.stage(f"{name}: evaluating, {kind}", total=len(questions), unit="episodes") as stage:

            def on_episode(trajectory: Trajectory) -> None:
                nonlocal right, done
                done += 1
                right += trajectory.reward >= 1.0
                stage.update(done, em=100 * right / done)

            return asyncio.run(
                evaluate(
                    self.agent,
                    questions,
                    self.task.environment,
                    EnginePolicy(self.generator),
                    rule=self.task.rule,
                    policy_version=version,
                    temperature=temperature,
                    seed=self.config.seed,
                    concurrency=self.config.engine.slots,
                    on_episode=on_episode,
                )
            )

    def _write_evaluation(
        self, name: str, questions: Sequence[Question], greedy: Evaluation, sampled: Evaluation
    ) -> None:
        folder = f"eval/{name.replace(' ', '-')}"
        summary = {"greedy": greedy.summary(), "sampled": sampled.summary()}
        self.store.write_json_once(f"{folder}.json", summary)
        self.store.create(f"{folder}.predictions.jsonl", prediction_lines(questions, greedy).encode())
        self.store.create(f"{folder}.parquet", shards.encode(greedy.trajectories))

    def solved_question(self, name: str) -> tuple[Question, Trajectory] | None:
        """A held-out question that the policy of a phase solved, greedily: the one with most searches, as it says most."""
        path = f"eval/{name.replace(' ', '-')}.parquet"
        trajectories = shards.decode(self.store.read(path), path)
        solved = [trajectory for trajectory in trajectories if trajectory.reward >= 1.0]
        if not solved:
            return None
        chosen = max(solved, key=lambda trajectory: len(trajectory.searches))
        questions = {question.id: question for question in self.task.questions("test")}
        return questions[chosen.question_id], chosen


def prediction_lines(questions: Sequence[Question], evaluation: Evaluation) -> str:
    """One JSON object a question: what was asked, what came, how it scored."""
    lines = []
    for question, trajectory in zip(questions, evaluation.trajectories, strict=True):
        row = {
            "id": question.id,
            "kind": question.kind,
            "question": question.text,
            "answers": question.answers,
            "prediction": trajectory.answer,
            "f1": trajectory.reward,
            "stop_reason": trajectory.stop_reason.value,
            "searches": [{"query": search.query, "sentence": search.sentence} for search in trajectory.searches],
        }
        lines.append(json.dumps(row, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def make_generator(decoder: Decoder, config: Config, tokenizer: Tokenizer) -> BatchedGenerator:
    engine = Engine(
        decoder,
        slots=config.engine.slots,
        positions=config.agent.max_trajectory_tokens,
        prefill_tokens=config.engine.prefill_tokens,
        decode_steps=config.engine.decode_steps_per_call,
        stop_token_ids=tokenizer.stop_token_ids,
    )
    return BatchedGenerator(engine, prefix_reuse=config.engine.prefix_reuse)


def tokens_of(trajectories: Sequence[Trajectory]) -> int:
    """Tokens of all conversations: each went through the model once while sampling."""
    return sum(len(turn.token_ids) for t in trajectories for c in t.conversations for turn in c.turns)


def new_decoder(config: Config, tokenizer: Tokenizer) -> Decoder:
    """A randomly initialised decoder of the configured size."""
    from mujica_jax.models.families import DecoderConfig

    model = config.model
    decoder = DecoderConfig(
        family=model.family,
        vocab_size=tokenizer.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope_theta=model.rope_theta,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=model.family == "qwen2",
        qk_norm=model.family == "qwen3",
        max_position_embeddings=config.agent.max_trajectory_tokens,
        eos_token_ids=tuple(tokenizer.stop_token_ids),
        bos_token_id=None,
        initializer_range=INITIALIZER_RANGE,
    )
    return Decoder(decoder, rngs=nnx.Rngs(config.seed), dtype=jnp.dtype(config.trainer.dtype))
