"""End a program in order after SIGTERM, Ctrl-C or a multi-host job's preemption notice.

A signal raises nothing, least of all inside a library. A thread hears it, even while the main
thread is inside a compiler and runs no Python. The next loop that polls ends the program: it saves
its state and raises `PreemptedError`, which `exit_status` turns into one sentence and an exit status for
the entry points.

    SIGTERM   status 0. If no loop has polled within GRACE_SECONDS (a long compilation or load,
              neither can be interrupted), the process ends there and then.
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
KEPT_TEXT = "what was finished is kept"
INTERRUPTED = 130  # exit status of a shell's Ctrl-C
USER_ERROR = 2
END = 0  # no signal's number: ends the thread that listens
ELSEWHERE = 128  # added to the number of a signal that came to another process


class PreemptedError(Exception):
    """The program ends here because it was asked to.

    The text says where it was and what is kept.
    """


class Preemption:
    """A request to end this process. A context manager: signals are heard inside it."""

    def __init__(
        self,
        *,
        kept_text: str = KEPT_TEXT,
        end: Callable[[int], Any] = os._exit,
        grace_seconds: float | None = None,
    ) -> None:
        """Prepare to end the process.

        `kept_text` says what an end in the middle of a phase leaves, unless the phase says
        otherwise. `end` ends the process.
        """
        self.phase: str | None = None  # None: nothing has begun
        self.then = ""  # what the user can do next; behind every closing sentence
        self.status = 0
        self._default_kept_text = kept_text
        self._kept_text = kept_text
        self._end = end
        self._grace_seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._asked = False  # a signal or notice came
        self._answered = False  # a loop has polled since
        self._interrupts = 0  # Ctrl-C on this host
        self._handlers: dict[int, Any] = {}

    def on_notice(self, number: int) -> None:
        """End this process too, because another one of the job was asked to end.

        `number` is that of the signal which asked it.
        """
        if self._handlers:
            os.write(self._writing, bytes([number + ELSEWHERE]))
        else:
            self._asked = True

    @property
    def requested(self) -> bool:
        """Whether the program was asked to end. Loops poll it, and end on True.

        From then on the process is not ended in the middle.
        """
        self._answered = self._answered or self._asked
        return self._answered

    def at_step(self) -> bool:
        """Return whether to end, as `requested`, before every training step.

        All processes of a job get the same answer.
        """
        is_asked, status = distributed.broadcast(
            "a training step", lambda: [self._asked, self.status]
        )
        if not is_asked:
            return False
        self._asked = True
        self.status = status
        return self.requested

    def enter(self, phase: str, *, kept_text: str | None = None) -> None:
        """Begin a phase, named as the closing sentence names it.

        `kept_text` says what an end in the middle of it leaves. Raises PreemptedError if the program was asked to end.
        """
        self.phase = phase
        self._kept_text = self._default_kept_text if kept_text is None else kept_text
        self.check()

    def keeps(self, kept_text: str) -> None:
        """Say what an end in the middle of the phase leaves from now on."""
        self._kept_text = kept_text

    def check(self) -> None:
        """Raise PreemptedError if the program was asked to end."""
        if self.requested:
            raise self.ended()

    def ended(self, kept_text: str | None = None) -> PreemptedError:
        """Return the exception that ends the program here."""
        return PreemptedError(self._sentence(self._kept_text if kept_text is None else kept_text))

    def exit_status(self, program: Callable[[], object]) -> int:
        """Run the program of an entry point and return its exit status.

        0: done; 2: a mistake of the user's, in one sentence; otherwise as it was asked to end. The
        other processes of its job are told.
        """
        with self:
            try:
                program()
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                distributed.abort(str(error), USER_ERROR)
                return USER_ERROR
            except PreemptedError as preempted:
                print(f"\n{preempted}", file=sys.stderr)
                distributed.abort(str(preempted), self.status)
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
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, _ignore)
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
        """Read the numbers of signals from the pipe, until END comes.

        The interpreter writes them there, from inside whatever the signal interrupts.
        """
        deadline = None
        while True:
            wait_seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._reading], [], [], wait_seconds)
            if not readable:  # the deadline
                if not self._answered:
                    self._end_now()
                deadline = None
                continue
            for byte in os.read(self._reading, 64):
                number = byte % ELSEWHERE
                is_here = byte < ELSEWHERE
                if number == END:
                    return
                if number == signal.SIGINT and (is_here or not self._asked):
                    self._interrupt(is_here=is_here)
                elif number == signal.SIGTERM and not self._asked:
                    deadline = time.monotonic() + self._grace_seconds
                    self._ask(number, is_here=is_here)

    def _interrupt(self, *, is_here: bool) -> None:
        """Handle Ctrl-C. A second one on this host ends the process at once."""
        self.status = INTERRUPTED
        if is_here:
            self._interrupts += 1
        if self._interrupts > 1:
            self._end_now()
        else:
            self._ask(signal.SIGINT, is_here=is_here)
            print(
                "\nending at the next safe point; Ctrl-C again ends at once",
                file=sys.stderr,
                flush=True,
            )

    def _ask(self, number: int, *, is_here: bool) -> None:
        """Ask the program to end. A signal that came here is announced to the other processes."""
        if self.phase is None:
            self._end_now()
        self._asked = True
        if is_here:
            distributed.announce_preemption(number)

    def _end_now(self) -> None:
        """End the process in the middle of whatever it does."""
        sentence = self._sentence(self._kept_text)
        print(f"\n{sentence}", file=sys.stderr, flush=True)
        distributed.abort(sentence, self.status)
        self._end(self.status)

    def _sentence(self, kept_text: str) -> str:
        """Return the closing sentence: how it ended, where, what is kept, what to do next."""
        sentence = "interrupted" if self.status else "preempted"
        if self.phase is None:
            sentence += " before anything began"
        else:
            sentence += f" in {self.phase}; {kept_text}"
        if self.then:
            sentence += f"; {self.then}"
        return sentence


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing.

    With a handler the interpreter writes the signal down, and the process goes on.
    """
