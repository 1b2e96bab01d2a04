"""Whether the engine that samples and the trainer that learns are the same policy: their
log-probabilities of the same tokens.

    d = log p_engine(token) - log p_trainer(token)          over sampled tokens

Both are of the policy as it is, without temperature. They differ by rounding: other kernels, other
batches, eight-bit weights or a narrow cache if those are asked for. A difference beyond that is a
fault that training would hide. The divergence is estimated by mean(exp(-d) - 1 + d), which is never
negative and has little variance; it estimates KL(engine || trainer) where tokens were drawn at
temperature 1, and is a weighted one at other temperatures.

Called by `methods.mygo` once a round, between sampling and learning, while the trainer's weights
are those that were sampled from.
"""

from collections.abc import Sequence

import numpy as np

from mujica_jax.learning.trainer import Trainer, TrainState
from mujica_jax.records import Conversation, Trajectory
from mujica_jax.trajectories.packing import PackedRows, pack


def compared(
    trainer: Trainer,
    state: TrainState,
    trajectories: Sequence[Trajectory],
    *,
    conversations: int,
    seed: int,
) -> dict[str, float | int]:
    """The differences over at most so many conversations, drawn by the seed. Empty if none can be
    compared."""
    played = [
        conversation for trajectory in trajectories for conversation in trajectory.conversations
    ]
    sampled = [
        conversation for conversation in played if any(turn.logprobs for turn in conversation.turns)
    ]
    fitting = [one for one in sampled if len(one.token_ids) <= trainer.config.row_tokens]
    draw = np.random.default_rng(seed)
    chosen = sorted(
        draw.choice(len(fitting), min(conversations, len(fitting)), replace=False).tolist()
    )
    if not chosen:
        return {}
    sample = [fitting[index] for index in chosen]
    rows = pack(sample, row_tokens=trainer.config.row_tokens, seed=seed)
    return differences(sample, rows, trainer.score(state, rows))


def differences(
    conversations: Sequence[Conversation], rows: PackedRows, scores: np.ndarray
) -> dict[str, float | int]:
    """Of the conversations' own log-probabilities and `scores` [rows, time], the trainer's of the
    same tokens."""
    engine, trainer = [], []
    for conversation, (row, start) in zip(conversations, rows.placements, strict=True):
        place = int(start)
        for turn in conversation.turns:
            after = place + len(turn.token_ids)
            if turn.logprobs is not None:
                skipped = int(
                    place == start
                )  # nothing stands before a first token that could predict it
                engine.append(np.asarray(turn.logprobs[skipped:], np.float64))
                trainer.append(scores[row, place + skipped : after].astype(np.float64))
            place = after
    difference = np.concatenate(engine) - np.concatenate(trainer)
    if not difference.size:
        return {}
    return {
        "logprob_difference_mean": float(difference.mean()),
        "logprob_difference_mean_absolute": float(np.abs(difference).mean()),
        "logprob_difference_max_absolute": float(np.abs(difference).max()),
        "logprob_kl": float(np.mean(np.expm1(-difference) + difference)),
        "compared_tokens": difference.size,
    }
