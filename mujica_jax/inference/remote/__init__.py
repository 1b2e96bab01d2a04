"""A generator over an OpenAI-compatible endpoint."""

from mujica_jax.inference.remote.generator import RemoteGenerator, RemoteStatistics

__all__ = ["RemoteGenerator", "RemoteStatistics"]
