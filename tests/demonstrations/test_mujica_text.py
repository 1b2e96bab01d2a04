"""Scripted demonstrations are right, follow the gold chain, and are read by the parser as they were
meant.
"""

import asyncio
import dataclasses
from unittest.mock import MagicMock

import pytest

from mujica_jax.agents.faults import FaultGuard
from mujica_jax.agents.protocol import NOTHING_FOUND, SearchCall, parse_planner, parse_worker
from mujica_jax.demonstrations.mujica_text import first_statement, query_of, without_silent_workers
from mujica_jax.demonstrations.policy import ScriptedPolicy
from mujica_jax.learning.packing import pack
from mujica_jax.methods import supervised
from mujica_jax.records import KNOWN, Entity, Evidence, Question, StopReason, Trajectory
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.rewards.reward import find_reward
from mujica_jax.tasks.task import Material
from mujica_jax.tasks.tiny_world import world as tiny_world
from mujica_jax.tasks.tiny_world.questions import KIND_SHARES
from mujica_jax.tasks.tiny_world.world import TinyWorld
from tests.helpers.little_agent import CONFIG, LittleWorld, agent, attempt, rewarded, tokenizer
from tests.helpers.tiny_worlds import small_world

# The little tokenizer spells names byte by byte.
WIDE = {"max_turn_tokens": 600, "max_trajectory_tokens": 4000, "max_observation_tokens": 3000}


@pytest.fixture(scope="module")
def world() -> TinyWorld:
    return small_world(50, 200, 50, facts=8, distractor_names=0.3)


def play_all(
    world: TinyWorld, policy: ScriptedPolicy | None = None, **limits
) -> list[tuple[Question, Trajectory]]:
    policy = policy or ScriptedPolicy(tokenizer())

    async def main() -> list[tuple[Question, Trajectory]]:
        played = []
        for question, environment in world.demonstrations():
            trajectory = await agent(**limits).run(
                attempt(question, temperature=0.0), environment, policy
            )
            played.append((question, rewarded(trajectory, question)))
        return played

    return asyncio.run(main())


@pytest.fixture(scope="module")
def played(world) -> list[tuple[Question, Trajectory]]:
    return play_all(world, **WIDE)


@pytest.mark.parametrize("environment", ["graph", "text"])
def test_the_ablations_have_demonstrations_that_earn_it_too(world, environment):
    world = tiny_world.build(dataclasses.replace(world.config, environment=environment))
    wider = WIDE | {"max_trajectory_tokens": 8000}
    one_reads = [trajectory for _, trajectory in play_all(world, **wider, split=False)]
    assert {trajectory.reward for trajectory in one_reads} == {1.0}
    roles = {
        conversation.role for trajectory in one_reads for conversation in trajectory.conversations
    }
    assert roles == {"planner"}
    longer = WIDE | {"max_iterations": 6}
    one_a_turn = [trajectory for _, trajectory in play_all(world, **longer, parallel=False)]
    assert {trajectory.reward for trajectory in one_a_turn} == {1.0}
    for trajectory in one_a_turn:
        iterations = [search.iteration for search in trajectory.searches]
        assert len(set(iterations)) == len(iterations)


def test_over_passages_of_the_same_facts_every_demonstration_earns_it_too(world):
    passages = tiny_world.build(dataclasses.replace(world.config, environment="text"))
    played = play_all(passages, **WIDE)
    assert len(played) == 200
    assert {trajectory.reward for _, trajectory in played} == {1.0}
    assert all(search.entity == "" for _, trajectory in played for search in trajectory.searches)
    question = passages.questions("test")[0]
    materials = asyncio.run(
        passages.environment(question).search(question.gold_passages[0].title, None)
    )
    assert (
        materials[0].text == f"{question.gold_passages[0].title}: {question.gold_passages[0].text}"
    )
    assert len(materials) <= 3


def test_every_demonstration_of_every_kind_earns_the_full_reward(played):
    assert {question.kind for question, _ in played} == set(KIND_SHARES)
    for question, trajectory in played:
        assert trajectory.stop_reason == StopReason.ANSWERED, question
        assert trajectory.answer == question.answers[0], question
        assert trajectory.reward == 1.0


