"""Every agent over real text with SmolLM2-135M: planner and workers trained, and all of them as the
model came.

    python benchmarks/agents.py DATA OUT [--tasks two_wiki hotpotqa musique] [--models trained untrained]

DATA has the folders 2wikimultihopqa, hotpotqa and musique, whose questions for test are asked: up
to 200 of the trained policy, which has seen 2WikiMultihopQA's training questions and no other, and
40 of every other agent. HotpotQA and MuSiQue are read in the distractor setting. Each task is two
runs of `mujica_jax.eval`, whose commands are printed; tasks that are in OUT are not run again. The
table of all that is there is written to OUT/table.md and OUT/table.png.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mujica_jax.report import comparison
from mujica_jax.report.comparison import Compared

FOLDERS = {"two_wiki": "2wikimultihopqa", "hotpotqa": "hotpotqa", "musique": "musique"}
FURTHER = "single decex direct chain_of_thought rag iter_retgen ircot search_o1 react flare skr"
CONFIG = "configs/two_wiki_text_smollm2.py"
TRAINED = "--adapter adapters/two_wiki_text_smollm2 --eval.questions 200"
# Worked examples need room that the trained policy does not; with 48 slots of that length it would
# take 14 GB.
ROOM = "--agent.prompt few_shot --agent.max-trajectory-tokens 2048 --engine.slots 16"
UNTRAINED = f"{ROOM} --eval.questions 40 --agents {FURTHER}"
RUNS = {"trained": TRAINED, "untrained": UNTRAINED}


def command(data: Path, out: Path, task: str, name: str) -> list[str]:
    words = ["-m", "mujica_jax.eval", CONFIG, "--init", "smollm2"]
    words += [] if task == "two_wiki" else ["--task.kind", task, "--task.setting", "distractor"]
    words += ["--task.data-dir", str(data / FOLDERS[task]), *RUNS[name].split()]
    return [*words, "--eval.split", "test", "--sampled", "False", "--out", str(out / task / name)]


def run(data: Path, out: Path, tasks: list[str], models: list[str]) -> None:
    for task, name in itertools.product(tasks, models):
        if not _results(out, task, name):
            words = command(data, out, task, name)
            print("python", *words, flush=True)
            subprocess.run([sys.executable, *words], check=True)


def _results(out: Path, task: str, name: str) -> list[Path]:
    """Of an evaluation that is whole: one of several agents writes its comparison last."""
    place = out / task / name
    found = [
        path for path in sorted(place.glob("*-test.json")) if not path.name.startswith("comparison")
    ]
    return (
        found if "--agents" not in RUNS[name] or (place / "comparison-test.json").exists() else []
    )


def compared(out: Path) -> Iterator[Compared]:
    for task in FOLDERS:
        for name in RUNS:
            of_run = []
            for path in _results(out, task, name):
                result = json.loads(path.read_text())
                lines = path.with_suffix(".predictions.jsonl").read_text().splitlines()
                em = tuple(json.loads(line)["em"] for line in lines)
                agent = (
                    f"{result['agent']}, {name}" if result["agent"] == "mujica" else result["agent"]
                )
                of_run.append(
                    Compared(task=result["task"], agent=agent, summary=result["greedy"], em=em)
                )
            order = ["mujica", *FURTHER.split()]
            yield from sorted(of_run, key=lambda one: order.index(one.agent.split(",")[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=list(FOLDERS), default=list(FOLDERS))
    parser.add_argument("--models", nargs="+", choices=list(RUNS), default=list(RUNS))
    given = parser.parse_args()
    run(given.data, given.out, given.tasks, given.models)
    found = comparison.rows(list(compared(given.out)))
    (given.out / "table.md").write_text(comparison.markdown(found))
    (given.out / "table.png").write_bytes(comparison.draw(found))
    print(comparison.markdown(found), end="")


if __name__ == "__main__":
    main()
