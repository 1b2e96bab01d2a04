"""Whole episodes in a little world, with policies that write fixed texts."""

import asyncio
import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.agents import agent as agents
from mujica_jax.agents.agent import EnginePolicy, EpisodeHooks, run_episodes
from mujica_jax.agents.mujica import PlannerState, WorkerState
from mujica_jax.agents.protocol import NOTHING_FOUND
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.records import Entity, Question, StopReason, Trajectory
from mujica_jax.rewards.reward import find_reward, is_well_formed
from mujica_jax.runtime.preemption import PreemptedError
from mujica_jax.tasks.task import Material
from tests.helpers.little_agent import (
    CITY,
    CONFIG,
    DIRECTOR,
    FILM,
    GRAPH,
    OTHER_FILM,
    QUESTION,
    LittleWorld,
    ToldPolicy,
    agent,
    answer,
    attempt,
    completion,
    everywhere,
    play,
    read,
    search,
    tokenizer,
)

F1 = find_reward("f1", "two_wiki")
WHO = "Who is the director of Amber Tide?"
BORN = "Where was Ilse Vand born?"
READS = {
    WHO: read("[1]", "The director of Amber Tide is Ilse Vand."),
    BORN: read("[0]", "Ilse Vand was born in Ghent."),
}
PASSAGES = {WHO: (Material(text="Amber Tide: a film by Ilse Vand.", title="Amber Tide"),)}


def right_answers() -> ToldPolicy:
    return ToldPolicy([search((0, WHO)), search((2, BORN)), answer("Ghent")], READS)


def planner_texts(trajectory: Trajectory, role: str = "context") -> list[str]:
    return [turn.text for turn in trajectory.conversations[0].turns if turn.role == role]


def planner_requests(policy: ToldPolicy) -> list:
    return [request for request in policy.requests if isinstance(request.state, PlannerState)]


def worker_requests(policy: ToldPolicy) -> list:
    return [request for request in policy.requests if isinstance(request.state, WorkerState)]


# --- an episode that goes well ---


def test_an_answered_episode_is_recorded_whole():
    trajectory = play(right_answers())
    assert trajectory.question_id == QUESTION.id
    assert trajectory.attempt == 0
    assert trajectory.seed == 0
    assert trajectory.policy_version == 3
    assert trajectory.stop_reason == StopReason.ANSWERED
    assert trajectory.answer == "Ghent"
    assert trajectory.reward == 1.0
    assert trajectory.rewards_by_part == {"f1": 1.0}
    assert trajectory.counts == {"malformed_workers": 0.0, "malformed_searches": 0.0}
    assert [conversation.role for conversation in trajectory.conversations] == [
        "planner",
        "worker",
        "worker",
    ]
    assert trajectory.seconds > 0


def test_the_searches_of_an_episode_are_recorded():
    world = LittleWorld()
    trajectory = play(right_answers(), world)
    assert world.searched == [(WHO, FILM), (BORN, DIRECTOR)]
    first, second = trajectory.searches
    assert first.iteration == 0
    assert first.query == WHO
    assert first.entity == FILM.label
    assert first.selected == (1,)
    assert first.found is True
    assert first.materials == tuple(material.text for material in GRAPH[FILM.id])
    assert second.iteration == 1
    assert second.sentence == "Ilse Vand was born in Ghent."


def test_conversations_hold_what_the_policy_read_and_wrote():
    policy = right_answers()
    trajectory = play(policy)
    planner = planner_requests(policy)
    workers = worker_requests(policy)
    for place, request in enumerate(planner):
        turns_before = trajectory.conversations[0].turns[: 2 * place + 1]
        assert list(request.prompt) == [id for turn in turns_before for id in turn.token_ids]
    for request, conversation in zip(workers, trajectory.conversations[1:], strict=True):
        context, model = conversation.turns
        assert context.token_ids == request.prompt
        assert model.text == READS[request.state.query]
        assert model.token_ids == completion(model.text).token_ids
        assert model.logprobs == completion(model.text).logprobs
    assert planner_texts(trajectory, "model") == [
        search((0, WHO)),
        search((2, BORN)),
        answer("Ghent"),
    ]
    assert [request.continues for request in planner] == [True] * 3, (
        "a planner comes back with its prompt as beginning"
    )
    assert [request.continues for request in workers] == [False] * 2


