"""Policies on the same held-out questions, greedily and with several samples a question; one JSON
line.

    python benchmarks/compare_policies.py RUN/0 RUN/1 [--split dev] [--samples 8] [--out FILE] [--eval FLAG ...]
    python benchmarks/compare_policies.py ADAPTER ADAPTER --init smollm2 --eval --task.data-dir DIR

A policy is a run directory and its number there (0 is the warm-up), or the folder of a LoRA adapter
of `--init`. After `--eval` come flags of that program's sections, as in `--eval --eval.questions
200`. `eval` draws one sample a question, and on few questions what it draws decides. Here the score
of a question is the mean over its samples. Scores that are printed are percent with 95% bootstrap
intervals over the questions, those of differences paired; `--out` has the scores of every question,
0 to 1.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mujica_jax import metrics
from mujica_jax.agents.agent import Attempt, EnginePolicy, run_episodes
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.eval import command_line, find_checkpoint
from mujica_jax.records import Question
from mujica_jax.runs.evaluation import held_out_questions
from mujica_jax.runs.parts import check_prompts, make_agent, make_reward
from mujica_jax.runs.policies import Checkpoint
from mujica_jax.runs.setup import build_task
from mujica_jax.runtime.compilation_cache import use_compilation_cache
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.storage.run_directory import atomic_write
from mujica_jax.tasks.task import Task

SCORES = ("em", "f1", "em_sampled", "f1_sampled")
Scores = dict[str, list[float]]  # by name, of each question


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("policies", nargs="+", metavar="POLICY")
    parser.add_argument("--init", help="the checkpoint that adapters belong to")
    parser.add_argument("--split", default="dev", choices=["dev", "test"])
    parser.add_argument(
        "--samples", type=int, default=8, help="a question, beside the greedy episode"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--eval", nargs=argparse.REMAINDER, default=[])
    given = parser.parse_args()
    if given.samples < 1:
        parser.error(f"--samples is {given.samples}: draw at least one")
    if given.out and not given.out.absolute().parent.is_dir():
        parser.error(
            f"--out is {given.out}, and its folder is not there: make it, or name another file"
        )
    keep_freed_memory()
    use_compilation_cache()
    try:
        questions, scores = compared(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    first = scores[given.policies[0]]
    found = {name: summary(questions, of, first) for name, of in scores.items()}
    print(
        json.dumps(
            {
                "split": given.split,
                "questions": len(questions),
                "samples": given.samples,
                "policies": found,
            }
        )
    )
    return 0


def compared(given: argparse.Namespace) -> tuple[Sequence[Question], dict[str, Scores]]:
    configs, checkpoints = zip(*(named(name, given) for name in given.policies), strict=True)
    if other := [
        name for name, of in zip(given.policies, configs, strict=True) if of.task != configs[0].task
    ]:
        raise UserError(
            f"{other[0]} was trained on another task or data than {given.policies[0]}: name both "
            "after --eval, as in --task.data-dir DIR"
        )
    task, began, scores = build_task(configs[0], learns=False), time.monotonic(), {}
    questions = held_out_questions(task, configs[0])
    for name, config, checkpoint in zip(given.policies, configs, checkpoints, strict=True):
        scores[name] = played(checkpoint, config, task, questions, given.samples)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if given.out:  # again after each: they take minutes
            rows = (
                {"id": question.id, "kind": question.kind}
                | {
                    of: {score: found[score][place] for score in SCORES}
                    for of, found in scores.items()
                }
                for place, question in enumerate(questions)
            )
            atomic_write(given.out, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return questions, scores


def named(name: str, given: argparse.Namespace) -> tuple[Config, Checkpoint]:
    run, _, number = name.rpartition("/")
    if number.isdecimal():
        which = ["--checkpoint", run, "--policy", number]
    elif given.init:
        which = ["--init", given.init, "--adapter", name]
    else:
        raise UserError(
            f"{name} ends with no number of a policy: for an adapter give --init, as in --init "
            "smollm2"
        )
    arguments, config = command_line([*which, *given.eval, "--eval.split", given.split])
    if arguments.worker or arguments.agents or arguments.tasks:
        raise UserError(
            "--worker, --agents and --tasks are eval's own and are not read here: leave them out"
        )
    return config, find_checkpoint(arguments)


def played(
    checkpoint: Checkpoint, config: Config, task: Task, questions: Sequence[Question], samples: int
) -> Scores:
    tokenizer, generator = checkpoint.open(config)
    check_prompts(config.agent, tokenizer, task.environment_kind)
    attempts = [
        Attempt(question=question, number=sample, seed=config.seed, temperature=temperature)
        for question in questions
        for sample, temperature in (
            (0, 0.0),
            *((number, config.eval.temperature) for number in range(samples)),
        )
    ]
    episodes = run_episodes(
        make_agent(config.agent, tokenizer),
        attempts,
        task.environment,
        EnginePolicy(generator),
        reward=make_reward(config, task.rule).at(checkpoint.version),
        concurrency=checkpoint.concurrency(config),
    )
    found = [
        metrics.score(trajectory.final_answer, attempt.question.answers, task.rule)
        for attempt, trajectory in zip(attempts, asyncio.run(episodes), strict=True)
    ]
    groups = [found[start : start + samples + 1] for start in range(0, len(found), samples + 1)]
    return {
        "em": [greedy.em for greedy, *_ in groups],
        "f1": [greedy.f1 for greedy, *_ in groups],
        "em_sampled": [sum(one.em for one in drawn) / samples for _, *drawn in groups],
        "f1_sampled": [sum(one.f1 for one in drawn) / samples for _, *drawn in groups],
    }


def summary(questions: Sequence[Question], scores: Scores, first: Scores) -> dict:
    """Scores with their intervals, the differences to the first policy, and EM by kind of
    question."""
    row: dict = {
        score: rounded(mean(of), metrics.bootstrap_interval(of)) for score, of in scores.items()
    }
    if scores is not first:
        row["difference_to_first"] = {
            score: rounded(*metrics.paired_bootstrap(first[score], of)[:2])
            for score, of in scores.items()
        }
    kinds = defaultdict(list)
    for place, question in enumerate(questions):
        kinds[question.kind or "other"].append(place)
    row["by_kind"] = {
        kind: {
            "questions": len(places),
            **{
                name: round(mean([scores[name][at] for at in places]), 1)
                for name in ("em", "em_sampled")
            },
        }
        for kind, places in sorted(kinds.items())
    }
    return row


def mean(values: Sequence[float]) -> float:
    return 100 * sum(values) / len(values)


def rounded(middle: float, interval: tuple[float, float]) -> list[float]:
    return [round(number, 1) for number in (middle, *interval)]


if __name__ == "__main__":
    raise SystemExit(main())
