"""Compile quickly in the default tests: most of their time is XLA's, and what they compare does not depend on its optimisation.

Programs are kept for the next test that needs the same one, and for the next time. The slow tests, and whole runs in any
(`whole_runs.py`), are compiled as users' programs are.
"""

import os
from pathlib import Path

import pytest

KEPT = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).resolve().parents[1] / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") == "not slow":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
        for name, value in KEPT.items():
            os.environ.setdefault(name, value)
