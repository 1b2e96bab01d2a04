"""`python -m mujica_jax.report` writes one file."""

import re
import subprocess
import sys

import pytest

from mujica_jax.commands import report
from tests.helpers.paths import ROOT
from tests.helpers.viewed_runs import write_run


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "little"
    write_run(directory)
    return directory


def test_a_report_is_one_file_that_names_no_other(run_directory, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert report.main([str(run_directory), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"report: {out}\n"
    text = out.read_text()
    assert "little" in text
    # The namespace of SVG is a name, and nothing is loaded from it.
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)\b|src=|@import", text)


def test_an_older_report_is_replaced(run_directory, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("older")
    assert report.main([str(run_directory), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")


def test_a_directory_as_out_ends_with_a_sentence(run_directory, tmp_path, capsys):
    assert report.main([str(run_directory), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: --out {tmp_path} is a directory; give the name of a file, such as report.html\n"
    )


def test_a_directory_that_is_no_run_ends_with_a_sentence(tmp_path, capsys):
    assert report.main([str(tmp_path), "--out", str(tmp_path / "report.html")]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_the_module_of_the_package_is_the_program(run_directory, tmp_path):
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "mujica_jax.report", str(run_directory), "--out", str(out)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    assert out.exists()
