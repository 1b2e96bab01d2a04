"""Every agent, played by a model that thinks: over an endpoint, and by an engine that stops while
it samples, under chat templates with and without an opened thought.
"""

import asyncio
from collections.abc import Sequence

import pytest

from mujica_jax.agents.agent import EnginePolicy, Policy
from mujica_jax.config.methods import RemoteConfig
from mujica_jax.config.named_objects import implementation
from mujica_jax.config.schema import MujicaConfig
from mujica_jax.inference.remote.generator import RemoteGenerator
from mujica_jax.inference.requests import Completion, SamplingParams, StopMatcher
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason, Trajectory
from tests.agents.test_baselines import GHENT, KINDS, QUESTION, config, world
from tests.helpers.little_agent import attempt, tokenizer
from tests.helpers.local_endpoint import Answer, serving
from tests.helpers.patience import HANG_SECONDS
from tests.models.test_thinking_templates import TOKENIZERS

MUJICA = MujicaConfig(
    prompt="zero_shot",
    max_iterations=3,
    max_searches_per_turn=3,
    max_turn_tokens=500,
    max_observation_tokens=500,
    max_trajectory_tokens=5000,
)
# Thoughts that name what would end a turn outside of them.
THOUGHTS = [
    "<think> I must put it between <answer> and </answer>. She was born in Ghent. </think>\n",
    "<think> If <information> comes I read it, but I know this. </think>\n",
    "<think> I could write <search> birthplace </search> but I know it. </think>\n",
    "<think> Obs: would follow a search, but I know it. </think>\n",
    "<think> I begin with <think> and end with </sentence> or </action>. </think>\n",
    "<think> <question> Where? </question> <recall> Ghent </recall>\nObservation: none </think>\n",
]
ANSWERING = [kind for kind in KINDS if kind not in ("iter_retgen", "skr")]


def final_turn(kind: str) -> str:
    if kind == "react":
        return "Thought: as passage [0]\nAction: Finish [Ghent]"
    if kind == "single":
        return f"<reflect> Ghent. </reflect>\n{GHENT}"
    return GHENT


def play(kind: str, policy: Policy, words: Tokenizer) -> Trajectory:
    chosen = MUJICA if kind == "mujica" else config(kind)
    agent = implementation(chosen)(words, chosen)
    playing = agent.run(attempt(QUESTION), world(), policy)
    return asyncio.run(asyncio.wait_for(playing, HANG_SECONDS))


@pytest.mark.parametrize("kind", ["direct", "react", "single", "decex", "mujica"])
@pytest.mark.parametrize(
    "thought", [*THOUGHTS, "the template opened it: <answer> Rome </answer> </think>\n"]
)
def test_a_thought_of_an_endpoint_s_model_ends_no_turn(kind, thought):
    message = {"role": "assistant", "content": thought + final_turn(kind)}
    reply = {"choices": [{"message": message, "finish_reason": "stop"}]}
    with serving(lambda request, before: Answer(content=reply)) as endpoint:
        remote = RemoteConfig(base_url=endpoint.base_url, model="m", mode="chat")
        trajectory = play(kind, EnginePolicy(RemoteGenerator(remote, tokenizer())), tokenizer())
    assert (trajectory.answer, trajectory.stop_reason) == ("Ghent", StopReason.ANSWERED)
    assert all("stop" not in request.body for request in endpoint.requests)
    assert trajectory.conversations[0].turns[1].text.startswith(thought), (
        "the thought is recorded whole"
    )


class Sampling:
    """A policy that samples these turns token by token, as an engine does.

    A stop string ends a turn with the token that completes it.
    """

    version = 0

    def __init__(self, words: Tokenizer, turns: Sequence[str]) -> None:
        self._words = words
        self._turns = list(turns)
        self.prompts: list[tuple[int, ...]] = []

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        self.prompts.append(tuple(prompt))
        matcher = StopMatcher(params.stop_strings, thought_open=params.thought_open)
        sampled: list[int] = []
        stop = None
        for token in self._words.encode_turn(self._turns.pop(0)):
            sampled.append(token)
            stop = matcher.push(self._words.token_bytes(token))
            if stop is not None:
                break
        if stop is None:
            sampled.append(self._words.end_of_turn_id)
        return Completion(
            token_ids=tuple(sampled),
            logprobs=(-0.1,) * len(sampled),
            finish_reason="stop" if stop is None else "stop_string",
            stop_string=stop,
        )


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", [*ANSWERING, "mujica"])
def test_a_thought_ends_no_turn_that_an_engine_samples(kind, name):
    words = TOKENIZERS[name]
    for thought in THOUGHTS:
        trajectory = play(kind, Sampling(words, [thought + final_turn(kind)]), words)
        assert (trajectory.answer, trajectory.stop_reason) == ("Ghent", StopReason.ANSWERED)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_conversation_with_searches_is_one_run_of_tokens_under_every_template(name):
    """Each prompt begins with the one before it and the tokens sampled after that."""
    words = TOKENIZERS[name]
    searching = "<think> I write </search> later. </think>\n<search> Amber Tide director </search>"
    thought = "<think> I know. </think>\n" if words.opened_thought else ""
    policy = Sampling(words, [searching, f"{thought}<reflect> Ghent. </reflect>\n{GHENT}"])
    trajectory = play("single", policy, words)
    assert (trajectory.answer, trajectory.counts["malformed_shape"]) == ("Ghent", 0.0)
    (conversation,) = trajectory.conversations
    first, second = policy.prompts
    sampled = conversation.turns[1].token_ids
    assert second[: len(first) + len(sampled)] == (*first, *sampled)
    assert conversation.token_ids == [*second, *conversation.turns[3].token_ids]
    assert [turn.trained for turn in conversation.turns] == [False, True, False, True]
    assert words.decode(sampled).endswith("</search>"), (
        "the stop string ended the turn behind the thought"
    )


@pytest.mark.parametrize(
    "name", [name for name, words in TOKENIZERS.items() if words.opened_thought]
)
def test_an_opened_thought_that_never_ends_holds_no_action(name):
    """The turn is sampled as it stands here and not moved into the opened thought."""
    words = TOKENIZERS[name]

    class Endless(Sampling):
        async def generate(self, prompt, params, *, state, continues):
            ids = (
                *words.encode_model("I could write <answer> Ghent </answer> now"),
                words.end_of_turn_id,
            )
            return Completion(token_ids=ids, logprobs=None, finish_reason="stop")

    for kind in ("direct", "mujica", "single"):
        trajectory = play(kind, Endless(words, []), words)
        assert (trajectory.answer, trajectory.stop_reason) == ("", StopReason.NO_ACTION)
