"""The losses by their names, all equals for the trainer."""

import dataclasses
from typing import Any

from mujica_jax.errors import UserError, nearest
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.losses.policy import DAPO, GRPO
from mujica_jax.learning.losses.preference import DPO

LOSSES: dict[str, type[Loss]] = {"mle": MLE, "grpo": GRPO, "dapo": DAPO, "dpo": DPO}


def find_loss(name: str, **parameters: Any) -> Loss:
    """The loss of this name with its hyper-parameters."""
    if name not in LOSSES:
        raise UserError(f"there is no loss {name!r}: {nearest(name, LOSSES)}")
    fields: Any = dataclasses.fields(LOSSES[name])  # pyright: ignore[reportArgumentType]
    known = [field.name for field in fields]
    for given in parameters:
        if given not in known:
            raise UserError(f"the loss {name} has no parameter {given!r}: {nearest(given, known)}")
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in parameters]
    if missing:
        raise UserError(f"the loss {name} is given no {' and no '.join(missing)}: give each a number")
    return LOSSES[name](**parameters)
