"""Help texts, types and docstrings, read from the dataclasses of settings."""

import dataclasses
from typing import Annotated, Literal

import pytest

from mujica_jax.config.bounds import above, at_least
from mujica_jax.config.field_help import docstring, field_comments, type_in_words


@dataclasses.dataclass(frozen=True)
class Base:
    # A number of the base.
    number: int = 1
    # A text that the section replaces.
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Section(Base):
    """A section."""

    # The text of the section,
    # in two lines.
    text: str = ""
    # Both are true or false.
    first: bool = False
    second: bool = False

    third: bool = False
    fourth: bool = False  # Behind the field.
    fifth: bool = False


def test_a_field_has_the_comment_above_or_behind_it_and_that_of_its_base():
    assert field_comments(Section) == {
        "number": "A number of the base.",
        "text": "The text of the section, in two lines.",
        "first": "Both are true or false.",
        "second": "Both are true or false.",
        "fourth": "Behind the field.",
    }


def test_a_class_that_is_in_no_file_has_no_comments():
    made = dataclasses.make_dataclass("made", [("number", int, 1)])
    assert field_comments(made) == {}


def test_what_dataclasses_write_is_no_docstring():
    assert docstring(Section) == "A section."
    assert docstring(Base) == ""


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "int"),
        (str, "text"),
        (bool, "True or False"),
        (str | None, "text or None"),
        (Literal["online", "offline"], "online or offline"),
        (Annotated[int, at_least(1)], "int, at least 1"),
        (Annotated[float, above(0)] | None, "float, above 0 or None"),
        (tuple[int, int], "int, int"),
        (tuple[str, ...], "text, one or several"),
        (Section, "a section"),
    ],
)
def test_a_type_in_words(hint, words):
    assert type_in_words(hint, section="a section") == words
