"""Compare the methods on the tiny world as their papers do, and write docs/lab/claims.md.

    python benchmarks/claims.py run [--runs DIR] [--only NAME ...] [--seeds 0 1 2] [--data DIR]
    python benchmarks/claims.py write [--runs DIR] [--machine NAME]

`run` starts `python -m mujica_jax.train` for each experiment and seed, one after the other. A finished
run is left as it is, and a killed run continues. To use two cores, start it twice: under `taskset -c 0`,
and under `taskset -c 1` with other seeds. Methods that begin with the same policy share the run that made
it, which is their `start`. The experiments `text-...` train SmolLM2 on 2WikiMultihopQA's passages. They
take hours, so they run only if `--only` names them, and they need the data set's folder (--data).

`write` keeps a record of each finished run in docs/lab/claims.json, and makes the page and its pictures
from the records. A table without records stays as it is on the page, or is left out.

A cell is the median over the seeds, with the least and the most in brackets. Minutes are those of
sampling, scoring, learning and saving after the start, without evaluations and compilation. Tokens are
those that the engine generated for training.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
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
        "--agent.no-split --agent.max-trajectory-tokens 704 --trainer.sequence-length 704 "
        "--trainer.batch-size 3",
    ),
    "no-parallel": Experiment(
        "tiny_world",
        "--agent.no-parallel --agent.max-iterations 6 --agent.max-trajectory-tokens 360 "
        "--trainer.sequence-length 360 --trainer.batch-size 6",
    ),
    "staged-start": Experiment(STAGED, START),
    "staged": Experiment(STAGED, "", "staged-start"),
    **{
        f"staged-without-{part}": Experiment(STAGED, f"--staged.no-{part}", "staged-start")
        for part in STAGED_PARTS
    },
    "staged-unified": Experiment(STAGED, "--staged.unified", "staged-start"),
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
    "decex-dpo": Experiment(DECEX, "--method.no-sft", "decex-start"),
    "decex-decisions": Experiment(DECEX, "--method.no-execution-pairs", "decex-start"),
    "decex-executions": Experiment(DECEX, "--method.no-decision-pairs", "decex-start"),
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


# Numbers of DecEx-RAG's trees in metrics.jsonl, means over questions, with their forms.
TREE_NUMBERS = {
    "seconds": ".2f",
    "generated_tokens": ",.0f",
    "nodes": ".1f",
    "best_reward": ".2f",
    "leaf_share": ".2f",
}

INTRODUCTION = """# The papers' claims, on the tiny world

This page tests on the tiny world what the papers say about their methods. It compares the order and the size of
differences. The scores themselves cannot be compared with those of a paper.

- `python benchmarks/claims.py run` trains the runs, and `python benchmarks/claims.py write` makes the tables. The last
  table has the command, machine and revision of each run.
- Methods that are compared begin with the same policy, for each seed.
- Scores are percent on test questions about entities that no training text names. Questions about common knowledge are
  the exception.
