"""Write RDF values as text, for triples that a model sees and for gold answers.

| datatype | value | printed |
|---|---|---|
| `xsd:dateTime`, `xsd:date` | `1961-11-14T00:00:00Z` | 14 November 1961 |
| the same, on the first of January | `1961-01-01T00:00:00Z` | 1961 |
| `xsd:gYearMonth`, `xsd:gYear` | `1961-11`, `-0043` | November 1961, 44 BC |
| `xsd:gMonthDay`, `xsd:gMonth` | `--11-14`, `--11` | 14 November, November |
| `xsd:gDay` | `---14` | 14 |
| numbers | `+157`, `5.0`, `1.0E3` | 157, 5, 1000 |
| `xsd:boolean` | `true`, `0` | yes, no |
| `geo:wktLiteral` | `Point(114.054 22.535)` | 22.535 N, 114.054 E |
| all others, also texts with a language | | the text on one line |

**Precision of dates.** Wikidata's truthy statements and query results do not state the precision of
a date. A date of which only the year is known is written as the first of January at midnight. Far
more of these dates mean the year than the day, and data sets such as 2WikiMultihopQA have the year
in this case. Therefore the first of January is printed as its year, unless the value has a time of
day. Every other date is printed as a day, although the first of a month may mean the month. A time
of day is not printed. `spellings` also returns the other possible readings of a date.

**Years before Christ.** XSD 1.1 has a year 0000, so `-0043` is 44 BC. Wikidata follows this rule
for dates with the precision of a year. It does not follow it for decades, centuries and millennia.
Therefore the first of January of a round hundred (`-7000-01-01`) is printed as 7000 BC. For a round
year, `spellings` also returns the other reading.
"""

import re
import urllib.parse
from decimal import Decimal, InvalidOperation

from pyoxigraph import Literal, NamedNode

XSD = "http://www.w3.org/2001/XMLSchema#"
WKT = "http://www.opengis.net/ont/geosparql#wktLiteral"
ENTITY = "http://www.wikidata.org/entity/"
UNKNOWN_VALUE = "/.well-known/genid/"

DATES = frozenset(
    f"{XSD}{name}" for name in ("dateTime", "dateTimeStamp", "date", "gYear", "gYearMonth")
)
PARTS_OF_DATES = frozenset(f"{XSD}{name}" for name in ("gMonthDay", "gMonth", "gDay"))
NUMBERS = frozenset(
    f"{XSD}{name}"
    for name in (
        "integer", "int", "long", "short", "byte",
        "unsignedInt", "unsignedLong", "unsignedShort", "unsignedByte",
        "positiveInteger", "nonNegativeInteger", "negativeInteger", "nonPositiveInteger",
        "decimal", "double", "float",
    )
)  # fmt: skip
BOOLEANS = {"true": "yes", "1": "yes", "false": "no", "0": "no"}
# Numbers with a larger (or smaller) decimal exponent are written in scientific notation.
MAX_DIGITS = 30
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip

_date = re.compile(
    r"(?P<year>-?\d{4,})(?:-(?P<month>\d\d)(?:-(?P<day>\d\d)(?:T(?P<time>[\d:.]*))?)?)?"
    r"(?:Z|[+-]\d\d:\d\d)?"
)
_part_of_date = re.compile(r"--(?:(?P<month>\d\d)|-)(?:-?(?P<day>\d\d))?(?:Z|[+-]\d\d:\d\d)?")
_decimal = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_point = re.compile(
    rf"(?:<[^>]*>\s*)?point\s*(?:z\s*)?\(\s*({_decimal})\s+({_decimal})(?:\s+{_decimal})*\s*\)",
    re.IGNORECASE,
)
_control = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Values in a cell of a table. Wikidata's JSON puts a sign before every year and every number.
_date_in_text = re.compile(r"\+?-?\d{4,}-\d\d-\d\d(?:T[\d:.]+)?(?:Z|[+-]\d\d:\d\d)?")
_signed_number = re.compile(r"\+(?:\d+\.?\d*|\.\d+)")


def readable(literal: Literal) -> str:
    """Return the printed form of a literal."""
    return spellings(literal)[0]


def spellings(literal: Literal) -> tuple[str, ...]:
    """Return the printed form of a literal, then other ways to write the same value.

    The literal's own text comes last.
    """
    text = one_line(literal.value)
    datatype = literal.datatype.value
    if datatype in DATES:
        forms = _date_spellings(text)
    elif datatype in PARTS_OF_DATES:
        forms = _part_of_date_spellings(text)
    elif datatype in NUMBERS:
        forms = _number_spellings(text)
    elif datatype == f"{XSD}boolean":
        forms = _boolean_spellings(text)
    elif datatype == WKT:
        forms = _point_spellings(text)
    else:
        forms = []
    return tuple(dict.fromkeys((*forms, text)))


