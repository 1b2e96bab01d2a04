"""Compare the log-probabilities of the engine that samples and of the trainer that learns.

The comparison shows whether both are the same policy:

    d = log p_engine(token) - log p_trainer(token)          over sampled tokens

Both are of the policy as it is, without temperature. They differ by rounding: other kernels, other
batches, eight-bit weights or a narrow cache if those are asked for. A difference beyond that is a
fault that training would hide. The divergence is estimated by mean(exp(-d) - 1 + d), which is never
negative and has little variance; it estimates KL(engine || trainer) where tokens were drawn at
temperature 1, and is a weighted one at other temperatures.

Recipes call `compare` once a round, between sampling and learning, while the trainer's weights
are those that were sampled from.
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
    """Write how far the engine's log-probabilities are from the trainer's.

    `state` is what was sampled from; its policy has this version. If the state is not in memory,
    load the committed policy instead.
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
    """Return the differences over at most `conversations` conversations, drawn by the seed.

    The result is empty if none can be compared.
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
    """Return how the conversations' own log-probabilities differ from the trainer's.

    `scores` [rows, time] are the trainer's log-probabilities of the same tokens.
    """
    engine_log_probs = []
    trainer_log_probs = []
    for conversation, (row, start) in zip(conversations, rows.placements, strict=True):
        place = int(start)
        for turn in conversation.turns:
            end = place + len(turn.token_ids)
            if turn.logprobs is not None:
                # Nothing stands before a first token that could predict it.
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
