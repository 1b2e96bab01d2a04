"""The runs that the application shows, by name.

Names that come from outside are only looked up here, and never joined to a path.
"""

from collections.abc import Sequence
from pathlib import Path, PurePath

from mujica_jax.errors import UserError, nearest
from mujica_jax.web.viewed_run import TrajectorySet, ViewedRun


class UnknownNameError(UserError):
    """A request names a run, a set or a trajectory that does not exist."""


class RunLibrary:
    """The runs by name. The name of a run is the name of its directory.

    If two directories have the same name, the later one gets a number: "first", "first (2)".
    """

    def __init__(self, directories: Sequence[str]) -> None:
        """Open all runs. Raises UserError if a directory holds no run."""
        self.runs: dict[str, ViewedRun] = {}
        for directory in directories:
            base = PurePath(directory.rstrip("/")).name or Path(directory).resolve().name
            name = base
            number = 1
            while name in self.runs:
                number += 1
                name = f"{base} ({number})"
            self.runs[name] = ViewedRun(name, directory)

    def run(self, name: str) -> ViewedRun:
        """Return the run of this name. Raises UnknownNameError."""
        if name not in self.runs:
            raise UnknownNameError(f"unknown run {name!r}; {nearest(name, list(self.runs))}")
        return self.runs[name]

    def set_of(self, run: ViewedRun, set_id: str) -> TrajectorySet:
        """Return the round or evaluation of this id. Raises UnknownNameError."""
        sets = run.sets()
        if set_id not in sets:
            advice = nearest(set_id, list(sets)) if sets else "it has none yet"
            raise UnknownNameError(
                f"run {run.name} has no round or evaluation {set_id!r}; {advice}"
            )
        return sets[set_id]
