"""End a program cleanly after SIGTERM, Ctrl-C or the preemption of another process of its job.

A signal raises no exception, because that could happen inside a library. Instead, a thread receives
the signal, even while the main thread is inside a compiler and runs no Python. Loops of the program
poll `requested` between units of work. The first loop that sees the request saves its state and
raises `PreemptedError`. `exit_status` turns that into one sentence and an exit status.

    SIGTERM   Exit status 0. If no loop polls within GRACE_SECONDS, the process ends at once. This
              happens during a long compilation or load, which cannot be interrupted.
    Ctrl-C    Exit status 130. A second Ctrl-C ends the process at once.

Before the first phase there is nothing to save, so both signals end the process at once. The
process may end at any point, because all files that it writes survive SIGKILL at any moment.

In a job of several processes, the process that gets the signal tells the others. A training step
needs all processes. Therefore process 0 decides before each step whether to stop, and all processes
follow its decision. Outside of training, each process ends at its next poll. (JAX's own
`multihost_utils.reached_preemption_sync_point` works for training steps only, and lets no other
code handle SIGTERM.)
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

# How long to wait for a loop to poll. Platforms kill a process 30 s after the notice at the
# earliest. The rest of that time is for ending the process.
GRACE_SECONDS = 20.0
KEPT_TEXT = "finished work is saved"
# Exit status that a shell reports after Ctrl-C: 128 + SIGINT.
INTERRUPTED = 130
# Exit status of a mistake of the user.
USER_ERROR = 2
# A byte in the pipe that is not the number of a signal. It ends the listening thread.
END = 0
# Added to the number of a signal that another process received.
ELSEWHERE = 128


class PreemptedError(Exception):
    """The program ends here because it was asked to.

    The message says where it stopped and what is saved.
    """


class Preemption:
    """A receiver of requests to end this process.

    It is a context manager, and handles signals inside its `with` block.
    """

    def __init__(
        self,
        *,
        kept_text: str = KEPT_TEXT,
        end: Callable[[int], Any] = os._exit,
        grace_seconds: float | None = None,
    ) -> None:
        """Set up the object; signals are handled from `__enter__` on.

        `kept_text` tells the user what is saved if the process ends in the middle of a phase.
        `enter` can replace it for one phase. `end` ends the process with an exit status.
        `grace_seconds` is the time in which a loop has to poll (default: GRACE_SECONDS).
        """
        # Name of the current phase. None before the first phase.
        self.phase: str | None = None
        # What the user can do next, at the end of every closing sentence.
        self.then = ""
        # Exit status if the process ends because of a request.
        self.status = 0
        self._default_kept_text = kept_text
        self._kept_text = kept_text
        self._end = end
        self._grace_seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
        # A signal or a notice of another process has arrived.
        self._asked = False
        # A loop has polled since then.
        self._answered = False
        # How often Ctrl-C was pressed on this host.
        self._interrupts = 0
        # Earlier handlers of the signals, to restore at the end. Empty outside the `with` block.
        self._handlers: dict[int, Any] = {}

    def on_notice(self, number: int) -> None:
        """Ask this process to end, because another process of the job received a signal.

        `number` is the number of that signal.
        """
        if self._handlers:
            os.write(self._writing, bytes([number + ELSEWHERE]))
        else:
            self._asked = True

    @property
    def requested(self) -> bool:
        """Whether the program was asked to end. Loops poll this, and stop if it is True.

        After a poll that returns True, the grace time no longer ends the process.
        """
        self._answered = self._answered or self._asked
        return self._answered

    def at_step(self) -> bool:
        """Return whether the program was asked to end, the same in all processes of the job.

        All processes must call this before every training step.
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
        """Begin a phase. Raises PreemptedError if the program was asked to end.

        `phase` is its name in the closing sentence. `kept_text` says what is saved if the process
        ends in the middle of the phase.
        """
        self.phase = phase
        self._kept_text = self._default_kept_text if kept_text is None else kept_text
        self.check()

    def keeps(self, kept_text: str) -> None:
        """Change the text that says what is saved if the process ends in this phase."""
        self._kept_text = kept_text

    def check(self) -> None:
        """Raise PreemptedError if the program was asked to end."""
        if self.requested:
            raise self.ended()

    def ended(self, kept_text: str | None = None) -> PreemptedError:
        """Return the exception that ends the program. `kept_text` says what is saved."""
        return PreemptedError(self._sentence(self._kept_text if kept_text is None else kept_text))

    def exit_status(self, program: Callable[[], object]) -> int:
        """Run the program of an entry point and return its exit status.

        The status is 0 on success, and 2 after a UserError, whose message is printed. If the
        program was asked to end, the status depends on the signal. In a job of several processes,
        the others end too.
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
        # Only the main thread may set signal handlers.
        if threading.current_thread() is threading.main_thread():
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
        """Read the numbers of signals from the pipe, and handle them, until END arrives.

        The interpreter's signal handler writes them to the pipe, whatever the main thread does.
        """
        deadline = None
        while True:
            wait_seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._reading], [], [], wait_seconds)
            if not readable:
                # The grace time is over.
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
                "\nending at the next safe point; press Ctrl-C again to end at once",
                file=sys.stderr,
                flush=True,
            )

    def _ask(self, number: int, *, is_here: bool) -> None:
        """Ask the program to end. If this process got the signal, tell the other processes."""
        if self.phase is None:
            self._end_now()
        self._asked = True
        if is_here:
            distributed.announce_preemption(number)

    def _end_now(self) -> None:
        """End the process at once, whatever it is doing."""
        sentence = self._sentence(self._kept_text)
        print(f"\n{sentence}", file=sys.stderr, flush=True)
        distributed.abort(sentence, self.status)
        self._end(self.status)

    def _sentence(self, kept_text: str) -> str:
        """Return the closing sentence: why and where it ended, what is saved, what to do next."""
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

    With this handler, a signal does not end the process, and the interpreter writes its number to
    the pipe.
    """
