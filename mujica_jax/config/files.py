"""Configuration files and the command line.

`configs/NAME.py` gives a Config, and flags override its fields. For a mistyped flag tyro shows the
nearest known one, for a wrong choice the list of choices. Both end with status 2.

A section of several kinds is a union of dataclasses that carry a `kind` literal (`schema.py`).
`--section.kind NAME` changes the kind. Fields that both kinds have keep their values. Others take
the default of the new kind or must be given.
"""

import dataclasses
import importlib
import importlib.util
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import tyro

from mujica_jax.config.fields import check_types, union_members
from mujica_jax.config.moved_modules import moved_sentence
from mujica_jax.config.renamed_fields import new_names_of, with_new_flags
from mujica_jax.config.schema import Config
from mujica_jax.config.tasks import STORED_WITHOUT
from mujica_jax.errors import UserError, nearest

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "configs"  # where a wheel has what stands beside the package in a checkout
CONFIG_FOLDER = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "configs"

Section = TypeVar("Section")


def command_line(arguments: Sequence[str], *, default: str) -> Config:
    """Return the Config of a command line `[FILE] [flags]`.

    FILE is a path or the name of a file in configs/.
    """
    words = list(arguments)
    name = take_file(words) or default
    return override(load_config(name), words, prog=f"python -m mujica_jax.train {name}")


def take_file(words: list[str]) -> str | None:
    """Remove the configuration's name from a command line, and return it.

    It is the first word, unless that is a flag. Otherwise it is the first `.py` file that is not
    the value of a flag.
    """
    if words and not words[0].startswith("-"):
        return words.pop(0)
    for index in range(1, len(words)):
        is_file = words[index].endswith(".py") and not words[index].startswith("-")
        # `--flag value` takes the next word as its value; `--flag=value` does not.
        previous = words[index - 1]
        is_flag_value = previous.startswith("-") and "=" not in previous
        if is_file and not is_flag_value:
            return words.pop(index)
    return None


def override(values: Section, arguments: Sequence[str], *, prog: str) -> Section:
    """Return the dataclass with the values of flags in place of its own.

    Tyro parses the flags. Three things that it cannot do come first.
    """
    # Flags of the last release get their new names.
    words = with_new_flags(arguments, _sections(type(values)))

    # `--section.kind NAME` is taken out, and the section becomes one of that kind.
    for section, kinds in _sections_with_kinds(type(values)).items():
        named_kind = take_flag(words, f"--{section}.kind")
        kind = getattr(values, section).kind if named_kind is None else named_kind
        _check_kind(section, kind, kinds, words)
        values = _of_kind(values, section, kinds[kind])

    # `--flag` without a value means `--flag True`.
    words = _with_true(words, flags=set(_true_or_false("", values)))

    return tyro.cli(
        tyro.conf.AvoidSubcommands[type(values)],
        args=words,
        default=values,
        prog=prog,
        config=(tyro.conf.FlagConversionOff,),
    )


