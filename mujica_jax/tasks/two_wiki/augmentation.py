"""Renamed copies of gold chains, so that a model learns to copy names instead of memorising them.

A copy keeps a question's wording, relations and structure. The rest changes:

- Every entity of the question and of its small graph gets a new name. It is put together from words
  of training-side names of the same sort: people, works, places or organisations. A word is
  replaced by the same word everywhere in a copy. So families keep a common surname, and a title
  keeps its resemblance to its alias.
- Countries become other countries in the same form ("American" -> "French", "Italy" -> "Peru"), one
  to one.
- Dates keep their written form. The dates of an entity move together by a number of years.
- Answers are computed again from the changed evidence.
- Distractor triples are added, of relations that the entity did not have, and all triples are
  shuffled.
"""

import dataclasses
import functools
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from mujica_jax.retrieval.graph.triples import Triple, without_parenthesis
from mujica_jax.tasks.two_wiki.chains import COUNTRY_FORMS, MONTHS, country_form, parse_date

Sort = Literal["person", "work", "place", "organisation", "country", "closed", "other"]

COUNTRY_RELATIONS = frozenset({"country", "country of citizenship", "country of origin"})
# The objects of these relations are swapped as whole labels.
CLOSED_RELATIONS = frozenset({"cause of death", "award received", "occupation"})
# The relations that tell the sort of their object, and those that tell the sort of their subject.
_OBJECTS: dict[Sort, tuple[str, ...]] = {
    "country": tuple(COUNTRY_RELATIONS),
    "closed": tuple(CLOSED_RELATIONS),
    "place": ("place of birth", "place of death", "place of burial", "place of detention"),
    "organisation": ("educated at", "employer", "publisher"),
    "person": (
        "director",
        "father",
        "mother",
        "spouse",
        "sibling",
        "child",
        "performer",
        "composer",
        "producer",
        "editor",
        "presenter",
        "creator",
        "student of",
        "doctoral advisor",
        "founded by",
        "screenwriter",
    ),
}
_SUBJECTS: dict[Sort, tuple[str, ...]] = {
    "place": ("country",),
    "organisation": ("inception", "founded by"),
    "work": (
        "director",
        "publication date",
        "performer",
        "composer",
        "country of origin",
        "producer",
        "publisher",
        "editor",
        "presenter",
        "creator",
        "screenwriter",
    ),
    "person": (
        "date of birth",
        "date of death",
        "place of birth",
        "place of death",
        "place of burial",
        "place of detention",
        "father",
        "mother",
        "spouse",
        "sibling",
        "child",
        "educated at",
        "employer",
        "award received",
        "cause of death",
        "occupation",
        "country of citizenship",
        "student of",
        "doctoral advisor",
    ),
}
SORT_OF_OBJECT: dict[str, Sort] = {
    relation: sort for sort, relations in _OBJECTS.items() for relation in relations
}
SORT_OF_SUBJECT: dict[str, Sort] = {
    relation: sort for sort, relations in _SUBJECTS.items() for relation in relations
}

# Words that give a name its form and stay in it: articles and particles, ranks, kinds of
# institutions and places.
KEPT_WORDS = frozenset(
    """
    a an the of and in on at to for from by with or vs n o und et y e de la le les l' du des d'
    del della di da do dos das das el al los las il lo i gli der die das den dem von van zu zur
    ten ter af av ibn bin bint abu ben bat st st. saint san santa sir dame lord lady king queen
    emperor empress prince princess duke duchess count countess earl baron baroness baronet
    viscount viscountess marquess marquis margrave landgrave landgravine elector archduke
    archduchess grand infante infanta sultan sultana shah khan pasha bey tsar pope bishop
    archbishop cardinal jr jr. sr sr. dr. mr. mrs. miss elder younger university college school
    academy institute conservatory museum library company records pictures studios press
    corporation kingdom empire republic dynasty sultanate lake river mount mountain island
    airport station railway village county district city church abbey cathedral cemetery film
    song album magazine
    """.split()
)
ROMAN_NUMERALS = ("II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")
INITIALS = "ABCDEFGHJKLMNPRSTW"
ORDINALS = ("1st", "2nd", "3rd", *(f"{number}th" for number in range(4, 20)))
YEARS = tuple(str(year) for year in range(1900, 2020))
MAX_YEAR_SHIFT = 80
LAST_YEAR = 2020
# How often a word is drawn again while it already replaces another one.
WORD_DRAWS = 8
# How many countries are drawn at once. The first that replaces no other one is used.
COUNTRY_DRAWS = 20

