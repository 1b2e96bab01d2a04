"""The papers' claims on the tiny world, in shape: the runs, and the page docs/lab/claims.md that they
give.

    python benchmarks/claims.py run [--runs DIR] [--only NAME ...] [--seeds 0 1 2] [--data DIR]
    python benchmarks/claims.py write [--runs DIR] [--page docs/lab/claims.md]

`run` starts `python -m mujica_jax.train` for each experiment and seed, one after the other; one
that is finished is left as it is, and a killed one goes on; under `taskset -c 0`, and `-c 1` with
other seeds, each has a core of its own. Methods that begin with the same policy share the run that
made it: `start` names it. Those on 2WikiMultihopQA's passages, `text-...`, take hours, run with
--only and `--seeds 0`, and read the data set's folder, --data. `write` makes the page of the runs
that are finished, with its pictures; a table without one stays as it is on the page, or is left
out. A cell is the median over the seeds with the least and the most behind it.

Minutes are those of the phases after the start: sampling, scoring, learning and saving, without
evaluations and compilation. Tokens are those that the engine generated for training.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

TIME_LEFT_OUT = ("evaluating_seconds", "compiling_seconds", "total_seconds")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One row of a table: a configuration, its flags, and the run that it begins with.

    `start` None: its own warm-up.
    """

    config: str
    flags: str = ""
    start: str | None = None
    worker: bool = False  # one process learns on the first core, another one samples on the second
    text: bool = False  # with SmolLM2 on real text
    # Trains nothing: the policy of the first run plans, the policy of the second one works.
    # NAME@start is the policy that the run began with.
    roles: tuple[str, str] | None = None


