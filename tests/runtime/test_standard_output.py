"""`| head` ends a program quietly; a broken pipe elsewhere is a fault."""

import os
import subprocess
import sys

import pytest

from mujica_jax.runtime.standard_output import READER_GONE, run_program
from tests.helpers.paths import ROOT


@pytest.mark.parametrize("name", ["train", "eval", "index"])
def test_a_reader_that_has_enough_ends_the_program_quietly(name):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", f"mujica_jax.{name}", "--help"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writing)
    assert ended.returncode == READER_GONE
    assert ended.stderr == ""


def test_another_broken_pipe_keeps_its_traceback():
    def broken() -> int:
        raise BrokenPipeError("a socket")

    with pytest.raises(BrokenPipeError, match="a socket"):
        run_program(broken)


def run(program: str, *shell: str) -> subprocess.CompletedProcess[str]:
    """Run a program of one line under `run_program`, with the shell's redirections behind it."""
    source = f"import sys; from mujica_jax.runtime.standard_output import run_program; {program}"
    command = ["bash", "-c", f'"$0" -c "$1" {" ".join(shell)}', sys.executable, source]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-"])
def test_a_program_with_closed_streams_runs(closed, tmp_path):
    written = tmp_path / "written"
    body = (
        f"main = lambda: (print('x'), print('y', file=sys.stderr), open('{written}', "
        "'w').write('z'), 0)[3]"
    )
    ended = run(f"{body}; sys.exit(run_program(main))", closed)
    assert ended.returncode == 0, ended.stderr
    assert written.read_text() == "z", (
        "nothing that is printed lands in a file that was opened later"
    )


def test_a_run_goes_on_where_its_output_goes_to_a_full_disk():
    lines = "p = Progress(); main = lambda: (p.line('one'), p.line('two'), 0)[2]"
    ended = run(
        f"from mujica_jax.report.progress import Progress; {lines}; sys.exit(run_program(main))",
        ">/dev/full",
    )
    assert ended.returncode == 0
    assert ended.stderr.count("the output cannot be written (No space left on device)") == 1


def test_a_program_whose_product_is_its_output_says_that_the_disk_is_full():
    ended = run("sys.exit(run_program(lambda: (print('hit'), 0)[1]))", ">/dev/full")
    assert ended.returncode == 2
    assert (
        ended.stderr
        == "error: the output cannot be written (No space left on device): send it elsewhere\n"
    )
