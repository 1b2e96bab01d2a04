"""The `Generator` protocol over an OpenAI-compatible endpoint: GPT-4.1 as a few-shot baseline, a
model that vLLM serves on TPUs.

A request waits for one of `concurrency` places, is sent, and is sent again after transient errors
(`http/retry.py`): a busy or failing server, a broken connection, an attempt without answer, an
answer that is no JSON. The pause doubles each time, varies with the request's seed, and is at least
what the server asks for. One deadline covers all of it. What the endpoint refuses is not sent
again.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

from mujica_jax.config.remote import RemoteConfig
from mujica_jax.http.client import (
    DeadlineExceeded,
    HttpClient,
    HttpError,
    RequestRefused,
    RetriesExhausted,
)
from mujica_jax.http.retry import RetryPolicy, deadline_exceeded, retry
from mujica_jax.inference.remote.formats import (
    ChatFormat,
    CompletionsFormat,
    NoChoiceError,
    Reply,
    reason_of_refusal,
)
from mujica_jax.inference.requests import (
    Completion,
    DeadlineError,
    RequestError,
    SamplingParams,
    UnusableReplyError,
    check_params,
    check_prompt,
)
from mujica_jax.models.tokenizer import Tokenizer

NO_POLICY = -1  # an endpoint's model is no policy of a run
# Statuses that refuse one request (400: a filter, a prompt too long) and do not mean a wrong key or
# model name.
REFUSED_ALONE = (400, 413, 422)
WITHHELD = 451  # for legal reasons
FORBIDDEN = 403  # of a filter where the message says so, and else of the key
MAX_REFUSALS_IN_A_ROW = 16  # after which it is not single requests that are refused
MAX_WAIT_SECONDS = 30.0  # between two attempts


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteStatistics:
    """Counted since the generator was made."""

    requests: int
    retries: int
    failed: int  # requests that ended in an error or without a reply
    refused: int  # of these, those that the endpoint refused alone: too long for it, or filtered
    prompt_tokens: (
        int  # as the endpoint counts them; as our tokenizer does where the endpoint does not say
    )
    generated_tokens: int
    cut_replies: int  # longer in our tokens than max_new_tokens: their end was left out
    waiting_seconds: float  # of all requests, for a place
    serving_seconds: (
        float  # of all requests, in a place: all their attempts and the time between these
    )

    def sentence(self) -> str:
        return (
            f"{self.requests:,} requests, {self.retries:,} retries, {self.failed:,} failed; "
            f"{self.prompt_tokens:,} prompt and {self.generated_tokens:,} generated tokens; "
            f"{self.waiting_seconds:.1f} s waiting and {self.serving_seconds:.1f} s serving, "
            f"summed over requests; {self.cut_replies:,} replies cut, {self.refused:,} requests "
            "refused"
        )


class RemoteGenerator:
    """The `Generator` of one model at one endpoint. Use from one event loop at a time."""

    policy_version = NO_POLICY

    def __init__(
        self,
        remote: RemoteConfig,
        tokenizer: Tokenizer,
        *,
        max_attempts: int = 6,
        first_wait_seconds: float = 0.5,
    ) -> None:
        """`tokenizer` is that of the served model with completions; with chat any that has a chat
        template, as the ids are ours.
        """
        self._format = (ChatFormat if remote.mode == "chat" else CompletionsFormat)(tokenizer)
        url = f"{str(remote.base_url).rstrip('/')}/{self._format.path}"
        self._client = HttpClient(
            url, api_key_variable=remote.api_key_variable, connections=remote.concurrency
        )
        self._model, self._vocabulary = remote.model, tokenizer.vocab_size
        self._concurrency = remote.concurrency
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._policy = RetryPolicy(
            timeout_seconds=remote.timeout_seconds,
            deadline_seconds=remote.deadline_seconds,
            max_attempts=max_attempts,
            first_wait_seconds=first_wait_seconds,
            max_wait_seconds=MAX_WAIT_SECONDS,
        )
        self._refusals_in_a_row = 0
        self._last_refusal = ""
        self._counts: dict[str, Any] = {
            field.name: 0 for field in dataclasses.fields(RemoteStatistics)
        }

    @property
    def statistics(self) -> RemoteStatistics:
        return RemoteStatistics(**self._counts)

    def reset_cache(self) -> None:
        """Nothing is kept between requests on this side; what the endpoint caches is its own."""

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        check_params(params)
        check_prompt(prompt, self._vocabulary)
        limit = (
            self._policy.deadline_seconds
            if params.deadline_seconds is None
            else params.deadline_seconds
        )
        policy = dataclasses.replace(self._policy, deadline_seconds=limit)
        self._counts["requests"] += 1
        try:
            reply = await self._reply(prompt, params, policy)
        except NoChoiceError as error:
            self._counts["failed"] += 1
            raise self._refused(error) from error
        except RequestError:
            self._counts["failed"] += 1
            raise
        except RequestRefused as error:
            self._counts["failed"] += 1
            reason = "filtered" if error.status == WITHHELD else reason_of_refusal(str(error))
            is_filtered = reason == "filtered" and error.status in (WITHHELD, FORBIDDEN)
            if error.status not in REFUSED_ALONE and not is_filtered:
                raise RequestError(str(error)) from error
            raise self._refused(UnusableReplyError(str(error), reason)) from error
        except HttpError as error:
            if isinstance(error, RetriesExhausted) and error.was_answered:
                self._counts["failed"] += 1
                raise self._refused(UnusableReplyError(str(error))) from error
            self._counts["failed"] += 1
            kind = DeadlineError if isinstance(error, DeadlineExceeded) else RequestError
            raise kind(str(error)) from error
        self._refusals_in_a_row = 0
        return self._completion(reply, prompt, params)

    def require_an_answer(self) -> None:
        """Raise RequestError where every request was refused: then scores say nothing about the
        model."""
        if self._last_refusal and self._counts["refused"] == self._counts["requests"]:
            raise RequestError(
                f"{self._client.url} refused all of {self._counts['requests']} requests, the last "
                f"one so: {self._last_refusal}"
            )

    def _refused(self, error: UnusableReplyError) -> RequestError:
        """Return what a refusal raises: the end of one episode, or of the program where everything
        is refused."""
        self._counts["refused"] += 1
        self._refusals_in_a_row += 1
        self._last_refusal = str(error)
        if self._refusals_in_a_row < MAX_REFUSALS_IN_A_ROW:
            return error
        count = self._refusals_in_a_row
        return RequestError(
            f"the endpoint refused {count} requests in a row, the last one so: {error}"
        )

    async def _reply(
        self, prompt: Sequence[int], params: SamplingParams, policy: RetryPolicy
    ) -> Reply:
        """Ask, and ask for the rest while the server stopped inside of a thought. Raises
        RequestError and HttpError."""
        reply: Reply | None = None
        came = time.monotonic()
        while reply is None or reply.is_unfinished:
            sampled = () if reply is None else reply.token_ids
            body = {"model": self._model, **self._format.body(prompt, params, sampled)}
            draw = random.Random(params.seed + len(sampled))
            answer = await self._answer(body, policy, draw, came=came)
            reply = self._format.read(answer, prompt, params, reply)
        return reply

    def _completion(
        self, reply: Reply, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        prompt_tokens, generated_tokens = reply.usage or (len(prompt), len(reply.token_ids))
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["generated_tokens"] += generated_tokens
        self._counts["cut_replies"] += reply.cut
        plain = (
            params.temperature == 1
            and params.top_k == 0
            and params.top_p == 1
            and params.min_p == 0
        )
        return Completion(
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            sampling_logprobs=reply.logprobs
            if plain
            else None,  # an endpoint gives one kind; here both are the same
            finish_reason=reply.finish_reason,
            policy_version=self.policy_version,
            stop_string=reply.stop_string,
        )

    async def _answer(
        self, body: dict[str, Any], policy: RetryPolicy, draw: random.Random, *, came: float
    ) -> dict[str, Any]:
        """Wait for a place, then try until there is an answer. The deadline counts from `came`.
        Raises HttpError."""
        asked, began = time.monotonic(), None
        remaining_seconds = max(0.001, came + policy.deadline_seconds - asked)
        try:
            async with asyncio.timeout(remaining_seconds) as waiting, self._place():
                waiting.reschedule(None)
                began = time.monotonic()
                async with self._client.connected():
                    return await retry(
                        lambda: self._client.post(body),
                        policy,
                        url=self._client.url,
                        advice="check that the endpoint is up, and its address",
                        draw=draw,
                        began=came,
                        on_retry=lambda error: self._counts.update(
                            retries=self._counts["retries"] + 1
                        ),
                    )
        except TimeoutError as error:
            raise deadline_exceeded(
                self._client.url, policy, "it waited for a place all the time"
            ) from error
        finally:
            ended = time.monotonic()
            began = ended if began is None else began
            self._counts["waiting_seconds"] += began - asked
            self._counts["serving_seconds"] += ended - began

    def _place(self) -> asyncio.Semaphore:
        """Of the event loop that runs: a semaphore belongs to one."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self._concurrency)
        return self._places[1]
