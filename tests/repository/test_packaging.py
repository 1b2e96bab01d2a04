"""A wheel holds the package and its configurations, and needs no checkout."""

import ast
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Mapping
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


# The extras that requirements.txt names beside the core.
STACK = ("cpu", "scann", "tfds", "jetstream")
ACCELERATORS = {"tpu", "cuda", "cuda13"}
# Packages that only an extra brings, and the files that import them.
OPTIONAL_IMPORTS = {
    "inference/jetstream/engine.py": {"jetstream"},
    "inference/jetstream/factory.py": {"jetstream"},
    "inference/jetstream/server.py": {"jetstream", "grpc"},
    "kernels/cpu/compiled.py": {"llvmlite", "numba"},
    "retrieval/text/scann_package.py": {"scann"},
    "tasks/open_domain/builders.py": {"tensorflow_datasets"},
    "tasks/prepare.py": {"tensorflow", "tensorflow_datasets"},
    "tasks/prepared.py": {"tensorflow_datasets"},
}
# Prints which of the packages in the arguments can be imported.
FIND_OPTIONAL = """
import importlib.util, sys
print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])
"""
EXTRA_OF = {
    "grpc": "jetstream",
    "jetstream": "jetstream",
    "llvmlite": "cpu",
    "numba": "cpu",
    "scann": "scann",
    "tensorflow": "tfds",
    "tensorflow_datasets": "tfds",
}


def test_every_folder_with_modules_is_packaged():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "mujica_jax").rglob("*.py")}
    assert named == sorted({".".join(folder.parts) for folder in folders} | {"mujica_jax.configs"})


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def without_doubles(requirements: Iterable[str]) -> list[str]:
    """Return requirements as their parser writes them, in alphabetical order."""
    return sorted({str(Requirement(line)) for line in requirements})


def test_requirements_txt_lists_the_whole_stack():
    extras = project()["optional-dependencies"]
    declared = list(project()["dependencies"])
    for extra in STACK:
        declared += extras[extra]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    without_comments = [line.partition("#")[0].strip() for line in lines]
    listed = [line for line in without_comments if line]
    assert without_doubles(listed) == without_doubles(declared)
    assert len(listed) == len(set(listed))


def test_extras_that_name_a_package_agree_on_its_releases():
    ranges: dict[str, set[str]] = {}
    for lines in project()["optional-dependencies"].values():
        for requirement in map(Requirement, lines):
            ranges.setdefault(requirement.name, set()).add(str(requirement))
    # The parity tests compare with one release of torch, which `gguf` allows too.
    ranges.pop("torch")
    ranges.pop("jax")
    ranges.pop("mujica-jax")
    assert {name for name, requirements in ranges.items() if len(requirements) > 1} == set()


def test_all_names_every_extra_that_is_not_for_an_accelerator_or_for_developers():
    extras = project()["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == "mujica-jax"
    assert everything.extras == set(extras) - ACCELERATORS - {"all", "dev", "docs"}
    own = next(line for line in map(Requirement, extras["dev"]) if line.name == "mujica-jax")
    assert own.extras == {"all", "docs"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_with(requirements: Iterable[str]) -> set[str]:
    """Return the names of the distributions that these bring, with all that those require.

    Extras of the project itself are followed too.
    """
    own_extras = project()["optional-dependencies"]
    packages: set[str] = set()
    visited: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        wanted = waiting.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        name = normalized(wanted.name)
        for extra in ("", *sorted(wanted.extras)):
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            if name == "mujica-jax":
                waiting += map(Requirement, own_extras.get(extra, ()))
                continue
            packages.add(name)
            waiting += required_by(name, extra)
    return packages


def required_by(distribution: str, extra: str) -> list[Requirement]:
    """Return what an installed distribution requires, for one of its extras or for none.

    A distribution that is not for this system is not installed and brings nothing.
    """
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    requirements = []
    for requirement in map(Requirement, lines):
        if requirement.marker is None:
            requirements.append(requirement)
        elif requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            requirements.append(requirement)
    return requirements


@functools.cache
def distributions_of_packages() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def brought_by(package: str, distributions: set[str]) -> bool:
    """Return whether one of these distributions has this importable package."""
    owners = distributions_of_packages().get(package, ())
    return bool({normalized(owner) for owner in owners} & distributions)


def packages_imported_by(path: Path) -> set[str]:
    """Return the other packages that a file imports anywhere, by their first name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    first_names = {name.partition(".")[0] for name in names}
    return first_names - sys.stdlib_module_names - {"mujica_jax"}


def test_what_the_core_does_not_bring_is_imported_by_the_named_files_alone():
    core = installed_with(project()["dependencies"])
    optional: dict[str, set[str]] = {}
    for path in (ROOT / "mujica_jax").rglob("*.py"):
        file = path.relative_to(ROOT / "mujica_jax").as_posix()
        for package in packages_imported_by(path):
            if not brought_by(package, core):
                optional.setdefault(file, set()).add(package)
    assert optional == OPTIONAL_IMPORTS


def test_the_extras_of_optional_imports_bring_their_packages():
    extras = project()["optional-dependencies"]
    for packages in OPTIONAL_IMPORTS.values():
        for package in packages:
            distributions = installed_with(extras[EXTRA_OF[package]])
            assert brought_by(package, distributions), package


def constant_of(path: Path, node: ast.expr) -> str:
    """Return a string of the source, or the value of the constant of the module that is named."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.Name), f"{path}: name the package and its extra as plain strings"
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
            return ast.literal_eval(statement.value)
    raise AssertionError(f"{path}: {node.id} is no constant of the module")


def extras_in_messages() -> set[tuple[str, str]]:
    """Return (package, extra) of every package that the program imports by name."""
    pairs = set()
    for path in (ROOT / "mujica_jax").rglob("*.py"):
        if path.name == "extras.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) not in ("import_extra", "require_extra"):
                continue
            package = constant_of(path, node.args[0]).partition(".")[0]
            extra = package
            for keyword in node.keywords:
                if keyword.arg == "extra":
                    extra = constant_of(path, keyword.value)
            pairs.add((package, extra))
    return pairs


def test_the_extra_that_a_message_names_brings_the_package():
    extras = project()["optional-dependencies"]
    pairs = extras_in_messages()
    assert ("jetstream", "jetstream") in pairs
    for package, extra in pairs:
        assert extra in extras
        assert brought_by(package, installed_with(extras[extra])), (package, extra)


@pytest.mark.parametrize("file", ["worker.sh", "skypilot.yaml"])
def test_pods_install_the_whole_stack(file):
    lines = (ROOT / "launch" / file).read_text().splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert installs
    for line in installs:
        assert re.search(r'--requirement "?(\$BASE/src/)?requirements\.txt"? ', line), line


def link_distributions(names: Iterable[str], site: Path) -> None:
    """Link the files of installed distributions into another folder for packages.

    Entry points lie outside the folder for packages, and are left out.
    """
    for name in sorted(names):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # not for this system
            continue
        for file in distribution.files or []:
            if file.parts[0] == "..":
                continue
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(distribution.locate_file(file))


@pytest.mark.slow
def test_a_wheel_with_the_core_alone_trains_and_evaluates_in_an_empty_folder(tmp_path):
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
    # The packages of the core, and neither extras nor what only tests need.
    (site,) = environment.glob("lib/python3*/site-packages")
    link_distributions(installed_with(project()["dependencies"]), site)
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
    optional = run("-c", FIND_OPTIONAL, *sorted(EXTRA_OF))
    assert optional == "[]\n"
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
