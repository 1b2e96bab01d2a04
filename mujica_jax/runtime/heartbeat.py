"""Do the other processes of the job still live? Two threads ask; when one of them is gone, this process says which, and ends.

A process that waits in a collective for one that is gone waits for ever, or is ended by JAX with a page about its coordination service.
So each process writes a count into the job's key-value store every second and reads those of the others. One whose count stands still
for nearly the deadline is lost. The store lives in process 0: where it does not answer and nobody listens at its address, process 0
is lost. Ending in the middle is allowed: what was saved is on disk, whole.

    beat thread   writes and reads the counts, and passes on who was asked to end (`preemption_sync`); may hang in a call of JAX's client
    judge thread  calls nothing of JAX, so that nothing keeps it from printing the sentence

A process that ends by itself leaves a shutdown notice in the store, and every other one ends when it has read it. The store ends with process 0,
so that this one ends last: every process confirms that it has read of an end, and process 0 waits for that.
"""

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mujica_jax.runtime.preemption_sync import PreemptionSync

LOST = 75  # exit status: EX_TEMPFAIL, the same command may work again
MAX_SECONDS_A_BEAT = 1.0
BEATS_A_DEADLINE = 10
SECONDS_A_NEAR_BEAT = 0.05  # while the processes agree where to stop
MAX_SECONDS_FOR_ALL_TO_KNOW = 6.0  # one that is lost confirms nothing
GO_ON = "what was saved is in the run directory, and the same command on all hosts goes on from it"


class Heartbeat:
    """Watches from `start` to `stop`. `exchange(count)` writes this process's count and returns those of all, by process number;
    `shutdown_notices()` exit status and closing sentence of those that ended by themselves, `confirm()` writes that this process has read
    one and `all_know()` says whether all have; `store_is_gone()` whether process 0 certainly is.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        process: int,
        *,
        deadline_seconds: float,
        exchange: Callable[[int], Mapping[int, int]],
        shutdown_notices: Callable[[], Mapping[int, tuple[int, str]]],
        confirm: Callable[[], object],
        all_know: Callable[[], bool],
        preemption_sync: PreemptionSync,
        store_is_gone: Callable[[], bool],
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._hosts, self._process, self._deadline = hosts, process, deadline_seconds
        self._exchange, self._shutdown_notices, self._store_is_gone, self._end = (
            exchange,
            shutdown_notices,
            store_is_gone,
            end,
        )
        self._confirm, self._all_know = confirm, all_know
        self._preemption_sync = preemption_sync
        self._interval = min(MAX_SECONDS_A_BEAT, deadline_seconds / BEATS_A_DEADLINE)
        # From a last beat to the sentence: this, then at most a beat until it is read and half a beat until it is judged.
        self._silence = deadline_seconds - 3 * self._interval
        self._counts = dict.fromkeys(range(len(hosts)), 0)
        self._changed = dict.fromkeys(range(len(hosts)), time.monotonic())
        self._heard = time.monotonic()  # when the store answered last
        self._ended: dict[int, tuple[int, str]] = {}  # the others
        self._end_from = math.inf  # when this process may end after them
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._beats, self._judges)]

    @property
    def interval_seconds(self) -> float:
        return self._interval

    @property
    def seconds_to_end(self) -> float:
        """From the moment when a process has confirmed an end until it has ended: the judge looks twice a beat."""
        return self._interval

    def start(self) -> None:
        _delay_abort()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """From here on others may end, and this process goes on."""
        self._stopped.set()

    def beat(self, count: int) -> None:
        """One round of the beat thread."""
        counts = self._exchange(count)
        ended = {process: said for process, said in self._shutdown_notices().items() if process != self._process}
        self._preemption_sync.beat()
        now = time.monotonic()
        for process, value in counts.items():
            if value != self._counts[process]:
                self._counts[process], self._changed[process] = value, now
        self._heard = now
        if not ended:
            return
        if not self._ended:
            self._ended, self._end_from = ended, now + MAX_SECONDS_FOR_ALL_TO_KNOW
        self._confirm()
        if self._process:
            self._end_from = now
        elif self._all_know():
            self._end_from = min(self._end_from, now + self.seconds_to_end)

    def verdict(self) -> tuple[int, str] | None:
        """With which status and why this process must end, or None."""
        if self._ended:
            if time.monotonic() < self._end_from:
                return None
            process, (status, sentence) = next(iter(self._ended.items()))
            return status, f"{self._name(process)} ended: {sentence}"
        unheard = time.monotonic() - self._heard
        if self._process and unheard > self._silence:
            return self._lost([0], unheard)
        if self._process and unheard > 2 * self._interval and self._store_is_gone():
            return LOST, f"{self._name(0)} is gone: nobody listens at its address, {self._ends_too()}"
        silent = [
            process
            for process, changed in self._changed.items()
            if process != self._process and self._heard - changed > self._silence
        ]
        return self._lost(silent, max(self._heard - self._changed[p] for p in silent)) if silent else None

    def _lost(self, processes: Sequence[int], seconds: float) -> tuple[int, str]:
        names = " and ".join(map(self._name, processes))
        verb = "have" if len(processes) > 1 else "has"
        return LOST, (
            f"{names} {verb} not been heard of for {seconds:.1f} s (distributed.deadline_seconds {self._deadline:g}), "
            f"{self._ends_too()}"
        )

    def _ends_too(self) -> str:
        return f"so {self._name(self._process)} ends too: {GO_ON}"

    def _name(self, process: int) -> str:
        return f"process {process} on {self._hosts[process]}"

    def _beats(self) -> None:
        count = 0
        while not self._stopped.wait(SECONDS_A_NEAR_BEAT if self._preemption_sync.is_near else self._interval):
            count += 1
            try:
                self.beat(count)
            except Exception:  # whatever JAX's client raises: the judge sees that nothing was heard
                continue

    def _judges(self) -> None:
        while not self._stopped.wait(self._interval / 2):
            if (verdict := self.verdict()) and not self._stopped.is_set():
                status, sentence = verdict
                print(f"\n{sentence}", file=sys.stderr, flush=True)
                self._end(status)
                return


def _delay_abort() -> None:
    """JAX's client aborts the process at the moment process 0 is gone, faster than anybody can say so, and no Python code runs in its
    thread. A signal handler is called with the signal's number, and SIGABRT is 6: `sleep` as the handler gives the judge six seconds.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
