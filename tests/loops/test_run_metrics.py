"""What a whole run tells of itself: every name is documented, engine and trainer agree, and the time is accounted for."""

import re

import pytest
from whole_runs import ROOT, json_lines


def documented(heading: str) -> set[str]:
    """Names in the table under a heading of docs/metrics.md."""
    part = (ROOT / "docs" / "metrics.md").read_text().partition(f"\n## {heading}")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))


def test_every_metric_that_is_written_is_documented_and_the_other_way_round(undisturbed):
    headings = {"learn": "Learning", "sampling": "The engine", "evaluating": "The engine", "mygo": "MyGO"}
    headings |= {"agreement": "Engine against trainer", "time": "Where the time goes", "store": "The run directory"}
    written: dict[str, set[str]] = {heading: set() for heading in headings.values()}
    for line in json_lines(undisturbed.directory / "metrics.jsonl"):
        written[headings[line["phase"].rpartition("/")[2]]] |= set(line) - {"phase", "step", "time"}
    assert written == {
        heading: documented(heading) - {"device_peak_bytes"}  # a CPU does not say
        for heading in written
    }


def test_engine_and_trainer_agree_on_what_was_sampled(undisturbed):
    lines = [line for line in json_lines(undisturbed.directory / "metrics.jsonl") if line["phase"] == "agreement"]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["compared_tokens"] > 100
        assert line["logprob_difference_max_absolute"] < 1e-4 and abs(line["logprob_kl"]) < 1e-6


def test_the_split_of_the_time_names_every_stage(undisturbed):
    lines = [line for line in json_lines(undisturbed.directory / "metrics.jsonl") if line["phase"] == "time"]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        stages = {name: value for name, value in line.items() if name.endswith("_seconds") and name != "total_seconds"}
        assert sum(stages.values()) == pytest.approx(line["total_seconds"])
        assert line["other_seconds"] < 0.5 * line["total_seconds"]