def test_a_miss_ends_an_episode_without_an_answer(world, played):
    """At 0.1, about a tenth of the worker turns miss their fact.

    Every other turn equals the one without misses.
    """
    policy = ScriptedPolicy(tokenizer(), miss_rate=0.1, seed=3)
    noisy = play_all(world, policy, **WIDE)
    searches = sum(len(trajectory.searches) for _, trajectory in noisy)
    assert 0.05 < len(policy.missed) / searches < 0.15
    for (question, trajectory), (_, clean) in zip(noisy, played, strict=True):
        if any(search.query in policy.missed for search in trajectory.searches):
            assert trajectory.stop_reason == StopReason.NO_ACTION, question
            assert trajectory.reward == 0.0, question
        else:
            assert trajectory.conversations[0].token_ids == clean.conversations[0].token_ids
    same_policy = ScriptedPolicy(tokenizer(), miss_rate=0.1, seed=3)
    assert [t.conversations[0].token_ids for _, t in play_all(world, same_policy, **WIDE)] == [
        t.conversations[0].token_ids for _, t in noisy
    ]


def test_the_workers_read_every_gold_triple_and_find_it(played):
    for question, trajectory in played:
        assert all(search.found for search in trajectory.searches), question
        read = {
            search.materials[index] for search in trajectory.searches for index in search.selected
        }
        gold = {
            f"{evidence.subject}, {evidence.relation}, {evidence.object}"
            for evidence in question.evidences
        }
        assert read == gold


def test_searches_that_do_not_depend_on_each_other_share_a_turn(played):
    for question, trajectory in played:
        path = [evidence.relation for evidence in question.evidences[:: len(question.candidates)]]
        turns = [turn for turn in trajectory.conversations[0].turns if turn.role == "model"]
        assert len(turns) == len(path) + 1
        asked = {(search.iteration, search.query) for search in trajectory.searches}
        depth = {
            (path.index(evidence.relation), query_of(evidence.relation, evidence.subject))
            for evidence in question.evidences
            if path.count(evidence.relation) == 1
        }
        assert depth <= asked


def test_what_planners_write_is_what_the_parser_reads(played):
    for question, trajectory in played:
        numbered = {candidate.label: number for number, candidate in enumerate(question.candidates)}
        *searching, last = [
            turn.text for turn in trajectory.conversations[0].turns if turn.role == "model"
        ]
        for iteration, text in enumerate(searching):
            action = parse_planner(
                text, "graph", candidates=100, max_searches=CONFIG.max_searches_per_turn
            )
            recorded = [search for search in trajectory.searches if search.iteration == iteration]
            assert [call.query for call in action.searches] == [search.query for search in recorded]
            for call, search in zip(action.searches, recorded, strict=True):
                if search.entity in numbered:
                    assert call == SearchCall(query=search.query, candidate=numbered[search.entity])
        assert (
            parse_planner(last, "graph", candidates=100, max_searches=9).answer
            == question.answers[0]
        )


def test_what_workers_write_is_what_the_parser_reads(played):
    for _, trajectory in played:
        assert trajectory.counts["malformed_workers"] == 0
        for search, conversation in zip(
            trajectory.searches, trajectory.conversations[1:], strict=True
        ):
            reply = parse_worker(conversation.turns[-1].text, materials=len(search.materials))
            assert (reply.selected, reply.sentence) == (search.selected, search.sentence)
            assert all(search.entity in search.materials[index] for index in search.selected)


def test_demonstrations_are_trained_on_what_they_wrote_and_have_no_log_probabilities(played):
    for _, trajectory in played:
        for conversation in trajectory.conversations:
            for turn in conversation.turns:
                assert turn.trained == (turn.role == "model")
                assert turn.logprobs is None
                if turn.trained:
                    assert turn.token_ids[-1] == tokenizer().stop_token_ids[0]


def test_rows_of_played_conversations_are_95_percent_full(played):
    """Planners of several turns lie among many short workers.

    A row holds the longest planner twice.
    """
    conversations = [
        conversation for _, trajectory in played for conversation in trajectory.conversations
    ]
    lengths = sorted(len(conversation.token_ids) for conversation in conversations)
    assert lengths[-1] > 3 * lengths[0], (
        "no lengths alike, with which rows would fill by themselves"
    )
    assert pack(conversations, sequence_length=2 * lengths[-1], seed=0).efficiency >= 0.95


