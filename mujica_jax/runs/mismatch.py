"""Check that the sampling engine and the trainer compute the same policy.

For each sampled token, compare the log-probabilities of the engine and of the trainer:

    d = log p_engine(token) - log p_trainer(token)

Both are at temperature 1. A small difference is normal, because engine and trainer round
differently: they use other kernels and batches, and the engine may use eight-bit weights or a
narrow cache. A large difference is a fault, which training would hide.

The divergence KL(engine || trainer) is estimated by mean(exp(-d) - 1 + d), which is never negative
and has little variance. The estimate is right if the tokens were sampled at temperature 1. At other
temperatures some tokens weigh too much and others too little.

Recipes call `compare` once per round, after sampling and before learning, while the trainer still
holds the weights that sampled.
"""

from collections.abc import Sequence

import numpy as np

from mujica_jax.learning.packing import PackedRows, pack
from mujica_jax.learning.trainer import Trainer, TrainState
from mujica_jax.records import Conversation, Trajectory
from mujica_jax.runs import phases
from mujica_jax.runs.phases import GetState
from mujica_jax.runs.run import Run
from mujica_jax.runs.versions import committed_state, reads_committed_policy
from mujica_jax.runtime import distributed


def compare(
    run: Run,
    state: GetState,
    trajectories: Sequence[Trajectory],
    round_number: int,
    version: int,
) -> None:
    """Measure how the engine's log-probabilities differ from the trainer's, and log the result.

    `state` holds the policy that sampled, and `version` is the version of this policy. If the state
    is not in memory, the committed policy is loaded instead. Nothing happens if
    `metrics.compared_conversations` is 0 or the round's line is already logged.
    """
    num_conversations = run.config.metrics.compared_conversations
    is_written = distributed.broadcast(
        phases.MISMATCH, lambda: run.metrics.has(phases.MISMATCH, round_number)
    )
    if not num_conversations or is_written:
        return

    reads_committed = reads_committed_policy(run, state, version)
    with run.clock.stage("scoring"):
        run.generator.release_weights()
        scored_state = committed_state(run, version) if reads_committed else state()
        values = compared(
            run.trainer,
            scored_state,
            trajectories,
            conversations=num_conversations,
            seed=run.config.seed + round_number,
        )
    if values:
        run.metrics.write(phases.MISMATCH, round_number, values)


def compared(
    trainer: Trainer,
    state: TrainState,
    trajectories: Sequence[Trajectory],
    *,
    conversations: int,
    seed: int,
) -> dict[str, float | int]:
    """Return the differences, measured on some conversations of these trajectories.

    `conversations` is the largest number of conversations to compare. They are drawn at random with
    `seed`. The result is empty if no conversation can be compared.
    """
    sequence_length = trainer.config.sequence_length
    comparable: list[Conversation] = []
    for trajectory in trajectories:
        for conversation in trajectory.conversations:
            is_sampled = any(turn.logprobs for turn in conversation.turns)
            if is_sampled and len(conversation.token_ids) <= sequence_length:
                comparable.append(conversation)
    random = np.random.default_rng(seed)
    count = min(conversations, len(comparable))
    places = sorted(random.choice(len(comparable), count, replace=False).tolist())
    if not places:
        return {}
    sample = [comparable[place] for place in places]
    rows = pack(sample, sequence_length=sequence_length, seed=seed)
    return differences(sample, rows, trainer.score(state, rows))


def differences(
    conversations: Sequence[Conversation], rows: PackedRows, scores: np.ndarray
) -> dict[str, float | int]:
    """Return statistics of the differences between engine and trainer.

    The engine's log-probabilities are stored in the conversations. `scores`, of shape [rows, time],
    holds the trainer's log-probability of each token in `rows`. The result is empty if there are no
    sampled tokens.
    """
    engine_log_probs = []
    trainer_log_probs = []
    for conversation, (row, start) in zip(conversations, rows.placements, strict=True):
        place = int(start)
        for turn in conversation.turns:
            end = place + len(turn.token_ids)
            if turn.logprobs is not None:
                # The first token of a conversation has no token before it, so the trainer has no
                # prediction for it.
                num_skipped = int(place == start)
                engine_log_probs.append(np.asarray(turn.logprobs[num_skipped:], np.float64))
                trainer_log_probs.append(scores[row, place + num_skipped : end].astype(np.float64))
            place = end
    difference = np.concatenate(engine_log_probs) - np.concatenate(trainer_log_probs)
    if not difference.size:
        return {}
    return {
        "logprob_difference_mean": float(difference.mean()),
        "logprob_difference_mean_absolute": float(np.abs(difference).mean()),
        "logprob_difference_max_absolute": float(np.abs(difference).max()),
        "logprob_kl": float(np.mean(np.expm1(-difference) + difference)),
        "compared_tokens": difference.size,
    }
