"""The record of an episode as a notebook shows it, and the stored trajectories of a run."""

import dataclasses
import html
import re
from typing import TYPE_CHECKING, Any

from mujica_jax.errors import UserError, nearest
from mujica_jax.records import Question, Trajectory
from mujica_jax.report.results import question_tree
from mujica_jax.report.text import plain
from mujica_jax.storage.run_directory import run_path
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.store import Store

if TYPE_CHECKING:
    import pyarrow

_shard = re.compile(r"rounds/(\d{4,})/shard-\d+\.parquet")
_evaluation = re.compile(r"eval/([^/]+)\.parquet")
# The trajectories of the warm-up are stored as round 0.
WARM_UP = "warm-up"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AnsweredTrajectory(Trajectory):
    """The record of an episode that answers a question. It prints as a tree.

    Attributes:
        question: The question with its candidates.
        notes: Sentences about the question, such as which entities it names.
    """

    question: Question
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the notes, and the episode as a tree: sub-questions, evidence and answer."""
        tree = plain(question_tree(self.question, self))
        return "\n".join([*self.notes, tree.rstrip("\n")])

    def _repr_html_(self) -> str:
        """Return the same for a notebook. All texts are escaped."""
        return f"<pre>{html.escape(repr(self))}</pre>"


def answered(
    trajectory: Trajectory, question: Question, notes: tuple[str, ...]
) -> AnsweredTrajectory:
    """Return a trajectory together with its question."""
    return AnsweredTrajectory(**vars(trajectory), question=question, notes=notes)


def read_trajectories(run: str, phase: str | None = None) -> "pyarrow.Table":
    """Read the stored trajectories of a run as an Arrow table, one row for each episode.

    Beside the columns of a trajectory (docs/reference/file_formats.md), the table has:

    - `phase`: "warm-up", "round 1", "control", or the name of a result of `evaluate`;
    - `kind`: "sampled" for episodes from which training chose, "evaluated" for greedy episodes that
      were only scored.

    Args:
        run: A run directory, local or gs://BUCKET/PREFIX.
        phase: The name of one phase. None: all phases.

    Raises:
        UserError: `run` is no run directory, or it has no trajectories of this phase.

    >>> import mujica_jax as mj
    >>> table = mj.read_trajectories("run", phase="round 1")
    >>> table.select(["phase", "kind", "question_id", "reward"]).to_pylist()[0]
    {'phase': 'round 1', 'kind': 'sampled', 'question_id': 'q-1', 'reward': 0.5}
    """
    import pyarrow

    folder = run_path(run)
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: give the directory of a run")
    store = Store(folder)
    files_of_phase: dict[str, list[tuple[str, str]]] = {}
    for name in [*store.names("rounds/"), *store.names("eval/")]:
        shard = _shard.fullmatch(name)
        evaluation = _evaluation.fullmatch(name)
        if shard:
            files_of_phase.setdefault(_phase_of_round(int(shard[1])), []).append((name, "sampled"))
        elif evaluation:
            files_of_phase.setdefault(_phase_of_file(evaluation[1]), []).append((name, "evaluated"))
    if not files_of_phase:
        raise UserError(f"{folder} has no trajectories: give the directory of a run that has begun")
    if phase is not None and phase not in files_of_phase:
        raise UserError(
            f"{folder} has no trajectories of the phase {phase!r}; {nearest(phase, files_of_phase)}"
        )

    tables = []
    for phase_name, files in files_of_phase.items():
        if phase in (None, phase_name):
            tables += [_read(store, name, phase_name, kind) for name, kind in files]
    return pyarrow.concat_tables(tables, promote_options="default")


def _read(store: Store, name: str, phase: str, kind: str) -> "pyarrow.Table":
    """Return the trajectories of a file, with the columns `phase` and `kind` first."""
    import pyarrow

    table = shards.read_table(store.read(name), str(store.root / name))
    for column, value in (("kind", kind), ("phase", phase)):
        values: list[Any] = [value] * table.num_rows
        table = table.add_column(0, column, pyarrow.array(values, pyarrow.string()))
    return table


def _phase_of_round(number: int) -> str:
    """Return the name of the phase that sampled a round of the run directory."""
    return f"round {number}" if number else WARM_UP


def _phase_of_file(stem: str) -> str:
    """Return the name of the phase whose evaluation has this file name."""
    return re.sub(r"^round-(\d+)$", r"round \1", stem)
