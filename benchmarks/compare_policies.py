"""Policies on the same held-out questions, greedily and with several samples a question; one JSON line.

    python benchmarks/compare_policies.py RUN/0 RUN/1 ADAPTER [--split dev] [--samples 8] [--out FILE]

A policy is a run directory and its number there (0 is the warm-up), or the folder of a LoRA adapter. Further flags are
those of `eval`, as in `--init smollm2 --task.data-dir DIR` for adapters.

`eval` draws one sample a question, and on few questions what it draws decides. Here the score of a question is the
mean over its samples, the first of which is the one that `eval` draws. Intervals are 95% bootstraps over the questions;
those of differences are paired, each policy beside the first. In percent; by kind of question as EM,
greedy and sampled.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

from mujica_jax import metrics
from mujica_jax.agents.agent import Attempt, EnginePolicy, run_episodes
from mujica_jax.errors import UserError
from mujica_jax.eval import command_line, find_checkpoint
from mujica_jax.methods.parts import make_agent, make_reward
from mujica_jax.methods.setup import build_task
from mujica_jax.runtime.compilation_cache import use_compilation_cache
from mujica_jax.runtime.host_memory import keep_freed_memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("policies", nargs="+", metavar="POLICY")
    parser.add_argument("--split", default="dev", choices=["dev", "test"])
    parser.add_argument("--questions", type=int, default=1_000_000, help="at most; the first ones")
    parser.add_argument("--samples", type=int, default=8, help="a question, beside the greedy episode")
    parser.add_argument("--out", help="a file for the scores of every question, a JSON line each")
    given, flags = parser.parse_known_args()  # other flags are those of `eval`
    keep_freed_memory()
    use_compilation_cache()
    began, task = time.monotonic(), None
    scores: dict[str, dict[str, list[float]]] = {}  # of policies: of each question, by the name of the score
    for name in given.policies:
        run, _, number = name.rpartition("/")
        named = ["--checkpoint", run, "--policy", number] if number.isdecimal() else ["--adapter", name]
        asked = [*named, "--eval.split", given.split, *flags]
        try:
            arguments, config = command_line(asked)
            config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, questions=given.questions))
            policy = find_checkpoint(arguments)
            task = task or build_task(config, learns=False)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        tokenizer, generator = policy.open(config)
        questions = task.questions(given.split)[: given.questions]
        attempts = [
            Attempt(question=question, number=sample, seed=config.seed, temperature=temperature)
            for question in questions
            for sample, temperature in ((0, 0.0), *((n, config.eval.temperature) for n in range(given.samples)))
        ]
        played = asyncio.run(
            run_episodes(
                make_agent(config.agent, tokenizer),
                attempts,
                task.environment,
                EnginePolicy(generator),
                reward=make_reward(config, task.rule).at(policy.version),
                concurrency=policy.concurrency(config),
            )
        )
        found = [
            metrics.score(trajectory.final_answer, attempt.question.answers, task.rule)
            for attempt, trajectory in zip(attempts, played, strict=True)
        ]
        groups = [found[at : at + given.samples + 1] for at in range(0, len(found), given.samples + 1)]
        scores[name] = {
            "em": [greedy.em for greedy, *_ in groups],
            "f1": [greedy.f1 for greedy, *_ in groups],
            "em_sampled": [sum(one.em for one in drawn) / len(drawn) for _, *drawn in groups],
            "f1_sampled": [sum(one.f1 for one in drawn) / len(drawn) for _, *drawn in groups],
        }
        if given.out:
            rows = (
                {"id": question.id, "kind": question.kind}
                | {of: {score: values[place] for score, values in found.items()} for of, found in scores.items()}
                for place, question in enumerate(questions)
            )
            Path(given.out).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    first = scores[given.policies[0]]
    kinds = defaultdict(list)
    for place, question in enumerate(questions):
        kinds[question.kind or "other"].append(place)
    result = {"split": given.split, "questions": len(questions), "samples": given.samples, "policies": {}}
    for name, of_policy in scores.items():
        row = {
            score: _rounded(100 * sum(values) / len(values), metrics.bootstrap_interval(values))
            for score, values in of_policy.items()
        }
        if of_policy is not first:
            row["beside the first"] = {
                score: _rounded(*metrics.paired_bootstrap(first[score], values)[:2])
                for score, values in of_policy.items()
            }
        row["by_kind"] = {
            kind: {
                score: round(100 * sum(of_policy[score][at] for at in places) / len(places), 1)
                for score in ("em", "em_sampled")
            }
            | {"questions": len(places)}
            for kind, places in sorted(kinds.items())
        }
        result["policies"][name] = row
    print(json.dumps(result))
    return 0


def _rounded(mean: float, interval: tuple[float, float]) -> list[float]:
    return [round(number, 1) for number in (mean, *interval)]


if __name__ == "__main__":
    raise SystemExit(main())
