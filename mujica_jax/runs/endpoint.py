"""A model behind an OpenAI-compatible endpoint in the place of a policy, such as GPT-4.1 or vLLM.

It is evaluated by `eval`, judges, teaches, or writes trees.
"""

import dataclasses
from typing import Any

from mujica_jax.config.schema import Config, RemoteConfig
from mujica_jax.inference.remote.generator import RemoteGenerator
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.storage.run_directory import RunPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A model that is evaluated, and the folder of its results.

    It has no policy version, and its results name none.
    """

    remote: RemoteConfig
    tokenizer: Tokenizer
    generator: RemoteGenerator
    out: RunPath

    @property
    def name(self) -> str:
        return str(self.remote.model)

    @property
    def place(self) -> str:
        return str(self.remote.base_url)

    def concurrency(self, config: Config) -> int:
        """Return how many episodes are played at a time."""
        return self.remote.concurrency

    def open(self, config: Config) -> "tuple[Tokenizer, RemoteGenerator]":
        """Return what is open already."""
        return self.tokenizer, self.generator

    def about(self) -> dict[str, Any]:
        """Return what results say of the model."""
        return {
            "endpoint": self.remote.base_url,
            "model": self.remote.model,
            "mode": self.remote.mode,
            "tokenizer": self.remote.tokenizer,
            "statistics": dataclasses.asdict(self.generator.statistics),
        }


def open_endpoint(remote: RemoteConfig, out: RunPath) -> Endpoint:
    """Open an endpoint that `config.checks.check_remote` accepted. Sends no request yet."""
    assert remote.base_url and remote.model and remote.mode and remote.tokenizer, (
        "the endpoint was checked to be whole"
    )
    tokenizer = Tokenizer.load(remote.tokenizer)
    generator = RemoteGenerator(remote, tokenizer)
    return Endpoint(remote=remote, tokenizer=tokenizer, generator=generator, out=out)
