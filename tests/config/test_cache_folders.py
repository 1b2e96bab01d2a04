"""The folders of caches, with and without a home directory."""

from mujica_jax.config import cache_folders
from mujica_jax.config.cache_folders import cache_folder


def test_where_caches_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder("searches") == tmp_path / ".cache" / "mujica_jax" / "searches"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(cache_folders.os, "getuid", lambda: 2**31 - 7)  # nobody's
    assert cache_folder("compiled") == tmp_path / "caches" / "mujica_jax" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("buckets").is_dir(), (
        "a user without a home has folders that are removed at the end"
    )
