"""Train with DecEx-RAG: grow a search tree for each question, then learn with SFT and DPO.

SFT (supervised fine-tuning) maximises the likelihood of each tree's best chain. DPO learns from
preference pairs of executions and decisions that the trees scored (section 2.3 and appendix A.2 of
the paper). The method has these steps:

1. Warm-up. With `warmup.steps` 0, the start of the run is evaluated without training.
2. Trees: grow a tree for each question with the policy after the warm-up, one shard at a time.
   `methods/decex/tree.py` grows the trees, and `methods/decex/records.py` stores them.
3. SFT on the best chains (optional).
4. DPO on the preference pairs (optional). The reference policy is the policy before this step. Its
   log-probabilities are stored in the run directory, so a restart does not need that policy.

By default the policy writes the whole tree. With `method.remote` a second model writes everything
except the executions of retrieval decisions. In the paper Qwen3-30B-A3B did this for
Qwen2.5-7B-Instruct (section 3.2).

Differences from the paper, in addition to those of the tree and of the agent:

- SFT learns one chain of each tree: a path from the root to a leaf that has the tree's best reward.
  If no leaf has the best reward, SFT learns an episode that was played from a node and has it.
- A chain is only learnt if it earns at least `min_reward`. The paper does not say whether wrong
  chains are learnt.
- A chain is one row, and all of its turns are trained. The paper cuts it at the searches into pairs
  of input and output. Both train the same tokens after the same context.
- The paper does not print learning rates and epochs. For DPO we use beta 0.1, a learning rate of
  5e-7 and one epoch. The learning rates and epochs of SFT are ours too.
"""

import asyncio
import functools
import statistics
import time
from collections.abc import Callable, Sequence

from mujica_jax.agents.agent import EnginePolicy, gather_polled
from mujica_jax.agents.decex import Decex
from mujica_jax.config.methods import DecexTreeConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.losses import preference
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.decex.records import (
    best_chain,
    encode_nodes,
    figures,
    is_pair,
    pairs_by_preference,
    records_of,
)
from mujica_jax.methods.decex.tree import Growth, Tree
from mujica_jax.methods.decex.writer import TreeWriter
from mujica_jax.methods.dpo import Pair, learn_pairs, num_tokens, packed_pairs, pairs_that_fit
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Question, Trajectory
from mujica_jax.report.progress import Stage
from mujica_jax.runs import evaluation, learning, mismatch, sampling
from mujica_jax.runs.endpoint import Endpoint, open_endpoint
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import WARM_UP, Phase, PhaseCost, PhaseResult, PhaseState
from mujica_jax.runs.run import Run, method_of
from mujica_jax.runs.selection import record_selection
from mujica_jax.runs.versions import commit_policy, use_policy
from mujica_jax.trajectories.store import ShardEntry

# The trees are stored as round 1 of the run directory.
ROUND = 1
SFT = Phase(name="sft", step=1)
DPO = Phase(name="dpo", step=2)


def decex(run: Run) -> list[PhaseResult]:
    """Run the warm-up, the trees, SFT and DPO, and the control run if `eval.control` is set.

    Return one result for each phase. Phases that an earlier start of this run finished are read
    from the run directory.
    """
    config = method_of(run, DecexTreeConfig)
    start, first_result, demonstrations = begin(run)

    # Expand: grow a search tree for each question. Then select the best chain of each tree and the
    # preference pairs.
    cost = PhaseCost(start_time=time.monotonic())
    records = _expand(run, start)
    mismatch.compare(run, start, records, ROUND, WARM_UP.step)
    trees = [record for record in records if not is_pair(record)]
    chains = [tree for tree in trees if tree.reward > 0 and tree.reward >= config.min_reward]
    pairs = _pairs_to_learn(run, records) if config.dpo else []
    record_selection(run, ROUND, records, chains)
    _report_trees(run, records, num_chains=len(chains))
    cost.forward_tokens = int(sum(tree.counts["forward_tokens"] for tree in trees))
    cost.trajectories = int(sum(tree.counts["finished"] for tree in trees))

    # SFT: maximise the likelihood of the best chains, commit the policy and evaluate it.
    state = start
    results: list[PhaseResult] = []
    if config.sft:
        state, result = _learn_chains(run, state, trees, chains, cost)
        results.append(result)
        cost = PhaseCost(start_time=time.monotonic())

    # DPO: learn the preference pairs, commit the policy and evaluate it.
    if pairs:
        results.append(_learn_pairs(run, state, pairs, cost))
    elif config.dpo:
        run.progress.line(
            f"{DPO.name}: the {len(trees)} trees left no preference pair that fits "
            f"trainer.sequence_length {run.config.trainer.sequence_length}, so the policy does not "
            "change"
        )
    return with_control(run, start, demonstrations, first_result, results)


