"""Agents, which answer questions by searching an environment and record their episodes.

`Agent` is the interface. The setting `agent.kind` of a configuration chooses the implementation:

- `Mujica`, `Single` and `Decex` can be trained;
- the classes from `baselines` work by prompts only.
"""

from mujica_jax.agents.agent import Agent, Attempt, Policy
from mujica_jax.agents.baselines import (
    ChainOfThought,
    Direct,
    Flare,
    Ircot,
    IterRetGen,
    Rag,
    React,
    SearchO1,
    Skr,
)
from mujica_jax.agents.decex import Decex
from mujica_jax.agents.mujica import Mujica
from mujica_jax.agents.single import Single

__all__ = [
    "Agent",
    "Attempt",
    "ChainOfThought",
    "Decex",
    "Direct",
    "Flare",
    "Ircot",
    "IterRetGen",
    "Mujica",
    "Policy",
    "Rag",
    "React",
    "SearchO1",
    "Single",
    "Skr",
]