def test_planner_and_worker_are_told_apart_by_their_system_prompts():
    policy = right_answers()
    play(policy)
    openings = {
        type(request.state): tokenizer().decode(request.prompt).split("<|im_end|>")[0]
        for request in policy.requests
    }
    assert openings[PlannerState] != openings[WorkerState]


def test_what_is_found_becomes_searchable_under_the_next_numbers():
    """Both searches of the first turn find the director.

    The first one numbers her, the second one changes nothing.
    """
    who_else = "Who is the director of Tin Orchard?"
    reads = READS | {who_else: read("[0]", "The director of Tin Orchard is Ilse Vand.")}
    policy = ToldPolicy(
        [search((1, who_else), (0, WHO)), search((2, BORN)), answer("Ghent")], reads
    )
    world = LittleWorld()
    trajectory = play(policy, world)
    assert world.searched[-1] == (BORN, DIRECTOR)
    states = [request.state.candidates for request in planner_requests(policy)]
    assert states == [
        (FILM, OTHER_FILM),
        (FILM, OTHER_FILM, DIRECTOR),
        (FILM, OTHER_FILM, DIRECTOR, CITY),
    ]
    opening, first, second = planner_texts(trajectory)
    assert "[0] Amber Tide [1] Tin Orchard" in opening
    assert first == (
        "Obs: The director of Tin Orchard is Ilse Vand. The director of Amber Tide is Ilse Vand.\n"
        "Candidate: [2] Ilse Vand"
    )
    assert second == "Obs: Ilse Vand was born in Ghent.\nCandidate: [3] Ghent"


def test_only_selected_materials_make_entities_searchable():
    policy = ToldPolicy(
        [search((0, WHO)), answer("Ghent")], {WHO: read("[0]", "Amber Tide came out in 1961.")}
    )
    trajectory = play(policy)
    assert planner_texts(trajectory)[-1] == "Obs: Amber Tide came out in 1961."


def test_a_worker_that_breaks_the_format_reports_that_nothing_was_found_and_is_counted():
    policy = ToldPolicy(
        [search((0, WHO), (1, BORN)), answer("Ghent")], {WHO: "Ilse Vand!", BORN: READS[BORN]}
    )
    trajectory = play(policy)
    assert trajectory.counts["malformed_workers"] == 1.0
    assert [search.sentence for search in trajectory.searches] == [
        NOTHING_FOUND,
        "Ilse Vand was born in Ghent.",
    ]
    assert not trajectory.searches[0].found
    assert len(trajectory.conversations[1:]) == 2, "a failed conversation is a record too"


def test_a_text_environment_has_queries_and_no_candidates():
    plans = [f"<think> a </think>\n<search> {WHO} </search>", answer("Ilse Vand")]
    policy = ToldPolicy(plans, {WHO: read("[0]", "It is Ilse Vand.")})
    world = LittleWorld(PASSAGES, kind="text")
    trajectory = play(policy, world)
    assert world.searched == [(WHO, None)]
    assert (trajectory.stop_reason, trajectory.searches[0].entity) == (StopReason.ANSWERED, "")
    assert "Candidate" not in "".join(planner_texts(trajectory))


def test_turns_end_where_their_tags_close_and_where_an_observation_would_begin():
    policy = right_answers()
    play(policy)
    ends = {type(request.state): request.params.stop_strings for request in policy.requests}
    assert ends == {
        PlannerState: ("</action>", "</answer>", "Obs:"),
        WorkerState: ("</sentence>", "Obs:"),
    }


