"""qwix, Google's quantisation and LoRA for NNX models: an optional package, imported only by what was asked for it."""

import importlib
from typing import Any

from mujica_jax.errors import UserError


def import_qwix(wanted_by: str) -> Any:
    """The package; `wanted_by` names the setting that needs it, for a user who has not installed it."""
    try:
        return importlib.import_module("qwix")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{wanted_by} needs the package qwix and {error.name} is not installed: install the extra `qwix`, as in "
            "`pip install -e '.[qwix]'`"
        ) from None
