"""The numbers of the run report, on the run of `tests/helpers/viewed_runs.py`."""

import json

import pytest

from mujica_jax.report.metrics_log import MetricsLog
from mujica_jax.trajectories.store import Store
from mujica_jax.web.report_data import MetricsReader, ReportReader, setting_differences
from mujica_jax.web.viewed_run import ViewedRun
from tests.helpers.viewed_runs import write_phase


@pytest.fixture
def reader(run_directory):
    return ReportReader(ViewedRun("little", str(run_directory)))


def series_of(report, title):
    (chart,) = [chart for chart in report["charts"] if chart["title"] == title]
    return {series["name"]: series["points"] for series in chart["series"]}


def test_curves_have_the_values_of_the_lines(reader):
    report = reader.read()
    assert series_of(report, "Loss") == {"warm-up": [[10, 2.5], [20, 1.5]]}
    assert series_of(report, "Threshold K") == {"K": [[1, 0.6]]}
    assert series_of(report, "Reward") == {"median": [[1, 0.5]]}
    assert series_of(report, "Acceptance") == {"kept trajectories": [[1, 0.25]]}
    assert series_of(report, "Exact match") == {"greedy": [[0, 10.0]], "sampled": [[0, 5.0]]}


def test_a_chart_without_values_is_left_out(reader):
    titles = [chart["title"] for chart in reader.read()["charts"]]
    assert "Entropy" not in titles


def test_phases_of_training_follow_each_other_on_one_axis(reader, run_directory):
    with MetricsLog(run_directory) as log:
        log.write("round 1/learn", 10, {"loss": 1.0})
    assert series_of(reader.read(), "Loss")["round 1"] == [[30, 1.0]]


def test_time_is_given_by_stage(reader):
    assert reader.read()["times"] == [
        {"name": "warm-up", "total": 4.0, "stages": {"learning": 3.0, "other": 1.0}}
    ]


def test_a_report_grows_with_the_run(reader, run_directory):
    reader.read()
    with MetricsLog(run_directory) as log:
        log.write("mygo", 2, {"k": 0.7})
    write_phase(Store(run_directory), "round 2", em=20.0)
    write_phase(Store(run_directory), "round 10", em=30.0)
    report = reader.read()
    assert series_of(report, "Threshold K") == {"K": [[1, 0.6], [2, 0.7]]}
    assert [phase["name"] for phase in report["phases"]] == ["warm-up", "round 2", "round 10"]
    assert report["last_line"]["phase"] == "mygo"


def test_a_half_written_line_waits_for_its_end(run_directory):
    path = run_directory / "metrics.jsonl"
    reader = MetricsReader(path)
    count = len(reader.read())
    line = json.dumps({"phase": "mygo", "step": 2, "time": 1.0, "k": 0.7}) + "\n"
    with open(path, "a") as file:
        file.write(line[:20])
        file.flush()
        assert len(reader.read()) == count
        file.write(line[20:])
    assert reader.read()[-1]["k"] == 0.7
    assert len(reader.read()) == count + 1
    assert reader.faults == []


def test_a_line_that_cannot_be_read_is_a_warning(reader, run_directory):
    with open(run_directory / "metrics.jsonl", "a") as file:
        file.write('{"phase": "mygo"}\n[1]\n')
    warnings = reader.read()["warnings"]
    assert sum("metrics.jsonl has a line that cannot be read" in text for text in warnings) == 2


def test_a_file_that_became_shorter_is_read_again(run_directory):
    path = run_directory / "metrics.jsonl"
    reader = MetricsReader(path)
    reader.read()
    path.write_text('{"phase": "mygo", "step": 1, "time": 1.0}\n')
    assert len(reader.read()) == 1


def test_warnings_name_what_to_look_at(reader, run_directory):
    with MetricsLog(run_directory) as log:
        log.write("mygo", 2, {"accepted": 0, "too_long": 3})
        log.write("round 2/learn", 1, {"loss": float("nan"), "skipped": 4})
    assert sorted(reader.read()["warnings"]) == [
        "round 1: 2 trajectories have no reward because a search or the judge failed",
        "round 2/learn, step 1: loss is nan",
        "round 2/learn: 4 updates were skipped because of a spike",
        "round 2: 3 conversations are longer than a training row and were left out",
        "round 2: no trajectory was kept, so nothing was learnt",
    ]


def test_a_quarantined_shard_is_a_warning(reader, run_directory):
    Store(run_directory).quarantine("rounds/0001/shard-00001.parquet", "its bytes changed")
    assert (
        "rounds/0001/shard-00001.parquet was set aside: its bytes changed"
        in (reader.read()["warnings"])
    )


def test_a_phase_file_that_cannot_be_read_is_a_warning(reader, run_directory):
    (run_directory / "phases" / "round-1.json").write_text("{}")
    assert any("phases/round-1.json" in text for text in reader.read()["warnings"])


def test_the_differences_of_settings_have_the_value_of_each_run():
    first = {"seed": 0, "task": {"kind": "tiny_world", "top_k": 3}}
    second = {"seed": 0, "task": {"kind": "two_wiki"}, "reward": "f1"}
    assert setting_differences({"a": first, "b": second}) == [
        {"setting": "task.kind", "values": ["tiny_world", "two_wiki"]},
        {"setting": "task.top_k", "values": [3, "unset"]},
        {"setting": "reward", "values": ["unset", "f1"]},
    ]
    assert setting_differences({"a": first}) == []
