"""Scores a policy on the held-out questions, greedily and sampled: after each phase of a run, and
for `eval`."""

import asyncio
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mujica_jax import metrics
from mujica_jax.agents.agent import (
    Agent,
    Attempt,
    EnginePolicy,
    OnEpisode,
    Policy,
    TwoPolicies,
    run_episodes,
)
from mujica_jax.agents.faults import FaultGuard
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.inference.requests import Generator
from mujica_jax.metrics import Rule
from mujica_jax.records import GoldPassage, Question, Search, Trajectory, generated_tokens
from mujica_jax.report.progress import Figure, Progress
from mujica_jax.report.results import rounded
from mujica_jax.rewards import RewardFunction
from mujica_jax.runtime import distributed
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.task import EnvironmentKind, Task

Play = Callable[[], Sequence[Trajectory]]


class ScoredGenerator(Generator, Protocol):
    policy_version: int

    def reset_cache(self) -> None:
        """Drop what was kept of earlier requests."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindScore:
    """Percent over `questions` questions."""

    em: float
    em_interval: tuple[float, float]  # 95% bootstrap interval
    f1: float
    f1_interval: tuple[float, float]
    questions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One pass over the questions, one attempt each. Scores and means leave out the episodes whose
    search failed: they say nothing about the policy."""

    score: KindScore  # of all
    by_kind: dict[str, KindScore]
    searches: float  # mean a question
    stop_reasons: dict[str, int]
    further: dict[str, float]  # means in percent of what only some tasks have
    trajectories: tuple[Trajectory, ...]  # one a question, those that are left out among them

    @property
    def scored(self) -> list[Trajectory]:
        return [
            trajectory for trajectory in self.trajectories if not trajectory.is_environment_fault
        ]

    @property
    def left_out(self) -> int:
        """How many episodes are left out."""
        return len(self.trajectories) - len(self.scored)

    def summary(self) -> dict[str, Any]:
        """What is written beside the predictions: everything but the trajectories."""
        return {
            **rounded(dataclasses.asdict(self.score)),
            "left_out": self.left_out,
            "searches": round(self.searches, 3),
            "tokens": round(generated_tokens(self.scored) / len(self.scored), 1),
            "seconds": round(sum(t.seconds for t in self.scored) / len(self.scored), 3),
            **{name: round(value, 2) for name, value in self.further.items()},
            "stop_reasons": self.stop_reasons,
            "by_kind": {
                kind: rounded(dataclasses.asdict(score)) for kind, score in self.by_kind.items()
            },
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The same questions greedily and, unless that was left out, at `eval.temperature`."""

    questions: Sequence[Question]
    rule: Rule
    greedy: Evaluation
    sampled: Evaluation | None

    def summary(self) -> dict[str, Any]:
        both = {"greedy": self.greedy, "sampled": self.sampled}
        return {kind: found.summary() for kind, found in both.items() if found is not None}

    @property
    def left_out(self) -> int:
        """How many episodes of both evaluations are left out of the scores."""
        return self.greedy.left_out + (0 if self.sampled is None else self.sampled.left_out)

    def exact_matches(self) -> tuple[float | None, ...]:
        """Return the exact match of each question, greedily; None where a search failed."""
        pairs = zip(self.questions, self.greedy.trajectories, strict=True)
        return tuple(self._scores_of(question, trajectory)["em"] for question, trajectory in pairs)

    def predictions(self) -> bytes:
        """One JSON object a line: what was asked, what came greedily, how it scored and what its
        reward was; and what came when it was sampled. An episode whose search failed has null for
        its scores, and an episode that could not be rewarded null for its reward."""
        lines = []
        for place, (question, trajectory) in enumerate(
            zip(self.questions, self.greedy.trajectories, strict=True)
        ):
            row = {
                "id": question.id,
                "kind": question.kind,
                "question": question.text,
                "answers": question.answers,
                "prediction": trajectory.answer,
                **self._scores_of(question, trajectory),
                "reward": trajectory.reward if trajectory.is_rewarded else None,
                "stop_reason": trajectory.stop_reason.value,
                "searches": [
                    {"query": search.query, "sentence": search.sentence}
                    for search in trajectory.searches
                ],
            }
            if self.sampled is not None:
                sampled = self.sampled.trajectories[place]
                row["sampled"] = {
                    "prediction": sampled.answer,
                    **self._scores_of(question, sampled),
                }
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        return "".join(lines).encode()

    def _scores_of(self, question: Question, trajectory: Trajectory) -> dict[str, float | None]:
        if trajectory.is_environment_fault:
            return {"em": None, "f1": None}
        score = metrics.score(trajectory.final_answer, question.answers, self.rule)
        return {"em": score.em, "f1": score.f1}


def score_policy(
    name: str,
    *,
    agent: Agent,
    reward: RewardFunction,
    generator: ScoredGenerator,
    task: Task,
    config: Config,
    progress: Progress,
    concurrency: int,
    preemption: Preemption,
    faults: FaultGuard | None = None,
    live: Callable[[], Mapping[str, Figure]] = dict,
    gather: Callable[[str, Sequence[Trajectory]], Sequence[Trajectory]] = lambda kind, own: own,
    worker: ScoredGenerator | None = None,
    sampled: bool = True,
    part_questions: int | None = None,
    keep: Callable[[str, Play], Sequence[Trajectory]] = lambda name, play: play(),
) -> Scores:
    """Scores of the generator's policy, `concurrency` episodes at a time; `name` and `live` figures
    are shown with the progress; without `sampled` it is greedy alone. `worker` is another model for
    the turns of workers. Several processes share the questions, and `gather(kind, own
    trajectories)` brings together what they played. Each process plays `part_questions` at a time
    (None: all at once): `keep(name of the part, play)` gives what an earlier start has played of a
    part, or plays it."""
    questions = held_out_questions(task, config)
    guard = FaultGuard() if faults is None else faults
    if not (own := distributed.shard_for_process(questions)):
        raise UserError(
            f"{len(questions)} held-out questions are fewer than {distributed.processes()} "
            f"processes: raise eval.questions {config.eval.questions}, or give the task more of "
            "them"
        )
    if len(questions) < config.eval.questions:
        progress.line(
            f"{name}: all {len(questions)} held-out questions are evaluated; eval.questions is "
            f"{config.eval.questions}"
        )

    def play(part: Sequence[Attempt], on_episode: OnEpisode) -> Sequence[Trajectory]:
        policy: Policy = EnginePolicy(generator)
        if worker is not None:
            policy = TwoPolicies(policy, EnginePolicy(worker))
            worker.reset_cache()
        generator.reset_cache()  # so that a score does not depend on what was decoded before
        trajectories = asyncio.run(
            run_episodes(
                agent,
                part,
                task.environment,
                policy,
                reward=reward,
                play=guard.play,
                on_episode=on_episode,
                concurrency=concurrency,
                poll=preemption.check,
            )
        )
        _check_any_scored(trajectories)  # before they are kept: the next start plays them again
        return trajectories

    def evaluated(temperature: float) -> Evaluation:
        kind = "greedy" if temperature == 0 else "sampled"
        preemption.enter(f"{name}: evaluating, {kind}")
        golds = {question.id: question.answers for question in own}
        attempts = [
            Attempt(question=asked, number=0, seed=config.seed, temperature=temperature)
            for asked in own
        ]
        done = scored = 0
        correct = 0.0
        with progress.stage(
            f"{name}: evaluating, {kind}", total=len(own), unit="episodes", live=live
        ) as stage:

            def on_episode(trajectory: Trajectory) -> None:
                nonlocal done, scored, correct
                done += 1
                if not trajectory.is_environment_fault:
                    scored += 1
                    correct += metrics.score(
                        trajectory.final_answer, golds[trajectory.question_id], task.rule
                    ).em
                stage.update(done, em=100 * correct / max(1, scored))

            played: Sequence[Trajectory] = []
            for start in range(0, len(own), part_questions or len(own)):
                part = attempts[start : start + (part_questions or len(own))]
                of_part = f"{kind}-{distributed.process()}-of-{distributed.processes()}-{start}-{len(part)}"
                found = keep(of_part, functools.partial(play, part, on_episode))
                if done == start:  # an earlier start has played them
                    for trajectory in found:
                        on_episode(trajectory)
                played = [*played, *found]
        if distributed.processes() > 1:
            played = gather(kind, played)
        evaluation = summarise(questions, played, task.rule, task.environment_kind)
        if evaluation.left_out:
            progress.line(
                f"{name}, {kind}: {evaluation.left_out} of {len(questions)} episodes are left out "
                "of the scores because a search failed"
            )
        return evaluation

    greedy = evaluated(0.0)
    drawn = evaluated(config.eval.temperature) if sampled else None
    return Scores(questions=questions, rule=task.rule, greedy=greedy, sampled=drawn)


def right_ones(
    questions: Iterable[Question], trajectories: Iterable[Trajectory], rule: Rule
) -> list[Trajectory]:
    """Those that answer their question, by exact match."""
    golds = {question.id: question.answers for question in questions}
    return [
        t
        for t in trajectories
        if metrics.score(t.final_answer, golds[t.question_id], rule).em == 1.0
    ]


def held_out_questions(task: Task, config: Config) -> Sequence[Question]:
    return task.questions(config.eval.split)[: config.eval.questions]


def summarise(
    questions: Sequence[Question],
    trajectories: Sequence[Trajectory],
    rule: Rule,
    environment: EnvironmentKind = "text",
) -> Evaluation:
    """Return the scores of one trajectory a question, in the same order. An episode that did not
    answer scores zero, and one whose search failed counts in no mean. Raises UserError where all of
    them failed so."""
    _check_any_scored(trajectories)
    pairs = [
        pair
        for pair in zip(questions, trajectories, strict=True)
        if not pair[1].is_environment_fault
    ]
    scores: list[metrics.Score] = []
    kinds: dict[str, list[metrics.Score]] = {}
    for question, trajectory in pairs:
        scores.append(metrics.score(trajectory.final_answer, question.answers, rule))
        kinds.setdefault(question.kind or "other", []).append(scores[-1])
    return Evaluation(
        score=_mean(scores),
        by_kind={kind: _mean(members) for kind, members in kinds.items()},
        searches=sum(len(trajectory.searches) for _, trajectory in pairs) / len(pairs),
        stop_reasons=dict(
            sorted(Counter(trajectory.stop_reason.value for trajectory in trajectories).items())
        ),
        further=_further(
            [question for question, _ in pairs], [played for _, played in pairs], environment
        ),
        trajectories=tuple(trajectories),
    )


def _check_any_scored(trajectories: Sequence[Trajectory]) -> None:
    if all(trajectory.is_environment_fault for trajectory in trajectories):
        raise UserError(
            f"a search failed in all {len(trajectories)} episodes that were played for an "
            "evaluation, and nothing can be scored: start the retriever again or correct its "
            "address, then give the same command"
        )


def _further(
    questions: Sequence[Question], trajectories: Sequence[Trajectory], environment: EnvironmentKind
) -> dict[str, float]:
    """`set_f1`, the plain macro F1, and `gerbil_macro_f1` where questions ask for several answers.
    Where they have gold passages and passages were searched: `gold_found`, the share of them among
    all that was found, and `support_em` and `support_f1` of those that were read for an answer:
    what a worker selected, or all that was found where nobody selects."""
    found: dict[str, list[float]] = {}
    sets: list[metrics.Score] = []
    answered: list[bool] = []
    for question, trajectory in zip(questions, trajectories, strict=True):
        if question.answer_sets:
            sets.append(metrics.score_set(trajectory.final_answer, question.answer_sets))
            answered.append(bool((trajectory.final_answer or "").strip()))
        if not question.gold_passages or environment == "graph":
            continue
        searches = trajectory.searches
        gold = set(map(str, range(len(question.gold_passages))))
        shown = [
            (_names_of_shown(search, question.gold_passages), search.selected)
            for search in searches
        ]
        retrieved = {name for names, _ in shown for name in names}
        chosen = {names[place] for names, selected in shown for place in selected}
        support = metrics.supporting(chosen or retrieved, gold)
        found.setdefault("gold_found", []).append(metrics.supporting(retrieved, gold).recall)
        found.setdefault("support_em", []).append(support.em)
        found.setdefault("support_f1", []).append(support.f1)
    means = {name: 100 * sum(values) / len(values) for name, values in found.items()}
    if sets:
        means["set_f1"] = 100 * sum(score.f1 for score in sets) / len(sets)
        means["gerbil_macro_f1"] = 100 * metrics.gerbil_macro_f1(sets, answered)
    return means


def _names_of_shown(search: Search, gold: Sequence[GoldPassage]) -> list[str]:
    """Return a name for each passage that a search has shown: the number of its gold passage, or
    else its whole text.

    A passage that was shown alone may have been cut to fit.
    """
    names = []
    for text in search.materials:
        is_cut = len(search.materials) == 1
        numbers = [
            number for number, passage in enumerate(gold) if passage.is_shown_by(text, cut=is_cut)
        ]
        names.append(str(numbers[0]) if numbers else f"passage {text}")
    return names


def _mean(scores: Sequence[metrics.Score]) -> KindScore:
    return KindScore(
        em=100 * sum(score.em for score in scores) / len(scores),
        em_interval=metrics.bootstrap_interval([score.em for score in scores]),
        f1=100 * sum(score.f1 for score in scores) / len(scores),
        f1_interval=metrics.bootstrap_interval([score.f1 for score in scores]),
        questions=len(scores),
    )