def test_an_observation_that_the_planner_begins_itself_ends_its_turn():
    class TellsItself(ToldPolicy):
        async def generate(self, prompt, params, *, state, continues):
            written = await super().generate(prompt, params, state=state, continues=continues)
            ids = tokenizer().encode_model(f"<search> {WHO} </search>\nObs:")
            if isinstance(state, WorkerState) or state.searches:
                return written
            return dataclasses.replace(
                completion("x", 0),
                token_ids=tuple(ids),
                logprobs=None,
                finish_reason="stop_string",
                stop_string="Obs:",
            )

    policy = TellsItself(["", answer("Ilse Vand")], {WHO: read("[0]", "It is Ilse Vand.")})
    trajectory = play(policy, LittleWorld(PASSAGES, kind="text"))
    assert policy.requests[0].params.stop_strings == ("</answer>", "Obs:"), (
        "one turn may hold several searches"
    )
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [search.query for search in trajectory.searches] == [WHO]
    assert planner_texts(trajectory, "model")[0] == f"<search> {WHO} </search>\n"


# --- searches of one turn run at the same time ---

QUERIES = ["Who?", "When?", "Where?"]
THREE = (  # plans and what workers say
    [search(*((0, query) for query in QUERIES)), answer("Ghent")],
    {query: read("[0]", f"{query} That.") for query in QUERIES},
)


def test_all_searches_of_a_turn_reach_the_policy_before_any_is_answered():
    barrier = asyncio.Barrier(3)

    class Patient(ToldPolicy):
        async def generate(self, prompt, params, *, state, continues):
            if isinstance(state, WorkerState):
                await barrier.wait()
            return await super().generate(prompt, params, state=state, continues=continues)

    trajectory = play(Patient(*THREE))
    assert planner_texts(trajectory)[1] == "Obs: Who? That. When? That. Where? That."
    assert [search.query for search in trajectory.searches] == QUERIES


def test_observations_stand_in_the_order_of_the_searches_whichever_ends_first():
    class LastIsFirst(ToldPolicy):
        async def generate(self, prompt, params, *, state, continues):
            if isinstance(state, WorkerState):
                for _ in range(10 * (3 - QUERIES.index(state.query))):
                    await asyncio.sleep(0)
            return await super().generate(prompt, params, state=state, continues=continues)

    policy = LastIsFirst(*THREE)
    trajectory = play(policy)
    assert [request.state.query for request in worker_requests(policy)] == QUERIES[::-1]
    assert planner_texts(trajectory)[1] == "Obs: Who? That. When? That. Where? That."
    assert [conversation.turns[1].text for conversation in trajectory.conversations[1:]] == list(
        THREE[1].values()
    )


# --- every end of an episode ---

LONG = "<think> " + "and " * 300 + "</think>"
ENDINGS = {
    StopReason.ANSWERED: ([answer("Ghent")], {}),
    StopReason.NO_ACTION: (["Ghent."], {}),
    StopReason.TOO_MANY_SEARCHES: ([search((0, "a?"), (0, "b?"), (0, "c?"), (0, "d?"))], {}),
    StopReason.ITERATION_LIMIT: ([search((0, WHO))] * 4, {}),
    StopReason.TURN_LENGTH: ([LONG], {}),
    StopReason.TRAJECTORY_LENGTH: ([LONG], {"max_trajectory_tokens": 150}),
    StopReason.RETRIEVER_FAILED: ([search((0, WHO)), search((0, "broken"), (0, WHO))], {}),
}


# A teacher ends with the first one, records of earlier versions with the second one, and endpoints
# with the others (test_eval_replies.py).
ELSEWHERE = {
    StopReason.SYNTHESIS_FAILED,
    StopReason.UNKNOWN_CANDIDATE,
    StopReason.FILTERED,
    StopReason.BAD_REPLY,
}


@pytest.mark.parametrize("reason", sorted(set(StopReason) - ELSEWHERE))
def test_every_stop_reason_ends_an_episode_with_a_record(reason):
    plans, limits = ENDINGS[reason]
    policy = ToldPolicy(plans, READS)
    trajectory = play(policy, LittleWorld(failing=frozenset({"broken"})), **limits)
    assert trajectory.stop_reason is reason
    assert len(planner_requests(policy)) == len(plans)
    answered = reason is StopReason.ANSWERED
    assert (trajectory.answer, trajectory.reward) == (("Ghent", 1.0) if answered else ("", 0.0))
    assert trajectory.conversations[0].turns[0].role == "context"


