"""The console command `mujica`, which starts all programs: `mujica train`, `mujica eval`, ...

`python -m mujica_jax` is the same command. Each program is a module with `main(arguments) -> int`,
which is imported when it is called.
"""

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from mujica_jax import __version__
from mujica_jax.errors import nearest
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.standard_output import run_program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command of `mujica`."""

    name: str
    # The module of its `main`.
    module: str
    # One line for `mujica --help`.
    summary: str
    # Whether to call `keep_freed_memory` first, which speeds up programs that compute on a CPU.
    keeps_freed_memory: bool = True


COMMANDS = (
    Command(
        name="train",
        module="mujica_jax.commands.train",
        summary="train an agent, and print a table of its scores",
    ),
    Command(
        name="eval",
        module="mujica_jax.commands.eval",
        summary="score a policy on held-out questions",
    ),
    Command(
        name="ask",
        module="mujica_jax.commands.ask",
        summary="let a trained agent answer a question in your own words",
    ),
    Command(
        name="serve",
        module="mujica_jax.commands.serve",
        summary="serve a policy and its agent: a page to ask, and OpenAI's interface",
    ),
    Command(
        name="view",
        module="mujica_jax.commands.view",
        summary="show runs in a browser: curves, and trajectories token by token",
        keeps_freed_memory=False,
    ),
    Command(
        name="report",
        module="mujica_jax.commands.report",
        summary="write the report of runs as one HTML file",
        keeps_freed_memory=False,
    ),
    Command(
        name="index",
        module="mujica_jax.commands.index",
        summary="build, measure, query and serve an index of passages or a graph",
        keeps_freed_memory=False,
    ),
    Command(
        name="sample",
        module="mujica_jax.commands.sample",
        summary="sample for a trainer in another process",
    ),
    Command(
        name="conversations",
        module="mujica_jax.commands.conversations",
        summary="write the conversations of a run into a file that other programs learn",
        keeps_freed_memory=False,
    ),
    Command(
        name="export",
        module="mujica_jax.commands.export",
        summary="write a policy into a folder with a model card, or push it to the Hub",
        keeps_freed_memory=False,
    ),
    Command(
        name="plan",
        module="mujica_jax.commands.plan",
        summary="print what a configuration needs, and whether it fits the chips",
    ),
)
# Commands of the help, each with its meaning.
EXAMPLES = {
    "mujica train --run runs/first": "train a small model in the tiny world, in a few minutes",
    "mujica serve runs/first": "ask its agent in a browser, and look at its trajectories",
    "mujica plan two_wiki_text_v5e --chips v5e:4x8": "check whether a 7B model fits 32 chips",
}
ABOUT = (
    "mujica trains language models to answer multi-hop questions by searching, and evaluates and\n"
    "serves them."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the program that the first word names, and return its exit status.

    Without a word, print the help. An unknown word is a mistake of the user (status 2).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_page(), end="")
        return 0
    if words[0] == "--version":
        print(f"mujica_jax {__version__}")
        return 0

    commands = {command.name: command for command in COMMANDS}
    command = commands.get(words[0])
    if command is None:
        print(
            f"error: unknown command {words[0]!r}; {nearest(words[0], commands.keys())}",
            file=sys.stderr,
        )
        return 2
    if command.keeps_freed_memory:
        keep_freed_memory()
    return importlib.import_module(command.module).main(words[1:])


def help_page() -> str:
    """Return the help of `mujica`."""
    lines = [ABOUT, "", "usage: mujica COMMAND [arguments]", "", "commands:"]
    width = max(len(command.name) for command in COMMANDS)
    for command in COMMANDS:
        lines.append(f"  {command.name.ljust(width)}  {command.summary}")
    lines += ["", "examples:"]
    for words, meaning in EXAMPLES.items():
        lines += [f"  {words}", f"      {meaning}"]
    lines += ["", "mujica COMMAND --help lists the flags of a command. mujica --version prints the"]
    lines.append("version. python -m mujica_jax is the same command.")
    return "\n".join(lines) + "\n"


def run() -> NoReturn:
    """Run `mujica` as a program of its own, and end the process."""
    raise SystemExit(run_program(main))
