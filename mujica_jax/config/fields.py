"""Check the types and bounds of a configuration's fields.

An error message names the field, its value and the values that are allowed.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

from mujica_jax.config.bounds import Bound
from mujica_jax.errors import UserError


def check_types(config: Any, section: str = "") -> None:
    """Check that every value has the type of its field and is one of the field's choices.

    `section` is the dotted prefix of field names in messages, such as "trainer.". Values of flags
    were already checked when they were parsed, but a configuration file can set any value. Raises
    UserError.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name = section + field.name
        value = getattr(config, field.name)
        options = union_members(hints[field.name])
        is_plug_in = _has_implementation(value) and all(map(_has_implementation, options))
        if not is_plug_in and not any(_fits(value, option) for option in options):
            types_in_words = " or ".join(_in_words(option) for option in options)
            raise UserError(
                f"{name} is {value!r} and must be {types_in_words}: change it in the configuration"
            )
        if dataclasses.is_dataclass(value):
            check_types(value, f"{name}.")


def check_bounds(config: Any, section: str = "") -> None:
    """Check every number against the bounds in the type of its field (`bounds.py`).

    `section` is the dotted prefix of field names in messages, such as "trainer.". Raises UserError.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        name = section + field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_bounds(value, section=f"{name}.")
        elif value is not None:
            for bound in _bounds(hints[field.name]):
                _check_number(name, value, bound.holds, bound.words)


def _bounds(hint: Any) -> Iterator[Bound]:
    """Yield the bounds of a field's type, as in `Annotated[int, at_least(1)] | None`."""
    for option in union_members(hint):
        for annotation in getattr(option, "__metadata__", ()):
            if isinstance(annotation, Bound):
                yield annotation


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type. Another type is its own only member."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _has_implementation(section: Any) -> bool:
    """Return whether this is a section that names its implementation, or a class of such sections.

    A user's own section may stand where the type of the field lists the built-in ones (`kinds.py`).
    """
    return dataclasses.is_dataclass(section) and hasattr(section, "implementation")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has this type. An integer also fits a `float`."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin is tuple and isinstance(value, tuple) and arguments[-1] is not ...:
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    kind = origin or hint
    return not isinstance(kind, type) or kind is Any or isinstance(value, kind)


def _in_words(hint: Any) -> str:
    """Return a type in the words of an error message, such as "one of adamw, muon"."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    if hint is types.NoneType:
        return "None"
    return str(hint) if typing.get_origin(hint) else getattr(hint, "__name__", str(hint))


def require(config: Any, name: str, holds: Callable[[float], bool], words: str) -> None:
    """Check that a field's value is a finite number for which `holds` is true.

    `name` is the dotted name of the field. `words` describes the condition in the error message,
    such as "at least 1". A section without the field passes. Raises UserError.
    """
    value = field_value(config, name)
    if value is not ...:
        _check_number(name, value, holds, words)


def _check_number(name: str, value: Any, holds: Callable[[float], bool], words: str) -> None:
    """Check that a value is a finite number for which `holds` is true. Raises UserError."""
    is_finite_number = isinstance(value, int | float) and math.isfinite(value)
    if not (is_finite_number and holds(value)):
        raise UserError(
            f"{name} is {value!r} and must be {words}: change it in the configuration or pass "
            f"{flag_of(name)}"
        )


def field_value(config: Any, name: str) -> Any:
    """Return the value of the field with this dotted name, or `...` if the section lacks it."""
    section, _, field = name.rpartition(".")
    owner = getattr(config, section) if section else config
    return getattr(owner, field, ...)


def flag_of(name: str) -> str:
    """Return the flag that sets a field, such as "--trainer.batch-size"."""
    return "--" + name.replace("_", "-")
