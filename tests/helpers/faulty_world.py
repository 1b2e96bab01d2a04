"""The tiny world with a retriever that fails: at some questions for good, or at all of them.

A question is known by its id, so the same attempts fail in every start of a run.
"""

import dataclasses
import os
import zlib
from typing import Any, ClassVar

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.records import Question
from mujica_jax.retrieval.errors import RetrieverUnavailableError
from mujica_jax.tasks.tiny_world import world

FAILING_SHARE = "MUJICA_FAILING_PERCENT"  # environment variable: how many questions in a hundred


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultyWorldConfig(TinyWorldConfig):
    implementation: ClassVar[str] = "tests.helpers.faulty_world:build"


class FaultyEnvironment:
    """An environment whose searches fail. All else comes from another environment."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def search(self, query: str, entity: Any) -> Any:
        raise RetrieverUnavailableError("the retriever is down")


def build(config: FaultyWorldConfig) -> Any:
    task = world.build(config)
    percent = int(os.environ.get(FAILING_SHARE, "50"))
    environment_of = task.environment

    def environment(question: Question) -> Any:
        inner = environment_of(question)
        fails = zlib.crc32(question.id.encode()) % 100 < percent
        return FaultyEnvironment(inner) if fails else inner

    task.environment = environment
    return task