def test_what_the_graph_lacks_is_not_answered(world):
    """Many demonstrations then need a fact that no search finds.

    An answer without it would teach to guess.
    """
    config = dataclasses.replace(world.config, demonstrations=100, missing_facts=0.3)
    played = play_all(tiny_world.build(config), **WIDE)
    complete = [all(search.found for search in trajectory.searches) for _, trajectory in played]
    assert 20 < sum(complete) < 80
    for whole, (_, trajectory) in zip(complete, played, strict=True):
        assert trajectory.stop_reason == (StopReason.ANSWERED if whole else StopReason.NO_ACTION)
        assert trajectory.reward == (1.0 if whole else 0.0)


def test_a_worker_that_is_cut_off_leaves_the_demonstration_unanswered(world):
    """40 tokens are enough for short plans, but for no worker's turn."""
    narrow = WIDE | {"max_turn_tokens": 40}
    reasons = {trajectory.stop_reason for _, trajectory in play_all(world, **narrow)}
    assert reasons <= {StopReason.TURN_LENGTH, StopReason.NO_ACTION}


def test_names_with_commas_and_quotation_marks_are_read_right():
    """In a triple with a title such as "Weird Al", Live, the searched entity shows where a field
    ends.
    """
    film = Entity(id="Q1", label='"Weird Al", Live')
    person = Entity(id="Q2", label="Vand, Ilse")
    evidence = Evidence(
        subject=film.label,
        relation="director",
        object=person.label,
        subject_id="Q1",
        object_id="Q2",
    )
    question = Question(
        id="q",
        text="Who?",
        answers=(person.label,),
        candidates=(film,),
        evidences=(evidence,),
        kind="one",
    )
    materials = {
        "Q1": [
            Material(text=f"{film.label}, producer, Ann", entities=(film,)),
            Material(text=f"{film.label}, director, {person.label}", entities=(film, person)),
        ]
    }
    policy = ScriptedPolicy(tokenizer())
    trajectory = asyncio.run(agent(**WIDE).run(attempt(question), LittleWorld(materials), policy))
    assert trajectory.searches[0].selected == (1,)
    assert rewarded(trajectory, question).reward == 1.0


class Passages:
    """An environment that chooses its materials by the first words of a query."""

    kind = "text"
    statistics = RetrievalStatistics()

    def __init__(self, materials_by_query: dict[str, list[Material]]) -> None:
        self._found = materials_by_query

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        return tuple(
            material
            for start, materials in self._found.items()
            if query.startswith(start)
            for material in materials
        )


BRIDGE = Question(
    id="q",
    text="When was the director of Amber Tide born?",
    answers=("1920",),
    evidences=(
        Evidence(subject="Amber Tide", relation="director", object="Ilse Marten"),
        Evidence(subject="Ilse Marten", relation="date of birth", object="3 May 1920"),
    ),
)
FILM = Material(
    text="Amber Tide (film): It was directed by Ilse Marten.", title="Amber Tide (film)"
)
BORN = Material(text="Ilse Marten: Born May 3, 1920.", title="Ilse Marten")
OTHER = Material(text="Ada Marten: Born in Ghent.", title="Ada Marten")


def play_over(
    materials_by_query: dict[str, list[Material]], question: Question = BRIDGE, **changes
) -> Trajectory:
    playing = agent(**(WIDE | changes))
    return asyncio.run(
        playing.run(
            attempt(question, temperature=0.0),
            Passages(materials_by_query),
            ScriptedPolicy(tokenizer()),
        )
    )


def test_over_passages_the_worker_says_what_stands_there_and_the_planner_asks_twice():
    played = play_over({"Who": [OTHER, FILM], "What": [OTHER], "Ilse": [BORN]})
    assert [(search.query, search.selected, search.sentence) for search in played.searches] == [
        ("Who is the director of Amber Tide?", (1,), "The director of Amber Tide is Ilse Marten."),
        ("What is the date of birth of Ilse Marten?", (), NOTHING_FOUND),
        ("Ilse Marten date of birth", (0,), "The date of birth of Ilse Marten is May 3, 1920."),
    ]
    assert (played.stop_reason, played.answer) == (StopReason.ANSWERED, "1920")


