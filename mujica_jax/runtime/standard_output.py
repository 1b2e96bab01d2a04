"""Programs whose standard output is a pipe, as in `python -m mujica_jax.train --help | head`."""

import os
import select
import sys
from collections.abc import Callable

READER_GONE = 141  # what a shell reports of a tool that SIGPIPE (13) ended: 128 + 13


def run_program(main: Callable[[], int]) -> int | str | None:
    """The exit status of `main`. A reader that closes the pipe early ends the program quietly, with status 141."""
    try:
        try:
            status: int | str | None = main()
        except SystemExit as ended:  # --help, or a flag that does not exist
            status = ended.code
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():  # another pipe or socket: a fault that keeps its traceback
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return READER_GONE
    return status


def _reader_is_gone() -> bool:
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