def test_an_unknown_candidate_refuses_its_search_and_no_other():
    plans = [search((7, "Where was he born?"), (0, WHO)), search((8, "Where?")), answer("Ghent")]
    policy = ToldPolicy(plans, READS)
    trajectory = play(policy)
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "Ghent")
    assert trajectory.counts["malformed_searches"] == 2.0
    assert [request.state.query for request in worker_requests(policy)] == [WHO]
    assert [search.query for search in trajectory.searches] == [WHO], (
        "what was refused was not searched"
    )
    first, second = planner_texts(trajectory)[1:]
    refused = (
        'Obs: "Where was he born?" was not searched: candidate number 7 is unknown. The director '
        "of "
    )
    assert first.startswith(refused)
    assert second == 'Obs: "Where?" was not searched: candidate number 8 is unknown.'
    assert not is_well_formed(trajectory), "the reward for the format is lost"


def test_a_search_that_cannot_be_read_is_counted_and_the_planner_is_told():
    plans = [
        search((0, WHO)).replace("\n</action>", '\nSearch([0, 1], "When?")\n</action>'),
        answer("Ghent"),
    ]
    trajectory = play(ToldPolicy(plans, READS))
    assert (trajectory.answer, trajectory.counts["malformed_searches"]) == ("Ghent", 1.0)
    assert "A search of this turn could not be read." in planner_texts(trajectory)[1]


def test_a_worker_s_sentence_counts_without_a_selection():
    reads = {WHO: "<think> none </think>\n<sentence> The director is Ilse Vand. </sentence>"}
    trajectory = play(ToldPolicy([search((0, WHO)), answer("Ghent")], reads))
    assert planner_texts(trajectory)[1] == "Obs: The director is Ilse Vand."
    (only_search,) = trajectory.searches
    assert only_search.selected == ()
    assert only_search.found is False
    assert trajectory.counts["malformed_workers"] == 0.0


def test_an_unfinished_thought_holds_no_action():
    trajectory = play(ToldPolicy(["<think> I could write <answer> Ghent </answer>"]))
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.NO_ACTION, "")


def test_an_answer_that_was_cut_off_is_no_answer():
    text = answer("Ghent")
    tokens = len(completion(text).token_ids)
    assert play(ToldPolicy([text]), max_turn_tokens=tokens).stop_reason is StopReason.ANSWERED
    cut = play(ToldPolicy([text]), max_turn_tokens=tokens - 1)  # all but the stop token
    assert (cut.stop_reason, cut.reward) == (StopReason.TURN_LENGTH, 0.0)


def test_searches_before_a_failed_one_stay_recorded():
    plans = [search((0, WHO)), search((0, "broken"))]
    trajectory = play(ToldPolicy(plans, READS), LittleWorld(failing=frozenset({"broken"})))
    assert [search.query for search in trajectory.searches] == [WHO]
    assert len(trajectory.conversations[1:]) == 1


async def test_the_other_searches_of_a_failed_turn_are_given_up():
    given_up = []

    class Endless(ToldPolicy):
        async def generate(self, prompt, params, *, state, continues):
            if isinstance(state, WorkerState):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    given_up.append(state.query)
                    raise
            return await super().generate(prompt, params, state=state, continues=continues)

    class Slow(LittleWorld):
        async def search(self, query, entity):
            for _ in range(5 if query == "broken" else 0):
                await asyncio.sleep(0)
            return await super().search(query, entity)

    world = Slow(failing=frozenset({"broken"}))
    policy = Endless([search((0, WHO), (0, "broken"))], READS)
    trajectory = await agent().run(attempt(), world, policy)
    await asyncio.sleep(0)
    assert given_up == [WHO], "before the event loop ends"
    assert trajectory.stop_reason is StopReason.RETRIEVER_FAILED


