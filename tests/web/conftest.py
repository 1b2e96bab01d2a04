"""A served run for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mujica_jax.web.app import create_app
from tests.helpers.served_app import app_served
from tests.helpers.viewed_runs import write_run


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """The directory of the run of `tests/helpers/viewed_runs.py`, named "little"."""
    directory = tmp_path / "little"
    write_run(directory)
    return directory


@pytest.fixture
def client(run_directory: Path) -> Iterator[httpx.Client]:
    """A client of the application that shows the run."""
    with (
        app_served(create_app([str(run_directory)])) as address,
        httpx.Client(base_url=address) as http_client,
    ):
        yield http_client
