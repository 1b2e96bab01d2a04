"""`python -m mujica_jax.view` starts and ends as its page says."""

import signal
import socket
import subprocess
import sys

import httpx
import pytest

from mujica_jax.commands import view
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.viewed_runs import write_run


def test_a_directory_that_is_no_run_ends_with_a_sentence(tmp_path, capsys):
    assert view.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} is not the directory of a run: it has no config.json and no result of eval; "
        "give a directory that train wrote, such as runs/NAME, or a folder of eval --out\n"
    )
    missing = tmp_path / "missing"
    assert view.main([str(missing)]) == 2
    assert not missing.exists(), "looking changes nothing"


def test_a_port_in_use_ends_with_a_sentence(tmp_path, capsys):
    write_run(tmp_path / "little")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert view.main([str(tmp_path / "little"), "--port", str(port)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: 127.0.0.1:{port} cannot be opened")
    assert "Traceback" not in message


def test_arguments_without_a_run_end_with_status_2():
    with pytest.raises(SystemExit, match="2"):
        view.main([])


def test_the_program_shows_a_run_without_jax_until_it_is_told_to_end(tmp_path):
    write_run(tmp_path / "little")
    # The program prints at its end whether JAX was imported.
    program = (
        "import sys\n"
        "from mujica_jax.commands.view import main\n"
        "status = main(sys.argv[1:])\n"
        "print(status, 'jax' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "little"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        announcement = process.stdout.readline()
        assert announcement.startswith("showing 1 run at http://127.0.0.1:")
        address = announcement.split()[4]
        assert httpx.get(f"{address}/api/runs").json()["runs"][0]["name"] == "little"
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=HANG_SECONDS)
    assert rest.split() == ["0", "False"]