def test_an_error_that_is_no_retrieval_error_is_not_hidden():
    class Broken(LittleWorld):
        async def search(self, query, entity):
            raise KeyError("a fault of ours")

    with pytest.raises(KeyError):
        play(ToldPolicy([search((0, WHO))]), Broken())


# --- limits ---


@given(limit=st.integers(30, 400), searches=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_no_conversation_says_a_token_beyond_its_limit(limit, searches):
    queries = [f"Who is number {n} of them all?" for n in range(searches)]
    plans = [search(*((0, query) for query in queries))] * 3 + [answer("Ghent")]
    policy = ToldPolicy(plans, lambda state: read("[0]", f"{state.query} " + "that " * 20))
    trajectory = play(policy, max_trajectory_tokens=limit)
    for request in policy.requests:
        assert 1 <= request.params.max_new_tokens <= limit - len(request.prompt)
        assert request.params.max_new_tokens <= CONFIG.max_turn_tokens
    for conversation in trajectory.conversations:
        unanswered_turns = list(
            itertools.dropwhile(lambda turn: turn.role == "context", reversed(conversation.turns))
        )
        assert sum(len(turn.token_ids) for turn in unanswered_turns) <= limit
    if trajectory.stop_reason is not StopReason.ANSWERED:
        assert trajectory.stop_reason is StopReason.TRAJECTORY_LENGTH


def test_a_worker_whose_materials_fill_its_conversation_says_nothing():
    materials = {FILM.id: [Material(text="word " * 250)]}
    policy = ToldPolicy([search((0, WHO)), answer("Ghent")], READS)
    trajectory = play(policy, LittleWorld(materials), max_trajectory_tokens=260)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert worker_requests(policy) == []
    assert trajectory.conversations[1:] == ()
    assert trajectory.searches[0].sentence == NOTHING_FOUND


def shown(texts: list[str], limit: int) -> tuple[str, ...]:
    world = LittleWorld({FILM.id: [Material(text=text) for text in texts]})
    policy = ToldPolicy([search((0, WHO)), answer("Ghent")], lambda state: read("[0]", "That."))
    trajectory = play(policy, world, max_observation_tokens=limit, max_trajectory_tokens=5000)
    (request,) = worker_requests(policy)
    assert len(request.state.materials) == len(trajectory.searches[0].materials)
    return trajectory.searches[0].materials


def tokens_of(texts) -> int:
    return sum(len(tokenizer().encode_plain(text)) for text in texts)


lines = st.text(st.sampled_from("ab ,é<>/🎬"), min_size=1, max_size=12)
words = st.sampled_from(["Material", " is the", "1961", "<answer>", "</think>", "東京", "."])
material_texts = (
    (lines | st.lists(words, min_size=1, max_size=6).map("".join)).map(str.strip).filter(bool)
)


@given(texts=st.lists(material_texts, max_size=6), limit=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_materials_are_shown_up_to_the_limit_and_none_is_left_out_that_fits(texts, limit):
    texts = [" ".join(text.split()) for text in texts]
    shown_texts = shown(texts, limit)
    if texts and tokens_of(texts[:1]) > limit:
        assert len(shown_texts) == 1, "the first one is cut rather than left out"
        assert tokens_of(shown_texts) <= limit
    else:
        assert list(shown_texts) == texts[: len(shown_texts)]
        assert tokens_of(shown_texts) <= limit
        assert len(shown_texts) == len(texts) or tokens_of(texts[: len(shown_texts) + 1]) > limit


def test_tags_that_grow_when_they_are_neutralised_are_counted_as_they_are_shown():
    """`< SELECT >` has 10 bytes. With other brackets it has 14 tokens."""
    text = "< SELECT >" * 3
    assert len(text.encode()) < tokens_of([text])
    assert tokens_of(shown([text], len(text.encode()))) <= len(text.encode())


def test_a_material_that_is_cut_ends_with_a_whole_character():
    (shown_text,) = shown(["東京" * 10], 7)
    assert shown_text == "東京", "each character has three bytes, each a token"


# --- seeds and order ---


def seeds_of(policy: ToldPolicy) -> list[int]:
    return [request.params.seed for request in policy.requests]


def test_every_turn_has_a_seed_of_its_own_that_depends_on_nothing_but_its_place():
    def seeds(question=QUESTION, number=0, seed=0) -> list[int]:
        policy = right_answers()
        asyncio.run(agent().run(attempt(question, number=number, seed=seed), LittleWorld(), policy))
        return seeds_of(policy)

    first = seeds()
    assert len(set(first)) == len(first) == 5
    assert seeds() == first
    for others in (seeds(number=1), seeds(seed=1), seeds(dataclasses.replace(QUESTION, id="q-2"))):
        assert not set(others) & set(first)


def test_the_temperature_is_that_of_the_attempt():
    policy = right_answers()
    asyncio.run(agent().run(attempt(temperature=0.25), LittleWorld(), policy))
    assert {request.params.temperature for request in policy.requests} == {0.25}


class CountingPolicy:
    """A policy that answers with the number of its question, the later ones sooner.

    It counts the requests that wait at the same time.
    """

    version = 5

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0

    async def generate(self, prompt, params, *, state, continues):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        number = int(state.question.id)
        for _ in range(7 - number):
            await asyncio.sleep(0)
        self.running -= 1
        return completion(answer(f"Ghent {number}"))


def test_episodes_come_back_in_the_order_of_their_attempts_and_no_more_than_allowed_run_at_once():
    policy = CountingPolicy()
    played = []
    worlds = []

    def world_of(question: Question) -> LittleWorld:
        worlds.append(question.id)
        return LittleWorld()

    attempts = [
        attempt(dataclasses.replace(QUESTION, id=str(number)), number=number) for number in range(6)
    ]
    trajectories = asyncio.run(
        run_episodes(
            agent(),
            attempts,
            world_of,
            policy,
            reward=F1,
            concurrency=3,
            hooks=EpisodeHooks(on_episode=lambda trajectory: played.append(trajectory.question_id)),
        )
    )
    assert [trajectory.question_id for trajectory in trajectories] == list("012345")
    assert [trajectory.answer for trajectory in trajectories] == [
        f"Ghent {number}" for number in range(6)
    ]
    assert {trajectory.policy_version for trajectory in trajectories} == {5}
    assert sorted(played) == list("012345")
    assert played != list("012345")
    assert sorted(worlds) == list("012345"), "each in the environment of its question"
    assert policy.most_running == 3


class SilentPolicy:
    """A policy that never answers. It counts the requests that were ended."""

    version = 0

    def __init__(self) -> None:
        self.ended_requests = 0

    async def generate(self, prompt, params, *, state, continues):
        try:
            await asyncio.sleep(3600)
        finally:
            self.ended_requests += 1


class PreemptingPoll:
    """A poll that raises PreemptedError at its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 3:
            raise PreemptedError("asked to end")


def test_what_a_poll_raises_ends_all_episodes(monkeypatch):
    monkeypatch.setattr(agents, "POLL_SECONDS", 0.001)
    policy = SilentPolicy()
    poll = PreemptingPoll()
    attempts = [attempt(number=number) for number in range(4)]
    with pytest.raises(PreemptedError):
        asyncio.run(
            run_episodes(
                agent(),
                attempts,
                everywhere(LittleWorld()),
                policy,
                reward=F1,
                concurrency=4,
                hooks=EpisodeHooks(poll=poll),
            )
        )
    assert poll.calls == 3
    assert policy.ended_requests == 4


def test_a_model_behind_a_generator_is_a_policy():
    asked = []

    class Echo:
        policy_version = 9

        async def generate(self, prompt, params, *, continues=False):
            asked.append((prompt, params, continues))
            return completion(answer("Ghent"))

    policy = EnginePolicy(Echo())
    trajectory = asyncio.run(agent().run(attempt(), LittleWorld(), policy))
    assert (trajectory.policy_version, trajectory.answer) == (9, "Ghent")
    ((prompt, params, continues),) = asked
    opening = list(trajectory.conversations[0].turns[0].token_ids)
    assert opening == list(prompt)[: len(opening)]
    assert isinstance(params, SamplingParams)
    assert continues


def test_candidates_of_a_question_are_not_shown_where_texts_are_searched():
    question = dataclasses.replace(QUESTION, candidates=(Entity(id="Q9", label="Secret"),))
    policy = ToldPolicy([answer("Ghent")])
    play(policy, LittleWorld({}, kind="text"), question)
    assert "Secret" not in tokenizer().decode(policy.requests[0].prompt)
    assert policy.requests[0].state.candidates == ()


def test_without_split_the_planner_reads_what_was_found():
    policy = ToldPolicy(
        [search((0, "Who made it?")), search((1, "a"), (2, "Where was she born?")), answer("Ghent")]
    )
    trajectory = play(policy, split=False, prompt="zero_shot", max_trajectory_tokens=2000)
    assert trajectory.answer == "Ghent"
    assert len(trajectory.conversations) == 1
    assert trajectory.counts["malformed_workers"] == 0
    shown = [turn.text for turn in trajectory.conversations[0].turns if turn.role == "context"]
    assert shown[1] == (
        "Obs: [0] Amber Tide, publication date, 1961 [1] Amber Tide, director, Ilse Vand\n"
        "Candidate: [2] Ilse Vand"
    ), "all entities that were found can be searched"
    assert "[0] Tin Orchard, director, Ilse Vand [0] Ilse Vand, place of birth, Ghent" in shown[2]
    assert all(record.selected == () and record.found for record in trajectory.searches)


@pytest.mark.parametrize(
    ("kind", "sentence", "is_found"),
    [
        # Over texts its prompt asks for its own knowledge, over a graph for materials alone.
        ("text", "Ilse Vand was born in Ghent.", True),
        ("text", NOTHING_FOUND, False),
        ("graph", "Ilse Vand was born in Ghent.", False),
    ],
)
def test_what_a_worker_says_with_nothing_selected_reaches_the_planner(kind, sentence, is_found):
    asks = search((0, "Where?")) if kind == "graph" else "<search> Where? </search>"
    policy = ToldPolicy([asks, answer("Ghent")], {"Where?": read("[-1]", sentence)})
    materials = GRAPH if kind == "graph" else {"Where?": (Material(text="Tin Orchard: A film."),)}
    played = play(policy, LittleWorld(materials, kind=kind))
    (asked,) = played.searches
    assert asked.selected == ()
    assert asked.sentence == sentence
    assert asked.found == is_found
    shown = [turn.text for turn in played.conversations[0].turns if turn.role == "context"]
    assert shown[1] == f"Obs: {sentence}"


def test_without_parallel_one_search_a_turn_is_answered():
    reads = {"Who?": read("[1]", "Ilse Vand made it.")}
    policy = ToldPolicy([search((0, "Who?"), (1, "When?")), answer("Ghent")], reads)
    trajectory = play(policy, parallel=False)
    assert [record.query for record in trajectory.searches] == ["Who?"]
    assert trajectory.answer == "Ghent"


def test_without_parallel_rules_and_examples_have_one_search_a_turn():
    for kind in ("graph", "text"):
        together = agent(prompt="few_shot", parallel=True).opening("planner", kind)
        alone = agent(prompt="few_shot", parallel=False).opening("planner", kind)
        assert "one search a turn" not in together.system
        assert "one search a turn" in alone.system
        assert alone.examples == together.examples[2:], (
            "without the example that searches twice in a turn"
        )
        assert "Which film came out first" in together.examples[0][0]


def test_two_models_write_as_planner_and_worker():
    planner = ToldPolicy([search((0, "Who?")), answer("Ghent")])
    worker = ToldPolicy([], {"Who?": read("[1]", "Ilse Vand made it.")})
    trajectory = asyncio.run(
        agent().run(attempt(QUESTION), LittleWorld(), agents.TwoPolicies(planner, worker))
    )
    assert trajectory.answer == "Ghent"
    assert [record.sentence for record in trajectory.searches] == ["Ilse Vand made it."]
    assert (len(planner.requests), len(worker.requests)) == (2, 1)
