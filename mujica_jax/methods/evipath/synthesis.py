"""Write EviPath's trajectories: a teacher plays the planner and the workers.

Source: "From Evidence to Trajectory", sections 4.1 and 4.2, equations 3 to 6.

An episode is played by the usual agent (`agents/mujica.py`, with the contract that `agent.protocol`
names) and recorded like any other episode: under the prompts that are trained, with the
observations of the environment. Only the turns come from elsewhere, from a `Policy` that asks the
teacher with other prompts (`agents/synthesis_prompts.py`). There are three modes:

- `abductive`: the teacher knows the question, the answer and the gold evidence. It first writes a
  plan, and then the planner's turns. For each sub-question it writes an answer from the gold
  evidence. The evidence of that answer is chosen by similarity (`evidence.py`). Then the teacher
  writes the worker's turn over the whole pool of materials, knowing the answer and its evidence.
- `no_evidence`: the teacher only knows the answer, and workers read real search results ("w/o
  supporting facts", table 1).
- `deductive`: the teacher reads the agent's own prompts and knows neither (table 4).

Any language model can be the teacher in all three modes. The script (`teacher.plans` False) replays
the warm-up's demonstrations and only works in the abductive mode.

The pool is the set of materials that a worker reads. For texts in the abductive mode it consists of
the paragraphs that come with the question, and nothing is searched, as in the paper
(`tasks/own_paragraphs.py`). If a question has no paragraphs, or with `method.distractors
retrieved`, the pool consists of search results, with the question's gold passages added. Over a
graph it consists of the triples of the searched entity, as in table 9.

The teacher may have another tokenizer than the trained policy. The teacher is asked in text and
answers in text. Accepted text is tokenised once, with the policy's tokenizer.

Differences from the paper:

- The paper names no filter. We parse and check every turn, and try again with another seed, at most
  `max_tries` times. An accepted turn has the right format. Its sub-questions can be asked
  (`evidence.is_askable`), and its answer is the gold answer. Its evidence is in the pool and states
  the answer, and exactly this evidence is selected.
- An accepted turn is written again from its parsed fields, so that nothing else of a reply is
  learnt.
- We put the plan at the beginning of the first thought, because equation 7 learns it and table 8
  shows it there.
- A pool contains as many paragraphs as `agent.max_observation_tokens` has room for, the gold ones
  first.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from mujica_jax import metrics
from mujica_jax.agents import protocol, synthesis_prompts
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.contract import Contract
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import fit
from mujica_jax.agents.mujica import PLANNER, WORKER, Mujica, PlannerState, WorkerState
from mujica_jax.config.methods import EviPathConfig
from mujica_jax.config.schema import MujicaConfig
from mujica_jax.inference.requests import Completion, SamplingParams, TokenIds, before_stop
from mujica_jax.methods.evipath.evidence import (
    chosen,
    is_askable,
    is_faithful,
    leaks,
    pieces,
    place_in,
    secrets,
)
from mujica_jax.methods.evipath.teacher import Lesson, RefusedReplyError, Teacher, as_completion
from mujica_jax.metrics import Rule
from mujica_jax.models.thoughts import first_thought
from mujica_jax.models.tokenizer import Tokenizer, neutralise
from mujica_jax.records import Conversation, GoldPassage, Question, StopReason, Trajectory
from mujica_jax.retrieval.embedding.similarity import Similarity
from mujica_jax.tasks.environment import WithAllGoldPassages
from mujica_jax.tasks.own_paragraphs import OwnParagraphs
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

# The beginning of a count's name. The reason for which trajectories failed follows it.
FAILED = "failed_"

# A function that returns the paragraphs that come with a question.
ParagraphsOf = Callable[[Question], Sequence[GoldPassage]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthesis:
    """The parts that all episodes of a synthesis share.

    Attributes:
        method: The configuration of the method.
        agent: The configuration of the agent.
        tokenizer: The tokenizer of the trained policy.
        teacher: The teacher.
        similarity: Returns the cosine similarities of a text to several others.
        prompt: The mode of the agent's prompts that the teacher reads.
        rule: The task's rule for comparing answers.
        paragraphs: Returns the paragraphs that come with a question.
    """

    method: EviPathConfig
    agent: MujicaConfig
    tokenizer: Tokenizer
    teacher: Teacher
    similarity: Similarity
    prompt: protocol.PromptMode
    rule: Rule
    paragraphs: ParagraphsOf = lambda question: ()


class Synthesizer:
    """An `Agent` that lets a teacher write each trajectory."""

    def __init__(self, synthesis: Synthesis) -> None:
        self._synthesis = synthesis
        self._mujica = Mujica(synthesis.tokenizer, synthesis.agent)

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return the prompt under which the conversations of a role are trained."""
        return self._mujica.opening(role, kind)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """Play one episode. If it fails, its trajectory holds the turns that were written before.

        `docs/reference/metrics.md` explains the counts of the trajectory.
        """
        trajectory, _ = await self._play(attempt, environment, policy)
        return trajectory

    async def lessons(
        self, attempt: Attempt, environment: Environment, policy: Policy
    ) -> tuple[Conversation, ...]:
        """Play one episode, and return its conversations with the teacher's own prompts.

        A model that learns them can be a teacher. If the episode fails, the result is empty.
        """
        trajectory, writer = await self._play(attempt, environment, policy)
        return () if trajectory.stop_reason is StopReason.SYNTHESIS_FAILED else writer.lessons()

    async def _play(
        self, attempt: Attempt, environment: Environment, policy: Policy
    ) -> tuple[Trajectory, "_Writer"]:
        """Play one episode, and return its trajectory with the writer of its turns."""
        teacher = self._synthesis.teacher.policy or policy
        writer = _Writer(self._synthesis, self._mujica.contract, attempt, environment.kind, teacher)
        pool = self._pool(environment, attempt.question)
        trajectory = await self._mujica.run(attempt, pool, writer)
        counts = {**trajectory.counts, **writer.counts}
        if not writer.failures:
            return dataclasses.replace(trajectory, counts=counts), writer

        # If several workers fail in one turn, count only one of the failures. `min` makes sure that
        # it does not depend on which worker came first.
        counts[f"{FAILED}{min(writer.failures)}"] = 1.0
        failed = dataclasses.replace(
            trajectory, answer="", stop_reason=StopReason.SYNTHESIS_FAILED, counts=counts
        )
        return failed, writer

    def _pool(self, environment: Environment, question: Question) -> Environment:
        """Return the environment of this episode, which decides what workers read."""
        if self._synthesis.method.mode != "abductive" or environment.kind != "text":
            return environment
        paragraphs = self._synthesis.paragraphs(question)
        if paragraphs:
            return OwnParagraphs(question, paragraphs, self._fit)
        return WithAllGoldPassages(environment, question, self._fit)

    def _fit(self, materials: Sequence[Material]) -> tuple[Material, ...]:
        """Return the first materials for which `agent.max_observation_tokens` has room."""
        return fit(
            self._synthesis.tokenizer, materials, self._synthesis.agent.max_observation_tokens
        )


