"""The entities that questions name: worked out by hand, name by name."""

import pytest

from mujica_jax.records import Entity
from mujica_jax.retrieval.graph.triples import Triple, TripleGraph
from mujica_jax.tasks.named_entities import (
    Mention,
    Names,
    NameTable,
    find_mentions,
    longest,
    names_of,
    nearest_labels,
)
from tests.helpers.little_graph import graph_in_memory, write_dump


def table(*labels: str) -> NameTable:
    """Return the names of entities with these labels. Their keys are Q1, Q2 and so on."""
    names = NameTable()
    for number, label in enumerate(labels, start=1):
        names.add(label, Entity(id=f"Q{number}", label=label))
    return names


async def mentioned(text: str, names: Names, language: str = "en") -> list[tuple[str, str]]:
    """Return each name in a question with the keys of its entities."""
    mentions = await find_mentions(text, names, language)
    return [(m.text, " ".join(entity.id for entity in m.entities)) for m in mentions]


async def test_a_label_in_the_question_is_found():
    names = table("Dark Pilot", "The Idle Ship")
    assert await mentioned("Who directed Dark Pilot?", names) == [("Dark Pilot", "Q1")]


async def test_entities_come_in_the_order_of_the_question():
    names = table("Dark Pilot", "The Idle Ship")
    text = "Which film is older, The Idle Ship or Dark Pilot?"
    assert await mentioned(text, names) == [("The Idle Ship", "Q2"), ("Dark Pilot", "Q1")]


async def test_the_longest_name_wins_over_the_names_inside_it():
    names = table("New York", "York", "New York City", "City")
    assert await mentioned("Who is the mayor of New York City?", names) == [("New York City", "Q3")]


async def test_of_two_overlapping_names_the_longer_one_wins():
    names = table("Paul Newman", "Newman Street Station")
    text = "Is Paul Newman Street Station open?"
    assert await mentioned(text, names) == [("Newman Street Station", "Q2")]


def test_of_two_overlapping_names_with_the_same_length_the_first_one_wins():
    def mention(start: int) -> Mention:
        return Mention(text="x" * 5, start=start, end=start + 5, entities=())

    assert longest([mention(8), mention(4), mention(9)]) == [mention(4), mention(9)]


async def test_an_alias_leads_to_the_label_of_its_entity():
    names = table("United Kingdom")
    names.add("Great Britain", Entity(id="Q1", label="United Kingdom"))
    [mention] = await find_mentions("What is the capital of Great Britain?", names)
    assert mention.text == "Great Britain"
    assert mention.entities == (Entity(id="Q1", label="United Kingdom"),)


@pytest.mark.parametrize(
    "text", ["who directed dark pilot", "Who directed DARK PILOT?", "Who directed dark  pilot?"]
)
async def test_case_and_spacing_do_not_matter(text):
    [mention] = await find_mentions(text, table("Dark Pilot"))
    assert [entity.label for entity in mention.entities] == ["Dark Pilot"]


async def test_common_words_count_only_if_there_is_no_proper_name():
    names = table("film", "Dark Pilot", "director")
    assert await mentioned("Who is the director of the film Dark Pilot?", names) == [
        ("Dark Pilot", "Q2")
    ]
    assert await mentioned("What is a film director?", names) == [
        ("film", "Q1"),
        ("director", "Q3"),
    ]


async def test_question_words_are_no_names():
    names = table("Who", "Is", "The", "Who Is", "Dark Pilot")
    assert await mentioned("Who is the director of Dark Pilot?", names) == [("Dark Pilot", "Q5")]


async def test_a_name_of_function_words_needs_capital_letters():
    names = table("The Who")
    assert await mentioned("When were The Who founded?", names) == [("The Who", "Q1")]
    assert await mentioned("Is the who a question?", names) == []


async def test_several_entities_with_one_name_are_all_there():
    names = NameTable()
    names.add("Norman Foster", Entity(id="Q1", label="Norman Foster"))
    names.add("Norman Foster", Entity(id="Q2", label="Norman Foster"))
    assert await mentioned("Where was Norman Foster born?", names) == [("Norman Foster", "Q1 Q2")]


