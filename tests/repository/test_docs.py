"""The documentation site: its menu has every page, its links lead somewhere, it needs no other host,
and its page of the configuration says what `--help` says.
"""

import dataclasses
import functools
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig

from docs.hooks import PAGE, configuration_page, kind_name
from mujica_jax.config.command_line import command_line
from mujica_jax.config.field_help import field_comments
from mujica_jax.config.fields import union_members
from mujica_jax.config.methods import RemoteConfig
from mujica_jax.config.schema import Config
from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"
# A tag that makes a browser fetch something of another host.
FETCHES = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//', re.ASCII)


def site(folder: Path) -> MkDocsConfig:
    """Return the configuration of the site, which is built into a folder."""
    return load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))


def pages_of(nav: Any) -> list[str]:
    """Return the pages that a menu names."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages_of(entry)]


def test_the_menu_has_every_page_once(tmp_path):
    written = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(pages_of(site(tmp_path).nav)) == sorted([*written, PAGE])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return the folder of the built site.

    A link or an anchor that leads nowhere ends the build, and so does a module that is not there.
    """
    folder = tmp_path_factory.mktemp("site")
    build(site(folder))
    return folder


def test_every_link_and_anchor_leads_somewhere_and_no_page_fetches_from_another_host(built):
    pages = sorted(built.rglob("*.html"))
    assert len(pages) > 20
    assert [path for path in pages if FETCHES.search(path.read_text())] == []


def test_links_to_files_outside_the_docs_become_their_paths(built):
    text = (built / "concepts" / "methods.html").read_text()
    assert "<code>mujica_jax/methods/mygo.py</code>" in text
    assert 'href="../../mujica_jax' not in text


# --- the page of the configuration ---


def sections() -> dict[str, list[Any]]:
    """Return the dataclasses that each section of a configuration may be."""
    by_name = {}
    for name, hint in typing.get_type_hints(Config).items():
        kinds = [option for option in union_members(hint) if dataclasses.is_dataclass(option)]
        if kinds:
            by_name[name] = kinds
    return by_name


def flags() -> set[str]:
    """Return every flag of `train`, whatever kinds are chosen."""
    names = {field.name for field in dataclasses.fields(Config)} - sections().keys()
    for section, kinds in sections().items():
        for kind in kinds:
            fields = {field.name for field in dataclasses.fields(kind)}
            if len(kinds) > 1:
                fields -= {"kind"}  # the heading of a table
            names |= {f"{section}.{field}" for field in fields}
    return {f"--{name.replace('_', '-')}" for name in names}


@functools.cache
def rows_by_flag() -> dict[str, list[str]]:
    """Return the rows of the page, by their flag."""
    rows: dict[str, list[str]] = {}
    for line in configuration_page().splitlines():
        match = re.match(r"\| `(--[\w.-]+?)(?:\.\*)?` \|", line)
        if match:
            rows.setdefault(match[1], []).append(line)
    return rows


def test_the_page_names_every_field_and_every_kind():
    remote = {
        f"--remote.{field.name.replace('_', '-')}" for field in dataclasses.fields(RemoteConfig)
    }
    assert rows_by_flag().keys() == flags() | remote
    page = configuration_page()
    for section, kinds in sections().items():
        for kind in kinds if len(kinds) > 1 else []:
            assert f"`--{section}.kind {kind_name(kind)}`" in page


def test_every_field_has_a_meaning():
    without_meaning = [
        row for rows in rows_by_flag().values() for row in rows if row.endswith("|  |")
    ]
    assert without_meaning == []


def test_a_row_has_type_bounds_and_default():
    (row,) = rows_by_flag()["--warmup.miss-rate"]
    assert row.startswith("| `--warmup.miss-rate` | float, at least 0 and below 1 | `0.0` | ")
    (row,) = rows_by_flag()["--trainer.optimizer"]
    assert row.startswith("| `--trainer.optimizer` | adamw or muon | `adamw` | ")
    (row,) = rows_by_flag()["--eval.questions"]
    assert row.startswith("| `--eval.questions` | int, at least 1 | *required* | ")
    assert len(rows_by_flag()["--method.rounds"]) == 3  # of MyGO, GRPO and DAPO


def words(text: str) -> str:
    """Return text as one line."""
    return " ".join(text.split())


@pytest.mark.parametrize("section", sections())
def test_the_page_says_what_the_help_says(section, capsys):
    kinds = sections()[section]
    for kind in kinds:
        chosen = [f"--{section}.kind", kind_name(kind)] if len(kinds) > 1 else []
        with pytest.raises(SystemExit):
            command_line([*chosen, "--help", "all"], default="tiny_world")
        shown = words(capsys.readouterr().out)
        for name, comment in field_comments(kind).items():
            assert words(comment) in shown, f"{section}.{name} of {kind.__name__}"
