"""The task of facts: its table, its splits, and the protocol of tasks."""

import collections

from examples.facts_task.tasks import Facts, FactsConfig
from mujica_jax.tasks.checks import check_task, from_scratch
from tests.helpers.paths import ROOT

TASK = Facts(FactsConfig(file=str(ROOT / "examples" / "facts_task" / "facts.tsv")))


def test_the_splits_have_the_questions_that_the_readme_says_and_share_no_country():
    countries = collections.defaultdict(set)
    counts = {}
    for split in ("train", "dev", "test"):
        questions = TASK.questions(split)
        counts[split] = len(questions)
        countries[split] = {question.candidates[0].label for question in questions}
    assert counts == {"train": 72, "dev": 24, "test": 24}
    assert len(countries["train"] | countries["dev"] | countries["test"]) == 40
    assert sum(map(len, countries.values())) == 40


def test_it_keeps_the_protocol_of_tasks():
    check_task(TASK, "facts", ("train", "dev", "test"))
    from_scratch(TASK)


async def test_a_search_finds_the_fact_of_the_question():
    (question,) = (
        question
        for split in ("train", "dev", "test")
        for question in TASK.questions(split)
        if question.text == "What is the capital of Japan?"
    )
    materials = await TASK.environment(question).search("capital", question.candidates[0])
    assert question.answers == ("Tokyo",)
    assert "Japan, capital, Tokyo" in [material.text for material in materials]
