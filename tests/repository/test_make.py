"""What `make` installs for whom, and what CI says of a test that fails once."""

import shutil
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("target", "developer"), [("train", False), ("test", True), ("lint", True)]
)
def test_training_installs_no_test_tools(target, developer, tmp_path):
    command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--editable '.[cpu]'\n" in shown
    assert (".[dev]" in shown) is developer


def test_what_fails_once_is_listed_and_what_fails_twice_fails(tmp_path):
    tests = tmp_path / "tests"
    (tests / "helpers").mkdir(parents=True)
    for name in (
        "__init__",
        "conftest",
        "helpers/__init__",
        "helpers/patience",
        "helpers/turned_clock",
    ):
        shutil.copy(ROOT / "tests" / f"{name}.py", tests / f"{name}.py")
    (tests / "test_given.py").write_text(
        "from pathlib import Path\n"
        "def test_once():\n"
        "    file = Path(__file__).with_name('second time')\n"
        "    again = file.exists()\n"
        "    file.touch()\n"
        "    assert again\n"
        "def test_twice():\n"
        "    assert False\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "--reruns",
        "1",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
    ]
    ended = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout
    assert "1 failed, 1 passed, 2 rerun" in ended.stdout, ended.stdout
    unstable = ended.stdout.partition("unstable: failed once, passed when run again")[2]
    assert "test_once" in unstable.partition("short test summary")[0]
    assert "test_twice" not in unstable.partition("short test summary")[0]
