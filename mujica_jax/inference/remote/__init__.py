"""A generator for models behind an OpenAI-compatible endpoint."""

from mujica_jax.inference.remote.generator import RemoteGenerator, RemoteStatistics

__all__ = ["RemoteGenerator", "RemoteStatistics"]
