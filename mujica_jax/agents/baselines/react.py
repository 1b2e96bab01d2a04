"""The baseline ReAct, which alternates Thought, Action and Observation (Yao et al., 2023).

An action is Search[query] or Finish[answer].
"""

import re

from mujica_jax.agents import protocol
from mujica_jax.agents.baselines.baseline import ANSWERS, Baseline, BaselineEpisode, Outcome
from mujica_jax.agents.single import information
from mujica_jax.config.agents import ReactConfig
from mujica_jax.models.thoughts import outside_thoughts
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason

_PROMPT = (
    "You answer questions by turns of thought and action. Each turn is two lines:\n"
    "Thought: what is known and what is missing\n"
    "Action: Search[a query], or Finish[the final answer, as short as possible]\n"
    "After a search you receive an observation."
)
_OBSERVATION = "Observation:"
# It includes the line break, because a thought may contain the word itself.
_OBSERVATION_LINE = f"\n{_OBSERVATION}"
# The content may contain brackets, as in "Finish[Amber Tide [film]]".
_ACTION = re.compile(
    r"Action[\s*_]*\d*[\s*_]*:\W*(?P<verb>Search|Finish)\s*"
    r"\[(?P<content>(?:[^\[\]]|\[[^\[\]]*\])*)\]",
    re.IGNORECASE,
)
_LINE_BEGINS = re.compile(r"(?:^|\n)\W*\Z")


class React(Baseline):
    """An agent that alternates thoughts and actions in one conversation until it finishes."""

    system_prompt = _PROMPT

    def __init__(self, tokenizer: Tokenizer, config: ReactConfig) -> None:
        super().__init__(tokenizer, config)
        self._max_searches = config.max_searches

    async def play(self, episode: BaselineEpisode) -> Outcome:
        """Play one episode to its end. Raises RetrievalError."""
        with episode.conversation(ANSWERS, _PROMPT, message=episode.message()) as dialogue:
            for turn in range(self._max_searches + 1):
                written = await episode.write_turn(
                    dialogue, (_OBSERVATION_LINE,), cut_at=_OBSERVATION_LINE
                )
                if written.cut is not None:
                    return "", written.cut

                action = _first_action(written.text)
                if action is None:
                    return "", StopReason.NO_ACTION
                verb = action["verb"].casefold()
                content = protocol.one_line(action["content"])
                if not content:
                    return "", StopReason.NO_ACTION
                if verb == "finish":
                    return content, StopReason.ANSWERED

                # The last turn can only finish. A search that it asks for is not made.
                if turn < self._max_searches:
                    passages = await episode.search_passages(content, turn)
                    dialogue.add_user(f"{_OBSERVATION} {information(passages)}")
        return "", StopReason.ITERATION_LIMIT


def _first_action(text: str) -> re.Match[str] | None:
    """Return the first action outside of thoughts that is at the beginning of a line.

    If there is no such action, return the last action, because a line may contain a thought before
    the action. Return None if there is no action at all.
    """
    turn = outside_thoughts(text)
    actions = list(_ACTION.finditer(turn))
    for action in actions:
        if _LINE_BEGINS.search(turn[: action.start()]):
            return action
    return actions[-1] if actions else None
