"""Import optional packages, which only some settings need.

pyproject.toml lists them as extras. `tests/repository/test_packaging.py` checks that each extra
named here or by a caller brings its package.
"""

import importlib
import importlib.util
import sys
from typing import Any

from mujica_jax.errors import UserError


def how_to_install(extra: str) -> str:
    """Return the advice to install an extra, as a part of a sentence."""
    return (
        f"install the extra `{extra}`, as in `pip install -e '.[{extra}]'` where mujica_jax was "
        "cloned"
    )


def import_extra(
    module: str, wanted_by: str, *, extra: str | None = None, otherwise: str = ""
) -> Any:
    """Import and return a module of an optional package. Raises UserError if it is not installed.

    The message names `wanted_by`, the setting that needs the package, and `extra`, the extra of
    mujica_jax that installs it (by default of the same name). `otherwise` ends the message and says
    what else the user can do, such as ", or set it to off".
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        raise _missing(package, missing, wanted_by, extra, otherwise) from None
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{wanted_by} needs the package {package}, which cannot be imported ({reason}): "
            f"{how_to_install(extra or package)}, to get releases that work together{otherwise}"
        ) from error


def require_extra(
    package: str, wanted_by: str, *, extra: str | None = None, otherwise: str = ""
) -> None:
    """Check that an optional package is installed, without importing it. Raises UserError."""
    if importlib.util.find_spec(package) is None:
        raise _missing(package, package, wanted_by, extra, otherwise)


def keep_triton_from_ending_the_process() -> None:
    """Make later imports of triton fail with ImportError, if TensorFlow is loaded and triton is not.

    Triton comes with the builds of torch for CUDA. Its library and TensorFlow's each contain LLVM,
    and loading triton's second ends the process with a segmentation fault. Without triton, torch
    does not compile kernels for GPUs. It still converts checkpoints.
    """
    if "tensorflow" in sys.modules:
        # Python answers an import of a module that is None with ModuleNotFoundError.
        sys.modules.setdefault("triton", None)  # pyright: ignore[reportArgumentType]


def _missing(
    package: str, missing: str, wanted_by: str, extra: str | None, otherwise: str
) -> UserError:
    """Return the error for a package that is not installed, or that lacks another package."""
    return UserError(
        f"{wanted_by} needs the package {package}, but {missing} is not installed: "
        f"{how_to_install(extra or package)}{otherwise}"
    )