def _expand(run: Run, state: PhaseState) -> list[Trajectory]:
    """Grow all trees of the run, and return their records.

    Trees that an earlier start of the run grew are read from the run directory.
    """
    finished = sampling.finished_round(run, ROUND)
    if finished is not None:
        return finished.trajectories

    config = method_of(run, DecexTreeConfig)
    shard_size = run.config.sampling.questions_per_shard
    questions = run.task.questions("train")[: sampling.questions_a_round(run, "trees")]
    shards = [
        questions[start : start + shard_size] for start in range(0, len(questions), shard_size)
    ]
    name = "trees: expanding"
    endpoint = None
    if config.remote.base_url is not None:
        endpoint = open_endpoint(config.remote, run.store.root)
    run.preemption.enter(name, kept_text=sampling.KEPT_SHARDS)
    use_policy(run, state, WARM_UP.step)

    entries: list[ShardEntry] = []
    records: list[Trajectory] = []
    with sampling.sampling_stage(run, name, ROUND, total=len(questions), unit="questions") as stage:
        progress = _TreeProgress(stage)

        def play(shard: int, on_episode: object) -> tuple[ShardEntry | None, list[Trajectory]]:
            del on_episode
            return sampling.read_or_play(
                run,
                ROUND,
                shard,
                lambda: _grow_shard(run, shard, shards[shard], endpoint, progress.on_tree),
            )

        units = [functools.partial(play, shard) for shard in range(len(shards))]
        sampling.play_share(run.progress, name, units)
        for unit, shard_questions in zip(units, shards, strict=True):
            entry, shard_records = unit(None)
            assert entry is not None, "every tree has at least one record"
            entries.append(entry)
            records += shard_records
            progress.finish_shard(len(shard_questions))

    rewards = [
        record.reward
        for record in records
        if not is_pair(record) and not record.is_environment_fault
    ]
    sampling.close_round(run, ROUND, entries, mean_reward=statistics.fmean(rewards))
    return records


