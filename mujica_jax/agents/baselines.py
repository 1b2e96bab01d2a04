"""Prompt-only baselines: published ways of answering with and without retrieval, on the same
records and environments.

    direct            the question alone
    chain_of_thought  the question alone, reasoning first (Wei et al., 2022)
    rag               one search for the question, then the answer
    iter_retgen       searches with the question and the last answer's reasoning, a few times
                      (Shao et al., 2023)
    ircot             each sentence of the reasoning is the next query (Trivedi et al., 2023)
    search_o1         searches within the reasoning; a second prompt reduces what was found to
                      what helps (Li et al., 2025)
    react             Thought, Action: Search[...] or Finish[...], Observation (Yao et al., 2023)
    flare             a sentence with an unlikely token is written again after a search for its
                      likely ones (Jiang et al., 2023)
    skr               the model says whether it needs a search (the prompt of Wang et al., 2023)

The wording of the prompts is ours, and all but ReAct close with <answer>. Each call of the model is
a turn of a conversation of its own, the one that gave the answer first, except in Search-o1 and
ReAct, which go on with theirs. Only what the model generated is parsed.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Episode, Written
from mujica_jax.agents.single import INFORMATION, INFORMATION_TAG, information
from mujica_jax.agents.single import parse as parse_search
from mujica_jax.config.agents import (
    BaselineConfig,
    FlareConfig,
    IrcotConfig,
    IterRetGenConfig,
    ReactConfig,
    SearchO1Config,
)
from mujica_jax.errors import UserError
from mujica_jax.models.thoughts import THOUGHT_TAG_BYTES, outside_thoughts
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

# Roles of conversations.
ANSWERS = "answers"
READER = "reader"

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
_ANSWER_ENDS = ("</answer>",)
# The content may hold brackets of its own: "Finish[Amber Tide [film]]".
_REACT = re.compile(
    r"Action[\s*_]*\d*[\s*_]*:\W*(Search|Finish)\s*\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", re.IGNORECASE
)
_TAG = re.compile(r"</?[a-z]+>|<\|[a-z_]+\|>", re.IGNORECASE)
_BEGINS_LINE = re.compile(r"(?:^|\n)\W*\Z")
OBSERVATION = "Observation:"
# With the line break, since a thought may name the word.
OBSERVATION_LINE = f"\n{OBSERVATION}"


# The answer, and why the episode ended.
Outcome = tuple[str, StopReason]


class Baseline:
    """Implements `Agent`: the kind that the configuration names."""

    def __init__(self, tokenizer: Tokenizer, config: BaselineConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        del kind
        return Opening(system=READ_DOCUMENTS if role == READER else PROMPTS[self._config.kind])

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        episode = _BaselineEpisode(self._tokenizer, self._config, attempt, environment, policy)
        play = _PLAYS[self._config.kind]
        try:
            answer, reason = await play(episode, self._config)
        except RetrievalError:
            answer = ""
            reason = StopReason.RETRIEVER_FAILED

        # The conversation that gave the answer ended last and stands first in the record.
        return episode.trajectory(episode.conversations[::-1], answer, reason)


class _BaselineEpisode(Episode):
    """One episode of a baseline: its question, its turns and its conversations."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: BaselineConfig,
        attempt: Attempt,
        environment: Environment,
        policy: Policy,
    ) -> None:
        super().__init__(tokenizer, config, attempt, environment, policy)
        self.question = protocol.one_line(attempt.question.text)
        # In the order in which they ended.
        self.conversations: list[Conversation] = []
        self._turns_begun = 0

    def message(self, passages: Sequence[Material] = (), sentences: Sequence[str] = ()) -> str:
        """Return the user message with the passages, the question and the reasoning so far."""
        lines = []
        if passages:
            lines.append(information(self.fit(passages)))
        lines.append(f"Question: {self.question}")
        if sentences:
            lines.append(f"Reasoning so far: {' '.join(sentences)}")
        return "\n".join(lines)

    async def ask(self, prompt: str, message: str) -> Written:
        """Hold a conversation of one turn that ends with an answer."""
        with self.conversation(ANSWERS, PROMPTS[prompt], message) as dialogue:
            return await self.write_turn(dialogue, stop_strings=_ANSWER_ENDS)

    async def read_documents(self, dialogue: Dialogue, query: str, iteration: int) -> Written:
        """Search, and let a conversation of its own read the passages for the one that reasons."""
        passages = await self.search_passages(query, iteration)
        reasoning = " ".join(turn.text for turn in dialogue.record().turns if turn.role == "model")
        lines = [
            self.message(),
            f"Reasoning: {protocol.one_line(reasoning)}",
            f"Query: {query}",
            information(passages),
        ]
        with self.conversation(READER, READ_DOCUMENTS, "\n".join(lines)) as reader:
            return await self.write_turn(reader, stop_strings=("</sentence>",))

    @contextlib.contextmanager
    def conversation(self, role: str, system: str, message: str) -> Iterator[Dialogue]:
        """Open a conversation. It is recorded however it ends."""
        dialogue = Dialogue(self.tokenizer, role, system)
        dialogue.add_user(message)
        try:
            yield dialogue
        finally:
            self.conversations.append(dialogue.record())

    async def write_turn(
        self, dialogue: Dialogue, stop_strings: tuple[str, ...], cut_at: str | None = None
    ) -> Written:
        """Write one turn. Other turns may follow a turn with `cut_at`, which begins an
        observation."""
        place = str(self._turns_begun)
        self._turns_begun += 1
        return await self.write(
            dialogue,
            place,
            state=None,
            stop_strings=stop_strings,
            cut_at=cut_at,
            continues=cut_at is not None,
        )


