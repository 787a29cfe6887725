"""The host arena: exact size, aligned, accounted, and never a crash."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import weakref

import psutil
import pytest
import torch

from zinf.errors import BudgetError, EngineError
from zinf.tiers import host
from zinf.tiers.host import HUGE, Arena

MIB = 1 << 20


class FakeIo:
    """Records registrations; refuses from the `limit`th on."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.log: list[tuple[str, int]] = []

    def register(self, address: int, nbytes: int, owner: object) -> bool:
        if len(self.registered) >= self.limit:
            return False
        self.registered[address] = nbytes
        self.log.append(("register", nbytes))
        return True

    def unregister(self, address: int) -> None:
        self.log.append(("unregister", self.registered.pop(address)))


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, HUGE - 4096, HUGE, 5 * MIB + 4096])
def test_exact_size_and_alignment(nbytes: int) -> None:
    before = host.allocated_bytes()
    with Arena(nbytes) as arena:
        exact = -(-nbytes // 4096) * 4096
        assert arena.nbytes == exact and host.allocated_bytes() - before == exact
        assert arena.address % (HUGE if exact >= HUGE else 4096) == 0
        region = arena.carve(exact, "all of it")
        assert region.data_ptr() == arena.address and region.dtype == torch.uint8 and region.shape == (exact,)
        assert not region.any()
    assert host.allocated_bytes() == before


def test_regions_do_not_overlap_and_start_on_pages() -> None:
    with Arena(64 << 10) as arena:
        regions = [arena.carve(n, "r") for n in (1, 4096, 4097, 100)]
        for i, region in enumerate(regions):
            region.fill_(i + 1)
        assert [r.data_ptr() - arena.address for r in regions] == [0, 4096, 8192, 16384]
        assert [r.unique().tolist() for r in regions] == [[1], [2], [3], [4]]
        assert arena.used == 5 * 4096 and arena.left == 11 * 4096


def test_over_budget_names_what_and_by_how_much() -> None:
    with Arena(8192) as arena:
        arena.carve(4096, "weights")
        with pytest.raises(ValueError, match=r"boundary activations needs 4097 bytes, and 4096 of 8192 are left: raise host_memory by 4096 bytes"):
            arena.carve(4097, "boundary activations")
        with pytest.raises(ValueError, match="3 slots of 4096 bytes for staging need 12288"):
            arena.slots(3, 4096, "staging")
        assert arena.used == 4096
        arena.carve(4096, "the rest")


def test_more_than_the_machine_has() -> None:
    before = host.allocated_bytes()
    with pytest.raises(BudgetError, match="are available: lower host_memory"):
        Arena(1 << 60)
    assert host.allocated_bytes() == before


def test_populated_at_once_and_given_back_on_close() -> None:
    me = psutil.Process()
    base = me.memory_info().rss
    arena = Arena(64 * MIB)
    assert me.memory_info().rss - base > 60 * MIB
    view = arena.carve(64 * MIB, "all")
    arena.close()
    assert me.memory_info().rss - base < 8 * MIB  # while the view lives
    assert view[0] == 0  # no crash
    view.fill_(1)


def test_populate_without_the_kernels_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MADV_POPULATE_WRITE", 9999)  # as a kernel before 5.14
    me = psutil.Process()
    base = me.memory_info().rss
    with Arena(32 * MIB) as arena:
        assert me.memory_info().rss - base > 30 * MIB
        assert not arena.carve(32 * MIB, "all").any()


def test_mapping_lives_as_long_as_its_last_view() -> None:
    arena = Arena(1 * MIB)
    mapping = weakref.ref(arena._map)
    view = arena.carve(4096, "v")
    arena.close()
    del arena
    gc.collect()
    assert mapping() is not None
    view.fill_(3)
    del view
    gc.collect()
    assert mapping() is None


def test_an_arena_that_is_dropped_keeps_its_views() -> None:
    """A transfer may be in flight to or from them."""
    before = host.allocated_bytes()
    view = Arena(1 * MIB).carve(4096, "v").fill_(3)
    gc.collect()
    assert (view == 3).all() and host.allocated_bytes() - before == 1 * MIB
    del view
    gc.collect()
    assert host.allocated_bytes() == before


def test_registered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "REGISTER", 4 * MIB)
    io = FakeIo()
    arena = Arena(10 * MIB, io)
    assert arena.registered
    assert io.registered == {arena.address: 4 * MIB, arena.address + 4 * MIB: 4 * MIB, arena.address + 8 * MIB: 2 * MIB}
    arena.close()
    arena.close()
    assert not io.registered and len(io.log) == 6


