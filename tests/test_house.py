"""Rules of the house: imports go down, heavy packages load late, no large files, every config
loads, entry points start fast."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mujica_jax.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mujica_jax"
# from the ground up, as the design has them; a room is a folder or a file of the package
FLOORS = (
    ("config", "records", "metrics", "dates", "errors"),
    ("storage", "http", "runtime", "rewards"),
    ("kernels",),
    ("models",),
    ("inference", "retrieval", "trajectories"),
    ("tasks", "learning"),
    ("agents", "report"),
    ("methods",),
    ("train", "eval", "sample", "index", "plan", "serve"),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS, start=1) for room in rooms}
HEAVY = {
    *"tensorflow tensorflow_datasets torch jetstream seqio scann qwix grain orbax google gcsfs".split()
}
ADAPTERS = {  # files whose whole purpose is the package; imported where they are used
    "inference/jetstream/engine.py": {"jetstream"},
    "inference/jetstream/factory.py": {"jetstream"},
    "inference/jetstream/server.py": {"jetstream"},
    "learning/checkpoints.py": {"orbax"},
    "storage/gcs.py": {"google"},
    "tasks/open_domain/builders.py": {"tensorflow_datasets"},
}
LARGEST_FILE_BYTES = 2_000_000
LARGEST_ADAPTER_BYTES = 6_000_000  # adapters/, where a trained policy is kept
# Packages that take a third of a second and more to import, beside those above.
SLOW = HEAVY | {
    *(
        "jax jaxlib flax optax numba transformers scipy pandas pyarrow matplotlib wandb httpx "
        "fastapi"
    ).split()
}
MOST_MODULES = 600  # that an entry point loads before it has read its arguments; JAX alone has 700

SOURCES = sorted(PACKAGE.rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
ENTRY_POINTS = [
    name for name in ("train", "eval", "sample", "index") if (PACKAGE / f"{name}.py").exists()
]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(["mujica_jax", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    )


def imports(nodes: Iterator[ast.AST], path: Path) -> Iterator[str]:
    """Absolute names of the modules that these statements import."""
    package = ("mujica_jax", *path.relative_to(PACKAGE).parts[:-1])
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not those in functions or under
    TYPE_CHECKING."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from run_at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            for field in ("body", "orelse", "finalbody"):
                yield from run_at_import(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from run_at_import(handler.body)


def rooms_imported_by(path: Path) -> set[str]:
    names = imports(ast.walk(ast.parse(path.read_text())), path)
    return {
        parts[1]
        for name in names
        if (parts := name.split("."))[0] == "mujica_jax" and len(parts) > 1
    }


def test_every_module_stands_on_a_floor():
    homeless = {room_of(path) for path in SOURCES} - set(FLOOR_OF) - {"__init__"}
    assert not homeless, f"give {sorted(homeless)} a floor in FLOORS"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_or_stay_in_the_room(path):
    """`errors` stands beneath all of them."""
    room = room_of(path)
    floor = FLOOR_OF.get(room, 0)
    not_below = {
        other
        for other in rooms_imported_by(path) - {room, "errors"}
        if FLOOR_OF.get(other, 0) >= floor > 0
    }
    assert not not_below, (
        f"{room} stands on floor {floor} and imports {sorted(not_below)}, which do not stand below"
    )


def test_modules_of_one_room_do_not_import_in_a_circle():
    """At import: a function may import a sibling late."""
    modules = {module_of(path) for path in SOURCES}
    below: dict[str, set[str]] = {}
    for path in SOURCES:
        names = set(imports(run_at_import(ast.parse(path.read_text()).body), path))
        below[module_of(path)] = {
            module for name in names for module in (name, name.rpartition(".")[0])
        } & modules
    while free := [module for module in below if not below[module] & set(below) - {module}]:
        for module in free:  # what depends on nothing left
            del below[module]
    assert not below, f"these modules import each other in a circle: {sorted(below)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_load_where_they_are_used(path):
    names = imports(run_at_import(ast.parse(path.read_text()).body), path)
    heavy = {name.split(".")[0] for name in names} & HEAVY - ADAPTERS.get(
        str(path.relative_to(PACKAGE)), set()
    )
    assert not heavy, f"import {sorted(heavy)} inside the function that needs it"


def test_the_rules_see_what_they_forbid():
    source = (
        "import os\n"
        "if x:\n"
        "    import torch\n"
        "try:\n"
        "    from scann import y\n"
        "except E:\n"
        "    import seqio.z\n"
    )
    late = "def f():\n    import tensorflow\nif TYPE_CHECKING:\n    import jetstream\n"
    found = set(
        imports(run_at_import(ast.parse(source + late).body), PACKAGE / "tasks" / "task.py")
    )
    assert found == {"os", "torch", "scann.y", "seqio.z"}
    relative = ast.parse(
        "from ..train import main\nfrom . import sibling\nfrom mujica_jax import eval"
    )
    found = set(imports(ast.walk(relative), PACKAGE / "tasks" / "task.py"))
    assert found == {"mujica_jax.train.main", "mujica_jax.tasks.sibling", "mujica_jax.eval"}


def test_no_large_file_is_tracked():
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    large = [
        str(file.relative_to(ROOT))
        for file in files
        if file.is_file()
        and file.stat().st_size
        > (LARGEST_ADAPTER_BYTES if ROOT / "adapters" in file.parents else LARGEST_FILE_BYTES)
    ]
    assert not large, (
        f"over {LARGEST_FILE_BYTES} bytes ({LARGEST_ADAPTER_BYTES} in adapters/): {large}"
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path):
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.get_config(), Config)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_an_entry_point_starts_with_few_modules_and_no_slow_package(name):
    """What an import costs is told by what it loads: seconds depend on how busy the machine is."""
    program = f"import sys\nimport mujica_jax.{name}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    modules = run.stdout.split()
    packages = {module.partition(".")[0] for module in modules}
    assert not packages & SLOW, (
        f"importing mujica_jax.{name} loads {', '.join(sorted(packages & SLOW))}"
    )
    assert len(modules) < MOST_MODULES, f"importing mujica_jax.{name} loads {len(modules)} modules"
