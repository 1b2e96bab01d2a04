"""File systems that lack something: hard links, locks, `fsync` of a directory."""

import errno
import multiprocessing
import os

import pytest

from mujica_jax.storage import local

WRITERS = 4


@pytest.fixture(params=["ENOSYS", "EOPNOTSUPP", "EPERM"])
def no_hard_links(request, monkeypatch):
    """Let link(2) fail as on gcsfuse, SMB and FAT."""
    code = getattr(errno, request.param)

    def link(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local.os, "link", link)


def test_without_hard_links_a_file_is_created_once(no_hard_links, tmp_path):
    path = tmp_path / "folder" / "file"
    assert local.create(path, b"first")
    assert not local.create(path, b"second")
    assert path.read_bytes() == b"first"
    assert local.names(tmp_path, "") == ["folder/file"], "the lock is no file of the run"
    assert not list(path.parent.glob(".file.*")), "no temporary file stays"


def _create(arguments) -> bool:
    path, number = arguments
    return local.create(path, str(number).encode() * 1000)


def test_without_hard_links_one_of_several_writers_wins(no_hard_links, tmp_path):
    names = [tmp_path / f"file-{number}" for number in range(20)]
    with multiprocessing.get_context("fork").Pool(WRITERS) as pool:
        for path in names:
            won = pool.map(_create, [(path, writer) for writer in range(WRITERS)])
            assert sum(won) == 1
            assert path.read_bytes() == str(won.index(True)).encode() * 1000


def test_another_fault_of_link_is_not_hidden(monkeypatch, tmp_path):
    def link(*_):
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(local.os, "link", link)
    with pytest.raises(OSError, match="stale"):
        local.create(tmp_path / "file", b"x")


def test_a_file_system_without_locks_or_fsync_of_folders_takes_files(
    no_hard_links, monkeypatch, tmp_path
):
    def unsupported(*_):
        raise OSError(errno.EINVAL, "not supported")

    monkeypatch.setattr(local.fcntl, "flock", unsupported)
    fsync = os.fsync

    def fsync_of_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            unsupported()
        fsync(descriptor)

    monkeypatch.setattr(local.os, "fsync", fsync_of_files)
    assert local.create(tmp_path / "file", b"x")
    local.atomic_write(tmp_path / "file", b"y")
    assert (tmp_path / "file").read_bytes() == b"y"
