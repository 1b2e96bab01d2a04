"""Objects that a setting names as `module:name`: implementations, rewards, losses, engines, plug-ins.

The module may be the user's own. It is looked for in the working directory too, no matter how the
program was started.
"""

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from mujica_jax.config.moved_modules import moved_sentence
from mujica_jax.errors import UserError, nearest


def is_place(name: str) -> bool:
    """Return whether a name has the form `module:name`. Names of built-in things have no colon."""
    return ":" in name


def place_of(named_class: type) -> str:
    """Return the place `module:name` from which a class can be imported again."""
    return f"{named_class.__module__}:{named_class.__qualname__}"


def implementation(section: Any) -> Callable[..., Any]:
    """Import and return the implementation that a section of several kinds names."""
    return named_object(section.implementation, setting=f"the implementation of {section.kind}")


def named_object(place: str, *, setting: str) -> Callable[..., Any]:
    """Return the function or class that a setting names as module:name.

    Raises UserError if there is none, or if its module cannot be imported.
    """
    imported = imported_object(place, setting=setting)
    if not callable(imported):
        raise UserError(
            f"{setting} is {place!r}, but this is a {type(imported).__name__}: name a function"
        )
    return imported


def imported_object(place: str, *, setting: str) -> Any:
    """Return the object that module:name names.

    Raises UserError if the module or the object does not exist, and if the import of the module
    fails. For a module of this package that has moved, the message has its new name.
    """
    module_name, _, name = place.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise UserError(f"{setting} is {place!r}: name it as module:name, as in my_package.mine:it")
    search_working_directory()
    module = _imported_module(module_name, place=place, setting=setting)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError as error:
        moved = moved_sentence(error)
        if moved:
            raise UserError(f"{place} cannot be imported: {moved}") from error
        own_names = [
            known
            for known, value in vars(module).items()
            if getattr(value, "__module__", None) == module_name
        ]
        hint = nearest(name, own_names) if own_names else "it defines no function and no class"
        raise UserError(
            f"{setting} is {place!r}, but the module {module_name} has no {name}; {hint}"
        ) from error


def search_working_directory() -> None:
    """Let imports find modules in the working directory, as in a program started with `python -m`.

    A console command does not search it by itself.
    """
    directory = os.getcwd()
    if not {"", directory} & set(sys.path):
        sys.path.insert(0, directory)


def _imported_module(module_name: str, *, place: str, setting: str) -> Any:
    """Import a module. Raises UserError if there is none, or if its own code fails."""
    try:
        return importlib.import_module(module_name)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        moved = moved_sentence(error)
        if moved:
            raise UserError(f"{place} cannot be imported: {moved}") from error
        is_module_missing = f"{module_name}.".startswith(f"{error.name}.")
        if not is_module_missing:
            raise UserError(f"{place} cannot be imported: {_own_message(error)}") from error
        raise UserError(
            f"{setting} is {place!r}, but there is no module {error.name}: start the program in "
            "the folder that contains it, or add that folder to PYTHONPATH"
        ) from error
    except Exception as error:
        moved = moved_sentence(error)
        reason = moved or _own_message(error)
        raise UserError(f"{place} cannot be imported: {reason}") from error


def _own_message(error: Exception) -> str:
    """Return the kind of an error, its message, and the line of code that raised it."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        # The message of a SyntaxError has its file and its line already.
        return message
    calls = [
        call
        for call in traceback.extract_tb(error.__traceback__)
        if not call.filename.startswith("<frozen importlib")
    ]
    return f"{message} ({calls[-1].filename}, line {calls[-1].lineno})"
