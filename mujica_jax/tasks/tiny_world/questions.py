"""Question templates of the tiny world.

A template has a path of relations, a rule and several wordings. The path is followed from each
topic, and the rule gives the answer from the ends of the paths. The four kinds and the wordings are
taken from 2WikiMultihopQA (Ho et al., 2020).

The evidence of a question lists the path step by step, and within a step topic by topic. For two
topics and two steps it is (a, director, p), (b, director, q), (p, date of birth, x), (q, date of
birth, y).
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from mujica_jax.retrieval.graph.values import MONTHS

FinalRule = Literal["last_object", "earlier", "later", "same"]

# Every template has this number of wordings.
MAX_PARAPHRASES = 4
# The shares of the kinds of questions, as in 2Wiki.
KIND_SHARES = {
    "compositional": 0.44,
    "comparison": 0.23,
    "bridge_comparison": 0.21,
    "inference": 0.12,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """A question in several wordings, with the path that leads to its answer."""

    # Such as "compositional: director, date of birth".
    id: str
    kind: str
    # The relations that are followed from each topic.
    path: tuple[str, ...]
    # The number of topics, 1 or 2.
    topics: int
    # How the ends of the paths give the answer.
    rule: FinalRule
    # Each wording has the place {a}, and for two topics {b}.
    wordings: tuple[str, ...]

    def answer(self, topics: Sequence[str], objects: Sequence[str]) -> str:
        """Return the answer to a question of this template.

        `topics` holds the labels of the topics, and `objects` the labels at the ends of their
        paths.
        """
        if self.rule == "last_object":
            return objects[0]
        if self.rule == "same":
            return "yes" if objects[0] == objects[1] else "no"

        dated_topics = list(zip(objects, topics, strict=True))
        if self.rule == "earlier":
            _, topic = min(dated_topics, key=lambda pair: date_key(pair[0]))
        else:
            _, topic = max(dated_topics, key=lambda pair: date_key(pair[0]))
        return topic


def date_text(year: int, month: int, day: int) -> str:
    """Return a date as a text, such as "14 March 1931"."""
    return f"{day} {MONTHS[month - 1]} {year}"


def date_key(text: str) -> tuple[int, int, int]:
    """Return (year, month, day) of a date such as "14 March 1931", to sort dates."""
    day, month, year = text.split()
    return int(year), MONTHS.index(month) + 1, int(day)


# Questions of the second step, by relation. {x} is a phrase that names a person.
PERSON_WORDINGS: dict[str, tuple[str, str, str]] = {
    "date of birth": (
        "When was {x} born?",
        "What is the date of birth of {x}?",
        "On which date was {x} born?",
    ),
    "place of birth": (
        "Where was {x} born?",
        "What is the place of birth of {x}?",
        "In which city was {x} born?",
    ),
    "country of citizenship": (
        "Which country is {x} from?",
        "What nationality is {x}?",
        "What is the nationality of {x}?",
    ),
    "date of death": (
        "When did {x} die?",
        "What is the date of death of {x}?",
        "On which date did {x} die?",
    ),
    "place of death": (
        "Where did {x} die?",
        "What is the place of death of {x}?",
        "In which city did {x} die?",
    ),
    "place of burial": (
        "Where is {x} buried?",
        "What is the place of burial of {x}?",
        "In which city is {x} buried?",
    ),
    "educated at": (
        "Where did {x} study?",
        "Where was {x} educated?",
        "At which school did {x} study?",
    ),
    "employer": ("Where does {x} work?", "Who is the employer of {x}?", "For whom does {x} work?"),
    "spouse": ("Who is the spouse of {x}?", "Who married {x}?", "To whom is {x} married?"),
    "father": (
        "Who is the father of {x}?",
        "What is the name of the father of {x}?",
        "Who was the father of {x}?",
    ),
    "mother": (
        "Who is the mother of {x}?",
        "What is the name of the mother of {x}?",
        "Who was the mother of {x}?",
    ),
}
CREW = ("director", "composer", "producer", "screenwriter")
RELATIVES = ("father", "mother", "spouse")
# Two steps inside a family give an inference question, because it names neither of the steps.
FAMILY_WORDS = {
    ("father", "father"): "paternal grandfather",
    ("father", "mother"): "paternal grandmother",
    ("mother", "father"): "maternal grandfather",
    ("mother", "mother"): "maternal grandmother",
    ("spouse", "father"): "father-in-law",
    ("spouse", "mother"): "mother-in-law",
}
# By relation of a person and rule: wordings that compare two people, and clauses that compare the
# directors of two films.
SUPERLATIVES: dict[tuple[str, FinalRule], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("date of birth", "earlier"): (
        (
            "Who was born first, {a} or {b}?",
            "Who is older, {a} or {b}?",
            "Was {a} or {b} born first?",
            "Who was born earlier, {a} or {b}?",
        ),
        ("was born first", "was born earlier", "is older than the other", "is older"),
    ),
    ("date of birth", "later"): (
        (
            "Who was born later, {a} or {b}?",
            "Who is younger, {a} or {b}?",
            "Was {a} or {b} born later?",
            "Who was born later out of {a} and {b}?",
        ),
        ("was born later", "is younger", "is younger than the other", "was born last"),
    ),
    ("date of death", "earlier"): (
        (
            "Who died first, {a} or {b}?",
            "Who died earlier, {a} or {b}?",
            "Which person died first, {a} or {b}?",
            "Who died first out of {a} and {b}?",
        ),
        ("died first", "died earlier", "died earlier than the other", "died first"),
    ),
    ("date of death", "later"): (
        (
            "Who died later, {a} or {b}?",
            "Who lived until a later date, {a} or {b}?",
            "Who died last, {a} or {b}?",
            "Who died later out of {a} and {b}?",
        ),
        ("died later", "died last", "died later than the other", "died later"),
    ),
}


def _compositional() -> list[Template]:
    """Return the templates with two steps, such as the birthplace of a film's director."""
    templates = []
    for first in (*CREW, *RELATIVES):
        if first in CREW:
            phrases = (f"the {first} of film {{a}}", f"the {first} of the film {{a}}")
        else:
            phrases = (f"the {first} of {{a}}", f"{{a}}'s {first}")
        for second, patterns in PERSON_WORDINGS.items():
            # Two steps inside a family are asked as inference questions.
            if first in RELATIVES and second in RELATIVES:
                continue
            # Three patterns and two phrases take turns, so that all wordings differ.
            wordings = []
            for number in range(MAX_PARAPHRASES):
                wordings.append(patterns[number % 3].format(x=phrases[number % 2]))
            templates.append(_template("compositional", (first, second), wordings=wordings))
    return templates


