"""Run programs whose standard output is a pipe, a full disk, or closed.

    python -m mujica_jax.train --help | head
    python -m mujica_jax.eval ... > /a/full/disk
    python -m mujica_jax.train ... >&-

`run_program` turns each of these faults into an exit status.
"""

import errno
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

READER_GONE = 141  # what a shell reports of a tool that SIGPIPE (13) ended: 128 + 13
OUTPUT_LOST = 2
CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run_program(main: Callable[[], int]) -> int | str | None:
    """Run an entry point and return its exit status.

    A reader that closes the pipe early ends the program quietly, with status 141. Output that a
    full disk does not take is one sentence and status 2.
    """
    _open_closed_streams()
    try:
        try:
            status: int | str | None = main()
        except SystemExit as system_exit:  # --help, or a flag that does not exist
            status = system_exit.code
        sys.stdout.flush()
    except BrokenPipeError:
        # If it is another pipe or socket, the fault keeps its traceback.
        if not _reader_is_gone():
            raise
        discard(sys.stdout)  # the interpreter flushes once more
        return READER_GONE
    except OSError as error:
        if error.errno not in CANNOT_BE_WRITTEN or not _cannot_be_written(sys.stdout):
            raise
        discard(sys.stdout)
        print(
            f"error: the output cannot be written ({error.strerror}): send it elsewhere",
            file=sys.stderr,
        )
        return OUTPUT_LOST
    return status


def discard(stream: TextIO) -> None:
    """Drop what a stream still holds, and all that is written to it later."""
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_descriptor, stream.fileno())
    os.close(null_descriptor)


def _open_closed_streams() -> None:
    """Open standard streams that were closed when the program was started.

    What is written to them is dropped. Python has None for a closed stream. Its number is taken as
    well: otherwise the next file that is opened would get number 1 or 2, and a library that writes
    notices there would write into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null_descriptor = os.open(os.devnull, os.O_RDWR)
            if null_descriptor != descriptor:
                os.dup2(null_descriptor, descriptor)
                os.close(null_descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the program ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _cannot_be_written(stream: TextIO) -> bool:
    """Return whether this stream has the fault. A full disk elsewhere has another sentence."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


def _reader_is_gone() -> bool:
    """Return whether the reader of standard output has closed its end."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
