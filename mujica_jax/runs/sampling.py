"""Rounds of sampling: what is tried in one, and its end: `DONE.json` lists its shards, and a
restart reads them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeVar

from mujica_jax.agents.agent import Attempt
from mujica_jax.records import Question, Trajectory
from mujica_jax.report.progress import Stage
from mujica_jax.runs.phases import SAMPLING
from mujica_jax.runs.run import Run
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.store import ShardEntry

Section = TypeVar("Section")


def method_of(run: Run, kind: type[Section]) -> Section:
    """Return the method's section of the configuration, which is of this kind."""
    assert isinstance(run.config.method, kind), (
        f"method {run.config.method.kind} is not run by this file"
    )
    return run.config.method


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedRound:
    """What an earlier start sampled in a round."""

    trajectories: list[Trajectory]
    threshold: float | None  # K, of a method that has one


def attempt(run: Run, question: Question, number: int, round_number: int) -> Attempt:
    """Return one try at a question in a round, with the seed of the round."""
    return Attempt(
        question=question,
        number=number,
        seed=1000 * run.config.seed + round_number,
        temperature=run.config.sampling.temperature,
    )


def questions_a_round(run: Run, name: str) -> int:
    """Return how many questions a round samples.

    It is the configured number. Where there are fewer training questions, it is all of them, and a
    line says so."""
    configured = run.config.sampling.questions_per_round
    available = len(run.task.questions("train"))
    if available < configured:
        run.progress.line(
            f"{name}: all {available} training questions; sampling.questions_per_round is "
            f"{configured}"
        )
    return min(configured, available)


@contextlib.contextmanager
def sampling(run: Run, name: str, number: int, *, total: int, unit: str) -> Iterator[Stage]:
    """Show the progress of a round's sampling, in `unit`s, and write its line of metrics."""
    stage = run.progress.stage(name, total=total, unit=unit, live=run.counters.figures)
    with run.counted(SAMPLING, number), stage as shown:
        yield shown


def finished_round(run: Run, number: int) -> FinishedRound | None:
    """Return what an earlier start sampled; None where the round is open."""

    def read() -> FinishedRound | None:
        done = run.store.read_done(number)
        if done is None:
            return None
        trajectories = run.read_shards(done.shards)
        if trajectories is None:
            return None
        return FinishedRound(trajectories=trajectories, threshold=done.threshold)

    return distributed.primary_first(f"round {number} is read", read)


def close_round(
    run: Run,
    number: int,
    entries: Sequence[ShardEntry],
    *,
    mean_reward: float,
    threshold: float | None = None,
) -> None:
    """Write down that a round is sampled, and which shards it has."""
    if not distributed.is_primary():
        return
    # A resumed run finds the round closed and does not write its line of metrics again.
    run.metrics.flush()
    run.store.write_done(number, entries, mean_reward=mean_reward, threshold=threshold)