class _Writer:
    """A `Policy` that asks the teacher for the turns of one episode.

    If a turn fails, a turn that ends the episode is written in its place. The other workers of the
    same iteration still finish, so that the counts do not depend on which worker came first.
    """

    def __init__(
        self,
        synthesis: Synthesis,
        contract: Contract,
        attempt: Attempt,
        kind: EnvironmentKind,
        policy: Policy,
    ) -> None:
        self._synthesis = synthesis
        self._policy = policy
        self._contract = contract
        self._kind: EnvironmentKind = kind
        self._question = attempt.question
        self._mode = synthesis.method.mode
        self._lesson = Lesson(synthesis.teacher, policy, attempt, synthesis.method.max_tries)
        self._gold = pieces(attempt.question, kind) if self._mode == "abductive" else []
        self._secrets = secrets(attempt.question, with_evidence=self._mode == "abductive")
        self._plan: list[str] = []
        self._planner: Dialogue | None = None
        self.failures: list[str] = []

    @property
    def counts(self) -> dict[str, float]:
        """The counts of tries, refused replies and tokens."""
        return self._lesson.counts

    def lessons(self) -> tuple[Conversation, ...]:
        """Return all conversations with the teacher, with the accepted replies."""
        return tuple(dialogue.record() for dialogue in self._lesson.dialogues)

    @property
    def version(self) -> int:
        """The version of the teacher's policy."""
        return self._policy.version

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Ask the teacher for the next turn, and return it in the trained policy's tokens."""
        # The teacher has its own prompts, so the agent's prompt is not used.
        del prompt, continues
        assert isinstance(state, PlannerState | WorkerState), (
            "config.checks makes sure that EviPath trains the agent mujica"
        )
        try:
            if isinstance(state, WorkerState):
                text = await self._worker_turn(state, params)
            elif self.failures:
                raise RefusedReplyError(self.failures[0])
            else:
                text = await self._planner_turn(state, params)
        except RefusedReplyError as refusal:
            reason = str(refusal)
            self.failures.append(reason)
            text = self._failed_turn(state, reason)
        return as_completion(self._synthesis.tokenizer, text)

    # --- planner ---

    async def _planner_turn(self, state: PlannerState, params: SamplingParams) -> str:
        """Ask the teacher for the planner's next turn, and return the accepted text."""
        if self._planner is None:
            self._planner = await self._open_planner(state, params)
        else:
            self._planner.add_user(state.observation)
        parse = functools.partial(self._parse_planner_turn, state=state, params=params)
        text = await self._lesson.ask("turn", self._planner, params, state, parse)
        self._lesson.accept(self._planner, text)
        return text

    async def _open_planner(self, state: PlannerState, params: SamplingParams) -> Dialogue:
        """Open the planner's conversation with the teacher.

        If the mode has a plan, ask for it first.
        """
        opening = self._contract.planner_opening(self._question.text, state.candidates)
        if self._mode == "deductive":
            return self._lesson.open(PLANNER, self._prompt(PLANNER), opening)
        if self._mode == "abductive" and not self._gold:
            raise RefusedReplyError("without_evidence")

        answer = self._question.answers[0]
        evidence = self._evidence_lines()
        if self._synthesis.teacher.plans:
            self._plan = await self._ask_for_plan(answer, evidence, state, params)
        hint = synthesis_prompts.planner_hint(answer, evidence, self._plan)
        prompt = self._prompt(PLANNER, synthesis_prompts.planner_addition(self._synthesis.prompt))
        return self._lesson.open(PLANNER, prompt, f"{hint}\n\n{opening}")

    async def _ask_for_plan(
        self, answer: str, evidence: list[str], state: PlannerState, params: SamplingParams
    ) -> list[str]:
        """Ask the teacher for a plan, and return its sub-questions."""
        request = synthesis_prompts.plan_request(self._question.text, answer, evidence)
        rules = Opening(system=synthesis_prompts.PLAN_RULES)
        dialogue = self._lesson.open(PLANNER, rules, request)
        params = dataclasses.replace(params, stop_strings=())
        parse = functools.partial(self._parse_plan, state=state)
        plan = await self._lesson.ask("plan", dialogue, params, state, parse)
        self._lesson.accept(dialogue, "\n".join(synthesis_prompts.numbered(plan)))
        return plan

    def _parse_plan(self, reply: str, state: PlannerState) -> list[str]:
        """Return the sub-questions of a plan. Raises RefusedReplyError if it cannot be used."""
        plan = [neutralise(line) for line in synthesis_prompts.parse_plan(reply)]
        if not plan:
            raise RefusedReplyError("no_plan")
        if leaks(" ".join(plan), self._known_texts(state), self._secrets):
            raise RefusedReplyError("leak")
        return plan

    def _parse_planner_turn(self, reply: str, state: PlannerState, params: SamplingParams) -> str:
        """Check a planner's turn, and write it again from its parsed fields.

        Raises RefusedReplyError if the turn is not accepted.
        """
        reply = before_stop(reply, self._contract.observation(self._kind))
        thought = neutralise(first_thought(reply))
        if not thought:
            raise RefusedReplyError("no_thought")

        action = self._contract.parse_planner(
            reply,
            self._kind,
            candidates=len(state.candidates),
            max_searches=self._synthesis.agent.max_searches_per_turn,
        )
        if action.refused is not None:
            raise RefusedReplyError(action.refused.value)
        if any(call.refusal for call in action.searches):
            raise RefusedReplyError(StopReason.UNKNOWN_CANDIDATE.value)
        if action.unreadable:
            raise RefusedReplyError(StopReason.NO_ACTION.value)

        if action.answer is not None:
            self._check_answer(action.answer, state)
            text = self._contract.write_answer(thought, neutralise(action.answer))
            return self._checked_length(text, params)

        calls = [
            dataclasses.replace(call, query=neutralise(call.query)) for call in action.searches
        ]
        self._check_searches(thought, calls, state)
        if self._plan and not state.searches:
            thought = f"{synthesis_prompts.plan_in_thought(self._plan)}\n{thought}"
        text = self._contract.write_searches(thought, calls, self._kind)
        return self._checked_length(text, params)

    def _check_answer(self, answer: str, state: PlannerState) -> None:
        """Check that a turn may end the episode. Raises RefusedReplyError otherwise.

        If the teacher knows the answer, it must have searched, and its answer must be right. In the
        deductive mode every answer is accepted here.
        """
        if self._mode == "deductive":
            return
        if not state.searches:
            raise RefusedReplyError("no_search")
        score = metrics.score(answer, self._question.answers, self._synthesis.rule)
        if score.em != 1.0:
            raise RefusedReplyError("wrong_answer")

    def _check_searches(
        self, thought: str, calls: Sequence[protocol.SearchCall], state: PlannerState
    ) -> None:
        """Check that the sub-questions can be asked, are new, and contain no hidden names.

        Raises RefusedReplyError otherwise.
        """
        known_texts = self._known_texts(state)
        asked_queries = {search.query for search in state.searches}
        for call in calls:
            if not is_askable(call.query, known_texts):
                raise RefusedReplyError("not_askable")
            if call.query in asked_queries:
                raise RefusedReplyError("repeated")

        if self._mode != "deductive":
            queries = " ".join(call.query for call in calls)
            if leaks(f"{thought} {queries}", known_texts, self._secrets):
                raise RefusedReplyError("leak")

    def _known_texts(self, state: PlannerState) -> list[str]:
        """Return what the planner has read: question, candidates and the workers' answers."""
        labels = [entity.label for entity in state.candidates]
        sentences = [search.sentence for search in state.searches]
        return [self._question.text, *labels, *sentences]

    def _evidence_lines(self) -> list[str]:
        """Return the evidence that the teacher reads when it plays the planner.

        These are the question's triples or, if it has none, its gold passages.
        """
        if self._mode != "abductive":
            return []
        triples = [
            f"{evidence.subject}, {evidence.relation}, {evidence.object}"
            for evidence in self._question.evidences
        ]
        return triples or [piece.text for piece in self._gold]

    # --- worker ---

    async def _worker_turn(self, state: WorkerState, params: SamplingParams) -> str:
        """Ask the teacher for a worker's turn, and return the accepted text."""
        mode = self._synthesis.prompt
        parts = [material.parts for material in state.materials]
        message = self._contract.worker_opening(state.query, parts, self._kind, mode)
        prompt = self._prompt(WORKER)
        places = None
        if self._mode == "abductive":
            answer, places = await self._ask_for_answer(state, params)
            prompt = self._prompt(WORKER, synthesis_prompts.worker_addition(mode))
            golden = [(place, state.materials[place].text) for place in places]
            message = f"{message}\n{synthesis_prompts.worker_hint(answer, golden, mode)}"

        dialogue = self._lesson.open(WORKER, prompt, message)
        parse = functools.partial(
            self._parse_worker_turn, state=state, params=params, places=places
        )
        text = await self._lesson.ask("turn", dialogue, params, state, parse)
        self._lesson.accept(dialogue, text)
        return text

    async def _ask_for_answer(
        self, state: WorkerState, params: SamplingParams
    ) -> tuple[str, list[int]]:
        """Ask the teacher to answer a sub-question from the gold evidence alone.

        Return the answer, and the indices of its evidence in the pool.
        """
        tag = self._contract.sentence_tag
        rules = Opening(system=synthesis_prompts.answer_rules(self._synthesis.prompt, tag))
        gold_texts = [piece.text for piece in self._gold]
        request = synthesis_prompts.answer_request(state.query, gold_texts)
        dialogue = self._lesson.open(WORKER, rules, request)
        params = dataclasses.replace(params, stop_strings=synthesis_prompts.answer_stops(tag))
        parse = functools.partial(self._parse_answer, state=state)
        answer, places = await self._lesson.ask("answer", dialogue, params, state, parse)
        self._lesson.accept(dialogue, synthesis_prompts.write_sentence(tag, answer))
        return answer, places

    def _parse_answer(self, reply: str, state: WorkerState) -> tuple[str, list[int]]:
        """Return the answer to a sub-question, and the indices of its evidence in the pool.

        Raises RefusedReplyError if the answer is not accepted.
        """
        answer = protocol.field(self._contract.sentence_tag, reply)
        if not answer or answer == protocol.NOTHING_FOUND:
            raise RefusedReplyError("no_answer")

        evidence = chosen(
            answer,
            self._gold,
            similarity=self._synthesis.similarity,
            threshold=self._synthesis.method.threshold,
        )
        places: list[int] = []
        for piece in evidence:
            place = place_in(state.materials, piece)
            if place is not None:
                places.append(place)
        if not places:
            raise RefusedReplyError("evidence_not_in_pool")
        if not is_faithful(answer, state.query, [state.materials[place].text for place in places]):
            raise RefusedReplyError("unfaithful")
        return answer, places

    def _parse_worker_turn(
        self, reply: str, state: WorkerState, params: SamplingParams, places: list[int] | None
    ) -> str:
        """Check a worker's turn, and write it again from its parsed fields.

        `places` are the indices of the materials that the worker must select; None if any selection
        is allowed. Raises RefusedReplyError if the turn is not accepted.
        """
        turn = self._contract.parse_worker(reply, materials=len(state.materials))
        thought = neutralise(first_thought(reply))

        # Under some contracts a worker that finds nothing gives no reasons. Its turn is then only a
        # sentence, without a thought and without a selection.
        is_bare = not turn.selected and not self._contract.explains_nothing_found
        has_selection = protocol.field("select", reply) is not None
        if not turn.well_formed or not (has_selection or is_bare) or not (thought or is_bare):
            raise RefusedReplyError("malformed_worker")

        if places is not None and set(turn.selected) != set(places):
            raise RefusedReplyError("wrong_selection")
        evidence = [state.materials[place].text for place in turn.selected]
        if evidence and not is_faithful(turn.sentence, state.query, evidence):
            raise RefusedReplyError("unfaithful")

        text = self._contract.write_worker(thought, turn.selected, neutralise(turn.sentence))
        return self._checked_length(text, params)

    # --- both ---

    def _prompt(self, role: str, addition: str = "") -> Opening:
        """Return the agent's prompt in the teacher's mode, with `addition` after the rules."""
        prompt = self._contract.opening(
            "planner" if role == PLANNER else "worker",
            self._kind,
            self._synthesis.prompt,
            parallel=self._synthesis.agent.parallel,
        )
        return dataclasses.replace(prompt, system=prompt.system + addition)

    def _checked_length(self, text: str, params: SamplingParams) -> str:
        """Return the text. Raises RefusedReplyError if it is too long for a turn."""
        turn = as_completion(self._synthesis.tokenizer, text)
        if len(turn.token_ids) > params.max_new_tokens:
            raise RefusedReplyError(StopReason.TURN_LENGTH.value)
        return text

    def _failed_turn(self, state: PlannerState | WorkerState, reason: str) -> str:
        """Return the turn to write after a failure.

        A planner's turn then ends the episode, and a worker's turn finds nothing.
        """
        if isinstance(state, WorkerState):
            return self._contract.write_worker(reason, [], protocol.NOTHING_FOUND)
        return f"<think> {reason} </think>"
