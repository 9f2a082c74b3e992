"""The documented queue interface on a draft rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from nccl_stream.errors import MisuseError
from nccl_stream.leases import Lease
from nccl_stream.ranks.draft_side import DraftSide
from nccl_stream.refs import SampleRef

__all__ = ["DraftQueue", "PaddingLease"]

MAX_WAIT_S = 0.5


@dataclass(frozen=True)
class PaddingLease(Lease):
    """A batch of no samples, so that this rank takes part in a round it has none for.

    ``ref`` is a template whose specs the padding follows; it can only be acked.
    """

    is_padding: bool = True


class DraftQueue:
    """Leases of the samples that have arrived on this rank. Every method may be called from any thread.

    Args:
        side: the draft's end of the stream.
    """

    def __init__(self, side: DraftSide) -> None:
        self._side = side
        self._closed = False

    # -- leasing -----------------------------------------------------------------------------------------------------

    def acquire(self, poll_interval: float = 0.05, *, owner: str | None = None) -> Lease | None:
        """Lease the next sample, waiting up to ``poll_interval`` seconds for one; wakes as soon as there is one.

        None means that nothing came: stop if :attr:`is_drained`, otherwise call again.

        Raises:
            ProducerFailedError: the target side failed; everything agreed on before has been handed out.
            PeerLostError: no owner remains, and some died (:class:`SamplesLostError` when ids are known).
            SlotsHeldError: (``MemoryError``) user references have kept all receive memory for too long.
            FencedError: this rank was cut off, or declared dead.
            ControlStoreError: the control store does not answer any more.
        """
        if not poll_interval >= 0:
            raise MisuseError(f"poll_interval must be a non-negative number of seconds, got {poll_interval!r}")
        side = self._side
        name = threading.current_thread().name if owner is None else owner
        started = time.monotonic()
        deadline = started + poll_interval
        with side.cond:
            try:
                while True:
                    side.raise_if_fatal()
                    lease = None if self._closed else side.try_acquire(name)
                    if lease is None and not self._closed and side.needs_padding:
                        lease = self._padding(name)
                    if lease is not None:
                        return lease
                    if self._closed or self._has_finished():
                        return None
                    side.check_held()
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return None
                    side.wait(min(remaining, MAX_WAIT_S))
            finally:
                side.waited_s += time.monotonic() - started

    def acquire_many(self, count: int, poll_interval: float = 0.05, *, owner: str | None = None) -> list[Lease]:
        """Lease up to ``count`` samples; waits, as :meth:`acquire` does, until there is at least one."""
        if type(count) is not int or count <= 0:
            raise MisuseError(f"count must be a positive int, got {count!r}")
        leases: list[Lease] = []
        while len(leases) < count:
            lease = self.acquire(poll_interval if not leases else 0.0, owner=owner)
            if lease is None:
                break
            leases.append(lease)
        return leases

    def _padding(self, owner: str) -> PaddingLease | None:
        template = self._side.pad()
        if template is None:
            return None
        timeout = self._side.leases.table.visibility_timeout
        return PaddingLease(template, time.monotonic() + timeout.seconds, timeout, owner=owner)

    def _has_finished(self) -> bool:
        """Whether the end has come; raises when it is not a clean one."""
        if not self._side.finished:
            return False
        self._side.clean_up()
        error = self._side.end_error()
        if error is not None:
            raise error
        return True

    def ack(self, lease: Lease) -> None:
        """The sample was consumed. A lease that is not live changes nothing. Does not touch the store."""
        self.ack_many((lease,))

    def ack_many(self, leases: Iterable[Lease]) -> int:
        """Ack several leases; returns how many were live."""
        return sum(self._side.ack(lease) for lease in leases if not isinstance(lease, PaddingLease))

    def fail(self, lease: Lease, *, reason: str | BaseException | None = None, final: bool = False) -> None:
        """The sample could not be consumed: it comes again, byte-equal, until its retry budget is spent.

        A lease that is not live changes nothing. With ``final`` the sample does not come again, whatever its budget. A
        streamed sample of which pieces were released comes again only if it is retained, and is lost otherwise.
        """
        if isinstance(lease, PaddingLease):
            return
        if isinstance(reason, BaseException):
            reason = f"{type(reason).__name__}: {reason}"
        self._side.fail(lease, reason or "failed by its consumer", final=final)

    def hand_back(self, lease: Lease) -> bool:
        """Return a sample without counting a delivery; whether the lease was live."""
        return not isinstance(lease, PaddingLease) and self._side.hand_back(lease)

    def extend(self, lease: Lease, seconds: float | None = None) -> bool:
        """Let a lease live for ``seconds`` from now (default: the configured lease); whether it was live."""
        if isinstance(lease, PaddingLease):
            return True
        with self._side.cond:
            return self._side.leases.table.extend(lease, seconds)

    def reclaim_expired(self) -> int:
        """Return the samples of expired leases; the stream also does it by itself."""
        return self._side.reclaim_expired()

    # -- what a consumer must know to form batches -------------------------------------------------------------------

    @property
    def samples_per_round(self) -> int:
        """Samples that a step of this rank consumes; the memory is sized for them."""
        return self._side.config.samples_per_round

    @property
    def is_aligned(self) -> bool:
        """Whether the draft ranks take every round together."""
        return self._side.config.end != "ragged"

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether no more leases will be handed out: the end has come, or :meth:`close` was called here."""
        with self._side.cond:
            return self._closed or self._side.finished

    @property
    def is_drained(self) -> bool:
        """As :attr:`is_closed`: both are judged together with emptiness here."""
        return self.is_closed

    def pending_count(self) -> int:
        """Samples that have arrived and wait."""
        with self._side.cond:
            return self._side.leases.table.pending_count

    def outstanding_count(self) -> int:
        """Samples that are leased."""
        with self._side.cond:
            return self._side.leases.table.leased_count

    def close(self, *, error: BaseException | None = None) -> None:
        """Take no more samples on this rank: what is not leased goes back; nothing ends for the others. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._side.leave_rounds()

    def put(self, ref: SampleRef) -> None:
        """Refused: samples are put on target ranks."""
        raise MisuseError("put is for target ranks; this is a draft rank, which consumes")

    def put_blocks_until_below(self, ref: SampleRef, poll_interval: float = 0.05, abort_when: object = None) -> None:
        """Refused, as :meth:`put`."""
        raise MisuseError("put is for target ranks; this is a draft rank, which consumes")
