"""A language model as judge: does a prediction mean the same as one of the gold answers?

The measure of "Learning When to Search" (its instruction is in the appendix; the wording here is ours): prediction and
golds are normalised, and the judge says YES or NO and nothing else. Any `Generator` may judge. What it said is kept on
disk by model, instruction and content, so that nothing is asked twice; what is no verdict is not kept.
"""

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.inference.requests import Generator, RequestError, SamplingParams
from mujica_jax.metrics import Rule, bootstrap_interval, normalise_squad, score
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Question, Trajectory
from mujica_jax.retrieval.search_cache import SearchCache

INSTRUCTION = (
    "You compare the answer that somebody gave to a question with the answers that are right. The wording may differ: "
    "what counts is whether the given answer means the same as at least one of the right ones.\n"
    "Reply with one word: YES if it does, NO if it does not."
)
MAX_TOKENS = 8  # of a verdict
VERDICTS = {"YES": True, "NO": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """Of one evaluation. A prediction without a verdict counts as wrong."""

    verdicts: tuple[bool | None, ...]  # None: the judge failed
    exact: tuple[bool, ...]

    def summary(self) -> dict[str, object]:
        said = [float(verdict is True) for verdict in self.verdicts]
        pairs = list(zip(self.verdicts, self.exact, strict=True))
        return {
            "judge": round(100 * sum(said) / len(said), 2),
            "judge_interval": [round(bound, 2) for bound in bootstrap_interval(said)],
            "judge_failures": self.verdicts.count(None),
            # where the judge and exact match differ
            "judge_yes_not_exact": pairs.count((True, False)),
            "judge_no_but_exact": pairs.count((False, True)),
        }


class Judge:
    def __init__(self, generator: Generator, tokenizer: Tokenizer, name: str) -> None:
        """`name` is the model's: another judge has other verdicts."""
        self._generator, self._tokenizer = generator, tokenizer
        version = hashlib.sha256(f"{name}\n{INSTRUCTION}".encode()).hexdigest()[:16]
        self._kept = SearchCache(cache_folder("verdicts"), version)

    def judge(self, questions: Sequence[Question], trajectories: Sequence[Trajectory], rule: Rule) -> Judgement:
        """An episode that did not answer is wrong without being asked about."""
        pairs = list(zip(questions, trajectories, strict=True))

        async def all_of_them() -> list[bool | None]:
            return await asyncio.gather(*(self._verdict(asked, given.final_answer) for asked, given in pairs))

        exact = (score(given.final_answer, asked.answers, rule).em == 1.0 for asked, given in pairs)
        return Judgement(verdicts=tuple(asyncio.run(all_of_them())), exact=tuple(exact))

    async def _verdict(self, question: Question, answer: str | None) -> bool | None:
        if answer is None:
            return False
        golds = list(dict.fromkeys(normalise_squad(gold) for gold in question.answers))
        asked = [f"Question: {' '.join(question.text.split())}", f"Given answer: {normalise_squad(answer)}"]
        text = "\n".join([*asked, *(f"Right answer: {gold}" for gold in golds)])
        said = self._kept.read(text)
        if said is None:
            params = SamplingParams(max_new_tokens=MAX_TOKENS, temperature=0.0, seed=0)
            prompt = self._tokenizer.open_conversation(INSTRUCTION, text)
            try:
                completion = await self._generator.generate(prompt, params)
            except RequestError:
                return None
            ids = completion.token_ids
            said = self._tokenizer.decode(ids[:-1] if completion.finish_reason == "stop" else ids)
        verdict = VERDICTS.get(said.strip().rstrip(".").upper())
        if verdict is not None:
            self._kept.write([(text, 0, said)])
        return verdict
