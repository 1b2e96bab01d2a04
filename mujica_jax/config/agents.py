"""Settings of the agents, one dataclass for each kind of agent.

The union in `schema.py` lists them. The settings of a user's own agent derive from `AgentLimits`, in
a module of the user.
"""

import dataclasses
from typing import ClassVar, Literal

from mujica_jax.config.bounds import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """Limits on tokens that every agent has."""

    # Kinds of environment that the agent can search: a knowledge graph, or passages.
    environments: ClassVar[tuple[str, ...]] = ("graph", "text")
    # Maximum number of tokens that the model generates in one turn.
    max_turn_tokens: PositiveInt
    # Maximum number of tokens in one conversation: prompt, search results and model turns together.
    max_trajectory_tokens: PositiveInt
    # Maximum number of tokens of search results shown to the model at once. Results that do not fit
    # are left out, the lowest-ranked ones first.
    max_observation_tokens: PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptedAgent(AgentLimits):
    """An agent with a choice of prompts."""

    # How the system prompt explains the format. brief: one line, for a model that was trained on
    # the format. zero_shot: full instructions. few_shot: full instructions and worked examples.
    prompt: Literal["brief", "zero_shot", "few_shot"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MujicaConfig(PromptedAgent):
    """Mujica: a planner asks sub-questions, and workers answer them from search results."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["mujica"] = "mujica"
    implementation: ClassVar[str] = "mujica_jax.agents.mujica:Mujica"
    # Maximum number of planner turns. An episode that needs more ends without an answer.
    max_iterations: PositiveInt
    # Maximum number of sub-questions in one planner turn. A turn with more ends the episode without
    # an answer.
    max_searches_per_turn: PositiveInt
    # Tags and prompts of planner and workers. mujica: as in the Mujica-MyGO paper. evipath: as in
    # the EviPath paper (tables 8 to 11). A trained policy only knows the protocol that it was
    # trained with.
    protocol: Literal["mujica", "evipath"] = "mujica"
    # Whether workers read the search results. False: the planner reads them itself (an ablation of
    # the Mujica-MyGO paper).
    split: bool = True
    # Whether the planner may ask several sub-questions in one turn. False: one sub-question in each
    # turn (an ablation of the Mujica-MyGO paper).
    parallel: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleConfig(PromptedAgent):
    """One model that searches, reads the results and answers, in one conversation."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["single"] = "single"
    implementation: ClassVar[str] = "mujica_jax.agents.single:Single"
    environments: ClassVar[tuple[str, ...]] = ("text",)
    # Tags of a turn. reflect: think, search, reflect and answer, as in "Learning When to Search".
    # search_r1: think, search and answer, as in Search-R1.
    style: Literal["reflect", "search_r1"] = "reflect"
    # Maximum number of searches. An episode that needs more ends without an answer.
    max_searches: PositiveInt = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecexConfig(PromptedAgent):
    """DecEx-RAG: one sub-question after another, each answered from memory or by a search."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["decex"] = "decex"
    implementation: ClassVar[str] = "mujica_jax.agents.decex:Decex"
    environments: ClassVar[tuple[str, ...]] = ("text",)
    # Maximum number of sub-questions before the final answer (T in the DecEx-RAG paper).
    max_iterations: PositiveInt = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineConfig(AgentLimits):
    """Settings that all prompt-only baselines have. `agents/baselines/` describes each baseline."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: str
    implementation: ClassVar[str]
    environments: ClassVar[tuple[str, ...]] = ("text",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectConfig(BaselineConfig):
    """Answer from the question alone, without a search."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["direct"] = "direct"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Direct"
    # Every task is possible, because nothing is searched.
    environments: ClassVar[tuple[str, ...]] = ("graph", "text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOfThoughtConfig(BaselineConfig):
    """Reason, then answer from the question alone, without a search."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["chain_of_thought"] = "chain_of_thought"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:ChainOfThought"
    # Every task is possible, because nothing is searched.
    environments: ClassVar[tuple[str, ...]] = ("graph", "text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagConfig(BaselineConfig):
    """Retrieval-augmented generation: search for the question once, then answer."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["rag"] = "rag"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Rag"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkrConfig(BaselineConfig):
    """Self-knowledge (Wang et al., 2023): the model says whether it needs a search."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["skr"] = "skr"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Skr"


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterRetGenConfig(BaselineConfig):
    """Iter-RetGen (Shao et al., 2023): search again with the reasoning of the last answer."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["iter_retgen"] = "iter_retgen"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:IterRetGen"
    # Number of rounds. Each round is one search and one answer; the last answer counts.
    max_searches: PositiveInt = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class IrcotConfig(BaselineConfig):
    """IRCoT (Trivedi et al., 2023): each sentence of the reasoning is the next query."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["ircot"] = "ircot"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Ircot"
    # Maximum number of searches. After the last one the model can only answer.
    max_searches: PositiveInt = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchO1Config(BaselineConfig):
    """Search-o1 (Li et al., 2025): search within the reasoning; a second prompt reads the results."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["search_o1"] = "search_o1"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:SearchO1"
    # Maximum number of searches. After the last one the model can only answer.
    max_searches: PositiveInt = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReactConfig(BaselineConfig):
    """ReAct (Yao et al., 2023): thought, action and observation in turn."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["react"] = "react"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:React"
    # Maximum number of searches. After the last one the model can only answer.
    max_searches: PositiveInt = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlareConfig(BaselineConfig):
    """FLARE (Jiang et al., 2023): search when a sentence has an unlikely token."""

    # Kind of agent. `--agent.kind NAME --help` shows the settings of another kind.
    kind: Literal["flare"] = "flare"
    implementation: ClassVar[str] = "mujica_jax.agents.baselines:Flare"
    # Maximum number of searches. After the last one, every sentence stays as it was first written.
    max_searches: PositiveInt = 4
    # Maximum number of sentences in the reasoning and the answer together.
    max_sentences: PositiveInt = 8
    # Probability below which a token counts as unlikely, above 0 and at most 1. A sentence with an
    # unlikely token is searched for and written again.
    min_probability: float = 0.4


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
