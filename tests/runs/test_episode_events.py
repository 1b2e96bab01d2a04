"""The events of scripted episodes, in the order in which they are reported."""

import asyncio
import dataclasses
import json
from typing import TypeVar

from mujica_jax.agents.agent import OnTokens, Policy
from mujica_jax.inference.requests import Completion
from mujica_jax.records import Question, StopReason, Trajectory
from mujica_jax.runs.episode_events import (
    EpisodeFinished,
    EpisodeStarted,
    EpisodeWatch,
    Event,
    SearchFinished,
    SubQuestion,
    SubQuestionAnswered,
    TextWritten,
    TurnWritten,
)
from mujica_jax.tasks.task import Material
from tests.helpers.little_agent import (
    QUESTION,
    LittleWorld,
    ToldPolicy,
    agent,
    answer,
    attempt,
    play,
    read,
    search,
    tokenizer,
)
from tests.helpers.patience import HANG_SECONDS

Kind = TypeVar("Kind", bound=Event)
WHO = "Who is the director of Amber Tide?"
OTHER = "Who is the director of Tin Orchard?"
BORN = "Where was Ilse Vand born?"
READS = {
    WHO: read("[1]", "The director of Amber Tide is Ilse Vand."),
    OTHER: read("[0]", "The director of Tin Orchard is Ilse Vand."),
    BORN: read("[0]", "Ilse Vand was born in Ghent."),
}


def told() -> ToldPolicy:
    return ToldPolicy([search((0, WHO), (1, OTHER)), search((2, BORN)), answer("Ghent")], READS)


def watched(
    policy: Policy,
    world: LittleWorld | None = None,
    question: Question = QUESTION,
    **changes,
) -> tuple[list[Event], Trajectory]:
    """Play an episode. Return its events and its record."""
    events: list[Event] = []
    world = LittleWorld() if world is None else world
    player = agent(**changes)
    watch = EpisodeWatch(player, tokenizer(), world.kind, events.append)
    watch.started(question)
    episode = player.run(attempt(question), watch.environment(world), watch.policy(policy))
    trajectory = asyncio.run(asyncio.wait_for(episode, HANG_SECONDS))
    watch.finished(trajectory)
    return events, trajectory


