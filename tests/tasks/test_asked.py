"""A question in a user's own words becomes a question of a task."""

import dataclasses

import pytest

from mujica_jax.errors import UserError
from mujica_jax.records import Entity, Question
from mujica_jax.retrieval.graph.triples import Triple, TripleGraph
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.tasks.asked import (
    AskedQuestion,
    asked_question,
    describe,
    distractor_refusal,
    over_graph,
    search_of,
)
from mujica_jax.tasks.environment import GraphEnvironment
from mujica_jax.tasks.named_entities import Mention
from mujica_jax.tasks.ranking import DenseRanking
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material, Split
from tests.helpers.tiny_worlds import small_world

FILM = Entity(id="Q1", label="Taxi")
OWN = Question(id="own-1", text="Who made Taxi?", answers=("Roy Ruth",), candidates=(FILM,))
TRIPLES = [
    Triple(subject="Taxi", relation="director", object="Roy Ruth", subject_id="Q1", object_id="Q2"),
    Triple(subject="Norman Foster", relation="born", object="1903", subject_id="Q3", literal=True),
    Triple(subject="Norman Foster", relation="born", object="1935", subject_id="Q4", literal=True),
]


@dataclasses.dataclass
class Passages:
    """An environment that finds nothing. `name` tells it from others."""

    name: str
    kind: EnvironmentKind = "text"
    statistics: RetrievalStatistics = dataclasses.field(default_factory=RetrievalStatistics)

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        return ()


class LittleTask:
    """A task with one dev question, whose environment differs from that of other questions."""

    name = "little"
    rule = "two_wiki"

    def __init__(self, kind: EnvironmentKind = "text") -> None:
        self.environment_kind: EnvironmentKind = kind

    def questions(self, split: Split) -> list[Question]:
        return [OWN] if split == "dev" else []

    def environment(self, question: Question) -> Environment:
        return Passages("own" if question.id == OWN.id else "shared", kind=self.environment_kind)


class DistractorTask(LittleTask):
    """A task that has only the passages of its own questions."""

    async def asked(self, text: str) -> AskedQuestion:
        raise distractor_refusal(text)


@pytest.mark.parametrize("text", ["Who made Taxi?", "who made  taxi", "Who made Taxi ?"])
async def test_a_question_of_the_task_is_asked_with_its_own_passages(text):
    asked = await asked_question(LittleTask(), text)
    assert asked.question.id == "own-1"
    assert asked.question.candidates == (FILM,)
    assert asked.environment == Passages("own")


async def test_the_gold_answer_of_an_own_question_is_told_and_not_scored():
    asked = await asked_question(LittleTask(), OWN.text)
    assert asked.question.answers == ()
    assert asked.notes == (
        "this is the question own-1 of the split dev; its gold answer is Roy Ruth",
    )


async def test_another_question_searches_the_shared_passages():
    asked = await asked_question(LittleTask(), "Who made Metropolis?")
    assert asked.question.text == "Who made Metropolis?"
    assert asked.environment == Passages("shared")


async def test_a_distractor_task_refuses_another_question_and_says_what_to_do():
    with pytest.raises(UserError, match=r"search all passages with --task\.setting open"):
        await asked_question(DistractorTask(), "Who made Metropolis?")
    asked = await asked_question(DistractorTask(), OWN.text)
    assert asked.environment == Passages("own")


async def test_an_empty_question_is_refused():
    with pytest.raises(UserError, match="is empty"):
        await asked_question(LittleTask(), "  ")


async def test_a_task_over_a_graph_that_finds_no_entities_names_the_missing_method():
    with pytest.raises(UserError, match="give the task the method `asked`"):
        await asked_question(LittleTask("graph"), "Who made Metropolis?")


# --- over a graph ---


def graph_search(ranking=None):
    return search_of(GraphEnvironment(TripleGraph(TRIPLES), 5, ranking))


async def test_entities_of_the_question_become_candidates_and_are_shown():
    asked = await over_graph("Who directed Taxi?", graph_search())
    assert asked.question.candidates == (FILM,)
    assert asked.notes == ("'Taxi' in the question is Taxi (Q1)",)


async def test_namesakes_are_all_candidates_and_are_shown():
    asked = await over_graph("When was Norman Foster born?", graph_search())
    assert [entity.id for entity in asked.question.candidates] == ["Q3", "Q4"]
    assert asked.notes == (
        "'Norman Foster' in the question may be Norman Foster (Q3) or Norman Foster (Q4); name the "
        "id in place of the name to choose one",
    )


async def test_an_id_in_place_of_a_name_chooses_one_of_the_namesakes():
    asked = await over_graph("When was Q4 born?", graph_search())
    assert asked.question.candidates == (Entity(id="Q4", label="Norman Foster"),)


def test_of_many_namesakes_three_are_candidates():
    entities = tuple(Entity(id=f"Q{n}", label="Ghent") for n in range(1, 6))
    sentence = describe(Mention(text="Ghent", start=0, end=5, entities=entities))
    assert sentence == (
        "'Ghent' in the question may be Ghent (Q1), Ghent (Q2) or Ghent (Q3), or one of 2 others, "
        "which are no candidates; name the id in place of the name to choose one"
    )


async def test_a_question_without_an_entity_is_told_the_nearest_labels():
    with pytest.raises(UserError, match=r"names no entity of the graph: did you mean Roy Ruth\?"):
        await over_graph("Who is Ray Ruth?", graph_search())


async def test_without_a_similar_label_the_advice_is_general():
    with pytest.raises(UserError, match="name an entity as the graph does"):
        await over_graph("Who wrote Zzyzx?", graph_search())


class WordsOfCabs:
    """An embedder for which a cab is a taxi."""

    def embed(self, texts, kind):
        import numpy as np

        is_cab = [1.0 if {"cab", "Taxi"} & set(text.split()) else 0.0 for text in texts]
        return np.array([[cab, 0.1] for cab in is_cab], np.float32)


async def test_an_embedder_finds_the_most_similar_entities_where_no_name_is_in_the_question():
    asked = await over_graph(
        "Who made the film about a cab", graph_search(DenseRanking(WordsOfCabs()))
    )
    assert asked.question.candidates[0] == FILM
    assert asked.notes[0].startswith("the question names no entity; it may start from")


# --- the tiny world ---


@pytest.fixture(scope="module")
def world():
    return small_world(20, 10, 10, facts=5)


async def test_an_entity_of_any_part_of_the_tiny_world_is_found(world):
    for part in ("train", "dev", "test"):
        question = world.questions(part)[0]
        entity = question.candidates[0]
        asked = await asked_question(world, f"What do you know about {entity.label}?")
        assert asked.question.candidates == (entity,)
        assert asked.environment is world.graph


async def test_over_passages_the_tiny_world_searches_the_part_of_the_entity():
    world = small_world(20, 10, 10, facts=5, environment="text")
    entity = world.questions("test")[0].candidates[0]
    asked = await asked_question(world, f"What do you know about {entity.label}?")
    assert asked.environment is world.environment(world.questions("test")[0])
    first, *_ = await asked.environment.search(entity.label, None)
    assert first.title == entity.label


async def test_an_unknown_name_in_the_tiny_world_is_told_the_nearest(world):
    label = world.questions("dev")[0].candidates[0].label
    with pytest.raises(UserError, match=f"did you mean .*{label}"):
        await asked_question(world, f"Who is {label}ss?")
