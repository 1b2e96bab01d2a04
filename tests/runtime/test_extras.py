"""A package that is not installed is answered with the extra that installs it."""

import importlib
import sys
import types

import pytest

from mujica_jax.errors import UserError
from mujica_jax.runtime.extras import (
    import_extra,
    keep_triton_from_ending_the_process,
    require_extra,
)

INSTALL = "install the extra `plots`, as in `pip install -e '.[plots]'` where mujica_jax was cloned"


@pytest.fixture
def folder_of_packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def importable_triton(folder_of_packages, monkeypatch):
    (folder_of_packages / "triton.py").write_text("")
    monkeypatch.delitem(sys.modules, "triton", raising=False)


def test_the_module_of_an_installed_package_is_returned():
    assert import_extra("os.path", "a setting", extra="plots").basename("a/b") == "b"


def test_a_missing_package_is_named_with_its_extra_and_what_else_to_do():
    with pytest.raises(UserError) as caught:
        import_extra("no_such_package.part", "--plot", extra="plots", otherwise=", or leave it out")
    assert str(caught.value) == (
        "--plot needs the package no_such_package, but no_such_package is not installed: "
        f"{INSTALL}, or leave it out"
    )


def test_a_package_that_lacks_another_one_is_answered_with_the_name_of_that_one(folder_of_packages):
    (folder_of_packages / "half_installed.py").write_text("import no_such_package\n")
    with pytest.raises(UserError) as caught:
        import_extra("half_installed", "--plot", extra="plots")
    assert str(caught.value) == (
        f"--plot needs the package half_installed, but no_such_package is not installed: {INSTALL}"
    )


def test_a_package_that_does_not_fit_the_others_is_answered_with_the_reason(folder_of_packages):
    (folder_of_packages / "misfit.py").write_text("raise ImportError('undefined symbol')\n")
    with pytest.raises(UserError) as caught:
        import_extra("misfit", "--plot", extra="plots")
    assert str(caught.value) == (
        "--plot needs the package misfit, which cannot be imported (undefined symbol): "
        f"{INSTALL}, to get releases that work together"
    )


def test_a_package_is_required_without_importing_it(folder_of_packages):
    (folder_of_packages / "heavy_package.py").write_text("raise SystemExit('imported')\n")
    require_extra("heavy_package", "--plot", extra="plots")
    assert "heavy_package" not in sys.modules


def test_a_required_package_that_is_missing_is_named_with_its_extra():
    with pytest.raises(UserError) as caught:
        require_extra("plots", "--plot")
    assert str(caught.value) == (
        f"--plot needs the package plots, but plots is not installed: {INSTALL}"
    )


def test_triton_cannot_be_imported_after_tensorflow(importable_triton, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    keep_triton_from_ending_the_process()
    with pytest.raises(ImportError):
        importlib.import_module("triton")


def test_triton_can_be_imported_where_tensorflow_is_not_loaded(importable_triton, monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    keep_triton_from_ending_the_process()
    assert importlib.import_module("triton").__name__ == "triton"


def test_a_triton_that_was_loaded_before_tensorflow_stays(importable_triton, monkeypatch):
    triton = importlib.import_module("triton")
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    keep_triton_from_ending_the_process()
    assert importlib.import_module("triton") is triton