# --- how each kind plays an episode ---


async def _play_direct(episode: _BaselineEpisode, config: BaselineConfig) -> Outcome:
    del config
    return _outcome(await episode.ask("direct", episode.message()))


async def _play_chain_of_thought(episode: _BaselineEpisode, config: BaselineConfig) -> Outcome:
    del config
    return _outcome(await episode.ask("chain_of_thought", episode.message()))


async def _play_rag(episode: _BaselineEpisode, config: BaselineConfig) -> Outcome:
    del config
    passages = await episode.search_passages(episode.question, 0)
    return _outcome(await episode.ask("rag", episode.message(passages)))


async def _play_skr(episode: _BaselineEpisode, config: BaselineConfig) -> Outcome:
    written = await episode.ask("skr", episode.message())
    if written.cut is not None:
        return "", written.cut
    reply = protocol.parse_answer(written.text)
    if reply is None:
        return "", StopReason.NO_ACTION

    if reply.casefold().startswith("no"):
        return await _play_direct(episode, config)
    return await _play_rag(episode, config)


async def _play_iter_retgen(episode: _BaselineEpisode, config: IterRetGenConfig) -> Outcome:
    written = Written(text="")
    for iteration in range(config.max_searches):
        query = protocol.one_line(f"{episode.question} {_untagged(written.text)}")
        passages = await episode.search_passages(query, iteration)
        written = await episode.ask("iter_retgen", episode.message(passages))
        if written.cut is not None:
            break
    return _outcome(written)


async def _play_ircot(episode: _BaselineEpisode, config: IrcotConfig) -> Outcome:
    sentences: list[str] = []
    passages = list(await episode.search_passages(episode.question, 0))
    for iteration in range(1, config.max_searches + 1):
        written = await episode.ask("ircot", episode.message(passages, sentences))
        if written.cut is not None:
            return "", written.cut

        sentence = _sentence(written.text)
        if protocol.opens("answer", sentence) or iteration == config.max_searches:
            return _outcome(written)
        if not sentence:
            return "", StopReason.NO_ACTION
        sentences.append(protocol.one_line(_untagged(sentence)))

        # The newest passages stand first: the next sentence needs them most.
        shown_texts = {material.text for material in passages}
        results = await episode.search_passages(sentences[-1], iteration)
        new_passages = [material for material in results if material.text not in shown_texts]
        passages = new_passages + passages
    return "", StopReason.ITERATION_LIMIT


async def _play_flare(episode: _BaselineEpisode, config: FlareConfig) -> Outcome:
    sentences: list[str] = []
    passages: list[Material] = []
    for iteration in range(config.max_sentences):
        written = await episode.ask("flare", episode.message(passages, sentences))
        if written.cut is not None:
            return "", written.cut

        # A sentence with an unlikely token is written again after a search.
        query = _likely_words(
            written, episode.tokenizer, episode.question, min_probability=config.min_probability
        )
        if query and len(episode.searches) < config.max_searches:
            passages = list(await episode.search_passages(query, iteration))
            written = await episode.ask("flare", episode.message(passages, sentences))
            if written.cut is not None:
                return "", written.cut

        sentence = _sentence(written.text)
        if protocol.opens("answer", sentence):
            return _outcome(written)
        if not sentence:
            return "", StopReason.NO_ACTION
        sentences.append(protocol.one_line(_untagged(sentence)))
    return "", StopReason.ITERATION_LIMIT


async def _play_search_o1(episode: _BaselineEpisode, config: SearchO1Config) -> Outcome:
    stop_strings = ("</search>", "</answer>", INFORMATION)
    with episode.conversation(ANSWERS, PROMPTS["search_o1"], episode.message()) as dialogue:
        for turn in range(config.max_searches + 1):
            written = await episode.write_turn(dialogue, stop_strings, cut_at=INFORMATION)
            if written.cut is not None:
                return "", written.cut

            answer, query = parse_search(written.text)
            if answer is not None or query is None:
                return _outcome(written)

            # The last turn can only answer: its search is not made.
            if turn < config.max_searches:
                note = await episode.read_documents(dialogue, query, turn)
                if note.cut is not None:
                    return "", note.cut
                sentence = protocol.field("sentence", note.text) or protocol.NOTHING_FOUND
                dialogue.add_user(sentence, tag=INFORMATION_TAG)
    return "", StopReason.ITERATION_LIMIT


