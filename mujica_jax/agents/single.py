"""The agent Single: one model that thinks, searches, reads and answers in one conversation.

The setting `agent.style` chooses one of two formats:

    reflect     "Learning When to Search":
                <think> <search> [<information>] <reflect> ... <answer>
                <think> <reflect> <answer>   if the model can answer without a search
    search_r1   Search-R1: no <reflect>, but a <think> after each message with search results

In the papers, <information> ... </information> is part of the model's turn. Here it is the next
message, so a turn of the model contains only text that the model wrote. The wording of the prompts
is our own.

The format is strict: fields follow each other with only white space between them
(`is_well_formed`). Equation 6 of "Learning When to Search" demands that a response "fully match".
The text of that paper lists "multiple iterations of think, search, information, reflect, answer",
whereas its prompt goes from <reflect> directly to the next <search>. Both are accepted here: after
<reflect> the model may think again before it searches or answers.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Episode
from mujica_jax.config.agents import SingleConfig
from mujica_jax.models.thoughts import OPEN_THOUGHT
from mujica_jax.models.tokenizer import TAG_PATTERN, Tokenizer
from mujica_jax.records import Conversation, Question, Search, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

# The role of the conversation.
SINGLE = "single"
# The tag around the passages in a message to the model.
INFORMATION_TAG = "information"
# If the model writes this tag itself, its turn is cut there.
INFORMATION = f"<{INFORMATION_TAG}>"
STOPS = ("</search>", "</answer>", INFORMATION)
# The model reads this word if a search found no passage.
NOTHING = "none"

_FIELD = re.compile(r"\s*<(think|search|reflect|answer)>(.*?)</\1>\s*", re.DOTALL)
_FOREIGN_TAG = re.compile(r"<\s*/?\s*observation\s*>", re.IGNORECASE)
_SEARCH_R1 = {("think", "search"), ("think", "answer")}
_FIRST_TURNS = {
    "search_r1": _SEARCH_R1,
    "reflect": {("think", "search"), ("think", "reflect", "answer")},
}
_LATER_TURNS = {
    "search_r1": _SEARCH_R1,
    "reflect": {
        ("reflect", "search"),
        ("reflect", "think", "search"),
        ("reflect", "answer"),
        ("reflect", "think", "answer"),
    },
}
_RULES = {
    "reflect": (
        "You answer questions. Think first inside <think> ... </think>, from what you know.\n"
        "If that is enough, sum up your reasoning inside <reflect> ... </reflect> and write the "
        "final answer, as short as possible, inside <answer> ... </answer>.\n"
        "Only if you do not know enough, write a short query of keywords inside <search> ... "
        "</search>. You then receive passages inside <information> ... </information>.\n"
        "Judge them inside <reflect> ... </reflect>. Then answer inside <answer> ... </answer>, or "
        "search again with another query."
    ),
    "search_r1": (
        "You answer questions with the help of a search tool. Each time you receive something new, "
        "think first inside <think> ... </think>.\n"
        "If you miss a fact, write a query inside <search> ... </search>; you then receive the "
        "passages found inside <information> ... </information>. Search as often as you need.\n"
        "When you know enough, write only the final answer, as short as possible, inside <answer> "
        "... </answer>."
    ),
}
_BRIEF = {
    "reflect": "Think, search if needed, reflect, answer.",
    "search_r1": "Think, search, answer.",
}
Style = Literal["reflect", "search_r1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleState:
    """The facts that the model knows when it writes a turn.

    Only the scripted policy reads them. `searches` holds the searches of the episode so far.
    """

    question: Question
    searches: tuple[Search, ...]
    style: Style


def parse(text: str) -> tuple[str | None, str | None]:
    """Return the answer and the query of a turn. Each is None if the turn does not contain it.

    Thoughts are ignored.
    """
    return protocol.parse_answer(text), protocol.field("search", text) or None


def information(materials: tuple[Material, ...]) -> str:
    """Write the message with search results for the conversation of a baseline agent."""
    return f"Passages found:\n{numbered_passages(materials)}"


def numbered_passages(materials: Sequence[Material]) -> str:
    """Write the passages of a search as numbered lines, to go between <information> tags."""
    lines = [
        f"[{number}] {protocol.one_line(material.text)}"
        for number, material in enumerate(materials)
    ]
    return "\n".join(lines or [NOTHING])


def _observation(*materials: Material) -> str:
    """Write the message with search results for a worked example."""
    return f"{INFORMATION}\n{numbered_passages(materials)}\n</{INFORMATION_TAG}>"


_FILM = Material(text="Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark.")
_DIRECTOR = Material(
    text="Ilse Vandermark: Ilse Vandermark (born 3 May 1920 in Ghent) was a film director."
)
# Worked examples as pairs (user message, model's reply). The people and works are invented.
_EXAMPLES = {
    "reflect": (
        (
            "Question: Where was the director of film Amber Tide born?",
            "<think> I do not know who directed Amber Tide. </think>\n"
            "<search> Amber Tide film director </search>",
        ),
        (
            _observation(_FILM),
            "<reflect> The director is Ilse Vandermark. Her place of birth is missing. </reflect>\n"
            "<search> Ilse Vandermark place of birth </search>",
        ),
        (
            _observation(_DIRECTOR),
            "<reflect> Ilse Vandermark was born in Ghent. </reflect>\n<answer> Ghent </answer>",
        ),
        (
            "Question: Is 1948 earlier than 1961?",
            "<think> 1948 is before 1961. </think>\n"
            "<reflect> 1948 is earlier than 1961. </reflect>\n"
            "<answer> yes </answer>",
        ),
    ),
    "search_r1": (
        (
            "Question: Where was the director of film Amber Tide born?",
            "<think> I need the director of Amber Tide. </think>\n"
            "<search> Who directed the film Amber Tide? </search>",
        ),
        (
            _observation(_FILM),
            "<think> Now I need where Ilse Vandermark was born. </think>\n"
            "<search> Where was Ilse Vandermark born? </search>",
        ),
        (
            _observation(_FILM, _DIRECTOR),
            "<think> She was born in Ghent. </think>\n<answer> Ghent </answer>",
        ),
    ),
}


def opening(style: Style, mode: protocol.PromptMode) -> Opening:
    """Return the system prompt and the worked examples.

    `mode` is `brief` for one line, `zero_shot` for the rules, or `few_shot` for the rules and
    worked examples.
    """
    if mode == "brief":
        return Opening(system=_BRIEF[style])
    return Opening(system=_RULES[style], examples=_EXAMPLES[style] if mode == "few_shot" else ())


def is_well_formed(conversation: Conversation, style: Style, *, thought_open: bool = False) -> bool:
    """Return whether every turn of the model has a sequence of fields that the format permits.

    `thought_open` is True if the chat template begins every turn with a thought. In the first turn
    this thought counts as the first field. In later turns of the style `reflect` it is ignored,
    because the prompt does not ask for a thought there.
    """
    turns = [turn.text for turn in conversation.turns if turn.role == "model"]
    if thought_open:
        turns = [f"{OPEN_THOUGHT}{text}" for text in turns]
    shapes = [_shape(text) for text in turns]
    for place, shape in enumerate(shapes):
        is_first = place == 0
        is_last = place == len(shapes) - 1
        may_drop_thought = thought_open and style == "reflect" and not is_first
        if may_drop_thought and shape[:1] == ("think",):
            shape = shape[1:]

        permitted = _FIRST_TURNS[style] if is_first else _LATER_TURNS[style]
        if shape not in permitted:
            return False
        answers = shape[-1] == "answer"
        if answers != is_last:
            return False
    return bool(shapes)


def _shape(text: str) -> tuple[str, ...]:
    """Return the tags of a turn in their order, or () if the turn is not a sequence of fields.

    A thought may contain anything. Every other field must contain text without tags.
    """
    tags: list[str] = []
    position = 0
    while position < len(text):
        match = _FIELD.match(text, position)
        if match is None:
            return ()
        tag = match[1]
        content = match[2]
        if not content.strip():
            return ()
        has_tags = TAG_PATTERN.search(content) or _FOREIGN_TAG.search(content)
        if tag != "think" and has_tags:
            return ()
        tags.append(tag)
        position = match.end()
    return tuple(tags)


class Single:
    """An agent with a single model in a single conversation. It implements `Agent`."""

    def __init__(self, tokenizer: Tokenizer, config: SingleConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return the system prompt and the worked examples. Role and kind do not matter."""
        del role, kind
        return opening(self._config.style, self._config.prompt)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """Play one episode and return its record, without a reward."""
        config = self._config
        prompt = opening(config.style, config.prompt)
        episode = Episode(self._tokenizer, config, attempt, environment, policy)
        dialogue = Dialogue(self._tokenizer, SINGLE, system=prompt.system, examples=prompt.examples)
        dialogue.add_user(f"Question: {protocol.one_line(attempt.question.text)}")

        answer, reason = await self._converse(episode, dialogue)

        record = dialogue.record()
        is_formed = is_well_formed(
            record, config.style, thought_open=bool(self._tokenizer.opened_thought)
        )
        counts = {"malformed_shape": float(not is_formed)}
        return episode.trajectory([record], answer=answer, reason=reason, counts=counts)

    async def _converse(self, episode: Episode, dialogue: Dialogue) -> tuple[str, StopReason]:
        """Let the model search until it answers or a limit ends the episode.

        Returns the answer, which is empty if there is none, and why the episode ended.
        """
        config = self._config
        for turn in range(config.max_searches + 1):
            state = SingleState(
                question=episode.attempt.question,
                searches=tuple(episode.searches),
                style=config.style,
            )
            written = await episode.write(
                dialogue,
                str(turn),
                state=state,
                stop_strings=STOPS,
                continues=True,
                cut_at=INFORMATION,
            )
            if written.cut is not None:
                return "", written.cut

            answer, query = parse(written.text)
            if answer is not None:
                return answer, StopReason.ANSWERED
            if query is None:
                return "", StopReason.NO_ACTION

            # The last turn can only answer. A search that it asks for is not made.
            if turn < config.max_searches:
                try:
                    materials = await episode.search_passages(query, turn)
                except RetrievalError:
                    return "", StopReason.RETRIEVER_FAILED
                dialogue.add_user(numbered_passages(materials), tag=INFORMATION_TAG)
        return "", StopReason.ITERATION_LIMIT
