"""The `Generator` protocol over an OpenAI-compatible endpoint: GPT-4.1 as a few-shot baseline, a model that vLLM serves on TPUs.

A request waits for one of `concurrency` places, is sent, and is sent again after faults that pass: a busy or failing server, a broken
connection, a try without answer, an answer that is no JSON. The waiting doubles each time, varies with the request's seed, and is at
least what the server asks for. One deadline covers all of it. What the endpoint refuses is not sent again.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any, Literal

from mujica_jax.http.client import Endpoint, PassingFault
from mujica_jax.inference.priority_queue import WaitingLine
from mujica_jax.inference.remote.formats import ChatFormat, CompletionsFormat, Format, Reply
from mujica_jax.inference.requests import (
    Completion,
    DeadlineError,
    RequestError,
    SamplingParams,
    check_params,
    check_prompt,
)
from mujica_jax.models.tokenizer import Tokenizer

NO_POLICY = -1  # an endpoint's model is no policy of a run
LONGEST_WAIT_SECONDS = 30.0  # between two tries, unless the server asks for more


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteStatistics:
    """Counted since the generator was made."""

    requests: int
    retries: int
    failed: int  # requests that ended in an error
    prompt_tokens: int  # as the endpoint counts them; as our tokenizer does where the endpoint does not say
    generated_tokens: int
    cut_replies: int  # longer in our tokens than max_new_tokens: their end was left out
    waiting_seconds: float  # of all requests, for a place
    serving_seconds: float  # of all requests, in a place: all their tries and the time between these

    def sentence(self) -> str:
        return (
            f"{self.requests:,} requests, {self.retries:,} retries, {self.failed:,} failed; {self.prompt_tokens:,} prompt and "
            f"{self.generated_tokens:,} generated tokens; {self.waiting_seconds:.1f} s waiting and {self.serving_seconds:.1f} s "
            f"serving, summed over requests; {self.cut_replies:,} replies cut"
        )


class RemoteGenerator:
    """The `Generator` of one model at one endpoint. Use from one event loop at a time."""

    policy_version = NO_POLICY

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        mode: Literal["chat", "completions"],
        tokenizer: Tokenizer,
        api_key_variable: str | None = None,
        concurrency: int = 8,
        most_waiting: int = 1024,
        timeout_seconds: float = 120.0,
        deadline_seconds: float = 600.0,
        tries: int = 6,
        first_wait_seconds: float = 0.5,
    ) -> None:
        """`tokenizer` is that of the served model with completions; with chat any that has a chat template, as the ids are ours.

        `timeout_seconds` limits one try and `deadline_seconds` a whole request that brings no deadline of its own.
        """
        self._format: Format = (ChatFormat if mode == "chat" else CompletionsFormat)(tokenizer)
        self._endpoint = Endpoint(
            f"{base_url.rstrip('/')}/{self._format.path}", api_key_variable=api_key_variable, connections=concurrency
        )
        self._model, self._vocabulary = model, tokenizer.vocab_size
        self._line = WaitingLine(concurrency, most_waiting)
        self._timeout_seconds, self._deadline_seconds = timeout_seconds, deadline_seconds
        self._tries, self._first_wait_seconds = tries, first_wait_seconds
        self._counts = dict.fromkeys(
            ("requests", "retries", "failed", "prompt_tokens", "generated_tokens", "cut_replies"), 0
        )
        self._waiting_seconds = self._serving_seconds = 0.0

    @property
    def statistics(self) -> RemoteStatistics:
        return RemoteStatistics(
            **self._counts, waiting_seconds=self._waiting_seconds, serving_seconds=self._serving_seconds
        )

    def forget(self) -> None:
        """Nothing is kept between requests on this side; what the endpoint caches is its own."""

    async def generate(self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False) -> Completion:
        check_params(params)
        check_prompt(prompt, self._vocabulary)
        body = {"model": self._model, **self._format.body(prompt, params)}
        limit = self._deadline_seconds if params.deadline_seconds is None else params.deadline_seconds
        tries = _Tries(deadline=time.monotonic() + limit, limit=limit, random=random.Random(params.seed))
        self._counts["requests"] += 1
        try:
            async with asyncio.timeout(limit) as timer:
                reply = self._format.read(await self._answer(body, tries, continues), prompt, params)
        except TimeoutError as error:
            self._counts["failed"] += 1
            if not timer.expired():
                raise
            raise tries.too_late(self._endpoint.url) from error
        except RequestError:
            self._counts["failed"] += 1
            raise
        return self._completion(reply, prompt, params)

    def _completion(self, reply: Reply, prompt: Sequence[int], params: SamplingParams) -> Completion:
        prompt_tokens, generated_tokens = reply.usage or (len(prompt), len(reply.token_ids))
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["generated_tokens"] += generated_tokens
        self._counts["cut_replies"] += reply.cut
        plain = params.temperature == 1 and params.top_k == 0 and params.top_p == 1 and params.min_p == 0
        return Completion(
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            sampling_logprobs=reply.logprobs if plain else None,  # an endpoint gives one kind; here both are the same
            finish_reason=reply.finish_reason,
            policy_version=self.policy_version,
            stop_string=reply.stop_string,
        )

    async def _answer(self, body: dict[str, Any], tries: "_Tries", continues: bool) -> dict[str, Any]:
        """Wait for a place, then try until there is an answer."""
        came, began = time.monotonic(), None
        try:
            async with self._line.place(overtakes=continues), self._endpoint.connected():
                began = time.monotonic()
                return await self._retried(body, tries)
        finally:
            ended = time.monotonic()
            began = ended if began is None else began
            self._waiting_seconds += began - came
            self._serving_seconds += ended - began

    async def _retried(self, body: dict[str, Any], tries: "_Tries") -> dict[str, Any]:
        while True:
            tries.made += 1
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    return await self._endpoint.post(body)
            except TimeoutError:
                fault = PassingFault(f"no whole answer within {self._timeout_seconds:g} s")
            except PassingFault as found:
                fault = found
            tries.last = str(fault)
            if tries.made >= self._tries:
                raise RequestError(
                    f"{self._endpoint.url} failed {tries.made} times, the last time with {fault}: check that the endpoint is up, and "
                    "its address"
                )
            doubled = min(self._first_wait_seconds * 2 ** (tries.made - 1), LONGEST_WAIT_SECONDS)
            wait = max(fault.after_seconds, doubled * tries.random.uniform(0.5, 1.5))
            if time.monotonic() + wait >= tries.deadline:
                raise tries.too_late(self._endpoint.url, f"the next try was due in {wait:.1f} s")
            self._counts["retries"] += 1
            await asyncio.sleep(wait)


@dataclasses.dataclass(kw_only=True)
class _Tries:
    """How far a request got."""

    deadline: float  # on the monotonic clock
    limit: float
    random: random.Random
    made: int = 0
    last: str = ""

    def too_late(self, url: str, further: str = "") -> DeadlineError:
        found = [f"{self.made} tries", self.last and f"the last one ended with {self.last}", further]
        found = [] if not self.made else [part for part in found if part]
        so_far = "; ".join(found) or "it waited for a place all the time"
        return DeadlineError(
            f"{url} gave no answer within the deadline of {self.limit:g} s ({so_far}): allow more time or send fewer requests at once"
        )
