"""The command line: a configuration's name and flags, read into dataclasses.

Tyro reads the flags. For a mistyped flag it shows the nearest known one, for a wrong choice the list of
choices. Both end with status 2. `program_help` prints the help.

Two things have to be known before tyro can start, because it needs the final type of every section:
which configuration file holds the defaults, and which kind each section has. Tyro's own way to choose a
kind is a sub-command, and a user types a flag (`--method.kind grpo`). So the file's name and the flags
for kinds are taken out of the command line first.
"""

import argparse
import dataclasses
import functools
import inspect
import sys
import typing
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import tyro

from mujica_jax.config.fields import flag_of
from mujica_jax.config.files import load_config
from mujica_jax.config.kinds import (
    check_flags,
    kind_class,
    section_types,
    sections_with_kinds,
    with_kind,
)
from mujica_jax.config.methods import FileMethodConfig
from mujica_jax.config.program_help import ProgramHelp, help_text, negated, wanted_help
from mujica_jax.config.renamed_fields import with_new_flags
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError

Section = TypeVar("Section")


def command_line(
    arguments: Sequence[str],
    *,
    default: str,
    prog: str = "python -m mujica_jax.train",
    program: ProgramHelp | None = None,
) -> Config:
    """Return the Config of a command line `[FILE] [flags]`.

    FILE is a path or the name of a file in configs/. With `--init` and `--method.kind sft` or
    `dpo`, the warm-up of FILE is left out, unless a flag `--warmup.*` asks for it.
    """
    words = list(arguments)
    name = take_file(words) or default
    from_file = load_config(name)
    config = override(from_file, words, prog=prog, program=program)

    # A method that learns a file starts at the checkpoint itself. The warm-up of the configuration
    # file was meant for the method that the file names.
    is_other_method = config.method.kind != from_file.method.kind
    learns_file = isinstance(config.method, FileMethodConfig) and is_other_method
    asks_for_warmup = any(word.startswith("--warmup.") for word in words)
    if config.init and learns_file and not asks_for_warmup:
        warmup = dataclasses.replace(config.warmup, steps=0)
        config = dataclasses.replace(config, warmup=warmup)
    return config


def override(
    values: Section, arguments: Sequence[str], *, prog: str, program: ProgramHelp | None = None
) -> Section:
    """Return the dataclass with the values of flags in place of its own.

    Before tyro reads the flags, old names become new ones, and each section gets its final kind.

    `prog` is how the program is started, and `program` describes it for `--help`. Without a
    description the help is the docstring of the dataclass with all flags. The help ends the program
    with status 0.
    """
    # Give flags of the last release their new names.
    words = with_new_flags(arguments, _possible_sections(values, arguments))

    # Take out `--section.kind NAME`, and change the section to that kind.
    named_sections = []
    for section, kinds in sections_with_kinds(type(values)).items():
        named_kind = take_flag(words, f"--{section}.kind")
        if named_kind is not None:
            named_sections.append(section)
        new_class = kind_class(values, section, named_kind)
        check_flags(section, new_class, kinds, words)
        values = with_kind(values, section, new_class)

    # Print the help, and end.
    help_kind = wanted_help(words)
    if help_kind:
        text = help_text(
            values,
            prog=prog,
            program=program or _plain_help(values),
            show_all=help_kind == "all" or program is None,
            named=named_sections,
        )
        print(text, end="")
        raise SystemExit(0)

    # Rewrite the switches of the last release, `--flag True` and `--flag False`.
    words = _with_switches(words, switches=set(_switches("", values)))

    with warnings.catch_warnings():
        # Tyro warns about a plug-in, because its dataclass is not in the union of the built-in ones.
        warnings.filterwarnings("ignore", message="(?s).*does not match any type in Union")
        return tyro.cli(
            tyro.conf.AvoidSubcommands[type(values)],
            args=words,
            default=values,
            prog=prog,
        )


def _plain_help(values: Any) -> ProgramHelp:
    """Return the help of a program that describes itself only by the docstring of its flags."""
    summary = inspect.cleandoc(type(values).__doc__ or "").partition("\n\n")[0]
    return ProgramHelp(summary=summary, usage="[flags]", examples={}, common={})


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


def _with_switches(words: Sequence[str], switches: Collection[str]) -> list[str]:
    """Return the command line with `--no-flag` in place of `--flag False`, and without `True`.

    Raises UserError if a switch has another value.
    """
    new_words: list[str] = []
    waiting_words = list(words)
    while waiting_words:
        word = waiting_words.pop(0)
        spelling, equals, value = word.partition("=")
        flag = spelling.replace("_", "-")
        if flag not in switches:
            new_words.append(word)
            continue
        if not equals:
            has_value = bool(waiting_words) and not waiting_words[0].startswith("-")
            value = waiting_words.pop(0) if has_value else ""
        if value not in ("", "True", "False"):
            raise UserError(
                f"{flag} is followed by {value!r} and takes no value: write {flag} or "
                f"{negated(flag)}"
            )
        new_flag = negated(flag) if value == "False" else flag
        if value:
            _say_once(f"{flag} {value} is now {new_flag}; the old form works in this release")
        new_words.append(new_flag)
    return new_words


def _possible_sections(values: Any, arguments: Sequence[str]) -> dict[str, list[type]]:
    """Return the dataclasses that each section may be, with the plug-ins that flags name.

    A plug-in may call a field of its own like an old name of a built-in one.
    """
    sections = section_types(type(values))
    for section in sections_with_kinds(type(values)):
        named_kind = take_flag([*arguments], f"--{section}.kind")
        sections[section] = [*sections[section], kind_class(values, section, named_kind)]
    return sections


@functools.cache
def _say_once(sentence: str) -> None:
    """Print a sentence on stderr, once in a process."""
    print(sentence, file=sys.stderr, flush=True)


def _switches(prefix: str, section: Any) -> Iterator[str]:
    """Yield the flags of all fields that are true or false."""
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        name = f"{prefix}{field.name}"
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _switches(f"{name}.", value)
        elif hints[field.name] is bool:
            yield flag_of(name)
