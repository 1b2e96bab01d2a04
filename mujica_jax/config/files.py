"""Configuration files and the command line: `configs/NAME.py` gives a Config, flags override its fields.

A mistyped flag is answered by tyro with the nearest known one, a wrong choice with the list of choices; both exit with status 2.
"""

import dataclasses
import difflib
import importlib.util
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "configs"

Section = TypeVar("Section")


def command_line(arguments: Sequence[str], *, default: str) -> Config:
    """`[FILE] [flags]` -> Config. FILE is a path or the name of a file in configs/."""
    words = list(arguments)
    name = take_file(words) or default
    return override(load_config(name), words, prog=f"python -m mujica_jax.train {name}")


def take_file(words: list[str]) -> str | None:
    """Remove the configuration from a command line: the first word, unless it is a flag, or a `.py` file that is no flag's value."""
    if words and not words[0].startswith("-"):
        return words.pop(0)
    for place in range(1, len(words)):
        before, word = words[place - 1], words[place]
        if word.endswith(".py") and not word.startswith("-") and (not before.startswith("-") or "=" in before):
            return words.pop(place)
    return None


def override(values: Section, arguments: Sequence[str], *, prog: str) -> Section:
    """The dataclass with the fields that flags name replaced."""
    import tyro  # 0.2 s

    return tyro.cli(
        tyro.conf.AvoidSubcommands[type(values)],
        args=list(arguments),
        default=values,
        prog=prog,
        config=(tyro.conf.FlagConversionOff,),
    )


def load_config(name: str) -> Config:
    """The Config of a file: a path, or a name in configs/ with or without `.py`."""
    known = {path.stem: path for path in sorted(CONFIG_FOLDER.glob("*.py"))}
    path = Path(name) if Path(name).suffix == ".py" and Path(name).exists() else known.get(Path(name).stem)
    if path is None:
        near = difflib.get_close_matches(Path(name).stem, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
        raise UserError(f"there is no configuration {name}: {hint}")
    spec = importlib.util.spec_from_file_location(f"mujica_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except (SyntaxError, ImportError, AttributeError, TypeError, NameError) as error:
        raise UserError(
            f"configuration {path} does not load: {error}; it must define get_config() -> Config"
        ) from error
    if not isinstance(config, Config):
        raise UserError(f"configuration {path}: get_config() gave a {type(config).__name__}; it must return a Config")
    return config


def from_dict(kind: type[Section], values: Mapping[str, Any]) -> Section:
    """A config dataclass from what `dataclasses.asdict` made of it, read back from JSON.

    Raises UserError naming a field that this program does not know or that is missing.
    """
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(f"{kind.__name__} has no field {name}" + (f"; did you mean {near[0]}?" if near else ""))
    try:
        return kind(**{name: _value(hints[name], value) for name, value in values.items()})
    except TypeError as error:
        raise UserError(f"{kind.__name__} cannot be read back: {error}") from error


def _value(hint: Any, value: Any) -> Any:
    options = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    if isinstance(value, list) and any(typing.get_origin(option) is tuple for option in options):
        return tuple(value)
    if not isinstance(value, Mapping):
        return value
    sections = [option for option in options if dataclasses.is_dataclass(option)]
    for section in sections:
        if {field.name for field in dataclasses.fields(section)} == set(value):
            return from_dict(section, value)  # type: ignore[arg-type]
    return from_dict(sections[0], value)  # type: ignore[arg-type]  # names the field that does not fit