# What is before the core of a word, the core, and what is after it.
_cover = re.compile(r"^(\W*)(.*?)((?:['’][sS])?\W*)$", re.DOTALL)
_initials = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_ordinal = re.compile(r"\d+(st|nd|rd|th)", re.IGNORECASE)
_pool_word = re.compile(r"[^\W\d_][\w'’-]+")
_months = re.compile("|".join(MONTHS), re.IGNORECASE)
_day = re.compile(r"(?<!\d)\d{1,2}(?=\s+[A-Za-z]|,)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A word of a label: its core, what is around it, and what is known about it.

    `is_fixed` says that renaming leaves the word as it is. `is_last` marks the family name.
    """

    word: str
    before: str
    core: str
    after: str
    is_fixed: bool
    is_number: bool
    is_last: bool


class NameParts:
    """The parts of new names: words, closed labels and facts of the training side.

    - `words`: by sort and place in the name, see `_pool_key`.
    - `closed`: the labels of each closed relation.
    - `facts`: triples by the sort of their subject, for distractors.
    - `references`: triples of works with a person, for distractors that point at a person.
    - `countries`: how often each form of a country stands in the triples, by (country, whether it
      is its people, label as written).
    - `country_labels`: the labels of (country, whether it is its people), and how often each stands
      there.
    - `country_names` and `country_weights`: all countries, and how often each stands there.
    """

    def __init__(self, triples: Iterable[Triple]) -> None:
        self.countries: Counter[tuple[str, bool, str]] = Counter()
        self.facts: dict[Sort, list[Triple]] = {}
        self.references: list[Triple] = []

        # Dictionaries stand for ordered sets here.
        words: dict[tuple[Sort, str], dict[str, None]] = {}
        closed_labels: dict[str, dict[str, None]] = {}
        for triple in triples:
            subject_sort = SORT_OF_SUBJECT.get(triple.relation, "other")
            object_sort = SORT_OF_OBJECT.get(triple.relation, "other")
            self.facts.setdefault(subject_sort, []).append(triple)
            if object_sort == "person" and subject_sort == "work":
                self.references.append(triple)
            _collect(words, triple.subject, subject_sort)
            if object_sort == "country":
                form = country_form(triple.object)
                if form in COUNTRY_FORMS:
                    self.countries[(*COUNTRY_FORMS[form], triple.object)] += 1
                else:
                    _collect(words, triple.object, "place")
            elif object_sort == "closed":
                closed_labels.setdefault(triple.relation, {})[triple.object] = None
            elif not triple.object_is_literal:
                _collect(words, triple.object, object_sort)
        self.words = {key: tuple(pool) for key, pool in words.items()}
        self.closed = {relation: tuple(labels) for relation, labels in closed_labels.items()}

        labels_of_country: dict[tuple[str, bool], list[str]] = {}
        counts_of_country: dict[tuple[str, bool], list[int]] = {}
        totals: Counter[str] = Counter()
        for (name, is_people, label), count in self.countries.items():
            labels_of_country.setdefault((name, is_people), []).append(label)
            counts_of_country.setdefault((name, is_people), []).append(count)
            totals[name] += count
        self.country_labels = {
            key: (tuple(labels), tuple(counts_of_country[key]))
            for key, labels in labels_of_country.items()
        }
        self.country_names = tuple(totals)
        self.country_weights = tuple(totals.values())

    def pool(self, piece: Piece, sort: Sort) -> tuple[str, ...]:
        """Return the words that can stand for the piece.

        They are of another sort where the training side has none of this one.
        """
        keys: tuple[tuple[Sort, str], ...] = (
            _pool_key(piece, sort),
            (sort, ""),
            ("work", ""),
            ("person", ""),
        )
        for key in keys:
            if key in self.words:
                return self.words[key]
        raise ValueError("new names need words, and the training triples have no label with one")


class Renamer:
    """The renaming of one copy.

    Every word, country and closed label has one replacement, and no two have the same.
    """

    def __init__(self, parts: NameParts, random: random.Random) -> None:
        self.parts = parts
        self.random = random
        self._replacements: dict[str, str] = {}
        self._used_replacements: set[str] = set()

    def label(self, label: str, sort: Sort, relation: str = "") -> str:
        """Return a new name of the same form.

        Labels of the sorts "closed" and "country" need their `relation`.
        """
        if sort == "closed":
            if relation in self.parts.closed:
                return self._replacement(f"{relation}: {label}", self.parts.closed[relation])
            sort = "organisation"
        if sort == "country":
            if country_form(label) in COUNTRY_FORMS:
                return self._country(label)
            sort = "place"

        new_words = []
        for piece in _pieces(label):
            new_words.append(piece.word if piece.is_fixed else self._word(piece, sort))
        return " ".join(new_words)

    def date(self, text: str, shift_years: int, *, move_day: bool) -> str:
        """Return the date moved by years, in the same written form.

        `move_day` draws day and month again, where the date ends in its year.
        """
        date = parse_date(text)
        if date is None:
            return text
        year = str(date[0])
        if text.startswith(year):
            head = ""
            tail = text.removeprefix(year)
        else:
            head, _, tail = text.rpartition(year)
        if move_day and not tail:
            head = _months.sub(lambda _: self.random.choice(MONTHS).capitalize(), head)
            head = _day.sub(lambda _: str(self.random.randint(1, 28)), head)
        return f"{head}{date[0] + shift_years}{tail}"

    def year_shift(self, years: Sequence[int], first: int) -> int:
        """Draw by how many years all dates of one entity move.

        They stay between the year `first` and the present.
        """
        min_shift = max(-MAX_YEAR_SHIFT, first - min(years))
        max_shift = min(MAX_YEAR_SHIFT, LAST_YEAR - max(years))
        return self.random.randint(min_shift, max_shift) if min_shift <= max_shift else 0

    def _word(self, piece: Piece, sort: Sort) -> str:
        """Return the word that replaces a piece, in the same capitals."""
        core = piece.core
        folded_core = core.casefold()
        if piece.is_number:
            new_core = self._number(core)
        elif _initials.fullmatch(core):
            letters = folded_core.split(".")
            new_letters = [self._replacement(f"initial {letter}", INITIALS) for letter in letters]
            new_core = core if sort == "work" else ".".join(new_letters)
        else:
            new_core = self._replacement(folded_core, self.parts.pool(piece, sort))
            if core.isupper():
                new_core = new_core.upper()
            elif core[0].isupper() and new_core[0].islower():
                new_core = new_core[0].upper() + new_core[1:]
        return piece.before + new_core + piece.after

    def _number(self, core: str) -> str:
        """Return the number that replaces a number of the same kind."""
        if core in ROMAN_NUMERALS:
            return self._replacement(core, ROMAN_NUMERALS)
        if _ordinal.fullmatch(core):
            return self._replacement(core.lower(), ORDINALS)
        if len(core) == 4 and "1000" <= core <= "2100":
            return self._replacement(core, YEARS)
        digits = [self.random.choice("123456789") for _ in core]
        return self._replacement(core, ["".join(digits)])

    def _country(self, label: str) -> str:
        """Return another country in the form of `label`: a name for a name, people for people."""
        name, is_people = COUNTRY_FORMS[country_form(label)]

        # One country replaces another one, in all forms.
        country_key = f"country {name}"
        if country_key not in self._replacements:
            new_name = self._unused_country() or name
            self._replacements[country_key] = new_name
            self._used_replacements.add(f"country {new_name}")

        # A label stands for a label, as often as the training side writes it.
        label_key = f"as {label}"
        if label_key not in self._replacements:
            new_name = self._replacements[country_key]
            if (new_name, is_people) in self.parts.country_labels:
                labels, weights = self.parts.country_labels[new_name, is_people]
            else:
                labels = (_plain_form(new_name, is_people),)
                weights = (1,)
            self._replacements[label_key] = self.random.choices(labels, weights)[0]
        return self._replacements[label_key]

    def _unused_country(self) -> str | None:
        """Draw some countries. Return the first that replaces none yet, or None."""
        candidates = self.random.choices(
            self.parts.country_names, self.parts.country_weights, k=COUNTRY_DRAWS
        )
        for name in candidates:
            if f"country {name}" not in self._used_replacements:
                return name
        return None

    def _replacement(self, key: str, pool: Sequence[str]) -> str:
        """Return the replacement for `key`, drawn from the pool on first use.

        It differs from the replacements of all other keys where that is possible.
        """
        if key in self._replacements:
            return self._replacements[key]
        replacement = self.random.choice(pool)
        for _ in range(WORD_DRAWS):
            if replacement.casefold() not in self._used_replacements:
                break
            replacement = self.random.choice(pool)
        self._replacements[key] = replacement
        self._used_replacements.add(replacement.casefold())
        return replacement


@functools.cache
def _pieces(label: str) -> tuple[Piece, ...]:
    """Return the words of a label as pieces."""
    words = label.split(" ")
    last_position = _last_word(words)
    pieces: list[Piece] = []
    is_in_parenthesis = False
    for position, word in enumerate(words):
        if word.startswith("("):
            is_in_parenthesis = True
        before, core, after = _cover.match(word).groups()  # pyright: ignore[reportOptionalMemberAccess]

        # Small words in a parenthesis describe the entity, as "film" does in "Taxi! (1932 film)".
        is_description = is_in_parenthesis and core[:1].islower()
        is_fixed = not core or core.casefold() in KEPT_WORDS or is_description
        # "Henry V" has a numeral, and "V. Rao" an initial.
        is_numeral = core in ROMAN_NUMERALS and not after.startswith(".")
        piece = Piece(
            word=word,
            before=before,
            core=core,
            after=after,
            is_fixed=is_fixed,
            is_number=is_numeral or core.isdecimal() or _ordinal.fullmatch(core) is not None,
            is_last=position == last_position,
        )
        pieces.append(piece)

        if word.rstrip(",.").endswith(")"):
            is_in_parenthesis = False
    return tuple(pieces)


def _last_word(words: Sequence[str]) -> int:
    """Return the position of the family name.

    That is the last word before a comma or parenthesis which is no numeral and no kept word.
    """
    last_position = 0
    for position, word in enumerate(words):
        if word.startswith("("):
            break
        core = word.strip(",")
        if core not in ROMAN_NUMERALS and core.casefold() not in KEPT_WORDS:
            last_position = position
        if word.endswith(","):
            break
    return last_position


def _pool_key(piece: Piece, sort: Sort) -> tuple[Sort, str]:
    """Return the key of the words that can stand for a piece.

    Its second part is "lower" for small words, "last" for family names, and else empty.
    """
    if piece.core[0].islower():
        return sort, "lower"
    if sort == "person" and piece.is_last:
        return sort, "last"
    return sort, ""


def _collect(words: dict[tuple[Sort, str], dict[str, None]], label: str, sort: Sort) -> None:
    """Add the words of a label to `words`, except fixed words and numbers."""
    for piece in _pieces(without_parenthesis(label)):
        if not piece.is_fixed and not piece.is_number and _pool_word.fullmatch(piece.core):
            words.setdefault(_pool_key(piece, sort), {})[piece.core] = None


def _plain_form(name: str, is_people: bool) -> str:
    """Return the first form in which the data write a country, or its people."""
    forms = [form for form, country in COUNTRY_FORMS.items() if country == (name, is_people)]
    return forms[0].title()