def of_kind(events: list[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def test_the_events_of_an_episode_come_in_the_order_of_time():
    events, _ = watched(told())
    assert [event.name for event in events] == [
        "started",
        "turn",
        "search",
        "search",
        "worker",
        "worker",
        "turn",
        "search",
        "worker",
        "turn",
        "finished",
    ]
    times = [event.at_seconds for event in events]
    assert times == sorted(times)


def test_the_first_event_names_the_question_and_its_entities():
    [started] = of_kind(watched(told())[0], EpisodeStarted)
    assert started.question == QUESTION.text
    assert started.candidates == ("Amber Tide", "Tin Orchard")


def test_a_turn_of_the_planner_lists_its_sub_questions():
    first, second, last = of_kind(watched(told())[0], TurnWritten)
    assert [turn.iteration for turn in (first, second, last)] == [0, 1, 2]
    assert {turn.role for turn in (first, second, last)} == {"planner"}
    assert first.sub_questions == (
        SubQuestion(query=WHO, entity="Amber Tide"),
        SubQuestion(query=OTHER, entity="Tin Orchard"),
    )
    assert second.sub_questions == (SubQuestion(query=BORN, entity="Ilse Vand"),)
    assert last.sub_questions == ()
    assert last.text == answer("Ghent")


class Streamed:
    """A policy that reports the tokens of each turn one by one."""

    def __init__(self, policy: ToldPolicy, on_tokens: OnTokens | None = None) -> None:
        self._policy = policy
        self._on_tokens = on_tokens
        self.version = policy.version

    def streaming(self, on_tokens: OnTokens) -> "Streamed":
        return Streamed(self._policy, on_tokens)

    async def generate(self, prompt, params, *, state, continues) -> Completion:
        whole = await self._policy.generate(prompt, params, state=state, continues=continues)
        for token in whole.token_ids:
            assert self._on_tokens is not None
            self._on_tokens([token])
            # The turns of several workers are written at the same time.
            await asyncio.sleep(0)
        return whole


def test_the_text_of_each_turn_arrives_part_by_part_and_has_its_place():
    twice = ToldPolicy([search((0, WHO), (1, OTHER)), answer("Ghent, nördlich")], READS)
    events, _ = watched(Streamed(twice))
    texts: dict[tuple[str, int, int | None], str] = {}
    for part in of_kind(events, TextWritten):
        place = (part.role, part.iteration, part.number)
        texts[place] = texts.get(place, "") + part.text
    assert texts == {
        ("planner", 0, None): search((0, WHO), (1, OTHER)),
        ("worker", 0, 0): READS[WHO],
        ("worker", 0, 1): READS[OTHER],
        ("planner", 1, None): answer("Ghent, nördlich"),
    }
    assert len(of_kind(events, TextWritten)) > 10
    assert len(of_kind(watched(told())[0], TextWritten)) == 0, "this policy writes whole turns"


def test_a_search_shows_its_results_and_the_turn_that_asked_for_it():
    searches = of_kind(watched(told())[0], SearchFinished)
    places = [(event.iteration, event.number, event.query, event.entity) for event in searches]
    assert sorted(places) == [
        (0, 0, WHO, "Amber Tide"),
        (0, 1, OTHER, "Tin Orchard"),
        (1, 0, BORN, "Ilse Vand"),
    ]
    assert searches[-1].materials == ("Ilse Vand, place of birth, Ghent",)


def test_a_worker_reports_what_it_selected_and_answered():
    first = of_kind(watched(told())[0], SubQuestionAnswered)[0]
    assert (first.iteration, first.number, first.query) == (0, 0, WHO)
    assert first.selected == ("Amber Tide, director, Ilse Vand",)
    assert first.sentence == "The director of Amber Tide is Ilse Vand."
    assert first.text == READS[WHO]


def test_the_last_event_has_the_answer_and_the_totals():
    events, trajectory = watched(told())
    last = events[-1]
    assert isinstance(last, EpisodeFinished)
    assert (last.answer, last.stop_reason, last.searches) == ("Ghent", "answered", 3)
    turns = of_kind(events, TurnWritten) + of_kind(events, SubQuestionAnswered)
    assert last.generated_tokens == sum(turn.generated_tokens for turn in turns) > 0
    assert trajectory.answer == "Ghent"


def test_watching_an_episode_does_not_change_it():
    _, trajectory = watched(told())
    unwatched = dataclasses.replace(play(told()), reward=0.0, rewards_by_part={}, seconds=0.0)
    assert dataclasses.replace(trajectory, seconds=0.0) == unwatched


def test_the_same_sub_question_about_two_entities_is_told_apart():
    plans = [search((0, WHO), (1, WHO)), answer("Ilse Vand")]
    events, _ = watched(ToldPolicy(plans, {WHO: read("[0]", "It is Ilse Vand.")}))
    workers = of_kind(events, SubQuestionAnswered)
    assert [(worker.number, worker.selected) for worker in workers] == [
        (0, ("Amber Tide, publication date, 1961",)),
        (1, ("Tin Orchard, director, Ilse Vand",)),
    ]


def test_a_refused_sub_question_says_why_and_is_not_searched():
    events, _ = watched(ToldPolicy([search((7, WHO)), answer("Ghent")]))
    [sub_question] = of_kind(events, TurnWritten)[0].sub_questions
    assert sub_question.query == WHO
    assert "7" in sub_question.refusal
    assert of_kind(events, SearchFinished) == []


def test_an_agent_without_parallel_searches_reports_the_one_that_it_makes():
    plans = [search((0, WHO), (1, OTHER)), answer("Ghent")]
    events, _ = watched(ToldPolicy(plans, READS), parallel=False)
    assert of_kind(events, TurnWritten)[0].sub_questions == (
        SubQuestion(query=WHO, entity="Amber Tide"),
    )


def test_a_turn_that_a_limit_cut_asks_nothing():
    events, trajectory = watched(told(), max_turn_tokens=12)
    assert trajectory.stop_reason is StopReason.TURN_LENGTH
    [turn] = of_kind(events, TurnWritten)
    assert turn.sub_questions == ()
    assert turn.generated_tokens == 12


def test_a_search_that_fails_ends_the_episode_without_an_event():
    events, _ = watched(told(), LittleWorld(failing=frozenset([WHO, OTHER])))
    assert [event.name for event in events] == ["started", "turn", "finished"]
    assert events[-1].as_dict()["stop_reason"] == "retriever_failed"


def test_passages_are_searched_without_an_entity():
    text_search = f"<think> look </think>\n<search> {WHO} </search>"
    passages = {WHO: (Material(text="Amber Tide: a film by Ilse Vand.", title="Amber Tide"),)}
    policy = ToldPolicy(
        [text_search, answer("Ilse Vand")], {WHO: read("[0]", "It is by Ilse Vand.")}
    )
    events, _ = watched(policy, LittleWorld(passages, kind="text"))
    [finished_search] = of_kind(events, SearchFinished)
    assert (finished_search.query, finished_search.entity) == (WHO, "")
    [worker] = of_kind(events, SubQuestionAnswered)
    assert worker.selected == ("Amber Tide: a film by Ilse Vand.",)


def test_events_are_json():
    events, _ = watched(told())
    for event in events:
        assert json.loads(json.dumps(event.as_dict()))["event"] == event.name