- A cell is the median over the seeds, with the least and the most in brackets.
- Minutes count sampling, scoring, learning and saving. They leave out the start, evaluations and compilation."""
VERDICTS = "## Verdicts"
PICTURES = (
    "![EM against trajectories](claims_trajectories.png)\n![EM against minutes](claims_minutes.png)"
)
MYGO = "MyGO"
PARTS = "Planner and workers, and asking at once"
TREES = "DecEx-RAG"
GROUPS = "MyGO beside GRPO and DAPO"
SECTIONS = {  # of each table: its heading, and what stands before it
    "mygo": (
        MYGO,
        "There are two rounds. The asynchronous and the offline schedule sample the second round with the policy of\n"
        "the first.",
    ),
    "workers": (
        MYGO,
        "One core learns and evaluates while another one samples: four rounds of 200 questions.",
    ),
    "grpo": (
        GROUPS,
        "Each method has the learning rate that was best on dev (table below; DAPO has GRPO's). MyGO samples at\n"
        "temperature 0.8, GRPO and DAPO at 1.",
    ),
    "crossing": (
        GROUPS,
        "This is what each method took until its sampled F1 reached that of MyGO's last policy. Between evaluations\n"
        "the curve is taken as a straight line.",
    ),
    "rates": (
        GROUPS,
        "Learning rates were compared on dev with seed 0, GRPO's after eight rounds.",
    ),
    "ablations": (
        PARTS,
        "One agent reads by itself (`agent.split False`). With one search a turn the planner cannot ask in parallel\n"
        "(`agent.parallel False`).",
    ),
    "staged": (
        "Staged rewards",
        "About half of the questions are about common knowledge ([experiments.md](experiments.md)).",
    ),
    "evipath": (
        "EviPath",
        "The teacher of both modes is the policy that the run begins with. Each row learns 400 right trajectories for\n"
        "two epochs. The scripted row has no language model as teacher: it replays demonstrations without mistakes.",
    ),
    "trees": (
        TREES,
        "The numbers are means over the questions for which a tree was grown.",
    ),
    "decex": (
        TREES,
        "SFT learns one chain a question. DPO learns pairs of decisions and of executions.",
    ),
    "text": (
        "Real text, with SmolLM2",
        "Methods over 2WikiMultihopQA's passages, with one seed, on 100 questions of test, with 95% intervals. Each\n"
        "run is shortened to what one core does in about an hour. Nothing was chosen by these numbers.",
    ),
}


def folder(runs: Path, name: str, seed: int) -> Path:
    """Return the run directory of an experiment."""
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
    """Run each experiment with each seed, if it has no result yet."""
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
    """The scores of a policy on the test questions, and what it took since the start of the run."""

    phase: str
    scores: dict[str, Any]  # percent: em, f1, em_sampled, f1_sampled; also searches, questions
    sampled_searches: float  # a question, in sampled evaluation
    trajectories: int
    learnt: int  # of them
    tokens: int  # generated for training
    minutes: float  # without evaluations and compilation
    wall_minutes: float  # with them


@dataclasses.dataclass(frozen=True)
class Record:
    """What is kept of a finished run: `docs/lab/claims.json` holds these."""

    machine: str
    revision: str
    points: list[Point]  # the start and every phase after it
    # The last lines of metrics.jsonl about evaluation and about DecEx-RAG's trees, if there are any.
    evaluating: dict[str, float]
    trees: dict[str, float]


def read_record(runs: Path, name: str, seed: int, machine: str) -> Record:
    """Return the record of a finished run."""
    roles = EXPERIMENTS[name].roles
    if roles is not None:
        return _record_of_roles(runs, name, seed, machine)
    run = folder(runs, name, seed)
    return Record(
        machine=machine,
        revision=_revision(run),
        points=points(run),
        evaluating=_numbers(run, "evaluating", ("prompt_tokens", "requests")),
        trees=_numbers(run, "decex", tuple(TREE_NUMBERS)),
    )


def _record_of_roles(runs: Path, name: str, seed: int, machine: str) -> Record:
    """Return the scores of two models as planner and worker, with what their tuning took."""
    roles = EXPERIMENTS[name].roles
    assert roles is not None
    tuned = [folder(runs, role, seed) for role in roles if not role.endswith(AT_START)]
    point = of_roles(result(name, folder(runs, name, seed)), [points(run)[-1] for run in tuned])
    return Record(machine, _revision(tuned[0]), points=[point], evaluating={}, trees={})


def of_roles(file: Path, tuned: Sequence[Point]) -> Point:
    """Return the scores of two models, with what it took to tune the tuned ones.

    Both learn from the same trajectories, so these are counted once.
    """
    results = json.loads(file.read_text())
    scores = {key: results["greedy"][key] for key in ("em", "searches")}
    sampled_scores = {f"{key}_sampled": results["sampled"][key] for key in ("em", "f1")}
    return dataclasses.replace(
        tuned[0],
        scores=scores | sampled_scores,
        sampled_searches=results["sampled"]["searches"],
        tokens=sum(point.tokens for point in tuned),
        minutes=sum(point.minutes for point in tuned),
        wall_minutes=sum(point.wall_minutes for point in tuned),
    )


def points(run: Path) -> list[Point]:
    """Return the start and every phase after it.

    The control, which samples nothing, is left out.
    """
    phases = json.loads((run / "summary.json").read_text())["phases"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [line for line in lines if line["phase"] == "time"]
    measured_phases = [phase for phase in phases if phase["name"] != "control"]

    curve: list[Point] = []
    last_step = 0
    for phase, spent in zip(measured_phases, times, strict=True):
        name = phase["name"]
        evaluation = json.loads((run / "eval" / f"{name.replace(' ', '-')}.json").read_text())
        scores = {key: phase[key] for key in ("em", "f1", "em_sampled", "f1_sampled", "searches")}
        scores["questions"] = phase["questions"]
        for kind in ("greedy", "sampled"):
            scores[f"em_interval_{kind}"] = evaluation[kind]["em_interval"]
        sampled_searches = evaluation["sampled"]["searches"]

        # The start counts nothing: what led to it is the same for every method.
        if not curve:
            curve.append(Point(name, scores, sampled_searches, 0, 0, 0, 0.0, 0.0))
            continue

        sampling_lines = [
            line
            for line in lines
            if line["phase"] == "sampling" and last_step < line["step"] <= spent["step"]
        ]
        seconds = sum(
            value
            for key, value in spent.items()
            if key.endswith("_seconds") and key not in TIME_LEFT_OUT
        )
        before = curve[-1]
        last_step = spent["step"]
        curve.append(
            Point(
                phase=name,
                scores=scores,
                sampled_searches=sampled_searches,
                trajectories=before.trajectories + phase["trajectories"],
                learnt=before.learnt + phase["accepted"],
                tokens=before.tokens + sum(line["generated_tokens"] for line in sampling_lines),
                minutes=before.minutes + seconds / 60,
                wall_minutes=before.wall_minutes + spent["total_seconds"] / 60,
            )
        )
    return curve


def _revision(run: Path) -> str:
    return json.loads((run / "config.json").read_text())["git_revision"][:7]


def _numbers(run: Path, phase: str, keys: Sequence[str]) -> dict[str, float]:
    """Return numbers of the last line of this phase in metrics.jsonl. Empty without such a line."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == phase]
    return {key: lines[-1][key] for key in keys if key in lines[-1]} if lines else {}


