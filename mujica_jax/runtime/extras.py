"""Import optional packages, which only some settings need."""

import importlib
from typing import Any

from mujica_jax.errors import UserError


def import_extra(
    package: str, wanted_by: str, *, extra: str | None = None, otherwise: str = ""
) -> Any:
    """Import and return an optional package. Raises UserError if it is not installed.

    The message names `wanted_by`, the setting that needs the package, and `extra`, the extra of
    mujica_jax that installs it (by default of the same name). `otherwise` ends the message and says
    what else the user can do, such as ", or set it to off".
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        extra = extra or package
        raise UserError(
            f"{wanted_by} needs the package {package}, but {error.name} is not installed: install "
            f"the extra `{extra}`, as in `pip install -e '.[{extra}]'` where mujica_jax was "
            f"cloned{otherwise}"
        ) from None
