"""The numbers of the run report, from the files of a run.

`metrics.jsonl` grows while a run goes on. A reader remembers how far it has read, and reads only
the complete lines after that place.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mujica_jax.errors import StoreError
from mujica_jax.storage.run_directory import RunPath
from mujica_jax.trajectories.store import SUMMARY
from mujica_jax.web.viewed_run import ViewedRun

METRICS = "metrics.jsonl"
# A curve with more points is thinned out. The page is about as many pixels wide.
MAX_POINTS = 1500
UNSET = "unset"
# Curves by round: title, unit, and the series. A series is the phase in metrics.jsonl, the name of
# the value, and the name on the page.
ROUND_CHARTS = (
    (
        "Reward",
        "",
        (
            ("mygo", "reward_p10", "10% quantile"),
            ("mygo", "reward_p50", "median"),
            ("mygo", "reward_p90", "90% quantile"),
            ("mygo", "mean_reward", "mean of first attempts"),
            ("policy_gradient", "mean_reward", "mean"),
            ("policy_gradient", "mean_compared_reward", "mean with length penalty"),
        ),
    ),
    ("Threshold K", "", (("mygo", "k", "K"),)),
    (
        "Acceptance",
        "share",
        (
            ("mygo", "acceptance", "kept trajectories"),
            ("mygo", "unsolved_questions", "unsolved questions"),
            ("mygo", "format_failures", "format failures"),
        ),
    ),
    (
        "Groups",
        "share",
        (
            ("policy_gradient", "all_right_share", "all right"),
            ("policy_gradient", "all_wrong_share", "all wrong"),
        ),
    ),
    (
        "Searches of a trajectory",
        "",
        (("mygo", "searches", "mean"), ("policy_gradient", "mean_searches", "mean")),
    ),
    (
        "Entropy",
        "nats",
        (
            ("mygo", "entropy", "of sampled tokens"),
            ("policy_gradient", "entropy_estimate", "of sampled tokens"),
        ),
    ),
    (
        "Engine and trainer: log-probabilities",
        "nats",
        (
            ("mismatch", "logprob_difference_mean_absolute", "mean absolute difference"),
            ("mismatch", "logprob_kl", "KL"),
        ),
    ),
    (
        "Speed of the engine",
        "tokens/s",
        (
            ("sampling", "tokens_per_second", "sampling"),
            ("evaluating", "tokens_per_second", "evaluating"),
        ),
    ),
)
# Curves by training step: title, unit, name of the value.
STEP_CHARTS = (
    ("Loss", "nats", "loss"),
    ("Speed of training", "tokens/s", "tokens_per_second"),
    ("Gradient norm", "", "grad_norm"),
)
LEARN = "/learn"
TIME = "time"
CONTROL_TIME = "control/time"


class ReportReader:
    """A reader of one run's report. Each call of `read` reads what was added since the last."""

    def __init__(self, run: ViewedRun) -> None:
        self.run = run
        self._log = MetricsReader(run.store.root / METRICS)

    def read(self) -> dict[str, Any]:
        """Return the report of the run as a JSON object."""
        lines = self._log.read()
        warnings = list(self._log.faults)
        phases = self._phases(warnings)
        summary = self._summary(warnings)
        return {
            "name": self.run.name,
            "directory": self.run.directory,
            "is_finished": self.run.is_finished,
            "git_revision": self.run.config.get("git_revision"),
            "settings": dict(self.run.settings),
            "phases": summary.get("phases", phases),
            "charts": [
                *_score_charts(summary.get("phases", phases)),
                *_round_charts(lines),
                *_step_charts(lines),
            ],
            "times": _times(lines, [phase["name"] for phase in phases]),
            "last_line": _last_line(lines),
            "warnings": [*warnings, *_warnings(lines, phases), *self._damages()],
        }

    def _phases(self, warnings: list[str]) -> list[dict[str, Any]]:
        """Return the rows of the closing table so far, in the order of their phases."""
        rows = []
        for name in self.run.store.names("phases/"):
            try:
                content = self.run.store.read_json(name)
                row = content["row"]
                float(row["em"])
                rows.append(row)
            except (StoreError, KeyError, TypeError, ValueError) as error:
                warnings.append(f"{name} cannot be read: {error}")
        return sorted(rows, key=_phase_order)

    def _summary(self, warnings: list[str]) -> dict[str, Any]:
        """Return the content of summary.json; empty while the run is under way."""
        if not self.run.is_finished:
            return {}
        try:
            return self.run.store.read_json(SUMMARY)
        except StoreError as error:
            warnings.append(str(error))
            return {}

    def _damages(self) -> list[str]:
        """Return a sentence for each shard that the run has set aside, and each bad manifest."""
        sentences = []
        for name in self.run.store.names("quarantine/"):
            if name.endswith("/reason.json"):
                reason = self.run.store.read_json(name)
                sentences.append(f"{reason.get('shard')} was set aside: {reason.get('reason')}")
        for trajectory_set in self.run.sets().values():
            if trajectory_set.fault:
                sentences.append(trajectory_set.fault)
        return sentences


