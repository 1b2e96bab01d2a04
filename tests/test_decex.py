"""DecEx-RAG's trees, over a policy whose turns stand in a table and whose rewards follow by hand; what is kept of them,
what is learnt, and that DPO moves towards what was chosen."""

import asyncio
import collections
import dataclasses
import io
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from little_agent import LittleWorld, attempt, completion, rewarded, tokenizer
from packed_rows import MODEL as TINY
from packed_rows import TRAINER as SHORT
from packed_rows import tiny_decoder
from test_config import SMOKE, RecordedRun, assert_each_changes, changed

from mujica_jax import train
from mujica_jax.agents.decex import Decex, DecexState
from mujica_jax.config.agents import DecexConfig
from mujica_jax.config.checks import check
from mujica_jax.config.files import load_config
from mujica_jax.config.methods import DecexTreeConfig
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.learning.losses.preference import DPO
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.trainer import Trainer, fit
from mujica_jax.methods import decex, run
from mujica_jax.methods.search_tree import Growth, Tree
from mujica_jax.methods.tree_records import best_chain, encode_nodes, figures, is_pair, records_of
from mujica_jax.records import Question, StopReason
from mujica_jax.tasks.task import Material
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.packing import pack

QUESTION = Question(id="q-1", text="What is it?", answers=("gold",))
AGENT = DecexConfig(
    prompt="brief", max_iterations=2, max_turn_tokens=200, max_trajectory_tokens=2000, max_observation_tokens=300
)
METHOD = DecexTreeConfig(branches=3, rollouts=2, learning_rate=1.0, end_learning_rate=0.0, epochs=1)
GOLD, WRONG = "<answer> gold </answer>", "<answer> wrong </answer>"


def ask(text: str) -> str:
    return f"<think> a </think> <question> {text} </question>"


class Table:
    """Writes the turns of a state in their order, around again when they are used up. A state is named by what was
    remembered or [found], then the sub-question to solve, then how its turn begins: "m1>[q1]>b?<search>"."""

    version = 0

    def __init__(self, turns: Mapping[str, Sequence[str]]) -> None:
        self._turns = turns
        self.asked: collections.Counter[str] = collections.Counter()

    async def generate(self, prompt, params, *, state, continues):
        assert isinstance(state, DecexState)
        await asyncio.sleep(0)
        steps = [step.recalled or f"[{step.materials[0].text}]" for step in state.steps]
        name = ">".join([*steps, *([f"{state.asked}?"] if state.asked else [])])
        begun = next((tag for tag in ("<recall>", "<search>") if tokenizer().decode(prompt).endswith(tag)), "")
        turns, place = self._turns[f"{name}{begun}"], self.asked[f"{name}{begun}"]
        self.asked[f"{name}{begun}"] += 1
        return completion(turns[place % len(turns)])


class Echo(LittleWorld):
    """A search finds its own query."""

    async def search(self, query, entity):
        await super().search(query, entity)
        return (Material(text=query),)


def grow(policy: Any, *, iterations: int = 2, world: LittleWorld | None = None, **changes) -> Tree:
    agent = Decex(tokenizer(), dataclasses.replace(AGENT, max_iterations=iterations))

    async def growing() -> Tree:
        growth = Growth(
            agent,
            attempt(QUESTION),
            world or Echo(kind="text"),
            policy,
            dataclasses.replace(METHOD, **changes),
            reward=lambda trajectory: rewarded(trajectory, QUESTION),
            gate=asyncio.Semaphore(4),
        )
        return await growth.grow()

    return asyncio.run(asyncio.wait_for(growing(), 20))


def pairs_of(tree: Tree) -> list[tuple]:
    """Kind, the last turns of chosen and rejected without their tags, and the two means."""

    def last(conversation) -> str:
        return re.findall(r"> ([^<>]+) </", conversation.turns[-1].text)[-1]

    return [(pair.kind, last(pair.chosen), last(pair.rejected), pair.means) for pair in tree.pairs]


