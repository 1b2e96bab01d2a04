"""Rewards for training. The scores that users see come from `metrics`."""

from mujica_jax.rewards.reward import RewardFunction, find_reward
from mujica_jax.rewards.staged import staged_reward

__all__ = ["RewardFunction", "find_reward", "staged_reward"]
