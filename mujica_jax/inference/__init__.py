"""Text generation: requests, and the generators that complete them.

A generator runs the project's own engine, an engine with JetStream's interface, or a model behind
an OpenAI-compatible endpoint.
"""

from mujica_jax.inference.requests import Completion, Generator, RequestError, SamplingParams

__all__ = ["Completion", "Generator", "RequestError", "SamplingParams"]
