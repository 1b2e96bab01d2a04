"""Rules of the house: imports go down, heavy packages load late, no large files, every config
loads, entry points start fast.
"""

import ast
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from mujica_jax.config.schema import Config
from tests.helpers.paths import ROOT

PACKAGE = ROOT / "mujica_jax"
# from the ground up, as the design has them; a room is a folder or a file of the package
FLOORS = (
    ("config", "records", "metrics", "errors"),
    ("rewards", "storage", "runtime", "http"),
    ("trajectories",),
    ("kernels",),
    ("models",),
    ("retrieval",),
    ("learning",),
    ("inference",),
    ("report",),
    ("tasks",),
    ("agents",),
    ("demonstrations",),
    ("runs",),
    ("methods",),
    ("web",),
    ("commands",),
    ("train", "eval", "sample", "index", "plan", "serve", "view"),
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
# What a function may import instead of its module: packages that are slow or that many runs lack.
LATE_PACKAGES = SLOW | {
    *"bm25s google_crc32c huggingface_hub jinja2 tensorboardX pypdf bs4 datasets".split()
}
# Modules of our own that a function may import, because importing them loads this slow package. An
# entry point may import every module late: it answers `--help` and wrong arguments before.
LATE_MODULES = {
    "mujica_jax.inference.engine.factory": "jax",
    "mujica_jax.inference.jetstream.factory": "jetstream",
    "mujica_jax.learning.checkpoints": "orbax",
    "mujica_jax.models.adapters": "jax",
    "mujica_jax.models.sharding": "jax",
    "mujica_jax.retrieval.embedding.embedder": "jax",
    "mujica_jax.retrieval.embedding.encoder": "jax",
    "mujica_jax.retrieval.text.exact": "jax",
    "mujica_jax.runs.parts": "jax",
    "mujica_jax.runs.model": "jax",
    "mujica_jax.storage.gcs": "google",
    "mujica_jax.storage.gcs_path": "google",
    "mujica_jax.tasks.open_domain.builders": "tensorflow_datasets",
}
MOST_MODULES = 600  # that an entry point loads before it has read its arguments; JAX alone has 700

SOURCES = sorted(PACKAGE.rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
ENTRY_POINTS = [
    name
    for name in ("train", "eval", "sample", "index", "view")
    if (PACKAGE / f"{name}.py").exists()
]


def room_of(path: Path) -> str:
    if path.name == "__main__.py":
        # `python -m mujica_jax.report`: an entry point, whose folder is a room of its own.
        return "commands"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_entry_point(path: Path) -> bool:
    return room_of(path) in ("commands", *FLOORS[-1])


def module_of(path: Path) -> str:
    return ".".join(["mujica_jax", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    )


MODULES = {module_of(path): path for path in SOURCES}


def imports(nodes: Iterator[ast.AST], path: Path) -> Iterator[str]:
    """Return absolute names of the modules that these statements import."""
    package = ("mujica_jax", *path.relative_to(PACKAGE).parts[:-1])
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements that run when the module is imported.

    Those in functions or under TYPE_CHECKING do not.
    """
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from run_at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            for field in ("body", "orelse", "finalbody"):
                yield from run_at_import(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from run_at_import(handler.body)


def modules_among(names: Iterable[str]) -> set[str]:
    """Return the modules of the package among what is imported.

    What is imported is a module, or a name of one: `from package import module` takes no name that
    the package's __init__ lists.
    """
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} & set(MODULES)


def imported_late(source: str, path: Path) -> set[str]:
    """Return what the functions of a file with this text import."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {name for function in functions for name in imports(ast.walk(function), path)}


@functools.cache
def imported_at_import(module: str) -> frozenset[str]:
    path = MODULES[module]
    return frozenset(imports(run_at_import(ast.parse(path.read_text()).body), path))


@functools.cache
def packages_loaded_by(module: str) -> frozenset[str]:
    """Return the other packages that importing a module of ours loads, through others of ours too."""
    packages: set[str] = set()
    loaded: set[str] = set()
    waiting = {module}
    while waiting:
        next_module = waiting.pop()
        loaded.add(next_module)
        names = imported_at_import(next_module)
        packages |= {name.partition(".")[0] for name in names} - {"mujica_jax"}
        # A module loads the __init__ of its folder too.
        folder = next_module.rpartition(".")[0]
        waiting |= modules_among({*names, folder}) - loaded
    return frozenset(packages)


def rooms_imported_by(path: Path) -> set[str]:
    names = imports(ast.walk(ast.parse(path.read_text())), path)
    parts_of_names = [name.split(".") for name in names]
    return {parts[1] for parts in parts_of_names if parts[0] == "mujica_jax" and len(parts) > 1}


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


def test_modules_do_not_import_in_a_circle():
    """An import inside a function and one for types alone count as well."""
    below = {
        module: modules_among(imports(ast.walk(ast.parse(path.read_text())), path))
        for module, path in MODULES.items()
    }
    while free := [module for module in below if not below[module] & set(below) - {module}]:
        # These depend on nothing that remains.
        for module in free:
            del below[module]
    assert not below, f"these modules import each other in a circle: {sorted(below)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_load_where_they_are_used(path):
    names = imports(run_at_import(ast.parse(path.read_text()).body), path)
    heavy = {name.split(".")[0] for name in names} & HEAVY - ADAPTERS.get(
        str(path.relative_to(PACKAGE)), set()
    )
    assert not heavy, f"import {sorted(heavy)} inside the function that needs it"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_function_imports_heavy_packages_alone(path):
    names = imported_late(path.read_text(), path)
    packages = {name.partition(".")[0] for name in names} - LATE_PACKAGES - {"mujica_jax"}
    assert not packages, f"import {sorted(packages)} at the top of the file"

    if is_entry_point(path):
        return
    for module in sorted(modules_among(names)):
        assert module in LATE_MODULES, f"import {module} at the top of the file"
        package = LATE_MODULES[module]
        assert package not in packages_loaded_by(module_of(path)), (
            f"the file loads {package} anyway: import {module} at its top"
        )


def test_modules_that_are_imported_late_load_the_package_that_is_named():
    imported: set[str] = set()
    for path in SOURCES:
        if not is_entry_point(path):
            imported |= modules_among(imported_late(path.read_text(), path))
    unused = set(LATE_MODULES) - imported
    assert not unused, f"no function imports {sorted(unused)}: remove them from LATE_MODULES"
    for module, package in LATE_MODULES.items():
        assert package in SLOW
        assert package in packages_loaded_by(module), f"importing {module} does not load {package}"


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
    imported = set(
        imports(run_at_import(ast.parse(source + late).body), PACKAGE / "tasks" / "task.py")
    )
    assert imported == {"os", "torch", "scann.y", "seqio.z"}
    methods = "class C:\n    async def g(self):\n        with x:\n            from orbax import y\n"
    late_names = imported_late(source + late + methods, PACKAGE / "tasks" / "task.py")
    assert late_names == {"tensorflow", "orbax.y"}
    relative = ast.parse(
        "from ..train import main\nfrom . import sibling\nfrom mujica_jax import eval"
    )
    imported = set(imports(ast.walk(relative), PACKAGE / "tasks" / "task.py"))
    assert imported == {"mujica_jax.train.main", "mujica_jax.tasks.sibling", "mujica_jax.eval"}
    assert modules_among({"os.path", "mujica_jax.errors.UserError", "mujica_jax.tasks.task"}) == {
        "mujica_jax.errors",
        "mujica_jax.tasks.task",
    }


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
    assert spec is not None
    assert spec.loader is not None
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
