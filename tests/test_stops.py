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


def whole_tokens(texts: list[bytes], end: int) -> int:
    """How many tokens end at or before a byte."""
    return max(count for count in range(len(texts) + 1) if len(b"".join(texts[:count])) <= end)


def first_stop(texts: list[bytes], stops: list[str]) -> tuple[int, int] | None:
    """(tokens read until a stop string is complete, tokens before it)."""
    for count in range(1, len(texts) + 1):
        text = b"".join(texts[:count])
        places = [text.index(stop.encode()) for stop in stops if stop.encode() in text]
        if places:
            return count, whole_tokens(texts[:count], min(places))
    return None


@given(texts=pieces, stops=stops)
@example(texts=[b"aab"], stops=["b", "ab"])
@example(texts=["é".encode()[:1], "é".encode()[1:]], stops=["é"])
def test_a_stop_string_is_found_with_the_token_that_completes_it(texts, stops):
    matcher = StopMatcher(stops)
    found = next(((n, whole) for n, text in enumerate(texts, 1) if (whole := matcher.push(text)) is not None), None)
    assert found == first_stop(texts, stops)


@given(texts=pieces, stops=stops)
def test_what_can_be_shown_is_all_in_which_no_stop_string_can_begin(texts, stops):
    matcher = StopMatcher(stops)
    for count, piece in enumerate(texts, 1):
        if matcher.push(piece) is not None:
            return
        text = b"".join(texts[:count])
        begins = [
            place
            for place in range(len(text))
            if any(len(text) - place < len(stop.encode()) and stop.encode().startswith(text[place:]) for stop in stops)
        ]
        assert matcher.safe_tokens() == (whole_tokens(texts[:count], min(begins)) if begins else count)


@pytest.mark.parametrize("border", range(1, 6))
def test_a_stop_string_is_found_wherever_the_border_of_two_tokens_falls(border):
    text = "语é!".encode()
    matcher = StopMatcher(["语é!"])
    assert matcher.push(b"go on") is None and matcher.safe_tokens() == 1
    assert matcher.push(text[:border]) is None
    assert matcher.safe_tokens() == 1
    assert matcher.push(text[border:]) == 1
