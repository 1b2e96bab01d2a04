"""Storage of trajectories, and the selection of those that are trained."""

from mujica_jax.trajectories.store import RoundSummary, ShardEntry, Store, open_run

__all__ = ["RoundSummary", "ShardEntry", "Store", "open_run"]