class MetricsReader:
    """A reader of a growing metrics.jsonl.

    `faults` holds a sentence for each complete line that cannot be read.
    """

    def __init__(self, path: RunPath) -> None:
        self._path = path
        # The position behind the last complete line that was read, in bytes.
        self._position = 0
        self._lines: list[dict[str, Any]] = []
        self.faults: list[str] = []

    def read(self) -> list[dict[str, Any]]:
        """Return all lines so far. A last line without its end is left for the next call."""
        data = self._new_bytes()
        end = data.rfind(b"\n") + 1
        for text in data[:end].splitlines():
            self._add(text)
        self._position += end
        return self._lines

    def _add(self, text: bytes) -> None:
        """Add one complete line."""
        try:
            line = json.loads(text)
            line["phase"].encode()
            int(line["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            shown = text[:60].decode(errors="replace")
            self.faults.append(f"{METRICS} has a line that cannot be read: {shown!r}")
            return
        self._lines.append(line)

    def _new_bytes(self) -> bytes:
        """Return the bytes behind the position. A file that became shorter is read again."""
        if not self._path.exists():
            return b""
        if not isinstance(self._path, Path):
            return self._path.read_bytes()[self._position :]
        with open(self._path, "rb") as file:
            if file.seek(0, 2) < self._position:
                self._position = 0
                self._lines = []
                self.faults = []
            file.seek(self._position)
            return file.read()


def setting_differences(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings in which runs differ: the dotted name, and the value in each run."""
    leaves = {name: dict(_leaves(values)) for name, values in settings.items()}
    names = dict.fromkeys(key for values in leaves.values() for key in values)
    rows = []
    for name in names:
        values = [run_leaves.get(name, UNSET) for run_leaves in leaves.values()]
        if any(value != values[0] for value in values):
            rows.append({"setting": name, "values": values})
    return rows


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the dotted name and the value of every leaf of nested settings."""
    leaves = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves += _leaves(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


def _phase_order(row: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return a sort key: the warm-up, then rounds by their number, the control last."""
    name = str(row.get("name", ""))
    number = name.removeprefix("round ")
    if number.isdigit():
        return (1, int(number), name)
    return ({"warm-up": 0, "control": 2}.get(name, 1), 0, name)


def _score_charts(phases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the curves of the scores by phase, without the control run.

    The x value is the place of the phase: 0 for the first, which is the warm-up.
    """
    charts = []
    shown = [phase for phase in phases if phase.get("name") != "control"]
    labels = [phase["name"] for phase in shown]
    for title, names in (
        ("Exact match", {"em": "greedy", "em_sampled": "sampled"}),
        ("F1", {"f1": "greedy", "f1_sampled": "sampled"}),
    ):
        series = []
        for name, label in names.items():
            points = [
                [place, phase[name]]
                for place, phase in enumerate(shown)
                if phase.get(name) is not None
            ]
            series.append({"name": label, "points": points})
        charts.append(_chart(title, "percent", "phase", series, labels))
    return [chart for chart in charts if chart["series"]]


def _round_charts(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the curves that have one value for each round."""
    charts = []
    for title, unit, entries in ROUND_CHARTS:
        series = [
            {"name": label, "points": _points(lines, phase, name)} for phase, name, label in entries
        ]
        charts.append(_chart(title, unit, "round", series))
    return [chart for chart in charts if chart["series"]]


def _step_charts(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the curves of training, by step. Phases follow each other on one axis."""
    # The place of each phase on the axis begins where the phase before it ends.
    last_steps: dict[str, int] = {}
    for line in lines:
        phase = line["phase"]
        if phase.endswith(LEARN):
            last_steps[phase] = max(last_steps.get(phase, 0), int(line["step"]))
    starts: dict[str, int] = {}
    total = 0
    for phase, steps in last_steps.items():
        starts[phase] = total
        total += steps

    charts = []
    for title, unit, name in STEP_CHARTS:
        series = []
        for phase, start in starts.items():
            points = [[start + step, value] for step, value in _points(lines, phase, name)]
            series.append({"name": phase.removesuffix(LEARN), "points": _thinned(points)})
        charts.append(_chart(title, unit, "step", series))
    return [chart for chart in charts if chart["series"]]


def _chart(
    title: str,
    unit: str,
    x_name: str,
    series: Sequence[Mapping[str, Any]],
    x_labels: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a chart without the series that have no points."""
    return {
        "title": title,
        "unit": unit,
        "x": x_name,
        "x_labels": list(x_labels),
        "series": [entry for entry in series if entry["points"]],
    }


def _points(lines: Sequence[Mapping[str, Any]], phase: str, name: str) -> list[list[float]]:
    """Return the step and the value of each line of a phase. Values that are no numbers are left out.

    A loss that is not finite is stored as a text, because JSON has no NaN.
    """
    points = []
    for line in lines:
        value = line.get(name)
        if line["phase"] == phase and isinstance(value, int | float):
            points.append([int(line["step"]), value])
    return points


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Return at most about MAX_POINTS of the points, always with the last one."""
    stride = -(-len(points) // MAX_POINTS)
    if stride <= 1:
        return points
    thinned = points[::stride]
    return thinned if thinned[-1] is points[-1] else [*thinned, points[-1]]


def _times(lines: Sequence[Mapping[str, Any]], phase_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return how many seconds each phase spent in each stage.

    A phase writes its line before it counts as finished, so the newest line may have no name yet.
    """
    names = iter([name for name in phase_names if name != "control"])
    rows = []
    for line in lines:
        if line["phase"] not in (TIME, CONTROL_TIME):
            continue
        stages = {
            name.removesuffix("_seconds"): value
            for name, value in line.items()
            if name.endswith("_seconds") and isinstance(value, int | float)
        }
        total = stages.pop("total", sum(stages.values()))
        is_control = line["phase"] == CONTROL_TIME
        name = "control" if is_control else next(names, f"step {line['step']}")
        rows.append({"name": name, "total": total, "stages": stages})
    return rows


def _last_line(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return where the run is: the phase, the step and the time of its newest line."""
    if not lines:
        return None
    last = lines[-1]
    return {"phase": last["phase"], "step": last["step"], "time": last.get("time")}


def _warnings(lines: Sequence[Mapping[str, Any]], phases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each number that a user should look at."""
    sentences = []
    for phase in phases:
        if phase.get("left_out"):
            sentences.append(
                f"{phase['name']}: {phase['left_out']} episodes are left out of the scores because "
                "a search failed"
            )
    for line in lines:
        place = f"{line['phase']}, step {line['step']}"
        for name, value in line.items():
            if value in ("nan", "inf", "-inf"):
                sentences.append(f"{place}: {name} is {value}")
        if line["phase"] == "mygo":
            sentences += _warnings_of_round(line)
        if line["phase"] == "retrieval" and line.get("failed"):
            sentences.append(f"{place}: {line['failed']} searches failed")
        if line.get("refused") and line["phase"] in ("sampling", "evaluating"):
            sentences.append(f"{place}: the engine refused {line['refused']} requests")
    # `skipped` counts from the start of the phase, so its last value is the total.
    skipped = {line["phase"]: line["skipped"] for line in lines if line.get("skipped")}
    for phase, count in skipped.items():
        sentences.append(f"{phase}: {count} updates were skipped because of a spike")
    return sentences


def _warnings_of_round(line: Mapping[str, Any]) -> list[str]:
    """Return the warnings about one round of MyGO."""
    sentences = []
    place = f"round {line['step']}"
    if line.get("left_out"):
        sentences.append(
            f"{place}: {line['left_out']} trajectories have no reward because a search or the judge "
            "failed"
        )
    if line.get("accepted") == 0:
        sentences.append(f"{place}: no trajectory was kept, so nothing was learnt")
    if line.get("too_long"):
        sentences.append(
            f"{place}: {line['too_long']} conversations are longer than a training row and were "
            "left out"
        )
    return sentences
