"""The directories a store lives in: are they fit for it, is there room, who holds them, and how they are removed again.

Every refusal is one StoreError line that names the path and what to do. Nothing here follows a symlink at or below a store's
directory; above it the path is the user's own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence

from zinf import measured
from zinf.errors import StoreError
from zinf.tiers import manifest

log = logging.getLogger("zinf")

LOCK = "lock"
IMPORT = "import.json"  # see partial.py
DATA = ("weights", "state", "frozen")  # the files of layout.place
SCRATCH = ("grads", "activations")  # the files of scratch.Scratch: there for an instant, before they lose their names
_SLACK = 8 << 20  # bytes a store may need beyond its data on each path: manifest, its successor, directory blocks
_tmpfs_seen: set[str] = set()


def _refusal(path: str, e: OSError) -> StoreError:
    """What the user reads when the directory `path` cannot be used because of `e`."""
    reasons = {
        errno.ENOENT: f"{os.path.dirname(path)} does not exist: mount the drive or create the directory, then start again",
        errno.EACCES: f"{path} is not writable for this user: change its owner or mode, or choose another nvme_path",
        errno.EPERM: f"{path} is not writable for this user: change its owner or mode, or choose another nvme_path",
        errno.EROFS: f"{path} is on a read-only filesystem: remount it read-write, or choose another nvme_path",
        errno.ENOTDIR: f"{path} is not a directory, or a part of it is a file: choose another nvme_path",
        errno.ELOOP: f"{path} is a symbolic link: give the directory it points to",
        errno.ENOSPC: f"{path}: the filesystem is full: free some space, or choose another nvme_path",
        errno.EDQUOT: f"{path}: the disk quota there is used up: free some space, or choose another nvme_path",
    }
    return StoreError(reasons.get(e.errno or 0, f"{path} cannot be used: {e}"))


def check(path: str) -> None:
    """Raise StoreError unless `path` is a directory, and not a symlink to one."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        raise StoreError(f"there is no store at {path}: the directory does not exist") from None
    except OSError as e:
        raise _refusal(path, e) from e
    if stat.S_ISLNK(mode):
        raise StoreError(f"{path} is a symbolic link: give the directory it points to")
    if not stat.S_ISDIR(mode):
        raise StoreError(f"{path} is not a directory: choose another nvme_path")
    if mode & 0o022 and not mode & stat.S_ISVTX:
        log.warning("%s can be written by other users (mode %o): they could change the weights unseen", path, stat.S_IMODE(mode))


def make(path: str) -> bool:
    """Create the directory (one level, mode 0700) if it is not there. True if it was created here."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        check(path)
        return False
    except OSError as e:
        raise _refusal(path, e) from e
    with contextlib.suppress(OSError):  # some filesystems have no fsync for directories they do not own; a lost mkdir loses only an empty store
        manifest.sync_directory(os.path.dirname(path))
    return True


def filesystem(path: str) -> str:
    """The type of the filesystem that `path` is on ("ext4", "tmpfs", ...), "" if it cannot be found out."""
    try:
        return measured.filesystem(os.stat(path).st_dev)
    except OSError:
        return ""


def warn_if_memory(path: str) -> None:
    """One log line, once per path, where a store would stand in RAM."""
    kind = filesystem(path)
    if kind in ("tmpfs", "ramfs") and path not in _tmpfs_seen:
        _tmpfs_seen.add(path)
        log.warning("%s is on %s: it spends the RAM it should save and is gone after a reboot; set nvme_path to a drive", path, kind)


SMALLER_STORE = "choose or add another nvme_path, or set crash_safe: false (half the bytes, but a crash loses the store)"


def check_space(needs: Mapping[str, int], freed: Mapping[str, int] | None = None, what: str = "the store", advice: str = SMALLER_STORE) -> None:
    """Refuse what does not fit. `needs`: bytes per path; `freed`: bytes that an overwritten store gives back.

    Paths on one filesystem share its free bytes.

    Raises:
        StoreError: names the paths, the need and the free bytes.
    """
    groups: dict[int, list[str]] = {}
    for path in needs:
        groups.setdefault(os.stat(path).st_dev, []).append(path)
    for paths in groups.values():
        room = os.statvfs(paths[0])
        free = room.f_bavail * room.f_frsize + sum((freed or {}).get(path, 0) for path in paths)
        need = sum(needs[path] + _SLACK for path in paths)
        if need > free:
            raise StoreError(
                f"{what} needs {size(need)} on {', '.join(paths)}, and {size(free)} are free there ({need - free} bytes short): free some space, {advice}"
            )


def size(nbytes: int) -> str:
    """Bytes for a human, with the exact number beside it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit} ({nbytes} bytes)"
    return f"{nbytes} bytes"


def allocate(path: str, nbytes: int) -> None:
    """Create the file `path` (0600, must not exist) with all its blocks, so that ENOSPC cannot come later. Durable on return."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
    except OSError as e:
        raise OSError(e.errno, f"allocate {nbytes} bytes: {os.strerror(e.errno or 0)}", path) from e
    finally:
        os.close(fd)


def check_file(path: str, fd: int, nbytes: int) -> None:
    """Raise StoreError unless the open file is a regular one of exactly `nbytes`."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size != nbytes:
        raise StoreError(
            f"{path} is {info.st_size} bytes, and the manifest says {nbytes}: it was truncated or replaced; restore it, or remove the store with zinf clean"
        )


