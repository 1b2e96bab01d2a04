"""Renamed copies of gold chains, so that a model learns to copy names instead of memorising them.

A copy keeps a question's wording, relations and structure. Every entity of the question and of its
small graph gets a new name, put together from words of training-side names of the same sort
(people, works, places, organisations); a word is replaced by the same word everywhere in a copy, so
families keep a common surname and a title keeps its resemblance to its alias. Countries become
other countries in the same form ("American" -> "French", "Italy" -> "Peru"), one to one. Dates keep
their written form and each entity's dates move together by a number of years; answers are computed
again from the changed evidence. Distractor triples of relations that the entity did not have are
added, and the order of the triples is shuffled.
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
# Their objects are swapped as whole labels.
CLOSED_RELATIONS = frozenset({"cause of death", "award received", "occupation"})
_OBJECTS: dict[Sort, tuple[str, ...]] = {
    "country": tuple(COUNTRY_RELATIONS),
    "closed": tuple(CLOSED_RELATIONS),
    "place": ("place of birth", "place of death", "place of burial", "place of detention"),
    "organisation": ("educated at", "employer", "publisher"),
    "person": (
        "director", "father", "mother", "spouse", "sibling", "child", "performer", "composer", "producer", "editor",
        "presenter", "creator", "student of", "doctoral advisor", "founded by", "screenwriter",
    ),
}  # fmt: skip
_SUBJECTS: dict[Sort, tuple[str, ...]] = {
    "place": ("country",),
    "organisation": ("inception", "founded by"),
    "work": (
        "director", "publication date", "performer", "composer", "country of origin", "producer", "publisher", "editor",
        "presenter", "creator", "screenwriter",
    ),
    "person": (
        "date of birth", "date of death", "place of birth", "place of death", "place of burial", "place of detention",
        "father", "mother", "spouse", "sibling", "child", "educated at", "employer", "award received",
        "cause of death", "occupation", "country of citizenship", "student of", "doctoral advisor",
    ),
}  # fmt: skip
SORT_OF_OBJECT: dict[str, Sort] = {
    relation: sort for sort, relations in _OBJECTS.items() for relation in relations
}
SORT_OF_SUBJECT: dict[str, Sort] = {
    relation: sort for sort, relations in _SUBJECTS.items() for relation in relations
}

# Words that give a name its form and stay: articles and particles, ranks, kinds of institutions and
# places.
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

_cover = re.compile(r"^(\W*)(.*?)((?:['’][sS])?\W*)$", re.DOTALL)
_initials = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_ordinal = re.compile(r"\d+(st|nd|rd|th)", re.IGNORECASE)
_pool_word = re.compile(r"[^\W\d_][\w'’-]+")
_months = re.compile("|".join(MONTHS), re.IGNORECASE)
_day = re.compile(r"(?<!\d)\d{1,2}(?=\s+[A-Za-z]|,)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A word of a label: what is around its core, and what becomes of it."""

    word: str
    before: str
    core: str
    after: str
    kept: bool
    is_number: bool
    is_last: bool


class NameParts:
    """What new names are made of: the training side's words and closed labels, and its entities'
    relations."""

    def __init__(self, triples: Iterable[Triple]) -> None:
        words: dict[tuple[Sort, str], dict[str, None]] = {}
        closed: dict[str, dict[str, None]] = {}
        self.countries: Counter[tuple[str, bool, str]] = (
            Counter()
        )  # (country, whether its people, label as written)
        self.facts: dict[Sort, list[Triple]] = {}  # by the sort of their subject, for distractors
        self.references: list[Triple] = []  # works with a person, for distractors that point at one
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
                closed.setdefault(triple.relation, {})[triple.object] = None
            elif not triple.object_is_literal:
                _collect(words, triple.object, object_sort)
        self.words = {key: tuple(pool) for key, pool in words.items()}
        self.closed = {relation: tuple(labels) for relation, labels in closed.items()}
        by_country: dict[tuple[str, bool], list[tuple[str, int]]] = {}
        totals: Counter[str] = Counter()
        for (name, people, label), count in self.countries.items():
            by_country.setdefault((name, people), []).append((label, count))
            totals[name] += count
        self.country_labels = {
            key: tuple(zip(*labels, strict=True)) for key, labels in by_country.items()
        }
        self.country_names, self.country_weights = tuple(totals), tuple(totals.values())

    def pool(self, piece: Piece, sort: Sort) -> tuple[str, ...]:
        """Words that can stand for the piece; those of another sort where the training side has
        none of this one."""
        keys: tuple[tuple[Sort, str], ...] = (
            _pool(piece, sort),
            (sort, ""),
            ("work", ""),
            ("person", ""),
        )
        for key in keys:
            if key in self.words:
                return self.words[key]
        raise ValueError("new names need words, and the training triples have no label with one")