# Sub-question a is worth 1/2 and b nothing; from memory m1 is worth nothing and m2 1/2; q1 is worth 1 and q2 nothing.
TURNS = {
    "": [ask("a"), ask("b"), ask("A")],
    "a?": ["<recall> ra </recall>"],
    "b?": ["<recall> rb </recall>"],
    "ra": [GOLD, WRONG],
    "rb": [WRONG],
    "a?<recall>": [" m1 </recall>", " m2 </recall>", " M1 </recall>"],
    "m1": [WRONG],
    "m2": [GOLD, WRONG],
    "a?<search>": [" q1 </search>", " q2 </search>", " q2 </search>"],
    "[q1]": [GOLD],
    "[q2]": [WRONG],
}


def test_a_pruned_tree_by_hand():
    table = Table(TURNS)
    tree = grow(table)
    assert tree.counts == {
        "nodes": 7,  # a, b, m1, m2, q1, q2, and the answer
        "rollouts": 12,  # two each of the six that are no answer
        "duplicates": 5,  # A, M1, q2, two answers
        "malformed": 0,
        "pruned_branches": 4,  # b, m1, m2, q2
        "skipped_searches": 0,
        "budget_spent": 0,
        "generated_tokens": tree.counts["generated_tokens"],
        "forward_tokens": tree.counts["forward_tokens"],
    }
    assert pairs_of(tree) == [
        ("execution", "a", "b", (0.5, 0.0)),
        ("execution", "m2", "m1", (0.5, 0.0)),
        ("execution", "q1", "q2", (1.0, 0.0)),
        ("decision", "q1", "m2", (1.0, 0.5)),
    ]
    assert tree.leaves == 1 and len(tree.finished) == 13
    leaf = tree.finished[0]
    assert (leaf.reward, [search.query for search in leaf.searches]) == (1.0, ["q1"])
    assert [trajectory.reward for trajectory in tree.finished[1:]] == [1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0]
    rows = pyarrow.parquet.read_table(io.BytesIO(encode_nodes([tree]))).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("q-1", 0, None, "sub-question", "a", [1.0, 0.0]),
        ("q-1", 1, None, "sub-question", "b", [0.0, 0.0]),
        ("q-1", 2, 0, "memory", "m1", [0.0, 0.0]),
        ("q-1", 3, 0, "memory", "m2", [1.0, 0.0]),
        ("q-1", 4, 0, "search", "q1", [1.0, 1.0]),
        ("q-1", 5, 0, "search", "q2", [0.0, 0.0]),
        ("q-1", 6, 4, "answer", "gold", [1.0]),
    ]
    # Decisions: 3 samples and what was played; executions 3 each; the last state's 3 votes after 2 episodes.
    assert table.asked[""] == 3 and table.asked["a?"] == 2 and table.asked["a?<recall>"] == 3
    assert table.asked["[q1]"] == 2 + 3


def test_tokens_are_counted_once():
    """A tree of one branch and one episode a node: what the model wrote, and the conversation with its offshoots."""
    turns = TURNS | {"": [ask("a")], "ra": [WRONG], "m1": [GOLD]}
    tree = grow(Table(turns), branches=1, rollouts=1, skip_above=0.6)
    leaf, of_question, of_memory = tree.finished
    written = [turn for one in tree.finished for turn in one.conversations[0].turns if turn.role == "model"]
    twice = 2 * len(leaf.conversations[0].turns[1].token_ids)  # the sub-question stands in all three
    begun = len(tokenizer().encode_model("<recall>"))
    second = len(leaf.conversations[0].turns[3].token_ids)  # the recalled answer in two of them
    expected = sum(len(turn.token_ids) for turn in written) - twice - second - begun
    assert tree.counts["generated_tokens"] == expected
    lengths = [len(one.conversations[0].token_ids) for one in (leaf, of_question, of_memory)]
    opening = len(leaf.conversations[0].turns[0].token_ids)
    to_question = sum(len(turn.token_ids) for turn in leaf.conversations[0].turns[:3])
    to_memory = sum(len(turn.token_ids) for turn in leaf.conversations[0].turns[:5])
    forward = lengths[0] - opening + lengths[1] - to_question + lengths[2] - to_memory
    assert tree.counts["forward_tokens"] == forward


