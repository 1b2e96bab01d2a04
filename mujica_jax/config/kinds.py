"""Sections of the configuration that come in several kinds.

Such a section is a union of dataclasses, each with a `kind` literal (`schema.py`). Another kind of a
section keeps the values of the fields that both kinds have. All other fields take the default of the
new kind, or must be given.

A kind with a colon, such as `my_package.agents:MyAgentConfig`, is a plug-in: a dataclass in a module
of the user, with a `kind` literal and an `implementation` like the built-in ones.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import tyro

from mujica_jax.config.agents import AgentLimits
from mujica_jax.config.fields import union_members
from mujica_jax.config.named_objects import imported_object, is_place, place_of
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError, nearest

Section = TypeVar("Section")


def of_kind(config: Config, section: str, kind: str) -> Config:
    """Return the configuration with a section of another kind.

    Fields that both kinds have keep a value that was chosen. The others have their default. Raises
    UserError if a field has none.
    """
    changed = with_kind(config, section, kind_class(config, section, kind))

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
    if type(old_section) is new_kind:
        return values

    new_defaults = _defaults(new_kind)
    old_defaults = _defaults(type(old_section))
    new_fields = _fields(new_kind) - {"kind"}

    # Fields of both kinds keep a value that was chosen; a mere default gives way to the new one. A
    # kind may name fields whose values mean something else in the other kinds.
    fields: dict[str, Any] = {}
    shared_fields = new_fields & _fields(type(old_section))
    for name in shared_fields - set(getattr(new_kind, "own_defaults", ())):
        value = getattr(old_section, name)
        was_chosen = value != old_defaults.get(name, tyro.MISSING)
        if was_chosen or name not in new_defaults:
            fields[name] = value

    # What has neither a value nor a default has to be given by a flag.
    for name in new_fields:
        if name not in new_defaults and name not in fields:
            fields[name] = tyro.MISSING

    return dataclasses.replace(values, **{section: new_kind(**fields)})  # type: ignore[type-var]


def kind_class(values: Any, section: str, kind: str | None) -> type:
    """Return the dataclass of a kind: a built-in one, or a plug-in that is named as module:Class.

    None stands for the kind that the section has now. Raises UserError if there is no such kind.
    """
    current_class = type(getattr(values, section))
    if kind is None or kind == kind_of(current_class):
        return current_class
    if is_place(kind):
        return plug_in_class(section, kind, setting=f"{section}.kind")
    kinds = sections_with_kinds(type(values))[section]
    if kind not in kinds:
        raise UserError(
            f"unknown {section} {kind!r}; {nearest(kind, kinds.keys())} (or your own as "
            "module:Class)"
        )
    return kinds[kind]


def plug_in_class(section: str, place: str, *, setting: str) -> type:
    """Import the configuration dataclass of a plug-in, and check it.

    `setting` says in messages where the name stands. Raises UserError.
    """
    imported = imported_object(place, setting=setting)
    check_plug_in_class(section, imported, described=f"{setting} is {place!r}, but it")
    return imported


def check_plug_in_class(section: str, candidate: Any, *, described: str) -> None:
    """Check that an object is the configuration dataclass of a kind of this section.

    `described` begins the error messages. Raises UserError.
    """
    if not is_section(candidate):
        raise UserError(
            f"{described} is no dataclass: name the dataclass with the settings of your {section}"
        )
    if not candidate.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue]
        raise UserError(
            f"{described} can be changed: write @dataclasses.dataclass(frozen=True, kw_only=True)"
        )

    kind = kind_of(candidate)
    if not re.fullmatch(r"[A-Za-z0-9_]+", kind) or getattr(candidate, "kind", None) != kind:
        raise UserError(
            f'{described} has no short name: give it the field kind: Literal["my_name"] = "my_name"'
        )
    if sections_with_kinds(Config)[section].get(kind, candidate) is not candidate:
        raise UserError(f"{described} has the kind {kind!r} of a built-in {section}: rename it")
    if not isinstance(getattr(candidate, "implementation", None), str):
        raise UserError(
            f"{described} names no implementation: give it implementation: ClassVar[str] = "
            '"module:name"'
        )
    if section == "agent" and not issubclass(candidate, AgentLimits):
        raise UserError(
            f"{described} lacks the limits of an agent: derive it from "
            "mujica_jax.config.agents.AgentLimits"
        )


def is_plug_in(section_class: type) -> bool:
    """Return whether this dataclass is a kind of a section that this package does not have."""
    return hasattr(section_class, "implementation") and section_class not in built_in_classes()


def stored_kind(section: Any) -> str:
    """Return the kind of a section as a run stores it, from which it can be opened again."""
    return place_of(type(section)) if is_plug_in(type(section)) else section.kind


@functools.cache
def built_in_classes() -> frozenset[type]:
    """Return the dataclasses of all kinds that this package has."""
    sections = sections_with_kinds(Config).values()
    return frozenset(member for kinds in sections for member in kinds.values())


def check_flags(
    section: str, chosen_class: type, kinds: Mapping[str, type], words: Sequence[str]
) -> None:
    """Check that no flag sets a field that only other kinds of a section have.

    `kinds` are the built-in ones. Raises UserError.
    """
    kind = kind_of(chosen_class)
    kinds = {**kinds, kind: chosen_class}
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
    defaults = {}
    for field in dataclasses.fields(section):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults
