"""Configuration: frozen dataclasses of all settings, and the checks that they agree."""

from mujica_jax.config.checks import check
from mujica_jax.config.schema import Config

__all__ = ["Config", "check"]
