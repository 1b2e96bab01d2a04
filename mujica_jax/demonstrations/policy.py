"""The class `ScriptedPolicy`: a policy that knows the gold chain and plays demonstrations.

The warm-up trains a new model on them. The policy plays ordinary episodes in the ordinary
environment, so demonstrations are records of the same form as sampled trajectories.

The planner follows the gold triples of the question. A triple can be asked for if its subject is a
numbered candidate. The planner asks for all such triples in one turn, or for the first of them if
the agent searches once in each turn. The worker does not know the gold chain. It takes the relation
from the query and selects the materials that state it. If there is no worker, the planner reads the
materials itself, and its next thought begins with the facts that it read.

Thoughts are short, and they put things next to each other that the next decision needs. For
example, the relation comes before the number of its line, the number before the object, and both
years before the year that decides.
"""

import random
from collections.abc import Iterable, Iterator, Mapping

from mujica_jax.agents import protocol, synthesis_prompts
from mujica_jax.agents.contract import Contract
from mujica_jax.agents.decex import DECEX, DecexState
from mujica_jax.agents.mujica import MUJICA_CONTRACT, PlannerState, WorkerState
from mujica_jax.agents.single import SingleState
from mujica_jax.demonstrations import decex as scripted_decex
from mujica_jax.demonstrations import single as scripted_single
from mujica_jax.demonstrations.mujica_text import (
    TextScript,
    conclusion,
    fact,
    query_of,
    stated_object,
)
from mujica_jax.errors import UserError
from mujica_jax.inference.requests import Completion, SamplingParams, TokenIds
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Entity, Evidence, Search
from mujica_jax.tasks.task import Material


class ScriptedPolicy:
    """A policy that plays the episode of any question by a script.

    If a fact cannot be found, it ends the episode without an answer instead of guessing.

    The script makes mistakes on purpose, with the probability `miss_rate`. The worker then says
    that nothing was found although a material states the fact, and the planner gives up. The agent
    Single has no worker. It then searches for a fact that is common knowledge.
    """

    version = 0

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        miss_rate: float = 0.0,
        seed: int = 0,
        contract: Contract = MUJICA_CONTRACT,
    ) -> None:
        """Prepare the script.

        `contract` holds the tags of planner and workers. `seed` decides where the script makes
        mistakes.
        """
        self._tokenizer = tokenizer
        self._miss_rate = miss_rate
        self._seed = seed
        self._contract = contract
        self._text_script = TextScript(contract)
        # The queries for which the worker missed a fact on purpose.
        self.missed: set[str] = set()

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Write the turn from the facts in `state`. The prompt does not matter.

        Raises UserError if there is no script for the agent.
        """
        del prompt, continues
        if not isinstance(state, PlannerState | WorkerState | SingleState | DecexState):
            raise UserError(
                "only the agents mujica, single and decex have scripted demonstrations, but this "
                f"agent has the state {type(state).__name__}: start from a checkpoint with --init"
            )
        if isinstance(state, SingleState):
            recalls = random.Random(f"{self._seed} {state.question.id}").random() >= self._miss_rate
            text = scripted_single.write(state, recalls=recalls)
        elif isinstance(state, DecexState):
            text = scripted_decex.write(state)
        elif isinstance(state, PlannerState):
            text = self._plan(state) if state.candidates else self._plan_on_text(state)
        elif state.entity is not None:
            text = self._read(state)
        else:
            text = self._text_script.read(state)

        ids = (*self._tokenizer.encode_turn(text), self._tokenizer.stop_token_ids[0])
        finish_reason = "stop" if len(ids) <= params.max_new_tokens else "length"
        return Completion(
            token_ids=ids[: params.max_new_tokens], logprobs=None, finish_reason=finish_reason
        )

    def _plan(self, state: PlannerState) -> str:
        """Write the planner's turn in a graph environment."""
        # The thought begins with the facts that the planner reads itself.
        reading = ""
        for search in _unread(state):
            relation, objects = _statement(search)
            if objects:
                reading += f"{_words(relation, objects)}. "

        calls = self._open_searches(state)
        if not state.parallel:
            calls = calls[:1]
        if calls:
            relations = dict.fromkeys(evidence.relation for evidence, _ in calls)
            thought = f"{reading}I need the {' and '.join(relations)}."
            return self._contract.write_searches(thought, [call for _, call in calls], "graph")

        # If a fact is missing, an answer would be a guess. A turn without searches ends the episode.
        gold_facts = {
            (evidence.subject_id or evidence.subject, evidence.relation)
            for evidence in state.question.evidences
        }
        if len(_answered_queries(state)) < len(gold_facts):
            return self._contract.write_searches(protocol.NOTHING_FOUND, [], "graph")

        answer = state.question.answers[0]
        thought = f"{reading}{conclusion(state.question, answer)}"
        return self._contract.write_answer(thought, answer)

    def _plan_on_text(self, state: PlannerState) -> str:
        """Write the planner's turn in a text environment."""
        calls = self._text_script.open_searches(state)
        if calls is None:
            return self._contract.write_searches(protocol.NOTHING_FOUND, [], "text")

        # The thought begins with the facts that the planner reads itself.
        reading = ""
        unread_searches = _unread(state)
        for evidence in state.question.evidences:
            value = stated_object(evidence, unread_searches)
            if value is not None:
                reading += f"{fact(evidence, value)} "

        if not calls:
            answer = state.question.answers[0]
            thought = f"{reading}{conclusion(state.question, answer)}"
            return self._contract.write_answer(thought, answer)

        if not state.parallel:
            calls = calls[:1]
        attributes = dict.fromkeys(
            f"the {evidence.relation} of {evidence.subject}" for evidence, _ in calls
        )
        thought = f"{reading}I need {' and '.join(attributes)}."
        return self._contract.write_searches(thought, [call for _, call in calls], "text")

    def _open_searches(self, state: PlannerState) -> list[tuple[Evidence, protocol.SearchCall]]:
        """Return the gold triples that can be asked for and were not asked for yet.

        A triple can be asked for if its subject is a numbered candidate.
        """
        # A triple names its subject by id or by label.
        number_of = {entity.id: number for number, entity in enumerate(state.candidates)}
        number_of |= {entity.label: number_of[entity.id] for entity in state.candidates}
        asked_queries = {search.query for search in state.searches}
        calls = []
        for evidence in state.question.evidences:
            number = number_of.get(evidence.subject_id or evidence.subject)
            if number is None:
                number = number_of.get(evidence.subject)
            if number is None:
                continue
            query = query_of(evidence.relation, state.candidates[number].label)
            if query not in asked_queries:
                asked_queries.add(query)
                calls.append((evidence, protocol.SearchCall(query=query, candidate=number)))
        return calls

    def _read(self, state: WorkerState) -> str:
        """Write the worker's turn in a graph environment."""
        assert state.entity is not None, "a search in a graph names an entity"
        label = state.entity.label
        relation, objects = _relation_and_objects(state.query, label, state.materials)

        # Miss a fact on purpose, with the probability `miss_rate`.
        if objects and random.Random(f"{self._seed} {state.query}").random() < self._miss_rate:
            self.missed.add(state.query)
            objects = {}

        if not objects:
            return self._contract.write_worker(f"{relation} [-1] none", [], protocol.NOTHING_FOUND)
        values = " and ".join(dict.fromkeys(objects.values()))
        sentence = f"The {relation} of {label} is {values}."
        return self._contract.write_worker(_words(relation, objects), list(objects), sentence)


