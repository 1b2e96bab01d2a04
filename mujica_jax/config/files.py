"""Configuration files and the command line: `configs/NAME.py` gives a Config, flags override its
fields.

A mistyped flag is answered by tyro with the nearest known one, a wrong choice with the list of
choices; both exit with status 2.

A section of several kinds is a union of dataclasses that carry a `kind` literal (`schema.py`).
`--section.kind NAME` changes the kind: fields that both kinds have keep their values, others take
the default of the new kind or must be given.
"""

import dataclasses
import importlib
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import tyro

from mujica_jax.config.fields import check_types, flag_of
from mujica_jax.config.schema import Config
from mujica_jax.config.tasks import STORED_WITHOUT
from mujica_jax.errors import UserError, nearest

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "configs"  # where a wheel has what stands beside the package in a checkout
CONFIG_FOLDER = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "configs"

Section = TypeVar("Section")


def command_line(arguments: Sequence[str], *, default: str) -> Config:
    """`[FILE] [flags]` -> Config. FILE is a path or the name of a file in configs/."""
    words = list(arguments)
    name = take_file(words) or default
    return override(load_config(name), words, prog=f"python -m mujica_jax.train {name}")


def take_file(words: list[str]) -> str | None:
    """Remove the configuration from a command line: the first word if no flag, or a `.py` that is
    no flag's value."""
    if words and not words[0].startswith("-"):
        return words.pop(0)
    for place in range(1, len(words)):
        before, word = words[place - 1], words[place]
        if (
            word.endswith(".py")
            and not word.startswith("-")
            and (not before.startswith("-") or "=" in before)
        ):
            return words.pop(place)
    return None


def override(values: Section, arguments: Sequence[str], *, prog: str) -> Section:
    """The dataclass with the fields that flags name replaced."""
    words = list(arguments)
    for section, kinds in _sections_with_kinds(type(values)).items():
        words = _with_new_names(words, section, kinds.values())
        values = _of_kind(values, section, kinds, words)
    words = _with_true(words, set(_true_or_false("", values)))
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
    for place, word in enumerate(words):
        complete.append(word)
        has_value = place + 1 < len(words) and not words[place + 1].startswith("--")
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
    """With a section of another kind: what both have keeps the value that was chosen, the rest has
    its default."""
    changed = _of_kind(
        config, section, _sections_with_kinds(type(config))[section], [f"--{section}.kind", kind]
    )
    for field in dataclasses.fields(getattr(changed, section)):
        if getattr(getattr(changed, section), field.name) is tyro.MISSING:
            raise UserError(
                f"{section} {kind} needs {field.name}, which {section}.kind "
                f"{getattr(config, section).kind} has not: begin with --{section}.kind {kind}"
            )
    return changed


