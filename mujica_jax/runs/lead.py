"""Make sure that only one trainer works in a run directory at a time.

The trainer holds a lease, a file in the run directory that it renews while it trains.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from mujica_jax.errors import UserError
from mujica_jax.runtime import distributed, provenance
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.storage.leases import RENEWALS_A_LEASE, Lease, Leases
from mujica_jax.trajectories.store import SUMMARY, Store

# The name of the trainer's lease.
TRAINER = "trainer"
# How long the lease lasts without renewal, in seconds.
LEAD_SECONDS = 30.0


@contextlib.contextmanager
def trainer_lease(store: Store, preemption: Preemption) -> Iterator[None]:
    """Hold the lease of the run's trainer during a block, so that no other trainer uses the run.

    If a trainer on another host was killed, wait until its lease expires. If another trainer is
    still running, raise UserError. If this trainer loses its lease during the block, its process
    ends with exit code 2.
    """
    # A finished run needs no lease, because nothing in it changes any more.
    if not distributed.is_primary() or store.exists(SUMMARY):
        yield
        return

    lease = _claim(store, preemption)
    has_ended = threading.Event()

    def renew() -> None:
        while not has_ended.wait(LEAD_SECONDS / RENEWALS_A_LEASE):
            # If the store does not answer, try again at the next renewal.
            with contextlib.suppress(UserError, OSError):
                # The lease is lost if this program was stopped for longer than the lease lasts, and
                # another trainer took over. Everything that was written stays, as after a kill.
                if lease.is_lost:
                    print(
                        f"error: another process has taken over training in {store.root}; this "
                        "one ends",
                        file=sys.stderr,
                    )
                    os._exit(2)
                lease.renew()

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        with contextlib.suppress(UserError):
            lease.release()


def _claim(store: Store, preemption: Preemption) -> Lease:
    """Claim the lease of the run's trainer. Raises UserError if another trainer is running."""
    leases = Leases(store, seconds=LEAD_SECONDS, revision=provenance.git_revision())
    start_time = time.monotonic()
    lease = leases.claim(TRAINER)
    while lease is None:
        holder = leases.holder(TRAINER)
        has_waited = time.monotonic() - start_time > 2 * LEAD_SECONDS
        if holder and (leases.is_near(holder) or has_waited):
            raise UserError(
                f"process {holder.process} on {holder.host} is already training in {store.root}: "
                "stop it first, or choose another --run directory"
            )
        preemption.check()
        time.sleep(1.0)
        lease = leases.claim(TRAINER)
    return lease
