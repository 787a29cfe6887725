"""Real filesystems that fill up, go read-only, meet a quota, lose power, share blocks: nothing that was committed is lost, and the bits are the same.

Each is made in a file and mounted, so root is needed, the filesystem in the kernel, and its mkfs; else the test is skipped.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
from pathlib import Path

import pytest
from crash.rig import MODES, begin, end, one_step, same_end, stubborn, threads, train
from mounts import MAKE, MIB, Mount, mounted

from zinf.checkpoint import saving
from zinf.errors import CommitError, StoreError
from zinf.tiers import manifest

STEPS = 5


@pytest.fixture(autouse=True)
def no_thread_stays(monkeypatch):
    before = threads()
    yield
    assert threads() == before


@functools.cache
def straight(mode: str):
    with tempfile.TemporaryDirectory() as folder, begin(folder, **MODES[mode]) as engine:
        train(engine, STEPS)
        return end(engine)


@pytest.mark.parametrize("kind", MAKE)
def test_full(tmp_path, kind):
    """ext4 and xfs do not even notice, as everything has its blocks; btrfs writes elsewhere each time, so there a step may be lost, and made again."""
    with mounted(tmp_path, kind) as disk:
        with begin(disk.path, **MODES["deferred"]) as engine:
            train(engine, 1)
            engine.synchronize()
            filler = disk.fill()
            errors = stubborn(engine, 3, lambda: filler.unlink(missing_ok=True))
            assert all(e.errno == errno.ENOSPC for e in errors) and (kind == "btrfs" or not errors)
            if manifest.release_reserve(str(disk.path / "run")):
                filler = disk.fill()  # the others are faster
            errors = stubborn(engine, STEPS, lambda: filler.unlink(missing_ok=True))
            assert [e.errno for e in errors] == [errno.ENOSPC]
            assert kind == "btrfs" or isinstance(errors[0], CommitError)
            same_end(end(engine), straight("deferred"))
        resumes(disk)


def resumes(disk: Mount) -> None:
    """The store has the end of the whole run, or comes to it."""
    with begin(disk.path, resume=True, **MODES["deferred"]) as engine:
        engine.restore_rng()
        assert engine.global_step >= 2
        train(engine, STEPS)
        same_end(end(engine), straight("deferred"))


def test_a_quota(tmp_path):
    with mounted(tmp_path, "btrfs") as disk:
        with begin(disk.path, **MODES["deferred"]) as engine:
            train(engine, 2)
            engine.synchronize()
            disk.limit(MIB)  # far less than there is
            errors = stubborn(engine, STEPS, lambda: disk.limit(None))
            assert {e.errno for e in errors} == {errno.EDQUOT}
            same_end(end(engine), straight("deferred"))
        resumes(disk)
        (disk.path / "other").mkdir()
        disk.limit(MIB)
        with pytest.raises((OSError, StoreError), match="quota"):
            begin(disk.path / "other", **MODES["deferred"])


@pytest.mark.parametrize("how", ["read-only", "power loss", "power loss of xfs"])
@pytest.mark.parametrize("mode", MODES)
def test_a_filesystem_that_ends_under_a_run(tmp_path, how, mode):
    """As a drive that fails: ext4 finds an error in itself and is read-only, or the filesystem is shut down and forgets its log."""
    with mounted(tmp_path, "xfs" if "xfs" in how else "ext4", "errors=remount-ro" if how == "read-only" else "") as disk:
        engine = begin(disk.path, **MODES[mode])
        train(engine, 2)
        engine.synchronize()

        def ends(part: str) -> None:
            if part == "backward" and engine.global_step == 2:
                disk.fail() if how == "read-only" else disk.shut_down()

        with pytest.raises(OSError) as raised:
            for _ in range(3):
                one_step(engine, between=ends)
            engine.synchronize()
        assert raised.value.errno == (errno.EROFS if how == "read-only" else errno.EIO)
        assert str(disk.path) in str(raised.value.filename)
        with contextlib.suppress(OSError):
            engine.close()
        disk.remount()
        with begin(disk.path, resume=True, **MODES[mode]) as engine:
            engine.restore_rng()
            assert engine.global_step >= 2
            train(engine, STEPS)
            same_end(end(engine), straight(mode))


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_checkpoint_shares_the_blocks_of_its_store(tmp_path, kind, monkeypatch):
    """Nothing is copied, and what training overwrites afterwards is the store's only."""
    monkeypatch.setattr(saving, "copy_snapshot", None)
    with mounted(tmp_path, kind) as disk:
        with begin(disk.path, **MODES["deferred"]) as engine:
            train(engine, 2)
            before = free(disk.path)
            engine.save_checkpoint(disk.path / "saved")
            assert before - free(disk.path) < MIB
            assert all(shared(path) for path in (disk.path / "saved/step-2").iterdir() if path.name in ("weights", "state", "frozen"))
            train(engine, STEPS)
        (disk.path / "other").mkdir()
        with begin(disk.path / "other", **MODES["deferred"]) as engine:
            engine.load_checkpoint(disk.path / "saved")
            assert engine.global_step == 2
            train(engine, STEPS)
            same_end(end(engine), straight("deferred"))


def free(path: Path) -> int:
    os.sync()
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def shared(path: Path) -> bool:
    """Does the filesystem say of an extent of the file that it is another's too?"""
    import fcntl
    import struct

    with open(path, "rb") as f:
        os.fsync(f.fileno())
        room = bytearray(struct.pack("=QQIIII", 0, 1 << 62, 1, 0, 64, 0) + bytes(64 * 56))
        fcntl.ioctl(f.fileno(), 0xC020660B, room)  # FS_IOC_FIEMAP
    extents = struct.unpack_from("=I", room, 20)[0]
    return any(struct.unpack_from("=QQQQQI", room, 32 + 56 * i)[5] & 0x2000 for i in range(extents))
