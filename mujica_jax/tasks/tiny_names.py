"""Names of the tiny world: word pools, and a namer that keeps train, demonstrations and test apart.

A full name joins two words. The pair (i, j) of places in the two pools belongs to the part of the world that owns (i + j) modulo 10,
so every word is used everywhere and no full name twice: a model can know the words of a test name, never the name.
"""

import random
from collections.abc import Callable, Sequence
from typing import Literal

Part = Literal["train", "demonstration", "test"]

# Digits of (i + j) modulo 10 that each part of the world owns: half, three and two tenths of all pairs.
OWNED_DIGITS: dict[Part, frozenset[int]] = {
    "train": frozenset({0, 1, 2, 3, 4}),
    "demonstration": frozenset({5, 6, 7}),
    "test": frozenset({8, 9}),
}

MALE_NAMES = tuple(
    """Adam Alan Albert Arthur Basil Bernard Bruno Carl Cecil Charles Clement Conrad Cyril Daniel David Dennis Edgar Edmund Edwin Emil
    Ernest Felix Francis Frank Frederick George Gerald Gilbert Harold Harry Hector Henry Herbert Hugh Isaac Ivan Jacob James Jasper John
    Joseph Julian Karl Keith Leo Leonard Louis Luke Martin Maurice Max Miles Nathan Neil Nicholas Oliver Oscar Owen Patrick Paul Peter
    Philip Ralph Raymond Richard Robert Roland Rupert Samuel Simon Stephen Theodore Thomas Victor Walter""".split()
)
FEMALE_NAMES = tuple(
    """Ada Agnes Alice Amelia Anna Audrey Barbara Beatrice Bertha Bridget Caroline Cecilia Celia Clara Claudia Cora Daisy Daphne Diana
    Dora Doris Dorothy Edith Eleanor Eliza Ella Elsie Emily Emma Esther Ethel Eva Fanny Flora Florence Frances Gloria Grace Greta Hannah
    Harriet Helen Hilda Ida Irene Iris Isabel Jane Janet Joan Josephine Judith Julia Laura Lena Lillian Louise Lucy Lydia Mabel Margaret
    Maria Martha Mary Matilda Minnie Nancy Nora Olga Paula Phyllis Rachel Rose Ruth Sarah""".split()
)
LAST_NAMES = tuple(
    """Abbott Adler Ainsley Allen Ames Archer Atwood Avery Bailey Baker Baldwin Banks Barker Barlow Barnes Barrett Barton Beck Bell
    Bennett Benson Bishop Blake Bolton Bowen Bowman Boyd Bradley Brandt Brewer Briggs Brooks Brown Bryant Burke Burns Butler Byrne
    Caldwell Cameron Campbell Carey Carr Carson Carter Casey Chandler Chapman Chase Clark Clayton Cohen Coleman Collins Conway Cooper
    Cox Craig Crane Crawford Cross Cullen Curtis Dalton Davies Dawson Dean Dixon Donovan Doyle Drake Dudley Duncan Dunn Eaton Edwards
    Ellis Emerson Evans Farrell Fisher Fletcher Flynn Foley Forbes Foster Fowler Fraser Freeman Frost Fuller Gallagher Gardner Garrett
    Gibson Goodman Gordon Graham Grant Graves Greene Gregory Griffin Hale Hall Hamilton Hansen Harding Harper Harris Hart Harvey Hayes
    Henderson Hicks Higgins Hobbs Hogan Holland Holmes Hooper Howard Howell Hudson Hughes Hunter Ingram Jackson Jarvis Jenkins
    Jennings Johnson Jones Keller Kelly Kemp Kennedy Kerr Klein Knight Lambert Lane Larsen Lawson Lester Lloyd Logan Lowell Lucas
    Lynch Maddox Malone Manning Marsh Mason Mathis Maxwell Mercer Meyer Miller Mitchell Monroe Morgan Morris Morton Murphy Murray Nash
    Nelson Newton Nolan Norris Olsen Osborne Parker Parsons Payne Perkins Porter Powell Preece Pryor Quinn Ramsey Randall Reeves
    Reynolds Rhodes Roberts Rogers Russell Ryder Saunders Sawyer Schmidt Scott Sharp Shaw Sinclair Spencer""".split()
)
ADJECTIVES = tuple(
    """Ancient Autumn Bitter Black Blind Blue Bold Brave Bright Broken Bronze Burning Calm Careless Clever Cold Copper Crimson Crooked
    Cruel Curious Dancing Dark Deadly Deep Distant Divine Double Dusty Earnest Eastern Electric Empty Endless Eternal Faded Faithful
    Falling False Famous Fatal Final Frosty Flying Forbidden Forgotten Fragile Frozen Gentle Ghostly Glass Golden Grand Green Guilty
    Happy Hidden Hollow Holy Honest Hungry Idle Innocent Invisible Iron Jealous Lavish Laughing Little Lonely Long Lost Loud Lucky
    Magic Marble Merry Midnight Missing Modern Narrow Nervous Noble Open Paper Patient Perfect Perilous Pink Plain Proud Purple Quiet
    Rapid Reckless Red Restless Rising Roaring Sacred Savage Scarlet Second Secret Seventh Shining Silent Silver Simple Singing
    Sleeping Sober Solemn Stolen Strange Sudden Sunken Tender Third Velvet""".split()
)
NOUNS = tuple(
    """Affair Album Anchor Angel Apple Arrow Avenue Balcony Ballad Bandit Banner Bargain Beacon Belfry Bird Boat Bottle Boulevard
    Bridge Brother Cabin Candle Canyon Captain Caravan Carnival Castle Cathedral Chain Chamber Channel Chapel Circle Circus Clock
    Cloud Coast Comet Compass Corner Cottage Council Crown Curtain Dagger Dawn Daughter Desert Detective Diamond Doctor Dragon Dream
    Duel Duke Eagle Echo Empire Engine Evening Express Fable Falcon Farewell Feather Fever Field Flame Flower Forest Fortress Fortune
    Fountain Gallery Garden Gate Ghost Harbor Harvest Heart Hero Hill Horizon Horse Hotel Hour House Hunt Island Jewel Journey Judge
    Kingdom Ladder Lady Lantern Letter Lighthouse Lion Lullaby Machine Marriage Mask Melody Mermaid Mill Mirror Money Monument Moon
    Morning Mountain Mystery Night Ocean Orchard Orchid Orphan Palace Parade Party Passage Piano Picture Pilot Pirate Planet Poet
    Portrait Prince Prison Promise Puzzle Queen Rebel Rider Ring River Riddle Road Robe Rocket Room Sailor Shadow Shepherd Ship Shore
    Song Stranger""".split()
)
TITLE_STARTS = ("", "The ", "The ", "Her ", "Our ")
CITY_STARTS = ("", "New ", "Old ", "Port ", "Fort ", "Lake ", "Mount ", "East ", "West ", "Upper ")
CITY_STEMS = tuple(
    """Alderton Amberley Ashford Aston Barrow Bedwell Belmont Berrywick Birchfield Blackpool Bramford Branton Brightsea Brockton
    Burnley Calder Camberwell Carlow Chelton Claremont Clifton Colby Corwen Cranbury Dalwick Darnell Deepdale Denholm Derwent
    Dovercourt Drayton Dunmore Eastleigh Edgeworth Elmhurst Elstow Fairview Farnham Felton Fernley Finchley Foxhall Garstang Glenrock
    Goldcrest Granby Greystone Hadley Halford Hartwell Haverhill Hazelton Helmsley Hexham Holbrook Hollins Huxley Ilford Ivybridge
    Kelso Kendal Kenmore Kilburn Kingsley Kirkby Langley Larkhill Leighton Linwood Longmere Ludlow Lynmouth Malden Marlow Meadowbank
    Melrose Middleton Millbrook Moreton Nettleton Newbury Norwick Oakham Otterbourne Oxley Pembury Penrith Pinewood Preston Quarley
    Radford Ravenswood Redhill Ridgeway Ripley Rockport Rosedale Rugby Rydal Saltash Sandford Selby Shelford Sherwood Stanhope
    Stratton Sutton Tamworth Thornbury Tilbury Tiverton Uxbridge Walden Wareham Welford Westbrook Whitby Wickham Winslow Yarmouth""".split()
)
COUNTRY_STARTS = ("", "North ", "South ", "Great ", "Lower ", "Free ", "United ", "Royal ", "Inner ", "Outer ")
COUNTRY_STEMS = tuple(
    """Arvania Belgravia Cardonia Corvalia Dormark Elbonia Estovia Fenland Galdora Halvania Illyrica Jorvik Kaldonia
    Lorania Maravia Norvenia Orlandia Pelagonia Quentia Ravonia Saldovia Tarvania Ulmark Valdoria Vostania Wendland
    Xandria Yardonia Zelmark Zorvania""".split()
)
UNIVERSITY_ENDINGS = (" University", " College", " Academy")
EMPLOYER_ENDINGS = (" Press", " Studios", " Theatre", " Museum")
OCCUPATIONS = tuple(
    "actor architect banker chemist dancer engineer farmer journalist lawyer painter poet singer soldier teacher".split()
)
GENRES = tuple("comedy crime drama horror musical romance thriller war western".split())