def test_goes_on_where_registration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "REGISTER", 4 * MIB)
    io = FakeIo(limit=1)
    with Arena(10 * MIB, io) as arena:
        assert not arena.registered and list(io.registered.values()) == [4 * MIB]
        arena.carve(10 * MIB, "all").fill_(1)
    assert not io.registered


def test_a_forked_child_does_not_get_the_arena() -> None:
    arena = Arena(4 * MIB)
    view = arena.carve(4096, "v")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/maps") as f:
            inside = any(int(line.split("-")[0], 16) <= view.data_ptr() < int(line.split("-")[1].split()[0], 16) for line in f)
        os.write(write, b"1" if inside else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"0"
    os.close(read)
    os.close(write)
    arena.close()


def test_slots_are_disjoint_and_come_back() -> None:
    with Arena(1 * MIB) as arena:
        slots = arena.slots(3, 5000, "staging")
        held = [slots.acquire() for _ in range(3)]
        assert {s.index for s in held} == {0, 1, 2} and slots.free == 0 and slots.try_acquire() is None
        assert sorted(s.buffer.data_ptr() - arena.address for s in held) == [0, 8192, 16384]
        assert all(s.buffer.shape == (5000,) for s in held)
        with pytest.raises(TimeoutError, match="staging"):
            slots.acquire(timeout=0.01)
        held[1].release()
        with slots.acquire() as again:
            assert again.index == held[1].index
        assert slots.free == 1
        with pytest.raises(EngineError, match="released twice"):
            held[1].release()
        assert slots.free == 1


def test_poison_after_release() -> None:
    with Arena(1 * MIB, poison=True) as arena:
        slots = arena.slots(1, 4096, "staging")
        slot = slots.acquire()
        stale = slot.buffer.fill_(0)
        slot.release()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert stale.view(dtype).isnan().all()


def test_no_poison_by_default() -> None:
    with Arena(1 * MIB) as arena:
        slot = arena.slots(1, 4096, "staging").acquire()
        stale = slot.buffer.fill_(7)
        slot.release()
        assert (stale == 7).all()


def test_close_wakes_every_waiter() -> None:
    arena = Arena(1 * MIB)
    slots = arena.slots(1, 4096, "staging")
    held = slots.acquire()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            slots.acquire()
        except EngineError as e:
            errors.append(e)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    time.sleep(0.05)
    arena.close()
    for t in threads:
        t.join(5)
    assert len(errors) == 3
    held.release()  # still allowed
    with pytest.raises(EngineError, match="closed"):
        slots.try_acquire()
    with pytest.raises(EngineError, match="closed"):
        arena.carve(1, "late")


def test_many_threads_never_share_a_slot() -> None:
    with Arena(1 * MIB, poison=True) as arena:
        slots = arena.slots(2, 4096, "staging")
        bad: list[int] = []

        def work(me: int) -> None:
            for _ in range(200):
                with slots.acquire() as slot:
                    slot.buffer.fill_(me)
                    time.sleep(0)
                    if not bool((slot.buffer == me).all()):
                        bad.append(me)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert not bad and slots.free == 2


def test_huge_pages_are_asked_for() -> None:
    with Arena(8 * MIB) as arena, open("/proc/self/smaps") as f:
        flags = ""
        inside = False
        for line in f:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(x, 16) for x in first.split("-"))
                inside = low <= arena.address < high
            elif inside and line.startswith("VmFlags:"):
                flags = line
        assert " hg" in flags and " dc" in flags
        assert mmap.PAGESIZE == 4096