async def test_a_name_matches_labels_with_a_parenthesis_after_exact_ones():
    names = table("Norman Foster (director)", "Norman Foster")
    assert await mentioned("Where was Norman Foster born?", names) == [("Norman Foster", "Q2 Q1")]


async def test_a_name_may_end_with_punctuation():
    names = table("Taxi!", "Taxi")
    assert await mentioned("Who made Taxi!?", names) == [("Taxi!", "Q1")]
    assert await mentioned("Who made Taxi?", names) == [("Taxi", "Q2")]


async def test_punctuation_inside_a_name_and_a_possessive_after_it_are_understood():
    names = table("Polish-Russian War", "Conan O'Brien")
    text = "Is Conan O'Brien's wife in Polish-Russian War?"
    assert await mentioned(text, names) == [("Conan O'Brien", "Q2"), ("Polish-Russian War", "Q1")]


async def test_names_in_scripts_without_spaces_are_found():
    names = table("红楼梦", "曹雪芹", "梦")
    assert await mentioned("谁是红楼梦的作者？", names, "zh") == [("红楼梦", "Q1")]


async def test_names_in_other_alphabets_are_found_in_any_case():
    names = table("Москва", "Лев Толстой")
    assert await mentioned("Где родился Лев Толстой?", names, "ru") == [("Лев Толстой", "Q2")]
    assert await mentioned("сколько жителей имеет москва?", names, "ru") == [("москва", "Q1")]


async def test_marks_above_and_after_letters_belong_to_a_name():
    names = table("हिन्दी", "Dvořák")
    assert await mentioned("क्या हिन्दी भाषा है?", names) == [("हिन्दी", "Q1")]
    assert await mentioned("When was Dvor\u030ca\u0301k born?", names) == [
        ("Dvor\u030ca\u0301k", "Q2")
    ]


async def test_a_question_about_nothing_in_the_graph_has_no_mention():
    assert await mentioned("Who wrote Hamlet?", table("Dark Pilot")) == []


async def test_the_names_of_a_graph_are_its_labels_and_its_ids():
    triples = [
        Triple(subject="Taxi", relation="director", object="Roy Ruth", subject_id="Q7"),
        Triple(subject="Taxi", relation="publication date", object="1932", subject_id="Q7"),
    ]
    names = names_of(TripleGraph(triples))
    entities = await names.find_all(["taxi", "Q7", "Roy Ruth", "1932"])
    assert entities == {
        "taxi": [Entity(id="Q7", label="Taxi")],
        "Q7": [Entity(id="Q7", label="Taxi")],
        "Roy Ruth": [Entity(id="Roy Ruth", label="Roy Ruth")],
    }


async def test_the_names_of_a_graph_on_disk_are_labels_and_aliases(tmp_path):
    names = names_of(graph_in_memory(write_dump(tmp_path / "dump.nt")))
    assert await mentioned("Who directed Purple Shore, I. Vand?", names) == [
        ("Purple Shore", "Q1"),
        ("I. Vand", "Q2"),
    ]
    assert await mentioned("was the purple shore made in Ghent?", names) == [("Ghent", "Q3 Q30")]


async def test_a_graph_on_disk_knows_labels_that_share_a_word_with_the_question(tmp_path):
    names = names_of(graph_in_memory(write_dump(tmp_path / "dump.nt")))
    labels = await names.labels_near("Who is Ilse Vandd?")
    assert nearest_labels("Who is Ilse Vandd?", labels) == ["Ilse Vand"]


def test_the_nearest_labels_are_similar_to_the_name_in_the_question():
    labels = ["The Idle Ship", "The Idle Hour", "Dark Pilot", "Ada Hall"]
    assert nearest_labels("Who directed The Idle Shep?", labels) == [
        "The Idle Ship",
        "The Idle Hour",
    ]


def test_a_misspelt_name_in_lower_case_has_nearest_labels_too():
    assert nearest_labels("who directed dark pilott", ["Dark Pilot", "Ada Hall"]) == ["Dark Pilot"]
