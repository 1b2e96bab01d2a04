"""A build of an index that is killed by SIGKILL at a chosen moment.

    kill_at("text.vectors.write_json", 2, ["build", ...])

kills it before the second call of `mujica_jax.retrieval.text.vectors.write_json`.

As a program it is the build: it says when the moment has come and waits there for its end. Chunks
are small ones.
"""

import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from mujica_jax.retrieval.text import scann_package, vectors
from tests.helpers.paths import ROOT

EMBEDDED_ROWS = 20
HASHED_ROWS = 500
REACHED = "the moment has come"


def small_chunks(monkeypatch) -> None:
    """Set small chunks in this process, as in the one that is killed."""
    monkeypatch.setattr(vectors, "CHUNK_ROWS", EMBEDDED_ROWS)
    monkeypatch.setattr(scann_package, "CHUNK_ROWS", HASHED_ROWS)


def kill_at(function: str, call: int, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "tests.helpers.killed_build", function, str(call), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
        finally:
            process.send_signal(signal.SIGKILL)
    assert line.strip() == REACHED, f"the build ended before call {call} of {function}"
    assert process.returncode == -signal.SIGKILL


def main() -> int:
    function, call, *arguments = sys.argv[1:]
    folder, first, *places, name = function.split(".")
    owner: Any = importlib.import_module(f"mujica_jax.retrieval.{folder}.{first}")
    for place in places:
        owner = getattr(owner, place)
    original = getattr(owner, name)
    calls = itertools.count(1)

    def stopping(*arguments, **options):
        if next(calls) == int(call):
            print(REACHED, flush=True)
            time.sleep(600)
        return original(*arguments, **options)

    setattr(owner, name, stopping)
    vectors.CHUNK_ROWS = EMBEDDED_ROWS
    scann_package.CHUNK_ROWS = HASHED_ROWS
    from mujica_jax.commands import index

    return index.main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
