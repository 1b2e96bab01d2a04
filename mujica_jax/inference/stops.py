"""Stop strings, found in the bytes of tokens as they are sampled, wherever token borders fall.

What an agent gets that passes `SamplingParams.stop_strings`, from every generator: the completion
ends with the token that completes one of them. `finish_reason` is then "stop_string" and
`stop_string` names it ("stop" is a stop token, "length" neither). `token_ids` hold what was
sampled, that last token included, and so do the log-probabilities: all of it may be learnt. So the
text of a completion ends with its stop string, or with what the last token says beyond it: the stop
`"</a>"` may be completed by a token `">\\n"`, and `text.partition(stop_string)[0]` is what stands
before it. A stop token in the same place counts first. Of two stop strings that one token
completes, the one that ends first counts, and the longer of two that end together. A stop string
never begins in the prompt.

Stop strings sleep while a thought is open (`models/thoughts.py`): inside of a thought they end
nothing. `SamplingParams.thought_open` says that the prompt ends inside of a thought, where the chat
template opens one.

The turn has no end-of-turn token: the conversation goes on with
`Tokenizer.continue_conversation(text, stopped=False)`, and its prompt is found in the prefix cache
up to and including that last token, although the engine decodes a few tokens further in the same
call. Those are thrown away. Which stop string is found depends on the sampled tokens alone, not on
`decode_steps_per_call` or on other requests in the batch.
"""

from collections.abc import Sequence

from mujica_jax.models.thoughts import LONGEST_TAG_BYTES, THOUGHT_TAG_BYTES, end_of_unopened_thought


def first_stop(
    text: bytes, stops: Sequence[bytes], *, thought_open: bool = False
) -> tuple[int, bytes] | None:
    """Return (where it ends, the stop string) for the first stop string that is complete outside of
    thoughts.

    A `StopMatcher` finds the same while the text grows."""
    ending, _ = _scan(text, stops, 0, thought_open)
    return ending


def first_stop_of_turn(text: str, stops: Sequence[str]) -> tuple[str, str] | None:
    """Return a whole turn up to the end of its first stop string, and that stop string.

    A turn that closes a thought before it opens one began inside of that thought."""
    start = end_of_unopened_thought(text)
    encoded = text[start:].encode()
    ending = first_stop(encoded, [stop.encode() for stop in stops])
    if ending is None:
        return None
    end, stop = ending
    return text[:start] + encoded[:end].decode(), stop.decode()


def before_stop(text: str, stop: str) -> str:
    """Return a whole turn up to where this string begins outside of thoughts, or all of it if the
    string is not in it."""
    ending = first_stop_of_turn(text, [stop])
    return text if ending is None else ending[0].removesuffix(stop)


class StopMatcher:
    """Watches one completion for its stop strings."""

    def __init__(self, stops: Sequence[str], *, thought_open: bool = False) -> None:
        self._stops = [stop.encode() for stop in stops]
        # The end of the text may be the beginning of a stop string or of a thought's tag.
        self._tail_bytes = max([LONGEST_TAG_BYTES, *map(len, self._stops)]) - 1
        self._tail = b""
        self._thought_open = thought_open

    @property
    def thought_open(self) -> bool:
        """Whether the text so far ends inside of a thought."""
        return self._thought_open

    def push(self, piece: bytes) -> str | None:
        """Add a token's bytes. Returns the stop string that is complete now, if one is."""
        text = self._tail + piece
        seen_bytes = len(self._tail)
        ending, self._thought_open = _scan(text, self._stops, seen_bytes, self._thought_open)
        self._tail = text[max(0, len(text) - self._tail_bytes) :]
        return None if ending is None else ending[1].decode()


def _scan(
    text: bytes, stops: Sequence[bytes], seen_bytes: int, thought_open: bool
) -> tuple[tuple[int, bytes] | None, bool]:
    """Find the first ending after the bytes that were seen before.

    Returns it as `first_stop` does, and whether a thought is open at the end of the text.
    """
    earliest = seen_bytes + 1  # where a stop string may end
    for tag in THOUGHT_TAG_BYTES.finditer(text):
        if tag.end() <= seen_bytes:
            continue
        is_closing = tag[1] is not None
        if is_closing and thought_open:
            earliest = tag.end()
        elif not is_closing and not thought_open:
            ending = _first_ending(text, stops, earliest, tag.end() - 1)
            if ending is not None:
                return ending, False
        thought_open = not is_closing
    if thought_open:
        return None, True
    return _first_ending(text, stops, earliest, len(text)), False


def _first_ending(
    text: bytes, stops: Sequence[bytes], earliest: int, latest: int
) -> tuple[int, bytes] | None:
    """Return the first stop string that ends between these two positions, with where it ends.

    Of two that end together it is the longer."""
    endings = []
    for stop in stops:
        start = text.find(stop, max(0, earliest - len(stop)), latest)
        if start >= 0:
            endings.append((start + len(stop), -len(stop), stop))
    if not endings:
        return None
    end, _, stop = min(endings)
    return end, stop
