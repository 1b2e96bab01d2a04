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
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import tyro

from mujica_jax.config.fields import flag_of
from mujica_jax.config.files import load_config
from mujica_jax.config.kinds import check_kind, section_types, sections_with_kinds, with_kind
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

    FILE is a path or the name of a file in configs/.
    """
    words = list(arguments)
    name = take_file(words) or default
    return override(load_config(name), words, prog=prog, program=program)


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
    words = with_new_flags(arguments, section_types(type(values)))

    # Take out `--section.kind NAME`, and change the section to that kind.
    named_sections = []
    for section, kinds in sections_with_kinds(type(values)).items():
        named_kind = take_flag(words, f"--{section}.kind")
        if named_kind is not None:
            named_sections.append(section)
        kind = getattr(values, section).kind if named_kind is None else named_kind
        check_kind(section, kind, kinds, words)
        values = with_kind(values, section, kinds[kind])

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