def _with_true(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the command line with True behind each of these flags that has no value."""
    complete: list[str] = []
    for index, word in enumerate(words):
        complete.append(word)
        has_value = index + 1 < len(words) and not words[index + 1].startswith("--")
        if word.replace("_", "-") in flags and not has_value:
            complete.append("True")
    return complete


def _true_or_false(prefix: str, section: Any) -> Iterator[str]:
    """Yield the flags of all fields that are true or false."""
    for field in dataclasses.fields(section):
        name = f"{prefix}{field.name}"
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _true_or_false(f"{name}.", value)
        elif isinstance(value, bool):
            yield f"--{name}".replace("_", "-")


def of_kind(config: Config, section: str, kind: str) -> Config:
    """Return the configuration with a section of another kind.

    Fields that both kinds have keep a value that was chosen. The others have their default. Raises
    UserError if a field has none.
    """
    kinds = _sections_with_kinds(type(config))[section]
    _check_kind(section, kind, kinds, words=[])
    changed = _of_kind(config, section, kinds[kind])

    new_section = getattr(changed, section)
    for field in dataclasses.fields(new_section):
        if getattr(new_section, field.name) is tyro.MISSING:
            raise UserError(
                f"{section} {kind} needs {field.name}, which {section}.kind "
                f"{getattr(config, section).kind} has not: begin with --{section}.kind {kind}"
            )
    return changed


def load_config(name: str | Path) -> Config:
    """Return the Config of a file: a path, or a name in configs/ with or without `.py`."""
    path = _config_path(name)
    spec = importlib.util.spec_from_file_location(f"mujica_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except UserError:
        raise
    except Exception as error:
        moved = moved_sentence(error)
        if moved:
            raise UserError(f"configuration {path} does not load: {moved}") from error
        raise UserError(
            f"configuration {path} does not load: {type(error).__name__}: {error}; it must define "
            "get_config() -> Config"
        ) from error
    if not isinstance(config, Config):
        raise UserError(
            f"configuration {path}: get_config() gave a {type(config).__name__}; it must return a "
            "Config"
        )
    check_types(config)
    return config


def _config_path(name: str | Path) -> Path:
    """Return the path of a configuration file. Raises UserError if there is none of this name."""
    path = Path(name)
    if path.suffix == ".py" and path.is_file():
        return path
    installed = {file.stem: file for file in sorted(CONFIG_FOLDER.glob("*.py"))}
    stem = str(path).removeprefix("configs/").removesuffix(".py")
    if stem not in installed:
        raise UserError(f"there is no configuration {name}: {nearest(path.stem, installed)}")
    return installed[stem]


def implementation(section: Any) -> Callable[..., Any]:
    """Import and return the implementation that a section of several kinds names."""
    return _imported(
        section.implementation,
        f"the implementation of {section.kind} is {section.implementation!r} and is not there; its "
        "section must name it as module:function",
    )


def named_object(place: str, *, setting: str) -> Callable[..., Any]:
    """Return the function that a setting names as module:function.

    Raises UserError if there is none.
    """
    imported = _imported(
        place, f"{setting} is {place!r} and is not there: name it as module:function"
    )
    if not callable(imported):
        raise UserError(
            f"{setting} is {place!r} and names a {type(imported).__name__}: name a function"
        )
    return imported


def _imported(place: str, sentence: str) -> Any:
    """Return the object that module:function names.

    Raises UserError with this sentence if the module or the function does not exist, and with the
    new name of a module of this package that has moved.
    """
    module, _, name = place.partition(":")
    if not module or not name:
        raise UserError(sentence)
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        moved = moved_sentence(error)
        if moved:
            raise UserError(f"{place} cannot be imported: {moved}") from error
        is_missing = isinstance(error, ModuleNotFoundError)
        if not (is_missing and f"{module}.".startswith(f"{error.name}.")):
            raise  # what the module imports is missing
        raise UserError(sentence) from error
    except AttributeError as error:
        moved = moved_sentence(error)
        if moved:
            raise UserError(f"{place} cannot be imported: {moved}") from error
        if module not in sys.modules:
            raise  # it was raised in the module
        raise UserError(sentence) from error


def from_dict(kind: type[Section], values: Mapping[str, Any]) -> Section:
    """Restore a config dataclass from the values that `dataclasses.asdict` and JSON made of it.

    Raises UserError naming a field that this program does not know or that is missing.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]

    # Fields of the last release get their new names, and those that are gone are left out.
    new_names = new_names_of(kind)
    values = {new_names.get(name, name): value for name, value in values.items()}
    retired_names = getattr(kind, "retired", ())
    values = {name: value for name, value in values.items() if name not in retired_names}
    for name in values:
        if name not in fields:
            raise UserError(f"{kind.__name__} has no field {name}: {nearest(name, sorted(fields))}")

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
        raise UserError(f"{kind.__name__} cannot be read back: {error}") from error


