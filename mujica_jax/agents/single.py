"""One model that thinks, searches, reads what came and answers, in one conversation.

    reflect     "Learning When to Search": <think> <search> [<information>] <reflect> ... <answer>; a question that the
                model can answer itself goes from <think> over <reflect> to <answer>
    search_r1   Search-R1: the same without <reflect>

The papers put the information into the model's own turn; here it is the next message, so that only what the model wrote
is its turn. The wording of the prompts is ours.
"""

import dataclasses
import re
from typing import Literal

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Episode
from mujica_jax.config.agents import SingleConfig
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Question, Search, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

SINGLE = "single"  # role of the conversation
INFORMATION = "<information>"  # begins a message to the model; a model that writes it itself is cut there
STOPS = ("</search>", "</answer>", INFORMATION)

_SHAPE = {
    "search_r1": re.compile(r"\s*<think>.+</think>\s*<(search|answer)>.+</\1>\s*", re.DOTALL),
    # before the first search a thought, after one a reflection, and always a reflection before the answer
    "reflect": re.compile(
        r"\s*(<think>.+</think>\s*)?(<reflect>.+</reflect>\s*<answer>.+</answer>|(<reflect>.+</reflect>\s*)?<search>.+</search>)\s*",
        re.DOTALL,
    ),
}
_RULES = {
    "reflect": (
        "You answer questions. Think first inside <think> ... </think>, from what you know.\n"
        "If that is enough, sum up your reasoning inside <reflect> ... </reflect> and write the final answer, as short "
        "as possible, inside <answer> ... </answer>.\n"
        "Only if you do not know enough, write a short query of keywords inside <search> ... </search>. You then "
        "receive passages inside <information> ... </information>.\n"
        "Judge them inside <reflect> ... </reflect>. Then answer inside <answer> ... </answer>, or search again with "
        "another query."
    ),
    "search_r1": (
        "You answer questions with the help of a search tool. Each time you receive something new, think first inside "
        "<think> ... </think>.\n"
        "If you miss a fact, write a query inside <search> ... </search>; you then receive the passages found inside "
        "<information> ... </information>. Search as often as you need.\n"
        "When you know enough, write only the final answer, as short as possible, inside <answer> ... </answer>."
    ),
}
_BRIEF = {"reflect": "Think, search if needed, reflect, answer.", "search_r1": "Think, search, answer."}
Style = Literal["reflect", "search_r1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleState:
    """What the model knows when it writes a turn, for its script."""

    question: Question
    searches: tuple[Search, ...]  # so far
    style: Style


def parse(text: str) -> tuple[str | None, str | None]:
    """Answer and query of one turn, each None where there is none; thoughts are not read."""
    return protocol.parse_answer(text), protocol.field("search", text) or None


def information(materials: tuple[Material, ...]) -> str:
    lines = [f"[{number}] {protocol.one_line(material.text)}" for number, material in enumerate(materials)]
    return "\n".join(["Passages found:", *(lines or ["none"])])


_FILM = Material(text="Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark.")
_DIRECTOR = Material(text="Ilse Vandermark: Ilse Vandermark (born 3 May 1920 in Ghent) was a film director.")
# Worked examples as chat turns: (user message, model's reply). People and works are invented.
_EXAMPLES = {
    "reflect": (
        (
            "Question: Where was the director of film Amber Tide born?",
            "<think> I do not know who directed Amber Tide. </think>\n<search> Amber Tide film director </search>",
        ),
        (
            information((_FILM,)),
            "<reflect> The director is Ilse Vandermark. Her place of birth is missing. </reflect>\n"
            "<search> Ilse Vandermark place of birth </search>",
        ),
        (
            information((_DIRECTOR,)),
            "<reflect> Ilse Vandermark was born in Ghent. </reflect>\n<answer> Ghent </answer>",
        ),
        (
            "Question: Is 1948 earlier than 1961?",
            "<think> 1948 is before 1961. </think>\n<reflect> 1948 is earlier than 1961. </reflect>\n"
            "<answer> yes </answer>",
        ),
    ),
    "search_r1": (
        (
            "Question: Where was the director of film Amber Tide born?",
            "<think> I need the director of Amber Tide. </think>\n<search> Who directed the film Amber Tide? </search>",
        ),
        (
            information((_FILM,)),
            "<think> Now I need where Ilse Vandermark was born. </think>\n"
            "<search> Where was Ilse Vandermark born? </search>",
        ),
        (
            information((_FILM, _DIRECTOR)),
            "<think> She was born in Ghent. </think>\n<answer> Ghent </answer>",
        ),
    ),
}


def opening(style: Style, mode: protocol.PromptMode) -> Opening:
    """Return the prompt of a mode: one line (`brief`), the rules, or the rules and worked examples (`few_shot`)."""
    if mode == "brief":
        return Opening(system=_BRIEF[style])
    return Opening(system=_RULES[style], examples=_EXAMPLES[style] if mode == "few_shot" else ())


def is_well_formed(conversation: Conversation, style: Style) -> bool:
    """Whether every turn of the model has one of the shapes that its prompt permits."""
    turns = [turn.text for turn in conversation.turns if turn.role == "model"]
    shaped = all(_SHAPE[style].fullmatch(text) for text in turns)
    judged = style != "reflect" or all("<reflect>" in text for text in turns[1:])  # what each search brought
    return bool(turns) and shaped and judged and turns[0].lstrip().startswith("<think>") and "<answer>" in turns[-1]


class Single:
    """Implements `Agent`."""

    def __init__(self, tokenizer: Tokenizer, config: SingleConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        del role, kind
        return opening(self._config.style, self._config.prompt)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        config = self._config
        episode = Episode(self._tokenizer, config, attempt, environment, policy)
        begins = opening(config.style, config.prompt)
        dialogue = Dialogue(self._tokenizer, SINGLE, begins.system, begins.examples)
        dialogue.add_user(f"Question: {protocol.one_line(attempt.question.text)}")
        answer, reason = "", StopReason.ITERATION_LIMIT
        for turn in range(config.max_searches + 1):
            written = await episode.write(
                dialogue,
                str(turn),
                state=SingleState(question=attempt.question, searches=tuple(episode.searches), style=config.style),
                stop_strings=STOPS,
                continues=True,
                cut_at=INFORMATION,
            )
            found, query = parse(written.text) if written.cut is None else (None, None)
            if written.cut is not None or (found is None and query is None):
                reason = written.cut or StopReason.NO_ACTION
                break
            if found is not None:
                answer, reason = found, StopReason.ANSWERED
                break
            if turn == config.max_searches:
                break
            assert query is not None
            try:
                materials = await episode.search_passages(query, turn)
            except RetrievalError:
                reason = StopReason.RETRIEVER_FAILED
                break
            dialogue.add_user(information(materials))
        record = dialogue.record()
        counts = {"malformed_shape": float(not is_well_formed(record, config.style))}
        return episode.trajectory([record], answer, reason, counts)