def load_config(name: str | Path) -> Config:
    """The Config of a file: a path, or a name in configs/ with or without `.py`."""
    known = {path.stem: path for path in sorted(CONFIG_FOLDER.glob("*.py"))}
    path = Path(name) if Path(name).suffix == ".py" and Path(name).is_file() else None
    path = path or known.get(str(Path(name)).removeprefix("configs/").removesuffix(".py"))
    if path is None:
        raise UserError(f"there is no configuration {name}: {nearest(Path(name).stem, known)}")
    spec = importlib.util.spec_from_file_location(f"mujica_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except UserError:
        raise
    except Exception as error:
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


def implementation(section: Any) -> Callable[..., Any]:
    """What a section of several kinds names as its implementation, imported now."""
    sentence = (
        f"the implementation of {section.kind} is {section.implementation!r} and is not there; its "
        "section must name"
    )
    return _imported(section.implementation, f"{sentence} it as module:function")


def named_object(place: str, *, setting: str) -> Callable[..., Any]:
    """Return the function that a setting names as module:function. Raises UserError if there is
    none."""
    imported = _imported(
        place, f"{setting} is {place!r} and is not there: name it as module:function"
    )
    if not callable(imported):
        raise UserError(
            f"{setting} is {place!r} and names a {type(imported).__name__}: name a function"
        )
    return imported


def _imported(place: str, sentence: str) -> Any:
    """Return what module:function names. Raises UserError with this sentence where the module or
    function is absent."""
    module, _, name = place.partition(":")
    if not module or not name:
        raise UserError(sentence)
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # what the module imports is missing
        raise UserError(sentence) from error
    except AttributeError as error:
        if module not in sys.modules:
            raise  # it was raised in the module
        raise UserError(sentence) from error


def from_dict(kind: type[Section], values: Mapping[str, Any]) -> Section:
    """A config dataclass from what `dataclasses.asdict` made of it, read back from JSON.

    Raises UserError naming a field that this program does not know or that is missing.
    """
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    renamed = getattr(kind, "renamed", {})
    values = {renamed.get(name, name): value for name, value in values.items()}
    for name in values:
        if name not in known:
            raise UserError(f"{kind.__name__} has no field {name}: {nearest(name, sorted(known))}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if STORED_WITHOUT in field.metadata:
            values = {field.name: field.metadata[STORED_WITHOUT], **values}
    try:
        return kind(
            **{
                name: _value(f"{kind.__name__}.{name}", hints[name], value)
                for name, value in values.items()
            }
        )
    except TypeError as error:
        raise UserError(f"{kind.__name__} cannot be read back: {error}") from error


def _value(name: str, hint: Any, value: Any) -> Any:
    options = _options(hint)
    if isinstance(value, list) and any(typing.get_origin(option) is tuple for option in options):
        return tuple(value)
    sections = [option for option in options if _is_section(option)]
    if not sections and isinstance(value, Mapping):
        raise UserError(f"{name} is {value} and must be a single value")
    if not sections:
        return value
    if not isinstance(value, Mapping):
        fields = " or ".join(f"the fields of {section.__name__}" for section in sections)
        raise UserError(f"{name} is {value} and must be an object with {fields}")
    kinds = {_kind_of(section): section for section in sections}
    kind = "" if "" in kinds else str(value.get("kind"))
    if kind not in kinds:
        raise UserError(f"there is no kind {kind}: {nearest(kind, kinds.keys())}")
    return from_dict(kinds[kind], value)


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _is_section(option: Any) -> TypeGuard[type]:
    return isinstance(option, type) and dataclasses.is_dataclass(option)


def _fields(section: type) -> set[str]:
    return {field.name for field in dataclasses.fields(section)}


def _kind_of(section: type) -> str:
    """Return the literal that tells this dataclass from the others of its union; empty for one that
    has none.

    A `kind` with several values, as of the engine, is a field like any other."""
    hint = typing.get_type_hints(section).get("kind")
    if typing.get_origin(hint) is not typing.Literal or len(typing.get_args(hint)) > 1:
        return ""
    return typing.get_args(hint)[0]


def _sections_with_kinds(config: type) -> dict[str, dict[str, type]]:
    """Section -> kind -> dataclass."""
    found = {}
    for name, hint in typing.get_type_hints(config).items():
        members = {_kind_of(option): option for option in _options(hint) if _is_section(option)}
        if members and "" not in members:
            found[name] = members
    return found


def _with_new_names(words: Sequence[str], section: str, kinds: Iterable[type]) -> list[str]:
    """Return the command line with flags of the last release under their new names (`renamed` of a
    section)."""
    new_names: dict[str, str] = {}
    for kind in kinds:
        for old, new in getattr(kind, "renamed", {}).items():
            new_names[flag_of(f"{section}.{old}")] = flag_of(f"{section}.{new}")
            new_names[f"--{section}.{old}"] = flag_of(f"{section}.{new}")
    renamed_words = []
    for word in words:
        flag, equals, value = word.partition("=")
        renamed_words.append(f"{new_names.get(flag, flag)}{equals}{value}")
    return renamed_words


def _of_kind(values: Section, section: str, kinds: Mapping[str, type], words: list[str]) -> Section:
    """`values` with the section of the kind that a flag names, which is taken out of `words`."""
    current = getattr(values, section)
    kind = take_flag(words, f"--{section}.kind")
    kind = current.kind if kind is None else kind
    if kind not in kinds:
        raise UserError(
            f"--{section}.kind is {kind} and there is none of this name: "
            f"{nearest(kind, kinds.keys())}"
        )
    fields = _fields(kinds[kind])
    for word in words:
        name = word.partition("=")[0].removeprefix(f"--{section}.").replace("-", "_")
        owners = [other for other, member in kinds.items() if name in _fields(member)]
        if word.startswith(f"--{section}.") and name not in fields and owners:
            raise UserError(
                f"--{section}.{name.replace('_', '-')} is a field of {section}.kind "
                f"{' and '.join(owners)}, and {section}.kind is {kind}: leave it out, or add "
                f"--{section}.kind {owners[0]}"
            )
    if kind == current.kind:
        return values
    defaults, defaults_before = _defaults(kinds[kind]), _defaults(type(current))
    shared = {name: getattr(current, name) for name in fields & _fields(type(current)) - {"kind"}}
    # What nobody chose gives way to what the new kind says.
    kept = {
        name: value
        for name, value in shared.items()
        if name not in defaults or value != defaults_before.get(name, tyro.MISSING)
    }
    required = {
        name: tyro.MISSING
        for name in fields - {"kind"}
        if name not in defaults and name not in kept
    }
    return dataclasses.replace(values, **{section: kinds[kind](**kept, **required)})  # type: ignore[type-var]


def _defaults(section: type) -> dict[str, Any]:
    return {
        f.name: f.default
        for f in dataclasses.fields(section)
        if f.default is not dataclasses.MISSING
    }


def take_flag(words: list[str], flag: str) -> str | None:
    """Remove `flag VALUE` or `flag=VALUE` from a command line; the last one counts."""
    value = None
    for place in reversed(range(len(words))):
        if words[place].startswith(f"{flag}="):
            given = words.pop(place).partition("=")[2]
        elif words[place] == flag and place + 1 < len(words):
            given = words[place + 1]
            del words[place : place + 2]
        else:
            continue
        value = given if value is None else value
    return value
