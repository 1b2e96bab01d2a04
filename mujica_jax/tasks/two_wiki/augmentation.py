"""Rename the entities of gold chains, so that a model learns to copy names, not to memorise them.

A renamed copy keeps the wording, the relations and the structure of a question. The rest changes:

- Every entity of the question and of its small graph gets a new name. The words of the new name are
  taken from training-side names of the same sort: people, works, places or organisations. In one
  copy, a word is always replaced by the same word. So families keep a common surname, and a title
  still resembles its alias.
- Countries become other countries in the same form ("American" -> "French", "Italy" -> "Peru").
  Different countries become different countries.
- Dates keep their written form. All dates of an entity move by the same number of years.
- Answers are computed anew from the changed evidence.
- Distractor triples are added, with relations that the entity did not have. All triples are then
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

# The sorts of entities and labels. "closed" are the objects of CLOSED_RELATIONS.
Sort = Literal["person", "work", "place", "organisation", "country", "closed", "other"]

COUNTRY_RELATIONS = frozenset({"country", "country of citizenship", "country of origin"})
# The objects of these relations are replaced as whole labels.
CLOSED_RELATIONS = frozenset({"cause of death", "award received", "occupation"})
# The relations that tell the sort of their object.
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
# The relations that tell the sort of their subject.
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

# Words that stay in a renamed name, because they give it its form: articles and particles, ranks,
# kinds of institutions and places.
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
# Replacements for years in names.
YEARS = tuple(str(year) for year in range(1900, 2020))
# Dates move by at most this number of years.
MAX_YEAR_SHIFT = 80
# Dates do not move beyond this year.
LAST_YEAR = 2020
# Maximum number of times a word is drawn again because it already replaces another word.
WORD_DRAWS = 8
# Number of countries that are drawn at once. The first that replaces no other country is used.
COUNTRY_DRAWS = 20

# The characters before the core of a word, the core, and the characters after it.
_cover = re.compile(r"^(\W*)(.*?)((?:['’][sS])?\W*)$", re.DOTALL)
_initials = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_ordinal = re.compile(r"\d+(st|nd|rd|th)", re.IGNORECASE)
_pool_word = re.compile(r"[^\W\d_][\w'’-]+")
_months = re.compile("|".join(MONTHS), re.IGNORECASE)
_day = re.compile(r"(?<!\d)\d{1,2}(?=\s+[A-Za-z]|,)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A word of a label, divided into its core and the characters around it."""

    word: str
    # Punctuation before the core.
    before: str
    core: str
    # Punctuation and "'s" after the core.
    after: str
    # Whether renaming leaves the word as it is.
    is_fixed: bool
    # Whether the core is a number, an ordinal or a Roman numeral.
    is_number: bool
    # Whether the word is at the position of the family name.
    is_last: bool


class NameParts:
    """The material of new names: words, closed labels and facts from training triples.

    - `words`: words by sort and by position in the name, see `_pool_key`.
    - `closed`: the labels of each closed relation.
    - `facts`: triples by the sort of their subject, for distractors.
    - `references`: triples from a work to a person, for distractors that point at a person.
    - `countries`: the number of times that each form of a country occurs in the triples. The key is
      (country, whether the form names its people, label as written).
    - `country_labels`: the labels of (country, whether they name its people), and the number of
      times that each of them occurs.
    - `country_names` and `country_weights`: all countries, and the number of times that each of
      them occurs.
    """

    def __init__(self, triples: Iterable[Triple]) -> None:
        self.countries: Counter[tuple[str, bool, str]] = Counter()
        self.facts: dict[Sort, list[Triple]] = {}
        self.references: list[Triple] = []

        # The inner dictionaries are used as ordered sets.
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
        """Return the words that can replace the piece.

        They are of another sort if the training triples have no words of this sort. Raises
        ValueError if they have no words at all.
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
        raise ValueError("new names need words, but no label of the training triples has a word")


class Renamer:
    """The renaming of one copy.

    Every word, country and closed label has one replacement. As far as possible, no two of them
    have the same replacement.
    """

    def __init__(self, parts: NameParts, random: random.Random) -> None:
        self.parts = parts
        self.random = random
        self._replacements: dict[str, str] = {}
        self._used_replacements: set[str] = set()

    def label(self, label: str, sort: Sort, relation: str = "") -> str:
        """Return a new name in the form of this label.

        A label of the sort "closed" needs its `relation`.
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
        """Return the date moved by a number of years, in the same written form.

        With `move_day`, day and month are drawn anew if the date ends with its year. A text that is
        no date is returned unchanged.
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
        """Draw the number of years by which all dates of one entity move.

        The moved years are between `first` and LAST_YEAR. The result is 0 if that is not possible.
        """
        min_shift = max(-MAX_YEAR_SHIFT, first - min(years))
        max_shift = min(MAX_YEAR_SHIFT, LAST_YEAR - max(years))
        return self.random.randint(min_shift, max_shift) if min_shift <= max_shift else 0

    def _word(self, piece: Piece, sort: Sort) -> str:
        """Return the word that replaces a piece, with the same capitalisation."""
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
        """Return the replacement for a number. It is a number of the same kind."""
        if core in ROMAN_NUMERALS:
            return self._replacement(core, ROMAN_NUMERALS)
        if _ordinal.fullmatch(core):
            return self._replacement(core.lower(), ORDINALS)
        if len(core) == 4 and "1000" <= core <= "2100":
            return self._replacement(core, YEARS)
        digits = [self.random.choice("123456789") for _ in core]
        return self._replacement(core, ["".join(digits)])

    def _country(self, label: str) -> str:
        """Return another country in the form of `label`.

        The name of a country becomes a name, and the name of its people the name of people.
        """
        name, is_people = COUNTRY_FORMS[country_form(label)]

        # All forms of a country are replaced by the same other country.
        country_key = f"country {name}"
        if country_key not in self._replacements:
            new_name = self._unused_country() or name
            self._replacements[country_key] = new_name
            self._used_replacements.add(f"country {new_name}")

        # Each label is replaced by one label of the new country. Labels that occur more often in
        # the training triples are drawn more often.
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
        """Draw countries, and return the first that replaces no other country, or None."""
        candidates = self.random.choices(
            self.parts.country_names, self.parts.country_weights, k=COUNTRY_DRAWS
        )
        for name in candidates:
            if f"country {name}" not in self._used_replacements:
                return name
        return None

    def _replacement(self, key: str, pool: Sequence[str]) -> str:
        """Return the replacement of `key`. It is drawn from the pool on first use.

        As far as possible, it differs from the replacements of all other keys.
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

    It is the last word before a comma or parenthesis that is no Roman numeral and no kept word.
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
    """Return the key in `NameParts.words` of the words that can replace a piece.

    The second part of the key is "lower" for words in lower case and "last" for family names.
    Otherwise it is empty.
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
    """Return the first known form of a country's name, or of the name of its people."""
    forms = [form for form, country in COUNTRY_FORMS.items() if country == (name, is_people)]
    return forms[0].title()
