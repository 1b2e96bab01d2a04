"""Modules that have moved: what a user's configuration or plug-in that imports one is told."""

import importlib
import importlib.util

import pytest

from mujica_jax.commands import train
from mujica_jax.config.files import load_config
from mujica_jax.config.moved_modules import MOVED_FUNCTIONS, MOVED_MODULES, moved_sentence
from mujica_jax.config.named_objects import named_object
from mujica_jax.errors import UserError
from tests.helpers.paths import HELPERS

SMOKE = str(HELPERS / "smoke_config.py")


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        (
            "from mujica_jax.methods.run import Run",
            "mujica_jax.methods.run is now mujica_jax.runs.run",
        ),
        (
            "from mujica_jax.methods import run",
            "mujica_jax.methods.run is now mujica_jax.runs.run",
        ),
        (
            "import mujica_jax.trajectories.packing as packing",
            "mujica_jax.trajectories.packing is now mujica_jax.learning.packing",
        ),
        (
            "from mujica_jax import methods\nmethods.run",
            "mujica_jax.methods.run is now mujica_jax.runs.run",
        ),
        (
            "from mujica_jax.config.files import override",
            "mujica_jax.config.files.override is now in mujica_jax.config.command_line",
        ),
        # The old module is a package now.
        (
            "from mujica_jax.methods.decex import decex",
            "mujica_jax.methods.decex is now mujica_jax.methods.decex.method",
        ),
    ],
)
def test_a_configuration_that_imports_a_moved_module_is_told_the_new_one(
    statement, sentence, tmp_path, capsys
):
    file = tmp_path / "mine.py"
    file.write_text(f"{statement}\ndef get_config(): ...\n")
    assert train.main([str(file)]) == 2
    assert capsys.readouterr().err == f"error: configuration {file} cannot be loaded: {sentence}\n"


def test_a_plug_in_that_imports_a_moved_module_is_told_the_new_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "old_plug_in.py").write_text(
        "from mujica_jax.agents.scripted import ScriptedPolicy\ndef make_engine(request): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--engine.kind", "jetstream", "--engine.factory", "old_plug_in:make_engine"]
    assert train.main([SMOKE, *flags, "--run", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        "error: old_plug_in:make_engine cannot be imported: mujica_jax.agents.scripted is now "
        "mujica_jax.demonstrations.policy\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (
            "mujica_jax.methods.policy_gradient:policy_gradient",
            "mujica_jax.methods.policy_gradient is now mujica_jax.methods.grpo",
        ),
        (
            "mujica_jax.methods.evipath:evipath",
            "mujica_jax.methods.evipath is now mujica_jax.methods.evipath.method",
        ),
    ],
)
def test_a_plug_in_that_is_a_moved_module_is_told_the_new_one(place, sentence):
    with pytest.raises(UserError) as refused:
        named_object(place, setting="engine.factory")
    assert str(refused.value) == f"{place} cannot be imported: {sentence}"


def test_another_missing_module_of_a_plug_in_is_named_with_its_line(tmp_path, monkeypatch):
    file = tmp_path / "broken_plug_in.py"
    file.write_text("import json\nimport a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as refused:
        named_object("broken_plug_in:make_engine", setting="engine.factory")
    assert str(refused.value) == (
        "broken_plug_in:make_engine cannot be imported: ModuleNotFoundError: No module named "
        f"'a_package_that_is_not_there' ({file}, line 2)"
    )


def test_a_module_that_never_was_has_not_moved(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from mujica_jax.methods.running import Run\n")
    with pytest.raises(UserError, match="ModuleNotFoundError: No module named") as refused:
        load_config(file)
    assert " is now " not in str(refused.value)
    assert moved_sentence(ValueError("mujica_jax.methods.run")) is None


@pytest.mark.parametrize(("old", "new"), sorted(MOVED_MODULES.items()))
def test_each_row_leads_to_a_module_that_is_there(old, new):
    assert importlib.util.find_spec(new) is not None
    is_package_now = new.startswith(f"{old}.")
    assert is_package_now == (_spec(old) is not None)


@pytest.mark.parametrize(("old", "module"), sorted(MOVED_FUNCTIONS.items()))
def test_each_function_is_in_its_new_module(old, module):
    old_module, _, name = old.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    assert not hasattr(importlib.import_module(old_module), name)


def _spec(name: str):
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent is gone too
        return None
