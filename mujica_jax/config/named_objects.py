"""Objects that a setting names as `module:name`: implementations of a section, engines, plug-ins."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from mujica_jax.config.moved_modules import moved_sentence
from mujica_jax.errors import UserError


def implementation(section: Any) -> Callable[..., Any]:
    """Import and return the implementation that a section of several kinds names."""
    return _imported(
        section.implementation,
        f"the implementation of {section.kind} is {section.implementation!r}, but it does not "
        "exist: its section must name it as module:function",
    )


def named_object(place: str, *, setting: str) -> Callable[..., Any]:
    """Return the function that a setting names as module:function.

    Raises UserError if there is none.
    """
    imported = _imported(
        place, f"{setting} is {place!r}, but it does not exist: name it as module:function"
    )
    if not callable(imported):
        raise UserError(
            f"{setting} is {place!r}, but this is a {type(imported).__name__}: name a function"
        )
    return imported


def _imported(place: str, sentence: str) -> Any:
    """Return the object that module:function names.

    Raises UserError with this sentence if the module or the function does not exist, and with the
    new name of a module of this package that has moved.
    """
    module, _, name = place.partition(":")
    if not module or not name:
        raise UserError(sentence)
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        moved = moved_sentence(error)
        if moved:
            raise UserError(f"{place} cannot be imported: {moved}") from error
        is_missing = isinstance(error, ModuleNotFoundError)
        if not (is_missing and f"{module}.".startswith(f"{error.name}.")):
            raise  # what the module imports is missing
        raise UserError(sentence) from error
    except AttributeError as error:
        moved = moved_sentence(error)
        if moved:
            raise UserError(f"{place} cannot be imported: {moved}") from error
        if module not in sys.modules:
            raise  # it was raised in the module
        raise UserError(sentence) from error
