"""Episodes that are written down, not played, for the tests of what reads them."""

from typing import Any

from mujica_jax.records import Conversation, StopReason, Trajectory


def episode(*conversations: Conversation, **changes: Any) -> Trajectory:
    """One that ended with the answer "" and searched nothing, but for the fields that are given."""
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
