"""The class `Contract`: the prompts, tags and parsers of planner and workers.

`Contract` itself is Mujica's contract. It calls the functions of `protocol.py`. A paper with other
tags and prompts derives a class from it (`evipath_contract.py`). The setting `agent.protocol`
chooses the contract. The episode (`mujica.py`), the scripted demonstrations and the synthesis of
trajectories use only this class and contain no tags.
"""

from collections.abc import Sequence

from mujica_jax.agents import protocol
from mujica_jax.agents.dialogue import Opening
from mujica_jax.agents.protocol import PlannerAction, PromptMode, Role, SearchCall, WorkerReply
from mujica_jax.records import Entity
from mujica_jax.tasks.task import EnvironmentKind


class Contract:
    """The prompts, tags and parsers of Mujica."""

    # The tag around a worker's answer.
    sentence_tag = "sentence"
    # Whether a worker writes a thought and an empty selection if no material helps.
    explains_nothing_found = True
    # Whether scripted demonstrations use words that Mujica's demonstrations do not contain.
    has_own_words = False

    # --- Prompts and messages that the model reads. ---

    def opening(
        self,
        role: Role,
        kind: EnvironmentKind,
        mode: PromptMode,
        *,
        parallel: bool = True,
        split: bool = True,
    ) -> Opening:
        """Return the system prompt and the worked examples of a role.

        If `parallel` is False, the prompt asks the planner for one search in each turn. If `split`
        is False, there are no workers, and the planner reads the materials itself.
        """
        return protocol.opening(role, kind, mode, parallel=parallel, split=split)

    def planner_opening(self, question: str, candidates: Sequence[Entity]) -> str:
        """Return the first message to the planner, with the numbered candidate entities."""
        return protocol.planner_opening(question, candidates)

    def observation(self, kind: EnvironmentKind) -> str:
        """Return the word that begins a message to the planner.

        The planner's turn is cut if the planner writes this word itself.
        """
        del kind
        return protocol.OBSERVATION

    def planner_observation(
        self,
        sentences: Sequence[str],
        new_candidates: Sequence[Sequence[Entity]],
        first: int,
        kind: EnvironmentKind,
    ) -> str:
        """Return the message to the planner with the answers to the searches of its turn.

        `new_candidates` holds, for each search, the entities that it added as candidates. `first`
        is the number of the first new candidate.
        """
        del kind
        candidates = [entity for entities in new_candidates for entity in entities]
        return protocol.planner_observation(sentences, candidates, first=first)

    def worker_opening(
        self,
        query: str,
        materials: Sequence[Sequence[str]],
        kind: EnvironmentKind,
        mode: PromptMode,
    ) -> str:
        """Return the message to a worker: the sub-question and the numbered materials.

        Each material is a sequence of parts: a passage has one part, a triple has three.
        """
        return protocol.worker_opening(query, materials, kind=kind, mode=mode)

    # --- Parsers for the turns that the model writes. ---

    def stop_strings(self, role: Role, kind: EnvironmentKind) -> tuple[str, ...]:
        """Return the strings that end a turn of this role."""
        return protocol.stop_strings(role, kind)

    def parse_planner(
        self, text: str, kind: EnvironmentKind, *, candidates: int, max_searches: int
    ) -> PlannerAction:
        """Parse a turn of the planner.

        `candidates` is the number of candidates so far. `max_searches` is the largest permitted
        number of searches in a turn.
        """
        return protocol.parse_planner(text, kind, candidates=candidates, max_searches=max_searches)

    def parse_worker(self, text: str, *, materials: int) -> WorkerReply:
        """Parse a turn of a worker that was shown `materials` materials."""
        return protocol.parse_worker(text, materials=materials)

    # --- Writers of turns, for scripted demonstrations and for teachers. ---

    def write_searches(
        self, thought: str, calls: Sequence[SearchCall], kind: EnvironmentKind
    ) -> str:
        """Write a planner's turn that searches."""
        if kind == "graph":
            return protocol.write_graph_searches(thought, calls)
        return protocol.write_text_searches(thought, calls)

    def write_answer(self, thought: str, answer: str) -> str:
        """Write a planner's turn that answers the question."""
        return protocol.write_answer(thought, answer)

    def write_worker(self, thought: str, selected: Sequence[int], sentence: str) -> str:
        """Write a worker's turn. An empty selection means that no material helps."""
        return protocol.write_worker(thought, selected, sentence=sentence)
