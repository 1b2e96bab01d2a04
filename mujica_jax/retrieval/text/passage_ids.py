"""Which ids came before, in a corpus of any size.

Of an id nothing is kept but 16 bytes of its hash: among a hundred million ids two are taken for one with a probability of 10^-23.
"""

import hashlib
import struct
from array import array

FIRST_PLACES = 1024
LARGEST_NUMBER_DIGITS = 18  # of a position
_halves = struct.Struct("<QQ")


class PassageIds:
    """An id that is its passage's own position is known without being kept; every other one takes 24 to 48 bytes, 72 while they grow."""

    def __init__(self) -> None:
        self._first, self._second, self._kept = _places(FIRST_PLACES), _places(FIRST_PLACES), 0  # 0 0: a free place
        self._named = bytearray()  # a bit for each position whose passage has another id

    def add(self, identifier: str, position: int) -> bool:
        """False where it came before. Positions are those of the passages whose ids are new, from 0."""
        if identifier == str(position):  # an earlier passage may have taken this number for itself
            return not self._kept or not self._first[self._place(*_hash(identifier))]
        if identifier.isascii() and identifier.isdecimal() and len(identifier) <= LARGEST_NUMBER_DIGITS:
            number = int(identifier)
            if number < position and str(number) == identifier and not self._is_named(number):
                return False
        first, second = _hash(identifier)
        place = self._place(first, second)
        if self._first[place]:
            return False
        self._first[place], self._second[place] = first, second
        self._kept += 1
        if 3 * self._kept > 2 * len(self._first):
            self._grow()
        if (missing := position // 8 + 1 - len(self._named)) > 0:
            self._named.extend(bytes(missing))
        self._named[position // 8] |= 1 << position % 8
        return True

    def _is_named(self, position: int) -> bool:
        return position // 8 < len(self._named) and bool(self._named[position // 8] >> position % 8 & 1)

    def _place(self, first: int, second: int) -> int:
        """Where this hash is, or the free place where it belongs: the next one from that of its last bits."""
        firsts, seconds = self._first, self._second
        last = len(firsts) - 1  # a power of two less one
        place = first & last
        while (found := firsts[place]) and (found != first or seconds[place] != second):
            place = (place + 1) & last
        return place

    def _grow(self) -> None:
        old = zip(self._first, self._second, strict=True)
        self._first, self._second = _places(2 * len(self._first)), _places(2 * len(self._first))
        for first, second in old:
            if first:
                place = self._place(first, second)
                self._first[place], self._second[place] = first, second


def _places(count: int) -> "array[int]":
    return array("Q", [0]) * count


def _hash(identifier: str) -> tuple[int, int]:
    """128 bits, the first half never 0."""
    first, second = _halves.unpack(hashlib.blake2b(identifier.encode(), digest_size=_halves.size).digest())
    return first or 1, second
