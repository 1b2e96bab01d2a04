"""Run an entry point whose standard output may be a closed pipe, a full disk, or closed.

    python -m mujica_jax.train --help | head
    python -m mujica_jax.eval ... > /a/full/disk
    python -m mujica_jax.train ... >&-

In each of these cases, `run_program` returns an exit status instead of a traceback.
"""

import errno
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

# Exit status that a shell reports for a program that SIGPIPE (signal 13) ended: 128 + 13.
READER_GONE = 141
# Exit status if the output cannot be written.
OUTPUT_LOST = 2
# Errors of a disk that does not accept the output.
CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run_program(main: Callable[[], int]) -> int | str | None:
    """Run an entry point and return its exit status.

    If the reader of a pipe closes it early, the program ends without a message and with status 141.
    If the output does not fit on a full disk, it ends with one sentence and status 2.
    """
    _open_closed_streams()
    try:
        try:
            status: int | str | None = main()
        except SystemExit as system_exit:
            # argparse ends so after --help, and after an unknown flag.
            status = system_exit.code
        sys.stdout.flush()
    except BrokenPipeError:
        # An error of another pipe or socket keeps its traceback.
        if not _reader_is_gone():
            raise
        # The interpreter flushes standard output once more at its end, which would fail again.
        discard(sys.stdout)
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
    """Discard the buffered output of a stream, and all that is written to it later."""
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_descriptor, stream.fileno())
    os.close(null_descriptor)


def _open_closed_streams() -> None:
    """Redirect standard streams that were closed at the start to the null device.

    Python sets `sys.stdout` to None if standard output is closed. The file descriptor (0, 1 or 2)
    needs to be taken too. Otherwise the next opened file would get it, and a library that writes
    notices to descriptor 2 would write into that file.
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
    """Return whether writing to this stream fails.

    If it does not, another file caused the error, and its error is reported elsewhere.
    """
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
