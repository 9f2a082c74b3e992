"""The samples that have arrived on a draft rank: who has them in hand, and how each of them ends here."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from nccl_stream.coordination.intake import Delivery, DraftIntake
from nccl_stream.errors import SampleNotFoundError, SpecMismatchError
from nccl_stream.leases import FailOutcome, Lease, LeaseTable, VisibilityTimeout
from nccl_stream.refs import SampleRef

__all__ = ["DraftLeases"]

logger = logging.getLogger(__name__)


class DraftLeases:
    """Leases of a draft rank, and the outcomes that they bring to the deliveries behind them.

    Not thread-safe; its owner calls it under one lock.

    Args:
        intake: holds what has arrived, and tells the owners the outcomes.
        lease: seconds for which a sample is leased.
        max_failures: consumer failures after which a sample goes back to its owner even untouched.
        on_outcome: told of each delivery that was ``"acked"`` or ``"dropped"`` here, or ``"returned"`` to its owner.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        intake: DraftIntake,
        *,
        lease: float,
        max_failures: int,
        on_outcome: Callable[[Delivery, str], None],
        clock: Callable[[], float],
    ) -> None:
        self.table = LeaseTable(visibility_timeout=VisibilityTimeout(lease), max_redeliveries=None, clock=clock)
        self.handed = 0  # samples handed out, less those that came back unused
        self._intake = intake
        self._max_failures = max_failures
        self._on_outcome = on_outcome
        self._failures_here: Counter[tuple[str, str]] = Counter()

    # -- what the intake does ----------------------------------------------------------------------------------------

    def put(self, delivery: Delivery) -> None:
        """The delivery is here and it is its turn."""
        self.table.put(delivery.ref)

    def forget(self, delivery: Delivery) -> None:
        """The delivery has its outcome."""
        self._failures_here.pop(delivery.key, None)

    # -- what a consumer does ----------------------------------------------------------------------------------------

    def acquire(self, owner: str) -> Lease | None:
        """Lease the next sample; None when none waits."""
        lease = self.table.acquire(owner)
        if lease is not None:
            self.handed += 1
        return lease

    def open(self, ref: SampleRef) -> Delivery:
        """The delivery behind a leased ref, whose bytes the consumer gets: from now on they may have changed.

        Raises:
            SampleNotFoundError: it is not here, or not any more.
            SpecMismatchError: the ref describes something else than what came.
        """
        delivery = self._intake.held.get((ref.store_uri, ref.sample_id))
        if delivery is None:
            raise SampleNotFoundError(
                f"sample {ref.sample_id!r} of {ref.store_uri!r} is not here: it was acked, handed back, or never "
                "leased on this rank"
            )
        if delivery.ref.feature_specs != ref.feature_specs or delivery.ref.stream != ref.stream:
            raise SpecMismatchError(f"sample {ref.sample_id!r}: the ref's specs are not those of what was delivered")
        delivery.touched = True
        return delivery

    def ack(self, lease: Lease) -> bool:
        """The sample was consumed; False when the lease is not live."""
        if not self.table.ack(lease):
            return False
        delivery = self._intake.settle(_key(lease.ref), "ack")
        if delivery is not None:
            self._on_outcome(delivery, "acked")
        return True

    def fail(self, lease: Lease, reason: str, *, final: bool = False) -> FailOutcome:
        """Return a sample: locally while nobody touched its bytes, else to its owner, which delivers it anew.

        ``final``: it must not come again, whatever its budget.
        """
        outcome = self.table.fail(lease, reason)
        if outcome is not FailOutcome.STALE:
            self._after_fail(lease.ref, reason, final=final)
        return outcome

    def renew(self, key: tuple[str, str]) -> None:
        """The consumer of a leased sample is at work on it."""
        for lease in [lease for lease in self.table.leases() if _key(lease.ref) == key]:
            self.table.extend(lease)

    def hand_back(self, lease: Lease) -> bool:
        """Give a lease back without counting a delivery; False when it is not live."""
        if not self.table.hand_back(lease):
            return False
        delivery = self._intake.held.get(_key(lease.ref))
        if delivery is not None and delivery.touched:
            self._return(delivery, "back", 0, "handed back")
        else:
            self.handed -= 1
        return True

    def expire(self) -> int:
        """Take the samples of expired leases back; returns how many there were."""
        expired = self.table.expire()
        for lease in expired:
            logger.warning("the lease of sample %s held by %s expired", lease.ref.sample_id, lease.owner)
            self._after_fail(lease.ref, "lease expired")
        return len(expired)

    def _after_fail(self, ref: SampleRef, reason: str, *, final: bool = False) -> None:
        delivery = self._intake.held.get(_key(ref))
        if delivery is None:
            return
        self._failures_here[delivery.key] += 1
        failures = self._max_failures + 1 if final else self._failures_here[delivery.key]
        if delivery.touched or delivery.failures + failures > self._max_failures:
            self._return(delivery, "fail", failures, reason)

    def _return(self, delivery: Delivery, outcome: str, failures: int, reason: str) -> None:
        self.table.remove(delivery.key)
        self._intake.settle(delivery.key, outcome, failures, reason)
        self._on_outcome(delivery, "returned")

    # -- the end -----------------------------------------------------------------------------------------------------

    def clear_pending(self, *, drop: bool) -> None:
        """Nothing more is leased: what waits is dropped, or goes back to its owner."""
        for ref in list(self.table.pending_refs()):
            self.table.remove(_key(ref))
            delivery = self._intake.settle(_key(ref), "drop" if drop else "back", 0, "left over at the end")
            if delivery is not None:
                self._on_outcome(delivery, "dropped" if drop else "returned")

    def return_all(self) -> None:
        """Give back what is leased and what waits: the rank is leaving."""
        for lease in list(self.table.leases()):
            self.hand_back(lease)
        for delivery in list(self._intake.held.values()):
            self._return(delivery, "back", 0, "the draft left")


def _key(ref: SampleRef) -> tuple[str, str]:
    return ref.store_uri, ref.sample_id
