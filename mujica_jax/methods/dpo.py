"""Train with DPO: learn the preference pairs of your own files.

DPO is short for direct preference optimisation. `learning.losses.preference` has the formula. The
reference policy is the policy at the start of the phase, and its log-probabilities are stored in the
run directory, so a restart does not need it. In a conversation, the assistant's messages after the
prompt count, each with its end-of-turn token. `trajectories.messages` reads the files, and
`learning.conversations` writes their messages with the chat template of the checkpoint.
`from_file` has the steps that SFT and DPO share.

Both conversations of a pair must fit into one training row together. Longer pairs are left out and
counted.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax.numpy as jnp

from mujica_jax.config.methods import DpoConfig
from mujica_jax.learning.conversations import conversation_of
from mujica_jax.learning.losses import preference
from mujica_jax.learning.packing import PackedRows, pack
from mujica_jax.methods.from_file import (
    Split,
    check_fits,
    finish,
    learning_plan,
    report_validation,
    split,
)
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Conversation
from mujica_jax.runs import learning
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import Phase, PhaseCost, PhaseResult, PhaseState
from mujica_jax.runs.run import Run, method_of
from mujica_jax.trajectories.messages import PreferenceRecord, read_preferences

DPO = Phase(name="dpo", step=1)
# Files with the log-probabilities of the pairs that are held out.
START_SCORES = "validation/dpo-start.npy"
END_SCORES = "validation/dpo-end.npy"

# The chosen and the rejected conversation.
Pair = tuple[Conversation, Conversation]


def dpo(run: Run) -> list[PhaseResult]:
    """Evaluate the start, learn the file, evaluate again, and make the control run if it is asked.

    Return one result for each phase. Phases that an earlier start of this run finished are read
    from the run directory.
    """
    config = method_of(run, DpoConfig)

    # Read the file first: what is wrong with it is said before anything is computed.
    pairs = _pairs(run, read_preferences(config.data), config)
    start, first_result, demonstrations = begin(run)

    # Learn: raise the likelihood of the chosen conversations above that of the rejected ones.
    cost = PhaseCost(start_time=time.monotonic())
    loss = preference.DPO(beta=config.beta)
    packed = packed_pairs(run, DPO, pairs.learnt)
    held_out = packed_pairs(run, DPO, pairs.held_out)
    if pairs.held_out:
        held_out = with_reference(run, START_SCORES, start, held_out)
    plan = dataclasses.replace(learning_plan(run, packed, config), loss=loss)
    state = learn_pairs(run, DPO, start, packed, plan)

    # Commit: save the policy, evaluate it on held-out questions, and log the phase.
    if pairs.held_out:
        _report_held_out(run, state, held_out, loss)
    cost.forward_tokens = num_tokens(pairs.learnt)
    cost.trajectories = len(pairs.learnt) + len(pairs.held_out)
    cost.accepted = len(pairs.learnt)
    result = finish(run, DPO, state, cost, steps=plan.steps)
    return with_control(run, start, demonstrations, first_result, [result])


def _pairs(run: Run, records: Sequence[PreferenceRecord], config: DpoConfig) -> Split[Pair]:
    """Return the pairs that are learnt and those that are held out, in tokens.

    Raises UserError if none of them fits into a row.
    """
    pairs: list[Pair] = []
    with run.clock.stage("packing"):
        for record in records:
            chosen = conversation_of(run.tokenizer, record.chosen)
            rejected = conversation_of(run.tokenizer, record.rejected)
            pairs.append((chosen, rejected))
    fitting = {id(pair) for pair in pairs_that_fit(run, pairs)}
    check_fits(
        run,
        num_records=len(records),
        num_fitting=len(fitting),
        shortest_tokens=min(num_tokens([pair]) for pair in pairs),
        noun="pairs",
    )
    fitting_records = []
    fitting_pairs = []
    for record, pair in zip(records, pairs, strict=True):
        if id(pair) in fitting:
            fitting_records.append((*record.chosen, *record.rejected))
            fitting_pairs.append(pair)
    return split(fitting_pairs, fitting_records, config)


def pairs_that_fit(run: Run, pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs whose two sides have a token to train and fit into one row together.

    A line on the console says how many pairs are left out.
    """
    sequence_length = run.config.trainer.sequence_length
    trained = [pair for pair in pairs if all(any(side.loss_mask) for side in pair)]
    fitting = [pair for pair in trained if num_tokens([pair]) <= sequence_length]
    if len(trained) < len(pairs):
        run.progress.line(
            f"{len(pairs) - len(trained)} of {len(pairs)} preference pairs have a side without a "
            "token to train and are left out"
        )
    if len(fitting) < len(trained):
        run.progress.line(
            f"{len(trained) - len(fitting)} of {len(trained)} pairs exceed {sequence_length} "
            "tokens and are left out"
        )
    return fitting


def packed_pairs(run: Run, phase: Phase, pairs: Sequence[Pair]) -> PackedRows:
    """Return pairs in rows of the trainer's sequence length, both sides of a pair in one row."""
    return pack(
        [side for pair in pairs for side in pair],
        sequence_length=run.config.trainer.sequence_length,
        seed=run.config.seed + phase.step,
        pairs=True,
    )


def with_reference(run: Run, file: str, state: PhaseState, rows: PackedRows) -> PackedRows:
    """Return the rows with the log-probabilities of the reference policy, which is in `state`.

    `file` keeps them for a restart.
    """
    reference = learning.score_once(run, file, lambda: run.trainer.score(state(), rows))
    return rows.with_columns(reference_log_probs=reference)


def learn_pairs(
    run: Run, phase: Phase, state: PhaseState, rows: PackedRows, plan: LearningPlan
) -> PhaseState:
    """Learn preference pairs, and return the state after the phase.

    The reference policy is the policy in `state`.
    """
    rows = with_reference(run, f"phases/{phase.name}-reference.npy", state, rows)
    return learning.train(run, phase.name, state, rows, plan=plan)


def num_tokens(pairs: Sequence[Pair]) -> int:
    """Return the number of tokens of both sides of these pairs."""
    return sum(len(side.token_ids) for pair in pairs for side in pair)


def _report_held_out(run: Run, state: PhaseState, rows: PackedRows, loss: preference.DPO) -> None:
    """Print and log the loss of the pairs that are held out, and how many are ranked right."""
    log_probs = learning.score_once(run, END_SCORES, lambda: run.trainer.score(state(), rows))
    batch = rows.batch(slice(None), loss.columns)
    counts = loss.counts(batch)
    end_loss, metrics = loss.of(jnp.asarray(log_probs), batch, counts)
    reference = jnp.asarray(rows.columns["reference_log_probs"])
    start_loss, _ = loss.of(reference, batch, counts)
    report_validation(
        run, DPO, start=float(start_loss), end=float(end_loss), records=int(counts["pairs"])
    )
    run.metrics.write(f"{DPO.name}/validation", DPO.step, metrics)
