"""Print the help of a program: what it does, examples, configurations, and its flags.

Plain `--help` shows the flags that a program names as common, `--help all` shows every flag, and
`--method.kind grpo --help` also shows all settings of GRPO. The texts, types and defaults come from
the settings' dataclasses.
"""

import ast
import dataclasses
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from mujica_jax.config.bounds import Bound
from mujica_jax.config.field_help import (
    docstring,
    field_comments,
    first_sentence,
    single_choice,
)
from mujica_jax.config.fields import flag_of, union_members
from mujica_jax.config.files import CONFIG_FOLDER
from mujica_jax.config.kinds import section_types, sections_with_kinds

# The help is as wide as the terminal, within these limits.
MIN_WIDTH = 60
MAX_WIDTH = 100
# In a table with longer names, the sentences stand below the names.
MAX_NAME_WIDTH = 24
INDENT = "  "
TEXT_INDENT = " " * 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramHelp:
    """What the help of a program shows besides the texts of its flags."""

    # One sentence about what the program does.
    summary: str
    # What stands behind the program's name in the usage line.
    usage: str
    # Commands without the program's name, each with its meaning.
    examples: Mapping[str, str]
    # Names of the fields that plain `--help` shows, as in "trainer.batch_size", by heading. A name
    # that the chosen kind of a section lacks is left out.
    common: Mapping[str, Sequence[str]]
    # The configuration that is used if the command names none. None: the program takes none.
    default_config: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagHelp:
    """The help of one flag."""

    # Dotted name of the field.
    name: str
    # How the flag is written, with its value.
    usage: str
    # Meaning of the field.
    text: str
    # Bounds and default.
    note: str
    # The first sentence of each kind's docstring, for a flag that chooses a kind.
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)


def program_name(command: str) -> str:
    """Return how the running program is started: `mujica train`, or `python -m ...`."""
    started = Path(sys.argv[0])
    if started.name == "mujica":
        return f"mujica {command}"
    if started.name == "__main__.py" and started.parent.name == "mujica_jax":
        return f"python -m mujica_jax {command}"
    return f"python -m mujica_jax.{command}"


def wanted_help(words: Sequence[str]) -> Literal["", "common", "all"]:
    """Return which help a command line asks for. "" stands for none."""
    for index, word in enumerate(words):
        if word in ("-h", "--help"):
            return "all" if words[index + 1 : index + 2] == ["all"] else "common"
        if word == "--help=all":
            return "all"
    return ""


def help_text(
    values: Any, *, prog: str, program: ProgramHelp, show_all: bool, named: Collection[str]
) -> str:
    """Return the help of a program as text.

    `values` holds the defaults. `named` are the sections whose kind the command line chooses. All
    settings of these sections are shown.
    """
    flags = {flag.name: flag for flag in flags_of(values)}
    lines = [*_wrapped(program.summary), "", f"usage: {prog} {program.usage}".rstrip()]
    if program.examples:
        lines += ["", "examples:"]
    for words, meaning in program.examples.items():
        lines += [f"{INDENT}{prog} {words}".rstrip(), *_wrapped(meaning, indent=TEXT_INDENT)]
    if program.default_config is not None:
        lines += [
            "",
            f"CONFIG is a Python file or one of these names (default: {program.default_config}):",
        ]
        lines += _table(config_summaries())

    groups = _all_groups(values, flags) if show_all else _common_groups(values, program, named)
    for heading, names in groups.items():
        shown = [flags[name] for name in names if name in flags]
        if shown:
            lines += ["", *_wrapped(f"{heading}:")]
            for flag in shown:
                lines += _flag_lines(flag)

    lines.append("")
    if not show_all:
        lines += _wrapped(f"{prog} --help all lists every flag.")
    kinds = [f"--{section}.kind" for section in sections_with_kinds(type(values))]
    if kinds:
        lines += _wrapped(
            f"With {', '.join(kinds[:-1])} or {kinds[-1]} NAME before it, --help also shows all "
            "settings of this kind."
        )
    return "\n".join(lines) + "\n"


def flags_of(values: Any, prefix: str = "") -> Iterator[FlagHelp]:
    """Yield the help of each field, those of sections included."""
    hints = typing.get_type_hints(type(values), include_extras=True)
    comments = field_comments(type(values))
    text_prefix = getattr(values, "help_prefix", "")
    kinds = sections_with_kinds(type(values))
    for field in dataclasses.fields(values):
        name = prefix + field.name
        value = getattr(values, field.name)
        if dataclasses.is_dataclass(value):
            if field.name in comments:
                section_flag = f"{flag_of(name)}.*"
                yield FlagHelp(name=name, usage=section_flag, text=comments[field.name], note="")
            for flag in flags_of(value, prefix=f"{name}."):
                if flag.name == f"{name}.kind" and field.name in kinds:
                    yield dataclasses.replace(flag, kinds=_kind_summaries(kinds[field.name]))
                else:
                    yield flag
            continue
        yield FlagHelp(
            name=name,
            usage=_usage(name, hints[field.name]),
            text=text_prefix + comments.get(field.name, ""),
            note=_note(hints[field.name], value),
        )