START = "--method.rounds 0"
GRPO = "--method.rounds 24 --method.rounds-per-evaluation 6"
WORKER = "--sampling.workers external --method.rounds 4 --sampling.questions-per-round 200"
GRPO_ROWS = ("round 6", "round 12", "round 24")
# Right trajectories that every row of EviPath learns, and questions that are enough for the mode
# that fails most.
EVIPATH_DATA = (
    "--method.trajectories 400 --sampling.questions-per-round 3000 --sampling.questions-per-shard "
    "250"
)
# for runs that begin with a taught policy
EVIPATH_TAUGHT = f"{EVIPATH_DATA} --method.teacher-prompt brief"
AT_START = "@start"
STAGED = "tiny_world_dapo_staged"
EVIPATH = "tiny_world_evipath"
DECEX = "tiny_world_decex"
STAGED_PARTS = ("stage-one", "stage-two", "search", "format", "answer")
EXPERIMENTS = {
    "start": Experiment("tiny_world", START),
    "mygo": Experiment("tiny_world", "", "start"),
    "mygo-asynchronous": Experiment("tiny_world", "--method.schedule asynchronous", "start"),
    "mygo-offline": Experiment("tiny_world", "--method.schedule offline", "start"),
    "mygo-fixed": Experiment(
        "tiny_world", "--method.threshold fixed --method.initial-threshold 1.0", "start"
    ),
    "mygo-none": Experiment("tiny_world", "--method.threshold fixed", "start"),
    "grpo": Experiment("tiny_world_grpo", GRPO, "start"),
    "dapo": Experiment("tiny_world_grpo", f"--method.kind dapo {GRPO}", "start"),
    "worker-online": Experiment("tiny_world", WORKER, "start", worker=True),
    "worker-asynchronous": Experiment(
        "tiny_world", f"{WORKER} --method.schedule asynchronous", "start", worker=True
    ),
    # Longer conversations, in as many tokens a step.
    "no-split": Experiment(
        "tiny_world",
        "--agent.split False --agent.max-trajectory-tokens 704 --trainer.sequence-length 704 "
        "--trainer.batch-size 3",
    ),
    "no-parallel": Experiment(
        "tiny_world",
        "--agent.parallel False --agent.max-iterations 6 --agent.max-trajectory-tokens 360 "
        "--trainer.sequence-length 360 --trainer.batch-size 6",
    ),
    "staged-start": Experiment(STAGED, START),
    "staged": Experiment(STAGED, "", "staged-start"),
    **{
        f"staged-without-{part}": Experiment(STAGED, f"--staged.{part} False", "staged-start")
        for part in STAGED_PARTS
    },
    "staged-unified": Experiment(STAGED, "--staged.unified True", "staged-start"),
    # The warm-up of this run is the teacher of all others too: it knows the agent's prompts and the
    # teacher's.
    "evipath": Experiment(EVIPATH, EVIPATH_DATA),
    "evipath-deductive": Experiment(
        EVIPATH, f"{EVIPATH_TAUGHT} --method.mode deductive", "evipath"
    ),
    "evipath-scripted": Experiment(EVIPATH, f"{EVIPATH_DATA} --method.teacher scripted", "evipath"),
    "evipath-planner": Experiment(EVIPATH, f"{EVIPATH_TAUGHT} --method.tune planner", "evipath"),
    "evipath-executor": Experiment(EVIPATH, f"{EVIPATH_TAUGHT} --method.tune executor", "evipath"),
    "evipath-two-models": Experiment(EVIPATH, roles=("evipath-planner", "evipath-executor")),
    "evipath-planner-beside": Experiment(EVIPATH, roles=("evipath-planner", f"evipath{AT_START}")),
    "evipath-executor-beside": Experiment(
        EVIPATH, roles=(f"evipath{AT_START}", "evipath-executor")
    ),
    "decex-start": Experiment(
        DECEX, f"--method.kind grpo {START} --method.rounds-per-evaluation 1 --method.group-size 2"
    ),
    "decex": Experiment(DECEX, "", "decex-start"),
    # Only the leaves of an unpruned tree differ in their searches.
    "decex-least": Experiment(
        DECEX, "--method.expansion unpruned --method.retrievals least", "decex-start"
    ),
    "decex-dpo": Experiment(DECEX, "--method.sft False", "decex-start"),
    "decex-decisions": Experiment(DECEX, "--method.execution-pairs False", "decex-start"),
    "decex-executions": Experiment(DECEX, "--method.decision-pairs False", "decex-start"),
    "decex-unpruned": Experiment(DECEX, "--method.expansion unpruned", "decex-start"),
}
# Shortened to what a core with AMX instructions does in about 45 minutes.
_TEXT = {
    "grpo": "--adapter adapters/two_wiki_text_smollm2 --warmup.steps 0 --method.rounds 2 "
    "--method.rounds-per-evaluation 2 --sampling.questions-per-round 12 "
    "--sampling.questions-per-shard 12 --method.group-size 4",
    "dapo_staged": "--warmup.steps 40 --method.rounds 4 --method.rounds-per-evaluation 2 "
    "--staged.stage-two-round 3 --sampling.questions-per-round 8 --sampling.questions-per-shard 8 "
    "--method.group-size 4",
    "evipath": "--sampling.questions-per-round 60 --sampling.questions-per-shard 60",
    "decex": "--warmup.steps 30 --sampling.questions-per-round 8 --sampling.questions-per-shard 8",
}
for _name, _flags in _TEXT.items():
    _flags = (
        f"--init smollm2 {_flags} --trainer.dtype bfloat16 --engine.max-num-seqs 24 --eval.split "
        "test --eval.questions 100"
    )
    EXPERIMENTS[f"text-{_name.replace('_', '-')}"] = Experiment(
        f"two_wiki_text_smollm2_{_name}", _flags, text=True
    )
ALONE = ("tune-", "text-")  # experiments that run by name
# Rates to choose among, on dev with seed 0: `run --only tune-mygo-0.001 ... --seeds 0`. GRPO's are
# compared after eight rounds.
TUNING = {"mygo": "", "grpo": "--method.rounds 8 --method.rounds-per-evaluation 4"}
TUNED = {
    "mygo": ("0.0005", "0.001", "0.002"),
    "grpo": ("0.000125", "0.00025", "0.0005", "0.001"),
}
for _name, _rates in TUNED.items():
    for _rate in _rates:
        _flags = f"{TUNING[_name]} --method.learning-rate {_rate} --eval.split dev"
        EXPERIMENTS[f"tune-{_name}-{_rate}"] = dataclasses.replace(EXPERIMENTS[_name], flags=_flags)


