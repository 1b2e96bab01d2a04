"""The losses, all equals for the trainer."""

from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.losses.policy import DAPO, GRPO
from mujica_jax.learning.losses.preference import DPO

__all__ = ["DAPO", "DPO", "GRPO", "MLE", "Loss"]
