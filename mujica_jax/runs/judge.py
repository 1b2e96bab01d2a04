"""Let a language model judge whether a prediction means the same as one of the gold answers.

"Learning When to Search" uses one judge both as the reward and as the measure of its tests. Here
the judge gives the rewards `judge` and `staged` (`RewardFunction.judge`), and `eval` can score with
it. Any `Generator` may be the judge. It reads the normalised prediction and gold answers, and
replies with YES or NO only, as in the paper (appendix B.4; the wording of the instruction is ours).
With `judge.show_question` it reads the question too.

Verdicts are stored by the name of the judge's model, the instruction, and everything that the judge
read. The judge is therefore never asked the same thing twice. A training run stores the verdicts in
its run directory, so that episodes that are played again after a kill get the same rewards.

A request has the deadline and the retries of its endpoint. If the reply is still neither YES nor
NO, it is not stored, and `NoVerdictError` is raised. If that happens too often in a row,
`JudgeLostError` ends the program.
"""

import asyncio
import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.config.methods import needs_judge
from mujica_jax.config.schema import Config
from mujica_jax.errors import StoreError, UserError
from mujica_jax.inference.requests import Generator, RequestError, SamplingParams
from mujica_jax.metrics import Rule, bootstrap_interval, normalise_squad, score
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Question, Trajectory
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.rewards.reward import NoVerdictError
from mujica_jax.runs.endpoint import Endpoint, open_endpoint
from mujica_jax.storage.run_directory import RunDirectory, RunPath

INSTRUCTION = (
    "You compare a predicted answer with reference answers. The wording may differ: what counts is "
    "whether the prediction means the same as at least one of the references.\n"
    "Reply with one word: YES if it does, NO if it does not."
)
INSTRUCTION_WITH_QUESTION = (
    "You compare a predicted answer to a question with reference answers. The wording may differ: "
    "what counts is whether the prediction, as an answer to the question, means the same as at "
    "least one of the references.\n"
    "Reply with one word: YES if it does, NO if it does not."
)
# The largest number of tokens in a reply of the judge.
MAX_TOKENS = 8
VERDICTS = {"YES": True, "NO": False}
# The folder for verdicts in a run directory.
VERDICTS_FOLDER = "verdicts"


class JudgeLostError(UserError):
    """The judge failed too often in a row, so that nothing can be learnt or measured."""


class VerdictStore(Protocol):
    """A store of the judge's replies. The key is a hash of everything that the judge read."""

    def read(self, key: str) -> str | None:
        """Return the stored reply; None if there is none."""
        ...

    def write(self, key: str, reply: str) -> str:
        """Store a reply if there is none for this key, and return the stored reply."""
        ...


class CachedVerdicts:
    """A store of verdicts in the user's cache folder. Evaluations of all policies share it."""

    def __init__(self) -> None:
        self._cache = SearchCache(cache_folder("verdicts"), "replies")

    def read(self, key: str) -> str | None:
        return self._cache.read(key)

    def write(self, key: str, reply: str) -> str:
        self._cache.write([(key, 0, reply)])
        return reply