INTRODUCTION = """# The papers' claims, on the tiny world

Do the methods do here what their papers say of them? In shape: what is compared is the order and the size of a
difference, never a score with a paper's. `python benchmarks/claims.py run` trains what is below, on {machine}, and
goes on where it was killed; `write` makes the tables, and the end of the page has each run's command and revision.
Methods that are compared begin with the same policy of the same seed. Scores are percent on test questions about
entities that no training text names, but for what is common knowledge; a cell is the median over seeds (the least to
the most). Minutes are those of sampling, scoring, learning and saving, without the start, evaluations and
compilation, with which they are "in all". Searches are counted in greedy evaluation where nothing else is said."""
VERDICTS = "## Verdicts"
MYGO = "MyGO"
PARTS = "Planner and workers, and asking at once"
TREES = "DecEx-RAG"
GROUPS = "MyGO beside GRPO and DAPO"
SECTIONS = {  # of each table: its heading, and what stands before it
    "mygo": (
        MYGO,
        "The paper: MyGO beats its warm-up, offline as well as online, and the threshold matters. Of two rounds the\n"
        "asynchronous and the offline schedule sample the second by the same policy. The offline row was measured\n"
        "while K rose offline too; now it stays fixed.",
    ),
    "workers": (
        MYGO,
        "One core learns and evaluates, another one samples: four rounds of 200 questions.",
    ),
    "grpo": (
        GROUPS,
        "The paper: the quality of GRPO with 94% fewer trajectories and 74% less time. Each has the rate that\n"
        "was best on dev (below; DAPO has GRPO's). MyGO samples at temperature 0.8, the others at 1.",
    ),
    "crossing": (
        GROUPS,
        "What it took until sampled F1 reached that of MyGO's last policy, on straight lines:",
    ),
    "rates": (GROUPS, "Rates on dev, with seed 0; GRPO after eight rounds:"),
    "ablations": (
        PARTS,
        "One agent reads by itself (`agent.split False`); one search a turn (`agent.parallel False`).",
    ),
    "staged": (
        "Staged rewards",
        "The paper: stage one raises accuracy and searching, stage two lowers the searches. About half of the\n"
        "questions are about common knowledge ([experiments.md](experiments.md)).",
    ),
    "evipath": (
        "EviPath",
        "The paper: what is written backwards teaches more (table 4), the planner needs tuning more than the executor\n"
        "(table 1), and two tuned models are about as good as one (table 5). The teacher of both modes is the policy\n"
        "that the run begins with, and each row learns 400 right trajectories for two epochs. The scripted row has no\n"
        "language model as teacher: it replays demonstrations without mistakes.",
    ),
    "trees": (
        TREES,
        "The paper: 134.9 s a question with pruning, 743.2 s without, and chains as good. These runs are of a world\n"
        "in which a fifth of the questions was about common knowledge, and documents did not say what is unknown.",
    ),
    "decex": (
        TREES,
        "The paper: SFT and DPO beat either alone. SFT learns a chain a question, DPO pairs.",
    ),
    "text": (
        "Real text, with SmolLM2",
        "Methods over 2WikiMultihopQA's passages, each configuration's run shortened to what a core does in about\n"
        "an hour (Commands), one seed, on 100 questions of test, with 95% intervals. Nothing was chosen by it.\n"
        "Tokens are those that a phase's trajectories took through the model, minutes all of the phase, with its\n"
        "evaluation.",
    ),
}


def folder(runs: Path, name: str, seed: int) -> Path:
    return runs / f"{name}-{seed}"


