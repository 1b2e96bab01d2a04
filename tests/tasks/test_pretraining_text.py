"""Reading documents: everything that is read off stands in what was given."""

import itertools
import re

import pytest

from mujica_jax.tasks.pretraining_text import Vocabulary, documents

VOCABULARY = Vocabulary(
    labels={"film": ["Amber Tide", "Tin Orchard"], "person": ["Ilse Marten", "Otto Brand"]},
    values={
        "film": {"director": ["Ilse Marten", "Otto Brand"], "genre": ["drama", "war"]},
        "person": {
            "mother": ["Ada Marten"],
            "father": ["Karl Brand"],
            "place of birth": ["Ghent", "Lille"],
        },
    },
    years=(1900, 1990),
    max_facts=3,
)


def read(seed, count=400):
    return list(itertools.islice(documents(VOCABULARY, seed), count))


def test_documents_are_a_function_of_the_seed():
    assert read(0) == read(0) != read(1)


@pytest.mark.parametrize("document", read(0, 60), ids=lambda document: document[-20:])
def test_a_fact_is_read_with_the_number_of_its_own_line(document):
    if document.startswith("Years"):
        listed, ordered = (re.findall(r"\d+", line) for line in document.split("\n"))
        assert ordered == sorted(listed)
        return
    heading, *rest = document.split("\n")
    assert heading == "Materials:"
    *listed, read_off = rest
    lines = dict(re.fullmatch(r"\[(\d+)\] (.*) \[\1\] .*", line).group(1, 0) for line in listed)
    assert list(lines) == [str(number) for number in range(len(listed))]
    # none where it is the object in every line
    for fact in filter(None, read_off.removeprefix("Read: ").split("; ")):
        relation, number, value, repetition = re.fullmatch(
            r"(.+?) \[(-?\d+)\] (.+?)( The .*)?", fact
        ).groups()
        if repetition:
            assert re.fullmatch(rf" The {relation} of [A-Z].* is {value}\.", repetition)
        if number == "-1":
            assert value == "none"
        else:
            assert lines[number].endswith(f", {relation} [{number}] {value}")


def test_the_same_entity_is_given_different_facts():
    line = re.compile(r"^\[\d\] Amber Tide, director \[\d\] (Ilse|Otto)", re.MULTILINE)
    matches = map(line.search, read(0))
    assert {match[1] for match in matches if match} == {"Ilse", "Otto"}
