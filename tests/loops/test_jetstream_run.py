"""A whole MyGO run whose conversations are sampled through JetStream's interface."""

from pathlib import Path
from typing import Any

import pytest
from whole_runs import CONFIG, disturbed, outcome, rest

# Shards and evaluations hold log-probabilities, which JetStream's interface does not give. All else follows from the
# tokens.
FOLLOWS_FROM_TOKENS = ("summary", "thresholds", "policies")


def words(directory: Path) -> list[str]:
    return [str(CONFIG), "--engine.kind", "jetstream", "--run", str(directory)]


def without_log_probabilities(found: dict[str, Any]) -> dict[str, Any]:
    losses = [line for line in found["metrics"] if line[2] is not None]
    return {name: found[name] for name in FOLLOWS_FROM_TOKENS} | {"losses": losses}


@pytest.mark.slow
def test_a_run_by_jetstream_that_is_killed_ends_with_the_numbers_of_the_native_engine(undisturbed, tmp_path):
    """Policies are compared by the checksums of their files: the same tokens were sampled and learnt."""
    directory, whole = tmp_path / "killed", tmp_path / "whole"
    rest(whole, words=words(whole))
    (ended,) = disturbed(
        directory,
        {"words": words(directory), "signal": "SIGKILL", "phase": "round 1: sampling", "update": 2},
    )
    assert ended.status == -9, ended.messages
    assert "warm-up: learning" not in rest(directory, words=words(directory)), "what was done is not done again"
    assert outcome(directory) == outcome(whole)
    assert without_log_probabilities(outcome(whole)) == without_log_probabilities(undisturbed.outcome)
