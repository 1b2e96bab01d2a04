"""Stop strings, compared with a search through the whole text after every token."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mujica_jax.inference.requests import StopMatcher, before_stop, first_stop

# Letters, whole and torn characters of two and three bytes, and a token that has no text.
PIECES = [
    b"a",
    b"b",
    b"ab",
    b"aab",
    b"",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    "語".encode()[:2],
    b"\x9e",
]
STOPS = ["a", "ab", "ba", "aab", "abab", "é", "aé", "語b"]

pieces = st.lists(st.sampled_from(PIECES), max_size=12)
stops = st.lists(st.sampled_from(STOPS), min_size=1, max_size=3)


def by_hand(
    texts: list[bytes], stops: list[str], *, is_open: bool = False
) -> tuple[int, str] | None:
    """Return how many tokens are read until a stop string is complete outside of thoughts, and that
    stop string. The text grows by one byte at a time.
    """
    text = b"".join(texts)
    for end in range(1, len(text) + 1):
        if text[:end].lower().endswith(b"<think>"):
            is_open = True
        if text[:end].lower().endswith(b"</think>"):
            is_open = False
        complete = [stop for stop in stops if text[:end].endswith(stop.encode())]
        if complete and not is_open:
            tokens = next(
                count for count in range(len(texts) + 1) if len(b"".join(texts[:count])) >= end
            )
            return tokens, max(complete, key=len)
    return None


def streamed(
    texts: list[bytes], stops: list[str], *, is_open: bool = False
) -> tuple[int, str] | None:
    matcher = StopMatcher(stops, thought_open=is_open)
    for number, text in enumerate(texts, 1):
        stop = matcher.push(text)
        if stop is not None:
            return number, stop
    return None


@given(texts=pieces, stops=stops)
@example(texts=[b"aab"], stops=["b", "ab"])
@example(texts=["é".encode()[:1], "é".encode()[1:]], stops=["é"])
def test_a_stop_string_is_found_with_the_token_that_completes_it(texts, stops):
    assert streamed(texts, stops) == by_hand(texts, stops)


@pytest.mark.parametrize("border", range(1, 6))
def test_a_stop_string_is_found_wherever_the_border_of_two_tokens_falls(border):
    text = "语é!".encode()
    matcher = StopMatcher(["语é!", "zz"])
    assert matcher.push(b"go on") is None
    assert matcher.push(text[:border]) is None
    assert matcher.push(text[border:] + b" and on") == "语é!"


def test_of_two_stop_strings_the_one_that_ends_first_counts_and_the_longer_of_two_that_end_together():
    assert StopMatcher(["long stop", "ng"]).push(b"a long stop") == "ng"
    assert StopMatcher(["ng", "long"]).push(b"a long stop") == "long"


# --- thoughts ---

thinking = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<THINK>",
            "</Think>",
            "</answer>",
            "<answer>",
            "Obs:",
            "a",
            "<",
            "/",
            ">",
        ]
    ),
    max_size=10,
).map("".join)


@given(text=thinking, is_open=st.booleans(), cuts=st.sets(st.integers(1, 60), max_size=12))
@example(text="<think></answer></think></answer>", is_open=False, cuts={3, 9, 20})
@settings(max_examples=400)
def test_the_stop_of_a_stream_is_that_of_the_whole_text(text, is_open, cuts):
    """Tags and stop strings may be spread over any tokens."""
    whole = text.encode()
    borders = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    texts = [whole[start:end] for start, end in itertools.pairwise(borders)]
    stops = ["</answer>", "Obs:", "a>"]
    expected = by_hand(texts, stops, is_open=is_open)
    assert streamed(texts, stops, is_open=is_open) == expected
    ending = first_stop(whole, [stop.encode() for stop in stops], thought_open=is_open)
    single_bytes = by_hand(
        [whole[place : place + 1] for place in range(len(whole))], stops, is_open=is_open
    )
    assert ending == (None if single_bytes is None else (single_bytes[0], single_bytes[1].encode()))


@pytest.mark.parametrize(
    ("text", "thought_open", "end"),
    [
        ("<think> a </answer> b </think> c </answer> d", False, 42),
        ("a </answer> b </think> c </answer> d", False, 11),
        ("a </answer> b </think> c </answer> d", True, 34),
        ("<think> a <think> </answer> </think></answer>", False, 45),
        ("<think> a </answer>", False, None),
        ("</answer>", True, None),
        ("</answer><think>", False, 9),
        ("<THINK></answer></THINK>", False, None),
    ],
)
def test_stop_strings_sleep_while_a_thought_is_open(text, thought_open, end):
    match = first_stop(text.encode(), [b"</answer>"], thought_open=thought_open)
    assert match == (None if end is None else (end, b"</answer>"))


def test_the_end_of_a_thought_may_be_a_stop_string_and_its_beginning_is_none():
    assert first_stop(b"<think> a </think> b", [b"</think>"]) == (18, b"</think>")
    assert first_stop(b"a <think> b", [b"<think>"]) is None


def test_what_stands_before_a_stop_string_of_a_whole_turn():
    assert before_stop("<think> Obs: </think> é Obs: b", "Obs:") == "<think> Obs: </think> é "
    assert before_stop("Obs: </think> a", "Obs:") == "Obs: </think> a"
    assert (
        before_stop("Obs: </think> Obs: </think> a Obs: b", "Obs:")
        == "Obs: </think> Obs: </think> a "
    )
