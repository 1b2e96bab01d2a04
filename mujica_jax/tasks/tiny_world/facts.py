"""One part of the tiny world: countries, cities, five generations of people, their films, and the
facts that each of them carries.

Everything is drawn from generators seeded with the world's seed and the part's name, one a purpose:
leaving facts out of the graph changes no name, and a longer training side changes no test entity.
"""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.tasks.tiny_world import names
from mujica_jax.tasks.tiny_world.questions import CREW, date_text

Value = int | str  # number of an entity, or a literal

GENERATIONS = 5
FIRST_BIRTH_YEAR = 1800
GENERATION_YEARS = 35  # with births spread over BIRTH_SPREAD_YEARS, parents are 21 to 49 years old
BIRTH_SPREAD_YEARS = 15
LIFE_YEARS = (51, 95)  # everyone lives until the last child is born
PRESENT_YEAR = 2020  # who would die later is alive
FIRST_FILM_GENERATION = 2  # born from 1870 on
FIRST_FILM_YEAR = 1900
WORKING_AGE = (22, 65)
SHARE_WITH_PARENTS = 0.7
SHARE_MARRIED = 0.85

# Fewest: every word of the pools is drawn. Most: the part still owns free names.
PEOPLE_LIMITS: dict[names.Part, tuple[int, int]] = {
    "train": (1600, 2000),
    "demonstration": (1000, 1050),
    "dev": (600, 600),
    "test": (600, 600),
}
PEOPLE_PER_QUESTION = 0.6
FILMS_PER_PERSON = 0.6
CITIES: dict[names.Part, int] = {"train": 120, "demonstration": 80, "dev": 60, "test": 60}
COUNTRIES: dict[names.Part, int] = {"train": 40, "demonstration": 24, "dev": 20, "test": 20}

MOVED_YEARS = (-20, 20)  # how far a renamed copy moves its years
INCEPTION_YEARS = (1800, 1849)  # of countries, cities and institutions
MIN_FACTS = 2
KNOWN_ENTITIES = 0.25  # share, where questions ask for common knowledge
PERSON_WEIGHTS = {  # how eagerly a person's limited room goes to a fact
    "date of birth": 8.0,
    "father": 8.0,
    "mother": 6.0,
    "place of birth": 4.0,
    "country of citizenship": 4.0,
    "date of death": 4.0,
    "spouse": 3.0,
    "place of death": 2.0,
    "educated at": 1.0,
    "employer": 1.0,
    "place of burial": 1.0,
    "sibling": 1.0,
    "occupation": 1.0,
}
FILM_WEIGHTS = {
    "director": 1000.0,
    "publication date": 5.0,
    "country of origin": 4.0,
    "composer": 2.0,
    "producer": 2.0,
    "screenwriter": 1.0,
    "cast member": 1.0,
    "filming location": 1.0,
    "genre": 1.0,
}


