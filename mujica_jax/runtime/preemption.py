"""Asked to end: SIGTERM, Ctrl-C or a multi-host job's preemption notice, heard at any time and
polled by the loops of every phase.

A signal raises nothing, least of all inside a library. A thread hears it, even while the main
thread is inside a compiler and runs no Python, and the next loop that polls ends the program: it
saves what it has to save and raises `Preempted`, which `exit_status` turns into one sentence and an
exit status for the entry points.

    SIGTERM   status 0. If no loop has polled within GRACE_SECONDS (a long compilation or load, neither can be
              interrupted), the process ends there and then.
    Ctrl-C    status 130; a second one ends the process at once.

Before the first phase there is nothing to save, so either ends the process at once. Ending anywhere
is allowed because all that a program writes survives SIGKILL at any moment.

In a job of several processes the one that is asked tells the others. A training step takes all of
them, so process 0 decides before each one whether to stop, and all get its answer; outside of
training each ends where it polls next. (JAX's own agreement,
`multihost_utils.reached_preemption_sync_point`, is for training steps alone and keeps SIGTERM to
itself.)
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.runtime import distributed

# platforms kill 30 s after the notice at the earliest; what is left is for printing one line
GRACE_SECONDS = 20.0
KEPT = "what was finished is kept"
INTERRUPTED = 130  # exit status of a shell's Ctrl-C
USER_ERROR = 2
END = 0  # no signal's number: ends the thread that listens
ELSEWHERE = 128  # added to the number of a signal that came to another process


class Preempted(Exception):
    """The program ends here because it was asked to. Its text says where it was and what is
    kept."""


class Preemption:
    """Whether this process was asked to end. A context manager: signals are heard inside it."""

    def __init__(
        self,
        *,
        kept: str = KEPT,
        end: Callable[[int], Any] = os._exit,
        grace_seconds: float | None = None,
    ) -> None:
        """`kept` says what an end in the middle of a phase leaves, unless the phase says otherwise;
        `end` ends the process.
        """
        self.phase: str | None = None  # None: nothing has begun
        self.then = ""  # what the user can do next; behind every closing sentence
        self.status = 0
        self._default = self._kept = kept
        self._end = end
        self._grace_seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._asked = self._answered = False
        self._interrupts = 0
        self._handlers: dict[int, Any] = {}

    def on_notice(self, number: int) -> None:
        """Another process of the job was asked to end, by the signal of this number: so is this
        one."""
        if self._handlers:
            os.write(self._writing, bytes([number + ELSEWHERE]))
        else:
            self._asked = True

    @property
    def requested(self) -> bool:
        """Polled by loops, which end on True: from then on the process is not ended in the
        middle."""
        self._answered = self._answered or self._asked
        return self._answered

    def at_step(self) -> bool:
        """As `requested`, polled once before every training step. All processes of a job get the
        same answer."""
        asked, status = distributed.broadcast("a training step", lambda: [self._asked, self.status])
        if not asked:
            return False
        self._asked, self.status = True, status
        return self.requested

    def enter(self, phase: str, *, kept: str | None = None) -> None:
        """A phase begins, named as the closing sentence names it. Ends the program here if that was
        asked for."""
        self.phase, self._kept = phase, self._default if kept is None else kept
        self.check()

    def keeps(self, kept: str) -> None:
        """What an end in the middle of the phase leaves from now on."""
        self._kept = kept

    def check(self) -> None:
        """Raises Preempted if the program was asked to end."""
        if self.requested:
            raise self.ended()

    def ended(self, kept: str | None = None) -> Preempted:
        return Preempted(self._sentence(self._kept if kept is None else kept))

    def exit_status(self, program: Callable[[], object]) -> int:
        """Runs the program of an entry point. 0: done; 2: a mistake of the user's, in one sentence;
        else as asked to end. The other processes of its job are told."""
        with self:
            try:
                program()
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                distributed.abort(str(error), USER_ERROR)
                return USER_ERROR
            except Preempted as ended:
                print(f"\n{ended}", file=sys.stderr)
                distributed.abort(str(ended), self.status)
                return self.status
            except Exception:
                distributed.abort_with_traceback()
                raise
        return 0

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():  # no other one may set handlers
            self._reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._handlers = {
                number: signal.signal(number, _nothing)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
            self._listener = threading.Thread(target=self._listen, name="preemption", daemon=True)
            self._listener.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._handlers:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.write(self._writing, bytes([END]))
            self._listener.join()
            os.close(self._reading)
            os.close(self._writing)
            self._handlers = {}

    def _listen(self) -> None:
        """The interpreter writes the number of every signal here, from inside whatever it
        interrupts."""
        deadline = None
        while True:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._reading], [], [], wait)
            if not ready:  # the deadline
                if not self._answered:
                    self._end_now()
                deadline = None
                continue
            for byte in os.read(self._reading, 64):
                number, here = byte % ELSEWHERE, byte < ELSEWHERE
                if number == END:
                    return
                if number == signal.SIGINT and (here or not self._asked):
                    self._interrupted(here)
                elif number == signal.SIGTERM and not self._asked:
                    deadline = time.monotonic() + self._grace_seconds
                    self._ask(number, here)

    def _interrupted(self, here: bool) -> None:
        self.status = INTERRUPTED
        self._interrupts += here
        if self._interrupts > 1:
            self._end_now()
        else:
            self._ask(signal.SIGINT, here)
            print(
                "\nending at the next safe point; Ctrl-C again ends at once",
                file=sys.stderr,
                flush=True,
            )

    def _ask(self, number: int, here: bool) -> None:
        if self.phase is None:
            self._end_now()
        self._asked = True
        if here:
            distributed.announce_preemption(number)

    def _end_now(self) -> None:
        sentence = self._sentence(self._kept)
        print(f"\n{sentence}", file=sys.stderr, flush=True)
        distributed.abort(sentence, self.status)
        self._end(self.status)

    def _sentence(self, kept: str) -> str:
        how = "interrupted" if self.status else "preempted"
        where = "before anything began" if self.phase is None else f"in {self.phase}; {kept}"
        return "; ".join(part for part in (f"{how} {where}", self.then) if part)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler, so that the interpreter writes the signal down and the process lives on."""
