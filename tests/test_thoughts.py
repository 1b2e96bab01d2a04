"""What a model says is what stands outside of its thoughts: worked out by hand, and for any text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.models.thoughts import (
    begins_in_thought,
    first_thought,
    opened_thought,
    outside_thoughts,
    within_opened_thought,
)

SAID = {
    "all of it is said": "all of it is said",
    "": "",
    "a <think> b </think> c": "a  c",
    "<think> b </think> c <think> d </think> e": " c  e",
    "<THINK> b </Think> c": " c",
    "< think > b </ think > c": " c",
    "<think> I close it by </ think>. </think> c": " c",
    "<think> first <think> then </think> c": " c",
    "<think> b": "",
    "a <think> b": "a ",
    "b </think> c": " c",
    "b </think> c <think> d": " c ",
    "a <think> b </think> c </think> d": " d",
    "<think/> a <thinking> b </thinking> c": "<think/> a <thinking> b </thinking> c",
    "<th\u0131nk> a": "<th\u0131nk> a",
}


@pytest.mark.parametrize("text", SAID)
def test_what_stands_outside_of_thoughts(text):
    assert outside_thoughts(text) == SAID[text]


def test_the_first_thought_is_the_one_that_is_closed_first():
    assert first_thought("<think> a </think> <think> b </think>") == "a"
    assert first_thought("a </think> b") == "a"
    assert first_thought("no thought") == first_thought("<think> open") == ""


def test_a_turn_begins_in_a_thought_where_the_first_tag_closes_one():
    assert begins_in_thought("a </think> <think> b </think>")
    assert not any(map(begins_in_thought, ["a", "<think> a </think>", "<think> a"]))


def test_a_generation_prompt_may_open_a_thought():
    assert opened_thought("<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert opened_thought("assistant<think>") == "<think>"
    assert opened_thought("assistant\n<think>\n\n</think>\n\n") == opened_thought("assistant\n") == ""


def test_a_turn_goes_on_inside_of_the_thought_that_its_prompt_opened():
    assert within_opened_thought("<think> a </think> b") == " a </think> b"
    assert within_opened_thought("a </think> b") == "a </think> b"
    assert within_opened_thought("b") == "</think>\n\nb"
    assert within_opened_thought("b <think> a </think>") == "</think>\n\nb <think> a </think>"


texts = st.lists(
    st.sampled_from(["<think>", "</think>", "<Think>", "</THINK>", "<", ">", "think", "a", "b", " "]), max_size=12
).map("".join)


@given(text=texts)
@settings(max_examples=300)
def test_a_turn_says_the_same_inside_of_an_opened_thought(text):
    """The prompt's `<think>` and the turn that goes on after it say what the whole turn says."""
    assert outside_thoughts("<think>\n" + within_opened_thought(text)).strip() == outside_thoughts(text).strip()


@given(text=texts)
@settings(max_examples=300)
def test_nothing_that_is_said_holds_a_thought(text):
    said = outside_thoughts(text)
    last = text.casefold().rfind("</think>")
    assert len(said) <= len(text)
    if last < 0 and "<think>" not in text.casefold():
        assert said == text
    elif text.casefold().rfind("<think>") <= last:
        assert said.endswith(text[last + len("</think>") :]), "what follows the last thought is said"
