"""A whole MyGO run whose conversations are sampled through JetStream's interface."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import HELPERS
from tests.helpers.whole_runs import (
    CONFIG,
    EVAL,
    disturbed,
    finished,
    json_lines,
    outcome,
    rest,
    start,
)

# Shards and evaluations hold log-probabilities, which JetStream's interface does not give. All else
# follows from the tokens.
FOLLOWS_FROM_TOKENS = ("summary", "thresholds", "policies")


def words(directory: Path) -> list[str]:
    return [str(CONFIG), "--engine.kind", "jetstream", "--run", str(directory)]


def without_log_probabilities(numbers: dict[str, Any]) -> dict[str, Any]:
    losses = [line for line in numbers["metrics"] if line[2] is not None]
    return {name: numbers[name] for name in FOLLOWS_FROM_TOKENS} | {"losses": losses}


@pytest.mark.slow
def test_a_run_by_jetstream_that_is_killed_ends_with_the_numbers_of_the_native_engine(
    undisturbed, tmp_path
):
    """Policies are compared by the checksums of their files.

    The same tokens were sampled and learnt.
    """
    directory = tmp_path / "killed"
    whole = tmp_path / "whole"
    rest(whole, words=words(whole))
    (ended,) = disturbed(
        directory,
        {"words": words(directory), "signal": "SIGKILL", "phase": "round 1: sampling", "update": 2},
    )
    assert ended.status == -9, ended.messages
    assert "warm-up: learning" not in rest(directory, words=words(directory)), (
        "what was done is not done again"
    )
    assert outcome(directory) == outcome(whole)
    assert without_log_probabilities(outcome(whole)) == without_log_probabilities(
        undisturbed.outcome
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["evipath", "decex"])
def test_other_methods_without_log_probabilities_learn_the_same_by_jetstream(tmp_path, method):
    """Both methods play through JetStream's interface.

    EviPath's teacher is the policy itself, and DecEx-RAG grows its trees.
    """
    config = str(HELPERS / f"smoke_{method}_config.py")
    policies = []
    for kind in ("native", "jetstream"):
        directory = tmp_path / kind
        rest(directory, words=[config, "--engine.kind", kind, "--run", str(directory)])
        policies.append(outcome(directory)["policies"])
    assert policies[0] == policies[1]


@pytest.mark.slow
def test_an_engine_of_somebody_else_scores_a_run_as_the_native_one_does(copy, tmp_path):
    """It decodes greedily and knows its policy by the names of Hugging Face tensors alone."""
    evaluate = [*EVAL, "--checkpoint", str(copy), "--no-sampled", "--out"]
    foreign = [
        "--engine.kind",
        "jetstream",
        "--engine.factory",
        "tests.helpers.foreign_engine:make_engine",
    ]
    finished([*evaluate, str(tmp_path / "native")])
    finished([*evaluate, str(tmp_path / "foreign"), *foreign])
    results = []
    predictions = []
    for name in ("native", "foreign"):
        result = json.loads((tmp_path / name / "tiny_world-graph-dev.json").read_text())["greedy"]
        del result["seconds"]
        results.append(result)
        predictions.append(json_lines(tmp_path / name / "tiny_world-graph-dev.predictions.jsonl"))
    assert results[0] == results[1]
    compared = ("id", "prediction", "stop_reason", "searches")
    for native, through_jetstream in zip(*predictions, strict=True):
        assert {key: native[key] for key in compared} == {
            key: through_jetstream[key] for key in compared
        }


@pytest.mark.slow
def test_an_engine_that_decodes_greedily_is_refused_where_a_run_draws(copy, tmp_path):
    foreign = [
        "--engine.kind",
        "jetstream",
        "--engine.factory",
        "tests.helpers.foreign_engine:make_engine",
    ]
    ended = start([*EVAL, "--checkpoint", str(copy), *foreign, "--out", str(tmp_path / "results")])
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: engine.factory tests.helpers.foreign_engine:make_engine can only decode greedily, "
        "but the sampled scores need eval.temperature 1.0: add --no-sampled, or use an engine "
        "with its own temperature for each request\n"
    )
