"""Errors a user can cause.

An entry point prints their sentence and exits with 2. All other errors keep their traceback.
"""

import difflib
from collections.abc import Collection


class UserError(ValueError):
    """One sentence for the user: what is wrong, both values where two disagree, and what to do."""


class StoreError(UserError):
    """A run directory or one of its objects is not what its manifest says."""


class RunMismatchError(UserError):
    """The run directory belongs to another configuration."""


class StoreUnavailableError(UserError):
    """A store did not answer within its deadline.

    Its objects are unknown, so none counts as damaged.
    """


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint for a name that is not known."""
    matches = difflib.get_close_matches(name, known, n=1)
    if matches:
        return f"did you mean {matches[0]}?"
    return f"there are: {', '.join(known)}"
