"""Real filesystems in a file, for tests: made, mounted, filled, limited, shut down as a power loss does. Who may not mount skips, and is told why."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
MAKE = {  # the command, and the least bytes that it accepts and we need
    "ext4": (["mkfs.ext4", "-q", "-m", "0"], 24 * MIB),
    "xfs": (["mkfs.xfs", "-q", "-m", "reflink=1"], 320 * MIB),
    "btrfs": (["mkfs.btrfs", "-q"], 160 * MIB),
}
_FS_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2


class Mount:
    """A filesystem of its own. `path` is where it is mounted."""

    def __init__(self, folder: Path, kind: str, options: str = "") -> None:
        command, size = MAKE[kind]
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        self.kind, self.path, self._image, self._options = kind, folder / f"{kind}-mount", folder / f"{kind}-image", f"loop,{options}".rstrip(",")
        self.path.mkdir()
        with open(self._image, "wb") as f:
            f.truncate(size)
        subprocess.run([*command, str(self._image)], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        done = subprocess.run(["mount", "-t", self.kind, "-o", self._options, str(self._image), str(self.path)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a {self.kind} cannot be mounted from a file here: {done.stderr.strip()}")

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)

    def remount(self) -> None:
        """As after a reboot: what was not durable is gone, and the filesystem's own log is replayed."""
        self.unmount()
        if self.kind == "ext4":
            subprocess.run(["fsck.ext4", "-p", "-f", str(self._image)], check=False, capture_output=True)
        self.mount()

    @property
    def device(self) -> str:
        """The loop device."""
        return next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == str(self.path))

    def shut_down(self) -> None:
        """From now on everything fails with EIO, and what the filesystem had not written of its log is lost."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        except OSError as e:
            pytest.skip(f"this kernel cannot shut down a {self.kind}: {e}")
        finally:
            os.close(fd)

    def fail(self) -> None:
        """Let the filesystem find an error in itself: with errors=remount-ro it is read-only from then on."""
        trigger = Path("/sys/fs/ext4", os.path.basename(self.device), "trigger_fs_error")
        if not trigger.exists():
            pytest.skip("this kernel cannot be asked for an error of ext4 (no trigger_fs_error in /sys/fs/ext4)")
        trigger.write_text("1")

    def fill(self) -> Path:
        """Take what is free; returns the file that has it."""
        filler = self.path / "filler"
        with open(filler, "wb") as f:
            end = 0
            for size in (16 * MIB, MIB, 1 << 16, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(f.fileno(), end, size)
                        end += size
            os.fsync(f.fileno())
        return filler

    def limit(self, nbytes: int | None) -> None:
        """A quota for all that is in it (btrfs); None takes it away."""
        subprocess.run(["btrfs", "quota", "enable" if nbytes is not None else "disable", str(self.path)], check=False, capture_output=True)
        if nbytes is not None:
            done = subprocess.run(["btrfs", "qgroup", "limit", str(nbytes), str(self.path)], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no quota can be set here: {done.stderr.strip()}")
        os.sync()


@contextlib.contextmanager
def mounted(folder: Path, kind: str, options: str = "") -> Iterator[Mount]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a filesystem")
    here = Mount(folder, kind, options)
    try:
        yield here
    finally:
        subprocess.run(["umount", "-l", str(here.path)], check=False)
        here._image.unlink()
