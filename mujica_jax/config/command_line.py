"""The command line: a configuration's name and flags, read into dataclasses.

Tyro reads the flags. For a mistyped flag it shows the nearest known one, for a wrong choice the list of
choices. Both end with status 2.

Two things have to be known before tyro can start, because it needs the final type of every section:
which configuration file holds the defaults, and which kind each section has. Tyro's own way to choose a
kind is a sub-command, and a user types a flag (`--method.kind grpo`). So the file's name and the flags
for kinds are taken out of the command line first.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import tyro

from mujica_jax.config.files import load_config
from mujica_jax.config.kinds import (
    check_flags,
    kind_class,
    section_types,
    sections_with_kinds,
    with_kind,
)
from mujica_jax.config.renamed_fields import with_new_flags
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError

Section = TypeVar("Section")


def command_line(arguments: Sequence[str], *, default: str) -> Config:
    """Return the Config of a command line `[FILE] [flags]`.

    FILE is a path or the name of a file in configs/.
    """
    words = list(arguments)
    name = take_file(words) or default
    return override(load_config(name), words, prog=f"python -m mujica_jax.train {name}")


def override(values: Section, arguments: Sequence[str], *, prog: str) -> Section:
    """Return the dataclass with the values of flags in place of its own.

    Before tyro reads the flags, old names become new ones, and each section gets its final kind.
    """
    # Give flags of the last release their new names.
    words = with_new_flags(arguments, _possible_sections(values, arguments))

    # Take out `--section.kind NAME`, and change the section to that kind.
    for section, kinds in sections_with_kinds(type(values)).items():
        named_kind = take_flag(words, f"--{section}.kind")
        new_class = kind_class(values, section, named_kind)
        check_flags(section, new_class, kinds, words)
        values = with_kind(values, section, new_class)

    # Write `--flag` without a value as `--flag True`.
    words = _with_true(words, flags=set(_true_or_false("", values)))

    with warnings.catch_warnings():
        # Tyro warns about a plug-in, because its dataclass is not in the union of the built-in ones.
        warnings.filterwarnings("ignore", message="(?s).*does not match any type in Union")
        return tyro.cli(
            tyro.conf.AvoidSubcommands[type(values)],
            args=words,
            default=values,
            prog=prog,
            config=(tyro.conf.FlagConversionOff,),
        )


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


def take_flag(words: list[str], flag: str) -> str | None:
    """Remove a flag and its value from a command line, and return the value.

    If the flag stands there several times, the last value counts. Returns None if it is not there.
    Raises UserError if its value is missing.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(flag, dest="value")
    try:
        parsed, words[:] = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{flag} has no value: write {flag} VALUE") from error
    return parsed.value


def _possible_sections(values: Any, arguments: Sequence[str]) -> dict[str, list[type]]:
    """Return the dataclasses that each section may be, with the plug-ins that flags name.

    A plug-in may call a field of its own like an old name of a built-in one.
    """
    sections = section_types(type(values))
    for section in sections_with_kinds(type(values)):
        named_kind = take_flag([*arguments], f"--{section}.kind")
        sections[section] = [*sections[section], kind_class(values, section, named_kind)]
    return sections


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
