"""Generate one part of the tiny world: its entities and their facts.

The entities are countries, cities with a university and a company, five generations of people, and
their films. Each purpose has its own random generator, which is seeded with the world's seed and
the part's name. So leaving facts out of the graph changes no name, and more training questions
change no test entity.
"""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.tasks.tiny_world import names
from mujica_jax.tasks.tiny_world.questions import CREW, date_text

# The number of an entity, or a literal.
Value = int | str

GENERATIONS = 5
FIRST_BIRTH_YEAR = 1800
# Years between two generations. The births of a generation are spread over BIRTH_SPREAD_YEARS, so
# parents are 21 to 49 years old.
GENERATION_YEARS = 35
BIRTH_SPREAD_YEARS = 15
# Shortest and longest life in years. Everyone lives until the last child is born.
LIFE_YEARS = (51, 95)
# A person who would die later than this is alive.
PRESENT_YEAR = 2020
# The first generation that makes films, counted from 0. It is born from 1870 on.
FIRST_FILM_GENERATION = 2
FIRST_FILM_YEAR = 1900
# First and last age at which a person directs films.
WORKING_AGE = (22, 65)
# The probability that a person has parents in the world, once there are couples.
SHARE_WITH_PARENTS = 0.7
# The probability that a possible couple marries.
SHARE_MARRIED = 0.85

# Minimum and maximum number of people in a part. With the minimum, every word of the pools is
# drawn. With the maximum, the part still has free names.
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