def config_summaries() -> dict[str, str]:
    """Return the first sentence of each configuration in `configs/`, by its name."""
    summaries = {}
    for file in sorted(CONFIG_FOLDER.glob("*.py")):
        if file.stem != "__init__":
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            summaries[file.stem] = first_sentence(text)
    return summaries


def _kind_summaries(kinds: Mapping[str, type]) -> dict[str, str]:
    """Return the first sentence of each kind's docstring, by its name."""
    return {name: first_sentence(docstring(kind)) for name, kind in kinds.items()}


def _common_groups(
    values: Any, program: ProgramHelp, named: Collection[str]
) -> dict[str, Sequence[str]]:
    """Return the names of the flags of plain `--help`, by heading."""
    groups: dict[str, Sequence[str]] = {}
    shown: set[str] = set()
    for section in named:
        kind = getattr(values, section)
        names = [flag.name for flag in flags_of(kind, prefix=f"{section}.")]
        groups[f"Settings of --{section}.kind {kind.kind}"] = names
        shown |= set(names)
    for heading, names in program.common.items():
        groups[heading] = [name for name in names if name not in shown]
    return groups


def _all_groups(values: Any, flags: Mapping[str, FlagHelp]) -> dict[str, Sequence[str]]:
    """Return the names of all flags, by section. The heading has the docstring of the section."""
    groups: dict[str, list[str]] = {"Flags without a section": []}
    headings = {}
    for section in section_types(type(values)):
        heading = section
        sentence = first_sentence(docstring(type(getattr(values, section)))).rstrip(".:")
        if sentence:
            heading += f" ({sentence})"
        headings[section] = heading
        groups[heading] = []
    for name in flags:
        section = name.partition(".")[0]
        groups[headings.get(section, "Flags without a section")].append(name)
    return dict(groups)


def _usage(name: str, hint: Any) -> str:
    """Return how a flag is written, such as "--seed N"."""
    flag = flag_of(name)
    if hint is bool:
        return f"{flag}, {negated(flag)}"
    return f"{flag} {_placeholder(hint)}"


def negated(flag: str) -> str:
    """Return the flag that switches a field off: `--no-x`, or `--section.no-x`."""
    section, dot, field = flag.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no-{field}"


def _placeholder(hint: Any) -> str:
    """Return what stands for the value of a flag."""
    if typing.get_origin(hint) is typing.Annotated:
        return _placeholder(hint.__origin__)
    if single_choice(hint):
        return "NAME"
    if typing.get_origin(hint) is Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    if typing.get_origin(hint) is tuple:
        members = [member for member in typing.get_args(hint) if member is not ...]
        placeholders = " ".join(map(_placeholder, members))
        return f"{placeholders} ..." if ... in typing.get_args(hint) else placeholders
    options = [option for option in union_members(hint) if option is not types.NoneType]
    if len(options) > 1 or options[0] is not hint:
        return _placeholder(options[0])
    return {int: "N", float: "X"}.get(hint, "TEXT")


def _note(hint: Any, value: Any) -> str:
    """Return the bounds and the default of a field. A field that is None says itself what it means."""
    parts = []
    for option in union_members(hint):
        for annotation in getattr(option, "__metadata__", ()):
            if isinstance(annotation, Bound):
                parts.append(annotation.words)
    if value is tyro.MISSING:
        parts.append("required")
    elif isinstance(value, bool):
        parts.append(f"default: {'on' if value else 'off'}")
    elif isinstance(value, tuple) and value:
        parts.append(f"default: {' '.join(map(str, value))}")
    elif value is not None and value != ():
        parts.append(f"default: {value}")
    return "; ".join(parts)


def _flag_lines(flag: FlagHelp) -> list[str]:
    """Return the lines of one flag."""
    text = f"{flag.text} ({flag.note})" if flag.note else flag.text
    lines = [INDENT + flag.usage, *_wrapped(text, indent=TEXT_INDENT)]
    return lines + _table(flag.kinds, indent=TEXT_INDENT + INDENT)


def _table(rows: Mapping[str, str], indent: str = INDENT) -> list[str]:
    """Return names with their sentences, in two columns. Below long names, if there are any."""
    name_width = max(map(len, rows), default=0) + 2
    if name_width > MAX_NAME_WIDTH:
        lines = []
        for name, text in rows.items():
            lines += [indent + name, *_wrapped(text, indent=indent + TEXT_INDENT)]
        return lines
    lines = []
    for name, text in rows.items():
        first_indent = indent + name.ljust(name_width)
        lines += _wrapped(text, indent=" " * len(first_indent), first_indent=first_indent)
    return lines


def _wrapped(text: str, *, indent: str = "", first_indent: str | None = None) -> list[str]:
    """Return a text in lines that fit the terminal."""
    columns = shutil.get_terminal_size().columns
    return textwrap.wrap(
        text,
        width=max(MIN_WIDTH, min(MAX_WIDTH, columns)),
        initial_indent=indent if first_indent is None else first_indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
