"""The files that one instance has put into a shared directory, and how it notices that others have released them."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from dataclasses import dataclass

from nccl_stream.errors import ClosedError
from nccl_stream.stores.directory import FileKey, is_there
from nccl_stream.stores.residency import Residency

__all__ = ["Outstanding"]

CHECKS_PER_PERIOD = 256


@dataclass(frozen=True, eq=False)
class _File:
    key: FileKey
    seen: os.stat_result


class Outstanding:
    """This instance's files that nobody has released, and the thread that notices when another process does.

    Args:
        directory: where the files are.
        residency: the books from which a file that is gone is struck out.
        period: seconds between two looks.
    """

    def __init__(self, directory: str, residency: Residency[None], period: float) -> None:
        self._directory = directory
        self._residency = residency
        self._period = period
        # Reentrant: signal_stop may run in a garbage collection in the middle of one of these methods.
        self._changed = threading.Condition(threading.RLock())
        self._files: dict[str, _File] = {}
        self._position = 0
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, key: FileKey, seen: os.stat_result) -> None:
        """Watch a file that we have just put.

        Args:
            key: the file.
            seen: how it looks.

        Raises:
            ClosedError: after :meth:`close`.
            RuntimeError: no thread can be started. Nothing was changed.
        """
        with self._changed:
            if self._stopped:
                raise ClosedError("put: this SharedDirFeatureStore is closed")
            # After a fork the parent's thread is not there.
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="shared-dir-releases", daemon=True)
                thread.start()
                self._thread = thread
            self._files[key.sample_id] = _File(key, seen)
            if len(self._files) == 1:
                self._changed.notify_all()

    def settle(self, key: FileKey) -> None:
        """A file of ours, or of somebody else, is gone."""
        with self._changed:
            file = self._files.get(key.sample_id)
            if file is not None and file.key == key:
                self._strike_out(key.sample_id)

    def check(self, limit: int | None = None) -> None:
        """Look for at most ``limit`` of our files, by name, and strike out those that are gone."""
        with self._changed:
            files = list(self._files.values())
        if limit is not None and limit < len(files):
            start = self._position % len(files)
            self._position = start + limit
            files = (files[start:] + files[:start])[:limit]
        self._check(files)

    def check_one(self, sample_id: str) -> None:
        """Look for one of our files, if it is one."""
        with self._changed:
            file = self._files.get(sample_id)
        if file is not None:
            self._check([file])

    def signal_stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> list[FileKey]:
        """Stop and join the thread; return what is still outstanding."""
        self.signal_stop()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.check()
        with self._changed:
            remaining, self._files = [file.key for file in self._files.values()], {}
        return remaining

    def _check(self, files: Collection[_File]) -> None:
        gone = [file for file in files if not is_there(self._directory, file.key, file.seen)]
        with self._changed:
            for file in gone:
                if self._files.get(file.key.sample_id) is file:
                    self._strike_out(file.key.sample_id)

    def _strike_out(self, sample_id: str) -> None:
        # Under our lock, so that a put of the same id finds both books in agreement.
        del self._files[sample_id]
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
