"""Sections of agents. A new one derives from `AgentLimits` and joins the union in `schema.py`."""

import dataclasses
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """Prompt and limits, each with its unit."""

    prompt: Literal["brief", "zero_shot", "few_shot"]  # brief: one line, for models that were trained on the format
    max_turn_tokens: int  # tokens one model turn may generate
    max_trajectory_tokens: int  # tokens a conversation may hold, context included
    max_observation_tokens: int  # tokens of materials shown to a model at once; further materials are left out

    @property
    def max_turns_at_once(self) -> int:
        """Turns of one episode that a model may be asked for at the same time."""
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MujicaConfig(AgentLimits):
    """Planner and workers."""

    kind: Literal["mujica"] = "mujica"
    implementation: ClassVar[str] = "mujica_jax.agents.mujica:Mujica"
    max_iterations: int  # planner turns before the episode ends without an answer
    max_searches_per_turn: int

    @property
    def max_turns_at_once(self) -> int:
        return self.max_searches_per_turn