@pytest.mark.parametrize(("right", "skipped"), [(2, 0), (3, 0), (4, 1)])
def test_searches_are_skipped_above_six_tenths_and_not_at_it(right, skipped):
    turns = TURNS | {"m1": [*[GOLD] * right, *[WRONG] * (5 - right)], "m2": [WRONG], "ra": [GOLD]}
    world = Echo(kind="text")
    tree = grow(Table(turns), rollouts=5, world=world)
    assert tree.counts["skipped_searches"] == skipped
    assert bool(world.searched) != bool(skipped)
    assert ("decision", "q1", "m1", (1.0, right / 5)) in pairs_of(tree) or skipped
    best, is_leaf = best_chain(tree, "most")
    assert len(best.searches) == (0 if skipped else 1) and is_leaf is True
    assert ("execution", "m1", "m2", (right / 5, 0.0)) in pairs_of(tree)


def test_a_better_memory_at_the_threshold_is_chosen_in_the_pair_and_not_in_the_chain():
    turns = TURNS | {"m1": [GOLD, WRONG], "m2": [WRONG], "[q1]": [WRONG]}
    tree = grow(Table(turns))
    assert ("decision", "m1", "q1", (0.5, 0.0)) in pairs_of(tree)
    assert [search.query for search in tree.finished[0].searches] == ["q1"]


