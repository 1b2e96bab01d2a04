"""Packages that only some settings need."""

import importlib
from typing import Any

from mujica_jax.errors import UserError


def import_extra(
    package: str, wanted_by: str, *, extra: str | None = None, otherwise: str = ""
) -> Any:
    """Import a package that an extra brings.

    The error for a missing package names the setting `wanted_by` that needs it, and `otherwise`,
    what else can be done.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        extra = extra or package
        raise UserError(
            f"{wanted_by} needs the package {package} and {error.name} is not installed: install "
            f"the extra `{extra}`, as in `pip install -e '.[{extra}]'` where mujica_jax was "
            f"cloned{otherwise}"
        ) from None
