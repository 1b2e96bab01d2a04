"""The baseline Search-o1, which searches while it reasons (Li et al., 2025).

The model reads the passages of each search with a second prompt, and keeps the facts that help.
"""

from mujica_jax.agents import protocol
from mujica_jax.agents.baselines.baseline import (
    ANSWERS,
    WRITE_ANSWER,
    Baseline,
    BaselineEpisode,
    Outcome,
    outcome_of,
)
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Written
from mujica_jax.agents.single import INFORMATION, INFORMATION_TAG, information, parse
from mujica_jax.config.agents import SearchO1Config
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason
from mujica_jax.tasks.task import EnvironmentKind

# The role of the conversations that read passages.
READER = "reader"

_PROMPT = (
    "You answer questions by reasoning, and may search while you do.\n"
    "Where a fact is missing, write a query inside <search> ... </search>; you then receive "
    "what was found inside <information> ... </information>, and reason on.\n"
    f"{WRITE_ANSWER}"
)
_READER_PROMPT = (
    "You are shown the reasoning about a question so far, the query that it led to, and the "
    "passages found. Write what the passages say that helps, in one or two sentences, inside "
    f"<sentence> ... </sentence>. If nothing helps, the sentence is: {protocol.NOTHING_FOUND}"
)
_STOPS = ("</search>", "</answer>", INFORMATION)
_READER_STOPS = ("</sentence>",)


class SearchO1(Baseline):
    """An agent that reasons and searches in one conversation.

    A separate conversation reads the passages of each search.
    """

    system_prompt = _PROMPT

    def __init__(self, tokenizer: Tokenizer, config: SearchO1Config) -> None:
        super().__init__(tokenizer, config)
        self._max_searches = config.max_searches

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return the system prompt of this role."""
        if role == READER:
            return Opening(system=_READER_PROMPT)
        return super().opening(role, kind)

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end. Raises RetrievalError."""
        with episode.conversation(ANSWERS, _PROMPT, message=episode.message()) as dialogue:
            for turn in range(self._max_searches + 1):
                written = await episode.write_turn(dialogue, _STOPS, cut_at=INFORMATION)
                if written.cut is not None:
                    return "", written.cut

                answer, query = parse(written.text)
                if answer is not None or query is None:
                    return outcome_of(written)

                # The last turn can only answer. A search that it asks for is not made.
                if turn < self._max_searches:
                    note = await _read_passages(episode, dialogue, query=query, iteration=turn)
                    if note.cut is not None:
                        return "", note.cut
                    sentence = protocol.field("sentence", note.text) or protocol.NOTHING_FOUND
                    dialogue.add_user(sentence, tag=INFORMATION_TAG)
        return "", StopReason.ITERATION_LIMIT


async def _read_passages(
    episode: BaselineEpisode, dialogue: Dialogue, query: str, iteration: int
) -> Written:
    """Search, and let the model read the passages in a separate conversation.

    `dialogue` is the conversation that holds the reasoning. Raises RetrievalError.
    """
    passages = await episode.search_passages(query, iteration)
    reasoning = " ".join(turn.text for turn in dialogue.record().turns if turn.role == "model")
    lines = [
        episode.message(),
        f"Reasoning: {protocol.one_line(reasoning)}",
        f"Query: {query}",
        information(passages),
    ]
    with episode.conversation(READER, _READER_PROMPT, message="\n".join(lines)) as reader:
        return await episode.write_turn(reader, _READER_STOPS)
