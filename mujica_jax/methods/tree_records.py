"""What is kept of a search tree: trajectories, in the shards that all methods use, and its nodes in a table beside.

The first trajectory is the tree's best chain, with the tree's own numbers among its counts; every other one is a
preference pair: two conversations, the chosen one first, whose role is the kind of the pair. Called by `methods.decex`.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from mujica_jax.methods.search_tree import COUNTS, Tree
from mujica_jax.records import Trajectory

CHOSEN, REJECTED = "chosen_mean", "rejected_mean"  # counts of a preference pair
LEAF = "leaf"  # of a tree's first trajectory: whether it is a leaf of it
NODE_COLUMNS = {  # with their Arrow types; a parent is a node of the same question, or null: the question itself
    "question_id": "string",
    "node": "int32",
    "parent": "int32",
    "kind": "string",  # sub-question, memory, search or answer
    "text": "string",
}
REWARDS = "rewards"  # a column of lists: of the episodes played from the node


def is_pair(record: Trajectory) -> bool:
    return CHOSEN in record.counts


def best_chain(tree: Tree, retrievals: Literal["most", "least"]) -> tuple[Trajectory, bool]:
    """Of what was finished with the best reward, the chain with most or least searches (figure 2 of the paper), leaves
    before what was played from a node; and whether it is a leaf. A tree that finished nothing gives its question."""
    if not tree.finished:
        return tree.unfinished, False
    best = max(trajectory.reward for trajectory in tree.finished)
    sign = 1 if retrievals == "most" else -1
    place, chain = max(
        ((place, chain) for place, chain in enumerate(tree.finished) if chain.reward == best),
        key=lambda one: (sign * len(one[1].searches), -one[0]),
    )
    return chain, place < tree.leaves


def records_of(tree: Tree, retrievals: Literal["most", "least"], seconds: float) -> list[Trajectory]:
    """A tree as it is kept. `seconds` are those of its expansion."""
    chain, is_leaf = best_chain(tree, retrievals)
    about = {**tree.counts, "finished": float(len(tree.finished)), LEAF: float(is_leaf)}
    first = dataclasses.replace(chain, attempt=0, counts={**chain.counts, **about}, seconds=seconds)
    records = [first]
    for number, pair in enumerate(tree.pairs, start=1):
        sides, counts = (pair.chosen, pair.rejected), dict(zip((CHOSEN, REJECTED), pair.means, strict=True))
        untimed = dataclasses.replace(tree.unfinished, attempt=number, seconds=0.0)
        records.append(dataclasses.replace(untimed, conversations=sides, counts=counts))
    return records


def encode_nodes(trees: Sequence[Tree]) -> bytes:
    """A Parquet file of all nodes that were scored."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([*NODE_COLUMNS.items(), (REWARDS, pyarrow.list_(pyarrow.float64()))])
    rows = [{"question_id": tree.unfinished.question_id, **node} for tree in trees for node in tree.nodes]
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), sink)
    return sink.getvalue().to_pybytes()


def figures(records: Sequence[Trajectory]) -> dict[str, float | int]:
    """Of the trees of a run, means a question where nothing else is said (docs/metrics.md)."""
    trees = [record for record in records if not is_pair(record)]

    def mean(name: str) -> float:
        return statistics.fmean(tree.counts[name] for tree in trees)

    kinds = [record.conversations[0].role for record in records if is_pair(record)]
    return {
        "questions": len(trees),
        "seconds": statistics.fmean(tree.seconds for tree in trees),
        **{name: mean(name) for name in ("generated_tokens", *COUNTS)},
        "best_reward": statistics.fmean(tree.reward for tree in trees),
        "leaf_share": mean(LEAF),
        "retrievals": statistics.fmean(len(tree.searches) for tree in trees),
        "budget_spent": int(sum(tree.counts["budget_spent"] for tree in trees)),
        "unfinished": sum(not tree.counts["finished"] for tree in trees),
        "decision_pairs": kinds.count("decision"),
        "execution_pairs": kinds.count("execution"),
    }
