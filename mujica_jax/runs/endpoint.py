"""Use a model behind an OpenAI-compatible endpoint instead of a policy of our own.

The model may be GPT-4.1, for example, or a model that vLLM serves. `eval` can evaluate it. It can
also judge answers, teach EviPath, or write the trees of DecEx-RAG.
"""

import dataclasses
from typing import Any

from mujica_jax.config.schema import Config, RemoteConfig
from mujica_jax.inference.remote.generator import RemoteGenerator
from mujica_jax.models.hub import tokenizer_folder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.storage.run_directory import RunPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A model behind an endpoint, and the folder for the results of its evaluations.

    Such a model has no policy version, so its results name no version.
    """

    remote: RemoteConfig
    tokenizer: Tokenizer
    generator: RemoteGenerator
    out: RunPath

    @property
    def name(self) -> str:
        """The model's name at the endpoint."""
        return str(self.remote.model)

    @property
    def place(self) -> str:
        """The address of the endpoint."""
        return str(self.remote.base_url)

    def concurrency(self, config: Config) -> int:
        """Return how many episodes are played at the same time."""
        return self.remote.concurrency

    def open(self, config: Config) -> "tuple[Tokenizer, RemoteGenerator]":
        """Return the tokenizer and the generator, which are already open."""
        return self.tokenizer, self.generator

    def about(self) -> dict[str, Any]:
        """Return the description of the model that is written into the results."""
        return {
            "endpoint": self.remote.base_url,
            "model": self.remote.model,
            "mode": self.remote.mode,
            "tokenizer": self.remote.tokenizer,
            "statistics": dataclasses.asdict(self.generator.statistics),
        }


def open_endpoint(remote: RemoteConfig, out: RunPath) -> Endpoint:
    """Open an endpoint whose settings `config.checks.check_remote` accepted.

    This sends no request.
    """
    assert remote.base_url and remote.model and remote.mode and remote.tokenizer, (
        "check_remote makes sure that all settings of the endpoint are given"
    )
    tokenizer = Tokenizer.load(tokenizer_folder(remote.tokenizer, setting="the tokenizer"))
    generator = RemoteGenerator(remote, tokenizer)
    return Endpoint(remote=remote, tokenizer=tokenizer, generator=generator, out=out)
