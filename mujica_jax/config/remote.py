"""Which endpoint: a section of `eval` and of methods that ask another model."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """A model behind an OpenAI-compatible endpoint, which writes in the place of a checkpoint."""

    # what stands before /completions or /chat/completions, as in http://localhost:8000/v1
    base_url: str | None = None
    model: str | None = None  # its name at the endpoint
    # completions: token ids there and back, for vLLM and what speaks like it; chat: messages there,
    # text back, for everything else
    mode: Literal["chat", "completions"] | None = None
    # folder with tokenizer.json: with completions the served model's own, with chat any that has a
    # chat template
    tokenizer: str | None = None
    api_key_variable: str | None = None  # environment variable that holds the API key
    concurrency: int = 8  # requests under way at the same time, and episodes
    timeout_seconds: float = 120.0  # for one try of a request
    deadline_seconds: float = 600.0  # for a request with its waiting and all its tries
