"""The files of a shared directory: what they are called, which is which, how one appears and how one goes.

Nothing here keeps state. What must be exact between processes is left to the file system: a name is given by a call
that fails where it is taken, and a file is deleted only under a lock on it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import BinaryIO

from nccl_stream.errors import MisuseError, SpecMismatchError
from nccl_stream.refs import SampleRef
from nccl_stream.stores.sample_file import read_header, write_sample

__all__ = [
    "SAMPLE_SUFFIX",
    "FileKey",
    "feature_key",
    "is_there",
    "open_sample",
    "publish",
    "remove",
    "remove_exactly",
    "sample_path",
]

SAMPLE_SUFFIX = ".safetensors"
MAX_NAME_BYTES = 255

# Not to wait for the other end of a pipe that somebody put in a sample's place.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}


@dataclass(frozen=True)
class FileKey:
    """One file under one name; another file under the same name is another sample.

    Attributes:
        sample_id: the id that the name is made of.
        token: what the file says that it is; empty for one that another program wrote, or that cannot be read.
        stamp: what the file system says, where the file says nothing.
    """

    sample_id: str
    token: str
    stamp: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, sample_id: str, token: str, file: BinaryIO) -> FileKey:
        """Return the key of an open file with this token."""
        if token:
            return cls(sample_id, token)
        status = os.fstat(file.fileno())
        return cls(sample_id, "", (status.st_ino, status.st_mtime_ns))

    @classmethod
    def read(cls, sample_id: str, file: BinaryIO) -> FileKey:
        """Return the key of a file that is open at its start."""
        try:
            token = read_header(file, sample_id).token
        except SpecMismatchError:
            token = ""
        return cls.of(sample_id, token, file)

    def may_belong_to(self, ref: SampleRef) -> bool:
        """Whether this is not known to be another file than the one that ``ref`` was made for."""
        return not self.token or _token_of(ref) in ("", self.token)


def feature_key(token: str, name: str) -> str:
    """Where a ref says that a feature is: in the file with this token and no other."""
    return f"#{token}/{name}"


def _token_of(ref: SampleRef) -> str:
    # Empty for a ref that does not say, such as one that the user made.
    name, key = next(iter(ref.feature_keys.items()))
    return key[1 : -len(name) - 1] if key.startswith("#") and key.endswith(f"/{name}") else ""


def sample_path(directory: str, sample_id: str) -> str:
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


def open_sample(path: str) -> BinaryIO:
    """Open a file for reading.

    Raises:
        FileNotFoundError: nothing is there.
        MisuseError: (``ValueError``) something is that is no plain file.
        OSError: the file system refused.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            what = "a link" if error.errno == errno.ELOOP else "no plain file"
            raise MisuseError(f"{path} is {what}, which this store neither makes nor reads") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MisuseError(f"{path} is no plain file, which this store neither makes nor reads")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_there(directory: str, key: FileKey, seen: os.stat_result) -> bool:
    """Whether a file is still there; reads it only if it does not look as it did when it was ``seen``."""
    path = sample_path(directory, key.sample_id)
    try:
        status = os.lstat(path)
        if (status.st_ino, status.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns):
            return True
        with open_sample(path) as file:
            return FileKey.read(key.sample_id, file) == key
    except (FileNotFoundError, MisuseError):
        return False
    except OSError:
        # For all we know it is: better to hold room a little longer than to give it away twice.
        return True


def publish(temporary: str, path: str, owner: str, token: str) -> bool:
    """Give a finished file its final name, unless that is taken.

    Args:
        temporary: the name that it has, and loses.
        path: the name that it gets.
        owner: who does this, in case it is killed half way.
        token: that of the file.

    Returns:
        Whether the name was free.

    Raises:
        OSError: the file system refused.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A file server that is asked again, because its answer got lost, finds what it has done itself.
        if not _is_one_file(temporary, path):
            return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _publish_without_links(temporary, path, owner, token)
    remove(temporary)
    return True


def _is_one_file(one: str, other: str) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except FileNotFoundError:
        return False


def _publish_without_links(temporary: str, path: str, owner: str, token: str) -> bool:
    claimed = False
    try:
        with open(path, "xb") as claim:
            claimed = True
            write_sample(claim, {}, owner, token)
        os.replace(temporary, path)
    except BaseException as error:
        if claimed:
            remove(path)
        elif isinstance(error, FileExistsError):
            return False
        raise
    return True


def remove(path: str) -> bool:
    """Delete a file; whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def remove_exactly(directory: str, key: FileKey) -> bool:
    """Delete a file, but none that came under its name since.

    Returns:
        Whether it is gone now. If not, somebody else is deleting it at this moment.

    Raises:
        OSError: the file system refused.
    """
    path = sample_path(directory, key.sample_id)
    try:
        file = open_sample(path)
    except (FileNotFoundError, MisuseError):
        return True
    with file:
        if FileKey.read(key.sample_id, file) != key:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks: there the look and the deletion are not one
        try:
            if os.path.samestat(os.lstat(path), os.fstat(file.fileno())):
                os.unlink(path)
        except FileNotFoundError:
            pass
    return True
