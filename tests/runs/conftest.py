"""One undisturbed run, the measure of the others. Whichever worker needs it first makes it, and all
of them read it.
"""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.whole_runs import Undisturbed, json_lines, outcome, rest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Undisturbed:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    folder.mkdir(exist_ok=True)
    directory = folder / "run"
    output = folder / "output"
    rows = folder / "rows"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            shutil.rmtree(directory, ignore_errors=True)
            rows.unlink(missing_ok=True)
            output.write_text(rest(directory, rows=str(rows)))
    return Undisturbed(directory, output.read_text(), json_lines(rows), outcome(directory))


@pytest.fixture
def copy(undisturbed, tmp_path) -> Path:
    return shutil.copytree(undisturbed.directory, tmp_path / "run")
