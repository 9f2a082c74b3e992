"""How the pipeline talks to queues: our extensions where a queue has them, the documented methods alone where not."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, Protocol

from nccl_stream.queue import Lease
from nccl_stream.refs import SampleRef

__all__ = [
    "RefQueue",
    "accepts_keyword",
    "ack",
    "close_queue",
    "fail",
    "fail_for_good",
    "hand_back",
    "is_drained",
    "producers_wait",
]

logger = logging.getLogger(__name__)


class RefQueue(Protocol):
    """What pipeline and loader need of a queue: the documented methods. Either end of a stream is one."""

    @property
    def is_closed(self) -> bool: ...

    def put_blocks_until_below(
        self, ref: SampleRef, poll_interval: float = 0.05, abort_when: Callable[[], bool] | None = None
    ) -> None: ...

    def acquire(self, poll_interval: float = 0.05) -> Lease | None: ...

    def ack(self, lease: Lease) -> None: ...

    def fail(self, lease: Lease) -> None: ...

    def pending_count(self) -> int: ...

    def outstanding_count(self) -> int: ...

    def close(self) -> None: ...


def accepts_keyword(function: Callable[..., object], name: str) -> bool:
    """Whether ``function`` can be called with the keyword argument ``name``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def ack(queue: Any, lease: Lease) -> bool:
    """Ack ``lease``; False when the queue says that it was not live any more."""
    if hasattr(queue, "ack_many"):
        return bool(queue.ack_many((lease,)))
    queue.ack(lease)
    return True


def fail(queue: Any, lease: Lease, reason: BaseException) -> None:
    """Fail ``lease``, with the reason where the queue keeps one."""
    if accepts_keyword(queue.fail, "reason"):
        queue.fail(lease, reason=reason)
    else:
        queue.fail(lease)


def fail_for_good(queue: Any, lease: Lease, reason: BaseException) -> None:
    """Fail ``lease`` so that it does not come again; ack it where the queue has no other word for that."""
    if accepts_keyword(queue.fail, "final"):
        queue.fail(lease, reason=reason, final=True)
    else:
        logger.warning("sample %s is dropped: %s: %s", lease.ref.sample_id, type(reason).__name__, reason)
        queue.ack(lease)


def hand_back(queue: Any, lease: Lease) -> None:
    """Return ``lease`` without counting a delivery, where the queue can; fail it elsewhere."""
    if hasattr(queue, "hand_back"):
        queue.hand_back(lease)
    else:
        queue.fail(lease)


def is_drained(queue: Any) -> bool:
    """Whether nothing more can come: closed, and nothing pending or leased."""
    if hasattr(queue, "is_drained"):
        return bool(queue.is_drained)
    # In this order: once closed, refs only come back from leases, and leases are counted before pending refs.
    return bool(queue.is_closed and queue.outstanding_count() == 0 and queue.pending_count() == 0)


def producers_wait(queue: Any, store: Any) -> bool:
    """Whether nothing is pending, and nothing comes before a sample is released."""
    if hasattr(queue, "producers_wait"):
        return bool(queue.producers_wait)
    # Such a queue may hold producers back at the high watermark, whoever waits.
    return queue.pending_count() == 0 and bool(
        store.health().high_watermark_hit or (hasattr(store, "is_full") and store.is_full())
    )


def close_queue(queue: Any, error: BaseException | None) -> None:
    """Close ``queue``, with the producer's error where the queue passes one on to its consumers."""
    if error is not None and accepts_keyword(queue.close, "error"):
        queue.close(error=error)
    else:
        queue.close()
