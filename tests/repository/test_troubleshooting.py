"""The messages that docs/guides/troubleshooting.md quotes are messages of the package.

The page quotes a part of each message, with `...` where the program puts names and numbers.
"""

import ast
import functools
import re

import pytest

from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
# The first code of a row quotes a message, in the tables whose first column says so.
HEADER = re.compile(r"^\| (?:message|symptom) \|")
QUOTE = re.compile(r"^\| `([^`]+)`")
VALUE = "\0"  # stands in a message for what the program puts there
SETTING = re.compile(r"^(--|mismatch$)")


def quotes() -> list[str]:
    """Return the parts of messages that the page quotes."""
    quoted = []
    is_quoting = False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            is_quoting = False
        elif HEADER.match(line):
            is_quoting = True
        elif is_quoting and (match := QUOTE.match(line)) and not SETTING.match(match[1]):
            quoted.append(match[1])
    return quoted


def text_of(node: ast.AST) -> str:
    """Return a string of the source with VALUE in place of what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@functools.cache
def messages() -> str:
    """Return all strings of the package but its docstrings, one a line."""
    texts = []
    for path in sorted((ROOT / "mujica_jax").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts += [text_of(node) for node in nodes if id(node) not in docstrings]
    return "\n".join(" ".join(text.split()) for text in texts if text)


def is_message(quote: str) -> bool:
    """Return whether a message of the package has this part."""
    pattern = r"[^\n]*?".join(re.escape(piece.strip()) for piece in quote.split("..."))
    return re.search(pattern, messages()) is not None


def test_the_page_quotes_messages():
    assert len(quotes()) > 40


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_one_of_the_package(quote):
    assert is_message(quote), f"no message of mujica_jax has {quote!r}: quote it as it reads now"


def test_what_no_message_says_is_not_found():
    assert not is_message("the moon is ... green")
    assert is_message("needs ... devices ... available")
