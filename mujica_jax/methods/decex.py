"""DecEx-RAG: a search tree for each question, maximum likelihood on the best chains, then DPO on
the executions and decisions that the trees scored (section 2.3 and appendix A.2 of the paper).

The phases: a warm-up, or the checkpoint as it is where `warmup.steps` is 0; `trees`, all of the
run's questions from that policy, a shard at a time; `sft`; `dpo`, whose reference is the policy
that it begins with. Each of the last two can be left out. `methods/search_tree.py` has the trees
and how we read them, `methods/tree_records.py` what is kept of them; a restart finds that, and the
log-probabilities of the reference, in the run directory.

The policy writes a tree alone, or a second model behind `method.remote` writes all of it but the
executions of retrieval decisions, as Qwen3-30B-A3B did in the paper for Qwen2.5-7B-Instruct
(section 3.2).

Differences from the paper, besides those of the tree and of the agent:

- SFT learns the path from root to leaf where a leaf has the tree's best reward, and one path where
  several have. Where no leaf has it, an episode that was played from a node and has it stands in. A
  chain is learnt if it earns `min_reward`; the paper does not say whether a wrong one is learnt.
- A chain is one row with all of its turns trained. The paper cuts it into pairs of input and output
  at the searches, which trains the same tokens given the same tokens before them.
- beta 0.1, the learning rate 5e-7 and one epoch of DPO are ours, and so are the learning rates and
  epochs of SFT: the paper published none.
"""

import asyncio
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mujica_jax.agents.agent import EnginePolicy, gather_polled
from mujica_jax.agents.decex import Decex
from mujica_jax.agents.decex_writer import TreeWriter
from mujica_jax.config.methods import DecexTreeConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.losses import preference
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.phases import WARM_UP, Phase, PhaseResult, PhaseState
from mujica_jax.methods.remote import Endpoint, open_endpoint
from mujica_jax.methods.rollouts import score_once
from mujica_jax.methods.rounds import (
    attempt,
    close_round,
    finished_round,
    method_of,
    questions_a_round,
    sampling,
)
from mujica_jax.methods.run import KEPT_SHARDS, Run
from mujica_jax.methods.search_tree import Growth, Tree
from mujica_jax.methods.shares import play_share
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.methods.tree_records import (
    best_chain,
    encode_nodes,
    figures,
    is_pair,
    pairs_by_preference,
    records_of,
)
from mujica_jax.records import Conversation, Question, Trajectory
from mujica_jax.trajectories.packing import pack
from mujica_jax.trajectories.store import ShardEntry

ROUND = 1  # of the run directory: the trees
SFT, DPO = Phase(name="sft", step=1), Phase(name="dpo", step=2)
REFERENCE = "phases/dpo-reference.npy"


def decex(run: Run) -> list[PhaseResult]:
    """The warm-up, SFT and DPO, and the control if asked for. Finished phases are read from the run
    directory."""
    config = method_of(run, DecexTreeConfig)
    start, first, demonstrations = begin(run)
    began = time.monotonic()
    records = _expanded(run, start)
    run.compare(start, records, ROUND, WARM_UP.step)
    trees = [record for record in records if not is_pair(record)]
    pairs = _pairs(run, records) if config.dpo else []
    chains = [tree for tree in trees if tree.reward > 0 and tree.reward >= config.min_reward]
    found = figures(records)
    run.metrics.write("decex", ROUND, {**found, "chains": len(chains)})
    _tell(run, records, found)
    if found["unfinished"] or found["budget_spent"]:
        run.progress.line(
            f"{found['unfinished']} of {len(trees)} trees have no chain, {found['budget_spent']} "
            f"trees spent method.budget_tokens {config.budget_tokens}; what they made is kept"
        )
    spent = int(sum(tree.counts["forward_tokens"] for tree in trees))
    sampled = int(sum(tree.counts["finished"] for tree in trees))
    state, results = start, list[PhaseResult]()
    if config.sft:
        state, result = _learn_chains(
            run, state, trees, chains, began=began, trajectories=sampled, forward_tokens=spent
        )
        results.append(result)
        began, spent, sampled = time.monotonic(), 0, 0
    if pairs:
        results.append(
            _learn_pairs(run, state, pairs, began=began, trajectories=sampled, forward_tokens=spent)
        )
    elif config.dpo:
        run.progress.line(
            f"{DPO.name}: the {len(trees)} trees left no preference pair that fits "
            f"trainer.row_tokens {run.config.trainer.row_tokens}; the policy stays as it is"
        )
    return with_control(run, start, demonstrations, first, results)


