"""Stop strings, found in the bytes of tokens as they are sampled, wherever token borders fall.

What an agent gets that passes `SamplingParams.stop_strings`, from every generator: the completion ends with the token
that completes one of them. `finish_reason` is then "stop_string" and `stop_string` names it ("stop" is a stop token,
"length" neither). `token_ids` hold what was sampled, that last token included, and so do the log-probabilities: all of
it may be learnt. So the text of a completion ends with its stop string, or with what the last token says beyond it: the
stop `"</a>"` may be completed by a token `">\\n"`, and `text.partition(stop_string)[0]` is what stands before it. A
stop token in the same place counts first. Of two stop strings that one token completes, the one that ends first counts,
and the longer of two that end together. A stop string never begins in the prompt.

The turn has no end-of-turn token: the conversation goes on with `Tokenizer.continue_conversation(text, stopped=False)`,
and its prompt is found in the prefix cache up to and including that last token, although the engine decodes a few
tokens further in the same call. Those are thrown away. What is found depends on the sampled tokens alone, not on
`decode_steps_per_call` or on who else is in the batch.
"""

from collections.abc import Sequence


def first_stop(text: bytes, stops: Sequence[bytes]) -> tuple[int, bytes] | None:
    """(where it ends, the stop string) of the stop string that is complete first."""
    found = [(place + len(stop), -len(stop), stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop


class StopMatcher:
    """Watches one completion for its stop strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._kept_bytes = max(map(len, self._stops), default=1) - 1  # what is not a whole stop string yet
        self._tail = b""

    def push(self, piece: bytes) -> str | None:
        """Add a token's bytes; returns the stop string that is complete now."""
        text = self._tail + piece
        found = first_stop(text, self._stops)
        self._tail = text[max(0, len(text) - self._kept_bytes) :]
        return found[1].decode() if found else None
