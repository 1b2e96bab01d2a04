"""Scripted policies, which play the demonstrations of the warm-up.

They know the gold chain of each question.
"""

from mujica_jax.demonstrations.policy import ScriptedPolicy

__all__ = ["ScriptedPolicy"]
