"""Baseline agents that work by prompts only: published methods with and without retrieval.

They use the same records and environments as the trained agents.

    agent.kind        class            how it answers
    direct            Direct           answers the question without a search
    chain_of_thought  ChainOfThought   reasons first, then answers without a search
    rag               Rag              searches once for the question, then answers
    skr               Skr              lets the model decide whether to search
    iter_retgen       IterRetGen       searches again with the reasoning of its last answer
    ircot             Ircot            searches with each sentence of its reasoning
    search_o1         SearchO1         searches while it reasons; a second prompt reads the passages
    react             React            alternates Thought, Action and Observation
    flare             Flare            searches if its next sentence contains unlikely tokens

Each file cites its paper. It holds the prompt, in our own words, and the parser of the replies. All
baselines except ReAct write their answer inside <answer> tags. `config/agents.py` maps each
`agent.kind` to its class.
"""

from mujica_jax.agents.baselines.direct import ChainOfThought, Direct
from mujica_jax.agents.baselines.flare import Flare
from mujica_jax.agents.baselines.ircot import Ircot
from mujica_jax.agents.baselines.iter_retgen import IterRetGen
from mujica_jax.agents.baselines.rag import Rag
from mujica_jax.agents.baselines.react import React
from mujica_jax.agents.baselines.search_o1 import SearchO1
from mujica_jax.agents.baselines.skr import Skr

__all__ = [
    "ChainOfThought",
    "Direct",
    "Flare",
    "Ircot",
    "IterRetGen",
    "Rag",
    "React",
    "SearchO1",
    "Skr",
]
