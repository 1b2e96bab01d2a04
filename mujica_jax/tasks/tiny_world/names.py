"""Names of the tiny world: word pools, and a namer that keeps train, demonstrations, dev and test
apart.

A full name joins two words. A checksum of the pair says to which part of the world it belongs, so
every word is used everywhere and no full name twice: a model can know the words of a test name,
never the name. A checksum and not a rule: what a model can learn of the pairs it sees (which last
names go with which first names) would otherwise speak against every test name.
"""

import functools
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

Part = Literal["train", "demonstration", "dev", "test"]

# Percent of all pairs that each part of the world owns, by checksum; train's hold every word of
# every pool.
SHARES: dict[Part, range] = {
    "test": range(15),
    "dev": range(15, 29),
    "train": range(29, 74),
    "demonstration": range(74, 100),
}
LEARNING_SHARES = range(29, 100)

MALE_NAMES = tuple(
    """Adam Alan Albert Arthur Basil Bruno Carl Cecil Conrad Cyril Daniel David Dennis Edgar Edwin Emil Felix Frank
    Harry Henry Hugh Isaac Ivan Jacob James John Karl Keith Leo Louis Luke Max Miles Neil Oscar Owen Paul Peter Ralph
    Simon""".split()
)
FEMALE_NAMES = tuple(
    """Ada Agnes Alice Anna Celia Clara Cora Daisy Diana Dora Doris Edith Eliza Ella Elsie Emily Emma Ethel Eva Fanny
    Flora Grace Greta Helen Hilda Ida Irene Iris Jane Janet Joan Julia Laura Lena Lucy Mary Nora Olga Rose Ruth
    """.split()
)
LAST_NAMES = tuple(
    """Adler Allen Ames Avery Baker Banks Beck Bell Blake Bowen Boyd Brown Burke Burns Byrne Carey Carr Casey Chase
    Clark Cohen Cox Craig Crane Cross Dean Dixon Doyle Drake Dunn Eaton Ellis Evans Flynn Foley Frost Grant Hale Hall
    Hart Hayes Hicks Hobbs Hogan Jones Kelly Kemp Kerr Klein Lane Lloyd Logan Lucas Lynch Marsh Mason Meyer Nash Nolan
    Shaw""".split()
)
ADJECTIVES = tuple(
    """Autumn Bitter Black Blind Blue Bold Brave Bright Broken Bronze Calm Clever Cold Copper Cruel Dark Deadly Deep
    Divine Double Dusty Empty Faded False Famous Fatal Final Flying Frosty Frozen Gentle Glass Golden Grand Green Guilty
    Happy Hidden Hollow Holy Honest Idle Iron Long Lost Loud Lucky Magic Merry Noble Open Paper Pink Plain Proud Quiet
    Rapid Red Sober Third""".split()
)
NOUNS = tuple(
    """Affair Album Anchor Angel Apple Arrow Bird Boat Cabin Chain Clock Cloud Coast Comet Crown Dawn Dream Duel Duke
    Eagle Echo Fable Fever Field Flame Gate Ghost Heart Hero Hill Horse Hotel Hour House Hunt Jewel Judge Lady Lion Mask
    Mill Money Moon Night Ocean Party Piano Pilot Poet Queen Rebel Rider Ring River Road Robe Room Ship Shore Song
    """.split()
)
TITLE_STARTS = ("", "The ", "The ", "Her ", "Our ")
CITY_STARTS = ("", "New ", "Old ", "Port ", "Fort ", "Lake ", "Mount ", "East ", "West ", "Upper ")
CITY_STEMS = tuple(
    """Ashford Aston Barrow Bedwell Belmont Branton Burnley Calder Carlow Chelton Clifton Colby Corwen Dalwick Darnell
    Denholm Derwent Drayton Dunmore Elstow Farnham Felton Fernley Foxhall Granby Hadley Halford Hexham Hollins Huxley
    Ilford Kelso Kendal Kenmore Kilburn Kirkby Langley Linwood Ludlow Malden Marlow Melrose Moreton Newbury Norwick
    Oakham Oxley Pembury Penrith Preston Quarley Radford Redhill Ripley Rugby Rydal Selby Sutton Walden Whitby
    """.split()
)
COUNTRY_STARTS = (
    "",
    "North ",
    "South ",
    "Great ",
    "Lower ",
    "Free ",
    "United ",
    "Royal ",
    "Inner ",
    "Outer ",
)
COUNTRY_STEMS = tuple(
    """Arvania Cardonia Corvalia Dormark Elbonia Estovia Fenland Galdora Halvania Illyrica Jorvik Kaldonia Lorania
    Maravia Norvenia Quentia Ravonia Ulmark Xandria Zelmark""".split()
)
UNIVERSITY_ENDINGS = (" University", " College", " Academy")
EMPLOYER_ENDINGS = (" Press", " Studios", " Theatre", " Museum")
OCCUPATIONS = tuple(
    "actor architect banker chemist dancer engineer farmer journalist lawyer painter poet singer "
    "soldier teacher".split()
)
GENRES = tuple("comedy crime drama horror musical romance thriller war western".split())


class Deck:
    """Draws words so that all are used before many repeat; a word that is refused stays on top
    until it is accepted."""

    def __init__(self, size: int, generator: random.Random) -> None:
        self._size = size
        self._generator = generator
        self._pending: list[int] = []

    def draw(self, accept: Callable[[int], bool]) -> int | None:
        """The first accepted word of what is left, then of a fresh deck; None when no word at all
        is accepted."""
        for attempt in range(2):
            for place, word in enumerate(self._pending):
                if accept(word):
                    return self._pending.pop(place)
            if attempt == 0:
                fresh = self._generator.sample(range(self._size), self._size)
                self._pending += [word for word in fresh if word not in self._pending]
        return None


class PairNamer:
    """Unique pairs (first word, second word) whose checksum, in percent, lies in `owned`."""

    def __init__(self, firsts: Deck, seconds: Deck, owned: range) -> None:
        self._owned = owned
        self._firsts = firsts
        self._seconds = seconds
        self._taken: set[tuple[int, int]] = set()

    def pair(self, *, first: int | None = None, second: int | None = None) -> tuple[int, int]:
        """A new pair; the word that is given, one at most, is kept as long as a free pair holds
        it."""
        if first is not None and second is None:
            kept_first = first
            second = self._seconds.draw(lambda word: self._is_free(kept_first, word))
        elif second is not None and first is None:
            kept_second = second
            first = self._firsts.draw(lambda word: self._is_free(word, kept_second))
        if first is None or second is None:
            first, second = self._fresh_pair()
        self._taken.add((first, second))
        return first, second

    def _fresh_pair(self) -> tuple[int, int]:
        found: list[int] = []

        def completes(first: int) -> bool:
            second = self._seconds.draw(lambda word: self._is_free(first, word))
            if second is not None:
                found.append(second)
            return second is not None

        first = self._firsts.draw(completes)
        assert first is not None, "the pools hold fewer names than this part of the world asks for"
        return first, found[0]

    def _is_free(self, first: int, second: int) -> bool:
        checksum = zlib.crc32(_digits(second), _checksum_of_first(first))  # of "FIRST SECOND"
        return checksum % 100 in self._owned and (first, second) not in self._taken


_digits = functools.cache(lambda number: str(number).encode())
_checksum_of_first = functools.cache(lambda number: zlib.crc32(f"{number} ".encode()))


def join(starts: Sequence[str], stems: Sequence[str], pair: tuple[int, int]) -> str:
    return starts[pair[0]] + stems[pair[1]]