def collect(runs: Path, seeds: Sequence[int], machine: str, file: Path) -> None:
    """Add the records of all finished runs under `runs` to the file of records.

    A run that is already there is replaced.
    """
    records = json.loads(file.read_text()) if file.exists() else {}
    for name, seed in itertools.product(EXPERIMENTS, seeds):
        if result(name, folder(runs, name, seed)).exists():
            record = read_record(runs, name, seed, machine)
            records.setdefault(name, {})[str(seed)] = dataclasses.asdict(record)
    file.write_text(json.dumps(_rounded(records), indent=1, sort_keys=True) + "\n")


def _rounded(value: Any) -> Any:
    """Return a value of JSON with its floats rounded to four digits after the point."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def load_records(file: Path) -> dict[str, dict[int, Record]]:
    """Return the records of the file, by experiment and seed."""
    records: dict[str, dict[int, Record]] = {}
    for name, of_seeds in json.loads(file.read_text()).items():
        for seed, values in of_seeds.items():
            curve = [Point(**point) for point in values.pop("points")]
            records.setdefault(name, {})[int(seed)] = Record(points=curve, **values)
    return records


def cell(values: Sequence[float], form: str = ".1f") -> str:
    """Return the median, and behind it the least and the most if there are several values."""
    middle = format(statistics.median(values), form)
    return (
        middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"
    )


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def to_reach(
    curve: Sequence[Point], level: float, measure: Callable[[Point], float]
) -> float | None:
    """Return what it took until sampled F1 first reached `level`. None: it never did.

    Between two evaluations the curve is taken as a straight line.
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


