"""``connect``: the one call that wires a process into a stream, and the :class:`Stream` it returns."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from nccl_stream.async_pipeline import PromptBatch
from nccl_stream.config import APART_CUDA_LINKS, StreamConfig
from nccl_stream.coordination.kv import ControlStore, clone_store
from nccl_stream.coordination.membership import Identity, RunShape, Timing
from nccl_stream.coordination.messages import StopRequest
from nccl_stream.coordination.node import Node
from nccl_stream.errors import (
    ClosedError,
    ConfigError,
    ControlStoreError,
    LinkTimeoutError,
    MisuseError,
    NcclStreamError,
    PeerLostError,
    PeerTimeoutError,
)
from nccl_stream.prompts import shard_prompts
from nccl_stream.ranks.cohort import form_cohort
from nccl_stream.ranks.draft_queue import DraftQueue
from nccl_stream.ranks.draft_side import DraftSide
from nccl_stream.ranks.links import Links
from nccl_stream.ranks.place import Place, Role, find_place, pick_device, reach_store
from nccl_stream.ranks.role_group import check_backend, make_role_group
from nccl_stream.ranks.statistics import StreamStatistics, read_statistics
from nccl_stream.ranks.target_side import TargetQueue, TargetSide
from nccl_stream.sharing import SharedTensors
from nccl_stream.stores.nccl import NcclFeatureStore
from nccl_stream.stores.owned_pieces import OwnedPieces
from nccl_stream.stores.preallocated import make_sample_memory
from nccl_stream.stores.residency import Residency
from nccl_stream.stores.staged import OwnedBytes
from nccl_stream.transport.arena import Arena
from nccl_stream.transport.engine import TransferEngine

__all__ = ["Stream", "connect"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

LINK_ATTEMPT_S = 30.0  # one attempt at building a link; several fit into connect_timeout
CLOSE_S = 5.0
STATISTICS_TIMEOUT_S = 10.0  # twice what a connection takes when an answer of the name server is lost


def connect(
    store: str | Store | None = None,
    *,
    run_id: str,
    role: Role | None = None,
    rank: int | None = None,
    num_targets: int | None = None,
    num_drafts: int | None = None,
    target_ranks: Sequence[int] | None = None,
    config: StreamConfig | None = None,
) -> Stream:
    """Join a stream; returns once all ranks are there and their links are up.

    *One launch* (no ``store``, under ``torchrun``): the first ``num_targets`` ranks are targets, or those of
    ``target_ranks``; all others are drafts. *Two launches* (``store="tcp://host:port"`` kept by ``nccl-stream store``,
    or a ``TCPStore`` object): give ``role`` and both counts; ``rank`` within the role comes from torchrun or is given.

    Blocks up to ``config.connect_timeout``.

    Args:
        store: where to meet; None for torchrun's own store.
        run_id: name of the run; the same on all ranks.
        role: ``"target"`` or ``"draft"``, in two launches.
        rank: rank within the role, in two launches without torchrun.
        num_targets: target ranks of the run.
        num_drafts: draft ranks of the run; in one launch what is left.
        target_ranks: global ranks that are targets, in one launch.
        config: the same on all ranks except for what is a rank's own (memory sizes, device index, patience).

    Raises:
        ConfigError: (``ValueError``) roles, counts or sizes that cannot work, or that ranks disagree on.
        MembershipError: a rank is taken, or another rank could not join.
        PeerTimeoutError: ranks are missing at the deadline; the message names them.
        LinkTimeoutError: a peer did not open its side of a link in time; the message names it.
        VersionMismatchError: two ends run versions of this package, torch or NCCL that cannot talk to each other.
        ControlStoreError: the store cannot be reached, or does not answer.
    """
    config = StreamConfig() if config is None else config
    if not isinstance(config, StreamConfig):
        raise ConfigError(f"config must be a StreamConfig, got {type(config).__name__}")
    if not isinstance(run_id, str) or not run_id or len(run_id) > 200 or "/" in run_id:
        raise ConfigError(f"run_id must be a non-empty str of at most 200 characters without '/', got {run_id!r}")
    deadline = time.monotonic() + config.connect_timeout
    place = find_place(store, role, rank, num_targets, num_drafts, target_ranks)
    config.check_run(num_targets=place.num_targets, num_drafts=place.num_drafts)
    client = _bounded(
        lambda: reach_store(store, config.connect_timeout), config.connect_timeout + 5.0, "reaching the store"
    )
    stream = Stream(client, place, run_id, config)
    try:
        _bounded(lambda: stream._join(deadline), config.connect_timeout + 5.0, "joining the run")
    except BaseException as exc:
        stream._abandon(exc)
        raise
    return stream


def _bounded(call: Callable[[], T], timeout: float, what: str) -> T:
    """Run ``call`` on a helper thread: a frozen store must not hang the caller, nor keep signals from it."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as exc:  # noqa: BLE001 - raised again below, in the caller's thread
            failure.append(exc)

    thread = threading.Thread(target=run, name="nccl-stream-connect", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.2)
    if failure:
        raise failure[0]
    if not outcome:
        raise ControlStoreError(f"{what} took longer than {timeout:.0f} s: the control store does not answer")
    return outcome[0]


