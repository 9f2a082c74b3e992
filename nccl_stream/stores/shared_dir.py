"""Feature store on a directory that several processes share: one safetensors file per sample, and nothing else."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nccl_stream.errors import ClosedError, ConfigError, MisuseError, SampleNotFoundError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.store import FeatureStore, StoreHandle, StoreHealth
from nccl_stream.stores.holds import Holds
from nccl_stream.stores.leftovers import SAMPLE_SUFFIX, Leftover, LeftoverScan, new_temporary_name, this_owner
from nccl_stream.stores.residency import Residency
from nccl_stream.stores.sample_file import read_sample, write_sample
from nccl_stream.stores.tensors import check_tensors

__all__ = ["Leftover", "SharedDirFeatureStore"]

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
MAX_NAME_BYTES = 255
CHECKS_PER_PERIOD = 256
SCAN_SHARE = 10
"""A directory scan by ``gc`` is skipped until this many times its last duration has passed: gc may be called often."""


@dataclass(frozen=True)
class _FileKey:
    """One file under one name; another file under the same name is another sample."""

    sample_id: str
    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, sample_id: str, status: os.stat_result) -> _FileKey:
        return cls(sample_id, status.st_ino, status.st_mtime_ns)


class SharedDirFeatureStore(FeatureStore):
    """One ``<sample_id>.safetensors`` per sample in a directory that producers and consumers in any process share.

    A file appears whole (written aside, then renamed) and goes with the last release of the instance that got it.
    Caps, watermarks and :meth:`health` count the samples that *this* instance has put and nobody has released. A
    release by another process is noticed by looking for this instance's own files by name, in a thread that exists
    while there are any; the directory is never listed for it, and no lock that :meth:`health` takes is held during
    I/O. Ids must be unique within the directory; one that is taken is refused. (Only when two processes put the same
    new id at the same moment does the later file replace the other.)

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
        self._holds: Holds[_FileKey] = Holds()
        self._outstanding = _Outstanding(self._directory, self._residency, release_poll_s)
        self._undeleted: deque[_FileKey] = deque()
        self._scan = LeftoverScan(self._directory)
        self._scan_lock = threading.Lock()
        self._next_scan = 0.0
        self._reported: set[str] = set()
        # A store that is dropped without close() must not leave its thread behind.
        weakref.finalize(self, self._outstanding.signal_stop).atexit = False

    @property
    def store_uri(self) -> str:
        """``file://`` and the directory's absolute path: the same for all instances on it."""
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
        ref = SampleRef(
            sample_id=sample_id,
            run_id=run_id,
            store_uri=self.store_uri,
            feature_keys={name: f"{sample_id}/{name}" for name in specs},
            feature_specs=specs,
            algorithm=algorithm,
            schema_version=schema_version,
            num_tokens=num_tokens,
            estimated_bytes=sum(spec.nbytes for spec in specs.values()),
            target_model_version=target_model_version,
            draft_weight_version=draft_weight_version,
            attributes=attributes or {},
        )
        path = _path_of(self._directory, sample_id)
        if not self._residency.room_for(ref.estimated_bytes) or self._residency.contains(sample_id):
            self._outstanding.check()  # a release elsewhere may just have made room
        with self._residency.reserve(sample_id, ref.estimated_bytes) as reservation:
            if os.path.lexists(path):
                raise MisuseError(
                    f"sample_id {sample_id!r} is already present in {self._directory}: put by another process, or left "
                    "unread by an earlier run"
                )
            self._write(path, tensors)
            try:
                reservation.commit(None)
            except BaseException:
                _remove(path)
                raise
        self._outstanding.add(sample_id)
        return ref

    def get(
        self, ref: SampleRef, device: torch.device | str | None = None
    ) -> tuple[dict[str, torch.Tensor], StoreHandle]:
        """Read a sample, whichever instance put it; see :meth:`FeatureStore.get`.

        Raises:
            MisuseError: (``ValueError``) the ref's id is no file name in this directory, or a link is in its place.
            SpecMismatchError: (``RuntimeError``) also for a file that is damaged or cut short.
        """
        target = None if device is None else torch.device(device)
        self._check_open("get")
        if ref.store_uri != self.store_uri:
            raise SampleNotFoundError(
                f"the ref's store {ref.store_uri!r} does not match this store's URI {self.store_uri!r}"
            )
        path = _path_of(self._directory, ref.sample_id)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SampleNotFoundError(
                f"sample {ref.sample_id!r} is not in {self._directory}: released, or never put"
            ) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise MisuseError(f"{path} is a link, which this store neither makes nor follows") from None
            raise
        handle = StoreHandle(store=self, sample_id=ref.sample_id, ref=ref)
        with open(descriptor, "rb") as file:
            self._holds.add(handle, _FileKey.of(ref.sample_id, os.fstat(descriptor)))
            try:
                tensors = read_sample(file, ref.feature_specs, f"the file of sample {ref.sample_id!r}", target)
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
        found = _remove(_path_of(self._directory, ref.sample_id))
        self._outstanding.settle(ref.sample_id)
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
        again = [self._undeleted.popleft() for _ in range(len(self._undeleted))]
        self._delete(again)
        reclaimed += len(again) - len(self._undeleted)
        self._outstanding.check()
        if time.monotonic() < self._next_scan:
            return reclaimed
        for leftover in self.leftovers():
            if leftover.sample_id is None:
                if _remove(os.path.join(self._directory, leftover.name)):
                    reclaimed += 1
                    logger.warning(
                        "deleted %s (%d bytes): its writer died before it was finished", leftover.name, leftover.nbytes
                    )
            elif leftover.name not in self._reported:
                self._reported.add(leftover.name)
                logger.warning(
                    "sample %s (%d bytes) in %s is unread and its producer is gone",
                    leftover.sample_id,
                    leftover.nbytes,
                    self._directory,
                )
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

        Files of this instance that somebody in this process holds go; those that nobody has read stay for consumers in
        other processes, unless the constructor was told otherwise.
        """
        if self._residency.is_closed:
            return
        self._residency.close()
        mine = self._outstanding.close()
        for key in self._holds.clear():
            if key.sample_id in mine:
                mine.discard(key.sample_id)
                self._delete([key])
        if self._delete_unread:
            for sample_id in mine:
                _remove(_path_of(self._directory, sample_id))
        elif mine:
            logger.info("closed with %d samples in %s that nobody has released yet", len(mine), self._directory)

    def _check_open(self, operation: str) -> None:
        if self._residency.is_closed:
            raise ClosedError(f"{operation}: this SharedDirFeatureStore is closed")

    def _write(self, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
        temporary = os.path.join(self._directory, new_temporary_name())
        try:
            with open(temporary, "xb") as file:
                write_sample(file, tensors, this_owner())
            os.replace(temporary, path)
        except BaseException:
            _remove(temporary)
            raise

    def _delete(self, keys: list[_FileKey]) -> None:
        """Delete consumed files. A file that came under the same name since is not touched."""
        for key in keys:
            path = _path_of(self._directory, key.sample_id)
            try:
                if _FileKey.of(key.sample_id, os.lstat(path)) != key:
                    continue
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning("%s could not be deleted (%s); gc tries again", path, error)
                self._undeleted.append(key)
                continue
            self._outstanding.settle(key.sample_id)


class _Outstanding:
    """This instance's files that nobody has released, and the thread that notices when another process does."""

    def __init__(self, directory: str, residency: Residency[None], period: float) -> None:
        self._directory = directory
        self._residency = residency
        self._period = period
        # Reentrant: signal_stop may run in a garbage collection in the middle of one of these methods.
        self._changed = threading.Condition(threading.RLock())
        # Sample id to a token that tells apart two files put under one id.
        self._files: dict[str, object] = {}
        self._position = 0
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, sample_id: str) -> None:
        with self._changed:
            self._files[sample_id] = object()
            if self._stopped:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shared-dir-releases", daemon=True)
                self._thread.start()
            elif len(self._files) == 1:
                self._changed.notify_all()

    def settle(self, sample_id: str) -> None:
        """A sample of ours, or of somebody else, is gone."""
        with self._changed:
            if self._files.pop(sample_id, None) is not None:
                self._drop(sample_id)

    def check(self, limit: int | None = None) -> None:
        """Look for at most ``limit`` of our files, by name, and strike out those that are gone."""
        with self._changed:
            files = list(self._files.items())
        if limit is not None and limit < len(files):
            start = self._position % len(files)
            self._position = start + limit
            files = (files[start:] + files[:start])[:limit]
        gone = [(sample_id, token) for sample_id, token in files if _is_missing(_path_of(self._directory, sample_id))]
        with self._changed:
            for sample_id, token in gone:
                if self._files.get(sample_id) is token:
                    del self._files[sample_id]
                    self._drop(sample_id)

    def signal_stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> set[str]:
        """Stop and join the thread; return the ids that are still outstanding."""
        self.signal_stop()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.check()
        with self._changed:
            remaining, self._files = set(self._files), {}
        return remaining

    def _drop(self, sample_id: str) -> None:
        # Under our lock, so that a put of the same id finds both books in agreement.
        try:
            self._residency.discard(sample_id)
        except ClosedError:
            pass  # it has forgotten everything already

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._files or self._stopped)
                if self._stopped or self._changed.wait_for(lambda: self._stopped, self._period):
                    return
            self.check(CHECKS_PER_PERIOD)


def _path_of(directory: str, sample_id: str) -> str:
    """Path of a sample's file.

    Raises:
        MisuseError: (``ValueError``) the id is not fit for a file name, or would lead out of the directory.
    """
    if not isinstance(sample_id, str) or not sample_id:
        raise MisuseError(f"sample_id must be a non-empty str, got {sample_id!r}")
    if ".." in sample_id or any(char in "/\\" or ord(char) < 32 for char in sample_id):
        raise MisuseError(f"sample_id {sample_id!r} could leave the directory {directory}: refused")
    name = sample_id + SAMPLE_SUFFIX
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError as error:
        raise MisuseError(f"sample_id {sample_id!r} cannot be a file name: {error.reason}") from error
    if size > MAX_NAME_BYTES:
        raise MisuseError(f"sample_id {sample_id[:40]!r}... makes a file name of {size} bytes; {MAX_NAME_BYTES} fit")
    return os.path.join(directory, name)


def _is_missing(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        # For all we know it is there: better to hold room a little longer than to give it away twice.
        logger.debug("cannot look at %s: %s", path, error)
    return False


def _remove(path: str) -> bool:
    """Delete a file; whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
