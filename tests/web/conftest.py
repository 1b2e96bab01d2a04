"""A served run for the tests of this folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mujica_jax.web.app import create_app
from tests.helpers.served_app import app_served
from tests.helpers.viewed_runs import write_run


@pytest.fixture(scope="session")
def written_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `tests/helpers/viewed_runs.py`. It is written once, because writing flushes disks."""
    directory = tmp_path_factory.mktemp("written") / "little"
    write_run(directory)
    return directory


@pytest.fixture
def run_directory(written_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may change. Its name is "little"."""
    return shutil.copytree(written_run, tmp_path / "little")


@pytest.fixture
def client(run_directory: Path) -> Iterator[httpx.Client]:
    """A client of the application that shows the run."""
    app = create_app([str(run_directory)])
    with app_served(app) as address, httpx.Client(base_url=address) as http_client:
        yield http_client