def command(runs: Path, name: str, seed: int, data: str = "DIR") -> list[str]:
    """Return what trains an experiment, or evaluates it, as a user would type it."""
    experiment = EXPERIMENTS[name]
    if experiment.roles is not None:
        planner, worker = (
            folder(runs, role.removesuffix(AT_START), seed) for role in experiment.roles
        )
        words = ["python", "-m", "mujica_jax.eval", "--checkpoint", str(planner)]
        if experiment.roles[0].endswith(AT_START):
            words += ["--policy", "0"]
        if experiment.roles[1].endswith(AT_START):
            worker = worker / "policies/000000/model"
        return [*words, "--worker", str(worker), "--out", str(folder(runs, name, seed))]
    words = [
        "python",
        "-m",
        "mujica_jax.train",
        f"configs/{experiment.config}.py",
        *experiment.flags.split(),
        "--seed",
        str(seed),
    ]
    if experiment.start is not None:
        policy = folder(runs, experiment.start, seed) / "policies/000000/model"
        words += ["--init", str(policy), "--pretraining.steps", "0", "--warmup.steps", "0"]
    if experiment.text:
        words += ["--task.data-dir", data]
    return [*words, "--run", str(folder(runs, name, seed))]


def result(name: str, place: Path) -> Path:
    """Return the file that a finished experiment leaves."""
    return place / (
        "summary.json" if EXPERIMENTS[name].roles is None else "tiny_world-graph-evipath-test.json"
    )


def train(runs: Path, names: Sequence[str], seeds: Sequence[int], data: str) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    for seed, name in itertools.product(seeds, names):
        place = folder(runs, name, seed)
        if result(name, place).exists():
            continue
        words = command(runs, name, seed, data)
        print(" ".join(words), flush=True)
        with open(f"{place}.log", "ab") as log:
            if not EXPERIMENTS[name].worker:
                subprocess.run([sys.executable, *words[1:]], check=True, stdout=log, stderr=log)
                continue
            worker = [sys.executable, "-m", "mujica_jax.sample", "--run", str(place)]
            with _on_core(0, [sys.executable, *words[1:]], log) as trainer:
                while not (place / "config.json").exists() and trainer.poll() is None:
                    time.sleep(1)
                with _on_core(1, worker, log) as sampler:
                    if trainer.wait() or sampler.wait():
                        sampler.terminate()
                        raise SystemExit(f"{name} failed: {place}.log says why")


def _on_core(core: int, words: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["taskset", "-c", str(core), *words], stdout=log, stderr=log)


@dataclasses.dataclass(frozen=True)
class Point:
    """The scores of a policy, and what it took since the start."""

    phase: str
    scores: dict[str, Any]  # a phase of summary.json
    trajectories: int
    learnt: int  # of them
    tokens: int
    minutes: float
    wall_minutes: float  # with compilation and evaluations

    @property
    def file(self) -> str:
        """The file of the point's whole evaluation, in the run directory."""
        return f"eval/{self.phase.replace(' ', '-')}.json"


