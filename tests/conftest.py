"""Compile quickly in the default tests: most of their time is XLA's, and what they compare does not depend on its optimisation.

The slow tests, and whole runs in any (`whole_runs.py`), are compiled as users' programs are.
"""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") == "not slow":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
