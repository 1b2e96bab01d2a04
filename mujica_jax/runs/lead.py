"""One trainer leads a run: it holds a lease in the run directory while it trains."""

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

TRAINER = "trainer"  # name of the lease of the process that leads a run
LEAD_SECONDS = 30.0  # how long that lease lasts


@contextlib.contextmanager
def trainer_lease(store: Store, preemption: Preemption) -> Iterator[None]:
    """Hold the lease of the run's trainer, so that no other trainer leads this run meanwhile.

    A trainer that was killed on another host is waited for until its lease is over. One that lives
    is refused.
    """
    if not distributed.is_primary() or store.exists(SUMMARY):  # a finished run changes nothing
        yield
        return

    lease = _claim(store, preemption)
    has_ended = threading.Event()

    def renew() -> None:
        while not has_ended.wait(LEAD_SECONDS / RENEWALS_A_LEASE):
            # A store that does not answer now is asked again.
            with contextlib.suppress(UserError, OSError):
                # This program stood still for that long. What it has written stays, as after a
                # kill.
                if lease.is_lost:
                    print(
                        f"error: another process trains in {store.root} since; this one ends",
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
    """Claim the lease of the run's trainer. Raises UserError where another trainer lives."""
    leases = Leases(store, seconds=LEAD_SECONDS, revision=provenance.git_revision())
    start_time = time.monotonic()
    lease = leases.claim(TRAINER)
    while lease is None:
        holder = leases.holder(TRAINER)
        has_waited = time.monotonic() - start_time > 2 * LEAD_SECONDS
        if holder and (leases.is_near(holder) or has_waited):
            raise UserError(
                f"process {holder.process} on {holder.host} trains in {store.root} already: end it "
                "first, or choose another --run directory"
            )
        preemption.check()
        time.sleep(1.0)
        lease = leases.claim(TRAINER)
    return lease
