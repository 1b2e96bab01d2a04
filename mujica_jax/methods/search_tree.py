"""DecEx-RAG's search tree over one question (sections 2.2 and 4.1 of the paper).

In a state, k turns are sampled that either stop with a final answer or go on with a sub-question. If more than half of
them stop, the tree ends there. Otherwise each distinct sub-question is played to its end n times; the mean reward is
its score, and the best one is kept. For it, k answers are sampled from memory and scored in the same way. If the best
of them scores above 0.6, it is the next state and nothing is searched for; otherwise k sub-queries are sampled and
scored, and the best of them is the next state.

    pruned     as above: layers grow linearly
    unpruned   both branches of a decision stay, each with its best execution: 2 to the power of the layers
    full       every execution stays and nothing is played to its end: an execution's score is the mean over the
               final answers beneath it

Siblings that were scored become preference pairs (`methods/preference_pairs.py`).

Readings, where the paper is silent. The turns that vote are the candidates: table 4's prompt has a decision and what it
leads to in one output. Where sub-queries were sampled, the best of them is the next state even if memory scored
higher, as section 2.2 says; the pair says what the means say. A final answer's score is its own reward. Equal
executions, but for case, are one. A tree is grown depth first, the best branch first; `budget_tokens` is looked at
before each layer, so that a tree is a function of its seeds alone, and what was made when it is spent is kept.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.decex import Chain, Decex, Source
from mujica_jax.config.methods import DecexTreeConfig
from mujica_jax.inference.requests import Completion, SamplingParams, TokenIds
from mujica_jax.methods.preference_pairs import Group, Node, Pair, best_of, decision_pairs, execution_pairs
from mujica_jax.records import StopReason, Trajectory
from mujica_jax.tasks.task import Environment

COUNTS = ("nodes", "rollouts", "duplicates", "malformed", "pruned_branches", "skipped_searches")  # docs/metrics.md


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """What the search left."""

    finished: tuple[Trajectory, ...]  # rewarded, the leaves of the tree first, then what was played from its nodes
    leaves: int  # how many of them are leaves
    unfinished: Trajectory  # the question alone
    pairs: tuple[Pair, ...]
    nodes: tuple[dict[str, object], ...]  # what was scored, in its order: columns as in `tree_records`
    counts: dict[str, float]


class Growth:
    """One tree while it grows. `reward` gives a finished trajectory with its reward; at most `gate` turns or episodes
    of all trees are under way."""

    def __init__(
        self,
        agent: Decex,
        attempt: Attempt,
        environment: Environment,
        policy: Policy,
        config: DecexTreeConfig,
        *,
        reward: Callable[[Trajectory], Trajectory],
        gate: asyncio.Semaphore,
    ) -> None:
        self._config, self._reward, self._gate = config, reward, gate
        self._policy = _Counted(policy)
        self._root = agent.begin(attempt, environment, self._policy)
        self._leaves: list[Trajectory] = []
        self._played: list[Trajectory] = []
        self._nodes: list[Node] = []
        self._executions: list[Group] = []  # siblings of one kind
        self._decisions: list[tuple[Group, Group]] = []  # the two branches of a decision
        self._counts = dict.fromkeys((*COUNTS, "forward_tokens", "budget_spent"), 0.0)

    async def grow(self) -> Tree:
        waiting = [Node(self._root)]
        while waiting:
            if 0 < self._config.budget_tokens <= self._policy.generated_tokens:
                self._counts["budget_spent"] = 1.0
                break
            following = await self._layer(waiting.pop())
            waiting += following[::-1]
        pairs = [*execution_pairs(self._executions), *decision_pairs(self._decisions)]
        reason = StopReason.ITERATION_LIMIT if self._counts["budget_spent"] else StopReason.NO_ACTION
        return Tree(
            finished=(*self._leaves, *self._played),
            leaves=len(self._leaves),
            unfinished=self._root.trajectory([self._root.record()], "", reason),
            pairs=tuple(pairs),
            nodes=tuple(self._told()),
            counts={**self._counts, "generated_tokens": float(self._policy.generated_tokens)},
        )

    def _told(self) -> Iterator[dict[str, object]]:
        places = {node: place for place, node in enumerate(self._nodes)}
        for node, place in places.items():
            kind, text = _execution(node.chain)
            parent = None if node.parent is None else places.get(node.parent)
            yield {"node": place, "parent": parent, "kind": kind, "text": text, "rewards": node.rewards}

    async def _layer(self, node: Node) -> list[Node]:
        """One iteration: the states that follow, the best one first."""
        pruned = self._config.expansion == "pruned"
        sampled = await self._sample(node, "decide")
        stopping = sum(_stops(one.chain) for one in sampled)
        answers = self._distinct([one for one in sampled if _stops(one.chain)])
        asked = self._distinct([one for one in sampled if one.chain.asked is not None])
        over = 2 * stopping > self._config.branches
        await self._score(answers)
        if answers and (over or not pruned or not asked):
            self._leaves += [self._reward(await one.chain.finish()) for one in answers]
            if self._config.expansion == "full":
                for one in answers:
                    above = one.parent
                    while above is not None:
                        above.rewards += one.rewards
                        above = above.parent
        self._executions.append(answers)
        if not asked or (pruned and over):
            self._counts["pruned_branches"] += len(asked)
            return []
        await self._score(asked)
        self._executions.append(asked)
        self._decisions.append((answers, asked))
        self._counts["pruned_branches"] += len(answers) if pruned else 0
        solved = [await self._solve(one) for one in self._kept(asked)]
        return [following for group in solved for following in group]

    async def _solve(self, node: Node) -> list[Node]:
        """The retrieval decision for a sub-question."""
        pruned = self._config.expansion == "pruned"
        memory = await self._executed(node, "memory")
        if pruned and memory and best_of(memory).mean > self._config.skip_above:
            self._counts["skipped_searches"] += 1
            return self._kept(memory)
        found = await self._executed(node, "search")
        self._decisions.append((memory, found))
        if pruned and found:
            self._counts["pruned_branches"] += len(memory)
            return self._kept(found)
        both = [*self._kept(memory), *self._kept(found)]
        return both if self._config.expansion == "full" else sorted(both, key=lambda one: -one.mean)

    async def _executed(self, node: Node, source: Source) -> list[Node]:
        sampled = await self._sample(node, source)
        distinct = self._distinct([one for one in sampled if one.chain.outcome is None])
        await self._score(distinct)
        self._executions.append(distinct)
        return distinct

    def _kept(self, siblings: Group) -> list[Node]:
        """The best execution, the first of equal ones; all of them in a full tree."""
        if not siblings or self._config.expansion == "full":
            return list(siblings)
        self._counts["pruned_branches"] += len(siblings) - 1
        return [best_of(siblings)]

    async def _sample(self, node: Node, what: Literal["decide"] | Source) -> list[Node]:
        """k forks, each one turn further."""

        async def one(number: int) -> Node:
            fork = node.chain.fork(f"{what}{number}")
            async with self._gate:
                await (fork.decide() if what == "decide" else fork.solve(what))
            self._counts["forward_tokens"] += fork.tokens - node.chain.tokens
            return Node(fork, node)

        sampled = await asyncio.gather(*(one(number) for number in range(self._config.branches)))
        readable = [one for one in sampled if one.chain.outcome is None or _stops(one.chain)]
        self._counts["malformed"] += len(sampled) - len(readable)
        return readable

    def _distinct(self, sampled: Group) -> list[Node]:
        """The first of each that says the same."""
        distinct: dict[str, Node] = {}
        for one in sampled:
            distinct.setdefault(_execution(one.chain)[1].casefold(), one)
        self._counts["duplicates"] += len(sampled) - len(distinct)
        self._counts["nodes"] += len(distinct)
        self._nodes += distinct.values()
        return list(distinct.values())

    async def _score(self, nodes: Group) -> None:
        """Rewards of n episodes from each node, or of the answer that it is."""

        async def one(node: Node, number: int) -> Trajectory:
            fork = node.chain.fork(f"rollout{number}")
            async with self._gate:
                trajectory = await fork.finish()
            self._counts["forward_tokens"] += fork.tokens - node.chain.tokens
            return self._reward(trajectory)

        for node in nodes:
            if node.chain.outcome is not None:
                node.rewards = [self._reward(await node.chain.finish()).reward]
        going_on = [node for node in nodes if node.chain.outcome is None]
        if self._config.expansion == "full" or not going_on:
            return
        count = self._config.rollouts
        found = await asyncio.gather(*(one(node, number) for node in going_on for number in range(count)))
        self._counts["rollouts"] += len(found)
        self._played += found
        for place, node in enumerate(going_on):
            node.rewards = [trajectory.reward for trajectory in found[place * count : (place + 1) * count]]


def _stops(chain: Chain) -> bool:
    return chain.outcome is not None and chain.outcome[1] is StopReason.ANSWERED


def _execution(chain: Chain) -> tuple[str, str]:
    """What the last turn is, and its text."""
    if chain.outcome is not None:
        return "answer", chain.outcome[0]
    if chain.asked is not None:
        return "sub-question", chain.asked
    recalled = chain.steps[-1].recalled
    return ("search", chain.searches[-1].query) if recalled is None else ("memory", recalled)


class _Counted:
    """A policy whose generated tokens are counted."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.generated_tokens = 0

    @property
    def version(self) -> int:
        return self._policy.version

    async def generate(self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool) -> Completion:
        found = await self._policy.generate(prompt, params, state=state, continues=continues)
        self.generated_tokens += len(found.token_ids)
        return found
