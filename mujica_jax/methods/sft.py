"""Train with SFT: learn the conversations of your own files by maximum likelihood.

    loss = - sum over trained tokens of log p(token | tokens before it) / number of trained tokens

SFT is short for supervised fine-tuning. The trained tokens are those of the assistant's messages
and the end-of-turn token behind each of them. `trajectories.messages` reads the files, and
`learning.conversations` writes their messages with the chat template of the checkpoint.
`from_file` has the steps that SFT and DPO share.

A conversation that is longer than a training row is left out and counted. Every trained token of a
batch has the same weight, so a long conversation weighs more than a short one.
"""

import time
from collections.abc import Sequence

import numpy as np

from mujica_jax.config.methods import SftConfig
from mujica_jax.learning.conversations import conversation_of
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
from mujica_jax.runs.phases import Phase, PhaseCost, PhaseResult, PhaseState
from mujica_jax.runs.run import Run, method_of
from mujica_jax.trajectories.messages import MessagesRecord, read_conversations

SFT = Phase(name="sft", step=1)
# Files with the log-probabilities of the conversations that are held out.
START_SCORES = "validation/sft-start.npy"
END_SCORES = "validation/sft-end.npy"


def sft(run: Run) -> list[PhaseResult]:
    """Evaluate the start, learn the file, evaluate again, and make the control run if it is asked.

    Return one result for each phase. Phases that an earlier start of this run finished are read
    from the run directory.
    """
    config = method_of(run, SftConfig)

    # Read the file first: what is wrong with it is said before anything is computed.
    conversations = _conversations(run, read_conversations(config.data), config)
    start, first_result, demonstrations = begin(run)

    # Learn: maximise the likelihood of the assistant's messages.
    cost = PhaseCost(start_time=time.monotonic())
    packed = _packed(run, conversations.learnt)
    held_out = _packed(run, conversations.held_out)
    start_loss = _loss(run, START_SCORES, start, held_out)
    plan = learning_plan(run, packed, config)
    state = learning.train(run, SFT.name, start, packed, plan=plan)

    # Commit: save the policy, evaluate it on held-out questions, and log the phase.
    if conversations.held_out:
        end_loss = _loss(run, END_SCORES, state, held_out)
        num_held_out = len(conversations.held_out)
        report_validation(run, SFT, start=start_loss, end=end_loss, records=num_held_out)
    cost.trajectories = len(conversations.learnt) + len(conversations.held_out)
    cost.accepted = len(conversations.learnt)
    result = finish(run, SFT, state, cost, steps=plan.steps)
    return with_control(run, start, demonstrations, first_result, [result])


def _conversations(
    run: Run, records: Sequence[MessagesRecord], config: SftConfig
) -> Split[Conversation]:
    """Return the conversations that are learnt and those that are held out, in tokens.

    Raises UserError if none of them fits into a row.
    """
    with run.clock.stage("packing"):
        conversations = [conversation_of(run.tokenizer, record.messages) for record in records]
    fitting = {id(row) for row in learning.rows_that_fit(run, conversations)}
    check_fits(
        run,
        num_records=len(records),
        num_fitting=len(fitting),
        shortest_tokens=min(len(conversation.token_ids) for conversation in conversations),
        noun="conversations",
    )
    pairs = [
        (record, conversation)
        for record, conversation in zip(records, conversations, strict=True)
        if id(conversation) in fitting
    ]
    return split(
        [conversation for _, conversation in pairs],
        [record.messages for record, _ in pairs],
        config,
    )


def _packed(run: Run, conversations: Sequence[Conversation]) -> PackedRows:
    """Return conversations in rows of the trainer's sequence length."""
    with run.clock.stage("packing"):
        return pack(
            conversations,
            sequence_length=run.config.trainer.sequence_length,
            seed=run.config.seed + SFT.step,
        )


def _loss(run: Run, file: str, state: PhaseState, rows: PackedRows) -> float:
    """Return the mean negative log-likelihood of the trained tokens, or 0 if there are none.

    `file` keeps the log-probabilities for a restart.
    """
    if not rows.num_rows:
        return 0.0
    log_probs = learning.score_once(run, file, lambda: run.trainer.score(state(), rows))
    return -float(np.mean(log_probs[rows.loss_mask]))