def points(run: Path) -> list[Point]:
    """Return the start and every phase after it.

    The control, which samples nothing, is left out.
    """
    phases = json.loads((run / "summary.json").read_text())["phases"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [line for line in lines if line["phase"] == "time"]
    curve: list[Point] = []
    last = 0
    measured_phases = [phase for phase in phases if phase["name"] != "control"]
    for phase, spent in zip(measured_phases, times, strict=True):
        if not curve:
            curve.append(Point(phase["name"], phase, 0, 0, 0, 0.0, 0.0))
            continue
        of_phase = [
            line
            for line in lines
            if line["phase"] == "sampling" and last < line["step"] <= spent["step"]
        ]
        seconds = sum(
            v for key, v in spent.items() if key.endswith("_seconds") and key not in TIME_LEFT_OUT
        )
        before = curve[-1]
        last = spent["step"]
        curve.append(
            Point(
                phase=phase["name"],
                scores=phase,
                trajectories=before.trajectories + phase["trajectories"],
                learnt=before.learnt + phase["accepted"],
                tokens=before.tokens + sum(line["generated_tokens"] for line in of_phase),
                minutes=before.minutes + seconds / 60,
                wall_minutes=before.wall_minutes + spent["total_seconds"] / 60,
            )
        )
    return curve


def _of_roles(file: Path, tuned: Sequence[Point]) -> Point:
    """Return the scores of two models, with what it took to tune the tuned ones.

    Both learn from the same trajectories.
    """
    results = json.loads(file.read_text())
    scores = {key: results["greedy"][key] for key in ("em", "searches")}
    return dataclasses.replace(
        tuned[0],
        scores=scores | {f"{key}_sampled": results["sampled"][key] for key in ("em", "f1")},
        tokens=sum(point.tokens for point in tuned),
        minutes=sum(point.minutes for point in tuned),
        wall_minutes=sum(point.wall_minutes for point in tuned),
    )


def cell(values: Sequence[float], form: str = ".1f") -> str:
    middle = format(statistics.median(values), form)
    return (
        middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"
    )


def to_reach(
    curve: Sequence[Point], level: float, measure: Callable[[Point], float]
) -> float | None:
    """Return what it took until sampled F1 first reached `level`.

    Between two evaluations the curve is a straight line. None: it never did.
    """
    for before, after in itertools.pairwise(curve):
        low = before.scores["f1_sampled"]
        high = after.scores["f1_sampled"]
        if low >= level:
            return measure(before)
        if high >= level:
            share = (level - low) / (high - low)
            return measure(before) + share * (measure(after) - measure(before))
    return None


class Runs:
    """The finished runs of a folder, by experiment."""

    def __init__(self, place: Path, seeds: Sequence[int]) -> None:
        self.curves: dict[str, dict[int, list[Point]]] = {}
        self.revisions: dict[str, set[str]] = {}
        self.place = place
        for name, seed in itertools.product(
            (name for name in EXPERIMENTS if "tune-" not in name), seeds
        ):
            run = folder(place, name, seed)
            roles = EXPERIMENTS[name].roles
            if not result(name, run).exists():
                continue
            if roles is None:
                curve = points(run)
            else:  # with what it took to tune one of the two models, or both
                tuned = [role for role in roles if not role.endswith(AT_START)]
                curve = [
                    _of_roles(result(name, run), [self.curves[role][seed][-1] for role in tuned])
                ]
                run = folder(place, tuned[0], seed)
            self.curves.setdefault(name, {})[seed] = curve
            revision = json.loads((run / "config.json").read_text())["git_revision"][:7]
            self.revisions.setdefault(name, set()).add(revision)

    def row(self, name: str, label: str, phase: int | str, sampled_searches: bool) -> str | None:
        points_of_seeds = [_phase(curve, phase) for curve in self.curves.get(name, {}).values()]
        if not points_of_seeds:
            return None
        cells = [label, str(len(points_of_seeds))]
        for key in ("em", "em_sampled", "f1_sampled"):
            cells.append(cell([point.scores[key] for point in points_of_seeds]))
        cells.append(cell([point.scores["searches"] for point in points_of_seeds], ".2f"))
        if sampled_searches:
            files = [
                folder(self.place, name, seed) / point.file
                for seed, point in zip(self.curves[name], points_of_seeds, strict=True)
            ]
            cells.append(
                cell([json.loads(file.read_text())["sampled"]["searches"] for file in files], ".2f")
            )
        cells.append(cell([point.trajectories for point in points_of_seeds], ",.0f"))
        cells.append(cell([point.learnt for point in points_of_seeds], ",.0f"))
        cells.append(cell([point.minutes for point in points_of_seeds]))
        cells.append(cell([point.wall_minutes for point in points_of_seeds]))
        return f"| {' | '.join(cells)} |"

    def table(
        self, *rows: tuple[str, str] | tuple[str, str, str], sampled_searches: bool = False
    ) -> str:
        """Return a table of EM and F1, greedy and sampled, and what they took.

        A row is a run, its label and the name of the phase that is meant, if that is not the last
        one.
        """
        scores = ["EM", "EM sampled", "F1 sampled", "searches"]
        if sampled_searches:
            scores.append("searches sampled")
        heads = ("", "seeds", *scores, "trajectories", "learnt", "minutes", "in all")
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        cells = [
            self.row(name, label, phase[0] if phase else -1, sampled_searches)
            for name, label, *phase in rows
        ]
        return "\n".join([*lines, *(row for row in cells if row is not None)])

    def crossing(self) -> str:
        """Return what MyGO and the group methods took to MyGO's final level, seed by seed."""
        measures: dict[str, Callable[[Point], float]] = {
            "trajectories": lambda point: point.trajectories,
            "generated tokens": lambda point: point.tokens,
            "minutes": lambda point: point.minutes,
        }
        lines = [
            "| seed | F1 sampled | method | trajectories | generated tokens | minutes |",
            "|---" * 6 + "|",
        ]
        for seed, mygo in self.curves.get("mygo", {}).items():
            level = mygo[-1].scores["f1_sampled"]
            for name in ("mygo", "grpo", "dapo"):
                curve = self.curves.get(name, {}).get(seed)
                if curve is None or not {"grpo", "dapo"} & self.curves.keys():
                    continue
                costs = {key: to_reach(curve, level, measure) for key, measure in measures.items()}
                own = {key: measure(mygo[-1]) for key, measure in measures.items()}
                cells = [str(seed), f"{level:.1f}", name]
                for key, value in costs.items():
                    form = ".1f" if key == "minutes" else ",.0f"
                    if name == "mygo":
                        cells.append(format(own[key], form))
                    elif value is None:
                        best = max(point.scores["f1_sampled"] for point in curve)
                        end = measures[key](curve[-1])
                        cells.append(f"not within {end:{form}}, best {best:.1f}")
                    else:
                        cells.append(f"{value:{form}}, {value / own[key]:.2f}x")
                lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def rates(self) -> str:
        """Return a table of the last scores of the runs that compare rates."""
        lines = ["| method | rate | EM sampled | F1 sampled | trajectories |", "|---" * 5 + "|"]
        for name, rates in TUNED.items():
            for rate in rates:
                run = folder(self.place, f"tune-{name}-{rate}", 0)
                if not (run / "summary.json").exists():
                    continue
                last = points(run)[-1]
                scores = [f"{last.scores[key]:.1f}" for key in ("em_sampled", "f1_sampled")]
                cells = [name, rate, *scores, f"{last.trajectories:,}"]
                lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def context(self) -> str:
        """Return a table of tokens that a call of the engine reads.

        The tokens are those of the last phase's evaluation.
        """
        lines = [
            "| | EM | EM sampled | context a call, tokens | calls a question |",
            "|---" * 5 + "|",
        ]
        labels = {
            "mygo": "planner and workers, parallel",
            "no-split": "one agent",
            "no-parallel": "one at a time",
        }
        for name, label in labels.items():
            of_seeds = self.curves.get(name, {})
            if not of_seeds:
                continue
            contexts = []
            calls = []
            for seed, curve in of_seeds.items():
                line = _line(folder(self.place, name, seed), "evaluating")
                contexts.append(line["prompt_tokens"] / line["requests"])
                calls.append(line["requests"] / (2 * curve[-1].scores["questions"]))
            last = [curve[-1].scores for curve in of_seeds.values()]
            em = cell([scores["em"] for scores in last])
            em_sampled = cell([scores["em_sampled"] for scores in last])
            cells = [label, em, em_sampled]
            lines.append(f"| {' | '.join([*cells, cell(contexts, '.0f'), cell(calls)])} |")
        return "\n".join(lines)

    def trees(self) -> str:
        """Return a table of what a search tree took and found: means over its questions."""
        names = {
            "seconds": ".2f",
            "generated_tokens": ",.0f",
            "nodes": ".1f",
            "best_reward": ".2f",
            "leaf_share": ".2f",
            "retrievals": ".2f",
        }
        lines = [f"| | {' | '.join(names).replace('_', ' ')} |", "|---" * (len(names) + 1) + "|"]
        for name, label in {"decex": "pruned", "decex-unpruned": "unpruned"}.items():
            lines_of_trees = [
                _line(folder(self.place, name, seed), "decex") for seed in self.curves.get(name, {})
            ]
            if lines_of_trees:
                cells = []
                for key, form in names.items():
                    cells.append(cell([line[key] for line in lines_of_trees], form))
                lines.append(f"| {' | '.join([label, *cells])} |")
        return "\n".join(lines)

    def text(self) -> str:
        """Return a table of every phase of every method on real text, with intervals."""
        heads = ("", "EM", "", "EM sampled", "", "F1", "F1 sampled", "searches", "sampled")
        lines = [
            f"| {' | '.join((*heads, 'trajectories', 'learnt', 'tokens', 'minutes'))} |",
            "|---" * 13 + "|",
        ]
        for name in (f"text-{method.replace('_', '-')}" for method in _TEXT):
            for point in itertools.chain(*self.curves.get(name, {}).values()):
                results = json.loads((folder(self.place, name, 0) / point.file).read_text())
                cells = [f"{name.removeprefix('text-')}: {point.phase}"]
                for kind in ("greedy", "sampled"):
                    low, high = results[kind]["em_interval"]
                    cells += [f"{results[kind]['em']:.1f}", f"{low:.1f}-{high:.1f}"]
                for key, form in (("f1", ".1f"), ("searches", ".2f")):
                    cells += [format(results[kind][key], form) for kind in ("greedy", "sampled")]
                scores = point.scores
                cells += [f"{scores[key]:,}" for key in ("trajectories", "accepted", "tokens")]
                lines.append(f"| {' | '.join([*cells, format(scores['seconds'] / 60, '.0f')])} |")
        return "\n".join(lines)

    def tables(self) -> dict[str, str]:
        return {
            "mygo": self.table(
                ("start", "warm-up"),
                ("mygo", "MyGO online"),
                ("mygo-asynchronous", "asynchronous"),
                ("mygo-offline", "offline"),
                ("mygo-fixed", "K fixed at 1"),
                ("mygo-none", "K fixed at 0 (rejection sampling)"),
            ),
            "workers": self.table(
                ("worker-online", "online"), ("worker-asynchronous", "asynchronous")
            ),
            "grpo": self.table(
                ("start", "warm-up"),
                *(
                    (name, f"{name.upper()}, {phase}", phase)
                    for name in ("grpo", "dapo")
                    for phase in GRPO_ROWS
                ),
            ),
            "crossing": self.crossing(),
            "rates": self.rates(),
            "ablations": self.context(),
            "staged": self.table(
                ("staged-start", "warm-up"),
                ("staged", "end of stage one", "round 4"),
                ("staged", "end of stage two"),
                *(
                    (f"staged-without-{part}", f"without {part.replace('-', ' ')}")
                    for part in STAGED_PARTS
                ),
                ("staged-unified", "without stages, unified (table 2)"),
                sampled_searches=True,
            ),
            "evipath": self.table(
                ("evipath", "start", "warm-up"),
                ("evipath", "abductive"),
                ("evipath-deductive", "deductive, the same teacher"),
                ("evipath-scripted", "demonstrations of the script"),
                ("evipath-two-models", "abductive, planner and executor as two models"),
                ("evipath-planner-beside", "abductive, planner alone, the start works"),
                ("evipath-executor-beside", "abductive, executor alone, the start plans"),
                ("evipath-planner", "planner alone, works too"),
                ("evipath-executor", "executor alone, plans too"),
            ),
            "decex": self.table(
                ("decex-start", "warm-up"),
                ("decex", "SFT", "sft"),
                ("decex-least", "SFT of unpruned trees, least searches", "sft"),
                ("decex", "SFT, then DPO"),
                ("decex-dpo", "DPO alone"),
                ("decex-decisions", "SFT, then DPO, decision pairs alone"),
                ("decex-executions", "SFT, then DPO, execution pairs alone"),
                ("decex-unpruned", "SFT of unpruned trees, most searches", "sft"),
                sampled_searches=True,
            ),
            "trees": self.trees(),
            "text": self.text(),
        }

    def draw(self, x: str, measure: Callable[[Point], float], file: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        for name, colour in (("mygo", "C0"), ("grpo", "C1"), ("dapo", "C2")):
            curves = list(self.curves.get(name, {}).values())
            if not curves:
                continue
            costs = []
            medians = []
            lowest = []
            highest = []
            for points_of_seeds in zip(*curves, strict=True):
                scores = [point.scores["em_sampled"] for point in points_of_seeds]
                costs.append(statistics.median(measure(point) for point in points_of_seeds))
                medians.append(statistics.median(scores))
                lowest.append(min(scores))
                highest.append(max(scores))
            axes.plot(costs, medians, "o-", color=colour, label=name)
            axes.fill_between(costs, lowest, highest, color=colour, alpha=0.2)
        axes.set_xlabel(x)
        axes.set_ylabel("EM sampled on test, percent")
        axes.legend()
        figure.savefig(file, dpi=100)


def _line(run: Path, phase: str) -> dict[str, Any]:
    """Return the last line of this phase in metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if line["phase"] == phase)


def _phase(curve: Sequence[Point], which: int | str) -> Point:
    if isinstance(which, int):
        return curve[which]
    return next(point for point in curve if point.phase == which)


def _verdicts(blocks: Sequence[str]) -> list[str]:
    """Return the page's verdicts, which are written by hand: they weigh the tables below them."""
    if VERDICTS not in blocks:
        return []
    start = blocks.index(VERDICTS)
    others = [
        number for number, block in enumerate(blocks) if number > start and block.startswith("## ")
    ]
    return list(blocks[start : others[0]])


def write(runs: Runs, page: Path, machine: str) -> None:
    if not runs.curves:
        raise SystemExit(
            f"{runs.place} has no finished run: `python benchmarks/claims.py run` first, or check --runs"
        )
    before = page.read_text().strip().split("\n\n") if page.exists() else []
    begin = INTRODUCTION.format(machine=machine)
    heading, _, text = begin.partition("\n\n")
    parts = [heading, textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)]
    parts += _verdicts(before)
    title = ""
    tables = runs.tables()
    for name, (section, text_before) in SECTIONS.items():
        table = tables[name]
        # The table has one row, which has nothing to be compared with.
        if table.count("\n") < 3:
            if text_before not in before:
                continue
            table = before[before.index(text_before) + 1]
        if section != title:
            parts.append(f"## {section}")
        parts += [text_before, table]
        title = section
    if "mygo" in runs.curves:
        runs.draw(
            "trajectories",
            lambda point: point.trajectories,
            page.parent / "claims_trajectories.png",
        )
        runs.draw("minutes", lambda point: point.minutes, page.parent / "claims_minutes.png")
    pictures = "![EM against trajectories](claims_trajectories.png)\n![EM against minutes](claims_minutes.png)"
    if "mygo" in runs.curves or pictures in before:
        parts.append(pictures)
    rows = {line.split(" | ")[0]: line for line in before[-1].splitlines()[2:]} if before else {}
    for name, curves in runs.curves.items():
        revisions = ", ".join(sorted(runs.revisions[name]))
        words = command(Path("runs/claims"), name, min(curves))
        rows[f"| {name}"] = f"| {name} | {revisions} | `{' '.join(words)}` |"
    order = [f"| {name}" for name in EXPERIMENTS]
    lines = [
        "| run | revision | command of its first seed |",
        "|---|---|---|",
        *(rows[key] for key in order if key in rows),
    ]
    parts += ["## Commands", "\n".join(lines)]
    page.write_text("\n\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "write"))
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"))
    parser.add_argument("--only", nargs="+", choices=tuple(EXPERIMENTS), metavar="NAME")
    parser.add_argument("--data", default="DIR", help="2WikiMultihopQA's folder, for `text-...`")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--page", type=Path, default=Path("docs/lab/claims.md"))
    parser.add_argument("--machine", default="a machine that nobody named", help="said on the page")
    arguments = parser.parse_args()
    if arguments.command == "run":
        names = [name for name in EXPERIMENTS if not name.startswith(ALONE)]
        train(arguments.runs, arguments.only or names, arguments.seeds, arguments.data)
    else:
        write(Runs(arguments.runs, arguments.seeds), arguments.page, arguments.machine)


if __name__ == "__main__":
    main()