class Stream:
    """One process's part of a stream. Made by :func:`connect`; a context manager.

    Leaving the context on a target waits until every sample has its outcome, on a draft hands back what it holds; after
    an exception both say goodbye at once.

    Attributes:
        run_id: name of the run.
        role: ``"target"`` or ``"draft"``.
        role_rank: rank within the role.
        role_world_size: ranks of this role.
        store: the :class:`NcclFeatureStore` of this rank.
        queue: puts on a target, leases on a draft; the documented queue interface on both.
    """

    def __init__(self, client: Store, place: Place, run_id: str, config: StreamConfig) -> None:
        self.run_id = run_id
        self.config = config
        self.role: Role = place.role
        self.role_rank = place.rank
        self.role_world_size = place.num_targets if place.role == "target" else place.num_drafts
        self.device = pick_device(config)
        links = config.most_links(num_targets=place.num_targets, num_drafts=place.num_drafts)
        if self.device.type == "cuda" and links > APART_CUDA_LINKS:
            logger.warning(
                "%d links on one GPU share CUDA streams and can wait for each other: set StreamConfig(fanout=...) so "
                "that no rank has more than %d",
                links,
                APART_CUDA_LINKS,
            )
        self._place = place
        self._client = client
        self._closed = False
        self._statistics_lock = threading.Lock()
        self._documents: ControlStore | None = None
        self._last_statistics: StreamStatistics | None = None
        self._group: Any = None
        self._owns_default_group = False
        self._group_key = ""
        self._previous_handlers: dict[int, Any] = {}
        restart = config.draft_restart_timeout
        restart = (0.0 if place.one_launch else 300.0) if restart is None else restart
        shape = RunShape(
            run_id,
            place.scope,
            place.num_targets,
            place.num_drafts,
            place.one_launch,
            {**config.shared(), "device": self.device.type},
        )
        timing = Timing(config.heartbeat, config.death_timeout, 0.6 * config.death_timeout, config.connect_timeout)
        versions = {"torch": str(torch.__version__)}
        identity = Identity(
            place.role, place.rank, socket.gethostname()[:128] or "?", os.getpid(), self.device.type, versions
        )
        self._side: TargetSide | DraftSide
        if place.role == "target":
            self._side = TargetSide(config, place.rank, place.num_targets, place.num_drafts, restart_timeout=restart)
        else:
            self._side = DraftSide(config, place.rank, place.num_targets, place.num_drafts, restart_timeout=restart)
        self._node = Node(client, shape, identity, timing, self._side)
        self._memory = make_sample_memory(config, self.device, place.num_drafts) if place.role == "target" else None
        engine = TransferEngine(
            self.device, depth=config.depth, issue=config.issue, timeout=config.transfer_timeout, name="nccl-stream"
        )
        self._engine = engine
        if config.issue == "pump":
            self._side.pump = engine.pump
        self._links = Links(
            self._node,
            engine,
            self._side,
            side=0 if place.role == "target" else 1,
            device=self.device,
            open_timeout=min(LINK_ATTEMPT_S, config.connect_timeout),
            wrap=lambda link: link if self._memory is None else self._memory.reachable_by(link),
        )
        self.store = self._make_store(self._side)
        self.queue: TargetQueue | DraftQueue
        if isinstance(self._side, TargetSide):
            self._side.wire(self._node, self._links, self.store)
            self.queue = TargetQueue(self._side)
        else:
            self._side.wire(self._node, self._links, self.store, self._arena)
            self.queue = DraftQueue(self._side)

    def _make_store(self, side: TargetSide | DraftSide) -> NcclFeatureStore:
        config = self.config
        uri = f"nccl://{self.run_id}/{self._node.inc}"
        if isinstance(side, DraftSide):
            self._arena = Arena(config.arena_bytes, self.device, poison=config.poison, on_free=side.memory_freed)
            return NcclFeatureStore(
                uri,
                self.device,
                max_sample_bytes=config.max_sample_bytes,
                chunk_bytes=config.chunk_bytes,
                arena=self._arena,
                inbound=side,
                on_dropped=side.memory_freed,
            )
        assert self._memory is not None
        window = self._place.num_drafts * config.samples_per_round
        residency: Residency[OwnedBytes | OwnedPieces] = Residency(
            # A draft that lacks samples may always be given a round, whatever the others hold: see room_for().
            max_samples=None if config.max_samples is None else config.max_samples + window,
            max_bytes=config.resident_cap(self._place.num_drafts),
            high_watermark_bytes=config.high_watermark,
            low_watermark_bytes=config.low_watermark,
            name="NcclFeatureStore",
            on_free=self._memory.free,
        )
        return NcclFeatureStore(
            uri,
            self.device,
            max_sample_bytes=config.max_sample_bytes,
            chunk_bytes=config.chunk_bytes,
            residency=residency,
            memory=self._memory,
            soft_cap_bytes=config.max_bytes,
            soft_cap_samples=config.max_samples,
            starving=side.starving,
            check_alive=side.raise_if_fatal,
            pause=side.pause,
            check_finite=config.check_finite,
            outbound=side.streams,
            checksums=config.verify_checksums,
        )

    # -- joining -----------------------------------------------------------------------------------------------------

    def _join(self, deadline: float) -> None:
        self._node.join()
        self._shared = SharedTensors(
            self._client,
            self._node.prefix,
            owner=self._node.inc,
            label=f"{self.role} rank {self.role_rank}",
            timeout=self.config.connect_timeout,
            max_bytes=self.config.max_shared_bytes,
        )
        self._node.wait_complete(deadline, is_served=self._side.is_served)
        if isinstance(self._side, DraftSide) and self.config.end != "ragged":
            cohort, members = form_cohort(self._node, self.role_rank, self._place.num_drafts, deadline)
            self._side.start_rounds(cohort, members)
            self._group_key = cohort
        self._wait_for_links(deadline)

    def _wait_for_links(self, deadline: float) -> None:
        while True:
            self._side.raise_if_fatal()
            missing = self._links.missing()
            if not missing:
                return
            if time.monotonic() > deadline:
                names = ", ".join(member.label for member in missing[:8])
                raise LinkTimeoutError(
                    f"no link to {names} within {self.config.connect_timeout:.0f} s: is it reachable, and has it "
                    "called connect()? Raise connect_timeout if it needs longer."
                )
            with self._side.cond:
                self._side.cond.wait(0.05)

    def _abandon(self, exc: BaseException) -> None:
        """connect() failed: leave nothing behind."""
        self._node.leave("failed", f"{type(exc).__name__}: {exc}", timeout=0.5)
        self._shut_down()

    # -- using -------------------------------------------------------------------------------------------------------

    def process_group(self, backend: str | None = None, timeout: float | None = None) -> dist.ProcessGroup:
        """A process group of the ranks of this role alone, for DDP and FSDP. Made once; all ranks of the role call it.

        Without a default process group in this process, it becomes the default group and is destroyed when the stream
        closes. Where there is one already, it is used as it is if it has the right ranks, else a new group is made
        from it.

        Args:
            backend: default: NCCL on a GPU, gloo on the CPU; where there is a default group, that group's.
            timeout: of its collectives and of making it, in seconds, where it is made here; default: torch's own.

        Raises:
            ConfigError: the process's default group does not contain the ranks of this role, or the group that there
                is has another backend.
            PeerTimeoutError: ranks of this role that are gone did not come back within ``connect_timeout``.
        """
        self._check_open("process_group")
        if self._group is not None:
            check_backend(self._group, backend, self.device.type)
            return self._group  # type: ignore[no-any-return]

        def make_store() -> Store:
            self._group_key = self._group_key or self._wait_for_role()
            prefix = f"{self._node.prefix}/group/{self.role}/{self._group_key}"
            return PrefixStore(prefix, clone_store(self._client))

        self._group, self._owns_default_group = make_role_group(
            self._place, make_store, self.device.type, backend, timeout
        )
        return self._group  # type: ignore[no-any-return]

    def _wait_for_role(self) -> str:
        """Block until every rank of this role is there; returns what tells their group from an earlier one."""
        deadline = time.monotonic() + self.config.connect_timeout
        while len(members := self._node.alive(self.role)) < self.role_world_size:
            self._side.raise_if_fatal()
            if time.monotonic() > deadline:
                ranks = set(range(self.role_world_size)) - {member.rank for member in members}
                raise PeerTimeoutError(
                    f"process_group() needs every {self.role} rank, and {sorted(ranks)[:16]} did not come back within "
                    f"{self.config.connect_timeout:.0f} s"
                )
            with self._side.cond:
                self._side.cond.wait(0.05)
        return "-".join(member.inc for member in members)

    def prompts(self, dataset: Any, epochs: int = 1, seed: int = 0) -> Iterator[PromptBatch]:
        """This target's share of a map-style dataset, for ``AsyncFeaturePipeline``.

        Epochs are reshuffled with ``(seed, epoch)``; prompt k of the global order goes to target ``k mod targets``. Ids
        come from (epoch, index), and the order is the one that static assignment follows.

        Args:
            dataset: ``len()`` and ``[index]``; an item is a mapping or tuple of ``input_ids`` and optionally
                ``attention_mask``, ``loss_mask`` (ones if absent), each ``[seq]`` or ``[1, seq]``; with packing also
                ``position_ids``, ``seq_lens``, ``doc_remaining``.
            epochs: passes over the dataset.
            seed: of the shuffles; the same on all targets.

        Raises:
            MisuseError: this is a draft rank, or an item has another form.
        """
        self._check_open("prompts")
        if not isinstance(self._side, TargetSide):
            raise MisuseError("prompts() is for target ranks; this is a draft rank")
        return shard_prompts(
            dataset,
            epochs=epochs,
            seed=seed,
            rank=self.role_rank,
            world_size=self.role_world_size,
            register=self._side.register_order,
        )

    def share(self, name: str, tensors: Mapping[str, torch.Tensor], timeout: float | None = None) -> str:
        """Give every draft a few tensors, under a name: the target's embedding or head, the draft vocabulary.

        For target ranks. The tensors go through the control store, whose host keeps them in memory until the run ends:
        at most ``StreamConfig.max_shared_bytes`` from one target in all. Targets that share the same tensors under one
        name cost nothing more.

        Args:
            name: letters, digits, ``_``, ``-``, ``.``.
            tensors: dense tensors; copied before this returns.
            timeout: how long the store may take, in seconds; default: ``connect_timeout``.

        Returns:
            The SHA-256 of names, dtypes, shapes and bytes, in hex.

        Raises:
            MisuseError: (``ValueError``) a bad name, values that are not tensors, or this is a draft rank.
            CapacityError: (``MemoryError``) more than the limit.
            ConfigError: (``ValueError``) other tensors have this name, from this target or another one.
            ControlStoreError: the store does not answer.
        """
        self._check_open("share")
        if not isinstance(self._side, TargetSide):
            raise MisuseError("share() is for target ranks; a draft rank gets what they share with shared()")
        limit = self.config.connect_timeout if timeout is None else timeout
        return _bounded(lambda: self._shared.publish(name, tensors), limit, f"sharing {name!r}")

    def shared(
        self, name: str, timeout: float | None = None, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor]:
        """Wait for what a target shares as ``name`` and return it, its digest verified. For draft ranks.

        Args:
            name: as in :meth:`share`.
            timeout: longest wait, in seconds; default: ``connect_timeout``. Loading a target may take longer.
            device: where the tensors shall be; default: the stream's device.

        Returns:
            Tensors of this process's own, a new copy per call.

        Raises:
            MisuseError: (``ValueError``) a bad name, or this is a target rank.
            PeerTimeoutError: nobody shared it in time; names the targets.
            PeerLostError: no target is left that could.
            ChecksumError: what came is not what was shared.
            WireFormatError: what stands in the store is malformed.
            ControlStoreError: the store does not answer.
        """
        self._check_open("shared")
        if not isinstance(self._side, DraftSide):
            raise MisuseError("shared() is for draft ranks; a target rank has what it shares")
        limit = self.config.connect_timeout if timeout is None else timeout
        where = self.device if device is None else device
        return _bounded(
            lambda: self._shared.fetch(name, limit, lambda: self._live_targets(name), where),
            limit + self.config.connect_timeout,
            f"waiting for the shared {name!r}",
        )

    def _live_targets(self, name: str) -> str:
        self._side.raise_if_fatal()
        targets = self._node.alive("target")
        if not targets:
            raise PeerLostError(f"every target is gone, and none has shared {name!r}")
        return ", ".join(member.label for member in targets[:8])

    def pump(self) -> bool:
        """Issue and complete NCCL transfers from this thread, without blocking; returns whether anything moved.

        With ``issue="pump"``, call it at step boundaries, so that transfers go on while this rank computes. Whoever
        waits in the package (for a sample, a piece, room, outcomes) does the same meanwhile.

        Raises:
            MisuseError: (``ValueError``) the stream has a thread for that: ``issue="thread"``.
        """
        return self._engine.pump()

    def statistics(self) -> StreamStatistics:
        """Books and rates of the whole run as of the last heartbeats, and this rank's own. Changes nothing.

        What other ranks did since their last heartbeat is not in it: a draft that wants the final books waits for the
        targets first, with :meth:`wait_ended`. After :meth:`close` the store is asked as before; when it is gone, the
        answer is what it said as this rank left, or only this rank's own books if it was gone by then.

        Raises:
            ControlStoreError: the store does not answer, and the stream is not closed.
        """
        try:
            found = self._read_statistics(STATISTICS_TIMEOUT_S)
        except ControlStoreError:
            if not self._closed:
                raise
            if self._last_statistics is None:
                return read_statistics(None, self._side)
            return replace(self._last_statistics, local=self._side.status())
        if self._closed:
            self._last_statistics = found
        return found

    def _read_statistics(self, timeout: float) -> StreamStatistics:
        def read() -> StreamStatistics:
            # One client for all calls: see read_statistics. It serves one caller at a time.
            with self._statistics_lock:
                if self._documents is None:
                    self._documents = self._node.documents()
                return read_statistics(self._node, self._side, self._documents)

        return _bounded(read, timeout, "reading the statistics")

    def _keep_statistics(self) -> None:
        """This rank leaves, and the store may be gone when somebody asks for its books."""
        try:
            self._side.raise_if_fatal()
            self._last_statistics = self._read_statistics(CLOSE_S)
        except NcclStreamError as exc:
            logger.debug("%s: leaves without a last look at the books: %s", self._node.inc, exc)

    def on_lost(self, callback: Callable[[tuple[str, ...]], None]) -> None:
        """Call ``callback`` with the ids of samples that are lost, to be produced again.

        It is called on a thread of its own, where it may block: to produce them there and then, for example. One call
        follows another. :meth:`close` waits a few seconds for the calls that are due.

        On a draft rank: those that died with their owner, before this call too. On a target rank: its streamed samples
        that broke off, or whose reader died, stopped or failed after it had given pieces back, and that were not
        retained.
        """
        self._side.lost_reports.tell(callback)

    def dead_letters(self) -> list[Any]:
        """Samples of this target that were failed for good or too often; empty on a draft.

        Their memory was freed, so they cannot be redriven: produce them anew, under the same ids if you like.
        """
        return self._side.dead_letters() if isinstance(self._side, TargetSide) else []

    def request_stop(self, reason: str = "asked to stop") -> None:
        """Stop all ranks at the next agreed round. Prefetched samples go back without counting. Does not wait."""
        with self._side.cond:
            self._side.stop(reason)
        self._side.tell_all(StopRequest(reason[:1000]))
        self._node.wake()

    def handle_signals(self, signals: Sequence[int] = (signal.SIGTERM,)) -> None:
        """Turn signals into :meth:`request_stop`, then call whoever handled them before. Main thread only; opt-in."""

        def handler(number: int, frame: FrameType | None) -> None:
            threading.Thread(
                target=self.request_stop, args=(f"signal {number} on {self.role} rank {self.role_rank}",), daemon=True
            ).start()
            previous = self._previous_handlers.get(number)
            if callable(previous):
                previous(number, frame)

        for number in signals:
            self._previous_handlers[number] = signal.signal(number, handler)

    def wait_ended(self, timeout: float) -> bool:
        """Block until every target has left or died, at most ``timeout`` seconds; then the books are final."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._side.raise_if_fatal()
            if not self._node.alive("target"):
                return True
            with self._side.cond:
                self._side.wait(0.05)
        return not self._node.alive("target")

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation}: the stream is closed")

    # -- leaving -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave in good order: a target first waits until every sample has its outcome. Idempotent.

        Then blocks until every peer has confirmed what it was told, up to ``death_timeout``. Where the store lives in
        this process (rank 0 of one launch without torchrun's agent), it then waits until all others have left too.

        Raises:
            NcclStreamError: what ended the stream meanwhile (store lost, fenced, ...), unless every peer that lives had
                confirmed everything by then: an ack that nobody confirmed may not count.
        """
        if self._closed:
            return
        try:
            if isinstance(self._side, TargetSide):
                self.queue.close()
                self._side.wait_settled()
            else:
                self.queue.close()
                self._side.return_leases()
        except BaseException as exc:
            self._leave("failed", exc)
            raise
        if not self._leave("left", None):
            self._side.raise_if_fatal()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        elif not self._closed:
            if isinstance(self._side, TargetSide):
                self._side.close_queue(exc)
            else:
                self.queue.close()
                self._side.return_leases()
            self._leave("failed", exc)

    def _leave(self, kind: str, exc: BaseException | None) -> bool:
        """Go; returns whether every peer has confirmed what it was told."""
        keeps_store = exc is None and self._place.hosts_store
        try:
            self._side.log_leftovers()
            if not keeps_store:
                self._keep_statistics()  # not later: who keeps the store goes when we are gone
            # A peer that does not confirm is slow, and its samples would come twice if we went; or dead, and soon
            # buried.
            patience = self.config.death_timeout if exc is None else CLOSE_S
            reason = "" if exc is None else f"{type(exc).__name__}: {exc}"
            confirmed = self._node.leave(kind, reason, timeout=patience)
            if keeps_store:
                # Without torchrun's agent the first rank keeps the store, and the others may go on for long.
                self._node.wait_alone()
                self._keep_statistics()
        finally:
            self._shut_down()
        return confirmed

    def _shut_down(self) -> None:
        if self._closed:
            return
        self._closed = True
        for number, previous in self._previous_handlers.items():
            signal.signal(number, previous)
        self._previous_handlers.clear()
        if self._owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        left = self._links.close(CLOSE_S)
        if isinstance(self._side, DraftSide):
            left += self._side.close_janitor(1.0)
        left += self._node.close(CLOSE_S)
        self.store.close()
        left += self._side.lost_reports.close(CLOSE_S)  # a callback that waits for the stream has an answer by now
        if self._memory is not None and not self._memory.close(CLOSE_S):
            left.append("copies to or from the GPU")
        if left:
            logger.error("threads that could not be joined are left behind: %s", ", ".join(left))
