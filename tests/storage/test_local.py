"""Written files can be read by whom the umask allows to."""

import os
import stat

import numpy as np
import pytest
from safetensors.numpy import save_file

from mujica_jax.storage.local import atomic_write, create, write_folder


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def permissions(request):
    """Set a umask, and return the permissions of a new file under it."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def permissions_of(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_weights_in_a_folder_have_the_permissions_of_other_files(permissions, tmp_path):
    def write(folder):
        (folder / "parts").mkdir()
        (folder / "config.json").write_text("{}")
        for name in ("model.safetensors", "parts/model.safetensors"):
            save_file({"a": np.zeros(2)}, folder / name)

    folder = tmp_path / "model"
    write_folder(folder, write)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == [
        "config.json",
        "model.safetensors",
        "model.safetensors",
    ]
    assert {permissions_of(path) for path in files} == {permissions}


def test_files_of_a_run_have_the_permissions_of_other_files(permissions, tmp_path):
    create(tmp_path / "created", b"")
    atomic_write(tmp_path / "written", b"")
    assert {permissions_of(path) for path in tmp_path.iterdir()} == {permissions}


def test_a_program_stays_executable(tmp_path):
    def write(folder):
        (folder / "run").write_text("#!/bin/sh\n")
        (folder / "run").chmod(0o750)

    write_folder(tmp_path / "bin", write)
    assert permissions_of(tmp_path / "bin" / "run") == 0o750
