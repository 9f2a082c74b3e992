"""A draft rank's receives of whole samples: into their slots, and a look at what arrived."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from nccl_stream.coordination.intake import Delivery, DraftIntake
from nccl_stream.device_staging import aside
from nccl_stream.errors import ChecksumError, WireFormatError
from nccl_stream.ranks.links import Links
from nccl_stream.ranks.side import Side
from nccl_stream.stores.nccl import NcclFeatureStore
from nccl_stream.stores.tensors import checksum_of
from nccl_stream.wire_header import check_header, make_header

__all__ = ["IncomingSamples"]

logger = logging.getLogger(__name__)


class IncomingSamples:
    """Between the state machine of deliveries, receive memory and links of one draft rank.

    Args:
        side: this rank's end of the stream.
        intake: its state machine.
        later: does a job soon, on another thread and without the lock.
        on_over: called with the lock of the side held when a delivery has arrived, or failed to.
    """

    def __init__(
        self,
        side: Side,
        intake: DraftIntake,
        *,
        later: Callable[[Callable[[], None]], None],
        on_over: Callable[[], None],
    ) -> None:
        self._side = side
        self._intake = intake
        self._later = later
        self._on_over = on_over
        self._store: NcclFeatureStore
        self._links: Links

    def wire(self, store: NcclFeatureStore, links: Links) -> None:
        """Second half of construction."""
        self._store, self._links = store, links

    def receive(self, delivery: Delivery) -> None:
        """Post the receive of a sample that its owner is about to send; the lock is held."""
        slot = delivery.slot
        layout = self._store.layout_of(delivery.ref.feature_specs)
        slot.begin_transfer()
        slot.wait_release(self._links.stream(delivery.owner, delivery.gen))
        if not self._links.recv(delivery.owner, delivery.gen, delivery, layout.wire_buffers(slot.buffer)):
            self._later(partial(self._refused, delivery))

    def _refused(self, delivery: Delivery) -> None:
        with self._side.cond:
            self._intake.link_down(delivery.owner, delivery.gen)
            self.transfer_over(delivery, ok=False)

    def transfer_done(self, delivery: Delivery) -> None:
        """A sample has arrived; the lock is not held."""
        layout = self._store.layout_of(delivery.ref.feature_specs)
        what = f"sample {delivery.sample_id!r}"
        expected = make_header(
            delivery.owner,
            delivery.sample_id,
            gen=delivery.gen,
            seq=delivery.seq,
            serial=delivery.serial,
            delivery=delivery.number,
        )
        fault = ""
        try:
            header = layout.read_header(delivery.slot.buffer)
            checksum = check_header(header, expected, what, checksummed=self._side.config.verify_checksums)
            if checksum is not None:
                self._check_bytes(delivery, checksum)
        except ChecksumError as exc:
            logger.error("%s: %s", self._side.node.inc, exc)
            fault = f"ChecksumError: {exc}"
        except (RuntimeError, WireFormatError) as exc:  # not only a LinkError: on a GPU the look may fail itself
            logger.error("%s: %s", self._side.node.inc, exc)
            self._links.break_link(delivery.owner, delivery.gen, str(exc))
            with self._side.cond:
                self.transfer_over(delivery, ok=False)
            return
        with self._side.cond:
            self.transfer_over(delivery, ok=True, fault=fault)

    def _check_bytes(self, delivery: Delivery, expected: int) -> None:
        views = self._store.layout_of(delivery.ref.feature_specs).views(delivery.slot.buffer)
        with aside(self._store.device):
            found = checksum_of(views.values())
        if found != expected:
            raise ChecksumError(
                f"sample {delivery.sample_id!r} of {delivery.owner}, delivery {delivery.number}: its owner computed "
                f"CRC-32C {expected:08x}, what arrived has {found:08x}. Its bytes were changed in the owner's memory "
                "(a donated tensor that was written to?) or on the way."
            )

    def transfer_over(self, delivery: Delivery, *, ok: bool, fault: str = "") -> None:
        """A receive has ended, well or not; the lock is held."""
        delivery.slot.end_transfer()
        last = delivery.failures >= self._side.config.max_failures
        self._intake.transfer_over(delivery, ok=ok, fault=fault, last=last)
        self._on_over()
