"""Configuration files: `configs/NAME.py` gives a Config."""

import importlib.util
from pathlib import Path

from mujica_jax.config.fields import check_types
from mujica_jax.config.moved_modules import moved_sentence
from mujica_jax.config.named_objects import search_working_directory
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError, nearest

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "configs"  # where a wheel has what stands beside the package in a checkout
CONFIG_FOLDER = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "configs"


def load_config(name: str | Path) -> Config:
    """Return the Config of a file: a path, or a name in configs/ with or without `.py`."""
    path = _config_path(name)
    spec = importlib.util.spec_from_file_location(f"mujica_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    search_working_directory()
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except UserError:
        raise
    except Exception as error:
        moved = moved_sentence(error)
        if moved:
            raise UserError(f"configuration {path} cannot be loaded: {moved}") from error
        raise UserError(
            f"configuration {path} cannot be loaded ({type(error).__name__}: {error}): it must "
            "define get_config() -> Config"
        ) from error
    if not isinstance(config, Config):
        raise UserError(
            f"configuration {path}: get_config() returned a {type(config).__name__}; it must "
            "return a Config"
        )
    check_types(config)
    return config


def _config_path(name: str | Path) -> Path:
    """Return the path of a configuration file. Raises UserError if there is none of this name."""
    path = Path(name)
    if path.suffix == ".py" and path.is_file():
        return path
    installed = {file.stem: file for file in sorted(CONFIG_FOLDER.glob("*.py"))}
    stem = str(path).removeprefix("configs/").removesuffix(".py")
    if stem not in installed:
        raise UserError(f"unknown configuration {str(name)!r}; {nearest(path.stem, installed)}")
    return installed[stem]
