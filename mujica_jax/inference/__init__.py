"""Generation: requests, and the generators that complete them (own engine, JetStream, remote)."""

from mujica_jax.inference.requests import Completion, Generator, RequestError, SamplingParams

__all__ = ["Completion", "Generator", "RequestError", "SamplingParams"]
