"""Names of the tiny world: pools of words, and a namer that gives each part its own names.

The parts are train, demonstrations, dev and test. A full name joins two words. A checksum of the
pair tells which part owns the name. Every word is used in every part, but every full name in one
part only. So a model can know the words of a test name, but never the name.

A checksum divides the names, because a rule on the words could be learnt. A model could learn which
last names go with which first names in training, and every test name would break the rule.
"""

import functools
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

Part = Literal["train", "demonstration", "dev", "test"]

# The checksums (0 to 99) that each part of the world owns. Those of train have names with every
# word of every pool.
SHARES: dict[Part, range] = {
    "test": range(15),
    "dev": range(15, 29),
    "train": range(29, 74),
    "demonstration": range(74, 100),
}
# The checksums of the two parts for learning.
LEARNING_SHARES = range(29, 100)

MALE_NAMES = tuple(
    """
    Adam Alan Albert Arthur Basil Bruno Carl Cecil Conrad Cyril Daniel David Dennis Edgar Edwin
    Emil Felix Frank Harry Henry Hugh Isaac Ivan Jacob James John Karl Keith Leo Louis Luke Max
    Miles Neil Oscar Owen Paul Peter Ralph Simon
    """.split()
)
FEMALE_NAMES = tuple(
    """
    Ada Agnes Alice Anna Celia Clara Cora Daisy Diana Dora Doris Edith Eliza Ella Elsie Emily
    Emma Ethel Eva Fanny Flora Grace Greta Helen Hilda Ida Irene Iris Jane Janet Joan Julia
    Laura Lena Lucy Mary Nora Olga Rose Ruth
    """.split()
)
LAST_NAMES = tuple(
    """
    Adler Allen Ames Avery Baker Banks Beck Bell Blake Bowen Boyd Brown Burke Burns Byrne Carey
    Carr Casey Chase Clark Cohen Cox Craig Crane Cross Dean Dixon Doyle Drake Dunn Eaton Ellis
    Evans Flynn Foley Frost Grant Hale Hall Hart Hayes Hicks Hobbs Hogan Jones Kelly Kemp Kerr
    Klein Lane Lloyd Logan Lucas Lynch Marsh Mason Meyer Nash Nolan Shaw
    """.split()
)
ADJECTIVES = tuple(
    """
    Autumn Bitter Black Blind Blue Bold Brave Bright Broken Bronze Calm Clever Cold Copper Cruel
    Dark Deadly Deep Divine Double Dusty Empty Faded False Famous Fatal Final Flying Frosty
    Frozen Gentle Glass Golden Grand Green Guilty Happy Hidden Hollow Holy Honest Idle Iron Long
    Lost Loud Lucky Magic Merry Noble Open Paper Pink Plain Proud Quiet Rapid Red Sober Third
    """.split()
)
NOUNS = tuple(
    """
    Affair Album Anchor Angel Apple Arrow Bird Boat Cabin Chain Clock Cloud Coast Comet Crown
    Dawn Dream Duel Duke Eagle Echo Fable Fever Field Flame Gate Ghost Heart Hero Hill Horse
    Hotel Hour House Hunt Jewel Judge Lady Lion Mask Mill Money Moon Night Ocean Party Piano
    Pilot Poet Queen Rebel Rider Ring River Road Robe Room Ship Shore Song
    """.split()
)
TITLE_STARTS = ("", "The ", "The ", "Her ", "Our ")
CITY_STARTS = ("", "New ", "Old ", "Port ", "Fort ", "Lake ", "Mount ", "East ", "West ", "Upper ")
CITY_STEMS = tuple(
    """
    Ashford Aston Barrow Bedwell Belmont Branton Burnley Calder Carlow Chelton Clifton Colby
    Corwen Dalwick Darnell Denholm Derwent Drayton Dunmore Elstow Farnham Felton Fernley Foxhall
    Granby Hadley Halford Hexham Hollins Huxley Ilford Kelso Kendal Kenmore Kilburn Kirkby
    Langley Linwood Ludlow Malden Marlow Melrose Moreton Newbury Norwick Oakham Oxley Pembury
    Penrith Preston Quarley Radford Redhill Ripley Rugby Rydal Selby Sutton Walden Whitby
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
    """
    Arvania Cardonia Corvalia Dormark Elbonia Estovia Fenland Galdora Halvania Illyrica Jorvik
    Kaldonia Lorania Maravia Norvenia Quentia Ravonia Ulmark Xandria Zelmark
    """.split()
)
UNIVERSITY_ENDINGS = (" University", " College", " Academy")
EMPLOYER_ENDINGS = (" Press", " Studios", " Theatre", " Museum")
OCCUPATIONS = tuple(
    """
    actor architect banker chemist dancer engineer farmer journalist lawyer painter poet singer
    soldier teacher
    """.split()
)
GENRES = tuple("comedy crime drama horror musical romance thriller war western".split())


class Deck:
    """A deck of word numbers. Words are drawn so that all are used before many are repeated.

    A word that is not accepted stays on top of the deck for the next draws.
    """

    def __init__(self, size: int, generator: random.Random) -> None:
        self._size = size
        self._generator = generator
        self._pending: list[int] = []

    def draw(self, accept: Callable[[int], bool]) -> int | None:
        """Draw the first word that `accept` accepts, and return its number.

        If no word in the deck is accepted, all words are shuffled and added below it. The result is
        None if no word is accepted at all.
        """
        word = self._take_accepted(accept)
        if word is None:
            fresh = self._generator.sample(range(self._size), self._size)
            self._pending += [word for word in fresh if word not in self._pending]
            word = self._take_accepted(accept)
        return word

    def _take_accepted(self, accept: Callable[[int], bool]) -> int | None:
        """Remove the first accepted word from the deck and return it, or None."""
        for position, word in enumerate(self._pending):
            if accept(word):
                return self._pending.pop(position)
        return None


class PairNamer:
    """A source of unique pairs (first word, second word) whose checksum (0 to 99) is in `owned`."""

    def __init__(self, firsts: Deck, seconds: Deck, owned: range) -> None:
        self._owned = owned
        self._firsts = firsts
        self._seconds = seconds
        self._used_pairs: set[tuple[int, int]] = set()

    def pair(self, *, first: int | None = None, second: int | None = None) -> tuple[int, int]:
        """Return a new pair of word numbers. One of the two words may be prescribed.

        If no free pair has the prescribed word, the pair has other words.
        """
        pair: tuple[int, int] | None = None
        if first is not None and second is None:
            pair = self._pair_with_first(first)
        elif second is not None and first is None:
            pair = self._pair_with_second(second)
        if pair is None:
            pair = self._fresh_pair()
        self._used_pairs.add(pair)
        return pair

    def _pair_with_first(self, first: int) -> tuple[int, int] | None:
        """Return a free pair with this first word, or None."""
        second = self._seconds.draw(lambda word: self._is_free(first, word))
        return None if second is None else (first, second)

    def _pair_with_second(self, second: int) -> tuple[int, int] | None:
        """Return a free pair with this second word, or None."""
        first = self._firsts.draw(lambda word: self._is_free(word, second))
        return None if first is None else (first, second)

    def _fresh_pair(self) -> tuple[int, int]:
        """Return a pair whose first word is the first in the deck that can be completed."""
        completed_pairs: list[tuple[int, int]] = []

        def can_be_completed(first: int) -> bool:
            pair = self._pair_with_first(first)
            if pair is None:
                return False
            completed_pairs.append(pair)
            return True

        first = self._firsts.draw(can_be_completed)
        assert first is not None, "the pools hold fewer names than this part of the world asks for"
        return completed_pairs[0]

    def _is_free(self, first: int, second: int) -> bool:
        """Return whether this part owns a pair and has not used it."""
        # The checksum of the text "FIRST SECOND".
        checksum = zlib.crc32(_digits(second), _checksum_of_first(first))
        return checksum % 100 in self._owned and (first, second) not in self._used_pairs


@functools.cache
def _digits(number: int) -> bytes:
    """Return the decimal digits of a number."""
    return str(number).encode()


@functools.cache
def _checksum_of_first(number: int) -> int:
    """Return the checksum of the text "FIRST " for the number of a first word."""
    return zlib.crc32(f"{number} ".encode())


def join(starts: Sequence[str], stems: Sequence[str], pair: tuple[int, int]) -> str:
    """Return the name of a pair of word numbers."""
    first, second = pair
    return starts[first] + stems[second]
