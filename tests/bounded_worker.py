"""One long training in a process of its own, that watches what it uses: for tests/test_bounded.py.

    python tests/bounded_worker.py FOLDER STEPS [pressure | leak | group=FOLDER [ROOM]]      the last line of stdout is one JSON object

The first steps warm up. Then the address space is limited to what it is plus MARGIN, so that an allocation beyond that fails. Every few
steps: anonymous memory, address space, descriptors, threads, bytes on the drive. With pressure, a thread takes every clean page away again and
again: what the kernel does to a process where another one eats the RAM (without swap it cannot take others). With group, the control
group that this process is in is limited as well, to the memory that it then has, GROUP_MARGIN, and ROOM bytes for others. With leak, each step keeps 64 KiB
and a descriptor, so that the test can be seen to fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from models import HYPER, LEAF_BYTES, batches, llama  # noqa: E402

from zinf.engine import Engine  # noqa: E402
from zinf.tiers import host  # noqa: E402

MIB = 1 << 20
WARM, MARGIN = 30, 24 * MIB
GROUP_MARGIN = 32 * MIB  # of it the kernel's own for this process, and pages of files that are in use now
BUDGETS = dict(host_memory=900 << 10, device_memory=500 << 10)
MADV_PAGEOUT = 21


def status(key: str) -> int:
    """Bytes, or a number, of /proc/self/status."""
    found = re.search(rf"^{key}:\s+(\d+)( kB)?", Path("/proc/self/status").read_text(), re.M)
    assert found
    return int(found[1]) * (1024 if found[2] else 1)


def threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return names


def look(folder: Path) -> dict[str, int]:
    return {
        "rss": status("RssAnon"),
        "space": status("VmSize"),
        "threads": sum(not name.startswith("iou-wrk") for name in threads()),  # the kernel's own come and go
        "descriptors": len(os.listdir("/proc/self/fd")),
        "disk": sum(p.lstat().st_blocks * 512 for p in folder.rglob("*") if p.is_file()),
        "zinf": host.allocated_bytes(),
    }


def page_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


class Pressure(threading.Thread):
    """See the module. Counts the pages that had to be read again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._over, self.rounds = folder, threading.Event(), 0
        self.descriptors = threading.Lock()  # held while this thread has files open, which are not the run's
        self._libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> None:
        while not self._over.wait(0.02):
            with self.descriptors:
                self._take_pages()

    def _take_pages(self) -> None:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, mode, _, _, inode, *_ = line.split()
            if inode != "0" and "w" not in mode:
                start, end = (int(x, 16) for x in span.split("-"))
                self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_PAGEOUT)
        for p in self._folder.rglob("*"):
            if p.is_file():
                fd = os.open(p, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        self.rounds += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


class Watch:
    """What the run has used, looked at every few steps after the first; see the module."""

    def __init__(self, folder: Path, mode: str, room: int) -> None:
        self.folder, self.mode, self.room = folder, mode, room
        self.pressure = Pressure(folder)
        self.losses: list[float] = []
        self.times: list[float] = []
        self.seen: list[dict[str, int]] = []
        self.kept: list[tuple[bytes, int]] = []

    def _look(self) -> None:
        with self.pressure.descriptors:
            self.seen.append(look(self.folder))

    def begin(self) -> None:
        gc.collect()
        self.limit = status("VmSize") + MARGIN
        resource.setrlimit(resource.RLIMIT_AS, (self.limit, self.limit))
        if self.mode.startswith("group="):
            self._limit_group(Path(self.mode.removeprefix("group=")))
        self.faults = page_faults()
        if self.mode == "pressure":
            self.pressure.start()

    def _limit_group(self, folder: Path) -> None:
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(status("RssAnon") + GROUP_MARGIN + self.room))

    def stepped(self, step: int, seconds: float, loss: float) -> None:
        self.times.append(seconds)
        self.losses.append(loss)
        if self.mode == "leak":
            self.kept.append((b"x" * (64 << 10) + bytes(1), os.dup(0)))
        if step >= WARM and (step - WARM) % 10 == 0:
            self._look()

    def end(self) -> dict:
        faults = page_faults() - self.faults
        if self.mode == "pressure":
            self.pressure.stop()
        self._look()
        seconds = statistics.median(self.times[WARM:])
        return dict(seen=self.seen, losses=self.losses, limit=self.limit, seconds=seconds, faults=faults, rounds=self.pressure.rounds)


def main(folder: Path, steps: int, mode: str = "", room: str = "0") -> dict:
    torch.set_num_threads(1)
    options = dict(weights="nvme", state="nvme", chunk_size=2048, leaf_bytes=LEAF_BYTES, max_grad_norm=1.0, **BUDGETS, **HYPER)
    (folder / "nvme").mkdir()
    ids = batches(4, 2, 16)
    watch = Watch(folder, mode, int(room))
    with Engine(llama(), nvme_path=str(folder / "nvme"), run_name="run", **options) as engine:
        for step in range(steps):
            if step == WARM:
                watch.begin()
            start = time.perf_counter()
            loss = engine(input_ids=ids[step % len(ids)], labels=ids[step % len(ids)]).loss
            engine.backward(loss)
            engine.step()
            watch.stepped(step, time.perf_counter() - start, loss.item())
        engine.synchronize()
        plan = engine.memory.plan
        return {"steps": steps, "planned": plan.host_nbytes + plan.device_nbytes, "budgets": BUDGETS, **watch.end()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
