"""Do the other processes of the job live? JAX's service knows; this process says which one is lost,
and ends.

JAX sends the heartbeats, from threads that no Python holds up. Left to itself it would abort every
process with a page about its service, so the job is started as recoverable: then a lost process
ends no other one, and `get_live_nodes` no longer lists it.

    a thread     asks `get_live_nodes` again and again; it returns when every living process has asked too
    SIGABRT      the service lives in process 0, and a client that has lost it still aborts: the handler says so

A process that waits in a collective for a lost one would wait for ever. Ending in the middle is
allowed: what was saved is whole.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jax.errors import JaxRuntimeError

LOST = 75  # exit status: EX_TEMPFAIL, the same command may work again
SECONDS_BETWEEN = 1.0
MAX_SECONDS_TO_ANSWER = 2.0
GO_ON = "what was saved is in the run directory, and the same command on all hosts goes on from it"


class Heartbeat:
    """Watches from `start` to `stop`. `client` is JAX's client of its coordination service."""

    def __init__(
        self, client: Any, hosts: Sequence[str], process: int, *, deadline_seconds: float
    ) -> None:
        self._client, self._hosts, self._process, self._deadline = (
            client,
            hosts,
            process,
            deadline_seconds,
        )
        self._stopped = threading.Event()
        self._status: int | None = None
        # kept: C holds no reference
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self.on_abort)

    def start(self) -> None:
        if self._process > 0:
            # Not `signal.signal`, whose handlers run in the main thread: this one must run before
            # the abort goes on.
            library = ctypes.CDLL(None)
            library.signal.argtypes, library.signal.restype = (
                (ctypes.c_int, ctypes.c_void_p),
                ctypes.c_void_p,
            )
            library.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))
        threading.Thread(target=self.watch, name="heartbeat", daemon=True).start()

    def stop(self, status: int) -> None:
        """From here on other processes may end, and this one is about to end with that status,
        whatever comes."""
        self._status = status
        self._stopped.set()

    def watch(self) -> None:
        """Ends this process when another one, but process 0, is lost."""
        processes = range(len(self._hosts))
        while not self._stopped.wait(SECONDS_BETWEEN):
            try:
                living = self._client.get_live_nodes(list(processes))
            except JaxRuntimeError:
                # process 0 is lost, or the job is over: JAX aborts, or it does not
                return
            if lost := [process for process in processes if process not in living]:
                self._end(lost)

    def on_abort(self, number: int = signal.SIGABRT) -> None:
        """Ends this process if it aborts because process 0 is lost; any other abort goes on."""
        if self._status is not None:
            os._exit(self._status)
        if not self._store_answers():
            self._end([0])

    def _store_answers(self) -> bool:
        answers = []

        def ask() -> None:
            with contextlib.suppress(JaxRuntimeError):
                answers.append(self._client.key_value_dir_get("heartbeat/"))

        # JAX's client may hold a lock while it aborts
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(min(MAX_SECONDS_TO_ANSWER, self._deadline / 10))
        return bool(answers)

    def _end(self, lost: Sequence[int]) -> None:
        if self._stopped.is_set():
            return
        names = " and ".join(self._name(process) for process in lost)
        print(
            "\n"
            f"{names} {'are' if len(lost) > 1 else 'is'} lost, without a heartbeat for up to "
            f"{self._deadline:g} s (distributed.deadline_seconds), so {self._name(self._process)} "
            f"ends too: {GO_ON}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)

    def _name(self, process: int) -> str:
        return f"process {process} on {self._hosts[process]}"
