"""The losses that the trainer can minimise.

    MLE    maximum likelihood: MyGO, EviPath, warm-up, and all other supervised training
    GRPO   clipped policy gradient, in which every conversation has the same weight
    DAPO   clipped policy gradient, in which every trained token has the same weight
    DPO    direct preference optimisation on pairs of conversations: DecEx-RAG

All of them have the interface of `loss.Loss`, and the trainer treats them alike.
"""

from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.losses.policy import DAPO, GRPO
from mujica_jax.learning.losses.preference import DPO

__all__ = ["DAPO", "DPO", "GRPO", "MLE", "Loss"]
