"""The contract of planner and workers: what they are shown, what they write, and how it is read.

`Contract` is Mujica's own; its parts are in `protocol.py`. A paper with other tags and prompts
derives from it (`evipath_contract.py`). `agent.protocol` of the configuration chooses one. The
episode (`mujica.py`), the scripts and the synthesis of trajectories know this object and no tags.
"""

from collections.abc import Sequence

from mujica_jax.agents import protocol
from mujica_jax.agents.dialogue import Opening
from mujica_jax.agents.protocol import PlannerAction, PromptMode, Role, SearchCall, WorkerReply
from mujica_jax.records import Entity
from mujica_jax.tasks.task import EnvironmentKind


class Contract:
    """Tags, prompts and parsers of Mujica."""

    # The tag of a worker's answer.
    sentence_tag = "sentence"
    # Whether a worker thinks and writes an empty selection where no material helps.
    explains_nothing_found = True
    # Whether scripts write words that those of Mujica do not.
    has_own_words = False

    # --- what the model is shown ---

    def opening(
        self,
        role: Role,
        kind: EnvironmentKind,
        mode: PromptMode,
        *,
        parallel: bool = True,
        split: bool = True,
    ) -> Opening:
        """Return what a conversation of this role begins with.

        Without `parallel` the planner is told to search once a turn. Without `split` it reads the
        materials itself.
        """
        return protocol.opening(role, kind, mode, parallel=parallel, split=split)

    def planner_opening(self, question: str, candidates: Sequence[Entity]) -> str:
        return protocol.planner_opening(question, candidates)

    def observation(self, kind: EnvironmentKind) -> str:
        """Return what a message to the planner begins with.

        A planner that writes it itself is cut there.
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
        """Return the message that answers a turn of searches.

        `new_candidates` has one sequence for each search, and `first` is the number of the first
        new candidate.
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
        return protocol.worker_opening(query, materials, kind=kind, mode=mode)

    # --- what the model writes, read ---

    def stop_strings(self, role: Role, kind: EnvironmentKind) -> tuple[str, ...]:
        return protocol.stop_strings(role, kind)

    def parse_planner(
        self, text: str, kind: EnvironmentKind, *, candidates: int, max_searches: int
    ) -> PlannerAction:
        return protocol.parse_planner(text, kind, candidates=candidates, max_searches=max_searches)

    def parse_worker(self, text: str, *, materials: int) -> WorkerReply:
        return protocol.parse_worker(text, materials=materials)

    # --- what scripts and teachers write ---

    def write_searches(
        self, thought: str, calls: Sequence[SearchCall], kind: EnvironmentKind
    ) -> str:
        if kind == "graph":
            return protocol.write_graph_searches(thought, calls)
        return protocol.write_text_searches(thought, calls)

    def write_answer(self, thought: str, answer: str) -> str:
        return protocol.write_answer(thought, answer)

    def write_worker(self, thought: str, selected: Sequence[int], sentence: str) -> str:
        """Write a worker's turn. An empty selection says that no material helps."""
        return protocol.write_worker(thought, selected, sentence=sentence)
