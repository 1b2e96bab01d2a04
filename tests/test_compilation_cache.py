"""What is kept of compiled programs: all processes find theirs again, and half a file, as a kill leaves it, is compiled again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax._src import compiler

from mujica_jax.runtime.compilation_cache import _keep_own_programs, has_own_key

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import jax, jax.numpy as jnp
from mujica_jax.runtime.compilation_cache import use_compilation_cache

use_compilation_cache()
print(jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8))))
"""

AS_PROCESS_1 = """
import jax
from jax._src.distributed import global_state

global_state.process_id = 1
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
"""
SAID = """
print(found.count("/jax/compilation_cache/cache_hits"), found.count("/jax/compilation_cache/compile_requests_use_cache"))
"""
FULL = """
from jax._src import compilation_cache

def full(*_):
    raise OSError(28, "No space left on device")

compilation_cache.put_executable_and_time = full
"""


def result(folder: Path, program: str = PROGRAM) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def programs(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith("-cache")]


def test_half_a_compiled_program_is_compiled_again(tmp_path):
    assert result(tmp_path) == "512.0\n"
    assert programs(tmp_path)
    for path in programs(tmp_path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert result(tmp_path) == "512.0\n"


def test_the_second_process_of_a_job_finds_its_programs_again_too(tmp_path):
    """JAX writes programs down in the first process alone."""
    program = AS_PROCESS_1 + PROGRAM + SAID
    first, second = (result(tmp_path, program).splitlines() for _ in range(2))
    hits, asked = second[1].split()
    assert first == ["512.0", f"0 {asked}"] and hits == asked != "0"
    assert len(programs(tmp_path)) == int(asked)


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path):
    assert result(tmp_path, AS_PROCESS_1 + FULL + PROGRAM) == "512.0\n"
    assert programs(tmp_path) == []


@pytest.mark.parametrize(
    ("platform", "of_one_process", "expected"),
    [
        ("cpu", True, True),
        ("cpu", False, True),
        ("tpu", True, True),
        ("tpu", False, False),
        ("gpu", True, False),
        ("gpu", False, False),
    ],
)
def test_no_two_processes_write_the_same_file(platform, of_one_process, expected):
    assert has_own_key(platform, of_one_process=of_one_process) == expected


def test_another_jax_is_left_as_it_is(monkeypatch):
    def renamed(backend, computation):
        raise AssertionError("not called")

    monkeypatch.setattr(compiler, "_compile_and_write_cache", renamed)
    _keep_own_programs()
    assert compiler._compile_and_write_cache is renamed
    monkeypatch.delattr(compiler, "_compile_and_write_cache")
    _keep_own_programs()
