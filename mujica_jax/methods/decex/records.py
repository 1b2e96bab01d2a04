"""Store search trees as trajectories, in the same shards that all methods use.

The first trajectory of a tree is its best chain. The statistics of the tree are among its counts.
Each further trajectory is a preference pair: two conversations, the chosen one first. Their role is
the kind of the pair. All nodes are also stored in a separate table.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from mujica_jax.methods.decex.pairs import PREFERENCES
from mujica_jax.methods.decex.tree import COUNTS, Tree
from mujica_jax.records import Trajectory

# Counts of a preference pair: the two mean rewards.
CHOSEN = "chosen_mean"
REJECTED = "rejected_mean"
# The beginning of a count's name. The name of the pair's preference follows it. The count is 1.
PREFERS = "prefers_"
# The names in COUNTS that are reported as totals. The others are reported as means.
FAULTS = ("repeated", "retriever_failed")
# A count of a tree's first trajectory: 1 if this chain ends at a leaf of the tree.
LEAF = "leaf"
# The columns of the table of nodes, with their Arrow types. The parent is another node of the same
# question. It is null if the parent is the question itself.
NODE_COLUMNS = {
    "question_id": "string",
    "node": "int32",
    "parent": "int32",
    # One of sub-question, memory, search and answer.
    "kind": "string",
    "text": "string",
}
# A column of lists: the rewards of the episodes that were played from the node.
REWARDS = "rewards"


def is_pair(record: Trajectory) -> bool:
    """Return whether a record is a preference pair. Otherwise it is the best chain of a tree."""
    return CHOSEN in record.counts


def best_chain(tree: Tree, retrievals: Literal["most", "least"]) -> tuple[Trajectory, bool]:
    """Return the chain of a tree that SFT learns, and whether it ends at a leaf of the tree.

    It is the path from the root to a leaf with the best reward. If several leaves have it,
    `retrievals` decides whether the one with the most or the least searches is taken (figure 2 of
    the paper). If no leaf has the best reward, it is an episode that was played from a node and has
    it. If the tree has no finished episode, it is the question alone.
    """
    if not tree.finished:
        return tree.unfinished, False
    best = max(trajectory.reward for trajectory in tree.finished)
    leaves = [chain for chain in tree.finished[: tree.leaves] if chain.reward == best]
    candidates = leaves or [chain for chain in tree.finished if chain.reward == best]
    sign = 1 if retrievals == "most" else -1
    return max(candidates, key=lambda chain: sign * len(chain.searches)), bool(leaves)


def records_of(
    tree: Tree, retrievals: Literal["most", "least"], seconds: float
) -> list[Trajectory]:
    """Return the records of a tree: its best chain, and then its preference pairs.

    `seconds` is the time that growing the tree took.
    """
    chain, is_leaf = best_chain(tree, retrievals)
    tree_counts = {**tree.counts, "finished": float(len(tree.finished)), LEAF: float(is_leaf)}
    records = [
        dataclasses.replace(
            chain, attempt=0, counts={**chain.counts, **tree_counts}, seconds=seconds
        )
    ]
    for number, pair in enumerate(tree.pairs, start=1):
        chosen_mean, rejected_mean = pair.means
        records.append(
            dataclasses.replace(
                tree.unfinished,
                attempt=number,
                seconds=0.0,
                conversations=(pair.chosen, pair.rejected),
                counts={
                    CHOSEN: chosen_mean,
                    REJECTED: rejected_mean,
                    f"{PREFERS}{pair.prefers}": 1.0,
                },
            )
        )
    return records


def encode_nodes(trees: Sequence[Tree]) -> bytes:
    """Return the table of all scored nodes as a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([*NODE_COLUMNS.items(), (REWARDS, pyarrow.list_(pyarrow.float64()))])
    rows = [
        {"question_id": tree.unfinished.question_id, **node}
        for tree in trees
        for node in tree.nodes
    ]
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), sink)
    return sink.getvalue().to_pybytes()


def pairs_by_preference(records: Sequence[Trajectory]) -> dict[str, int]:
    """Return the number of preference pairs of a run, by the name of the preference."""
    num_pairs: dict[str, int] = {}
    for name in PREFERENCES:
        count_name = f"{PREFERS}{name}"
        num_pairs[name] = int(sum(record.counts.get(count_name, 0) for record in records))
    return num_pairs


def figures(records: Sequence[Trajectory]) -> dict[str, float | int]:
    """Return the statistics of the trees of a run. docs/reference/metrics.md explains them.

    Unless noted otherwise there, they are means per question.
    """
    trees = [record for record in records if not is_pair(record)]
    # Leave out trees that finished no episode because searches failed: they say nothing about the
    # policy.
    whole_trees = [tree for tree in trees if not tree.is_environment_fault]
    pair_kinds = [record.conversations[0].role for record in records if is_pair(record)]

    def total(name: str) -> int:
        return int(sum(tree.counts[name] for tree in trees))

    mean_counts = {}
    for name in ("generated_tokens", "writer_tokens", *COUNTS):
        if name not in FAULTS:
            mean_counts[name] = statistics.fmean(tree.counts[name] for tree in trees)
    return {
        "questions": len(trees),
        "seconds": statistics.fmean(tree.seconds for tree in trees),
        **mean_counts,
        "best_reward": _mean([tree.reward for tree in whole_trees]),
        "leaf_share": _mean([tree.counts[LEAF] for tree in whole_trees]),
        "retrievals": _mean([len(tree.searches) for tree in whole_trees]),
        "budget_spent": total("budget_spent"),
        "unfinished": sum(not tree.counts["finished"] for tree in trees),
        **{name: total(name) for name in FAULTS},
        "decision_pairs": pair_kinds.count("decision"),
        "execution_pairs": pair_kinds.count("execution"),
        **{f"pairs_{name}": count for name, count in pairs_by_preference(records).items()},
    }


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values; 0 if there are none."""
    return statistics.fmean(values) if values else 0.0
