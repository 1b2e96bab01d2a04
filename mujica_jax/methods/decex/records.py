"""Store a search tree as trajectories, in the shards that all methods use, with a table of nodes.

The first trajectory is the tree's best chain, with the tree's own numbers among its counts; every
other one is a preference pair: two conversations, the chosen one first, whose role is the kind of
the pair. Called by `methods.decex`.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from mujica_jax.methods.decex.pairs import PREFERENCES
from mujica_jax.methods.decex.tree import COUNTS, Tree
from mujica_jax.records import Trajectory

# Counts of a preference pair.
CHOSEN = "chosen_mean"
REJECTED = "rejected_mean"
PREFERS = "prefers_"  # before what a pair prefers: a count of 1
FAULTS = ("repeated", "retriever_failed")  # of COUNTS, those that are given all together
LEAF = "leaf"  # of a tree's first trajectory: whether it is a leaf of it
# Columns of the table of nodes, with their Arrow types. A parent is a node of the same question, or
# null: the question itself.
NODE_COLUMNS = {
    "question_id": "string",
    "node": "int32",
    "parent": "int32",
    "kind": "string",  # sub-question, memory, search or answer
    "text": "string",
}
REWARDS = "rewards"  # a column of lists: of the episodes played from the node


def is_pair(record: Trajectory) -> bool:
    """Return whether a record is a preference pair, and no tree."""
    return CHOSEN in record.counts


def best_chain(tree: Tree, retrievals: Literal["most", "least"]) -> tuple[Trajectory, bool]:
    """Return the chain that SFT learns, and whether it is a leaf of the tree.

    Of the leaves with the best reward it is the one with most or least searches (figure 2 of the
    paper): the path from root to leaf. Only where no leaf has the best reward, it is an episode
    that was played from a node and has it. A tree that finished nothing gives its question.
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
    """Return the records of a tree: its best chain, then its pairs.

    `seconds` are those of its expansion.
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
    """Return a Parquet file of all nodes that were scored."""
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
    """Count the pairs of a run by what they prefer."""
    num_pairs: dict[str, int] = {}
    for name in PREFERENCES:
        count_name = f"{PREFERS}{name}"
        num_pairs[name] = int(sum(record.counts.get(count_name, 0) for record in records))
    return num_pairs


def figures(records: Sequence[Trajectory]) -> dict[str, float | int]:
    """Return the numbers of the trees of a run (docs/reference/metrics.md).

    They are means a question where nothing else is said.
    """
    trees = [record for record in records if not is_pair(record)]
    # A tree that finished nothing because searches failed says nothing about the policy.
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
    """Return the mean; 0 where there is nothing."""
    return statistics.fmean(values) if values else 0.0
