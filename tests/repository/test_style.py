"""Rules of style that no linter has: names say what they hold, one statement does one thing, and
MyGO's loop stands on one page.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

# CONTRIBUTING.md, "Names": words that say nothing about what was found, kept or given.
NOT_NAMES = {
    *"found given said one each kept left of about most least what began held some more over".split(),
    *"again of_loss of_rows".split(),
}
# The two sides of a product, and a column of stored trajectories.
EXCEPTIONS = {"mujica_jax/kernels/cpu/compiled.py": {"left"}, "mujica_jax/records.py": {"found"}}
MAX_LOOP_LINES = 60
SOURCES = sorted((ROOT / "mujica_jax").rglob("*.py"))
MYGO = ROOT / "mujica_jax" / "methods" / "mygo.py"


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def assigned_names(node: ast.AST) -> Iterator[str]:
    """Yield the name that a node assigns: a variable or a parameter."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg


def is_packed_assignment(node: ast.AST) -> bool:
    """Whether a node is `a, b = c, d`. Swapping two values (`a, b = b, a`) is not."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    (target, *_) = node.targets
    if not isinstance(target, ast.Tuple):
        return False
    return {ast.unparse(part) for part in target.elts} != {
        ast.unparse(part) for part in node.value.elts
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_says_what_it_holds(path):
    names = {name for node in nodes(path) for name in assigned_names(node)}
    names -= EXCEPTIONS.get(str(path.relative_to(ROOT)), set())
    assert not names & NOT_NAMES, f"say what was found: {sorted(names & NOT_NAMES)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_statement_does_one_thing(path):
    packed = [ast.unparse(node) for node in nodes(path) if is_packed_assignment(node)]
    assert not packed, f"give each value a statement of its own: {packed}"
    assert not any(isinstance(node, ast.Nonlocal) for node in nodes(path)), (
        "a closure that writes to an outer variable wants to be a small class"
    )


def test_the_rules_see_what_they_forbid():
    source = ast.parse("def f(left):\n    a, b = 1, 2\n    a, b = b, a\n    for found in g(): pass")
    names = {name for node in ast.walk(source) for name in assigned_names(node)}
    assert names & NOT_NAMES == {"left", "found"}
    assert [ast.unparse(node) for node in ast.walk(source) if is_packed_assignment(node)] == [
        "a, b = (1, 2)"
    ]


def test_the_loop_of_mygo_stands_on_one_page_and_the_readme_leads_to_it():
    (loop,) = [
        node
        for node in nodes(MYGO)
        if isinstance(node, ast.FunctionDef) and node.name == "_run_rounds"
    ]
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 <= MAX_LOOP_LINES
    assert "(mujica_jax/methods/mygo.py)" in (ROOT / "README.md").read_text()