def _value(name: str, hint: Any, value: Any) -> Any:
    """Return the value of one field in its type: a tuple for a list, a section for an object.

    Raises UserError.
    """
    options = union_members(hint)
    has_tuple = any(typing.get_origin(option) is tuple for option in options)
    if isinstance(value, list) and has_tuple:
        return tuple(value)

    # A field of single values.
    sections = [option for option in options if _is_section(option)]
    if not sections and isinstance(value, Mapping):
        raise UserError(f"{name} is {value} and must be a single value")
    if not sections:
        return value

    # A section, which may be one of several kinds.
    if not isinstance(value, Mapping):
        fields = " or ".join(f"the fields of {section.__name__}" for section in sections)
        raise UserError(f"{name} is {value} and must be an object with {fields}")
    kinds = {_kind_of(section): section for section in sections}
    kind = "" if "" in kinds else str(value.get("kind"))
    if kind not in kinds:
        raise UserError(f"there is no kind {kind}: {nearest(kind, kinds.keys())}")
    return from_dict(kinds[kind], value)


def _is_section(option: Any) -> TypeGuard[type]:
    return isinstance(option, type) and dataclasses.is_dataclass(option)


def _fields(section: type) -> set[str]:
    return {field.name for field in dataclasses.fields(section)}


def _kind_of(section: type) -> str:
    """Return the literal that tells this dataclass from the others of its union; empty without one.

    A `kind` with several values, as of the engine, is a field like any other.
    """
    hint = typing.get_type_hints(section).get("kind")
    if typing.get_origin(hint) is not typing.Literal or len(typing.get_args(hint)) > 1:
        return ""
    return typing.get_args(hint)[0]


def _sections_with_kinds(config: type) -> dict[str, dict[str, type]]:
    """Return the dataclass of each kind, for each section of several kinds."""
    sections: dict[str, dict[str, type]] = {}
    for name, members in _sections(config).items():
        kinds = {_kind_of(member): member for member in members}
        if "" not in kinds:
            sections[name] = kinds
    return sections


def _sections(config: type) -> dict[str, list[type]]:
    """Return the dataclasses that each section may be."""
    sections = {}
    for name, hint in typing.get_type_hints(config).items():
        members = [option for option in union_members(hint) if _is_section(option)]
        if members:
            sections[name] = members
    return sections


def _check_kind(section: str, kind: str, kinds: Mapping[str, type], words: Sequence[str]) -> None:
    """Check that there is this kind, and that no flag sets a field that only other kinds have."""
    if kind not in kinds:
        raise UserError(
            f"--{section}.kind is {kind} and there is none of this name: "
            f"{nearest(kind, kinds.keys())}"
        )
    for word in words:
        if not word.startswith(f"--{section}."):
            continue
        name = word.partition("=")[0].removeprefix(f"--{section}.").replace("-", "_")
        owners = [other for other, member in kinds.items() if name in _fields(member)]
        if owners and kind not in owners:
            raise UserError(
                f"--{section}.{name.replace('_', '-')} is a field of {section}.kind "
                f"{' and '.join(owners)}, and {section}.kind is {kind}: leave it out, or add "
                f"--{section}.kind {owners[0]}"
            )


def _of_kind(values: Section, section: str, new_kind: type) -> Section:
    """Return `values` with the section of another kind. A field without a value is MISSING."""
    old_section = getattr(values, section)
    if old_section.kind == _kind_of(new_kind):
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


def _defaults(section: type) -> dict[str, Any]:
    """Return the fields that have a default, with it."""
    return {
        field.name: field.default
        for field in dataclasses.fields(section)
        if field.default is not dataclasses.MISSING
    }


def take_flag(words: list[str], flag: str) -> str | None:
    """Remove each `flag VALUE` and `flag=VALUE` from a command line, and return the last value."""
    values = []  # from the last one to the first
    for index in reversed(range(len(words))):
        if words[index].startswith(f"{flag}="):
            values.append(words.pop(index).partition("=")[2])
        elif words[index] == flag and index + 1 < len(words):
            values.append(words.pop(index + 1))
            del words[index]
    return values[0] if values else None