class _TreeProgress:
    """A display of the number of finished trees."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        # The number of trees, including those of the current shard.
        self._num_grown = 0
        # The number of trees in finished shards.
        self._num_finished = 0

    def on_tree(self, reward: float) -> None:
        """Count a finished tree of the current shard. Its best chain has this reward."""
        self._num_grown += 1
        self._stage.update(self._num_grown, best_reward=reward)

    def finish_shard(self, num_trees: int) -> None:
        """Count a shard whose trees were grown or read."""
        self._num_finished += num_trees
        self._num_grown = self._num_finished
        self._stage.update(self._num_grown)


def _tree_writer(run: Run, endpoint: Endpoint | None) -> TreeWriter | None:
    """Return the writer of a second model for one shard; None if the policy writes everything."""
    if endpoint is None:
        return None
    version = EnginePolicy(run.generator).version
    return TreeWriter(EnginePolicy(endpoint.generator), endpoint.tokenizer, run.tokenizer, version)


def _grow_shard(
    run: Run,
    shard: int,
    questions: Sequence[Question],
    endpoint: Endpoint | None,
    on_tree: Callable[[float], None],
) -> list[Trajectory]:
    """Grow the trees of a shard at the same time, and return their records.

    The table of the trees' nodes is stored before the shard itself. Raises UserError if failed
    searches ended all trees. Nothing of the shard is stored in this case.
    """
    config = method_of(run, DecexTreeConfig)
    agent = run.agent
    assert isinstance(agent, Decex), "config.checks makes sure that the agent is decex"
    writer = _tree_writer(run, endpoint)
    start_time = time.monotonic()

    async def grow(question: Question, gate: asyncio.Semaphore) -> Tree:
        async def with_reward(trajectory: Trajectory) -> Trajectory:
            return trajectory.with_reward(run.reward(trajectory, question))

        root = agent.begin(
            sampling.attempt(run, question, 0, ROUND),
            run.task.environment(question),
            EnginePolicy(run.generator),
        )
        growth = Growth(
            root,
            config,
            reward=with_reward,
            gate=gate,
            writer=writer,
            repeats=run.config.faults.repeats,
        )
        tree = await growth.grow()
        chain, _ = best_chain(tree, config.retrievals)
        on_tree(chain.reward)
        return tree

    async def grow_all() -> list[Tree]:
        gate = asyncio.Semaphore(run.config.engine.max_num_seqs)
        growing = [grow(question, gate) for question in questions]
        return await gather_polled(growing, run.preemption.check)

    trees = asyncio.run(grow_all())
    if all(best_chain(tree, config.retrievals)[0].is_environment_fault for tree in trees):
        num_failed = int(sum(tree.counts["retriever_failed"] for tree in trees))
        num_tries = run.config.faults.repeats + 1
        raise UserError(
            f"{num_failed} searches failed, each in {num_tries} tries, and none of {len(trees)} "
            "trees could be finished: start the retriever again or correct its address, then start "
            "the same command again; finished shards are kept"
        )
    seconds_per_tree = (time.monotonic() - start_time) / len(trees)
    run.store.create(f"trees/shard-{shard:05d}.parquet", encode_nodes(trees))
    records = []
    for tree in trees:
        records += records_of(tree, config.retrievals, seconds_per_tree)
    return records


def _report_trees(run: Run, records: Sequence[Trajectory], *, num_chains: int) -> None:
    """Log the statistics of the trees, and print them with the problems that occurred."""
    tree_figures = figures(records)
    run.metrics.write("decex", ROUND, {**tree_figures, "chains": num_chains})
    preferences = ", ".join(
        f"{name.replace('_', ' ')} {count}" for name, count in pairs_by_preference(records).items()
    )
    run.progress.line(
        f"trees: mean reward of the best chains {tree_figures['best_reward']:.2f}; the best chain "
        f"ends at a leaf in {tree_figures['leaf_share']:.0%} of the trees; preference pairs: "
        f"{preferences}"
    )
    if tree_figures["retriever_failed"]:
        run.progress.line(
            f"trees: {tree_figures['retriever_failed']} steps and episodes are left out because "
            f"their searches kept failing; {tree_figures['repeated']} steps and episodes were "
            "played again after a failed search"
        )
    if tree_figures["unfinished"] or tree_figures["budget_spent"]:
        budget = method_of(run, DecexTreeConfig).budget_tokens
        run.progress.line(
            f"{tree_figures['unfinished']} of {tree_figures['questions']} trees have no chain; "
            f"{tree_figures['budget_spent']} trees reached the limit of method.budget_tokens "
            f"{budget}, and the parts that they grew until then are used"
        )


def _pairs_to_learn(run: Run, records: Sequence[Trajectory]) -> list[Pair]:
    """Return the pairs of the configured kinds that can be learnt (`pairs_that_fit`)."""
    config = method_of(run, DecexTreeConfig)
    is_learnt = {"decision": config.decision_pairs, "execution": config.execution_pairs}
    pairs: list[Pair] = []
    for record in records:
        if is_pair(record):
            chosen, rejected = record.conversations
            pairs.append((chosen, rejected))
    return pairs_that_fit(run, [pair for pair in pairs if is_learnt[pair[0].role]])


def _learn_chains(
    run: Run,
    state: PhaseState,
    trees: Sequence[Trajectory],
    chains: Sequence[Trajectory],
    cost: PhaseCost,
) -> tuple[PhaseState, PhaseResult]:
    """Learn the chains by maximum likelihood, and return the new state with the phase's result.

    Raises UserError if there is no chain to learn.
    """
    config = method_of(run, DecexTreeConfig)
    trainer = run.config.trainer
    best_reward = max(tree.reward for tree in trees)
    if not chains:
        raise UserError(
            f"the best chain of {len(trees)} trees earns {best_reward:.2f}, but method.min_reward "
            f"is {config.min_reward}: raise method.branches (now {config.branches}) or "
            f"warmup.steps (now {run.config.warmup.steps}), start from a stronger model, or lower "
            "method.min_reward"
        )
    conversations = [conversation for chain in chains for conversation in chain.conversations]
    rows = learning.rows_that_fit(run, conversations, "chains")
    if not rows:
        shortest = min(len(chain.conversations[0].token_ids) for chain in chains)
        raise UserError(
            f"none of {len(chains)} chains fits trainer.sequence_length {trainer.sequence_length}; "
            f"the shortest has {shortest} tokens: raise trainer.sequence_length"
        )

    packed = pack(rows, sequence_length=trainer.sequence_length, seed=run.config.seed + SFT.step)
    plan = LearningPlan(
        steps=steps_of_epochs(packed.num_rows, trainer.batch_size, config.epochs),
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
    )
    learnt_state = learning.train(run, SFT.name, state, packed, plan=plan)
    result = _finish(run, SFT, learnt_state, cost, steps=plan.steps, accepted=len(rows))
    return learnt_state, result


def _learn_pairs(
    run: Run, state: PhaseState, pairs: Sequence[Pair], cost: PhaseCost
) -> PhaseResult:
    """Learn the preference pairs by DPO, and return the phase's result.

    The reference policy is the policy in `state`.
    """
    config = method_of(run, DecexTreeConfig)
    packed = packed_pairs(run, DPO, pairs)
    plan = LearningPlan(
        steps=steps_of_epochs(packed.num_rows, run.config.trainer.batch_size, config.dpo_epochs),
        peak=config.dpo_learning_rate,
        end_value=0.0,
        loss=preference.DPO(beta=config.beta),
    )
    learnt_state = learn_pairs(run, DPO, state, packed, plan)
    cost.forward_tokens += num_tokens(pairs)
    return _finish(run, DPO, learnt_state, cost, steps=plan.steps, accepted=len(pairs))


def _finish(
    run: Run, phase: Phase, state: PhaseState, cost: PhaseCost, *, steps: int, accepted: int
) -> PhaseResult:
    """Commit the policy after a phase, evaluate it, and return the phase's result."""
    commit_policy(run, state, phase.step)
    cost.accepted = accepted
    cost.trained_slots = steps * run.config.trainer.tokens_per_step
    return evaluation.finish(run, phase, state, cost)
