"""A language model as judge of whether a prediction means the same as one of the gold answers.

"Learning When to Search" trains and tests with one judge as its measure. Here the judge gives the
rewards `judge` and `staged` (`RewardFunction.judge`), and `eval` scores with it. As in the paper's
instruction (appendix B.4; the wording here is ours), the judge reads the normalised prediction and
references and says YES or NO and nothing else. With `judge.show_question` it reads the question
too. Any `Generator` may judge.

A verdict is stored under the judge's model, the instruction and all that the judge read, so nothing
is asked twice. A training run stores its verdicts in the run directory: if it was killed, the
episodes that are played again earn what they earned before. A request has the deadline and the
retries of its endpoint. A reply that is still no verdict after these is not stored and raises
`NoVerdictError`. If that happens too often in a row, the judge is lost, and `JudgeLostError` ends
the program.
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
MAX_TOKENS = 8  # of a verdict
VERDICTS = {"YES": True, "NO": False}
VERDICTS_FOLDER = "verdicts"  # of a run directory


class JudgeLostError(UserError):
    """The judge has given no verdict for so long that nothing can be learnt or measured."""


class VerdictStore(Protocol):
    """A store of judges' replies, by a key that covers everything they read."""

    def read(self, key: str) -> str | None: ...

    def write(self, key: str, reply: str) -> str:
        """Store a reply, unless there is one already, and return the stored one."""
        ...


class CachedVerdicts:
    """Verdicts in the user's cache folder, for evaluations of any policy."""

    def __init__(self) -> None:
        self._cache = SearchCache(cache_folder("verdicts"), "replies")

    def read(self, key: str) -> str | None:
        return self._cache.read(key)

    def write(self, key: str, reply: str) -> str:
        self._cache.write([(key, 0, reply)])
        return reply


class RunVerdicts:
    """Verdicts in a run directory, one object each.

    If several processes write one, the first verdict stays.
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
        """Read a reply. Raises StoreError where it is no verdict."""
        try:
            reply = self._store.read_json(name)["reply"]
            _verdict_of(reply)
        except (KeyError, TypeError, AttributeError, StoreError, NoVerdictError) as error:
            raise StoreError(
                f"{self._store.root / name} holds no verdict: remove it, and it is asked again"
            ) from error
        return reply

    def _name(self, key: str) -> str:
        return f"{VERDICTS_FOLDER}/{key[:2]}/{key}.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdicts on one evaluation.

    A prediction without a verdict, or whose search failed, is left out of the mean: the judge or
    the retriever failed, not the policy.
    """

    verdicts: tuple[bool | None, ...]  # None: the judge failed
    exact: tuple[bool, ...]

    def summary(self) -> dict[str, object]:
        """Return what is written down of the verdicts, in percent."""
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
            # Where the judge and exact match differ.
            "judge_yes_not_exact": pairs.count((True, False)),
            "judge_no_but_exact": pairs.count((False, True)),
        }


