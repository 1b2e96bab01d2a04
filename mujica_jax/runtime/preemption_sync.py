"""Where all processes of a job stop training, once one of them was asked to end.

A training step takes all of them: a process that stopped alone would leave the others in a collective that never ends. So whoever is asked
writes it into the job's key-value store. Every process that reads it lets no further step begin and writes down how many it has begun;
all stop before the step that follows the furthest one. (JAX's own agreement, `multihost_utils.reached_preemption_sync_point`, is for
training steps alone and keeps SIGTERM to itself, so that nothing else could hear of it.)

Reading and writing is done in `beat`, by a thread that no collective holds up (`heartbeat`); `at_step` only waits.
"""

import threading
from collections.abc import Callable, Mapping

ASKED, BEGUN = "asked", "begun"


class PreemptionSync:
    """One process's part. `read(what)` gives what each process wrote under that name, by process number; `write(what, value)` writes."""

    def __init__(
        self, processes: int, *, read: Callable[[str], Mapping[int, int]], write: Callable[[str, int], None]
    ) -> None:
        self._processes, self._read, self._write = processes, read, write
        self._state = threading.Condition()
        self._begun = 0  # training steps
        self._held = False  # no further one begins until it is known where all stop
        self._stop_before: int | None = None
        self._asked: int | None = None  # the signal's number
        self._heard: Callable[[int], None] = lambda number: None

    def tell(self, heard: Callable[[int], None]) -> None:
        """`heard(signal's number)` is called, in the thread of `beat`, when another process was asked to end."""
        self._heard = heard

    @property
    def is_near(self) -> bool:
        """Whether somebody was asked and there is no answer yet: the next beat is to come soon."""
        return self._asked is not None and self._stop_before is None

    def ask(self, number: int) -> None:
        """This process was asked to end, by a signal of this number. From any thread."""
        with self._state:
            if self._asked is None:
                self._asked = number

    def at_step(self) -> bool:
        """Whether to stop here: once before every training step, in every process. Waits while the others say where they are."""
        with self._state:
            self._state.wait_for(lambda: not self._held or self._stop_before is not None)
            if self._stop_before is not None and self._begun + 1 >= self._stop_before:
                return True
            self._begun += 1
            return False

    def beat(self) -> None:
        """One round: passes on that this process was asked, hears of others, and finds the step when all have said where they are."""
        if self._stop_before is not None:
            return
        if self._asked is not None:
            self._write(ASKED, self._asked)
        elif asked := self._read(ASKED):
            self.ask(number := min(asked.values()))
            self._heard(number)
        if self._asked is None:
            return
        with self._state:
            self._held = True
        self._write(BEGUN, self._begun)  # a step that is under way may need this process: only the next one is held
        counts = self._read(BEGUN)
        if len(counts) == self._processes:
            with self._state:
                self._stop_before = max(counts.values()) + 1
                self._state.notify_all()
