"""Reading documents: everything that is read off stands in what was given."""

import itertools
import re

import pytest

from mujica_jax.tasks.reading import Vocabulary, documents

VOCABULARY = Vocabulary(
    labels={"film": ["Amber Tide", "Tin Orchard"], "person": ["Ilse Marten", "Otto Brand"]},
    values={
        "film": {"director": ["Ilse Marten", "Otto Brand"], "genre": ["drama", "war"]},
        "person": {"mother": ["Ada Marten"], "father": ["Karl Brand"], "place of birth": ["Ghent", "Lille"]},
    },
    years=(1900, 1990),
    most_facts=3,
)


def read(seed, count=400):
    return list(itertools.islice(documents(VOCABULARY, seed), count))


def test_documents_are_a_function_of_the_seed():
    assert read(0) == read(0) != read(1)


@pytest.mark.parametrize("document", read(0, 60), ids=lambda document: document.read[:20])
def test_a_fact_is_read_with_the_number_of_its_own_line(document):
    if document.given.startswith("Years"):
        years = re.findall(r"\d+", document.given)
        assert re.findall(r"\d+", document.read) == sorted(years)
        return
    lines = dict(re.findall(r"^\[(\d+)\] (.*) \[\1\]$", document.given, re.MULTILINE))
    for line in filter(
        None, document.read.split("\n")
    ):  # nothing is read off a list that names the entity only as object
        fact, number = re.fullmatch(r"(.*) \[(-?\d+)\]", line).groups()
        relation, value = re.fullmatch(
            r"(?:The )?(.+?)(?: of (?:Amber Tide|Tin Orchard|Ilse Marten|Otto Brand))?: (.*)", fact
        ).groups()
        if number == "-1":
            assert value == "none."
        else:
            assert lines[number].endswith(f", {relation}, {value}")


def test_the_same_entity_is_given_different_facts():
    directors = {
        re.search(r"^\[\d\] Amber Tide, director, (Ilse|Otto)", document.given, re.MULTILINE)[1]
        for document in read(0)
        if re.search(r"^\[\d\] Amber Tide, director, (Ilse|Otto)", document.given, re.MULTILINE)
    }
    assert len(directors) == 2