class Renamer:
    """One copy's renaming: every word, country and closed label has one replacement, and no two
    have the same."""

    def __init__(self, parts: NameParts, random: random.Random) -> None:
        self.parts, self.random = parts, random
        self._new: dict[str, str] = {}
        self._taken: set[str] = set()

    def label(self, label: str, sort: Sort, relation: str = "") -> str:
        """A new name of the same form; `relation` is needed for labels of the sorts "closed" and
        "country"."""
        if sort == "closed":
            if relation in self.parts.closed:
                return self._once(f"{relation}: {label}", self.parts.closed[relation])
            sort = "organisation"
        if sort == "country":
            if country_form(label) in COUNTRY_FORMS:
                return self._country(label)
            sort = "place"
        return " ".join(
            piece.word if piece.kept else self._word(piece, sort) for piece in _pieces(label)
        )

    def date(self, text: str, shift_years: int, *, move_day: bool) -> str:
        """The date moved by years, in the same written form. `move_day` draws day and month
        again."""
        date = parse_date(text)
        if date is None:
            return text
        year = str(date[0])
        head, _, tail = (
            text.rpartition(year) if not text.startswith(year) else ("", year, text[len(year) :])
        )
        if move_day and not tail:
            head = _months.sub(lambda _: self.random.choice(MONTHS).capitalize(), head)
            head = _day.sub(lambda _: str(self.random.randint(1, 28)), head)
        return f"{head}{date[0] + shift_years}{tail}"

    def year_shift(self, years: Sequence[int], first: int) -> int:
        """By how many years all dates of one entity move, so that they stay between `first` and the
        present."""
        low, high = (
            max(-MAX_YEAR_SHIFT, first - min(years)),
            min(MAX_YEAR_SHIFT, LAST_YEAR - max(years)),
        )
        return self.random.randint(low, high) if low <= high else 0

    def _word(self, piece: Piece, sort: Sort) -> str:
        core, lower = piece.core, piece.core.casefold()
        if piece.is_number:
            new = self._number(core)
        elif _initials.fullmatch(core):
            letters = [self._once(f"initial {letter}", INITIALS) for letter in lower.split(".")]
            new = core if sort == "work" else ".".join(letters)
        else:
            new = self._once(lower, self.parts.pool(piece, sort))
            if core.isupper():
                new = new.upper()
            elif core[0].isupper() and new[0].islower():
                new = new[0].upper() + new[1:]
        return piece.before + new + piece.after

    def _number(self, core: str) -> str:
        if core in ROMAN_NUMERALS:
            return self._once(core, ROMAN_NUMERALS)
        if _ordinal.fullmatch(core):
            return self._once(core.lower(), ORDINALS)
        if len(core) == 4 and "1000" <= core <= "2100":
            return self._once(core, YEARS)
        return self._once(core, ["".join(self.random.choice("123456789") for _ in core)])

    def _country(self, label: str) -> str:
        """Another country in the form of `label`: a name for a name, a people for a people."""
        name, people = COUNTRY_FORMS[country_form(label)]
        parts, random = self.parts, self.random
        if f"country {name}" not in self._new:
            candidates = random.choices(parts.country_names, parts.country_weights, k=20)
            drawn = next(
                (draw for draw in candidates if f"country {draw}" not in self._taken), name
            )
            self._new[f"country {name}"] = drawn
            self._taken.add(f"country {drawn}")
        if f"as {label}" not in self._new:
            drawn = self._new[f"country {name}"]
            labels, weights = parts.country_labels.get(
                (drawn, people), ((_plain_form(drawn, people),), (1,))
            )
            self._new[f"as {label}"] = random.choices(labels, weights)[0]
        return self._new[f"as {label}"]

    def _once(self, key: str, pool: Sequence[str]) -> str:
        """The replacement for `key`, drawn from the pool on first use, unlike every other key's
        where possible."""
        if key in self._new:
            return self._new[key]
        new = self.random.choice(pool)
        for _ in range(8):
            if new.casefold() not in self._taken:
                break
            new = self.random.choice(pool)
        self._new[key] = new
        self._taken.add(new.casefold())
        return new


@functools.cache
def _pieces(label: str) -> tuple[Piece, ...]:
    words = label.split(" ")
    last = _last_word(words)
    pieces, inside = [], False
    for position, word in enumerate(words):
        inside = inside or word.startswith("(")
        before, core, after = _cover.match(word).groups()  # pyright: ignore[reportOptionalMemberAccess]
        numeral = core in ROMAN_NUMERALS and not after.startswith(".")  # "Henry V" and not "V. Rao"
        pieces.append(
            Piece(
                word=word,
                before=before,
                core=core,
                after=after,
                kept=not core or core.casefold() in KEPT_WORDS or (inside and core[0].islower()),
                is_number=numeral or core.isdecimal() or _ordinal.fullmatch(core) is not None,
                is_last=position == last,
            )
        )
        inside = inside and not word.rstrip(",.").endswith(")")
    return tuple(pieces)


def _last_word(words: Sequence[str]) -> int:
    """Position of the family name: the last word before a comma or parenthesis, no numeral and no
    kept word."""
    last = 0
    for position, word in enumerate(words):
        if word.startswith("("):
            break
        core = word.strip(",")
        if core not in ROMAN_NUMERALS and core.casefold() not in KEPT_WORDS:
            last = position
        if word.endswith(","):
            break
    return last


def _pool(piece: Piece, sort: Sort) -> tuple[Sort, str]:
    if piece.core[0].islower():
        return sort, "lower"
    return sort, "last" if sort == "person" and piece.is_last else ""


def _collect(words: dict[tuple[Sort, str], dict[str, None]], label: str, sort: Sort) -> None:
    for piece in _pieces(without_parenthesis(label)):
        if not piece.kept and not piece.is_number and _pool_word.fullmatch(piece.core):
            words.setdefault(_pool(piece, sort), {})[piece.core] = None


def _plain_form(name: str, people: bool) -> str:
    return next(
        form
        for form, (of, is_people) in COUNTRY_FORMS.items()
        if of == name and is_people == people
    ).title()