def _expanded(run: Run, state: PhaseState) -> list[Trajectory]:
    """All trees of the run, as they are kept."""
    earlier = finished_round(run, ROUND)
    if earlier is not None:
        return earlier[0]
    size = run.config.sampling.shard_questions
    questions = run.task.questions("train")[: questions_a_round(run, "trees")]
    name = "trees: expanding"
    endpoint = None if method_of(run, DecexTreeConfig).remote.base_url is None else _endpoint(run)
    run.preemption.enter(name, kept=KEPT_SHARDS)
    run.use_policy(state, WARM_UP.step)
    entries: list[ShardEntry] = []
    records: list[Trajectory] = []
    with sampling(run, name, ROUND, total=len(questions), unit="questions") as stage:
        grown = 0

        def on_tree(trees: int, reward: float) -> None:
            nonlocal grown
            grown += trees
            stage.update(grown, best_reward=reward)

        def unit(index: int, callback: object) -> tuple[ShardEntry | None, list[Trajectory]]:
            del callback
            asked = questions[index * size : (index + 1) * size]
            return run.stored(ROUND, index, lambda: _grown(run, index, asked, endpoint, on_tree))

        units = [functools.partial(unit, index) for index in range(-(-len(questions) // size))]
        play_share(run.progress, name, units)
        for index, play in enumerate(units):
            entry, found = play(None)
            assert entry is not None, "a tree leaves a trajectory"
            entries.append(entry)
            records += found
            grown = min(len(questions), (index + 1) * size)
            stage.update(grown)
    rewards = [
        record.reward
        for record in records
        if not is_pair(record) and not record.is_environment_fault
    ]
    close_round(run, ROUND, entries, mean_reward=statistics.fmean(rewards))
    return records


def _endpoint(run: Run) -> Endpoint:
    return open_endpoint(method_of(run, DecexTreeConfig).remote, run.store.root)


def _writer(run: Run, endpoint: Endpoint | None) -> TreeWriter | None:
    """Return the second model for one shard; None where the policy writes alone."""
    if endpoint is None:
        return None
    version = EnginePolicy(run.generator).version
    return TreeWriter(EnginePolicy(endpoint.generator), endpoint.tokenizer, run.tokenizer, version)


def _grown(
    run: Run,
    shard: int,
    asked: Sequence[Question],
    endpoint: Endpoint | None,
    on_tree: Callable[[int, float], None],
) -> list[Trajectory]:
    """Grow the trees of a shard, which share the engine. Their nodes are written before the shard
    is.

    Raises UserError where all of them are lost to the retriever: nothing of the shard is kept then.
    """
    config, agent, began = method_of(run, DecexTreeConfig), run.agent, time.monotonic()
    assert isinstance(agent, Decex), "checked with the configuration"
    writer = _writer(run, endpoint)

    async def one(question: Question, gate: asyncio.Semaphore) -> Tree:
        async def rewarded(trajectory: Trajectory) -> Trajectory:
            return trajectory.with_reward(run.reward(trajectory, question))

        tree = await Growth(
            agent,
            attempt(run, question, 0, ROUND),
            run.task.environment(question),
            EnginePolicy(run.generator),
            config,
            reward=rewarded,
            gate=gate,
            writer=writer,
            repeats=run.config.faults.repeats,
        ).grow()
        on_tree(1, best_chain(tree, config.retrievals)[0].reward)
        return tree

    async def all_of_them() -> list[Tree]:
        gate = asyncio.Semaphore(run.config.engine.slots)
        return await gather_polled(
            [one(question, gate) for question in asked], run.preemption.check
        )

    trees = asyncio.run(all_of_them())
    if all(best_chain(tree, config.retrievals)[0].is_environment_fault for tree in trees):
        failed = int(sum(tree.counts["retriever_failed"] for tree in trees))
        tries = run.config.faults.repeats + 1
        raise UserError(
            f"{failed} searches failed, each in {tries} tries, and none of {len(trees)} trees came "
            "to an end: start the retriever again or correct its address, then give the same "
            "command; finished shards are kept"
        )
    seconds = (time.monotonic() - began) / len(trees)
    run.store.create(f"trees/shard-{shard:05d}.parquet", encode_nodes(trees))
    return [record for tree in trees for record in records_of(tree, config.retrievals, seconds)]


def _tell(run: Run, records: Sequence[Trajectory], found: Mapping[str, float]) -> None:
    """Print the share of chains that are leaves, what pairs prefer, and what was lost."""
    preferred = ", ".join(
        f"{name.replace('_', ' ')} {count}" for name, count in pairs_by_preference(records).items()
    )
    run.progress.line(
        f"trees: the best chain is a leaf in {found['leaf_share']:.0%}, its reward "
        f"{found['best_reward']:.2f}; pairs: {preferred}"
    )
    if found["retriever_failed"]:
        run.progress.line(
            f"trees: {found['retriever_failed']} pieces and episodes are left out because a search "
            f"failed, after {found['repeated']} repeats"
        )


def _pairs(run: Run, records: Sequence[Trajectory]) -> list[Conversation]:
    """Chosen, rejected, chosen, rejected, ... of the kinds that are learnt, where both train
    anything and fit a row."""
    config, limit = method_of(run, DecexTreeConfig), run.config.trainer.row_tokens
    kinds = {"decision": config.decision_pairs, "execution": config.execution_pairs}
    pairs = [record.conversations for record in records if is_pair(record)]
    pairs = [pair for pair in pairs if kinds[pair[0].role]]
    trained = [pair for pair in pairs if all(any(side.loss_mask) for side in pair)]
    fitting = [pair for pair in trained if sum(len(side.token_ids) for side in pair) <= limit]
    if len(trained) < len(pairs):
        run.progress.line(
            f"{len(pairs) - len(trained)} of {len(pairs)} pairs have a side without a token to "
            "learn"
        )
    if len(fitting) < len(trained):
        run.progress.line(
            f"{len(trained) - len(fitting)} of {len(trained)} pairs exceed {limit} tokens and are "
            "left out"
        )
    return [side for pair in fitting for side in pair]


def _learn_chains(
    run: Run,
    state: PhaseState,
    trees: Sequence[Trajectory],
    chains: Sequence[Trajectory],
    **phase: Any,
) -> tuple[PhaseState, PhaseResult]:
    config, trainer = method_of(run, DecexTreeConfig), run.config.trainer
    best = max(tree.reward for tree in trees)
    if not chains:
        raise UserError(
            f"the best chain of {len(trees)} trees earns {best:.2f} and method.min_reward is "
            f"{config.min_reward}: raise method.branches {config.branches} or warmup.steps "
            f"{run.config.warmup.steps}, start from a stronger model, or lower method.min_reward"
        )
    rows = run.fitting(
        [conversation for chain in chains for conversation in chain.conversations], "chains"
    )
    if not rows:
        shortest = min(len(chain.conversations[0].token_ids) for chain in chains)
        raise UserError(
            f"none of {len(chains)} chains fits trainer.row_tokens {trainer.row_tokens}, the "
            f"shortest has {shortest} tokens: raise trainer.row_tokens"
        )
    packed = pack(rows, row_tokens=trainer.row_tokens, seed=run.config.seed + SFT.step)
    steps = steps_of_epochs(packed.num_rows, trainer.rows_per_step, config.epochs)
    learnt = run.learn(
        SFT.name,
        state,
        lambda: packed,
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
    )
    return learnt, _finish(run, SFT, learnt, steps, accepted=len(rows), **phase)


def _learn_pairs(
    run: Run, state: PhaseState, pairs: Sequence[Conversation], **phase: Any
) -> PhaseResult:
    config, trainer = method_of(run, DecexTreeConfig), run.config.trainer
    packed = pack(pairs, row_tokens=trainer.row_tokens, seed=run.config.seed + DPO.step, pairs=True)
    steps = steps_of_epochs(packed.num_rows, trainer.rows_per_step, config.dpo_epochs)
    # By the policy that DPO begins with.
    reference = score_once(run, REFERENCE, lambda: run.trainer.score(state(), packed))
    learnt = run.learn(
        DPO.name,
        state,
        lambda: packed.with_columns(reference_log_probs=reference),
        steps=steps,
        peak=config.dpo_learning_rate,
        end_value=0.0,
        loss=preference.DPO(beta=config.beta),
    )
    phase["forward_tokens"] += sum(len(side.token_ids) for side in pairs)
    return _finish(run, DPO, learnt, steps, accepted=len(pairs) // 2, **phase)


def _finish(run: Run, phase: Phase, state: PhaseState, steps: int, **spent: Any) -> PhaseResult:
    run.commit_policy(state, phase.step)
    slots = steps * run.config.trainer.rows_per_step * run.config.trainer.row_tokens
    return run.finish_phase(phase, state, trained_slots=slots, **spent)
