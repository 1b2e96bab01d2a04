"""What SFT and DPO on a file of your own share: the split of the file, and the course of learning.

Both methods have one phase. They read the file, make the policy that they start from, learn the
file, and evaluate the policy:

1. Start. With `--init` the run starts from the checkpoint. Without it, a model from scratch learns
   plain text and demonstrations first, as in every method. The start is evaluated, so that the
   closing table shows what the file changes.
2. Learn the file in `method.epochs` passes.
3. Commit the policy, evaluate it, and report the loss of the records that were held out.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Generic, TypeVar

from mujica_jax.config.methods import FileMethodConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.packing import PackedRows
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.records import Message
from mujica_jax.runs import evaluation
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import Phase, PhaseCost, PhaseResult, PhaseState
from mujica_jax.runs.run import Run
from mujica_jax.runs.versions import commit_policy

# The lines of metrics.jsonl about records that were held out.
VALIDATION = "validation"
Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split(Generic[Record]):
    """The records of a file that are learnt, and those that are held out for validation."""

    learnt: list[Record]
    held_out: list[Record]


def check_fits(
    run: Run, *, num_records: int, num_fitting: int, shortest_tokens: int, noun: str
) -> None:
    """Check that at least one record fits into a row. Raises UserError.

    `shortest_tokens` is the length of the shortest record, and `noun` what the message calls them.
    """
    if not num_fitting:
        raise UserError(
            f"none of the {num_records} {noun} fits trainer.sequence_length "
            f"{run.config.trainer.sequence_length}; the shortest has {shortest_tokens} tokens: "
            "raise trainer.sequence_length"
        )


def split(
    records: Sequence[Record], texts: Sequence[Sequence[Message]], config: FileMethodConfig
) -> Split[Record]:
    """Return the records that are learnt and those that are held out for validation.

    `texts` holds the messages of each record. The hash of the messages decides, so equal records are
    on the same side, and further records of a file do not move the others. Raises UserError if a
    side is empty.
    """
    learnt: list[Record] = []
    held_out: list[Record] = []
    for record, messages in zip(records, texts, strict=True):
        is_held_out = _hash_of(messages) % 100 < config.validation_percent
        (held_out if is_held_out else learnt).append(record)
    if not learnt or (config.validation_percent and not held_out):
        raise UserError(
            f"method.validation_percent {config.validation_percent} holds out {len(held_out)} of "
            f"{len(records)} records and leaves {len(learnt)} to learn, but both sides need some: "
            "give more records, or --method.validation-percent 0"
        )
    return Split(learnt=learnt, held_out=held_out)


def _hash_of(messages: Sequence[Message]) -> int:
    """Return a hash of messages. It is the same on every machine."""
    text = json.dumps([[message.role, message.content] for message in messages])
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def learning_plan(run: Run, packed: PackedRows, config: FileMethodConfig) -> LearningPlan:
    """Return the plan to learn these rows in `method.epochs` passes by maximum likelihood."""
    steps = steps_of_epochs(packed.num_rows, run.config.trainer.batch_size, config.epochs)
    return LearningPlan(
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        warmup_steps=round(config.warmup_ratio * steps),
    )


def finish(
    run: Run, phase: Phase, state: PhaseState, cost: PhaseCost, *, steps: int
) -> PhaseResult:
    """Commit the policy after a phase, evaluate it, and return the phase's result."""
    commit_policy(run, state, phase.step)
    cost.trained_slots = steps * run.config.trainer.tokens_per_step
    return evaluation.finish(run, phase, state, cost)


def report_validation(run: Run, phase: Phase, *, start: float, end: float, records: int) -> None:
    """Print and log the loss of the records that were held out, before and after learning."""
    if run.metrics.write(VALIDATION, phase.step, {"start_loss": start, "loss": end}):
        run.progress.line(
            f"{phase.name}: loss of the {records} records that are held out: {start:.4f} before "
            f"and {end:.4f} after learning"
        )
