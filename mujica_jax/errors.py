"""The errors that a user can cause.

A program prints the message of such an error and exits with status 2. Every other exception ends
the program with its traceback.
"""

import difflib
from collections.abc import Collection


class UserError(ValueError):
    """A mistake of the user.

    The message says what is wrong, both values if two disagree, and what to do.
    """


class StoreError(UserError):
    """A run directory, or an object in it, does not match its manifest."""


class RunMismatchError(UserError):
    """The run directory belongs to another configuration."""


class StoreUnavailableError(UserError):
    """A storage service did not answer within its deadline.

    The state of its objects is then unknown. None of them counts as damaged.
    """


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint for an unknown name: the closest known name, or else all known names."""
    matches = difflib.get_close_matches(name, known, n=1)
    if matches:
        return f"did you mean {matches[0]}?"
    return f"choose from {', '.join(known)}"
