"""Prompt-only baselines: published ways of answering with and without retrieval, on the same
records and environments.

    direct            the question alone
    chain_of_thought  the question alone, reasoning first (Wei et al., 2022)
    rag               one search for the question, then the answer
    iter_retgen       searches with the question and the last answer's reasoning, a few times (Shao et al., 2023)
    ircot             each sentence of the reasoning is the next query (Trivedi et al., 2023)
    search_o1         searches within the reasoning; a second prompt reduces what was found to what helps (Li et al.,
                      2025)
    react             Thought, Action: Search[...] or Finish[...], Observation (Yao et al., 2023)
    flare             a sentence with an unlikely token is written again after a search for its likely ones (Jiang et
                      al., 2023)
    skr               the model says whether it needs a search (the prompt of Wang et al., 2023)

The wording of the prompts is ours, and all but ReAct close with <answer>. Each call of the model is
a turn of a conversation of its own, the one that gave the answer first, except in Search-o1 and
ReAct, which go on with theirs. Only what the model generated is parsed.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Episode, Written
from mujica_jax.agents.single import INFORMATION, INFORMATION_TAG, information
from mujica_jax.agents.single import parse as parse_search
from mujica_jax.config.agents import BaselineConfig
from mujica_jax.errors import UserError
from mujica_jax.models.thoughts import THOUGHT_TAG_BYTES, outside_thoughts
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

ANSWERS, READER = "answers", "reader"  # roles of conversations
_ANSWER = "Write only the final answer, as short as possible, inside <answer> ... </answer>."
_REASON = "Reason step by step inside <think> ... </think>, then answer.\n"
_PASSAGES = "You answer a question from the passages that are shown, and from what you know.\n"
PROMPTS = {
    "direct": f"You answer questions from what you know.\n{_ANSWER}",
    "chain_of_thought": f"You answer questions from what you know.\n{_REASON}{_ANSWER}",
    "rag": _PASSAGES + _ANSWER,
    "iter_retgen": _PASSAGES + _REASON + _ANSWER,
    "ircot": (
        f"{_PASSAGES}You are shown the reasoning so far. Write its next sentence, on one line, "
        "which names the fact that comes next; each sentence is used to search for more passages.\n"
        f"When nothing is missing: {_ANSWER}"
    ),
    "search_o1": (
        "You answer questions by reasoning, and may search while you do.\n"
        "Where a fact is missing, write a query inside <search> ... </search>; you then receive "
        "what was found inside <information> ... </information>, and reason on.\n"
        f"{_ANSWER}"
    ),
    "react": (
        "You answer questions by turns of thought and action. Each turn is two lines:\n"
        "Thought: what is known and what is missing\n"
        "Action: Search[a query], or Finish[the final answer, as short as possible]\n"
        "After a search you receive an observation."
    ),
    "flare": (
        f"{_PASSAGES}You are shown the reasoning so far. Write its next sentence, on one line.\n"
        f"When nothing is missing: {_ANSWER}"
    ),
    "skr": (
        "Do you need to look something up to answer the question? Write Yes or No inside <answer> "
        "... </answer>."
    ),
}
READ_DOCUMENTS = (
    "You are shown the reasoning about a question so far, the query that it led to, and the "
    "passages found. Write what the passages say that helps, in one or two sentences, inside "
    f"<sentence> ... </sentence>. If nothing helps, the sentence is: {protocol.NOTHING_FOUND}"
)
_ANSWERED = ("</answer>",)
# The content may hold brackets of its own: "Finish[Amber Tide [film]]".
_REACT = re.compile(
    r"Action[\s*_]*\d*[\s*_]*:\W*(Search|Finish)\s*\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", re.IGNORECASE
)
_BEGINS_LINE = re.compile(r"(?:^|\n)\W*\Z")
OBSERVATION = "Observation:"
OBSERVATION_LINE = f"\n{OBSERVATION}"  # a thought may name the word


class Baseline:
    """Implements `Agent`: the kind that the configuration names."""

    def __init__(self, tokenizer: Tokenizer, config: BaselineConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        del kind
        return Opening(system=READ_DOCUMENTS if role == READER else PROMPTS[self._config.kind])

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        playing = _Playing(self._tokenizer, self._config, attempt, environment, policy)
        try:
            answer, reason = await getattr(playing, self._config.kind)()
        except _Cut as cut:
            answer, reason = "", cut.args[0]
        except RetrievalError:
            answer, reason = "", StopReason.RETRIEVER_FAILED
        return playing.trajectory(playing.conversations[::-1], answer, reason)


class _Cut(Exception):
    """A turn that a limit ended, which is its argument."""


Outcome = tuple[str, StopReason]


class _Playing(Episode):
    """One method a kind; each returns the answer and why the episode ended."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: BaselineConfig,
        attempt: Attempt,
        environment: Environment,
        policy: Policy,
    ) -> None:
        super().__init__(tokenizer, config, attempt, environment, policy)
        self._config: Any = config  # of the kind whose method is played
        self._question = protocol.one_line(attempt.question.text)
        self._asked = 0
        self.conversations: list[Conversation] = []  # as they ended

    async def direct(self) -> Outcome:
        return _outcome(await self._ask("direct", self._opening()))

    async def chain_of_thought(self) -> Outcome:
        return _outcome(await self._ask("chain_of_thought", self._opening()))

    async def rag(self) -> Outcome:
        return _outcome(
            await self._ask("rag", self._opening(await self.search_passages(self._question, 0)))
        )

    async def iter_retgen(self) -> Outcome:
        written = Written(text="")
        for iteration in range(self._config.max_searches):
            query = protocol.one_line(f"{self._question} {_untagged(written.text)}")
            written = await self._ask(
                "iter_retgen", self._opening(await self.search_passages(query, iteration))
            )
        return _outcome(written)

    async def ircot(self) -> Outcome:
        sentences: list[str] = []
        passages = list(await self.search_passages(self._question, 0))
        for iteration in range(1, self._config.max_searches + 1):
            written = await self._ask("ircot", self._opening(passages, sentences))
            sentence = _sentence(written.text)
            if protocol.opens("answer", sentence) or iteration == self._config.max_searches:
                return _outcome(written)
            if not sentence:
                return "", StopReason.NO_ACTION
            sentences.append(protocol.one_line(_untagged(sentence)))
            known = {material.text for material in passages}
            found = await self.search_passages(sentences[-1], iteration)
            # what came last is what the next sentence needs most
            passages = [material for material in found if material.text not in known] + passages
        return "", StopReason.ITERATION_LIMIT

    async def flare(self) -> Outcome:
        sentences: list[str] = []
        passages: list[Material] = []
        for iteration in range(self._config.max_sentences):
            written = await self._ask("flare", self._opening(passages, sentences))
            if (query := self._likely(written)) and len(self.searches) < self._config.max_searches:
                passages = list(await self.search_passages(query, iteration))
                written = await self._ask("flare", self._opening(passages, sentences))
            sentence = _sentence(written.text)
            if protocol.opens("answer", sentence):
                return _outcome(written)
            if not sentence:
                return "", StopReason.NO_ACTION
            sentences.append(protocol.one_line(_untagged(sentence)))
        return "", StopReason.ITERATION_LIMIT

    async def skr(self) -> Outcome:
        said = protocol.parse_answer((await self._ask("skr", self._opening())).text)
        if said is None:
            return "", StopReason.NO_ACTION
        return await (self.direct() if said.casefold().startswith("no") else self.rag())

    async def search_o1(self) -> Outcome:
        with self._conversation(ANSWERS, PROMPTS["search_o1"], self._opening()) as dialogue:
            for turn in range(self._config.max_searches + 1):
                written = await self._written(
                    dialogue, ("</search>", "</answer>", INFORMATION), INFORMATION
                )
                answer, query = parse_search(written.text)
                if answer is not None or query is None:
                    return _outcome(written)
                if turn < self._config.max_searches:
                    dialogue.add_user(
                        await self._reduced(dialogue, query, turn), tag=INFORMATION_TAG
                    )
        return "", StopReason.ITERATION_LIMIT

    async def react(self) -> Outcome:
        with self._conversation(ANSWERS, PROMPTS["react"], self._opening()) as dialogue:
            for turn in range(self._config.max_searches + 1):
                written = await self._written(dialogue, (OBSERVATION_LINE,), OBSERVATION_LINE)
                action = _react_action(written.text)
                if action is None or not (said := protocol.one_line(action[2])):
                    return "", StopReason.NO_ACTION
                if action[1].casefold() == "finish":
                    return said, StopReason.ANSWERED
                if turn < self._config.max_searches:
                    dialogue.add_user(
                        f"{OBSERVATION} {information(await self.search_passages(said, turn))}"
                    )
        return "", StopReason.ITERATION_LIMIT

    async def _reduced(self, dialogue: Dialogue, query: str, iteration: int) -> str:
        """Reason-in-documents: a conversation of its own that reads the passages for the one that
        reasons."""
        found = await self.search_passages(query, iteration)
        reasoning = " ".join(turn.text for turn in dialogue.record().turns if turn.role == "model")
        lines = [
            self._opening(),
            f"Reasoning: {protocol.one_line(reasoning)}",
            f"Query: {query}",
            information(found),
        ]
        written = await self._ask(READER, "\n".join(lines), ("</sentence>",))
        return protocol.field("sentence", written.text) or protocol.NOTHING_FOUND

    def _opening(self, passages: Sequence[Material] = (), sentences: Sequence[str] = ()) -> str:
        lines = [information(self.fit(passages))] if passages else []
        lines.append(f"Question: {self._question}")
        if sentences:
            lines.append(f"Reasoning so far: {' '.join(sentences)}")
        return "\n".join(lines)

    async def _ask(
        self, prompt: str, text: str, stop_strings: tuple[str, ...] = _ANSWERED
    ) -> Written:
        """A conversation of one turn. Raises _Cut."""
        role = READER if prompt == READER else ANSWERS
        with self._conversation(
            role, READ_DOCUMENTS if role == READER else PROMPTS[prompt], text
        ) as dialogue:
            return await self._written(dialogue, stop_strings)

    @contextlib.contextmanager
    def _conversation(self, role: str, system: str, opening: str) -> Iterator[Dialogue]:
        """Recorded however it ends."""
        dialogue = Dialogue(self.tokenizer, role, system)
        dialogue.add_user(opening)
        try:
            yield dialogue
        finally:
            self.conversations.append(dialogue.record())

    async def _written(
        self, dialogue: Dialogue, stop_strings: tuple[str, ...], cut_at: str | None = None
    ) -> Written:
        """A turn; one that is cut at its observation may be followed by others."""
        place, self._asked = str(self._asked), self._asked + 1
        continues = cut_at is not None
        written = await self.write(
            dialogue,
            place,
            state=None,
            stop_strings=stop_strings,
            cut_at=cut_at,
            continues=continues,
        )
        if written.cut is not None:
            raise _Cut(written.cut)
        return written

    def _likely(self, written: Written) -> str:
        """The sentence without its unlikely tokens, where it has some; the question where nothing
        else is left."""
        assert written.completion is not None, "a turn that is not cut was written"
        ids, logprobs = written.completion.token_ids, written.completion.logprobs
        if logprobs is None:
            raise UserError(
                "agent.kind is flare, which reads log-probabilities, and the endpoint gives none"
            )
        pieces = [self.tokenizer.token_bytes(id) for id in ids]
        sentence = _sentence(written.text).encode()
        sampled = b"".join(pieces)
        thoughts_end = max((tag.end() for tag in THOUGHT_TAG_BYTES.finditer(sampled)), default=0)
        begin = sampled.find(sentence, thoughts_end)  # a thought may say the same
        begin = sampled.find(sentence) if begin < 0 else begin
        if begin < 0:  # an answer over several lines
            return ""
        ends = [0, *itertools.accumulate(map(len, pieces))]
        inside = [
            at
            for at in range(len(ids))
            if ends[at + 1] > begin and ends[at] < begin + len(sentence)
        ]
        least = math.log(self._config.min_probability)
        kept = [ids[place] for place in inside if logprobs[place] >= least]
        if len(kept) == len(inside):
            return ""
        return protocol.one_line(_untagged(self.tokenizer.decode(kept))) or self._question


def _sentence(text: str) -> str:
    """Return the first line outside of thoughts that says something. An answer over several lines
    is one line.

    A turn is not cut at its first line, because it may begin with a thought."""
    lines = (
        line.strip() for line in protocol.on_one_line("answer", outside_thoughts(text)).splitlines()
    )
    return next((line for line in lines if _untagged(line).strip()), "")


def _react_action(text: str) -> re.Match[str] | None:
    """Return the first action that begins a line outside of thoughts.

    Where none does, it is the last action: a line may think before it acts."""
    turn = outside_thoughts(text)
    actions = list(_REACT.finditer(turn))
    beginning_lines = [action for action in actions if _BEGINS_LINE.search(turn[: action.start()])]
    if beginning_lines:
        return beginning_lines[0]
    return actions[-1] if actions else None


def _outcome(written: Written) -> Outcome:
    answer = protocol.parse_answer(written.text)
    return ("", StopReason.NO_ACTION) if answer is None else (answer, StopReason.ANSWERED)


_TAG = re.compile(r"</?[a-z]+>|<\|[a-z_]+\|>", re.IGNORECASE)


def _untagged(text: str) -> str:
    return _TAG.sub(" ", text)