class Judge:
    """Asks a model for verdicts, each once. Use from one event loop at a time."""

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
        """Make a judge of a model.

        `name` is the model's name, since another judge has other verdicts. `concurrency` bounds the
        requests under way. `verdicts` keeps the replies (None: the user's cache folder).
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
        self._pending: dict[str, asyncio.Future[bool]] = {}  # verdicts that are being asked for
        # The semaphore of the event loop that ran last.
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def __call__(self, question: Question, answer: str | None) -> bool:
        """Return whether an answer is right.

        No answer is wrong, and the judge is not asked. Raises NoVerdictError and JudgeLostError.
        """
        if answer is None:
            return False
        text = self._message(question, answer)
        key = hashlib.sha256("\n".join([self.name, self._instruction, text]).encode()).hexdigest()
        if key in self._verdict_of_key:
            return self._verdict_of_key[key]
        # Attempts that answer the same at the same time share one verdict.
        if key not in self._pending:
            self._pending[key] = asyncio.ensure_future(self._find(key, text))
            self._pending[key].add_done_callback(functools.partial(self._remove_pending, key))
        return await asyncio.shield(self._pending[key])

    def judge(
        self, questions: Sequence[Question], trajectories: Sequence[Trajectory], rule: Rule
    ) -> Judgement:
        """Return the verdicts on the answers of an evaluation."""
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
        """Ask for one verdict, before anything is played. Raises UserError where none comes."""
        question = Question(id="check", text="What is the capital of France?", answers=("Paris",))
        text = self._message(question, "Paris")
        try:
            _verdict_of(asyncio.run(self._reply(text)))
        except NoVerdictError as error:
            raise UserError(
                f"the judge {self.name} gives no verdict ({error}): correct --judge.base-url and "
                "--judge.model"
            ) from error

    def _remove_pending(self, key: str, task: asyncio.Future[bool]) -> None:
        """Forget a request that has ended."""
        del self._pending[key]
        if not task.cancelled():
            task.exception()  # read here: whoever asked may have been cancelled

    async def _find(self, key: str, text: str) -> bool:
        """Read the verdict, or ask for it and store it.

        Stores are asked in a thread: one in a bucket is slow.
        """
        reply = await asyncio.to_thread(self._verdicts.read, key)
        if reply is None or not _is_verdict(reply):  # what is stored may be damaged
            async with self._running_semaphore():
                reply = await self._counted_reply(text)
            reply = await asyncio.to_thread(self._verdicts.write, key, reply)
        verdict = _verdict_of(reply)
        self._verdict_of_key[key] = verdict
        return verdict

    async def _counted_reply(self, text: str) -> str:
        """Return a reply that is a verdict, and count failures in a row."""
        try:
            reply = await self._reply(text)
            _verdict_of(reply)
        except NoVerdictError as error:
            self._failures_in_a_row += 1
            if self._failures_in_a_row > self._max_failures_in_a_row:
                raise JudgeLostError(
                    f"the judge {self.name} gave no verdict {self._failures_in_a_row} times in a "
                    f"row, and faults.max_in_a_row is {self._max_failures_in_a_row}; the last "
                    f"time: {error}; start it again or correct its address, then give the same "
                    "command; what is finished is kept"
                ) from error
            raise
        self._failures_in_a_row = 0
        return reply

    async def _reply(self, text: str) -> str:
        """Ask the model once. Raises NoVerdictError where the request fails."""
        params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=0.0, seed=0)
        prompt = self._tokenizer.open_conversation(self._instruction, text)
        try:
            completion = await self._generator.generate(prompt, params)
        except RequestError as error:
            raise NoVerdictError(str(error)) from error
        token_ids = completion.token_ids
        if completion.finish_reason == "stop":
            token_ids = token_ids[:-1]  # without the stop token
        return self._tokenizer.decode(token_ids)

    def _message(self, question: Question, answer: str) -> str:
        """Return what the judge reads: prediction, references, and the question if configured."""
        references = list(dict.fromkeys(_shown(gold) for gold in question.answers))
        lines = []
        if self._show_question:
            lines.append(f"Question: {' '.join(question.text.split())}")
        lines.append(f"Prediction: {_shown(answer)}")
        lines += [f"Reference: {reference}" for reference in references]
        return "\n".join(lines)

    def _running_semaphore(self) -> asyncio.Semaphore:
        """Return the semaphore of the event loop that runs.

        Waiting for it does not count against a request's deadline, as there may be many more
        answers than places.
        """
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self._concurrency))
        return self._semaphore[1]


def open_judge(config: Config, verdicts: VerdictStore | None, *, out: RunPath) -> Judge | None:
    """Return the judge that the reward of a configuration asks; None where it asks none.

    Sends no request yet.
    """
    if not needs_judge(config.reward, config.staged):
        return None
    return judge_behind(open_endpoint(config.judge, out), config, verdicts)


def judge_behind(endpoint: Endpoint, config: Config, verdicts: VerdictStore | None = None) -> Judge:
    """Return the judge of a configuration, whose endpoint this is."""
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
    """Return an answer as the judge reads it: normalised.

    Where nothing would be left of it, it stays as it is written.
    """
    return normalise_squad(answer) or " ".join(answer.split())


def _is_verdict(reply: object) -> bool:
    return isinstance(reply, str) and _word_of(reply) in VERDICTS


def _word_of(reply: str) -> str:
    return reply.strip().rstrip(".").upper()


def _verdict_of(reply: str) -> bool:
    """Return whether a reply is YES. Raises NoVerdictError for anything but YES and NO."""
    verdict = VERDICTS.get(_word_of(reply))
    if verdict is None:
        raise NoVerdictError(f"it replied {reply!r} and not YES or NO")
    return verdict
