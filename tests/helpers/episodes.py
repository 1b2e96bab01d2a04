"""Trajectories that are written by hand and not played, for the tests of their readers."""

from typing import Any

from mujica_jax.records import Conversation, StopReason, Trajectory


def episode(*conversations: Conversation, **changes: Any) -> Trajectory:
    """Return a trajectory that ended with the answer "" and without a search, except for the given
    fields.
    """
    fields: dict[str, Any] = {
        "question_id": "q",
        "attempt": 0,
        "policy_version": 0,
        "seed": 0,
        "answer": "",
        "stop_reason": StopReason.ANSWERED,
        "searches": (),
        "seconds": 0.0,
    }
    return Trajectory(conversations=conversations, **{**fields, **changes})