def _inference() -> list[Template]:
    """Return the templates with two steps inside a family."""
    patterns = (
        "Who is the {w} of {{a}}?",
        "Who is {{a}}'s {w}?",
        "Who was the {w} of {{a}}?",
        "What is the name of {{a}}'s {w}?",
    )
    templates = []
    for path, word in FAMILY_WORDS.items():
        wordings = [pattern.format(w=word) for pattern in patterns]
        templates.append(_template("inference", path, wordings=wordings))
    return templates


def _comparison() -> list[Template]:
    """Return the templates that compare two topics."""
    return [*_comparisons_of_people(), *_comparisons_of_films(), *_comparisons_of_countries()]


def _comparisons_of_people() -> list[Template]:
    """Return the templates that compare the dates of two people."""
    templates = []
    for (relation, rule), (wordings, _) in SUPERLATIVES.items():
        templates.append(
            _template("comparison", (relation,), topics=2, rule=rule, wordings=wordings)
        )
    return templates


def _comparisons_of_films() -> list[Template]:
    """Return the templates that compare the publication dates of two films."""
    clauses: dict[FinalRule, tuple[str, ...]] = {
        "earlier": (
            "came out first",
            "came out earlier",
            "was released first",
            "was released earlier",
        ),
        "later": (
            "came out later",
            "was released later",
            "was released more recently",
            "came out more recently",
        ),
    }
    templates = []
    for rule, rule_clauses in clauses.items():
        wordings = [f"Which film {clause}, {{a}} or {{b}}?" for clause in rule_clauses]
        templates.append(
            _template("comparison", ("publication date",), topics=2, rule=rule, wordings=wordings)
        )
    return templates


def _comparisons_of_countries() -> list[Template]:
    """Return the templates that compare the countries of two topics."""
    wordings_of_relation = {
        "country of citizenship": (
            "Are {a} and {b} from the same country?",
            "Do {a} and {b} have the same nationality?",
            "Are {a} and {b} of the same nationality?",
            "Do {a} and {b} come from the same country?",
        ),
        "country of origin": (
            "Are both movies, {a} and {b}, from the same country?",
            "Are the movies {a} and {b} from the same country?",
            "Do the films {a} and {b} come from the same country?",
            "Were both films, {a} and {b}, made in the same country?",
        ),
        "country": (
            "Are {a} and {b} located in the same country?",
            "Are both {a} and {b} located in the same country?",
            "Are the cities {a} and {b} in the same country?",
            "Do the cities {a} and {b} lie in the same country?",
        ),
    }
    templates = []
    for relation, wordings in wordings_of_relation.items():
        templates.append(
            _template("comparison", (relation,), topics=2, rule="same", wordings=wordings)
        )
    return templates


def _bridge_comparison() -> list[Template]:
    """Return the templates that compare the directors of two films."""
    patterns = (
        "Which film has the director who {w}, {{a}} or {{b}}?",
        "Which film whose director {w}, {{a}} or {{b}}?",
    )
    templates = []
    for (relation, rule), (_, clauses) in SUPERLATIVES.items():
        path = ("director", relation)
        wordings = []
        for number, clause in enumerate(clauses):
            wordings.append(patterns[number % 2].format(w=clause))
        templates.append(
            _template("bridge_comparison", path, topics=2, rule=rule, wordings=wordings)
        )
    nationality_wordings = (
        "Do both directors of films {a} and {b} share the same nationality?",
        "Do both films {a} and {b} have directors from the same country?",
        "Are the directors of both films {a} and {b} from the same country?",
        "Do the directors of films {a} and {b} have the same nationality?",
    )
    templates.append(
        _template(
            "bridge_comparison",
            ("director", "country of citizenship"),
            topics=2,
            rule="same",
            wordings=nationality_wordings,
        )
    )
    return templates


def _template(
    kind: str,
    path: tuple[str, ...],
    *,
    topics: int = 1,
    rule: FinalRule = "last_object",
    wordings: Sequence[str],
) -> Template:
    """Return a template with an id that is made from its parts."""
    assert len(set(wordings)) == MAX_PARAPHRASES, (
        "every template has the same number of different wordings"
    )
    id = f"{kind}: {', '.join(path)}"
    if rule != "last_object":
        id += f", {rule}"
    return Template(id=id, kind=kind, path=path, topics=topics, rule=rule, wordings=tuple(wordings))


TEMPLATES: tuple[Template, ...] = (
    *_compositional(),
    *_comparison(),
    *_bridge_comparison(),
    *_inference(),
)
