"""Configurations that a program stored as JSON, read back."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from mujica_jax.config.fields import union_members
from mujica_jax.config.kinds import is_plug_in, is_section, kind_of, plug_in_class, stored_kind
from mujica_jax.config.named_objects import is_place
from mujica_jax.config.renamed_fields import new_names_of
from mujica_jax.config.tasks import STORED_WITHOUT
from mujica_jax.errors import UserError, nearest

Section = TypeVar("Section")


def to_dict(values: Any) -> dict[str, Any]:
    """Return a configuration, or a section of one, as JSON stores it.

    A plug-in has the place `module:Class` of its dataclass as its kind, so that it can be read back.
    """
    fields = dataclasses.asdict(values)
    if is_plug_in(type(values)):
        fields["kind"] = stored_kind(values)
    for field in dataclasses.fields(values):
        section = getattr(values, field.name)
        if is_section(type(section)) and is_plug_in(type(section)):
            fields[field.name]["kind"] = stored_kind(section)
    return fields


def from_dict(kind: type[Section], values: Mapping[str, Any]) -> Section:
    """Restore a config dataclass from the values that `to_dict` and JSON made of it.

    Raises UserError naming a field that this program does not know or that is missing, or a plug-in
    that cannot be imported.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]

    # Fields of the last release get their new names, and those that are gone are left out.
    new_names = new_names_of(kind)
    values = {new_names.get(name, name): value for name, value in values.items()}
    retired_names = getattr(kind, "retired", ())
    values = {name: value for name, value in values.items() if name not in retired_names}
    for name in values:
        if name not in fields:
            raise UserError(
                f"unknown field {name!r} of a stored {kind.__name__}; "
                f"{nearest(name, sorted(fields))}"
            )

    # Fields that are younger than the stored configuration get the value of that time.
    for field in fields.values():
        if STORED_WITHOUT in field.metadata:
            values = {field.name: field.metadata[STORED_WITHOUT], **values}

    hints = typing.get_type_hints(kind)
    restored = {
        name: _value(f"{kind.__name__}.{name}", hints[name], value)
        for name, value in values.items()
    }
    try:
        return kind(**restored)
    except TypeError as error:
        raise UserError(f"the stored {kind.__name__} cannot be read back: {error}") from error


def _value(name: str, hint: Any, value: Any) -> Any:
    """Return the value of one field in its type: a tuple for a list, a section for an object.

    Raises UserError.
    """
    options = union_members(hint)
    has_tuple = any(typing.get_origin(option) is tuple for option in options)
    if isinstance(value, list) and has_tuple:
        return tuple(value)

    # A field of single values.
    sections = [option for option in options if is_section(option)]
    if not sections and isinstance(value, Mapping):
        raise UserError(f"{name} is {value} and must be a single value")
    if not sections:
        return value

    # A section, which may be one of several kinds.
    if not isinstance(value, Mapping):
        fields = " or ".join(f"the fields of {section.__name__}" for section in sections)
        raise UserError(f"{name} is {value} and must be an object with {fields}")
    kinds = {kind_of(section): section for section in sections}
    kind = "" if "" in kinds else str(value.get("kind"))
    if kind not in kinds and is_place(kind):
        section = name.rpartition(".")[2]
        plug_in = plug_in_class(section, kind, setting=f"the stored {section}.kind")
        return from_dict(plug_in, {**value, "kind": kind_of(plug_in)})
    if kind not in kinds:
        raise UserError(f"{name} has the unknown kind {kind!r}; {nearest(kind, kinds.keys())}")
    return from_dict(kinds[kind], value)
