"""The phases of a run: their names, costs, results and training states.

A phase is a part of a run that ends with an evaluation: the warm-up, one or several rounds, or the
control run.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from mujica_jax.learning.trainer import TrainState
from mujica_jax.records import Trajectory
from mujica_jax.report.results import PhaseRow

# A function that returns a training state. It may load the state when it is called.
GetState = Callable[[], TrainState]
# Values of the key `phase` in metrics.jsonl, and names of stages of the clock
# (docs/reference/metrics.md).
SAMPLING = "sampling"
EVALUATING = "evaluating"
LEARNING = "learning"
MISMATCH = "mismatch"
TIME = "time"
RETRIEVAL = "retrieval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """The identity of a phase.

    Attributes:
        name: The name of the phase in the closing table and in file names.
        step: The step of its lines in metrics.jsonl, and the version of the policy after it.
        prefix: A prefix for the names of these lines. It separates a phase that is not part of the
            method, such as the control run, from the others.
    """

    name: str
    step: int
    prefix: str = ""


# The folder in the run directory with one file for each phase that is over.
PHASES = "phases/"
# The trajectories of the warm-up are stored as round 0 of the run directory.
WARM_UP = Phase(name="warm-up", step=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """The result of a phase: its row of the closing table, and the computation that it took.

    The control run gets as much computation as the method's phases together.

    Attributes:
        row: The row of the closing table.
        forward_tokens: Number of tokens that went forward through a model, to sample or score them.
        trained_slots: Number of token positions that went forward and backward, padding included.
    """

    row: PhaseRow
    forward_tokens: int
    trained_slots: int


@dataclasses.dataclass(kw_only=True)
class PhaseCost:
    """The cost of a phase, counted while the phase runs.

    Attributes:
        start_time: The time at which the phase began, by `time.monotonic`, in seconds.
        trajectories: Number of sampled trajectories.
        accepted: Number of trajectories that are learnt.
        forward_tokens: Number of tokens that went forward through a model, to sample or score them.
        trained_slots: Number of token positions that went forward and backward, padding included.
    """

    start_time: float
    trajectories: int = 0
    accepted: int = 0
    forward_tokens: int = 0
    trained_slots: int = 0


class PhaseState:
    """The training state after a phase. Calling the object returns the state.

    If the state is not in memory, the call restores it from the phase's checkpoint. A state leaves
    memory when the next phase starts from it, because training reuses its buffers.
    """

    def __init__(self, restore: GetState, state: TrainState | None = None) -> None:
        self._restore = restore
        self._state = state

    @property
    def is_here(self) -> bool:
        """Whether the state is in memory."""
        if self._state is None:
            return False
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))

    def __call__(self) -> TrainState:
        if self._state is None or not self.is_here:
            self._state = self._restore()
        return self._state


def phase_file(name: str) -> str:
    """Return the name of the file that marks a phase as over and holds its `PhaseResult`."""
    return f"{PHASES}{name.replace(' ', '-')}.json"


def learning_folder(name: str) -> str:
    """Return the name of the folder that holds the checkpoints of a phase."""
    return f"{LEARNING}/{name.replace(' ', '-')}"


def tokens_of(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of tokens in all conversations, both read and generated ones.

    Each of them went through the model once while sampling.
    """
    return sum(
        len(turn.token_ids)
        for trajectory in trajectories
        for conversation in trajectory.conversations
        for turn in conversation.turns
    )
