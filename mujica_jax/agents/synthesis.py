"""EviPath's trajectories: a teacher that knows answer and evidence plays Mujica's planner and worker.

"From Evidence to Trajectory", sections 4.1 and 4.2, equations 3 to 6. An episode is Mujica's own, so it is recorded as
any other: contexts are what the environment returned, under the prompts that are trained, and the mask is made with the
tokens. Who is asked for its turns is a `Policy` that asks the teacher, with prompts of its own:

    abductive    a plan from question, answer and gold evidence; then think and search turn by turn, given all three.
                 For each sub-question an answer from gold evidence alone, the evidence chosen by its likeness to that
                 answer (`evidence.py`), and the worker's turn over the whole pool, given answer and choice
    no_evidence  the same with the answer alone, over what searches really find ("w/o supporting facts", table 1)
    deductive    the agent's own prompts, and neither (table 4)

Differences from the paper:

- The pool of a text search is what the retriever found with all gold passages of the question among it, as far as
  agent.max_observation_tokens has room; of a graph the searched entity's triples, as in table 9. The paper's pool is
  the data set's list of supporting facts.
- Every turn is parsed and checked and tried again with another seed, at most `max_tries` times: its format,
  sub-questions that can be asked (`askable.py`), an answer that is the gold one, evidence that stands in the pool, a
  selection of exactly that evidence, an answer that the evidence states. The paper names no filter.
- What passed is written again from its parsed fields, so that nothing else of a reply is learnt.
- The plan is put at the beginning of the first thought by us: equation 7 learns it, and table 8 has it there.
"""

import dataclasses
import functools
from collections.abc import Sequence

from mujica_jax import metrics
from mujica_jax.agents import protocol, synthesis_prompts
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.askable import is_askable, leaks, secrets
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import fit
from mujica_jax.agents.evidence import chosen, is_faithful, pieces, place_in
from mujica_jax.agents.mujica import PLANNER, WORKER, Mujica, PlannerState, WorkerState
from mujica_jax.agents.teacher import Lesson, Refused, Teacher, as_completion
from mujica_jax.config.methods import EviPathConfig
from mujica_jax.config.schema import MujicaConfig
from mujica_jax.inference.requests import Completion, SamplingParams, TokenIds
from mujica_jax.inference.stops import before_stop
from mujica_jax.metrics import Rule
from mujica_jax.models.tokenizer import Tokenizer, neutralise
from mujica_jax.records import StopReason, Trajectory
from mujica_jax.retrieval.text.similarity import Similarity
from mujica_jax.tasks.environment import WithAllGoldPassages
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

FAILED = "failed_"  # before a reason: trajectories that ended with it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthesis:
    """What all episodes share."""

    method: EviPathConfig
    agent: MujicaConfig
    tokenizer: Tokenizer  # of the policy that is tuned
    teacher: Teacher
    similarity: Similarity
    prompt: protocol.PromptMode  # of the agent's own prompts as a teacher reads them
    rule: Rule


class Synthesizer:
    """Implements `Agent`: one trajectory of a teacher."""

    def __init__(self, synthesis: Synthesis) -> None:
        self._synthesis = synthesis
        self._mujica = Mujica(synthesis.tokenizer, synthesis.agent)

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        return self._mujica.opening(role, kind)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """What it counts stands in docs/metrics.md. A failed trajectory keeps what was written so far."""
        writer = _Writer(self._synthesis, attempt, environment.kind, self._synthesis.teacher.policy or policy)
        with_gold = self._synthesis.method.mode == "abductive" and environment.kind == "text"
        pool = WithAllGoldPassages(environment, attempt.question, self._fit) if with_gold else environment
        trajectory = await self._mujica.run(attempt, pool, writer)
        counts = {**trajectory.counts, **writer.counts}
        if not writer.failures:
            return dataclasses.replace(trajectory, counts=counts)
        counts[f"{FAILED}{min(writer.failures)}"] = 1.0  # of workers that fail in one turn, one is named
        return dataclasses.replace(trajectory, answer="", stop_reason=StopReason.SYNTHESIS_FAILED, counts=counts)

    def _fit(self, materials: Sequence[Material]) -> tuple[Material, ...]:
        return fit(self._synthesis.tokenizer, materials, self._synthesis.agent.max_observation_tokens)


