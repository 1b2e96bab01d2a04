"""Evaluate a policy from Python."""

import dataclasses
import functools
import html
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from mujica_jax.api.overrides import Overrides
from mujica_jax.api.policy import Policy, load
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.records import Question, Trajectory
from mujica_jax.report.results import score_table
from mujica_jax.report.text import plain
from mujica_jax.runs.evaluate import Evaluated, Models
from mujica_jax.runs.evaluate import evaluate as evaluate_configs
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.storage.run_directory import RunPath, run_path
from mujica_jax.tasks.data_folder import check_data_dir


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Results:
    """The scores of a policy. They print as a table.

    All scores are in percent. Intervals are 95% bootstrap intervals.

    Attributes:
        em: Exact match with greedy decoding.
        em_interval: The interval of `em`, as (low, high).
        f1: F1 with greedy decoding.
        f1_interval: The interval of `f1`, as (low, high).
        summary: All scores and counts: "greedy", and "sampled" if answers were sampled.
        questions: The questions, in the order of the trajectories.
        trajectories: The greedy episodes, one for each question.
        file: The file with the result. Predictions and trajectories are beside it.
    """

    em: float
    em_interval: tuple[float, float]
    f1: float
    f1_interval: tuple[float, float]
    summary: Mapping[str, Any]
    questions: Sequence[Question]
    trajectories: Sequence[Trajectory]
    file: RunPath

    def __repr__(self) -> str:
        """Return the table of scores, with a row for each kind of question."""
        table = plain(score_table(self.summary["greedy"], self.summary.get("sampled")))
        return table.rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the same for a notebook. All texts are escaped."""
        return f"<pre>{html.escape(repr(self))}</pre>"


def evaluate(
    policy: Policy | str,
    *,
    config: Config | str | None = None,
    overrides: Overrides | None = None,
    samples: int = 0,
    out: str | None = None,
) -> Results:
    """Score a policy on the held-out questions of a task, and return the scores.

    The scores, predictions and trajectories are also written, as `python -m mujica_jax.eval` does.
    If the call is stopped, the same call continues where it stopped.

    Args:
        policy: A policy from `mujica_jax.load`, or what `load` takes as its source.
        config: Another configuration than the policy's, to score it on another task.
        overrides: Changes to the configuration: {"eval.questions": 100}.
        samples: How many times each question is also answered with sampling. 0: only greedily.
        out: The folder for the results. None: RUN/eval for a policy of a run, or else ./eval.

    Raises:
        UserError: The policy or the configuration does not exist, or they do not fit.

    >>> import mujica_jax as mj
    >>> results = mj.evaluate("run", overrides={"eval.questions": 4})  # doctest: +ELLIPSIS
    evaluating policy ...
    >>> len(results.trajectories)
    4
    """
    if samples < 0:
        raise UserError(f"samples is {samples} and must be at least 0")
    if isinstance(policy, str):
        policy = load(policy, config=config, overrides=overrides)
    elif config is not None or overrides is not None:
        policy = policy.changed(config, overrides)
    check_data_dir(policy.config.task)
    preemption = Preemption()
    return policy.call(
        functools.partial(_evaluate, policy, preemption, samples=samples, out=out),
        interrupt=functools.partial(preemption.on_notice, signal.SIGINT),
    )


def _evaluate(policy: Policy, preemption: Preemption, *, samples: int, out: str | None) -> Results:
    """Score a policy. No event loop runs in this thread."""
    checkpoint = policy.open_checkpoint()
    if out is not None:
        checkpoint = dataclasses.replace(checkpoint, out=run_path(out))
    [result] = evaluate_configs(
        [policy.config], Models(policy=checkpoint), preemption, samples=samples
    )
    return _results(result)


def _results(result: Evaluated) -> Results:
    """Return the result of an evaluation as the API shows it."""
    greedy = result.summary["greedy"]
    return Results(
        em=greedy["em"],
        em_interval=tuple(greedy["em_interval"]),
        f1=greedy["f1"],
        f1_interval=tuple(greedy["f1_interval"]),
        summary=result.summary,
        questions=tuple(result.scores.questions),
        trajectories=result.scores.greedy.trajectories,
        file=result.file,
    )