class Deck:
    """Draws words so that all are used before many repeat; a word that is refused stays on top until it is accepted."""

    def __init__(self, size: int, generator: random.Random) -> None:
        self._size = size
        self._generator = generator
        self._pending: list[int] = []

    def draw(self, accept: Callable[[int], bool]) -> int | None:
        """The first accepted word of what is left, then of a fresh deck; None when no word at all is accepted."""
        for attempt in range(2):
            for place, word in enumerate(self._pending):
                if accept(word):
                    return self._pending.pop(place)
            if attempt == 0:
                fresh = self._generator.sample(range(self._size), self._size)
                self._pending += [word for word in fresh if word not in self._pending]
        return None


class PairNamer:
    """Unique pairs (first word, second word) that one part of the world owns."""

    def __init__(self, firsts: Deck, seconds: Deck, part: Part) -> None:
        self._digits = OWNED_DIGITS[part]
        self._firsts = firsts
        self._seconds = seconds
        self._taken: set[tuple[int, int]] = set()

    def pair(self, *, first: int | None = None, second: int | None = None) -> tuple[int, int]:
        """A new pair; the word that is given, one at most, is kept as long as a free pair holds it."""
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
        return (first + second) % 10 in self._digits and (first, second) not in self._taken


def join(starts: Sequence[str], stems: Sequence[str], pair: tuple[int, int]) -> str:
    return starts[pair[0]] + stems[pair[1]]
