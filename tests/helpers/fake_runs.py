"""Fakes in the place of a `Run`.

A function that recipes call with a run calls the fake's method of the same name, if it has one.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from mujica_jax.methods import dpo, from_file, grpo, mygo, mygo_worker, sft, supervised
from mujica_jax.methods.decex import method as decex
from mujica_jax.methods.evipath import method as evipath
from mujica_jax.runs import evaluation, learning, mismatch, sampling, selection, versions

RECIPES = (mygo, mygo_worker, grpo, supervised, decex, evipath, sft, dpo, from_file)
FUNCTIONS = {
    sampling: (
        "play_attempts",
        "play_waves",
        "read_or_play",
        "await_shard",
        "intact_shard",
        "read_shards",
    ),
    learning: ("train", "train_phase", "finished_state", "rows_that_fit", "score_once"),
    evaluation: ("finish",),
    mismatch: ("compare",),
    selection: ("record_selection",),
    versions: ("commit_policy", "use_policy", "committed_state", "remove_past_checkpoints"),
}


def call_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions of `runs` call the method of a fake run, and the real one for a real run."""
    for module, names in FUNCTIONS.items():
        for name in names:
            original = getattr(module, name)
            replacement = _method_or(original)
            for place in (module, *RECIPES):
                if getattr(place, name, None) is original:
                    monkeypatch.setattr(place, name, replacement)


def _method_or(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(run: Any, *arguments: Any, **options: Any) -> Any:
        method = getattr(run, function.__name__, None)
        if method is not None:
            return method(*arguments, **options)
        return function(run, *arguments, **options)

    return call
