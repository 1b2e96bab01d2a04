"""A wheel holds the package and its configurations, and needs no checkout."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers.paths import ROOT

BUILT_FROM = ("mujica_jax", "configs", "pyproject.toml", "requirements.txt", "README.md", "LICENSE")
SMALL = {
    "task.train-questions": 40,
    "task.demonstrations": 20,
    "task.dev-questions": 8,
    "task.test-questions": 8,
    "model.num-layers": 1,
    "pretraining.documents": 20,
    "pretraining.steps": 2,
    "warmup.steps": 2,
    "method.rounds": 1,
    "sampling.questions-per-round": 8,
    "sampling.questions-per-shard": 8,
    "engine.max-num-seqs": 8,
    "eval.questions": 4,
}


def test_every_folder_with_modules_is_packaged():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "mujica_jax").rglob("*.py")}
    assert named == sorted({".".join(folder.parts) for folder in folders} | {"mujica_jax.configs"})


def test_requirements_txt_lists_the_core_and_the_kernels_of_a_cpu():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["cpu"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    without_comments = [line.partition("#")[0].strip() for line in lines]
    listed = [str(Requirement(text)) for text in without_comments if text]
    assert sorted(listed) == sorted(str(Requirement(text)) for text in declared)
    assert "numba" not in {Requirement(line).name for line in project["dependencies"]}


def installed_with(requirements: list[str]) -> set[str]:
    """Return the names of the distributions that these bring, with all that those require."""
    packages: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in packages or (
            wanted.marker
            and not any(wanted.marker.evaluate({"extra": e}) for e in ("", *wanted.extras))
        ):
            continue
        packages.add(name)
        try:
            waiting += [Requirement(line) for line in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:  # not for this system
            continue
    return packages


# Packages that a function imports, whose extra a message names where they are missing.
OPTIONAL = {"pypdf", "bs4", "datasets"}


def test_a_run_imports_nothing_that_only_developers_install():
    """Some extras are imported by name at run time (`qwix`, `wandb`, `tpu`), some are OPTIONAL.

    Everything else comes with requirements.txt.
    """
    lines = [
        line.partition("#")[0].strip()
        for line in (ROOT / "requirements.txt").read_text().splitlines()
    ]
    brought = installed_with([line for line in lines if line])
    distributions = importlib.metadata.packages_distributions()
    missing = {}
    for path in (ROOT / "mujica_jax").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        names += [
            node.module
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
        ]
        for name in (
            {name.partition(".")[0] for name in names}
            - sys.stdlib_module_names
            - OPTIONAL
            - {"mujica_jax"}
        ):
            if (
                not {
                    re.sub(r"[-_.]+", "-", distribution).lower()
                    for distribution in distributions.get(name, ())
                }
                & brought
            ):
                missing[name] = str(path.relative_to(ROOT))
    assert not missing


@pytest.mark.slow
def test_a_wheel_in_an_empty_folder_trains_and_evaluates(tmp_path):
    checkout, environment, folder = (
        tmp_path / name for name in ("checkout", "environment", "empty")
    )
    folder.mkdir()
    checkout.mkdir()
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    built = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(checkout),
    ]
    subprocess.run([*pip, *built], check=True)
    shutil.rmtree(checkout)
    venv.create(environment, with_pip=False)
    (wheel,) = tmp_path.glob("*.whl")
    python = str(environment / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", str(wheel)], check=True)
    # The packages of this environment, without its .pth files: one of those leads to the checkout.
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"])
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")
    }

    def run(*words: str, program: str = python) -> str:
        ended = subprocess.run(
            [program, *words],
            cwd=folder,
            env=inherited | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert Path(run("-c", "import mujica_jax; print(mujica_jax.__file__)").strip()).is_relative_to(
        site
    )
    command = str(environment / "bin" / "mujica")
    assert "\n  train " in run("--help", program=command)
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    run("-m", "mujica_jax.train", "--run", "run", *flags)
    phases = [
        phase["name"]
        for phase in json.loads((folder / "run" / "summary.json").read_text())["phases"]
    ]
    assert phases == ["warm-up", "round 1"]
    run("-m", "mujica_jax.eval", "--checkpoint", "run")
    assert (folder / "run" / "eval" / "tiny_world-graph-test.json").exists()