def test_common_knowledge_that_no_passage_states_is_answered_from_memory():
    """The worker selects [-1] and answers, as its prompt asks.

    The planner gets the answer and does not ask again.
    """
    known = dataclasses.replace(BRIDGE, kind=f"compositional{KNOWN}")
    played = play_over({"Who": [OTHER, FILM], "What": [OTHER]}, known)
    assert [
        (search.query, search.selected, search.sentence, search.found) for search in played.searches
    ] == [
        (
            "Who is the director of Amber Tide?",
            (1,),
            "The director of Amber Tide is Ilse Marten.",
            True,
        ),
        (
            "What is the date of birth of Ilse Marten?",
            (),
            "The date of birth of Ilse Marten is 3 May 1920.",
            True,
        ),
    ]
    assert (played.stop_reason, played.answer) == (StopReason.ANSWERED, "1920")
    observed = [turn.text for turn in played.conversations[0].turns if turn.role == "context"]
    assert observed[-1] == "Obs: The date of birth of Ilse Marten is 3 May 1920."
    assert without_silent_workers(played.conversations) == played.conversations


def test_a_worker_that_says_that_nothing_was_found_is_no_demonstration():
    """Its prompt asks there for an answer from its own knowledge.

    The planner and the other workers stay.
    """
    played = play_over({"Who": [OTHER, FILM], "What": [OTHER], "Ilse": [BORN]})
    planner, director, silent, born = played.conversations
    assert parse_worker(silent.turns[-1].text, materials=1).sentence == NOTHING_FOUND
    assert without_silent_workers(played.conversations) == (planner, director, born)


def test_the_warm_up_learns_no_worker_that_says_that_nothing_was_found():
    run = MagicMock(
        agent=agent(**WIDE),
        tokenizer=tokenizer(),
        reward=find_reward("f1", "two_wiki"),
        faults=FaultGuard(),
    )
    run.config.warmup.miss_rate = 0.0
    run.config.seed = 0
    run.task = MagicMock(spec=TinyWorld, rule="two_wiki")
    world = Passages({"Who": [OTHER, FILM], "What": [OTHER], "Ilse": [BORN]})
    run.task.demonstrations.return_value = [(BRIDGE, world)]
    _, (trajectory,) = supervised._scripted(run)
    sentences = [
        parse_worker(conversation.turns[-1].text, materials=2).sentence
        for conversation in trajectory.conversations[1:]
    ]
    assert sentences == [
        "The director of Amber Tide is Ilse Marten.",
        "The date of birth of Ilse Marten is May 3, 1920.",
    ]


def test_a_planner_that_reads_itself_is_no_silent_worker():
    played = play_over(
        {"Who": [FILM], "What": [OTHER], "Ilse": [BORN]}, split=False, max_trajectory_tokens=8000
    )
    assert (played.stop_reason, played.answer) == (StopReason.ANSWERED, "1920")
    assert without_silent_workers(played.conversations) == played.conversations


def test_over_passages_that_state_nothing_the_planner_gives_up():
    played = play_over({"Who": [FILM], "What": [OTHER], "Ilse": [OTHER]})
    assert len(played.searches) == 3
    assert (played.stop_reason, played.answer) == (StopReason.NO_ACTION, "")


@pytest.mark.parametrize(
    ("value", "text", "stated"),
    [
        ("3 May 1920", "born on May 3, 1920 in Ghent", "May 3, 1920"),
        ("May 3, 1920", "(3 May 1920 - 1980)", "3 May 1920"),
        ("United States", "is an American film", "American"),
        ("Ghent (city)", "He died in Ghent.", "Ghent"),
        ("Ann", "Anna met Joann.", None),
    ],
)
def test_an_object_is_found_in_the_forms_that_passages_have(value, text, stated):
    evidence = Evidence(subject="It", relation="r", object=value)
    statement = first_statement(evidence, [Material(text=f"It: {text}", title="It")])
    assert statement == (None if stated is None else (0, stated))