class RunVerdicts:
    """A store of verdicts in a run directory, one file for each verdict.

    If several processes write the same verdict, the first one stays.
    """

    def __init__(self, store: RunDirectory) -> None:
        self._store = store

    def read(self, key: str) -> str | None:
        name = self._name(key)
        return self._read_reply(name) if self._store.exists(name) else None

    def write(self, key: str, reply: str) -> str:
        name = self._name(key)
        data = json.dumps({"reply": reply}).encode()
        is_first = self._store.create(name, data)
        return reply if is_first else self._read_reply(name)

    def _read_reply(self, name: str) -> str:
        """Read a stored reply. Raises StoreError if it is not a verdict."""
        try:
            reply = self._store.read_json(name)["reply"]
            _verdict_of(reply)
        except (KeyError, TypeError, AttributeError, StoreError, NoVerdictError) as error:
            raise StoreError(
                f"{self._store.root / name} does not hold a verdict: remove this file, and the "
                "judge is asked again"
            ) from error
        return reply

    def _name(self, key: str) -> str:
        return f"{VERDICTS_FOLDER}/{key[:2]}/{key}.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdicts on the answers of one evaluation.

    An answer without a verdict is left out of the mean, because the judge failed and not the
    policy. Answers of episodes in which a search failed are not judged at all.

    Attributes:
        verdicts: The verdict on each answer; None if the judge failed.
        exact: Whether each answer matches a gold answer exactly.
    """

    verdicts: tuple[bool | None, ...]
    exact: tuple[bool, ...]

    def summary(self) -> dict[str, object]:
        """Return the verdicts as a JSON object. The mean and its 95% interval are in percent."""
        scores = [float(verdict) for verdict in self.verdicts if verdict is not None]
        mean = None
        interval = None
        if scores:
            mean = round(100 * sum(scores) / len(scores), 2)
            interval = [round(bound, 2) for bound in bootstrap_interval(scores)]
        pairs = list(zip(self.verdicts, self.exact, strict=True))
        return {
            "judge": mean,
            "judge_interval": interval,
            "judge_failures": self.verdicts.count(None),
            # How often the judge and exact match disagree.
            "judge_yes_not_exact": pairs.count((True, False)),
            "judge_no_but_exact": pairs.count((False, True)),
        }


class Judge:
    """A judge that asks a model for verdicts, and asks for each verdict only once.

    Use it from one event loop at a time.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        name: str,
        *,
        show_question: bool = False,
        concurrency: int = 8,
        verdicts: VerdictStore | None = None,
        max_failures_in_a_row: int = 16,
    ) -> None:
        """Make a judge from a model.

        `name` is the model's name. It is part of the key of stored verdicts, because another model
        may judge differently. `concurrency` is the largest number of requests at the same time.
        `verdicts` stores the replies (None: in the user's cache folder). After more than
        `max_failures_in_a_row` failures in a row, `JudgeLostError` is raised.
        """
        self.name = name
        self._generator = generator
        self._tokenizer = tokenizer
        self._show_question = show_question
        self._concurrency = concurrency
        self._verdicts = CachedVerdicts() if verdicts is None else verdicts
        self._max_failures_in_a_row = max_failures_in_a_row
        self._failures_in_a_row = 0
        self._instruction = INSTRUCTION_WITH_QUESTION if show_question else INSTRUCTION
        self._verdict_of_key: dict[str, bool] = {}
        # Verdicts that the model is being asked for, by their keys.
        self._pending: dict[str, asyncio.Future[bool]] = {}
        # The last event loop, and the semaphore that belongs to it.
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def __call__(self, question: Question, answer: str | None) -> bool:
        """Return whether the judge accepts an answer.

        A missing answer counts as wrong without asking the judge. Raises NoVerdictError if the
        judge gives no verdict, and JudgeLostError if that happened too often in a row.
        """
        if answer is None:
            return False
        text = self._message(question, answer)
        key = hashlib.sha256("\n".join([self.name, self._instruction, text]).encode()).hexdigest()
        if key in self._verdict_of_key:
            return self._verdict_of_key[key]
        # If several attempts give the same answer at the same time, they share one request.
        if key not in self._pending:
            self._pending[key] = asyncio.ensure_future(self._find(key, text))
            self._pending[key].add_done_callback(functools.partial(self._remove_pending, key))
        return await asyncio.shield(self._pending[key])

    def judge(
        self, questions: Sequence[Question], trajectories: Sequence[Trajectory], rule: Rule
    ) -> Judgement:
        """Judge the answers of an evaluation.

        `trajectories` holds one trajectory for each question, in the same order. `rule` is the
        task's rule for exact matches.
        """
        pairs = [
            (question, trajectory)
            for question, trajectory in zip(questions, trajectories, strict=True)
            if not trajectory.is_environment_fault
        ]

        async def verdict(question: Question, answer: str | None) -> bool | None:
            try:
                return await self(question, answer)
            except NoVerdictError:
                return None

        async def all_verdicts() -> list[bool | None]:
            asking = [verdict(question, trajectory.final_answer) for question, trajectory in pairs]
            return await asyncio.gather(*asking)

        verdicts = asyncio.run(all_verdicts())
        is_exact = [
            score(trajectory.final_answer, question.answers, rule).em == 1.0
            for question, trajectory in pairs
        ]
        return Judgement(verdicts=tuple(verdicts), exact=tuple(is_exact))

    def check(self) -> None:
        """Ask for one verdict, to test the judge. Raises UserError if the judge gives none."""
        question = Question(id="check", text="What is the capital of France?", answers=("Paris",))
        text = self._message(question, "Paris")
        try:
            _verdict_of(asyncio.run(self._reply(text)))
        except NoVerdictError as error:
            raise UserError(
                f"the judge {self.name} gives no verdict ({error}): check --judge.base-url and "
                "--judge.model"
            ) from error

    def _remove_pending(self, key: str, task: asyncio.Future[bool]) -> None:
        """Forget a request that has ended."""
        del self._pending[key]
        # Read the exception, because the caller that waited for it may have been cancelled. asyncio
        # warns about exceptions that nobody reads.
        if not task.cancelled():
            task.exception()

    async def _find(self, key: str, text: str) -> bool:
        """Read the verdict from the store, or ask the model for it and store it.

        The store is used in a thread, because a store in a bucket is slow.
        """
        reply = await asyncio.to_thread(self._verdicts.read, key)
        # Ask the model again if the stored reply is damaged.
        if reply is None or not _is_verdict(reply):
            async with self._running_semaphore():
                reply = await self._counted_reply(text)
            reply = await asyncio.to_thread(self._verdicts.write, key, reply)
        verdict = _verdict_of(reply)
        self._verdict_of_key[key] = verdict
        return verdict

    async def _counted_reply(self, text: str) -> str:
        """Ask the model for a reply that is a verdict, and count the failures in a row."""
        try:
            reply = await self._reply(text)
            _verdict_of(reply)
        except NoVerdictError as error:
            self._failures_in_a_row += 1
            if self._failures_in_a_row > self._max_failures_in_a_row:
                raise JudgeLostError(
                    f"the judge {self.name} gave no verdict {self._failures_in_a_row} times in a "
                    f"row, but faults.max_in_a_row is {self._max_failures_in_a_row}. The last "
                    f"error: {error}. Start the judge again or correct its address, then start the "
                    "same command again; finished work is kept"
                ) from error
            raise
        self._failures_in_a_row = 0
        return reply

    async def _reply(self, text: str) -> str:
        """Ask the model, and return its reply. Raises NoVerdictError if the request fails."""
        params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=0.0, seed=0)
        prompt = self._tokenizer.open_conversation(self._instruction, text)
        try:
            completion = await self._generator.generate(prompt, params)
        except RequestError as error:
            raise NoVerdictError(str(error)) from error
        token_ids = completion.token_ids
        if completion.finish_reason == "stop":
            # The last token is the stop token.
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(token_ids)

    def _message(self, question: Question, answer: str) -> str:
        """Return the text that the judge reads.

        It holds the prediction, the gold answers and, with `judge.show_question`, the question.
        """
        references = list(dict.fromkeys(_shown(gold) for gold in question.answers))
        lines = []
        if self._show_question:
            lines.append(f"Question: {' '.join(question.text.split())}")
        lines.append(f"Prediction: {_shown(answer)}")
        lines += [f"Reference: {reference}" for reference in references]
        return "\n".join(lines)

    def _running_semaphore(self) -> asyncio.Semaphore:
        """Return the semaphore of the running event loop, which limits the requests at a time.

        There may be many more answers than requests at a time. The time that a request waits for
        the semaphore does not count towards its deadline.
        """
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self._concurrency))
        return self._semaphore[1]