def _relation_and_objects(
    query: str, label: str, materials: Iterable[Material]
) -> tuple[str, dict[int, str]]:
    """Return the relation that a query asks for, and the objects that the materials state for it.

    The objects are a dictionary from the number of a material to its object.
    """
    relation = query.removesuffix(f" of {label}?").split(" is the ", 1)[-1]
    objects = {
        number: material.parts[2]
        for number, material in enumerate(materials)
        if material.parts[:2] == (label, relation)
    }
    return relation, objects


def _statement(search: Search) -> tuple[str, dict[int, str]]:
    """Return the relation that a search asked for, and the objects that its materials state."""
    subject = (Entity(id="", label=search.entity),)
    materials = [Material(text=text, entities=subject) for text in search.materials]
    return _relation_and_objects(search.query, search.entity, materials)


def _words(relation: str, objects: Mapping[int, str]) -> str:
    """Return the relation and its numbered objects as words of a thought."""
    numbered_objects = [f"[{number}] {value}" for number, value in objects.items()]
    return f"{relation} {' and '.join(numbered_objects)}"


def _answered_queries(state: PlannerState) -> set[str]:
    """Return the queries that were answered: a worker selected a material, or a material states it."""
    queries = set()
    for search in state.searches:
        _, objects = _statement(search)
        if search.found and (search.selected or objects):
            queries.add(search.query)
    return queries


def _unread(state: PlannerState) -> list[Search]:
    """Return the searches of the last turn whose materials the planner has to read itself."""
    if state.split:
        return []
    return [
        search
        for search in state.searches
        if search.iteration == state.searches[-1].iteration and search.found
    ]


def sample_text(agent: str = "mujica", contract: Contract = MUJICA_CONTRACT) -> Iterator[str]:
    """Yield the words of prompts, scripts and pre-training documents, to train a new tokenizer.

    The words of another agent or contract are included only if that one is trained. Otherwise they
    would change the vocabulary of every model.
    """
    entity = Entity(id="", label="")
    call = protocol.SearchCall(query="Who is the of", candidate=0)

    # Words of other contracts and agents.
    if contract.has_own_words:
        yield contract.planner_observation(["The of is"], [[entity]], 1, "graph")
        yield contract.planner_observation(["The of is"], [[]], 0, "text")
        yield contract.worker_opening("What is the of?", [("", "", "")], "graph", "brief")
        yield contract.write_searches("I need the.", [call], "text")
        yield contract.write_worker("of", [0], "The of is.")
        yield synthesis_prompts.sample_text()
    if agent == "single":
        yield from scripted_single.sample_text()
    if agent == DECEX:
        yield from scripted_decex.sample_text()

    # The prompts of Mujica.
    for kind in ("graph", "text"):
        for role in ("planner", "worker"):
            yield protocol.opening(role, kind, "brief").system

    # The turns that the script writes as planner and worker.
    yield protocol.write_graph_searches("I need the and .", [call, call])
    yield protocol.write_text_searches("I need the and .", [call])
    yield protocol.write_answer(
        "to and : same different earlier later longer more rather", "yes no"
    )
    yield protocol.write_worker("none", [], protocol.NOTHING_FOUND)
    yield protocol.write_worker("of", [0], "The of is.")

    # The messages that planner and worker read.
    yield protocol.planner_opening("What", [entity])
    yield protocol.planner_observation(["The of is"], [entity], first=1)
    for kind in ("graph", "text"):
        yield protocol.worker_opening("What is the of?", [("", "", "")], kind, "brief")

    # Documents, chat templates and numbers.
    yield "Years: in order: 1 and 2."
    yield f"{protocol.NOTHING_FOUND}\nRead: none ; none [-1]"
    yield "system\nuser\nassistant\nin order"
    yield "".join(f"[{number}] [{number}]" for number in range(-1, 16))
