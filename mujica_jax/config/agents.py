"""Sections of agents. A new one derives from `AgentLimits` and joins the union in `schema.py`."""

import dataclasses
from typing import ClassVar, Literal

from mujica_jax.config.bounds import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """Limits of an agent."""

    environments: ClassVar[tuple[str, ...]] = ("graph", "text")  # what it can search
    max_turn_tokens: PositiveInt  # tokens one model turn may generate
    max_trajectory_tokens: PositiveInt  # tokens a conversation may hold, context included
    # tokens of materials shown to a model at once; further materials are left out
    max_observation_tokens: PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptedAgent(AgentLimits):
    """An agent with a choice of prompts."""

    # brief: one line, for models that were trained on the format
    prompt: Literal["brief", "zero_shot", "few_shot"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MujicaConfig(PromptedAgent):
    """Planner and workers."""

    kind: Literal["mujica"] = "mujica"
    implementation: ClassVar[str] = "mujica_jax.agents.mujica:Mujica"
    max_iterations: PositiveInt  # planner turns before the episode ends without an answer
    # sub-questions a planner may ask at once; a turn with more ends the episode
    max_searches_per_turn: PositiveInt
    # Tags and prompts of planner and workers: Mujica's own, or those of EviPath's tables 8 to 11. A
    # policy knows the one that it was trained on.
    protocol: Literal["mujica", "evipath"] = "mujica"
    # Ablations of the paper: without split the planner reads what a search found itself; without
    # parallel it asks one sub-question a turn.
    split: bool = True
    parallel: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleConfig(PromptedAgent):
    """One model that searches and reads in one conversation."""

    kind: Literal["single"] = "single"
    implementation: ClassVar[str] = "mujica_jax.agents.single:Single"
    environments: ClassVar[tuple[str, ...]] = ("text",)
    style: Literal["reflect", "search_r1"] = "reflect"  # the tags of its turns
    max_searches: PositiveInt = 4  # before the episode ends without an answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecexConfig(PromptedAgent):
    """DecEx-RAG: sub-question after sub-question, each answered from memory or by a search."""

    kind: Literal["decex"] = "decex"
    implementation: ClassVar[str] = "mujica_jax.agents.decex:Decex"
    environments: ClassVar[tuple[str, ...]] = ("text",)
    max_iterations: PositiveInt = 4  # T, sub-questions before the final answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineConfig(AgentLimits):
    """Prompt-only baselines, one a kind; `agents/baselines/` says what each does."""

    kind: str
    implementation: ClassVar[str]
    environments: ClassVar[tuple[str, ...]] = ("text",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectConfig(BaselineConfig):
    kind: Literal["direct"] = "direct"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Direct"
    environments: ClassVar[tuple[str, ...]] = ("graph", "text")  # it searches nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOfThoughtConfig(BaselineConfig):
    kind: Literal["chain_of_thought"] = "chain_of_thought"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:ChainOfThought"
    environments: ClassVar[tuple[str, ...]] = ("graph", "text")  # it searches nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagConfig(BaselineConfig):
    kind: Literal["rag"] = "rag"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Rag"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkrConfig(BaselineConfig):
    kind: Literal["skr"] = "skr"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Skr"


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterRetGenConfig(BaselineConfig):
    kind: Literal["iter_retgen"] = "iter_retgen"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:IterRetGen"
    max_searches: PositiveInt = 2  # rounds of searching and answering, the first one included


@dataclasses.dataclass(frozen=True, kw_only=True)
class IrcotConfig(BaselineConfig):
    kind: Literal["ircot"] = "ircot"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Ircot"
    max_searches: PositiveInt = 4  # at most; then it answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchO1Config(BaselineConfig):
    kind: Literal["search_o1"] = "search_o1"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:SearchO1"
    max_searches: PositiveInt = 4  # at most; then it answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReactConfig(BaselineConfig):
    kind: Literal["react"] = "react"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:React"
    max_searches: PositiveInt = 5  # at most; then it answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlareConfig(BaselineConfig):
    kind: Literal["flare"] = "flare"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Flare"
    max_searches: PositiveInt = 4  # at most; then sentences stay as they are
    max_sentences: PositiveInt = 8  # of an answer with its reasons
    min_probability: float = 0.4  # of a token; a sentence with a less likely one is searched for


Baseline = (
    DirectConfig
    | ChainOfThoughtConfig
    | RagConfig
    | SkrConfig
    | IterRetGenConfig
    | IrcotConfig
    | SearchO1Config
    | ReactConfig
    | FlareConfig
)
