"""Read what the settings' dataclasses say about themselves: help texts, types, defaults, kinds.

The page of the configuration (`docs/hooks.py`) and `--help` (`program_help.py`) show the same texts.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from typing import Any, Literal

from mujica_jax.config.bounds import Bound
from mujica_jax.config.fields import union_members


def docstring(section: Any) -> str:
    """Return the docstring of a dataclass, or "" if it has none of its own."""
    text = inspect.cleandoc(section.__doc__ or "")
    # What `dataclasses` writes if there is none.
    is_signature = text.startswith(f"{section.__name__}(")
    return "" if is_signature else text


def first_sentence(text: str) -> str:
    """Return the first paragraph of a docstring as one line, up to the end of its first sentence."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    sentence, period, _ = paragraph.partition(". ")
    return sentence + period.strip()


def type_in_words(hint: Any, *, section: str) -> str:
    """Return a type with its bounds, as in "int, at least 1" or "online, offline".

    `section` stands for the type of a field that is a section itself.
    """
    if typing.get_origin(hint) is typing.Annotated:
        bounds = [note.words for note in hint.__metadata__ if isinstance(note, Bound)]
        return ", ".join([type_in_words(hint.__origin__, section=section), *bounds])
    if typing.get_origin(hint) is Literal:
        return " or ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is ...:
        return f"{type_in_words(typing.get_args(hint)[0], section=section)}, one or several"
    if typing.get_origin(hint) is tuple:
        members = typing.get_args(hint)
        if members[-1] is ...:
            return f"{type_in_words(members[0], section=section)}, one or several"
        return ", ".join(type_in_words(member, section=section) for member in members)
    options = union_members(hint)
    if len(options) > 1:
        return " or ".join(type_in_words(option, section=section) for option in options)
    if hint is types.NoneType:
        return "None"
    if dataclasses.is_dataclass(hint):
        return section
    if hint is bool:
        return "True or False"
    return "text" if hint is str else hint.__name__


def single_choice(hint: Any) -> bool:
    """Return whether a field has one possible value, as the `kind` that tells sections apart."""
    return typing.get_origin(hint) is Literal and len(typing.get_args(hint)) == 1


@functools.cache
def field_comments(section: Any) -> dict[str, str]:
    """Return the help text of each field that has one, those of base classes included.

    It is the comment behind the field, or the lines above it.
    """
    comments: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= own_comments(base)
    names = {field.name for field in dataclasses.fields(section)}
    return {name: comment for name, comment in comments.items() if name in names}


def own_comments(section: Any) -> dict[str, str]:
    """Return the comments of what a class body defines.

    One comment above two fields that follow each other is the comment of both. A class whose source
    is not in a file has none.
    """
    try:
        source = textwrap.dedent(inspect.getsource(section))
    except OSError:
        return {}
    lines = source.splitlines()
    (body,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    comments = {}
    shared_text = ""  # of the comment above the fields before
    shared_until = 0  # line of the last of them
    for node in body.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        assert node.end_lineno is not None, "the node was parsed from text"
        behind = lines[node.end_lineno - 1][node.end_col_offset :].strip()
        above = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            above.insert(0, line)

        if above and not behind:
            shared_text = comment_text(above)
        elif node.lineno != shared_until + 1 or behind:
            shared_text = ""
        shared_until = node.end_lineno
        text = comment_text([behind]) if behind else shared_text
        if text:
            comments[node.target.id] = text
    return comments


def comment_text(lines: list[str]) -> str:
    """Return lines of a comment as one line without their number signs."""
    return " ".join(line.strip().removeprefix("#").strip() for line in lines)
