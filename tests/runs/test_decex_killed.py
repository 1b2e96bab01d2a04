"""DecEx-RAG killed while it expands trees, learns chains and learns pairs: started again, it ends
as if nothing had been. Its rewards are those of `disturbed_train.py`.
"""

import signal

import pytest

from tests.helpers.paths import HELPERS
from tests.helpers.whole_runs import closing, disturbed, json_lines, outcome

CONFIG = HELPERS / "smoke_decex_config.py"


@pytest.mark.slow
def test_killed_in_each_phase_it_ends_with_the_numbers_of_a_run_left_alone(tmp_path):
    def starts(name: str, *kills: dict) -> list:
        words = [str(CONFIG), "--run", str(tmp_path / name)]
        return disturbed(tmp_path / name, *({**kill, "words": words} for kill in kills))

    (alone,) = starts("alone", {})
    assert alone.status == 0, alone.messages
    *killed, last = starts(
        "killed",
        {
            "signal": "SIGKILL",
            "phase": "trees: expanding",
            "update": 12,
        },  # in the second of two shards
        {"signal": "SIGKILL", "phase": "sft: learning", "update": 3, "stretch": 2},
        {"signal": "SIGKILL", "phase": "dpo: learning", "update": 3, "stretch": 2},
        {},
    )
    assert [ended.status for ended in killed] == [-signal.SIGKILL] * 3, [
        ended.messages for ended in killed
    ]
    assert last.status == 0, last.messages
    # The first start may be killed before its first line about trees; the second one ends them,
    # which is said.
    grown = ["trees: expanding" in ended.output for ended in (*killed[1:], last)]
    assert grown == [True, False, False], "what was kept is not grown again"
    killed_outcome = outcome(tmp_path / "killed")
    assert killed_outcome == outcome(tmp_path / "alone")

    # The run went through what it is to compare.
    expected = ["warm-up", "control", "sft", "dpo"]
    assert [phase["name"] for phase in killed_outcome["summary"]["phases"]] == expected
    models = {files["model/model.safetensors"] for files in killed_outcome["policies"].values()}
    assert len(models) == 3
    assert len(killed_outcome["shards"]) == 2
    (line,) = (
        line
        for line in json_lines(tmp_path / "killed" / "metrics.jsonl")
        if line["phase"] == "decex"
    )
    assert line["questions"] == 16
    assert line["chains"] > 0
    assert line["decision_pairs"] > 0
    assert line["execution_pairs"] > 0
    expected = ["warm-up", "control", "sft", "dpo"]
    assert [row.split()[0] for row in closing(last.output).splitlines()[3:7]] == expected
