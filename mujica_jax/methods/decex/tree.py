"""Grow DecEx-RAG's search tree for one question (sections 2.2 and 4.1 of the paper).

One layer of the tree consists of two decisions:

1. Termination. Sample k continuations of the current state. Each either stops with a final answer
   or goes on with a sub-question. If more than half of them stop, the tree ends here. Otherwise
   score each distinct sub-question: play n episodes from it to their end, and take their mean
   reward. The best sub-question is kept.
2. Retrieval. Sample k answers to this sub-question from the model's memory, and score them in the
   same way. If the best score is above 0.6 (`skip_above`), that answer leads to the next state.
   Otherwise sample k search queries and score them. The best one leads to the next state.

`expansion` decides how much of the tree is kept:

- `pruned`: as described above. The tree grows linearly with its layers.
- `unpruned`: both branches of a decision are kept, each with its best execution. The tree grows as
  2 to the power of its layers.
- `full`: every execution is kept, and no episodes are played. The score of an execution is the mean
  reward of the final answers below it.

**Preference pairs.** Scored siblings become preference pairs (`methods/decex/pairs.py`). The paper
generates all branches of a decision before it prunes. With `score_both_branches` we do the same:
both branches of every decision are scored, so that pairs can also prefer memory to search, or
stopping to going on. This does not change which branches are expanded. Queries are then scored even
if memory was good enough, and sub-questions even if the vote ends the tree.

If no sample took one of the two termination decisions, k samples of it are forced: each keeps the
thought of an earlier sample and takes the other decision. Forced samples are scored for pairs and
never expanded. Stopping is not forced before the first step, because there is nothing to answer
from (the paper's prompt in table 4 forbids it). Going on is not forced if no iteration is left. A
full tree plays no episodes and forces nothing. Without `score_both_branches`, a branch that is not
expanded costs nothing and gives no pair.

**Second model.** A second model may write the tree (`methods/decex/writer.py`), except the
executions of retrieval decisions, which the policy writes. The second model also plays the episodes
that score an execution.

**Failed searches.** A failed search is not the policy's fault. The step or episode is played again
with the same seeds, at most `repeats` times. If it still fails, it is left out: it makes no branch
and enters no mean. If all episodes of a node are lost in this way, the node has no score and is not
expanded.

**Our choices where the paper is silent:**

- The samples that vote on termination are also the candidates, because one output of table 4's
  prompt contains both the decision and its result.
- If memory is not good enough, the best query leads to the next state even if memory scored higher
  (as in section 2.2). The preference pair follows the scores.
- The score of a final answer is its own reward.
- Executions that differ only in upper and lower case count as one.
- A tree is grown depth first, the best branch first. `budget_tokens` is checked before each layer,
  so that the tree depends only on its seeds. When the budget is used up, the tree so far is kept.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator

from mujica_jax.agents.agent import Policy
from mujica_jax.agents.decex import Chain, Decided, Source
from mujica_jax.config.methods import DecexTreeConfig
from mujica_jax.config.schema import FaultConfig
from mujica_jax.inference.requests import Completion, SamplingParams, TokenIds
from mujica_jax.methods.decex.pairs import (
    Group,
    Node,
    Pair,
    best_of,
    decision_pairs,
    execution_pairs,
    scored,
)
from mujica_jax.records import StopReason, Trajectory

# The names of a tree's counts. docs/reference/metrics.md explains them.
COUNTS = (
    "nodes",
    "rollouts",
    "rollouts_for_pairs",
    "forced_decisions",
    "duplicates",
    "malformed",
    "pruned_branches",
    "skipped_searches",
    "repeated",
    "retriever_failed",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """A finished search tree.

    Attributes:
        finished: All finished episodes with their rewards: first the leaves of the tree, then the
            episodes that were played from its nodes.
        leaves: How many of these are leaves.
        unfinished: A trajectory that holds the question alone.
        pairs: The preference pairs.
        nodes: The scored nodes, as rows of the table in `methods/decex/records.py`.
        counts: The statistics of the tree.
    """

    finished: tuple[Trajectory, ...]
    leaves: int
    unfinished: Trajectory
    pairs: tuple[Pair, ...]
    nodes: tuple[dict[str, object], ...]
    counts: dict[str, float]


class Growth:
    """The growth of one tree.

    `root` is the chain that holds only the question. Its policy grows the tree. `reward` returns a
    finished trajectory with its reward. `gate` limits how many steps and episodes of all trees run
    at the same time. `writer` is a second model that writes everything except the executions of
    retrieval decisions. If a search fails, the step or episode is repeated at most `repeats` times.
    """

    def __init__(
        self,
        root: Chain,
        config: DecexTreeConfig,
        *,
        reward: Callable[[Trajectory], Awaitable[Trajectory]],
        gate: asyncio.Semaphore,
        writer: Policy | None = None,
        repeats: int = FaultConfig.repeats,
    ) -> None:
        self._config = config
        self._reward = reward
        self._gate = gate
        self._repeats = repeats
        self._policy = _Counted(root.policy)
        self._writer = None if writer is None else _Counted(writer)
        self._root = root
        self._leaves: list[Trajectory] = []
        self._played: list[Trajectory] = []
        self._nodes: list[Node] = []
        # Groups of siblings of one kind, for execution pairs.
        self._executions: list[Group] = []
        # The two branches of each decision, for decision pairs.
        self._decisions: list[tuple[Group, Group]] = []
        self._counts = dict.fromkeys((*COUNTS, "forward_tokens", "budget_spent"), 0.0)

    @property
    def _scores_both(self) -> bool:
        """Whether both branches of every decision are scored."""
        return self._config.score_both_branches and self._config.expansion != "full"

    async def grow(self) -> Tree:
        """Grow the tree depth first, until nothing is left to expand or the budget is spent."""
        stack = [Node(self._root)]
        while stack:
            if 0 < self._config.budget_tokens <= self._generated_tokens():
                self._counts["budget_spent"] = 1.0
                break
            next_nodes = await self._layer(stack.pop())
            stack += next_nodes[::-1]

        pairs = [*execution_pairs(self._executions), *decision_pairs(self._decisions)]
        return Tree(
            finished=(*self._leaves, *self._played),
            leaves=len(self._leaves),
            unfinished=self._root.trajectory([self._root.record()], "", self._why_unfinished()),
            pairs=tuple(pairs),
            nodes=tuple(self._node_rows()),
            counts={
                **self._counts,
                "generated_tokens": float(self._policy.generated_tokens),
                "writer_tokens": float(self._writer_tokens()),
            },
        )

    def _generated_tokens(self) -> int:
        """Return how many tokens both models have generated."""
        return self._policy.generated_tokens + self._writer_tokens()

    def _writer_tokens(self) -> int:
        """Return how many tokens the second model has generated."""
        return 0 if self._writer is None else self._writer.generated_tokens

    def _why_unfinished(self) -> StopReason:
        """Return why the tree has no finished episode, as the stop reason of `Tree.unfinished`."""
        if self._counts["budget_spent"]:
            return StopReason.ITERATION_LIMIT
        has_finished = bool(self._leaves or self._played)
        if not has_finished and self._counts["retriever_failed"] > 0:
            return StopReason.RETRIEVER_FAILED
        return StopReason.NO_ACTION

    def _node_rows(self) -> Iterator[dict[str, object]]:
        """Yield the rows of the table of nodes."""
        places = {node: place for place, node in enumerate(self._nodes)}
        for node, place in places.items():
            assert node.chain.last is not None, "a node is a state after an execution"
            yield {
                "node": place,
                "parent": None if node.parent is None else places.get(node.parent),
                "kind": node.kind,
                "text": node.chain.last.text,
                "rewards": node.rewards,
            }

    async def _layer(self, node: Node) -> list[Node]:
        """Grow one layer below a node, and return the nodes to expand next, the best one first."""
        is_pruned = self._config.expansion == "pruned"

        # Vote: sample continuations that stop or go on.
        sampled = await self._decide(node)
        stopping = [sample for sample in sampled if sample.kind == "answer"]
        going_on = [sample for sample in sampled if sample.kind == "sub-question"]
        answers = self._distinct(stopping)
        sub_questions = self._distinct(going_on)
        majority_stops = 2 * len(stopping) > self._config.branches
        goes_on = bool(sub_questions) and not (is_pruned and majority_stops)

        # Score the branches that are expanded or that are needed for pairs.
        await self._score(answers)
        self._executions.append(answers)
        if answers and (majority_stops or not is_pruned or not sub_questions):
            await self._add_leaves(answers)
        if goes_on or self._scores_both:
            await self._score(sub_questions, for_pairs=not goes_on)
            self._executions.append(sub_questions)
            await self._compare_termination(node, sampled, answers, sub_questions)
        if not goes_on:
            self._counts["pruned_branches"] += len(sub_questions)
            return []

        # Solve the best sub-question. In a full tree, solve all of them.
        if is_pruned:
            self._counts["pruned_branches"] += len(answers)
        next_nodes: list[Node] = []
        for sub_question in self._best(sub_questions):
            next_nodes += await self._solve(sub_question)
        return next_nodes

    async def _add_leaves(self, answers: Group) -> None:
        """Add these final answers as leaves. In a full tree they also score all nodes above."""
        self._leaves += [await self._reward(await node.chain.finish()) for node in answers]
        if self._config.expansion == "full":
            for node in answers:
                ancestor = node.parent
                while ancestor is not None:
                    ancestor.rewards += node.rewards
                    ancestor = ancestor.parent

    async def _compare_termination(
        self, node: Node, sampled: Group, answers: Group, sub_questions: Group
    ) -> None:
        """Store the two branches of a termination decision for pairs.

        If both branches are to be scored and no sample took one of them, that branch is forced.
        """
        if self._scores_both and not answers and node.chain.steps:
            answers = await self._force(node, sampled, "stop")
        if self._scores_both and not sub_questions and node.chain.can_ask:
            sub_questions = await self._force(node, sampled, "go_on")
        self._decisions.append((answers, sub_questions))

    async def _force(self, node: Node, sampled: Group, decision: Decided) -> list[Node]:
        """Return nodes that keep the sampled thoughts and take the other termination decision.

        They are scored, but only for pairs.
        """

        async def force(number: int, sample: Node) -> Node:
            return await self._execute(
                node,
                f"{decision}{number}",
                lambda fork: fork.decide_otherwise(sample.chain, decision),
            )

        forcing = [force(number, sample) for number, sample in enumerate(sampled)]
        forced = await asyncio.gather(*forcing)
        self._counts["forced_decisions"] += len(forced)
        distinct = self._distinct(self._readable(forced))
        await self._score(distinct, for_pairs=True)
        return distinct

    async def _solve(self, node: Node) -> list[Node]:
        """Take the retrieval decision for a sub-question, and return the nodes that follow."""
        is_pruned = self._config.expansion == "pruned"

        # Answer from memory. If that is good enough, no search is needed, except for pairs.
        memory = await self._solutions(node, "memory")
        scored_memory = scored(memory)
        is_enough = False
        if is_pruned and scored_memory:
            is_enough = best_of(scored_memory).mean > self._config.skip_above
        if is_enough:
            self._counts["skipped_searches"] += 1
            if self._scores_both:
                searches = await self._solutions(node, "search", for_pairs=True)
                self._decisions.append((memory, searches))
                self._counts["pruned_branches"] += len(searches)
            return self._best(memory)

        # Memory is not good enough: search.
        searches = await self._solutions(node, "search")
        self._decisions.append((memory, searches))
        if is_pruned and scored(searches):
            self._counts["pruned_branches"] += len(memory)
            return self._best(searches)
        both = [*self._best(memory), *self._best(searches)]
        if self._config.expansion == "full":
            return both
        return sorted(both, key=lambda solution: -solution.mean)

    async def _solutions(
        self, node: Node, source: Source, *, for_pairs: bool = False
    ) -> list[Node]:
        """Sample and score one branch of a retrieval decision, and return its distinct executions.

        `for_pairs` says that the branch is only scored for pairs and not expanded.
        """

        async def solve(number: int) -> Node:
            return await self._execute(
                node, f"{source}{number}", lambda fork: fork.solve(source), writes=False
            )

        sampled = await asyncio.gather(*map(solve, range(self._config.branches)))
        distinct = self._distinct(self._readable(sampled))
        await self._score(distinct, for_pairs=for_pairs)
        self._executions.append(distinct)
        return distinct

    def _best(self, siblings: Group) -> list[Node]:
        """Return the best execution that has a score. If several are best, return the first.

        In a full tree, return all executions.
        """
        if self._config.expansion == "full":
            return list(siblings)
        candidates = scored(siblings)
        if not candidates:
            return []
        self._counts["pruned_branches"] += len(candidates) - 1
        return [best_of(candidates)]

    async def _decide(self, node: Node) -> list[Node]:
        """Sample k continuations of a node. Each takes the termination decision."""

        async def decide(number: int) -> Node:
            return await self._execute(node, f"decide{number}", lambda fork: fork.decide())

        sampled = await asyncio.gather(*map(decide, range(self._config.branches)))
        return self._readable(sampled)

    async def _execute(
        self,
        node: Node,
        place: str,
        play: Callable[[Chain], Awaitable[object]],
        *,
        writes: bool = True,
    ) -> Node:
        """Fork a node's chain, continue the fork with `play`, and return it as a new node.

        `place` names the fork and thereby determines its seeds. If a search fails, the fork is
        played again with the same seeds. If `writes` is true and there is a second model, this
        model writes the fork.
        """
        fork = await self._played_once(node, place, play, writes=writes)
        repeats = 0
        while _is_lost(fork) and repeats < self._repeats:
            repeats += 1
            fork = await self._played_once(node, place, play, writes=writes)
        self._counts["repeated"] += repeats
        return Node(fork, node)

    async def _played_once(
        self, node: Node, place: str, play: Callable[[Chain], Awaitable[object]], *, writes: bool
    ) -> Chain:
        """Play a fork of a node once, as soon as the gate allows it, and count its tokens."""
        fork = node.chain.fork(place)
        writer = self._writer if writes else None
        fork.policy = self._policy if writer is None else writer
        async with self._gate:
            await play(fork)
        if writer is None:
            self._counts["forward_tokens"] += fork.tokens - node.chain.tokens
        return fork

    def _readable(self, sampled: Group) -> list[Node]:
        """Return the samples that can become branches. The others are malformed or lost."""
        readable = [node for node in sampled if node.chain.outcome is None or _stops(node.chain)]
        num_lost = sum(_is_lost(node.chain) for node in sampled)
        self._counts["retriever_failed"] += num_lost
        self._counts["malformed"] += len(sampled) - len(readable) - num_lost
        return readable

    def _distinct(self, sampled: Group) -> list[Node]:
        """Return the first node of each distinct text, and add these nodes to the tree.

        Upper and lower case do not matter.
        """
        distinct: dict[str, Node] = {}
        for node in sampled:
            assert node.chain.last is not None, "a node is a state after an execution"
            distinct.setdefault(node.chain.last.text.casefold(), node)
        self._counts["duplicates"] += len(sampled) - len(distinct)
        self._counts["nodes"] += len(distinct)
        self._nodes += distinct.values()
        return list(distinct.values())

    async def _score(self, nodes: Group, *, for_pairs: bool = False) -> None:
        """Score nodes. A final answer gets its own reward, and other nodes those of n episodes.

        `for_pairs` says that the nodes are only scored for pairs and not expanded.
        """
        for node in nodes:
            if node.chain.outcome is not None:
                trajectory = await self._reward(await node.chain.finish())
                node.rewards = [trajectory.reward]
        going_on = [node for node in nodes if node.chain.outcome is None]
        if self._config.expansion == "full":
            return
        trajectories_by_node = await asyncio.gather(*map(self._episodes, going_on))
        for node, trajectories in zip(going_on, trajectories_by_node, strict=True):
            node.rewards = [trajectory.reward for trajectory in trajectories]
            self._played += trajectories
        count = len(going_on) * self._config.rollouts
        self._counts["rollouts"] += count
        self._counts["rollouts_for_pairs"] += count if for_pairs else 0

    async def _episodes(self, node: Node) -> list[Trajectory]:
        """Play n episodes from a node. Leave out and count those in which a search failed."""

        async def play(number: int) -> Node:
            return await self._execute(node, f"rollout{number}", lambda fork: fork.finish())

        episodes = await asyncio.gather(*map(play, range(self._config.rollouts)))
        whole_episodes = [episode for episode in episodes if not _is_lost(episode.chain)]
        self._counts["retriever_failed"] += len(episodes) - len(whole_episodes)
        return [await self._reward(await episode.chain.finish()) for episode in whole_episodes]


def _stops(chain: Chain) -> bool:
    """Return whether a chain has ended with a final answer."""
    return chain.outcome is not None and chain.outcome[1] is StopReason.ANSWERED


def _is_lost(chain: Chain) -> bool:
    """Return whether a failed search ended a chain.

    The chain's reward then says nothing about the policy.
    """
    return chain.outcome is not None and chain.outcome[1] is StopReason.RETRIEVER_FAILED


class _Counted:
    """A policy that counts the tokens that the wrapped policy generates."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.generated_tokens = 0

    @property
    def version(self) -> int:
        """The version of the wrapped policy."""
        return self._policy.version

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Generate with the wrapped policy, and count the tokens."""
        completion = await self._policy.generate(prompt, params, state=state, continues=continues)
        self.generated_tokens += len(completion.token_ids)
        return completion