async def _play_react(episode: _BaselineEpisode, config: ReactConfig) -> Outcome:
    with episode.conversation(ANSWERS, PROMPTS["react"], episode.message()) as dialogue:
        for turn in range(config.max_searches + 1):
            written = await episode.write_turn(
                dialogue, (OBSERVATION_LINE,), cut_at=OBSERVATION_LINE
            )
            if written.cut is not None:
                return "", written.cut

            action = _react_action(written.text)
            if action is None:
                return "", StopReason.NO_ACTION
            verb = action[1].casefold()
            content = protocol.one_line(action[2])
            if not content:
                return "", StopReason.NO_ACTION
            if verb == "finish":
                return content, StopReason.ANSWERED

            # The last turn can only finish: its search is not made.
            if turn < config.max_searches:
                passages = await episode.search_passages(content, turn)
                dialogue.add_user(f"{OBSERVATION} {information(passages)}")
    return "", StopReason.ITERATION_LIMIT


# By `agent.kind`. Each function takes the configuration of its own kind.
_PLAYS: dict[str, Callable[[_BaselineEpisode, Any], Awaitable[Outcome]]] = {
    "direct": _play_direct,
    "chain_of_thought": _play_chain_of_thought,
    "rag": _play_rag,
    "skr": _play_skr,
    "iter_retgen": _play_iter_retgen,
    "ircot": _play_ircot,
    "search_o1": _play_search_o1,
    "react": _play_react,
    "flare": _play_flare,
}


# --- reading what the model wrote ---


def _outcome(written: Written) -> Outcome:
    """Return the answer of a turn, or why the turn has none."""
    if written.cut is not None:
        return "", written.cut
    answer = protocol.parse_answer(written.text)
    if answer is None:
        return "", StopReason.NO_ACTION
    return answer, StopReason.ANSWERED


def _likely_words(
    written: Written, tokenizer: Tokenizer, question: str, *, min_probability: float
) -> str:
    """Return the query of FLARE: the sentence without the tokens below `min_probability`.

    The query is empty if all tokens of the sentence are likely, and the question if none is."""
    assert written.completion is not None, "a turn that is not cut was written"
    ids = written.completion.token_ids
    logprobs = written.completion.logprobs
    if logprobs is None:
        raise UserError(
            "agent.kind is flare, which reads log-probabilities, and the endpoint gives none"
        )

    # Find the bytes of the sentence behind the thoughts: a thought may say the same.
    pieces = [tokenizer.token_bytes(token) for token in ids]
    sampled = b"".join(pieces)
    sentence = _sentence(written.text).encode()
    thoughts_end = max((tag.end() for tag in THOUGHT_TAG_BYTES.finditer(sampled)), default=0)
    begin = sampled.find(sentence, thoughts_end)
    if begin < 0:
        begin = sampled.find(sentence)
    # An answer over several lines is joined to one line, so the bytes do not hold it.
    if begin < 0:
        return ""
    end = begin + len(sentence)

    # Keep the likely ones of the tokens that overlap with the sentence.
    boundaries = [0, *itertools.accumulate(map(len, pieces))]
    sentence_places = [
        place
        for place in range(len(ids))
        if boundaries[place + 1] > begin and boundaries[place] < end
    ]
    min_logprob = math.log(min_probability)
    likely_ids = [ids[place] for place in sentence_places if logprobs[place] >= min_logprob]
    if len(likely_ids) == len(sentence_places):
        return ""
    return protocol.one_line(_untagged(tokenizer.decode(likely_ids))) or question


def _sentence(text: str) -> str:
    """Return the first line outside of thoughts that says something. An answer over several lines
    is one line.

    A turn is not cut at its first line, because it may begin with a thought."""
    turn = protocol.on_one_line("answer", outside_thoughts(text))
    for line in turn.splitlines():
        if _untagged(line).strip():
            return line.strip()
    return ""


def _react_action(text: str) -> re.Match[str] | None:
    """Return the first action that begins a line outside of thoughts.

    Where none does, it is the last action: a line may think before it acts."""
    turn = outside_thoughts(text)
    actions = list(_REACT.finditer(turn))
    beginning_lines = [action for action in actions if _BEGINS_LINE.search(turn[: action.start()])]
    if beginning_lines:
        return beginning_lines[0]
    return actions[-1] if actions else None


def _untagged(text: str) -> str:
    """Return the text with a space for each tag."""
    return _TAG.sub(" ", text)
