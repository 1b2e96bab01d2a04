"""Batches of packed rows as a Grain iterator, whose order a checkpoint can continue.

Element n of the dataset is the batch of step n, or this process's rows of it. It is a pure function
of (seed, n): the epochs' shuffles stand one after the other, and step n takes the n-th
`batch_size` rows of them. Grain's own `shuffle().repeat().batch()` shuffles by another rule. The
order here is the one that every published number was made with, and any step of it can be reached
without the steps before. Grain stores the place in the order, by the protocol of its other data
sources.

Several processes share a batch as the mesh lays out its rows (`models.sharding.own_rows`). Each
process reads only its own rows, and the batch of a step is the same for any number of processes.
The rows lie in memory and a batch is a few look-ups in them, so nothing is prefetched. Called by
`learning.trainer.fit`. Grain is imported on first use, because it takes 0.5 s.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from mujica_jax.errors import UserError
from mujica_jax.learning.packing import Batch, PackedRows


class Batches:
    """An endless iterator over the batches of one fit.

    Its state is JSON and goes into the checkpoint beside the training state.
    """

    def __init__(
        self,
        rows: PackedRows,
        batch_size: int,
        *,
        seed: int,
        own: Int[np.ndarray, " own"] | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        """Make batches of these rows.

        `own` are the places, among the `batch_size` rows of a batch, that this process brings
        (default: all). `columns` names the extra columns of a batch. Raises UserError if there are
        no rows.
        """
        import grain

        if not rows.num_rows:
            raise UserError(
                "there are 0 rows to train on and a step needs at least 1: skip this phase or "
                "select more"
            )
        # What the place in the order depends on. The number of processes is not among it: another
        # one continues.
        self._order = {"rows": rows.num_rows, "rows_per_step": batch_size, "seed": seed}

        def batch_of_step(step: int) -> Batch:
            indices = rows_of_step(rows.num_rows, batch_size, seed=seed, step=step)
            if own is not None:
                indices = indices[own]
            return rows.batch(indices, columns)

        steps = grain.MapDataset.range(sys.maxsize)  # the epochs never end
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(steps.map(batch_of_step).to_iter_dataset(options))

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        return {"order": self._order, "place": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called, over the same rows.

        Raises UserError for other rows, because their steps hold other samples.
        """
        if state["order"] != self._order:
            raise UserError(
                f"the checkpoint was at a place in {_words(state['order'])}, and this run has "
                f"{_words(self._order)}: continue with the configuration and data it was made "
                "with, or in another run directory"
            )
        self._iterator.set_state(state["place"])

    @property
    def next_step(self) -> int:
        """The step whose batch comes next."""
        return self._iterator.get_state()["next_index"]

    def seek(self, step: int) -> None:
        """Go to the batch of a step, without a saved state."""
        self._iterator.set_state({"next_index": step})


def rows_of_step(
    num_rows: int, batch_size: int, *, seed: int, step: int
) -> Int[np.ndarray, "batch_size"]:
    """Return the rows that a step sees.

    The epochs' shuffles stand one after the other, and step n takes the n-th `batch_size` of
    them. A step may begin in one epoch and end in another.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, places_in_epoch = np.divmod(places, num_rows)
    rows = []
    for epoch in np.unique(epochs).tolist():
        shuffle = np.random.default_rng((seed, epoch)).permutation(num_rows)
        rows.append(shuffle[places_in_epoch[epochs == epoch]])
    return np.concatenate(rows)


def _words(order: dict[str, int]) -> str:
    """Return what an order depends on, as errors say it."""
    return f"{order['rows']} rows, {order['rows_per_step']} a step, seed {order['seed']}"
