"""A `Generator` that sends its requests to an OpenAI-compatible endpoint.

The endpoint may be GPT-4.1 as a few-shot baseline, or a model that vLLM serves on TPUs. At most
`concurrency` requests are sent at the same time.

A request is sent again after a transient error (`http/retry.py`): the server is busy or fails, the
connection breaks, no answer arrives in time, or the answer is not JSON. The pause between two
attempts doubles each time and varies with the seed of the request. It is at least as long as the
server asks for. One deadline covers the waiting time and all attempts. A request that the endpoint
refuses is not sent again.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

from mujica_jax.config.methods import RemoteConfig
from mujica_jax.http.client import (
    DeadlineExceededError,
    HttpClient,
    HttpError,
    RequestRefusedError,
    RetriesExhaustedError,
)
from mujica_jax.http.retry import RetryPolicy, RetryTarget, deadline_exceeded, retry
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

# The policy version of completions from an endpoint, whose model is not a policy of a run.
NO_POLICY = -1
# HTTP statuses that refuse this request only, for example because of a content filter or a long
# prompt. Other statuses mean that the key or the model name is wrong.
REFUSED_ALONE = (400, 413, 422)
# HTTP status of a reply that was withheld for legal reasons.
WITHHELD = 451
# HTTP status of a content filter, if the message says so, or of a wrong key.
FORBIDDEN = 403
# After this many refusals without a success in between, the endpoint is assumed to refuse all
# requests.
MAX_REFUSALS_IN_A_ROW = 16
# Longest pause between two attempts.
MAX_WAIT_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteStatistics:
    """Counters since the generator was made."""

    requests: int
    # Attempts after the first one of each request.
    retries: int
    # Requests that ended with an error or without a reply.
    failed: int
    # Failed requests that the endpoint refused individually: content filters, or prompts that are
    # too long.
    refused: int
    # Tokens as the endpoint counts them. If it does not report them, the local tokenizer counts.
    prompt_tokens: int
    generated_tokens: int
    # Replies that were cut, because they have more than max_new_tokens tokens of the local
    # tokenizer.
    cut_replies: int
    # Seconds before the first attempt, summed over all requests.
    waiting_seconds: float
    # Seconds from the first attempt to the end, summed over all requests.
    serving_seconds: float

    def sentence(self) -> str:
        """Return all counters in one line for the console."""
        return (
            f"{self.requests:,} requests, {self.retries:,} retries, {self.failed:,} failed; "
            f"{self.prompt_tokens:,} prompt and {self.generated_tokens:,} generated tokens; "
            f"{self.waiting_seconds:.1f} s waiting and {self.serving_seconds:.1f} s serving, "
            f"summed over requests; {self.cut_replies:,} replies cut, {self.refused:,} requests "
            "refused"
        )


class RemoteGenerator:
    """A `Generator` for one model at one endpoint. Use it from one event loop at a time."""

    policy_version = NO_POLICY

    def __init__(
        self,
        remote: RemoteConfig,
        tokenizer: Tokenizer,
        *,
        max_attempts: int = 6,
        first_wait_seconds: float = 0.5,
    ) -> None:
        """Make a generator for the endpoint of `remote`. The connection is opened later.

        In mode `completions`, `tokenizer` must be the tokenizer of the served model. In mode `chat`
        it may be any tokenizer with a chat template, because token ids are not sent. A request is
        tried at most `max_attempts` times, and the first pause is `first_wait_seconds`.
        """
        if remote.mode == "chat":
            self._format = ChatFormat(tokenizer)
        else:
            self._format = CompletionsFormat(tokenizer)
        url = f"{str(remote.base_url).rstrip('/')}/{self._format.path}"
        self._client = HttpClient(
            url, api_key_variable=remote.api_key_variable, connections=remote.concurrency
        )
        self._model = remote.model
        self._vocabulary = tokenizer.vocab_size
        self._concurrency = remote.concurrency
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._retry_policy = RetryPolicy(
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
        """The counters of this generator."""
        return RemoteStatistics(**self._counts)

    def reset_cache(self) -> None:
        """Do nothing, because the endpoint manages its own cache."""

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        """Complete one prompt. See `requests.Generator`."""
        check_params(params)
        check_prompt(prompt, self._vocabulary)
        retry_policy = self._retry_policy
        if params.deadline_seconds is not None:
            retry_policy = dataclasses.replace(
                retry_policy, deadline_seconds=params.deadline_seconds
            )
        self._counts["requests"] += 1
        try:
            reply = await self._reply(prompt, params, retry_policy)
        except NoChoiceError as error:
            self._counts["failed"] += 1
            raise self._refused(error) from error
        except RequestError:
            self._counts["failed"] += 1
            raise
        except RequestRefusedError as error:
            self._counts["failed"] += 1
            reason = "filtered" if error.status == WITHHELD else reason_of_refusal(str(error))
            is_filtered = reason == "filtered" and error.status in (WITHHELD, FORBIDDEN)
            if error.status not in REFUSED_ALONE and not is_filtered:
                raise RequestError(str(error)) from error
            raise self._refused(UnusableReplyError(str(error), reason)) from error
        except HttpError as error:
            self._counts["failed"] += 1
            if isinstance(error, RetriesExhaustedError) and error.was_answered:
                raise self._refused(UnusableReplyError(str(error))) from error
            if isinstance(error, DeadlineExceededError):
                raise DeadlineError(str(error)) from error
            raise RequestError(str(error)) from error
        self._refusals_in_a_row = 0
        return self._completion(reply, prompt, params)

    def require_an_answer(self) -> None:
        """Check that the endpoint answered at least one request.

        Raises RequestError if it refused all of them, because the scores of such a run would say
        nothing about the model.
        """
        if self._last_refusal and self._counts["refused"] == self._counts["requests"]:
            raise RequestError(
                f"{self._client.url} refused all of {self._counts['requests']} requests. The last "
                f"refusal was: {self._last_refusal}"
            )

    def _refused(self, error: UnusableReplyError) -> RequestError:
        """Count a refused request, and return the error to raise.

        This is `error` itself, which ends one episode. After MAX_REFUSALS_IN_A_ROW refusals it is a
        RequestError, which ends the program.
        """
        self._counts["refused"] += 1
        self._refusals_in_a_row += 1
        self._last_refusal = str(error)
        if self._refusals_in_a_row < MAX_REFUSALS_IN_A_ROW:
            return error
        count = self._refusals_in_a_row
        return RequestError(
            f"the endpoint refused {count} requests in a row. The last refusal was: {error}"
        )

    async def _reply(
        self, prompt: Sequence[int], params: SamplingParams, retry_policy: RetryPolicy
    ) -> Reply:
        """Send a request until its reply is complete.

        If the server stopped at a stop string inside a thought, send the request again with the
        tokens so far. Raises RequestError if the reply is not usable, and HttpError if there is no
        reply.
        """
        reply: Reply | None = None
        submit_time = time.monotonic()
        while reply is None or reply.is_unfinished:
            sampled = () if reply is None else reply.token_ids
            body = {"model": self._model, **self._format.body(prompt, params, sampled)}
            pause_random = random.Random(params.seed + len(sampled))
            answer = await self._answer(body, retry_policy, pause_random, submit_time=submit_time)
            reply = self._format.read(answer, prompt, params, reply)
        return reply

    def _completion(
        self, reply: Reply, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        """Count the tokens of a reply, and return it as a Completion."""
        prompt_tokens, generated_tokens = reply.usage or (len(prompt), len(reply.token_ids))
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["generated_tokens"] += generated_tokens
        self._counts["cut_replies"] += reply.cut
        # An endpoint returns one log-probability per token, which counts as the policy's own. At
        # temperature 1 and without filters, it is the sampling log-probability too.
        is_unmodified_policy = (
            params.temperature == 1
            and params.top_k == 0
            and params.top_p == 1
            and params.min_p == 0
        )
        return Completion(
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            sampling_logprobs=reply.logprobs if is_unmodified_policy else None,
            finish_reason=reply.finish_reason,
            policy_version=self.policy_version,
            stop_string=reply.stop_string,
        )

    async def _answer(
        self,
        body: dict[str, Any],
        retry_policy: RetryPolicy,
        pause_random: random.Random,
        *,
        submit_time: float,
    ) -> dict[str, Any]:
        """Wait for a free connection, then send a request until an answer arrives.

        `body` is the JSON of the request. The deadline counts from `submit_time` (seconds of
        `time.monotonic`). Returns the JSON of the answer. Raises HttpError if the endpoint refuses
        the request or the deadline passes.
        """

        def count_retry(_: Exception) -> None:
            self._counts["retries"] += 1

        start_time = time.monotonic()
        first_attempt_time = None
        remaining_seconds = max(0.001, submit_time + retry_policy.deadline_seconds - start_time)
        try:
            async with asyncio.timeout(remaining_seconds) as timeout, self._own_semaphore():
                # From here on `retry` enforces the deadline.
                timeout.reschedule(None)
                first_attempt_time = time.monotonic()
                async with self._client.connected():
                    return await retry(
                        lambda: self._client.post(body),
                        retry_policy,
                        RetryTarget(
                            url=self._client.url,
                            advice="check the address, and that the endpoint is running",
                        ),
                        pause_random=pause_random,
                        start_time=submit_time,
                        on_retry=count_retry,
                    )
        except TimeoutError as error:
            raise deadline_exceeded(
                self._client.url, retry_policy, "no connection became free in this time"
            ) from error
        finally:
            end_time = time.monotonic()
            if first_attempt_time is None:
                first_attempt_time = end_time
            self._counts["waiting_seconds"] += first_attempt_time - start_time
            self._counts["serving_seconds"] += end_time - first_attempt_time

    def _own_semaphore(self) -> asyncio.Semaphore:
        """Return the semaphore of the current event loop. Each event loop needs its own."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self._concurrency))
        return self._semaphore[1]
