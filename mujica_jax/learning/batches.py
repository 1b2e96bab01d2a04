"""Batches of packed rows, as a Grain iterator that a checkpoint can continue.

    order    = shuffle of epoch 0, shuffle of epoch 1, shuffle of epoch 2, ...
    batch(n) = the n-th `batch_size` rows of this order

A shuffle is a permutation of all row numbers, drawn from (seed, epoch). So the batch of step n is a
pure function of the seed and n. Any step can be reached without the steps before it. Grain's
`shuffle().repeat().batch()` has another order. All published numbers were made with this one. Grain
stores the number of the next step, with the methods that all its iterators have (`get_state`,
`set_state`).

If several processes train together, each reads only its own rows of a batch
(`models.sharding.own_rows`). The batch of a step is the same for any number of processes. All rows
are in memory and a batch is a few look-ups in them, so nothing is prefetched.

`learning.trainer.fit` reads the batches. Grain is imported on first use, because the import takes
0.5 s.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from mujica_jax.errors import UserError
from mujica_jax.learning.packing import Batch, PackedRows


class Batches:
    """An endless iterator over the batches that one call of `learning.trainer.fit` trains on.

    Its state is a JSON object. A checkpoint stores it beside the training state.
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
        """Make batches of `batch_size` of these rows, shuffled by `seed`.

        `own` holds the indexes, among the `batch_size` rows of a batch, of the rows that this
        process reads. None reads all of them. `columns` names the extra columns that a batch has.
        Raises UserError if there are no rows.
        """
        import grain

        if not rows.num_rows:
            raise UserError(
                "there are 0 rows to train on, but a step needs at least 1: skip this phase or "
                "select more trajectories"
            )
        # All that the order of the rows depends on. The number of processes is not part of it, so
        # a run can continue with a different number.
        self._order = {"rows": rows.num_rows, "rows_per_step": batch_size, "seed": seed}

        def batch_of_step(step: int) -> Batch:
            indices = rows_of_step(rows.num_rows, batch_size, seed=seed, step=step)
            if own is not None:
                indices = indices[own]
            return rows.batch(indices, columns)

        # The largest integer stands for an endless number of steps.
        steps = grain.MapDataset.range(sys.maxsize)
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(steps.map(batch_of_step).to_iter_dataset(options))

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Return the number of the next step, and what the order of the rows depends on."""
        return {"order": self._order, "place": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue with the step that came next when `get_state` returned `state`.

        Raises UserError if the number of rows, the batch size or the seed differs, because the
        same step would then have another batch.
        """
        if state["order"] != self._order:
            raise UserError(
                f"the checkpoint was made with {_words(state['order'])}, but this run has "
                f"{_words(self._order)}: continue with the configuration and data of the "
                "checkpoint, or use another run directory"
            )
        self._iterator.set_state(state["place"])

    @property
    def next_step(self) -> int:
        """The number of the step whose batch comes next, from 0."""
        return self._iterator.get_state()["next_index"]

    def seek(self, step: int) -> None:
        """Go to the batch of step `step`, without a saved state."""
        self._iterator.set_state({"next_index": step})


def rows_of_step(
    num_rows: int, batch_size: int, *, seed: int, step: int
) -> Int[np.ndarray, "batch_size"]:
    """Return the numbers of the rows in the batch of step `step`.

    The shuffles of all epochs follow each other in one long order, and step n takes the n-th
    `batch_size` rows of it. A batch may begin in one epoch and end in the next.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, places_in_epoch = np.divmod(places, num_rows)
    rows = []
    for epoch in np.unique(epochs).tolist():
        shuffle = np.random.default_rng((seed, epoch)).permutation(num_rows)
        rows.append(shuffle[places_in_epoch[epochs == epoch]])
    return np.concatenate(rows)


def _words(order: dict[str, int]) -> str:
    """Return a phrase for error messages: number of rows, batch size and seed."""
    return f"{order['rows']} rows, batch size {order['rows_per_step']} and seed {order['seed']}"
