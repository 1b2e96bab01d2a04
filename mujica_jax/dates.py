"""How dates are written: the names of the months and the order of the parts."""

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def written_date(year: str, month: int = 0, day: int = 0) -> str:
    """Return a date as most of 2WikiMultihopQA writes it: "14 November 1961", "November 1961" or
    "1961".

    `year` is text, so that "44 BC" is a year too. A month or a day of 0 is unknown; a day without a
    month is left out.
    """
    if not 1 <= month <= 12:
        return year
    parts = [MONTHS[month - 1], year]
    if day:
        parts.insert(0, str(day))
    return " ".join(parts)
