"""The phases of a run, each of which ends with an evaluation.

They have names, results, and the state that they end with.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from mujica_jax.learning.trainer import TrainState
from mujica_jax.records import Trajectory
from mujica_jax.report.results import PhaseRow

GetState = Callable[[], TrainState]
# Lines of metrics.jsonl and stages of the clock (docs/reference/metrics.md).
SAMPLING = "sampling"
EVALUATING = "evaluating"
LEARNING = "learning"
MISMATCH = "mismatch"
TIME = "time"
RETRIEVAL = "retrieval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of a run that ends with an evaluation: the warm-up, a round, the control."""

    name: str  # its row of the table, and its files
    step: int  # of its lines in metrics.jsonl; also the version of the policy that it leaves
    prefix: str = ""  # before the names of these lines, for a phase beside the others


PHASES = "phases/"
WARM_UP = Phase(name="warm-up", step=0)  # its trajectories are round 0 of the run directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """The result of a phase: its row of the table, and the computation it took.

    The control is given the same amount of computation.
    """

    row: PhaseRow
    forward_tokens: int  # tokens that went through the model once, while sampling
    trained_slots: int  # row slots that went forward and backward


@dataclasses.dataclass(kw_only=True)
class PhaseCost:
    """The samples and the learning of a phase, and the time when it began."""

    start_time: float  # by `time.monotonic`
    trajectories: int = 0  # sampled
    accepted: int = 0  # learnt
    forward_tokens: int = 0  # that went through the model once
    trained_slots: int = 0  # row slots that went forward and backward


class PhaseState:
    """The state that a phase ends with: in memory, or restored when it is called for.

    Training that goes on from it reuses its buffers. Called again after that, it is restored from
    its checkpoint.
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
    """Return the file that says that a phase is over. It holds the phase's row of the table."""
    return f"{PHASES}{name.replace(' ', '-')}.json"


def learning_folder(name: str) -> str:
    """Return the folder of the checkpoints of a phase."""
    return f"{LEARNING}/{name.replace(' ', '-')}"


def tokens_of(trajectories: Sequence[Trajectory]) -> int:
    """Count the tokens of all conversations. Each went through the model once while sampling."""
    return sum(
        len(turn.token_ids)
        for trajectory in trajectories
        for conversation in trajectory.conversations
        for turn in conversation.turns
    )
