"""The few-shot warm-up through a whole run, with a script in the place of a model that follows
prompts.

The script writes a turn if, and only if, the prompt shows the worked examples as chat turns. Any
other prompt goes to the engine with the model that is trained, as in every run.
"""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, EnginePolicy
from mujica_jax.agents.mujica import Mujica, PlannerState
from mujica_jax.commands import train
from mujica_jax.config.command_line import command_line
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.demonstrations.policy import ScriptedPolicy
from mujica_jax.methods import supervised
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import save_checkpoint
from mujica_jax.records import Conversation, Trajectory
from mujica_jax.runs import setup
from mujica_jax.runs.setup import build_task
from mujica_jax.trajectories.store import Store
from tests.helpers.paths import HELPERS
from tests.helpers.tiny_models import filled_decoder

SMOKE = str(HELPERS / "smoke_config.py")
WANTED = 12
SHARD = 16
CONTEXT_TOKENS = 1600
FLAGS = f"""
    --agent.prompt zero_shot --agent.max-trajectory-tokens {CONTEXT_TOKENS} --agent.max-observation-tokens 300
    --agent.max-turn-tokens 200 --engine.max-num-seqs 8 --pretraining.steps 0 --warmup.source
    few_shot --warmup.steps 1 --warmup.few-shot-trajectories {WANTED} --warmup.few-shot-attempts 2
    --trainer.sequence-length 1024 --trainer.batch-size 1 --sampling.questions-per-round 4
    --sampling.questions-per-shard {SHARD} --method.rounds 1 --method.max-attempts 1
    --eval.questions 2 --eval.no-control --warmup.pretraining-share 0.0
""".split()


def shows_examples(tokenizer: Tokenizer, prompt, role: protocol.Role) -> bool:
    expected = protocol.opening(role, "graph", "few_shot")
    messages = [(message["role"], message["content"]) for message in tokenizer.messages(prompt)]
    pairs = [
        pair
        for message, reply in expected.examples
        for pair in (("user", message), ("assistant", reply))
    ]
    return messages[: 1 + len(pairs)] == [("system", expected.system), *pairs]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A chat checkpoint with fresh weights, whose tokenizer knows the words of the world and of the
    prompts.
    """
    config = load_config(SMOKE)
    texts = list(build_task(config).tokenizer_text())
    for role in ("planner", "worker"):
        opening = protocol.opening(role, "graph", "few_shot")
        texts += [opening.system, *(text for exchange in opening.examples for text in exchange)]
    tokenizer = Tokenizer.train(texts, 4000)
    size = setup.decoder_config(config, tokenizer.vocab_size, tokenizer.stop_token_ids)
    size = dataclasses.replace(size, max_position_embeddings=CONTEXT_TOKENS)
    save_checkpoint(filled_decoder(size), tmp_path / "checkpoint", tokenizer=tokenizer)
    return tmp_path / "checkpoint"


class PromptedModel:
    """Stands in for `EnginePolicy.generate`.

    Where the examples are shown the script writes, and everywhere else the engine.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._script = ScriptedPolicy(tokenizer, miss_rate=0.3, seed=5)
        self._engine = EnginePolicy.generate
        self.prompted = 0
        self.unprompted = 0

    async def generate(self, policy: EnginePolicy, prompt, params, *, state, continues):
        role = "planner" if isinstance(state, PlannerState) else "worker"
        if shows_examples(self._tokenizer, prompt, role):
            self.prompted += 1
            return await self._script.generate(prompt, params, state=state, continues=continues)
        self.unprompted += 1
        return await self._engine(policy, prompt, params, state=state, continues=continues)


def zero_shot_plays(
    config: Config, tokenizer: Tokenizer, question_ids: list[str]
) -> list[Conversation]:
    """Return the script's plays under the prompt that is trained."""
    task = build_task(config)
    agent = Mujica(tokenizer, config.agent)
    script = ScriptedPolicy(tokenizer, miss_rate=0.3, seed=5)
    questions = {question.id: question for question in task.questions("train")}
    rows = []
    for question_id in question_ids:
        question = questions[question_id]
        attempt = Attempt(question=question, number=0, seed=0, temperature=1.0)
        played = asyncio.run(agent.run(attempt, task.environment(question), script))
        rows += played.conversations
    return rows


def test_few_shot_samples_are_filtered_stripped_and_learnt_and_a_round_follows(
    checkpoint, tmp_path, monkeypatch
):
    tokenizer = Tokenizer.load(checkpoint)
    model = PromptedModel(tokenizer)

    async def generate(policy, prompt, params, *, state, continues):
        return await model.generate(policy, prompt, params, state=state, continues=continues)

    learnt: list[list[Conversation]] = []
    pack = supervised.pack

    def recorded(rows, **options):
        learnt.append(list(rows))
        return pack(rows, **options)

    monkeypatch.setattr(EnginePolicy, "generate", generate)
    monkeypatch.setattr(supervised, "pack", recorded)
    monkeypatch.setattr(setup, "use_compilation_cache", lambda: None)
    run = tmp_path / "run"
    assert train.main([SMOKE, "--run", str(run), "--init", str(checkpoint), *FLAGS]) == 0

    # Sampled under the examples, and some of it wrong, because the script misses facts.
    store = Store(run)
    sampled: list[Trajectory] = []
    while entry := store.find_shard(0, len(sampled) // SHARD):
        sampled += store.read_shard(entry)
    wrong = [trajectory for trajectory in sampled if trajectory.reward < 1.0]
    assert len(sampled) > WANTED
    assert 0 < len(wrong) < len(sampled) - WANTED
    assert model.prompted >= len(sampled)
    for trajectory in sampled:
        for conversation in trajectory.conversations:
            assert shows_examples(tokenizer, conversation.turns[0].token_ids, conversation.role)

    # Learnt: the first right ones, without their examples, exactly as they are played zero-shot.
    accepted = [trajectory for trajectory in sampled if trajectory.reward == 1.0][:WANTED]
    config = command_line([SMOKE, *FLAGS], default="tiny_world")
    expected = zero_shot_plays(
        config, tokenizer, [trajectory.question_id for trajectory in accepted]
    )
    (rows,) = learnt
    assert [(row.role, row.token_ids, row.loss_mask) for row in rows] == [
        (row.role, row.token_ids, row.loss_mask) for row in expected
    ]
    assert not any(shows_examples(tokenizer, row.turns[0].token_ids, row.role) for row in rows)

    # A round of MyGO follows, with the model that was trained and without examples.
    phases = json.loads((run / "summary.json").read_text())["phases"]
    assert [phase["name"] for phase in phases] == ["warm-up", "round 1"]
    assert phases[0]["trajectories"] == len(sampled)
    assert phases[0]["accepted"] == WANTED
    assert phases[1]["trajectories"] == 4
    assert model.unprompted > 0
    assert store.policies() == [0, 1]