class Tables:
    """The tables of the page. Each has at most six columns, and a row for each experiment."""

    def __init__(self, records: dict[str, dict[int, Record]]) -> None:
        self.records = records

    def curves(self, name: str) -> dict[int, list[Point]]:
        """Return the points of an experiment, by seed."""
        return {seed: record.points for seed, record in self.records.get(name, {}).items()}

    def scores(
        self, *rows: tuple[str, str] | tuple[str, str, str], with_sampled_searches: bool = False
    ) -> str:
        """Return a table of exact match, searches, trajectories and minutes.

        A row is an experiment, its label, and the name of a phase if that is not the last one.
        """
        heads = ["", "EM greedy", "EM sampled", "searches", "trajectories", "minutes"]
        if with_sampled_searches:
            heads[3] = "searches sampled"
        cells = []
        for name, label, *phase in rows:
            curves = self.curves(name).values()
            chosen = [_phase(curve, phase[0] if phase else -1) for curve in curves]
            if not chosen:
                continue
            searches = [
                point.sampled_searches if with_sampled_searches else point.scores["searches"]
                for point in chosen
            ]
            cells.append(
                (
                    label,
                    cell([point.scores["em"] for point in chosen]),
                    cell([point.scores["em_sampled"] for point in chosen]),
                    cell(searches, ".2f"),
                    cell([point.trajectories for point in chosen], ",.0f"),
                    cell([point.minutes for point in chosen]),
                )
            )
        return table_of(heads, cells)

    def crossing(self) -> str:
        """Return what MyGO and the group methods took to MyGO's final level, seed by seed."""
        measures: dict[str, Callable[[Point], float]] = {
            "trajectories": lambda point: point.trajectories,
            "generated tokens": lambda point: point.tokens,
            "minutes": lambda point: point.minutes,
        }
        rows = []
        for seed, mygo in self.curves("mygo").items():
            level = mygo[-1].scores["f1_sampled"]
            for name in ("mygo", "grpo", "dapo"):
                curve = self.curves(name).get(seed)
                if curve is None or not {"grpo", "dapo"} & self.records.keys():
                    continue
                cells = [str(seed), f"{level:.1f}", name]
                for key, measure in measures.items():
                    form = ".1f" if key == "minutes" else ",.0f"
                    cells.append(self._cost(name, curve, mygo, measure, form))
                rows.append(cells)
        heads = ("seed", "F1 sampled", "method", *measures)
        return table_of(heads, rows)

    def _cost(
        self,
        name: str,
        curve: Sequence[Point],
        mygo: Sequence[Point],
        measure: Callable[[Point], float],
        form: str,
    ) -> str:
        """Return what a method took to reach the last level of MyGO, and its ratio to MyGO's cost."""
        own = measure(mygo[-1])
        if name == "mygo":
            return format(own, form)
        cost = to_reach(curve, mygo[-1].scores["f1_sampled"], measure)
        if cost is None:
            best = max(point.scores["f1_sampled"] for point in curve)
            return f"not within {measure(curve[-1]):{form}}, best {best:.1f}"
        return f"{cost:{form}}, {cost / own:.2f}x"

    def rates(self) -> str:
        """Return a table of the last scores of the runs that compare learning rates."""
        rows = []
        for name, rates in TUNED.items():
            for rate in rates:
                for curve in self.curves(f"tune-{name}-{rate}").values():
                    last = curve[-1]
                    scores = [f"{last.scores[key]:.1f}" for key in ("em_sampled", "f1_sampled")]
                    rows.append((name, rate, *scores, f"{last.trajectories:,}"))
        return table_of(("method", "rate", "EM sampled", "F1 sampled", "trajectories"), rows)

    def context(self) -> str:
        """Return a table of the tokens that a call of the engine reads in the last evaluation."""
        labels = {
            "mygo": "planner and workers, parallel",
            "no-split": "one agent",
            "no-parallel": "one search a turn",
        }
        rows = []
        for name, label in labels.items():
            records = list(self.records.get(name, {}).values())
            if not records:
                continue
            last = [record.points[-1].scores for record in records]
            numbers = [record.evaluating for record in records]
            contexts = [line["prompt_tokens"] / line["requests"] for line in numbers]
            # A question is evaluated twice: greedily and sampled.
            calls = [
                line["requests"] / (2 * scores["questions"])
                for line, scores in zip(numbers, last, strict=True)
            ]
            rows.append(
                (
                    label,
                    cell([scores["em"] for scores in last]),
                    cell([scores["em_sampled"] for scores in last]),
                    cell(contexts, ".0f"),
                    cell(calls),
                )
            )
        heads = ("", "EM greedy", "EM sampled", "tokens of context a call", "calls a question")
        return table_of(heads, rows)

    def trees(self) -> str:
        """Return a table of what a search tree took and reached: means over its questions."""
        rows = []
        for name, label in {"decex": "pruned", "decex-unpruned": "unpruned"}.items():
            lines = [record.trees for record in self.records.get(name, {}).values()]
            if lines:
                cells = [cell([line[key] for line in lines], f) for key, f in TREE_NUMBERS.items()]
                rows.append((label, *cells))
        return table_of(("", *(key.replace("_", " ") for key in TREE_NUMBERS)), rows)

    def text(self) -> str:
        """Return a table of every phase of every method on real text, with 95% intervals."""
        rows = []
        for name in (f"text-{method.replace('_', '-')}" for method in _TEXT):
            for point in itertools.chain(*self.curves(name).values()):
                cells = [f"{name.removeprefix('text-')}: {point.phase}"]
                for key, kind in (("em", "greedy"), ("em_sampled", "sampled")):
                    low, high = point.scores[f"em_interval_{kind}"]
                    cells.append(f"{point.scores[key]:.1f} ({low:.1f} to {high:.1f})")
                cells.append(format(point.scores["searches"], ".2f"))
                cells.append(f"{point.trajectories:,}")
                cells.append(format(point.wall_minutes, ".0f"))
                rows.append(cells)
        heads = ("", "EM greedy", "EM sampled", "searches", "trajectories", "minutes in all")
        return table_of(heads, rows)

    def all(self) -> dict[str, str]:
        """Return the tables, by their names in SECTIONS."""
        return {
            "mygo": self.scores(
                ("start", "warm-up"),
                ("mygo", "MyGO online"),
                ("mygo-asynchronous", "asynchronous"),
                ("mygo-offline", "offline"),
                ("mygo-fixed", "K fixed at 1"),
                ("mygo-none", "K fixed at 0 (rejection sampling)"),
            ),
            "workers": self.scores(
                ("worker-online", "online"), ("worker-asynchronous", "asynchronous")
            ),
            "grpo": self.scores(
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
            "staged": self.scores(
                ("staged-start", "warm-up"),
                ("staged", "end of stage one", "round 4"),
                ("staged", "end of stage two"),
                *(
                    (f"staged-without-{part}", f"without {part.replace('-', ' ')}")
                    for part in STAGED_PARTS
                ),
                ("staged-unified", "without stages, unified (table 2)"),
                with_sampled_searches=True,
            ),
            "evipath": self.scores(
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
            "decex": self.scores(
                ("decex-start", "warm-up"),
                ("decex", "SFT", "sft"),
                ("decex-least", "SFT of unpruned trees, least searches", "sft"),
                ("decex", "SFT, then DPO"),
                ("decex-dpo", "DPO alone"),
                ("decex-decisions", "SFT, then DPO, decision pairs alone"),
                ("decex-executions", "SFT, then DPO, execution pairs alone"),
                ("decex-unpruned", "SFT of unpruned trees, most searches", "sft"),
                with_sampled_searches=True,
            ),
            "trees": self.trees(),
            "text": self.text(),
        }

    def draw(self, x: str, measure: Callable[[Point], float], file: Path) -> None:
        """Draw sampled EM of MyGO, GRPO and DAPO against what it took: median and range."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        for name, colour in (("mygo", "C0"), ("grpo", "C1"), ("dapo", "C2")):
            curves = list(self.curves(name).values())
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


def _phase(curve: Sequence[Point], which: int | str) -> Point:
    if isinstance(which, int):
        return curve[which]
    return next(point for point in curve if point.phase == which)


def _written_by_hand(blocks: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return what people write on the page: the verdicts, and the conclusion above each table.

    A conclusion is a block that begins with "**". It belongs to the next table's text.
    """
    verdicts: list[str] = []
    if VERDICTS in blocks:
        start = blocks.index(VERDICTS)
        later_headings = [
            number
            for number, block in enumerate(blocks)
            if number > start and block.startswith("## ")
        ]
        verdicts = list(blocks[start : later_headings[0]])
    conclusions = {
        text: block for block, text in itertools.pairwise(blocks) if block.startswith("**")
    }
    return verdicts, conclusions


def write(records: dict[str, dict[int, Record]], page: Path) -> None:
    """Write the page. A table without records stays as it is there, and so does what people wrote."""
    blocks = page.read_text().strip().split("\n\n") if page.exists() else []
    verdicts, conclusions = _written_by_hand(blocks)
    parts = [*INTRODUCTION.split("\n\n"), *verdicts]

    tables = Tables(records)
    new_tables = tables.all()
    title = ""
    for name, (section, text_before) in SECTIONS.items():
        table = new_tables[name]
        # A table of one row has nothing to be compared with.
        if table.count("\n") < 3:
            if text_before not in blocks:
                continue
            table = blocks[blocks.index(text_before) + 1]
        if section != title:
            parts.append(f"## {section}")
        if text_before in conclusions:
            parts.append(conclusions[text_before])
        parts += [text_before, table]
        title = section

    if "mygo" in records:
        tables.draw(
            "trajectories",
            lambda point: point.trajectories,
            page.parent / "claims_trajectories.png",
        )
        tables.draw("minutes", lambda point: point.minutes, page.parent / "claims_minutes.png")
    if "mygo" in records or PICTURES in blocks:
        parts.append(PICTURES)

    parts += ["## Commands", _commands(records, blocks[-1].splitlines()[2:] if blocks else [])]
    page.write_text("\n\n".join(parts) + "\n")


def _commands(records: dict[str, dict[int, Record]], lines_before: Sequence[str]) -> str:
    """Return the table of commands. A run without a record keeps its line."""
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in lines_before}
    for name, of_seeds in records.items():
        machines = ", ".join(sorted({record.machine for record in of_seeds.values()}))
        revisions = ", ".join(sorted({record.revision for record in of_seeds.values()}))
        words = " ".join(command(Path("runs/claims"), name, min(of_seeds)))
        lines[name] = f"| {name} | {len(of_seeds)} | {machines} | {revisions} | `{words}` |"
    heads = table_of(("run", "seeds", "machine", "revision", "command of its first seed"), ())
    return "\n".join([heads, *(lines[name] for name in EXPERIMENTS if name in lines)])


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
    parser.add_argument("--records", type=Path, default=Path("docs/lab/claims.json"))
    parser.add_argument("--machine", default="not said", help="the processor, for the page")
    arguments = parser.parse_args()
    if arguments.command == "run":
        names = [name for name in EXPERIMENTS if not name.startswith(ALONE)]
        train(arguments.runs, arguments.only or names, arguments.seeds, arguments.data)
        return
    collect(arguments.runs, arguments.seeds, arguments.machine, arguments.records)
    records = load_records(arguments.records)
    if not records:
        raise SystemExit(
            f"{arguments.runs} has no finished run: `python benchmarks/claims.py run` first, or "
            "check --runs"
        )
    write(records, arguments.page)


if __name__ == "__main__":
    main()
