"""SFT and DPO on files, as whole runs: after another run has written its conversations, and killed in
the middle.
"""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import HELPERS
from tests.helpers.whole_runs import disturbed, finished, json_lines, outcome

CONFIG = str(HELPERS / "smoke_config.py")
SMALL = ["--pretraining.steps", "4", "--warmup.steps", "12", "--eval.questions", "4"]
WRITE = [sys.executable, "-m", "mujica_jax.conversations"]


@pytest.fixture(scope="module")
def exported(undisturbed, tmp_path_factory) -> Path:
    """Return the conversations of a run that was left alone."""
    path = tmp_path_factory.mktemp("exported") / "conversations.jsonl"
    output = finished([*WRITE, str(undisturbed.directory), "--out", str(path)])
    assert "read back as exactly the stored tokens" in output
    return path


@pytest.fixture(scope="module")
def pairs(exported) -> Path:
    """Return pairs that prefer the first turn of each conversation to an answer that knows nothing."""
    path = exported.with_name("pairs.jsonl")
    with open(path, "w") as file:
        for line in json_lines(exported):
            messages = line["messages"]
            start = [message["role"] for message in messages].index("assistant")
            pair = {
                "prompt": messages[:start],
                "chosen": [messages[start]],
                "rejected": "<answer>Oslo</answer>",
            }
            file.write(json.dumps(pair) + "\n")
    return path


def starts(directory: Path, method: list[str], *kills: dict) -> list:
    words = [CONFIG, "--run", str(directory), *SMALL, *method]
    return disturbed(directory, *({**kill, "words": words} for kill in kills))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_killed_while_it_learns_it_ends_with_the_numbers_of_a_run_left_alone(
    kind, exported, pairs, tmp_path
):
    data = str(exported if kind == "sft" else pairs)
    method = ["--method.kind", kind, "--method.data", data, "--method.validation-percent", "20"]
    method += ["--method.learning-rate", "2e-3", "--method.epochs", "3"]
    (alone,) = starts(tmp_path / "alone", method, {})
    assert alone.status == 0, alone.messages
    *killed, last = starts(
        tmp_path / "killed",
        method,
        {"signal": "SIGKILL", "phase": f"{kind}: learning", "update": 4, "stretch": 2},
        {"signal": "SIGKILL", "phase": f"{kind}: evaluating, greedy", "update": 1},
        {},
    )
    assert [ended.status for ended in killed] == [-signal.SIGKILL] * 2, killed
    assert last.status == 0, last.messages
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "alone")

    # The phase learnt the records, also those that were held out.
    names = [phase["name"] for phase in outcome(tmp_path / "alone")["summary"]["phases"]]
    assert names == ["warm-up", "control", kind]
    lines = json_lines(tmp_path / "alone" / "metrics.jsonl")
    (validation,) = (line for line in lines if line["phase"] == "validation")
    assert validation["loss"] < validation["start_loss"]


@pytest.mark.slow
def test_a_restart_with_another_file_is_refused(exported, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_bytes(exported.read_bytes())
    method = ["--method.kind", "sft", "--method.data", str(data)]
    (killed,) = starts(
        tmp_path / "run",
        method,
        {"signal": "SIGKILL", "phase": "pretraining: learning", "update": 1},
    )
    assert killed.status == -signal.SIGKILL
    data.write_text("".join(data.read_text().splitlines(keepends=True)[1:]))
    (refused,) = starts(tmp_path / "run", method, {})
    assert refused.status == 2
    assert "was started with other data" in refused.messages
    assert "method.data" in refused.messages