@pytest.mark.parametrize(("stopping", "ends"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_tree_ends_where_more_than_half_of_the_turns_stop(stopping, ends):
    turns = TURNS | {"": [*[GOLD] * (stopping - 1), WRONG, *[ask("b")] * (4 - stopping)], "rb": [WRONG]}
    turns |= {f"b?<{kind}>": [f" x </{kind}>"] for kind in ("recall", "search")} | {"x": [WRONG], "[x]": [WRONG]}
    tree = grow(Table(turns), branches=4)
    assert (tree.counts["rollouts"] == 0) == ends
    decision = ("decision", "gold", "b", (1.0, 0.0))
    assert (decision in pairs_of(tree)) == (not ends and stopping > 1)
    if ends:
        assert sorted(one.answer for one in tree.finished) == ["gold", "wrong"] and tree.leaves == 2
        assert pairs_of(tree) == [("execution", "gold", "wrong", (1.0, 0.0))]


def test_a_turn_that_cannot_be_read_votes_for_nothing_and_is_no_branch():
    turns = TURNS | {"": [GOLD, "no tag", ask("b")], "rb": [GOLD]}
    turns |= {f"b?<{kind}>": [" not closed", f" x </{kind}>"] for kind in ("recall", "search")}
    tree = grow(Table(turns | {"x": [WRONG], "[x]": [GOLD]}))
    assert tree.counts["malformed"] == 1 + 2 + 2 and tree.counts["rollouts"] == 6
    empty = grow(Table({"": ["no tag"]}))
    assert not empty.finished and empty.counts["malformed"] == 3
    assert empty.unfinished.stop_reason is StopReason.NO_ACTION


def test_a_search_that_fails_is_no_branch():
    tree = grow(Table(TURNS), world=Echo(kind="text", failing=frozenset({"q1", "q2"})))
    assert tree.counts["malformed"] == 3
    assert [search for search in tree.finished[0].searches] == [], "the best of memory is what is left"


# Every layer has two sub-questions, two answers from memory and two sub-queries, and ends with one wrong answer.
class Wide(Table):
    def __init__(self) -> None:
        super().__init__({})

    async def generate(self, prompt, params, *, state, continues):
        await asyncio.sleep(0)
        if state.asked is None:
            return completion(WRONG if len(state.steps) == 2 else ask(f"q{self._next('ask', state)}"))
        begun = next((tag for tag in ("recall", "search") if tokenizer().decode(prompt).endswith(f"<{tag}>")), "")
        if not begun:
            return completion("<recall> r </recall>")
        return completion(f" {begun}{self._next(begun, state)} </{begun}>")

    def _next(self, what: str, state: DecexState) -> int:
        key = f"{what}{state.steps}{state.asked}"
        self.asked[key] += 1
        return self.asked[key] % 2


def test_layers_grow_linearly_and_by_two_and_by_all_executions():
    """k = 2 and T = 2. A pruned layer has 2 + 2 + 2 nodes and is followed by one state; an unpruned one by 2; in a full
    one each sub-question has 4 executions, so 2 + 8 nodes are followed by 8 states."""
    counts = {name: grow(Wide(), branches=2, expansion=name).counts for name in ("pruned", "unpruned", "full")}
    assert counts["pruned"]["nodes"] == 6 + 6 + 1 and counts["pruned"]["rollouts"] == 2 * 12
    assert counts["unpruned"]["nodes"] == 6 + 2 * 6 + 4 and counts["unpruned"]["rollouts"] == 2 * 18
    assert counts["full"]["nodes"] == 10 + 8 * 10 + 64 and counts["full"]["rollouts"] == 0


def test_an_unpruned_tree_keeps_both_branches_of_each_decision():
    tree = grow(Table(TURNS), expansion="unpruned")
    assert tree.leaves == 3, "gold and wrong after m2, gold after q1"
    assert [[search.query for search in leaf.searches] for leaf in tree.finished[:3]] == [["q1"], [], []]
    assert ("execution", "gold", "wrong", (1.0, 0.0)) in pairs_of(tree), "after m2"


def test_a_full_tree_scores_by_the_answers_beneath():
    turns = TURNS | {"": [ask("a")], "m1": [GOLD], "m2": [WRONG], "[q1]": [GOLD, WRONG], "[q2]": [WRONG]}
    tree = grow(Table(turns), branches=2, expansion="full")
    assert tree.counts["rollouts"] == 0 and tree.leaves == len(tree.finished) == 5
    assert pairs_of(tree) == [
        ("execution", "m1", "m2", (1.0, 0.0)),
        ("execution", "q1", "q2", (0.5, 0.0)),
        ("execution", "gold", "wrong", (1.0, 0.0)),  # after q1
        ("decision", "m1", "q1", (1.0, 0.5)),
    ]


def test_a_spent_budget_keeps_what_was_made():
    whole = grow(Wide(), branches=2, expansion="full")
    part = grow(Wide(), branches=2, expansion="full", budget_tokens=600)
    assert part.counts["budget_spent"] == 1 and whole.counts["budget_spent"] == 0
    assert 0 < part.leaves < whole.leaves
    assert 600 <= part.counts["generated_tokens"] < whole.counts["generated_tokens"]
    none = grow(Wide(), branches=2, expansion="full", budget_tokens=1)
    assert not none.finished and none.counts["nodes"] == 10, "the first layer was begun"
    (record,) = records_of(none, "most", 1.0)
    assert (record.stop_reason, record.reward) == (StopReason.ITERATION_LIMIT, 0.0)
    assert figures([record])["unfinished"] == figures([record])["budget_spent"] == 1


# What is kept and learnt


def test_the_chain_has_the_best_reward_and_then_most_or_least_searches():
    tree = grow(Table(TURNS))
    most, least = best_chain(tree, "most"), best_chain(tree, "least")
    assert ([search.query for search in most[0].searches], most[1]) == (["q1"], True)
    assert (most[0].reward, least[0].reward, len(least[0].searches), least[1]) == (1.0, 1.0, 0, False)


def test_records_survive_a_shard_and_say_what_the_tree_was():
    tree = grow(Table(TURNS))
    records = shards.decode(shards.encode(records_of(tree, "most", 2.0)), "here")
    assert [is_pair(record) for record in records] == [False, True, True, True, True]
    assert len({record.attempt for record in records}) == 5
    for record, pair in zip(records[1:], tree.pairs, strict=True):
        assert record.conversations == (pair.chosen, pair.rejected)
        for side in record.conversations:
            assert [turn.trained for turn in side.turns] == [False] * (len(side.turns) - 1) + [True]
        assert record.conversations[0].turns[:-1] == record.conversations[1].turns[:-1] or pair.kind == "decision"
    found = figures(records)
    assert (found["questions"], found["seconds"], found["nodes"], found["best_reward"]) == (1, 2.0, 7, 1.0)
    assert (found["decision_pairs"], found["execution_pairs"], found["retrievals"]) == (1, 3, 1)


def test_dpo_moves_towards_what_was_chosen():
    sides = [side for pair in grow(Table(TURNS)).pairs for side in (pair.chosen, pair.rejected)]
    model = dataclasses.replace(TINY, vocab_size=tokenizer().vocab_size, max_position_embeddings=1024)
    config = dataclasses.replace(SHORT, row_tokens=512, rows_per_step=2)
    trainer = Trainer(model, config, DPO(beta=0.1))
    state = trainer.initial_state(tiny_decoder(model))
    packed = pack(sides, row_tokens=512, seed=0, pairs=True)
    reference = trainer.score(state, packed)
    rows, seen = packed.with_columns(reference_log_probs=reference), []
    rates = schedule(peak=3e-3, end_value=3e-3, total_steps=8)
    state = fit(trainer, state, rows, schedule=rates, steps=8, seed=0, on_step=seen.append).state
    assert seen[0].loss == pytest.approx(math.log(2), abs=1e-5) and seen[-1].loss < 0.6
    gains = np.where(packed.loss_mask, trainer.score(state, packed) - reference, 0.0)
    signs = np.sign(packed.columns["pairs"])
    assert (gains * signs).sum() > 1.0, "chosen turns gained on rejected ones"


# The method


class Dice:
    """A generator that reads the end of its prompt and writes what its seed says."""

    policy_version = 0

    async def generate(self, prompt, params, *, continues):
        await asyncio.sleep(0)
        text, die = tokenizer_of_run(prompt), params.seed + round(1000 * params.temperature)
        if text.endswith("<recall>") or text.endswith("<search>"):
            tag = text[-7:-1]
            said = f" {'gold' if die % 2 else die % 3} </{tag}>"
        elif "Recall or search?" in text[-60:]:
            said = "<search> x </search>" if die % 2 else f"<recall> {die % 3} </recall>"
        else:
            said = GOLD if die % 3 == 0 else WRONG if die % 3 == 1 else ask(f"q{die % 2}")
        ids = (*Dice.tokenizer.encode_model(said), Dice.tokenizer.end_of_turn_id)
        return completion_of(ids[: params.max_new_tokens], len(ids) <= params.max_new_tokens)

    tokenizer: Any = None

    def release_weights(self) -> None: ...
    def reset_cache(self) -> None: ...


def tokenizer_of_run(prompt: Sequence[int]) -> str:
    return Dice.tokenizer.decode(list(prompt))


def completion_of(ids: tuple[int, ...], whole: bool):
    like = completion("x")
    logprobs = tuple(-0.5 for _ in ids)
    reason = "stop" if whole else "length"
    return dataclasses.replace(like, token_ids=ids, logprobs=logprobs, finish_reason=reason)


class TreeRun(RecordedRun):
    def __init__(self, config: Config, root) -> None:
        super().__init__(config, root)
        Dice.tokenizer = self.tokenizer
        gold = [dataclasses.replace(question, answers=("gold",)) for question in self.task.questions("train")]
        world = Echo(kind="text")
        self.task: Any = types.SimpleNamespace(
            questions=lambda split: gold, environment=lambda question: world, rule=self.task.rule
        )
        self.generator = Dice()
        self.trainer = types.SimpleNamespace(score=lambda state, packed: np.zeros(packed.tokens.shape, np.float32))

    def stored(self, number: int, shard: int, play) -> tuple:
        entry, found = run.Run.stored(self, number, shard, play)  # pyright: ignore[reportArgumentType]
        self.asked.append((number, shard, shards.content_sha256(found)))
        return entry, found

    def intact_shard(self, number: int, shard: int):
        return self.store.find_shard(number, shard)

    def read_shards(self, entries: Any):
        return [record for entry in entries for record in self.store.read_shard(entry)]


@pytest.fixture
def played(tmp_path):
    """What a run would be asked for under a configuration."""
    numbers = iter(range(1000))

    def play(config: Config) -> list:
        own: Any = TreeRun(config, tmp_path / str(next(numbers)))
        own.asked.append([result.row.name for result in decex.decex(own)])
        return [str(one) for one in own.asked if "seconds" not in str(one)] + [
            str({name: value for name, value in one[2].items() if name != "seconds"})
            for one in own.asked
            if one[0] == "decex"
        ]

    return play


@pytest.fixture(scope="module")
def config() -> Config:
    smoke = load_config(str(SMOKE))
    return dataclasses.replace(
        smoke,
        task=dataclasses.replace(smoke.task, environment="text"),
        agent=dataclasses.replace(AGENT, max_iterations=2),
        trainer=dataclasses.replace(smoke.trainer, row_tokens=1024, rows_per_step=2),
        pretraining=dataclasses.replace(smoke.pretraining, steps=0),
        warmup=dataclasses.replace(smoke.warmup, steps=0),
        sampling=dataclasses.replace(smoke.sampling, questions_per_round=6, shard_questions=4),
        method=dataclasses.replace(METHOD, epochs=2),
        eval=dataclasses.replace(smoke.eval, control=False),
    )


def test_every_field_of_the_method_changes_what_a_run_does(config, played):
    values = {
        "branches": 2,
        "rollouts": 3,
        "skip_above": 0.0,
        "expansion": "unpruned",
        "budget_tokens": 100,
        "sft": False,
        "retrievals": "least",
        "min_reward": 0.0,
        "learning_rate": 0.5,
        "end_learning_rate": 0.1,
        "epochs": 4,
        "dpo": False,
        "decision_pairs": False,
        "execution_pairs": False,
        "beta": 0.2,
        "dpo_learning_rate": 1e-3,
        "dpo_epochs": 2,
    }
    assert set(values) | {"kind"} == {field.name for field in dataclasses.fields(DecexTreeConfig)}
    high = changed(config, "method", min_reward=1.0)
    assert_each_changes(high, "method", values | {"min_reward": 2.0}, lambda c: refused_or(played, c))
    assert_each_changes(config, "sampling", {"questions_per_round": 2, "temperature": 0.5}, played)
    assert_each_changes(config, "agent", {"max_iterations": 1}, played)


def refused_or(play, config: Config) -> list:
    try:
        return play(config)
    except UserError as error:
        return [str(error)]


def test_the_phases_are_those_that_are_asked_for(config, played):
    def rows(**fields) -> str:
        return next(one for one in played(changed(config, "method", **fields)) if one.startswith("['warm-up'"))

    assert rows() == "['warm-up', 'sft', 'dpo']"
    assert rows(sft=False) == "['warm-up', 'dpo']"
    assert rows(dpo=False) == "['warm-up', 'sft']"


def test_where_no_pair_is_left_dpo_is_skipped_with_a_line(config, played):
    said = played(changed(config, "method", decision_pairs=False, execution_pairs=False))
    assert "['warm-up', 'sft']" in said and any("left no preference pair" in one for one in said)


@pytest.mark.parametrize("lost", [(), ("DONE.json", "shard-00001.parquet")])
def test_what_is_kept_is_not_grown_again_and_what_is_lost_is_grown_to_the_same(config, tmp_path, monkeypatch, lost):
    def learnt(own: Any) -> list:
        decex.decex(own)
        return [one for one in own.asked if one[0] in ("sft", "dpo")]

    first = learnt(TreeRun(config, tmp_path))
    nodes = [pyarrow.parquet.read_table(file).num_rows for file in sorted((tmp_path / "trees").iterdir())]
    entries = [
        shards.decode(file.read_bytes(), file.name) for file in sorted((tmp_path / "rounds/0001").glob("*.parquet"))
    ]
    assert nodes == [sum(record.counts["nodes"] for record in kept if not is_pair(record)) for kept in entries]
    for name in lost:
        (tmp_path / "rounds" / "0001" / name).unlink()
    asked: list[str] = []
    generate = Dice.generate

    async def heard(self, prompt, params, *, continues):
        asked.append(tokenizer_of_run(prompt))
        return await generate(self, prompt, params, continues=continues)

    monkeypatch.setattr(Dice, "generate", heard)
    again: Any = TreeRun(config, tmp_path)
    again.trainer = None  # the reference was scored
    assert learnt(again) == first and len(first) == 2
    texts = {question.text for question in again.task.questions("train")[:6]}
    seen = {text for text in texts if any(text in prompt for prompt in asked)}
    assert len(seen) == (2 if lost else 0), "the second shard has two of six questions"


def test_trees_that_spend_their_budget_before_a_chain_are_told_of(config, played):
    early = changed(config, "method", expansion="full", budget_tokens=1, sft=False)
    (said,) = (one for one in played(early) if "have no chain" in one)
    (of_others,) = (one for one in played(changed(early, "method", budget_tokens=300)) if "have no chain" in one)
    assert re.match(r"0 of 6 trees have no chain, [1-6] trees spent method\.budget_tokens", of_others)
    assert re.match(r"[1-6] of 6 trees have no chain, [1-6] trees spent method\.budget_tokens 1; what they made", said)


def test_trees_without_a_reward_are_answered_in_a_sentence(config, played, monkeypatch):
    monkeypatch.setattr(Dice, "generate", lambda self, *_, **__: asyncio.sleep(0, completion_of((1, 2), False)))
    with pytest.raises(UserError) as refused:
        played(config)
    assert str(refused.value) == (
        "the best chain of 6 trees earns 0.00 and method.min_reward is 0.5: raise method.branches 3 or warmup.steps 0, "
        "start from a stronger model, or lower method.min_reward"
    )


def test_the_control_needs_demonstrations(config):
    with pytest.raises(UserError, match=r"eval\.control is True and warmup\.steps 0"):
        check(changed(config, "eval", control=True))


def test_a_mistake_ends_the_program_with_status_two(capsys):
    assert train.main([str(SMOKE), "--method.kind", "decex"]) == 2
    assert capsys.readouterr().err == (
        "error: method.kind is decex, whose trees branch at decex's decisions, and agent.kind is mujica: add "
        "--agent.kind decex\n"
    )


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        ("agent", None, "agent.kind is mujica: add --agent.kind decex"),
        ("method", {"expansion": "full"}, "method.expansion is full, where each of 2 layers has 18 times the states"),
        ("method", {"sft": False, "dpo": False}, "nothing is learnt from the trees"),
        ("method", {"branches": 0}, "method.branches is 0 and must be at least 1"),
        ("method", {"beta": 0.0}, "method.beta is 0.0 and must be above 0"),
        ("method", {"dpo_learning_rate": -1.0}, "method.dpo_learning_rate is -1.0 and must be above 0"),
    ],
)
def test_a_configuration_that_cannot_be_is_explained(config, section, fields, words):
    mujica = dataclasses.replace(config, agent=load_config(str(SMOKE)).agent)
    with pytest.raises(UserError) as refused:
        check(mujica if fields is None else changed(config, section, **fields))
    assert words in str(refused.value)
