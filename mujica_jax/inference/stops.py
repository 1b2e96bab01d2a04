"""Stop strings, found in the bytes of tokens as they stream, wherever token borders fall."""

from collections.abc import Sequence


class StopMatcher:
    """Watches one completion for its stop strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops), default=0)
        self._text = bytearray()
        self._ends: list[int] = []  # of each token, in bytes of the text

    def push(self, piece: bytes) -> int | None:
        """Add a token's bytes. Where a stop string is complete now: how many whole tokens stand before it."""
        searched = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        self._ends.append(len(self._text))
        found = [place for stop in self._stops if (place := self._text.find(stop, searched)) >= 0]
        return self._whole_tokens(min(found)) if found else None

    def safe_tokens(self) -> int:
        """How many tokens can be shown already: no stop string may still begin in them."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            ending = bytes(self._text[-length:])
            if any(stop.startswith(ending) for stop in self._stops):
                return self._whole_tokens(len(self._text) - length)
        return len(self._ends)

    def _whole_tokens(self, end: int) -> int:
        """Tokens that end at or before a byte."""
        return sum(token_end <= end for token_end in self._ends)
