"""Feature store on a directory that several processes share: one safetensors file per sample, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping

import torch

from nccl_stream.errors import ClosedError, ConfigError, MisuseError, SampleNotFoundError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.store import FeatureStore, StoreHandle, StoreHealth
from nccl_stream.stores.directory import (
    FileKey,
    feature_key,
    open_sample,
    publish,
    remove,
    remove_exactly,
    sample_path,
)
from nccl_stream.stores.holds import Holds
from nccl_stream.stores.leftovers import Leftover, LeftoverScan, new_temporary_name, new_token, this_owner
from nccl_stream.stores.outstanding import Outstanding
from nccl_stream.stores.residency import Residency
from nccl_stream.stores.sample_file import read_header, read_sample, write_sample
from nccl_stream.stores.tensors import check_tensors

__all__ = ["Leftover", "SharedDirFeatureStore"]

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
SCAN_SHARE = 10
"""A directory scan by ``gc`` is skipped until this many times its last duration has passed: gc may be called often."""


class SharedDirFeatureStore(FeatureStore):
    """One ``<sample_id>.safetensors`` per sample in a directory that producers and consumers in any process share.

    A file appears whole (written aside, then given its name) and goes with the last release of the instance that got
    it. Caps, watermarks and :meth:`health` count the samples that *this* instance has put and nobody has released. A
    release by another process is noticed by looking for this instance's own files by name, in a thread that exists
    while there are any; the directory is never listed for it, and no lock that :meth:`health` takes is held during
    I/O. Ids must be unique within the directory: one that is taken is refused, also if it is taken at the same moment.
    A ref stands for the file that its put made; it never delivers or deletes another one that has the id since.

    A consumer that is killed between its ack and its release leaves a file that counts as its producer's until somebody
    calls :meth:`discard`.

    Every method may be called from any thread. ``put`` returns when the file is visible; the caller keeps the tensors.
    ``get`` returns copies, on the CPU unless a device is asked for.

    Args:
        directory: made if it does not exist.
        max_samples: cap on this instance's samples; None for no cap.
        max_bytes: cap on their tensor bytes; None for no cap. At least one of the two is needed.
        high_watermark_bytes: at or above this, producers pause; None means ``max_bytes``.
        low_watermark_bytes: at or below this, they resume; None means 0. Strictly below the high one.
        delete_unread_on_close: whether :meth:`close` takes the samples along that nobody has read. A consumer in
            another process may still be about to.
        release_poll_s: seconds between two looks for files that other processes have released.

    Raises:
        ConfigError: (``ValueError``) an empty directory name, no cap, a cap that is not positive, watermarks without a
            band between them, or a period that is not positive.
        OSError: the directory cannot be made.
    """

    def __init__(
        self,
        directory: str,
        max_samples: int | None = 64,
        max_bytes: int | None = 256 * MIB,
        high_watermark_bytes: int | None = 192 * MIB,
        low_watermark_bytes: int | None = 64 * MIB,
        *,
        delete_unread_on_close: bool = False,
        release_poll_s: float = 0.02,
    ) -> None:
        if not directory:
            raise ConfigError("SharedDirFeatureStore needs the path of a directory, got an empty one")
        if not release_poll_s > 0:
            raise ConfigError(f"release_poll_s must be a positive number of seconds, got {release_poll_s!r}")
        self._residency: Residency[None] = Residency(
            max_samples=max_samples,
            max_bytes=max_bytes,
            high_watermark_bytes=high_watermark_bytes,
            low_watermark_bytes=low_watermark_bytes,
            name="SharedDirFeatureStore",
        )
        self._directory = os.path.abspath(directory)
        os.makedirs(self._directory, exist_ok=True)
        self._delete_unread = delete_unread_on_close
        self._holds: Holds[FileKey] = Holds()
        self._outstanding = Outstanding(self._directory, self._residency, release_poll_s)
        self._undeleted: deque[FileKey] = deque()
        self._scan = LeftoverScan(self._directory)
        self._scan_lock = threading.Lock()
        self._next_scan = 0.0
        self._reported: set[str] = set()
        # A store that is dropped without close() must not leave its thread behind.
        weakref.finalize(self, self._outstanding.signal_stop).atexit = False

    @property
    def store_uri(self) -> str:
        """``file://`` and the directory's absolute path: the same for all instances that were given that path."""
        return f"file://{self._directory}"

    def put(
        self,
        sample_id: str,
        tensors: Mapping[str, torch.Tensor],
        run_id: str,
        algorithm: FeatureAlgorithm = FeatureAlgorithm.EAGLE3,
        schema_version: int = 1,
        target_model_version: str = "0",
        draft_weight_version: str = "0",
        num_tokens: int = 0,
        *,
        attributes: Mapping[str, str] | None = None,
    ) -> SampleRef:
        """Write a sample's file; see :meth:`FeatureStore.put`.

        Raises:
            MisuseError: (``ValueError``) also for an id that cannot be a file name in this directory, or whose file is
                already there, whoever put it.
            OSError: the file system refused; nothing is left behind.
        """
        check_tensors(sample_id, tensors)
        specs = {name: FeatureSpec.of(tensor) for name, tensor in tensors.items()}
        token = new_token()
        ref = SampleRef(
            sample_id=sample_id,
            run_id=run_id,
            store_uri=self.store_uri,
            feature_keys={name: feature_key(token, name) for name in specs},
            feature_specs=specs,
            algorithm=algorithm,
            schema_version=schema_version,
            num_tokens=num_tokens,
            estimated_bytes=sum(spec.nbytes for spec in specs.values()),
            target_model_version=target_model_version,
            draft_weight_version=draft_weight_version,
            attributes=attributes or {},
        )
        path = sample_path(self._directory, sample_id)
        if not self._residency.room_for(ref.estimated_bytes) or self._residency.contains(sample_id):
            self._outstanding.check()  # a release elsewhere may just have made room
        with self._residency.reserve(sample_id, ref.estimated_bytes) as reservation:
            if os.path.lexists(path):
                raise self._taken(sample_id)
            key = FileKey(sample_id, token)
            temporary = os.path.join(self._directory, new_temporary_name())
            try:
                with open(temporary, "xb") as file:
                    write_sample(file, tensors, this_owner(), token)
                seen = os.lstat(temporary)
                if not publish(temporary, path, this_owner(), token):
                    raise self._taken(sample_id)
                reservation.commit(None)
                self._outstanding.add(key, seen)
            except BaseException:
                self._undo(temporary, key)
                raise
        return ref

    def get(
        self, ref: SampleRef, device: torch.device | str | None = None
    ) -> tuple[dict[str, torch.Tensor], StoreHandle]:
        """Read a sample, whichever instance put it; see :meth:`FeatureStore.get`.

        Raises:
            MisuseError: (``ValueError``) the ref's id is no file name in this directory, or something else than a plain
                file, such as a link, is in its place.
            SpecMismatchError: (``RuntimeError``) also for a file that is damaged or cut short.
            OSError: the file system refused. The sample stays.
        """
        target = None if device is None else torch.device(device)
        self._check_open("get")
        if ref.store_uri != self.store_uri:
            raise SampleNotFoundError(
                f"the ref's store {ref.store_uri!r} does not match this store's URI {self.store_uri!r}"
            )
        try:
            file = open_sample(sample_path(self._directory, ref.sample_id))
        except FileNotFoundError:
            raise SampleNotFoundError(
                f"sample {ref.sample_id!r} is not in {self._directory}: released, or never put"
            ) from None
        with file:
            what = f"the file of sample {ref.sample_id!r}"
            header = read_header(file, what)
            key = FileKey.of(ref.sample_id, header.token, file)
            if not key.may_belong_to(ref):
                raise SampleNotFoundError(
                    f"{what} is not the one that the ref was made for, but a later one of this id"
                )
            handle = StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
            self._holds.add(handle, key)
            try:
                tensors = read_sample(file, header, ref.feature_specs, what, target)
                self._check_open("get")
            except BaseException:
                self._delete(self._holds.cancel(handle))
                raise
        return {name: tensors[name] for name in ref.feature_names()}, handle

    def release(self, handle: StoreHandle) -> None:
        """See :meth:`FeatureStore.release`. The last handle of this instance takes the file along."""
        if not isinstance(handle, StoreHandle):
            raise MisuseError(f"release needs a StoreHandle, got {type(handle).__name__}")
        if handle.store is not self:
            raise MisuseError(f"the handle of sample {handle.sample_id!r} was issued by a different store")
        self._check_open("release")
        self._delete(self._holds.release(handle))

    def discard(self, ref: SampleRef) -> bool:
        """Delete a sample's file without reading it, whichever instance put it; see :meth:`FeatureStore.discard`."""
        self._check_open("discard")
        if ref.store_uri != self.store_uri:
            return False
        try:
            with open_sample(sample_path(self._directory, ref.sample_id)) as file:
                key = FileKey.read(ref.sample_id, file)
        except FileNotFoundError:
            found = False
        else:
            found = key.may_belong_to(ref)
        if found:
            self._delete([key])
        else:
            self._outstanding.check_one(ref.sample_id)
        return found

    def room_for(self, nbytes: int) -> bool:
        """Whether a sample of ``nbytes`` would be accepted now, as far as is known without looking at the disk."""
        return self._residency.room_for(nbytes)

    def is_full(self) -> bool:
        """See :meth:`FeatureStore.is_full`."""
        return self._residency.is_full()

    def wait_for_room(self, nbytes: int, timeout: float) -> bool:
        """Block up to ``timeout`` seconds until a sample of ``nbytes`` would be accepted; see :class:`Residency`."""
        return self._residency.wait_for_room(nbytes, timeout)

    def health(self) -> StoreHealth:
        """Residency of this instance's samples, from memory. A release elsewhere shows after ``release_poll_s``."""
        return self._residency.health()

    def gc(self) -> int:
        """Clean up after consumers and producers that crashed.

        Ends the holds of handles that were dropped, deletes what an earlier release could not, and deletes
        half-written files whose writer is gone. Unread samples whose producer is gone are reported in the log, once
        each, and stay: a consumer may hold their refs; :meth:`leftovers` lists them.

        Returns:
            Number of entries reclaimed.
        """
        self._check_open("gc")
        reclaimed, free = self._holds.sweep()
        self._delete(free)
        reclaimed += self._delete_again()
        self._outstanding.check()
        if time.monotonic() < self._next_scan:
            return reclaimed
        found = self.leftovers()
        for leftover in found:
            if leftover.sample_id is None:
                reclaimed += self._remove_temporary(leftover)
            elif leftover.name not in self._reported:
                logger.warning(
                    "sample %s (%d bytes) in %s is unread and its producer is gone",
                    leftover.sample_id,
                    leftover.nbytes,
                    self._directory,
                )
        self._reported = {leftover.name for leftover in found}
        return reclaimed

    def leftovers(self) -> list[Leftover]:
        """List the files in the directory whose writer, on this host, is gone: half-written ones and unread samples.

        Scans the directory, and reads the header of each sample that it has not seen yet.
        """
        with self._scan_lock:
            started = time.monotonic()
            found = self._scan()
            ended = time.monotonic()
            self._next_scan = ended + SCAN_SHARE * (ended - started)
        return found

    def close(self) -> None:
        """Drop the books and stop. Idempotent.

        What was released goes, also if another handle still held it. Everything else is unread and stays, for consumers
        in other processes or for whoever is given its ref again; this instance's part of it goes if the constructor was
        told so.
        """
        if self._residency.is_closed:
            return
        self._residency.close()
        mine = self._outstanding.close()
        consumed = self._holds.clear()
        self._delete(consumed)
        self._delete_again()
        unread = set(mine).difference(consumed)
        if self._delete_unread:
            self._delete(unread)
        elif unread:
            logger.info("closed with %d samples in %s that nobody has released yet", len(unread), self._directory)

    def _check_open(self, operation: str) -> None:
        if self._residency.is_closed:
            raise ClosedError(f"{operation}: this SharedDirFeatureStore is closed")

    def _taken(self, sample_id: str) -> MisuseError:
        return MisuseError(
            f"sample_id {sample_id!r} is already present in {self._directory}: put by another process, or left unread "
            "by an earlier run"
        )

    def _undo(self, temporary: str, key: FileKey) -> None:
        """Take back a put that failed, wherever it did."""
        try:
            remove(temporary)
        except OSError as error:
            if os.path.lexists(temporary):
                logger.warning("%s, left by a put that failed, could not be deleted (%s)", temporary, error)
        self._delete([key])
        with contextlib.suppress(ClosedError):
            self._residency.discard(key.sample_id)

    def _delete(self, keys: Iterable[FileKey], level: int = logging.WARNING) -> int:
        """Delete consumed files; what cannot be deleted is remembered for gc. Return how many are gone."""
        count = 0
        for key in keys:
            try:
                gone = remove_exactly(self._directory, key)
            except OSError as error:
                logger.log(level, "sample %s in %s could not be deleted (%s)", key.sample_id, self._directory, error)
                gone = False
            if gone:
                count += 1
                self._outstanding.settle(key)
            else:
                self._undeleted.append(key)
        return count

    def _delete_again(self) -> int:
        keys = []
        with contextlib.suppress(IndexError):  # several threads may do this at once
            while True:
                keys.append(self._undeleted.popleft())
        return self._delete(keys, logging.DEBUG)

    def _remove_temporary(self, leftover: Leftover) -> bool:
        try:
            if not remove(os.path.join(self._directory, leftover.name)):
                return False
        except OSError as error:
            if leftover.name not in self._reported:
                logger.warning("%s, whose writer is gone, could not be deleted (%s)", leftover.name, error)
            return False
        logger.warning("deleted %s (%d bytes): its writer died before it was finished", leftover.name, leftover.nbytes)
        return True
