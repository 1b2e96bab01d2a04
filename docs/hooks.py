"""Hooks of mkdocs, which `make docs` calls.

- `on_files` adds the page of the configuration. It is written from the dataclasses in
  `mujica_jax/config`, so it is never out of date.
- `on_page_markdown` replaces links to files outside docs/ by the files' paths. Such links work in a
  checkout, and the site has no such files.
"""

import dataclasses
import html
import os
import re
import typing
from pathlib import PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mujica_jax.config.field_help import docstring, field_comments, single_choice, type_in_words
from mujica_jax.config.fields import union_members
from mujica_jax.config.methods import RemoteConfig
from mujica_jax.config.schema import Config

PAGE = "reference/configuration.md"
# A link whose target begins with "../": its text, and the target without an anchor.
LINK_UPWARDS = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")
TABLE_HEAD = "| flag | type | default | meaning |\n|---|---|---|---|"
# What stands for the type of a field that is a section itself.
REMOTE_SECTION = "[the fields of remote](#the-fields-of-remote)"
INTRODUCTION = """\
# Configuration

This page lists every setting of a run, with its type, its default and its meaning. It is generated
from the dataclasses in `mujica_jax/config`.

A configuration is a Python file in `configs/`. It returns a `Config`, and flags override its fields:

```
python -m mujica_jax.train configs/tiny_world.py --seed 1 --method.rounds 4
```

- A flag is the name of its field with dashes for underscores. Both spellings work.
- A switch has no value: `--section.field` sets it, and `--section.no-field` clears it.
- `--section.kind NAME` changes the kind of a section. Fields that both kinds have keep a value that was
  chosen. All others take the default of the new kind, or have to be given.
- *required* stands where a field has no default: each configuration file sets it.
- `python -m mujica_jax.train CONFIG --help all` shows the same list with the values of CONFIG.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the configuration to the files of the site."""
    files.append(File.generated(config, PAGE, content=configuration_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files outside docs/ by the paths of those files."""

    def as_path(link: re.Match[str]) -> str:
        folder = PurePosixPath("docs", page.file.src_uri).parent
        target = os.path.normpath(folder / link[2])
        if target.startswith("docs/"):
            return link[0]
        return f"`{target}`" if link[1].strip("`") in target else f"{link[1]} (`{target}`)"

    return LINK_UPWARDS.sub(as_path, markdown)


def configuration_page() -> str:
    """Return the page of the configuration in Markdown."""
    hints = typing.get_type_hints(Config, include_extras=True)
    parts = [INTRODUCTION, "## Top level", "Flags without a section.", table_of(Config, prefix="")]
    for name, hint in hints.items():
        kinds = [option for option in union_members(hint) if dataclasses.is_dataclass(option)]
        if kinds:
            parts.append(f"## `{name}`")
            parts += section_parts(name, kinds)
    parts += [
        "## The fields of `remote`",
        prose(RemoteConfig),
        "`--method.remote.*` has these fields for EviPath's teacher and for the second model of "
        "DecEx-RAG. `--remote.*` of `eval` has them for a model that is evaluated.",
        table_of(RemoteConfig, prefix="remote."),
    ]
    return "\n\n".join(parts) + "\n"


def section_parts(name: str, kinds: list[Any]) -> list[str]:
    """Return the paragraphs of a section: a table for each kind, or one that equal kinds share."""
    if len(kinds) == 1:
        return [prose(kinds[0]), table_of(kinds[0], prefix=f"{name}.")]

    kinds_by_table: dict[str, list[Any]] = {}
    for kind in kinds:
        table = table_of(kind, prefix=f"{name}.")
        kinds_by_table.setdefault(table, []).append(kind)

    parts = []
    for table, same_kinds in kinds_by_table.items():
        flags = [f"`--{name}.kind {kind_name(kind)}`" for kind in same_kinds]
        parts.append(f"### {', '.join(flags)}")
        texts = dict.fromkeys(prose(kind) for kind in same_kinds)
        parts += [text for text in texts if text]
        parts.append(table)
    return parts


def kind_name(section: Any) -> str:
    """Return the value of `kind` that chooses a section."""
    return typing.get_args(typing.get_type_hints(section)["kind"])[0]


def prose(section: Any) -> str:
    """Return the docstring of a section for a page, or nothing if it has none of its own."""
    return html.escape(docstring(section), quote=False)


def table_of(section: Any, prefix: str) -> str:
    """Return the table of a section's fields, without those that are sections of their own."""
    hints = typing.get_type_hints(section, include_extras=True)
    comments = field_comments(section)
    rows = [TABLE_HEAD]
    for field in dataclasses.fields(section):
        is_choice_of_section = field.name == "kind" and single_choice(hints["kind"])
        options = union_members(hints[field.name])
        if prefix == "" and any(map(dataclasses.is_dataclass, options)):
            continue
        if is_choice_of_section:
            continue
        flag = f"--{prefix}{field.name}".replace("_", "-")
        meaning = comments.get(field.name, "")
        if dataclasses.is_dataclass(hints[field.name]):
            flag += ".*"
            meaning = prose(hints[field.name])
        cells = (
            f"`{flag}`",
            cell(type_in_words(hints[field.name], section=REMOTE_SECTION)),
            default_in_words(field),
            cell(meaning),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def cell(text: str) -> str:
    """Return text for a cell of a table. Asterisks stay asterisks, code in backticks stays code."""
    pieces = html.escape(text, quote=False).replace("|", "\\|").split("`")
    for index in range(0, len(pieces), 2):
        pieces[index] = pieces[index].replace("*", "\\*")
    return "`".join(pieces)


def default_in_words(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field as the page shows it."""
    if field.default is dataclasses.MISSING:
        return "*required*"
    if dataclasses.is_dataclass(field.default):
        return "see there"
    if field.default == ():
        return "none"
    return f"`{field.default}`"
