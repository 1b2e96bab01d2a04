"""Sections of the configuration that come in several kinds.

Such a section is a union of dataclasses, each with a `kind` literal (`schema.py`). Another kind of a
section keeps the values of the fields that both kinds have. All other fields take the default of the
new kind, or must be given.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import tyro

from mujica_jax.config.fields import union_members
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError, nearest

Section = TypeVar("Section")


def of_kind(config: Config, section: str, kind: str) -> Config:
    """Return the configuration with a section of another kind.

    Fields that both kinds have keep a value that was chosen. The others have their default. Raises
    UserError if a field has none.
    """
    kinds = sections_with_kinds(type(config))[section]
    check_kind(section, kind, kinds, words=[])
    changed = with_kind(config, section, kinds[kind])

    new_section = getattr(changed, section)
    for field in dataclasses.fields(new_section):
        if getattr(new_section, field.name) is tyro.MISSING:
            raise UserError(
                f"the {section} {kind} needs {field.name}, but {section}.kind is "
                f"{getattr(config, section).kind}, which has no such setting: add "
                f"--{section}.kind {kind}"
            )
    return changed


def with_kind(values: Section, section: str, new_kind: type) -> Section:
    """Return `values` with the section of another kind. A field without a value is MISSING."""
    old_section = getattr(values, section)
    if old_section.kind == kind_of(new_kind):
        return values

    new_defaults = _defaults(new_kind)
    old_defaults = _defaults(type(old_section))
    new_fields = _fields(new_kind) - {"kind"}

    # Fields of both kinds keep a value that was chosen; a mere default gives way to the new one.
    fields: dict[str, Any] = {}
    for name in new_fields & _fields(type(old_section)):
        value = getattr(old_section, name)
        was_chosen = value != old_defaults.get(name, tyro.MISSING)
        if was_chosen or name not in new_defaults:
            fields[name] = value

    # What has neither a value nor a default has to be given by a flag.
    for name in new_fields:
        if name not in new_defaults and name not in fields:
            fields[name] = tyro.MISSING

    return dataclasses.replace(values, **{section: new_kind(**fields)})  # type: ignore[type-var]


def check_kind(section: str, kind: str, kinds: Mapping[str, type], words: Sequence[str]) -> None:
    """Check that there is this kind, and that no flag sets a field that only other kinds have."""
    if kind not in kinds:
        raise UserError(f"unknown {section} {kind!r}; {nearest(kind, kinds.keys())}")
    for word in words:
        if not word.startswith(f"--{section}."):
            continue
        name = word.partition("=")[0].removeprefix(f"--{section}.").replace("-", "_")
        # `--method.no-sft` sets the field sft.
        names = {name, name.removeprefix("no_")}
        owners = [other for other, member in kinds.items() if names & _fields(member)]
        if owners and kind not in owners:
            raise UserError(
                f"--{section}.{name.replace('_', '-')} is a setting of {section}.kind "
                f"{' and '.join(owners)}, but {section}.kind is {kind}: leave it out, or add "
                f"--{section}.kind {owners[0]}"
            )


def sections_with_kinds(config: type) -> dict[str, dict[str, type]]:
    """Return the dataclass of each kind, for each section of several kinds."""
    sections: dict[str, dict[str, type]] = {}
    for name, members in section_types(config).items():
        kinds = {kind_of(member): member for member in members}
        if "" not in kinds:
            sections[name] = kinds
    return sections


def section_types(config: type) -> dict[str, list[type]]:
    """Return the dataclasses that each section may be."""
    sections = {}
    for name, hint in typing.get_type_hints(config).items():
        members = [option for option in union_members(hint) if is_section(option)]
        if members:
            sections[name] = members
    return sections


def kind_of(section: type) -> str:
    """Return the literal that tells this dataclass from the others of its union; empty without one.

    A `kind` with several values, as of the engine, is a field like any other.
    """
    hint = typing.get_type_hints(section).get("kind")
    if typing.get_origin(hint) is not typing.Literal or len(typing.get_args(hint)) > 1:
        return ""
    return typing.get_args(hint)[0]


def is_section(option: Any) -> TypeGuard[type]:
    return isinstance(option, type) and dataclasses.is_dataclass(option)


def _fields(section: type) -> set[str]:
    return {field.name for field in dataclasses.fields(section)}


def _defaults(section: type) -> dict[str, Any]:
    """Return the fields that have a default, with it."""
    return {
        field.name: field.default
        for field in dataclasses.fields(section)
        if field.default is not dataclasses.MISSING
    }
