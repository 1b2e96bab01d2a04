"""Prompt-only baselines: published ways of answering with and without retrieval.

They use the same records and environments as the trained agents.

    agent.kind        class            how it answers
    direct            Direct           from the question alone
    chain_of_thought  ChainOfThought   from the question alone, reasoning first
    rag               Rag              from one search for the question
    skr               Skr              with or without a search, as the model says
    iter_retgen       IterRetGen       searches again with the last answer's reasoning
    ircot             Ircot            searches with each sentence of the reasoning
    search_o1         SearchO1         searches within the reasoning; a second prompt reads
    react             React            Thought, Action, Observation
    flare             Flare            searches where a sentence is unlikely

Each file cites its paper and holds its prompt, in our words, with the parser of its replies. All
but ReAct close with <answer>. The configuration of a kind names its class (`config/agents.py`).
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
