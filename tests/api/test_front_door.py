"""`import mujica_jax as mj` is fast, and has every name of the API."""

import subprocess
import sys

import pytest

import mujica_jax
from tests.helpers.paths import ROOT


def output_of(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_the_package_loads_no_other_package():
    loaded = output_of(
        "import mujica_jax, sys; print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    assert loaded == "False False"


def test_every_name_is_there_and_is_listed():
    assert set(mujica_jax.__all__) <= set(dir(mujica_jax))
    assert mujica_jax.read_trajectories.__module__ == "mujica_jax.api.trajectories"


def test_reading_trajectories_does_not_start_jax():
    program = "import mujica_jax, sys; mujica_jax.read_trajectories; print('jax' in sys.modules)"
    assert output_of(program) == "False"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        mujica_jax.lod  # noqa: B018


def test_the_module_train_can_be_called_like_the_function():
    program = (
        "import mujica_jax as mj\n"
        "import mujica_jax.train\n"
        "from mujica_jax.errors import UserError\n"
        "try:\n"
        "    mj.train('tiny_wrld')\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    assert output_of(program) == "unknown configuration 'tiny_wrld'; did you mean tiny_world?"
