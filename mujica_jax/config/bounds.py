"""Bounds of the numbers in a configuration, written into the types of the fields.

    max_num_seqs: PositiveInt
    port: Annotated[int, at_least(0), at_most(65535)] = 0

`fields.check_bounds` reads the bounds from the types and checks the values. A bound that depends on
another field is checked in `checks.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """A condition on a number."""

    # The bound in the words of an error message, such as "at least 1".
    words: str
    # Returns whether a finite number is within the bound.
    holds: Callable[[float], bool]


def at_least(minimum: int) -> Bound:
    """Return the bound `value >= minimum`."""
    return Bound(words=f"at least {minimum}", holds=lambda value: value >= minimum)


def above(limit: int) -> Bound:
    """Return the bound `value > limit`."""
    return Bound(words=f"above {limit}", holds=lambda value: value > limit)


def at_most(maximum: int) -> Bound:
    """Return the bound `value <= maximum`."""
    return Bound(words=f"at most {maximum}", holds=lambda value: value <= maximum)


BELOW_ONE = Bound(words="at least 0 and below 1", holds=lambda value: 0 <= value < 1)
LEAVES_BOTH_SPLITS = Bound(
    words="below 100, so that both splits have questions", holds=lambda value: value < 100
)

NonNegativeInt = Annotated[int, at_least(0)]
PositiveInt = Annotated[int, at_least(1)]
NonNegativeFloat = Annotated[float, at_least(0)]
Percent = Annotated[int, at_least(0), at_most(100)]
HoldOutPercent = Annotated[int, at_least(1), LEAVES_BOTH_SPLITS]
PositiveFloat = Annotated[float, above(0)]
FloatBelowOne = Annotated[float, BELOW_ONE]
