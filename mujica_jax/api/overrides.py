"""Changes to a configuration, as keyword arguments of the API take them."""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError

# Either {"method.rounds": 1}, or the words of a command line: ["--method.rounds", "1"].
Overrides = Mapping[str, Any] | Sequence[str]
Parsed = TypeVar("Parsed")

# What tyro draws around its messages, and its last line, which is about a program.
_frame = re.compile(r"[\u2500-\u257f]+|-{3,}|[+|]|For full helptext, run.*", re.DOTALL)


def as_words(overrides: Overrides | None) -> list[str]:
    """Return overrides as the words of a command line.

    >>> as_words({"method.rounds": 1, "eval.control": False})
    ['--method.rounds', '1', '--eval.no-control']
    >>> as_words({"agents": ["direct", "rag"]})
    ['--agents', 'direct', 'rag']
    """
    if overrides is None:
        return []
    if isinstance(overrides, str):
        raise UserError(
            f"overrides is the text {overrides!r}: give a mapping such as "
            "{'method.rounds': 1}, or a list of words such as ['--method.rounds', '1']"
        )
    if not isinstance(overrides, Mapping):
        return [str(word) for word in overrides]
    words: list[str] = []
    for name, value in overrides.items():
        section, dot, field = name.removeprefix("--").replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{section}{dot}{field}" if value else f"--{section}{dot}no-{field}")
            continue
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{section}{dot}{field}", *(str(entry) for entry in values)]
    return words


def as_config(config: Config | str) -> Config:
    """Return a configuration: itself, or the one of a name in configs/ or of a file.

    Raises UserError if there is no such configuration.
    """
    return config if isinstance(config, Config) else load_config(config)


def parsed(words: Sequence[str], parse: Callable[[], Parsed]) -> Parsed:
    """Return the result of parsing words as a command line.

    A program ends if its flags are wrong. Here, this is a UserError with the parser's message.
    """
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(messages):
            result = parse()
    except SystemExit as error:
        reason = " ".join(_frame.sub(" ", messages.getvalue()).split())
        # The title of the message is often its first words too.
        reason = re.sub(r"^([\w ]+) \1", r"\1", reason)
        raise UserError(f"the overrides {' '.join(words)!r} do not fit: {reason}") from error
    # For example, the new name of a flag that was renamed.
    sys.stderr.write(messages.getvalue())
    return result