class WorldPart:
    """Entities by number, with `facts[number]` = {relation: number of an entity, or literal}.

    `inverse` turns the facts round. Those in `hidden` are true, and asked about, and not in the
    graph. A `copy` after the original, which is 0, has the same facts between entities of other
    names, all years moved by the same number.
    """

    def __init__(
        self, part: names.Part, config: TinyWorldConfig, questions: int, copy: int = 0
    ) -> None:
        self.part: names.Part = part
        self.copy = copy
        self.labels: list[str] = []
        self.kinds: list[str] = []
        self.facts: list[dict[str, Value]] = []
        self._config = config
        self._random = self._generator("facts")
        self._naming = self._generator(f"names {copy}" if copy else "names")
        # Copies are for learning only, so the names of the train part are free for them.
        self._owned = names.SHARES[part] if copy == 0 else names.LEARNING_SHARES
        self._moved_years = self._naming.randint(*MOVED_YEARS) if copy else 0
        countries = self._add_countries()
        cities = self._add_cities(countries)
        people = self._add_people(_people_count(part, questions), cities)
        self._add_films(people, cities)
        self._limit_facts()
        self.inverse = self._inverse_facts()
        self.hidden = self._hidden_facts()
        self._known = self._known_entities()

    def knows(self, topics: Sequence[int], chains: Sequence[Sequence[Value]]) -> bool:
        """Whether all entities on the way from these topics to the ends of their chains are common
        knowledge."""
        paths = zip(topics, chains, strict=True)
        return all(
            subject in self._known for topic, chain in paths for subject in (topic, *chain[:-1])
        )

    def _generator(self, purpose: str) -> random.Random:
        return random.Random(f"{self._config.seed} {self.part} {purpose}")

    def _deck(self, pool: Sequence[str]) -> names.Deck:
        return names.Deck(len(pool), self._naming)

    def _add(self, kind: str, label: str, facts: Mapping[str, Value] | None = None) -> int:
        self.labels.append(label)
        self.kinds.append(kind)
        self.facts.append(dict(facts or {}))
        return len(self.labels) - 1

    def _borrows(self) -> bool:
        """Drawn once an entity, from the stream of names, for any share."""
        return self._naming.random() < self._config.distractor_names

    def _date(self, first_year: int, last_year: int) -> str:
        draw = self._random
        year = draw.randint(first_year, last_year) + self._moved_years
        return date_text(year, draw.randint(1, 12), draw.randint(1, 28))

    def _add_countries(self) -> list[int]:
        pairs = names.PairNamer(
            self._deck(names.COUNTRY_STARTS), self._deck(names.COUNTRY_STEMS), self._owned
        )
        countries = []
        for _ in range(COUNTRIES[self.part]):
            label = names.join(names.COUNTRY_STARTS, names.COUNTRY_STEMS, pairs.pair())
            countries.append(
                self._add("country", label, {"inception": self._date(*INCEPTION_YEARS)})
            )
        return countries

    def _add_cities(self, countries: list[int]) -> list[int]:
        """Cities, each with a university and an employer; the first city of a country is its
        capital."""
        pairs = names.PairNamer(
            self._deck(names.CITY_STARTS), self._deck(names.CITY_STEMS), self._owned
        )
        cities = []
        for place in range(CITIES[self.part]):
            country = countries[place % len(countries)]
            label = names.join(names.CITY_STARTS, names.CITY_STEMS, pairs.pair())
            city = self._add(
                "city", label, {"country": country, "inception": self._date(*INCEPTION_YEARS)}
            )
            self.facts[country].setdefault("capital", city)
            for kind, relation, endings in (
                ("university", "university", names.UNIVERSITY_ENDINGS),
                ("company", "largest employer", names.EMPLOYER_ENDINGS),
            ):
                institution = label + self._naming.choice(endings)
                facts = {"location": city, "inception": self._date(*INCEPTION_YEARS)}
                self.facts[city][relation] = self._add(kind, institution, facts)
            cities.append(city)
        return cities

    def _add_people(self, count: int, cities: list[int]) -> list[list["_Person"]]:
        """Generations, oldest first. Most people have a couple of the previous generation as
        parents."""
        firsts = {True: names.MALE_NAMES, False: names.FEMALE_NAMES}
        lasts = self._deck(names.LAST_NAMES)
        pairs = {
            male: names.PairNamer(self._deck(pool), lasts, self._owned)
            for male, pool in firsts.items()
        }
        generations: list[list[_Person]] = []
        couples: list[tuple[_Person, _Person]] = []
        lender: int | None = None  # last name of the newcomer before, which the next one may borrow
        for generation in range(GENERATIONS):
            people = []
            for _ in range(count // GENERATIONS):
                born_here = couples and self._random.random() < SHARE_WITH_PARENTS
                parents = self._random.choice(couples) if born_here else None
                male = self._random.random() < 0.5
                offered = parents[0].last if parents else lender
                borrowed = offered if self._borrows() else None
                first, last = pairs[male].pair(second=borrowed)
                if not parents:
                    lender = last if borrowed is None else None
                number = self._add("person", f"{firsts[male][first]} {names.LAST_NAMES[last]}")
                birth_year = FIRST_BIRTH_YEAR + GENERATION_YEARS * generation
                birth_year += self._random.randrange(BIRTH_SPREAD_YEARS)
                death_year = birth_year + self._random.randint(*LIFE_YEARS)
                person = _Person(
                    number=number,
                    male=male,
                    last=last,
                    birth_year=birth_year,
                    death_year=death_year,
                )
                self._describe_person(person, parents, cities)
                people.append(person)
            couples = self._marry(people)
            generations.append(people)
        return generations

    def _describe_person(
        self, person: "_Person", parents: "tuple[_Person, _Person] | None", cities: list[int]
    ) -> None:
        choice = self._random.choice
        facts = self.facts[person.number]
        home, work, grave = choice(cities), choice(cities), choice(cities)
        person.country = self.facts[home if self._random.random() < 0.8 else work]["country"]
        facts["date of birth"] = self._date(person.birth_year, person.birth_year)
        facts["place of birth"] = home
        facts["country of citizenship"] = person.country
        facts["educated at"] = self.facts[home if self._random.random() < 0.5 else work][
            "university"
        ]
        facts["employer"] = self.facts[work]["largest employer"]
        facts["occupation"] = choice(names.OCCUPATIONS)
        if person.death_year <= PRESENT_YEAR:
            facts["date of death"] = self._date(person.death_year, person.death_year)
            facts["place of death"] = grave if self._random.random() < 0.7 else choice(cities)
            facts["place of burial"] = grave
        if parents:
            father, mother = parents
            facts["father"], facts["mother"] = father.number, mother.number
            if father.last_child is not None:
                facts["sibling"] = father.last_child
            father.last_child = person.number

    def _marry(self, people: "list[_Person]") -> "list[tuple[_Person, _Person]]":
        men, women = [p for p in people if p.male], [p for p in people if not p.male]
        self._random.shuffle(men)
        self._random.shuffle(women)
        couples = []
        for man, woman in zip(men, women, strict=False):  # those left over stay single
            fathers = [self.facts[person.number].get("father") for person in (man, woman)]
            siblings = fathers[0] is not None and fathers[0] == fathers[1]
            if self._random.random() < SHARE_MARRIED and not siblings:
                self.facts[man.number]["spouse"], self.facts[woman.number]["spouse"] = (
                    woman.number,
                    man.number,
                )
                couples.append((man, woman))
        return couples

    def _add_films(self, generations: "list[list[_Person]]", cities: list[int]) -> None:
        pairs = names.PairNamer(self._deck(names.ADJECTIVES), self._deck(names.NOUNS), self._owned)
        crews = generations[FIRST_FILM_GENERATION:]
        lender: tuple[int, int] | None = None
        for _ in range(int(FILMS_PER_PERSON * sum(map(len, generations)))):
            crew = self._random.choice(crews)
            director = self._random.choice(crew)
            first_year = max(FIRST_FILM_YEAR, director.birth_year + WORKING_AGE[0])
            last_year = min(
                director.birth_year + WORKING_AGE[1], director.death_year - 1, PRESENT_YEAR
            )
            borrowed = lender if self._borrows() else None
            if borrowed is None:
                lender = pair = pairs.pair()
            else:
                adjective, noun = borrowed
                pair = (
                    pairs.pair(second=noun)
                    if self._naming.random() < 0.5
                    else pairs.pair(first=adjective)
                )
                lender = None
            title = (
                f"{self._naming.choice(names.TITLE_STARTS)}{names.ADJECTIVES[pair[0]]} "
                f"{names.NOUNS[pair[1]]}"
            )
            shooting = self._random.choice(cities)
            colleagues = [p.number for p in self._random.sample(crew, 4)]
            published = self._date(first_year, last_year)
            origin = (
                self.facts[shooting]["country"] if self._random.random() < 0.4 else director.country
            )
            facts: dict[str, Value] = {
                "director": director.number,
                "publication date": published,
                "country of origin": origin,
                "filming location": shooting,
                "genre": self._random.choice(names.GENRES),
            }
            roles = (*(role for role in CREW if role != "director"), "cast member")
            facts.update(zip(roles, colleagues, strict=True))
            self._add("film", title, facts)

    def _limit_facts(self) -> None:
        """People and films keep MIN_FACTS to `facts_per_entity` of their facts; the rest is
        dropped."""
        draw = self._generator("room").random
        most = self._config.facts_per_entity
        for number, kind in enumerate(self.kinds):
            if kind not in ("person", "film"):
                continue
            weights = PERSON_WEIGHTS if kind == "person" else FILM_WEIGHTS
            facts = self.facts[number]
            room = MIN_FACTS + int(draw() * (most + 1 - MIN_FACTS))
            # Weighted sampling without replacement (Efraimidis and Spirakis, 2006): the largest
            # u^(1/weight) are kept.
            kept = sorted(
                ((draw() ** (1 / weights[relation]), relation) for relation in facts), reverse=True
            )[:room]
            self.facts[number] = {relation: facts[relation] for _, relation in kept}

    def _inverse_facts(self) -> dict[int, list[tuple[int, str]]]:
        """Object -> (subject, relation), for objects that are entities."""
        inverse: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for subject, facts in enumerate(self.facts):
            for relation, value in facts.items():
                if isinstance(value, int):
                    inverse[value].append((subject, relation))
        return inverse

    def _hidden_facts(self) -> frozenset[tuple[int, str]]:
        draw, share = self._generator("missing").random, self._config.missing_facts
        everything = (
            (number, relation) for number, facts in enumerate(self.facts) for relation in facts
        )
        return frozenset(fact for fact in everything if draw() < share)

    def _known_entities(self) -> frozenset[int]:
        """Empty for renamed copies. Few, so that each fact is read often."""
        if self.copy or not self._config.common_knowledge:
            return frozenset()
        draw = self._generator("common").random
        return frozenset(number for number in range(len(self.labels)) if draw() < KNOWN_ENTITIES)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Person:
    """What later generations and films need to know about someone."""

    number: int
    male: bool
    last: int
    birth_year: int
    death_year: int
    country: Value = ""
    last_child: int | None = None


def _people_count(part: names.Part, questions: int) -> int:
    """Grows in doublings, so that asking for a few more questions leaves the first ones as they
    were."""
    fewest, most = PEOPLE_LIMITS[part]
    doubled = 1 << (questions - 1).bit_length()
    return min(most, max(fewest, int(PEOPLE_PER_QUESTION * doubled)))