def open_judge(config: Config, verdicts: VerdictStore | None, *, out: RunPath) -> Judge | None:
    """Return the judge that the configured reward needs; None if the reward needs no judge.

    This sends no request.
    """
    if not needs_judge(config.reward, config.staged):
        return None
    return judge_behind(open_endpoint(config.judge, out), config, verdicts)


def judge_behind(endpoint: Endpoint, config: Config, verdicts: VerdictStore | None = None) -> Judge:
    """Return a judge with the settings of a configuration. Its model is behind this endpoint."""
    return Judge(
        endpoint.generator,
        endpoint.tokenizer,
        endpoint.name,
        show_question=config.judge.show_question,
        concurrency=config.judge.concurrency,
        verdicts=verdicts,
        max_failures_in_a_row=config.faults.max_in_a_row,
    )


def _shown(answer: str) -> str:
    """Return an answer as the judge reads it.

    The answer is normalised. If nothing would remain of it, it is shown as it was written.
    """
    return normalise_squad(answer) or " ".join(answer.split())


def _is_verdict(reply: object) -> bool:
    return isinstance(reply, str) and _word_of(reply) in VERDICTS


def _word_of(reply: str) -> str:
    return reply.strip().rstrip(".").upper()


def _verdict_of(reply: str) -> bool:
    """Return whether a reply is YES. Raises NoVerdictError if it is neither YES nor NO."""
    verdict = VERDICTS.get(_word_of(reply))
    if verdict is None:
        raise NoVerdictError(f"it replied {reply!r} instead of YES or NO")
    return verdict