# Range of years by which a renamed copy moves all its years.
MOVED_YEARS = (-20, 20)
# Countries, cities and institutions were founded between these years.
INCEPTION_YEARS = (1800, 1849)
# The smallest number of facts to which a person or film is limited.
MIN_FACTS = 2
# The share of entities that are common knowledge, if `common_knowledge` is above 0.
KNOWN_ENTITIES = 0.25
# Weights of the facts of a person and of a film. Each keeps a limited number of facts. Facts with a
# larger weight are kept more often.
PERSON_WEIGHTS = {
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
    """A part of the tiny world. Its entities are numbered from 0.

    - `labels[number]` and `kinds[number]`: the name of an entity, and its kind, such as "person".
    - `facts[number]`: the facts of an entity as {relation: number of an entity, or literal}.
    - `inverse[number]`: the facts with this entity as their object, as (subject, relation).
    - `hidden`: facts, as (subject, relation), that are true and asked about, but that the graph
      lacks.

    Copy 0 is the original. Another `copy` has the same facts between entities with other names. All
    its years are moved by the same number.
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
        # Copies are only used for learning, so they may also use the names of the train part.
        self._owned = names.SHARES[part] if copy == 0 else names.LEARNING_SHARES
        self._moved_years = self._naming.randint(*MOVED_YEARS) if copy else 0

        countries = self._add_countries()
        cities = self._add_cities(countries)
        people = self._add_people(_people_count(part, questions), cities)
        self._add_films(people, cities)
        self._limit_facts()
        self.inverse = self._inverse_facts()
        self.hidden = self._hidden_facts()
        self._known_numbers = self._known_entities()

    def knows(self, topics: Sequence[int], chains: Sequence[Sequence[Value]]) -> bool:
        """Return whether all facts of these chains are about entities of common knowledge."""
        for topic, chain in zip(topics, chains, strict=True):
            subjects = (topic, *chain[:-1])
            if not all(subject in self._known_numbers for subject in subjects):
                return False
        return True

    def _generator(self, purpose: str) -> random.Random:
        """Return the random generator of this part for a purpose."""
        return random.Random(f"{self._config.seed} {self.part} {purpose}")

    def _deck(self, pool: Sequence[str]) -> names.Deck:
        """Return a deck of the words of a pool."""
        return names.Deck(len(pool), self._naming)

    def _add(self, kind: str, label: str, facts: Mapping[str, Value] | None = None) -> int:
        """Add an entity, and return its number."""
        self.labels.append(label)
        self.kinds.append(kind)
        self.facts.append(dict(facts or {}))
        return len(self.labels) - 1

    def _draw_whether_borrowed(self) -> bool:
        """Draw whether the next entity borrows a part of its name.

        There is one draw for each entity, even if the share is 0 or 1. So later names do not depend
        on the share.
        """
        return self._naming.random() < self._config.distractor_names

    def _date(self, first_year: int, last_year: int) -> str:
        """Draw a date between two years, and return it as a text."""
        year = self._random.randint(first_year, last_year) + self._moved_years
        month = self._random.randint(1, 12)
        day = self._random.randint(1, 28)
        return date_text(year, month, day)

    def _add_countries(self) -> list[int]:
        """Add countries, and return their numbers."""
        pairs = names.PairNamer(
            self._deck(names.COUNTRY_STARTS), self._deck(names.COUNTRY_STEMS), self._owned
        )
        countries = []
        for _ in range(COUNTRIES[self.part]):
            label = names.join(names.COUNTRY_STARTS, names.COUNTRY_STEMS, pairs.pair())
            facts = {"inception": self._date(*INCEPTION_YEARS)}
            countries.append(self._add("country", label, facts))
        return countries

    def _add_cities(self, countries: list[int]) -> list[int]:
        """Add cities, each with a university and an employer, and return their numbers.

        The first city of a country is its capital.
        """
        pairs = names.PairNamer(
            self._deck(names.CITY_STARTS), self._deck(names.CITY_STEMS), self._owned
        )
        cities = []
        for position in range(CITIES[self.part]):
            country = countries[position % len(countries)]
            label = names.join(names.CITY_STARTS, names.CITY_STEMS, pairs.pair())
            facts = {"country": country, "inception": self._date(*INCEPTION_YEARS)}
            city = self._add("city", label, facts)
            self.facts[country].setdefault("capital", city)
            self.facts[city]["university"] = self._add_institution(
                "university", city, names.UNIVERSITY_ENDINGS
            )
            self.facts[city]["largest employer"] = self._add_institution(
                "company", city, names.EMPLOYER_ENDINGS
            )
            cities.append(city)
        return cities

    def _add_institution(self, kind: str, city: int, endings: Sequence[str]) -> int:
        """Add an institution named after its city, and return its number."""
        label = self.labels[city] + self._naming.choice(endings)
        facts = {"location": city, "inception": self._date(*INCEPTION_YEARS)}
        return self._add(kind, label, facts)

    def _add_people(self, count: int, cities: list[int]) -> list[list["_Person"]]:
        """Add people, and return them by generation, the oldest generation first.

        The parents of most people are a couple of the previous generation.
        """
        last_names = self._deck(names.LAST_NAMES)
        male_pairs = names.PairNamer(self._deck(names.MALE_NAMES), last_names, self._owned)
        female_pairs = names.PairNamer(self._deck(names.FEMALE_NAMES), last_names, self._owned)

        generations: list[list[_Person]] = []
        couples: list[tuple[_Person, _Person]] = []
        # The last name of the previous person without parents. The next person without parents may
        # borrow it.
        newcomer_last: int | None = None
        for generation in range(GENERATIONS):
            people = []
            for _ in range(count // GENERATIONS):
                # Draw parents and sex.
                has_parents = bool(couples) and self._random.random() < SHARE_WITH_PARENTS
                parents = self._random.choice(couples) if has_parents else None
                is_male = self._random.random() < 0.5

                # Draw a name. The last name may be borrowed from the father. A person without
                # parents may borrow it from the previous person without parents.
                offered_last = newcomer_last if parents is None else parents[0].last
                borrowed_last = offered_last if self._draw_whether_borrowed() else None
                if is_male:
                    first, last = male_pairs.pair(second=borrowed_last)
                    first_name = names.MALE_NAMES[first]
                else:
                    first, last = female_pairs.pair(second=borrowed_last)
                    first_name = names.FEMALE_NAMES[first]
                if parents is None:
                    newcomer_last = last if borrowed_last is None else None
                number = self._add("person", f"{first_name} {names.LAST_NAMES[last]}")

                # Draw the years of birth and death, then the facts.
                birth_year = FIRST_BIRTH_YEAR + GENERATION_YEARS * generation
                birth_year += self._random.randrange(BIRTH_SPREAD_YEARS)
                death_year = birth_year + self._random.randint(*LIFE_YEARS)
                person = _Person(
                    number=number,
                    is_male=is_male,
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
        """Draw the facts of a person."""
        facts = self.facts[person.number]
        home_city = self._random.choice(cities)
        work_city = self._random.choice(cities)
        burial_city = self._random.choice(cities)

        citizen_city = home_city if self._random.random() < 0.8 else work_city
        person.country = self.facts[citizen_city]["country"]
        facts["date of birth"] = self._date(person.birth_year, person.birth_year)
        facts["place of birth"] = home_city
        facts["country of citizenship"] = person.country
        study_city = home_city if self._random.random() < 0.5 else work_city
        facts["educated at"] = self.facts[study_city]["university"]
        facts["employer"] = self.facts[work_city]["largest employer"]
        facts["occupation"] = self._random.choice(names.OCCUPATIONS)

        if person.death_year <= PRESENT_YEAR:
            facts["date of death"] = self._date(person.death_year, person.death_year)
            if self._random.random() < 0.7:
                facts["place of death"] = burial_city
            else:
                facts["place of death"] = self._random.choice(cities)
            facts["place of burial"] = burial_city

        if parents is not None:
            father, mother = parents
            facts["father"] = father.number
            facts["mother"] = mother.number
            if father.last_child is not None:
                facts["sibling"] = father.last_child
            father.last_child = person.number

    def _marry(self, people: "list[_Person]") -> "list[tuple[_Person, _Person]]":
        """Draw the couples of a generation, and add their facts. Siblings do not marry."""
        men = [person for person in people if person.is_male]
        women = [person for person in people if not person.is_male]
        self._random.shuffle(men)
        self._random.shuffle(women)

        couples = []
        # Some people of the larger group stay single.
        for man, woman in zip(men, women, strict=False):
            father_of_man = self.facts[man.number].get("father")
            father_of_woman = self.facts[woman.number].get("father")
            are_siblings = father_of_man is not None and father_of_man == father_of_woman
            if self._random.random() < SHARE_MARRIED and not are_siblings:
                self.facts[man.number]["spouse"] = woman.number
                self.facts[woman.number]["spouse"] = man.number
                couples.append((man, woman))
        return couples

    def _add_films(self, generations: "list[list[_Person]]", cities: list[int]) -> None:
        """Add films. Their crews are people of one generation."""
        pairs = names.PairNamer(self._deck(names.ADJECTIVES), self._deck(names.NOUNS), self._owned)
        crews = generations[FIRST_FILM_GENERATION:]
        roles = [role for role in CREW if role != "director"]
        roles.append("cast member")
        people_count = sum(len(people) for people in generations)

        # The title of the previous film, as positions in ADJECTIVES and NOUNS. The next film may
        # borrow a word of it.
        lent_pair: tuple[int, int] | None = None
        for _ in range(int(FILMS_PER_PERSON * people_count)):
            crew = self._random.choice(crews)
            director = self._random.choice(crew)

            # Draw a title.
            borrowed_pair = lent_pair if self._draw_whether_borrowed() else None
            if borrowed_pair is None:
                pair = pairs.pair()
                lent_pair = pair
            else:
                adjective, noun = borrowed_pair
                if self._naming.random() < 0.5:
                    pair = pairs.pair(second=noun)
                else:
                    pair = pairs.pair(first=adjective)
                lent_pair = None
            title_start = self._naming.choice(names.TITLE_STARTS)
            title = f"{title_start}{names.ADJECTIVES[pair[0]]} {names.NOUNS[pair[1]]}"

            # Draw the facts.
            filming_city = self._random.choice(cities)
            colleagues = self._random.sample(crew, len(roles))
            first_year = max(FIRST_FILM_YEAR, director.birth_year + WORKING_AGE[0])
            last_year = min(
                director.birth_year + WORKING_AGE[1], director.death_year - 1, PRESENT_YEAR
            )
            publication_date = self._date(first_year, last_year)
            if self._random.random() < 0.4:
                country_of_origin = self.facts[filming_city]["country"]
            else:
                country_of_origin = director.country
            facts: dict[str, Value] = {
                "director": director.number,
                "publication date": publication_date,
                "country of origin": country_of_origin,
                "filming location": filming_city,
                "genre": self._random.choice(names.GENRES),
            }
            for role, colleague in zip(roles, colleagues, strict=True):
                facts[role] = colleague.number
            self._add("film", title, facts)

    def _limit_facts(self) -> None:
        """Remove facts of people and films, so that at most `facts_per_entity` remain of each.

        The limit of each entity is drawn from MIN_FACTS to `facts_per_entity`.
        """
        draw = self._generator("room")
        possible_counts = self._config.facts_per_entity + 1 - MIN_FACTS
        for number, kind in enumerate(self.kinds):
            if kind not in ("person", "film"):
                continue
            weights = PERSON_WEIGHTS if kind == "person" else FILM_WEIGHTS
            facts = self.facts[number]
            max_facts = MIN_FACTS + int(draw.random() * possible_counts)

            # Weighted sampling without replacement (Efraimidis and Spirakis, 2006): keep the facts
            # with the largest u^(1/weight), where u is uniform.
            scores = [(draw.random() ** (1 / weights[relation]), relation) for relation in facts]
            scores.sort(reverse=True)
            self.facts[number] = {relation: facts[relation] for _, relation in scores[:max_facts]}

    def _inverse_facts(self) -> dict[int, list[tuple[int, str]]]:
        """Return the facts by their objects, as (subject, relation). Literal objects are left out."""
        inverse: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for subject, facts in enumerate(self.facts):
            for relation, value in facts.items():
                if isinstance(value, int):
                    inverse[value].append((subject, relation))
        return inverse

    def _hidden_facts(self) -> frozenset[tuple[int, str]]:
        """Draw the facts that the graph lacks, as (subject, relation)."""
        draw = self._generator("missing")
        hidden: set[tuple[int, str]] = set()
        for number, facts in enumerate(self.facts):
            for relation in facts:
                if draw.random() < self._config.missing_facts:
                    hidden.add((number, relation))
        return frozenset(hidden)

    def _known_entities(self) -> frozenset[int]:
        """Draw the entities that are common knowledge. Renamed copies have none.

        There are few of them, so that a model reads each fact about them often.
        """
        if self.copy or not self._config.common_knowledge:
            return frozenset()
        draw = self._generator("common")
        numbers = range(len(self.labels))
        return frozenset(number for number in numbers if draw.random() < KNOWN_ENTITIES)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Person:
    """The facts about a person that later generations and films need."""

    # The number of the entity.
    number: int
    is_male: bool
    # The position of the last name in LAST_NAMES.
    last: int
    birth_year: int
    death_year: int
    # The number of the country of citizenship.
    country: Value = ""
    # The number of the last child that was added, or None.
    last_child: int | None = None


def _people_count(part: names.Part, questions: int) -> int:
    """Return the number of people in a part with this number of questions.

    It only depends on the next power of two of the number of questions. So with a few more
    questions, the first questions usually stay the same.
    """
    min_people, max_people = PEOPLE_LIMITS[part]
    # The next power of two.
    rounded_questions = 1 << (questions - 1).bit_length()
    people = int(PEOPLE_PER_QUESTION * rounded_questions)
    return min(max_people, max(min_people, people))
