"""Run directories on local disk or in a bucket, and the leases in them.

Objects are created once, and checked when they are read.
"""

from mujica_jax.storage.io_statistics import IoStatistics
from mujica_jax.storage.leases import Lease, Leases
from mujica_jax.storage.run_directory import RunDirectory, RunPath, run_path

__all__ = ["IoStatistics", "Lease", "Leases", "RunDirectory", "RunPath", "run_path"]
