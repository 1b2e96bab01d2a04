"""Compile quickly in the default tests: most of their time is XLA's, and what they compare does not
depend on its optimisation, or the test says otherwise.

Programs are kept for the next test that needs the same one, and for the next time. The slow tests,
and whole runs in any (`whole_runs.py`), are compiled as users' programs are.
"""

import asyncio
import importlib.util
import inspect
import mmap
import os
import sys
from pathlib import Path

import hypothesis
import jaxlib
import pytest

from tests.helpers.patience import HANG_SECONDS
from tests.helpers.turned_clock import TurnedClock

KEPT = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).resolve().parents[1] / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
# The second one takes a third off the time of tests of models (docs/lab/experiments.md).
XLA_FLAGS = ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false")
# Builds of torch for CUDA bring triton. If tests of one process load TensorFlow first and triton later,
# the process ends with a segmentation fault. No test needs triton.
sys.modules.setdefault("triton", None)  # pyright: ignore[reportArgumentType]
# Files that take ten seconds and more: begun last, one of them would go on alone.
LONG = (
    "tests/inference/jetstream/test_generator.py",
    "tests/methods/test_few_shot_warmup.py",
    "tests/repository/test_extending.py",
    "tests/retrieval/graph/test_index.py",
    "tests/runs/test_what_a_run_keeps.py",
    "tests/tasks/tiny_world/test_world.py",
    "tests/tasks/two_wiki/test_task.py",
    "tests/commands/test_serve.py",
    "tests/web/test_ask_page.py",
    "tests/web/test_pages.py",
)

# Files and folders of tests that need an optional package, with the extra that brings it. The extra
# `dev` has all of them.
NEEDED_PACKAGES = {
    "tests/inference/jetstream/": ("jetstream", "jetstream"),
    "tests/inference/test_sampling.py": ("torch", "dev"),
    "tests/kernels/test_cpu_kernels.py": ("numba", "cpu"),
    "tests/models/test_quantization.py": ("qwix", "qwix"),
    "tests/repository/test_docs.py": ("mkdocs", "docs"),
    "tests/repository/test_readme.py": ("mkdocs", "docs"),
    "tests/runs/test_jetstream_run.py": ("jetstream", "jetstream"),
    "tests/runs/test_smollm2.py": ("mkdocs", "docs"),
    "tests/tasks/test_prepare.py": ("tensorflow_datasets", "tfds"),
    "tests/commands/test_serve.py": ("jetstream", "jetstream"),
}


class ModuleOfTests(pytest.Module):
    """A file of tests, which is skipped before its imports if its optional package is missing."""

    def collect(self) -> list[pytest.Item]:
        for beginning, (package, extra) in NEEDED_PACKAGES.items():
            if beginning in self.path.as_posix() and importlib.util.find_spec(package) is None:
                pytest.skip(f"the extra `{extra}` is not installed", allow_module_level=True)
        return list(super().collect())


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return ModuleOfTests.from_parent(parent, path=module_path)


def known_flags() -> list[str]:
    """XLA ends the process at a flag that it does not know, and flags come and go with its
    versions.

    The library holds the name of each flag as a C string. Names of removed flags stand in it too, but
    within other strings.
    """
    library = Path(jaxlib.__file__).parent / "libjax_common.so"
    if not library.exists():
        return [XLA_FLAGS[0]]
    with (
        open(library, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return [
            flag
            for flag in XLA_FLAGS
            if content.find(b"\0" + flag.strip("-").partition("=")[0].encode() + b"\0") >= 0
        ]


@pytest.fixture
def turned_clock(monkeypatch: pytest.MonkeyPatch) -> TurnedClock:
    return TurnedClock(monkeypatch)


@pytest.fixture(scope="module")
def decoder():
    """That of `packed_rows`, for modules that have none of their own."""
    from tests.helpers.packed_rows import tiny_decoder

    return tiny_decoder()


def pytest_configure(config: pytest.Config) -> None:
    # A busy machine is no fault.
    too_slow = hypothesis.HealthCheck.too_slow
    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[too_slow]
    )
    hypothesis.settings.load_profile("any machine")
    if config.getoption("markexpr") == "not slow":
        os.environ["XLA_FLAGS"] = " ".join(
            [os.environ.get("XLA_FLAGS", ""), *known_flags()]
        ).strip()
        for name, value in KEPT.items():
            os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine; one that waits for ever fails."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asked = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**asked), HANG_SECONDS))
    return True


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that has a chat template."""
    from mujica_jax.models.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train(iter(["Who is the director of The Purple Shore?"]), 300).save(folder)
    return folder
