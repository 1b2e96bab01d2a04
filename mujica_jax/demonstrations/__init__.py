"""Scripted teachers: they play the demonstrations of the warm-up on tasks that they know."""

from mujica_jax.demonstrations.policy import ScriptedPolicy

__all__ = ["ScriptedPolicy"]