def disk_usage(path: str) -> int:
    """Bytes that the store's own files in `path` occupy."""
    total = 0
    for name in own_files():
        with contextlib.suppress(OSError):
            total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def own_files() -> tuple[str, ...]:
    """Every name a store may use in its directory, in the order of removal: what makes it a store goes first, what marks it as ours last."""
    first = (manifest.MANIFEST, manifest.MANIFEST + manifest.TMP, IMPORT, IMPORT + manifest.TMP)
    return (*first, manifest.RESERVE, *DATA, *SCRATCH, manifest.MEMBER + manifest.TMP, manifest.MEMBER)


def empty(path: str) -> None:
    """Remove the store's own files, and nothing else. The lock stays."""
    for name in own_files():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
        if name == manifest.MANIFEST:
            manifest.sync_directory(path)  # never a manifest over files that are gone


def in_removal(paths: Sequence[str]) -> list[str]:
    """`paths`, on which stores stand, in the order in which to empty them: the first of a store last, when its manifest is gone.

    Whoever is killed in between leaves a store that never came to a commit, and not further paths of one that is not there.
    """
    index = {}
    for path in paths:
        index[path] = 0
        with contextlib.suppress(StoreError, OSError):
            index[path] = manifest.load_member(path).index
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, manifest.MANIFEST))
            manifest.sync_directory(path)
    return sorted(paths, key=lambda path: -index[path])


def remove(path: str) -> None:
    """Remove the store's own files, its lock, and the directory if nothing else is in it."""
    empty(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, LOCK))
    try:
        os.rmdir(path)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EACCES, errno.EPERM, errno.ENOENT):
            raise


class Lock:
    """flock on each directory of a store: exclusive for a run, shared for readers. Gone with the process, however it ends.

    [Note: no lock is stale] The kernel ends a flock when the last descriptor of the open file is closed, so SIGKILL and a power cut
    end it too, and the lock file that stays behind means nothing. A forked child (a worker of a DataLoader, say) has a copy of the
    descriptor and may outlive its parent: it closes the copy as it is born. What the file says, pid and boot id of the last
    writer, is for the message where somebody holds the lock whom the kernel does not name (a network mount, another container).
    """

    def __init__(self, paths: Sequence[str], *, shared: bool = False) -> None:
        """Raises StoreError that names the holder's pid, or why there can be no lock."""
        self._fds: list[int] = []
        self._pid = os.getpid()
        _locks.add(self)
        try:
            # In one order for all, so that two runs over the same paths in another order cannot block half of each other.
            for path in sorted(paths):
                self._fds.append(self._lock(path, shared))
        except BaseException:
            self.release()
            raise

    @staticmethod
    def _lock(path: str, shared: bool) -> int:
        name = os.path.join(path, LOCK)
        tries = 0
        while True:
            try:
                # A reader may have a read-only filesystem, where the file can be neither created nor opened for writing.
                fd = os.open(name, (os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT) | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as e:
                raise _refusal(path, e) from e
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:  # else it was removed by clean between our open and our lock: take the new one
                    if not shared:
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, b"%d %s\n" % (os.getpid(), _boot_id()), 0)
                    return fd
            except BlockingIOError:
                os.close(fd)
                tries += 1
                if tries < 3:  # holder() takes the lock for an instant to find out whether it is free
                    time.sleep(0.02)
                    continue
                raise StoreError(f"the store at {path} is in use by {_who(path)}: wait for it or stop it, or choose another run_name") from None
            except OSError as e:
                os.close(fd)
                if e.errno == errno.ENOSPC:  # only the pid could not be noted: /proc/locks has it too
                    raise _refusal(path, e) from e
                raise StoreError(f"{path} cannot be locked ({e.strerror}): flock must work there, network mounts often need an option for it") from e
            os.close(fd)

    def release(self) -> None:
        """Idempotent. In a forked child, which shares the open files, it leaves the lock with the parent."""
        while self._fds:
            fd = self._fds.pop()
            if self._pid == os.getpid():
                # Explicitly: closing alone would leave the lock with the children that share the open file.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def __del__(self) -> None:
        self.release()  # of a store that was dropped without close(): else it is "in use by this process" until the process ends


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child, see [Note: no lock is stale]."""
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)


def holder(path: str) -> int | None:
    """The pid that holds the store in `path`, 0 if somebody does who cannot be named, None if nobody does."""
    try:
        fd = os.open(os.path.join(path, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return next(_flock_pids(os.fstat(fd).st_ino), _noted(fd))
        fcntl.flock(fd, fcntl.LOCK_UN)
        return None
    except OSError:
        return 0
    finally:
        os.close(fd)


def _who(path: str) -> str:
    """The holder of a lock, for a message."""
    pid = holder(path)
    if not pid:
        return "another process (another container or machine, or one that just ends)"
    return "this process" if pid == os.getpid() else f"process {pid}"


def _noted(fd: int) -> int:
    """The pid in a lock file, if it was noted since this machine started and is a process still; else 0."""
    pid, _, boot = os.pread(fd, 128, 0).strip().partition(b" ")
    if not pid.isdigit() or boot != _boot_id():
        return 0
    return int(pid) if os.path.isdir(f"/proc/{int(pid)}") else 0


def _boot_id() -> bytes:
    """Differs after each start of the machine; empty where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as f:
            return f.read(64).strip()
    except OSError:
        return b""


def _flock_pids(inode: int) -> Iterator[int]:
    """Who holds a flock on the file, as the kernel tells it: "1: FLOCK  ADVISORY  WRITE 4711 fd:00:1234 0 EOF"."""
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii", errors="replace") as f:
        for line in f:
            fields = line.split()
            if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode) and fields[4].isdigit() and int(fields[4]):
                yield int(fields[4])
