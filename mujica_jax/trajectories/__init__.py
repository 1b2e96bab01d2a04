"""Trajectories: how they are stored, and which of them are learnt."""

from mujica_jax.trajectories.store import RoundSummary, ShardEntry, Store, open_run

__all__ = ["RoundSummary", "ShardEntry", "Store", "open_run"]
