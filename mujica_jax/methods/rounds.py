"""Rounds of sampling: what is tried in one, and its end: `DONE.json` lists its shards, and a
restart reads them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from mujica_jax.agents.agent import Attempt
from mujica_jax.methods.phases import SAMPLING
from mujica_jax.methods.run import Run
from mujica_jax.records import Question, Trajectory
from mujica_jax.report.progress import Stage
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.store import ShardEntry

Section = TypeVar("Section")


def method_of(run: Run, kind: type[Section]) -> Section:
    """The method's section of the configuration, which is of this kind."""
    assert isinstance(run.config.method, kind), (
        f"method {run.config.method.kind} is not run by this file"
    )
    return run.config.method


def attempt(run: Run, question: Question, number: int, round_number: int) -> Attempt:
    """One try at a question in a round, by the seed of that."""
    seed = 1000 * run.config.seed + round_number
    return Attempt(
        question=question, number=number, seed=seed, temperature=run.config.sampling.temperature
    )


def questions_a_round(run: Run, name: str) -> int:
    """As many as the configuration says, or all training questions, which is said."""
    wanted, there = run.config.sampling.questions_per_round, len(run.task.questions("train"))
    if there < wanted:
        run.progress.line(
            f"{name}: all {there} training questions; sampling.questions_per_round is {wanted}"
        )
    return min(wanted, there)


@contextlib.contextmanager
def sampling(run: Run, name: str, number: int, *, total: int, unit: str) -> Iterator[Stage]:
    """The progress of a round's sampling, in `unit`s, and its line of metrics."""
    stage = run.progress.stage(name, total=total, unit=unit, live=run.counters.figures)
    with run.counted(SAMPLING, number), stage as shown:
        yield shown


def finished_round(run: Run, number: int) -> tuple[list[Trajectory], float | None] | None:
    """What an earlier start sampled, and its threshold; None where the round is open."""

    def read() -> tuple[list[Trajectory], float | None] | None:
        done = run.store.read_done(number)
        found = None if done is None else run.read_shards(done.shards)
        return None if done is None or found is None else (found, done.threshold)

    return distributed.primary_first(f"round {number} is read", read)


def close_round(
    run: Run,
    number: int,
    entries: Sequence[ShardEntry],
    *,
    mean_reward: float,
    threshold: float | None = None,
) -> None:
    if distributed.is_primary():
        # a resumed run finds the round closed and does not write its line again
        run.metrics.flush()
        run.store.write_done(number, entries, mean_reward=mean_reward, threshold=threshold)
