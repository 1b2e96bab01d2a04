"""Stop strings against a search through the whole text after every token."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mujica_jax.inference.stops import StopMatcher

# Letters, whole and torn characters of two and three bytes, and a token that has no text.
PIECES = [b"a", b"b", b"ab", b"aab", b"", "é".encode(), "é".encode()[:1], "é".encode()[1:], "語".encode()[:2], b"\x9e"]
STOPS = ["a", "ab", "ba", "aab", "abab", "é", "aé", "語b"]

pieces = st.lists(st.sampled_from(PIECES), max_size=12)
stops = st.lists(st.sampled_from(STOPS), min_size=1, max_size=3)


def by_hand(texts: list[bytes], stops: list[str]) -> tuple[int, str] | None:
    """(tokens read until a stop string is complete, that stop string): the text grows by one byte at a time."""
    text = b"".join(texts)
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop.encode())]
        if complete:
            tokens = next(count for count in range(len(texts) + 1) if len(b"".join(texts[:count])) >= end)
            return tokens, max(complete, key=len)
    return None


@given(texts=pieces, stops=stops)
@example(texts=[b"aab"], stops=["b", "ab"])
@example(texts=["é".encode()[:1], "é".encode()[1:]], stops=["é"])
def test_a_stop_string_is_found_with_the_token_that_completes_it(texts, stops):
    matcher = StopMatcher(stops)
    found = next(((n, stop) for n, text in enumerate(texts, 1) if (stop := matcher.push(text)) is not None), None)
    assert found == by_hand(texts, stops)


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
