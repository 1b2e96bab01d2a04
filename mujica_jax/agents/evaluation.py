"""Scores of a policy on held-out questions by question kind: exact match and F1 under the task's own rule."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mujica_jax import metrics
from mujica_jax.metrics import Rule
from mujica_jax.records import Question, Trajectory

ALL_KINDS = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindScore:
    """Percent over `questions` questions."""

    em: float
    em_interval: tuple[float, float]  # 95% bootstrap interval
    f1: float
    questions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One pass over the questions, one attempt each."""

    by_kind: dict[str, KindScore]  # holds ALL_KINDS too
    searches: float  # mean a question
    stop_reasons: dict[str, int]
    trajectories: tuple[Trajectory, ...]

    @property
    def em(self) -> float:
        return self.by_kind[ALL_KINDS].em

    @property
    def em_interval(self) -> tuple[float, float]:
        return self.by_kind[ALL_KINDS].em_interval

    @property
    def f1(self) -> float:
        return self.by_kind[ALL_KINDS].f1

    def summary(self) -> dict:
        """What is written beside the predictions: everything but the trajectories."""
        return {
            **_rounded(self.by_kind[ALL_KINDS]),
            "searches": round(self.searches, 3),
            "stop_reasons": self.stop_reasons,
            "by_kind": {kind: _rounded(score) for kind, score in self.by_kind.items() if kind != ALL_KINDS},
        }


def summarise(questions: Sequence[Question], trajectories: Sequence[Trajectory], rule: Rule) -> Evaluation:
    """Scores of one trajectory a question, in the same order. An episode that did not answer scores zero."""
    scores = [
        metrics.score(trajectory.final_answer, question.answers, rule)
        for question, trajectory in zip(questions, trajectories, strict=True)
    ]
    kinds = {ALL_KINDS: list(range(len(questions)))}
    for index, question in enumerate(questions):
        kinds.setdefault(question.kind or "other", []).append(index)
    return Evaluation(
        by_kind={kind: _kind_score([scores[index] for index in members]) for kind, members in kinds.items()},
        searches=sum(len(trajectory.searches) for trajectory in trajectories) / len(trajectories),
        stop_reasons=dict(sorted(Counter(trajectory.stop_reason.value for trajectory in trajectories).items())),
        trajectories=tuple(trajectories),
    )


def _kind_score(scores: Sequence[metrics.Score]) -> KindScore:
    return KindScore(
        em=100 * sum(score.em for score in scores) / len(scores),
        em_interval=metrics.bootstrap_interval([score.em for score in scores]),
        f1=100 * sum(score.f1 for score in scores) / len(scores),
        questions=len(scores),
    )


def _rounded(score: KindScore) -> dict[str, Any]:
    return {
        "em": round(score.em, 2),
        "em_interval": [round(bound, 2) for bound in score.em_interval],
        "f1": round(score.f1, 2),
        "questions": score.questions,
    }
