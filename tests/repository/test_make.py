"""What `make` installs for whom."""

import subprocess

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("target", "developer"), [("train", False), ("test", True), ("lint", True), ("docs", True)]
)
def test_training_installs_no_test_tools(target, developer, tmp_path):
    command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--editable '.[cpu]'\n" in shown
    assert (".[dev]" in shown) is developer
