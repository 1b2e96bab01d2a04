"""Errors a user can cause: an entry point prints the sentence and exits with 2. Everything else is our fault and keeps its traceback."""


class UserError(ValueError):
    """One sentence for the user: what is wrong, both values where two disagree, and what to do."""


class StoreError(UserError):
    """A run directory or one of its objects is not what its manifest says."""


class RunMismatch(UserError):
    """The run directory belongs to another configuration."""


class StoreUnavailable(UserError):
    """A store did not answer within its deadline. Nothing is known about its objects, so none of them counts as damaged."""