class _Writer:
    """Implements `Policy` for one episode. A turn that fails is written as one that ends the episode; the other workers
    of its round are heard to their end, so that what is counted does not depend on who was first."""

    def __init__(self, synthesis: Synthesis, attempt: Attempt, kind: EnvironmentKind, policy: Policy) -> None:
        self._synthesis, self._policy = synthesis, policy
        self._kind: EnvironmentKind = kind
        self._question, self._mode = attempt.question, synthesis.method.mode
        self._lesson = Lesson(synthesis.teacher, policy, attempt, synthesis.method.max_tries)
        self._gold = pieces(attempt.question, kind) if self._mode == "abductive" else []
        self._secrets = secrets(attempt.question, with_evidence=self._mode == "abductive")
        self._plan: list[str] = []
        self._planner: Dialogue | None = None
        self._numbered = 0  # candidates that the planner was shown
        self.failures: list[str] = []

    @property
    def counts(self) -> dict[str, float]:
        return self._lesson.counts

    @property
    def version(self) -> int:
        return self._policy.version

    async def generate(self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool) -> Completion:
        del prompt, continues  # the teacher is asked with prompts of its own
        assert isinstance(state, PlannerState | WorkerState), "the configuration was checked to play mujica"
        try:
            if self.failures and isinstance(state, PlannerState):
                raise Refused(self.failures[0])
            text = await (self._turn(state, params) if isinstance(state, PlannerState) else self._read(state, params))
        except Refused as refused:
            self.failures.append(str(refused))
            text = self._ending(state, str(refused))
        return as_completion(self._synthesis.tokenizer, text)

    # --- planner ---

    async def _turn(self, state: PlannerState, params: SamplingParams) -> str:
        if self._planner is None:
            self._planner = await self._opened(state, params)
        else:
            last = state.searches[-1].iteration
            sentences = [search.sentence for search in state.searches if search.iteration == last]
            new = state.candidates[self._numbered :]
            self._planner.add_user(protocol.planner_observation(sentences, new, self._numbered))
        self._numbered = len(state.candidates)
        checked = functools.partial(self._checked, state=state, params=params)
        text = await self._lesson.ask("turn", self._planner, params, state, checked)
        self._planner.add_model(as_completion(self._synthesis.teacher.tokenizer, text))
        return text

    async def _opened(self, state: PlannerState, params: SamplingParams) -> Dialogue:
        """The planner's conversation with the teacher, after the plan was made."""
        opening = protocol.planner_opening(self._question.text, state.candidates)
        if self._mode == "deductive":
            return self._lesson.open(PLANNER, self._prompt(PLANNER), opening)
        if self._mode == "abductive" and not self._gold:
            raise Refused("without_evidence")
        answer, evidence = self._question.answers[0], self._evidence_lines()
        if self._synthesis.teacher.plans:
            request = synthesis_prompts.plan_request(self._question.text, answer, evidence)
            dialogue = self._lesson.open(PLANNER, Opening(system=synthesis_prompts.PLAN_RULES), request)
            params = dataclasses.replace(params, stop_strings=())
            planned = functools.partial(self._planned, state=state)
            self._plan = await self._lesson.ask("plan", dialogue, params, state, planned)
        hint = synthesis_prompts.planner_hint(answer, evidence, self._plan)
        prompt = self._prompt(PLANNER, synthesis_prompts.PLANNER_ADDITION)
        return self._lesson.open(PLANNER, prompt, f"{hint}\n\n{opening}")

    def _planned(self, reply: str, state: PlannerState) -> list[str]:
        plan = [neutralise(line) for line in synthesis_prompts.parse_plan(reply)]
        if not plan:
            raise Refused("no_plan")
        if leaks(" ".join(plan), self._known(state), self._secrets):
            raise Refused("leak")
        return plan

    def _checked(self, reply: str, state: PlannerState, params: SamplingParams) -> str:
        """One planner turn, written again."""
        reply = before_stop(reply, protocol.OBSERVATION)
        thought = neutralise(synthesis_prompts.parse_thought(reply))
        if not thought:
            raise Refused("no_thought")
        limit = self._synthesis.agent.max_searches_per_turn
        action = protocol.parse_planner(reply, self._kind, candidates=len(state.candidates), max_searches=limit)
        if action.refused is not None:
            raise Refused(action.refused.value)
        if any(call.refusal for call in action.searches):
            raise Refused(StopReason.UNKNOWN_CANDIDATE.value)
        if action.unreadable:
            raise Refused(StopReason.NO_ACTION.value)
        if action.answer is not None:
            if self._mode != "deductive":
                if not state.searches:
                    raise Refused("no_search")
                if metrics.score(action.answer, self._question.answers, self._synthesis.rule).em != 1.0:
                    raise Refused("wrong_answer")
            return self._fitting(protocol.write_answer(thought, neutralise(action.answer)), params)
        calls = [dataclasses.replace(call, query=neutralise(call.query)) for call in action.searches]
        known = self._known(state)
        asked = {search.query for search in state.searches}
        for call in calls:
            if not is_askable(call.query, known):
                raise Refused("not_askable")
            if call.query in asked:
                raise Refused("repeated")
        if self._mode != "deductive" and leaks(f"{thought} {' '.join(c.query for c in calls)}", known, self._secrets):
            raise Refused("leak")
        if self._plan and not state.searches:
            thought = f"{synthesis_prompts.plan_in_thought(self._plan)}\n{thought}"
        write = protocol.write_graph_searches if self._kind == "graph" else protocol.write_text_searches
        return self._fitting(write(thought, calls), params)

    def _known(self, state: PlannerState) -> list[str]:
        labels = [entity.label for entity in state.candidates]
        return [self._question.text, *labels, *(search.sentence for search in state.searches)]

    def _evidence_lines(self) -> list[str]:
        """What a planner's teacher reads: triples where the question has them, else the gold passages."""
        if self._mode != "abductive":
            return []
        triples = [f"{e.subject}, {e.relation}, {e.object}" for e in self._question.evidences]
        return triples or [piece.text for piece in self._gold]

    # --- worker ---

    async def _read(self, state: WorkerState, params: SamplingParams) -> str:
        shown = [material.parts for material in state.materials]
        opening = protocol.worker_opening(state.query, shown, self._kind, self._synthesis.prompt)
        prompt, places = self._prompt(WORKER), None
        if self._mode == "abductive":
            request = synthesis_prompts.answer_request(state.query, [piece.text for piece in self._gold])
            dialogue = self._lesson.open(WORKER, Opening(system=synthesis_prompts.ANSWER_RULES), request)
            stops = dataclasses.replace(params, stop_strings=synthesis_prompts.SENTENCE_STOPS)
            grounded = functools.partial(self._grounded, state=state)
            answer, places = await self._lesson.ask("answer", dialogue, stops, state, grounded)
            prompt = self._prompt(WORKER, synthesis_prompts.WORKER_ADDITION)
            opening = f"{opening}\n{synthesis_prompts.worker_hint(answer, places)}"
        dialogue = self._lesson.open(WORKER, prompt, opening)
        checked = functools.partial(self._checked_reading, state=state, params=params, places=places)
        return await self._lesson.ask("turn", dialogue, params, state, checked)

    def _grounded(self, reply: str, state: WorkerState) -> tuple[str, list[int]]:
        """The intermediate answer, and where in the pool its evidence stands."""
        answer = protocol.field("sentence", reply)
        if not answer or answer == protocol.NOTHING_FOUND:
            raise Refused("no_answer")
        method = self._synthesis.method
        found = chosen(answer, self._gold, similarity=self._synthesis.similarity, threshold=method.threshold)
        places = [place for piece in found if (place := place_in(state.materials, piece)) is not None]
        if not places:
            raise Refused("evidence_not_in_pool")
        if not is_faithful(answer, state.query, [state.materials[place].text for place in places]):
            raise Refused("unfaithful")
        return answer, places

    def _checked_reading(self, reply: str, state: WorkerState, params: SamplingParams, places: list[int] | None) -> str:
        """One worker turn, written again. `places`: what it must select, where that is known."""
        read = protocol.parse_worker(reply, materials=len(state.materials))
        thought = neutralise(synthesis_prompts.parse_thought(reply))
        has_selection = protocol.field("select", reply) is not None
        if not read.well_formed or not has_selection or not thought:
            raise Refused("malformed_worker")
        if places is not None and set(read.selected) != set(places):
            raise Refused("wrong_selection")
        evidence = [state.materials[place].text for place in read.selected]
        if evidence and not is_faithful(read.sentence, state.query, evidence):
            raise Refused("unfaithful")
        return self._fitting(protocol.write_worker(thought, read.selected, neutralise(read.sentence)), params)

    def _prompt(self, role: str, addition: str = "") -> Opening:
        """Return the agent's own prompt as the teacher reads it, with `addition` behind the rules."""
        name, synthesis = "planner" if role == PLANNER else "worker", self._synthesis
        prompt = protocol.opening(name, self._kind, synthesis.prompt, parallel=synthesis.agent.parallel)
        return dataclasses.replace(prompt, system=prompt.system + addition)

    def _fitting(self, text: str, params: SamplingParams) -> str:
        if len(as_completion(self._synthesis.tokenizer, text).token_ids) > params.max_new_tokens:
            raise Refused(StopReason.TURN_LENGTH.value)
        return text

    def _ending(self, state: PlannerState | WorkerState, reason: str) -> str:
        if isinstance(state, WorkerState):
            return protocol.write_worker(reason, [], protocol.NOTHING_FOUND)
        return f"<think> {reason} </think>"
