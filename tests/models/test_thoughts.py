"""What a model says is what stands outside of its thoughts: worked out by hand, and for any
text.
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.models.thoughts import (
    end_of_unopened_thought,
    first_thought,
    is_open_after,
    opened_thought,
    outside_thoughts,
    within_opened_thought,
)

OUTSIDE_OF_THOUGHTS = {
    "all of it is said": "all of it is said",
    "": "",
    "a <think> b </think> c": "a  c",
    "<think> b </think> c <think> d </think> e": " c  e",
    "<THINK> b </Think> c": " c",
    "< think > b </ think > c": " c",
    "<think> I close it by </ think>. </think> c": ".  c",
    "<think> first <think> then </think> c": " c",
    "<think> b": "",
    "a <think> b": "a ",
    "b </think> c": " c",
    "b </think> c <think> d": " c ",
    "a </think> <answer> b </think> c": " c",
    "a <think> b </think> c </think> d": "a  c  d",
    "<think/> a <thinking> b </thinking> c": "<think/> a <thinking> b </thinking> c",
    "<th\u0131nk> a": "<th\u0131nk> a",
}


@pytest.mark.parametrize("text", OUTSIDE_OF_THOUGHTS)
def test_what_stands_outside_of_thoughts(text):
    assert outside_thoughts(text) == OUTSIDE_OF_THOUGHTS[text]


def test_the_first_thought_is_the_one_that_is_closed_first():
    assert first_thought("<think> a </think> <think> b </think>") == "a"
    assert first_thought("a </think> b") == "a"
    assert first_thought("no thought") == first_thought("<think> open") == ""


def test_a_thought_that_the_turn_did_not_open_ends_before_the_first_that_it_opens():
    assert end_of_unopened_thought("a </think> b </think> <think> c </think>") == len(
        "a </think> b </think>"
    )
    assert {
        end_of_unopened_thought(text)
        for text in ("a", "<think> a </think> b </think>", "<think> a")
    } == {0}


def test_a_generation_prompt_may_open_a_thought():
    assert opened_thought("<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert opened_thought("assistant<think>") == "<think>"
    assert (
        opened_thought("assistant\n<think>\n\n</think>\n\n") == opened_thought("assistant\n") == ""
    )


def test_a_thought_is_open_behind_its_last_tag():
    assert is_open_after("a <think> b")
    assert is_open_after("</think> <Think>")
    assert is_open_after("a", was_open=True)
    assert not any(
        is_open_after(text, was_open=True) for text in ("a </think> b", "<think> a </THINK>")
    )
    assert not is_open_after("a")


def test_a_turn_goes_on_inside_of_the_thought_that_its_prompt_opened():
    assert within_opened_thought("<think> a </think> b") == " a </think> b"
    assert within_opened_thought("a </think> b") == "a </think> b"
    assert within_opened_thought("b") == "</think>\n\nb"
    assert within_opened_thought("b <think> a </think>") == "</think>\n\nb <think> a </think>"


texts = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<Think>",
            "</THINK>",
            "<think >",
            "</ think>",
            "< think>",
            "<",
            ">",
            "think",
            "a",
            "b",
            " ",
        ]
    ),
    max_size=12,
).map("".join)


@given(text=texts)
@settings(max_examples=300)
def test_a_turn_with_a_thought_says_the_same_after_a_prompt_that_opened_it(text):
    """The prompt's `<think>` and the turn that goes on after it say what the whole turn says."""
    turn = f"<think>{text}"
    assert outside_thoughts("<think>\n" + within_opened_thought(turn)) == outside_thoughts(turn)
    assert outside_thoughts("<think>\n" + within_opened_thought("b")) == "\n\nb"


@given(text=texts)
@settings(max_examples=300)
def test_what_is_said_is_found_by_reading_one_tag_after_the_other(text):
    """The expected text comes from a reader that splits the turn at its tags."""
    parts = re.split(r"(<(?:\s?/)?\s?think\s?>)", text, flags=re.IGNORECASE)
    tags = [part.casefold().replace(" ", "") for part in parts[1::2]]
    first_open = tags.index("<think>") if "<think>" in tags else len(tags)
    outside = parts[0] if first_open == 0 else ""
    for place, tag in enumerate(tags):
        is_last_before_first_open = place == first_open - 1
        if tag == "</think>" and (place >= first_open or is_last_before_first_open):
            outside += parts[2 * place + 2]
    assert outside_thoughts(text) == outside