def value_in_text(text: str) -> Literal | None:
    """Return the value that is written in a cell of a table, or None if it is a text.

    Dates, points and numbers with a plus sign are recognised, written as in RDF or in Wikidata's
    JSON. A number without a sign is a text, because it may be a name.
    """
    if _date_in_text.fullmatch(text):
        return Literal(text.removeprefix("+"), datatype=NamedNode(f"{XSD}dateTime"))
    if _signed_number.fullmatch(text):
        return Literal(text, datatype=NamedNode(f"{XSD}decimal"))
    if _point.fullmatch(text):
        return Literal(text, datatype=NamedNode(WKT))
    return None


def written_date(year: str, month: int = 0, day: int = 0) -> str:
    """Return a date in the form that most of 2WikiMultihopQA uses.

    Examples are "14 November 1961", "November 1961" and "1961".

    `year` is text, so that it can be "44 BC". A month or day of 0 is unknown and left out. A day
    without a month is left out too.
    """
    if not 1 <= month <= 12:
        return year
    parts = [MONTHS[month - 1], year]
    if day:
        parts.insert(0, str(day))
    return " ".join(parts)


def readable_iri(iri: str) -> str:
    """Return the last part of an IRI as text.

    For http://example.org/resource/Norman_Foster it is `Norman Foster`. Return "" for Wikidata's
    ids and for unknown values, whose last part has no meaning to a reader.
    """
    if iri.startswith(ENTITY) or UNKNOWN_VALUE in iri:
        return ""
    part = re.split(r"[/#:]", iri.rstrip("/#"))[-1]
    return one_line(urllib.parse.unquote(part).replace("_", " "))


def one_line(text: str) -> str:
    """Return a text on one line. A label with a line break could be mistaken for two triples."""
    return " ".join(_control.sub(" ", text).split())


def _date_spellings(text: str) -> list[str]:
    """Return the forms of a date, the likeliest reading first. The list is empty for other text."""
    match = _date.fullmatch(text)
    if match is None:
        return []
    year_number = int(match["year"])
    month = int(match["month"] or 0)
    day = int(match["day"] or 0)
    year = str(year_number) if year_number > 0 else f"{1 - year_number} BC"
    has_time = bool((match["time"] or "").strip("0:."))
    day_form = written_date(year, month, day)

    # The first of January is printed as its year.
    if month == day == 1 and not has_time:
        forms = [year, day_form]
        if year_number < 0 and year_number % 10 == 0:
            # A round hundred is far more often a century, which has no shift, than an exact year.
            is_century = year_number % 100 == 0
            forms.insert(0 if is_century else 1, f"{-year_number} BC")
    else:
        forms = [day_form]

    # Other ways to write the day.
    if day and day_form != year:
        forms.append(f"{MONTHS[month - 1]} {day}, {year}")
        if day == 1:
            forms.append(written_date(year, month))
        forms.append(text.partition("T")[0])
    return forms


def _part_of_date_spellings(text: str) -> list[str]:
    """Return the forms of a month, a day, or a day of a month without a year."""
    match = _part_of_date.fullmatch(text)
    if match is None:
        return []
    month = int(match["month"] or 0)
    day = str(int(match["day"])) if match["day"] else ""
    if not 1 <= month <= 12:
        return [day] if day else []
    name = MONTHS[month - 1]
    return [f"{day} {name}", f"{name} {day}"] if day else [name]


def _number_spellings(text: str) -> list[str]:
    """Return a number without trailing zeros, then the same with thousands separators."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return []
    if not number.is_finite():
        return []
    if abs(number.adjusted()) > MAX_DIGITS:
        return [str(number.normalize())]
    plain = _without_trailing_zeros(number, "f")
    return [plain, _without_trailing_zeros(number, ",f")]


def _without_trailing_zeros(number: Decimal, form: str) -> str:
    """Return a number in a format such as "f" or ",f", without zeros at the end of its fraction."""
    written = format(number, form)
    if "." in written:
        written = written.rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def _boolean_spellings(text: str) -> list[str]:
    """Return yes or no, then true or false."""
    word = BOOLEANS.get(text)
    if word is None:
        return []
    return [word, "true" if word == "yes" else "false"]


def _point_spellings(text: str) -> list[str]:
    """Return the coordinates of a point with their directions, then as numbers."""
    match = _point.fullmatch(text)
    if match is None:
        return []
    # WKT writes the longitude first.
    longitude, latitude = (
        _without_trailing_zeros(Decimal(number), "f") for number in match.groups()
    )
    north = f"{latitude.removeprefix('-')} {'S' if latitude.startswith('-') else 'N'}"
    east = f"{longitude.removeprefix('-')} {'W' if longitude.startswith('-') else 'E'}"
    return [f"{north}, {east}", f"{latitude}, {longitude}"]
