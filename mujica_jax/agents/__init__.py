"""Agents: each plays one question in an environment and records the episode.

`Agent` is the protocol. `agent.kind` of a configuration chooses one of the classes below it: the
three that are trained, then the prompt-only baselines.
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
