"""What goes into the store comes out of it: versions, steps, order of transfers, failures, checksums."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from fake_io import Bytes, FakeIo, content, fail_writes_of, get, heal, put, tiny_model, zeros

from zinf import layout
from zinf.errors import IntegrityError, StoreError
from zinf.layout import STATE, WEIGHTS, Key
from zinf.tiers import host, manifest, scrub
from zinf.tiers.nvme import Store

A: Key = (WEIGHTS, 0, 0, 0)  # a chunk of each sort
B: Key = (STATE, 0, 0, 1)
B0: Key = (STATE, 0, 0, 0)
FROZEN: Key = (WEIGHTS, 1, 1, 0)


@pytest.fixture
def model() -> layout.Model:
    return tiny_model()


@pytest.fixture
def data(model: layout.Model) -> Bytes:
    return Bytes(model)


@pytest.fixture
def io() -> FakeIo:
    return FakeIo()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


# ---- bytes in, bytes out


def test_never_written_is_zero(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        assert set(content(store, data).items()) == {(key, zeros(data, key)) for key in data.places}
        assert io.reads == 0
        store.commit(0, {})
    with Store.open([path], io, verify="always") as store:
        assert set(content(store, data).items()) == {(key, zeros(data, key)) for key in data.places}
        assert io.reads == 0


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("chunk", [2048, 4096])
def test_round_trip(tmp_path: Path, io: FakeIo, count: int, chunk: int) -> None:
    model = tiny_model(chunk)
    data = Bytes(model)
    paths = [str(tmp_path / str(i)) for i in range(count)]
    store = Store.create(paths, model, io, shares=[1.0, 2.0, 1.5][:count], extra={"at": "creation"})
    assert (store.step, store.extra) == (-1, {"at": "creation"})
    expected = {key: put(store, data, key, 0) for key in data.places}
    assert content(store, data) == expected
    store.commit(7, {"lr": 0.1, "nested": {"ü": (1, 2), "quote": '",\n"digest": "'}})
    extra = {"lr": 0.1, "nested": {"ü": [1, 2], "quote": '",\n"digest": "'}}
    assert store.extra == extra  # as the next open will see it
    store.close()
    with Store.open(paths[::-1], io, verify="always", expect=model) as store:
        assert (store.step, store.extra, store.model, store.paths) == (7, extra, model, paths)
        assert content(store, data) == expected


def test_files_are_private_and_have_their_final_size(path: str, model: layout.Model, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        store.commit(0, {})
    sizes = layout.place(model).sizes[0]
    assert set(os.listdir(path)) == {*sizes, "manifest.json", "reserve", "member.json", "lock"}
    for name in os.listdir(path):
        assert os.stat(os.path.join(path, name)).st_mode & 0o777 == 0o600, name
    for name, size in sizes.items():
        info = os.stat(os.path.join(path, name))
        assert info.st_size == size and info.st_blocks * 512 >= size, name
    assert os.stat(path).st_mode & 0o777 == 0o700


def test_a_step_never_touches_the_committed_version(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        offsets = []
        for step in range(4):
            io.journal.clear()
            put(store, data, A, step)
            put(store, data, A, step + 100)  # again in the same step: the same place
            offsets.append({offset for kind, *rest in io.journal if kind == "w" for offset in rest[1:2]})
            store.commit(step, {})
        first, second = layout.place(model).places[A]
        assert offsets == [{first.offset}, {second.offset}, {first.offset}, {second.offset}]


def test_rollback_forgets_the_step(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        put(store, data, B, 1)
        store.rollback()
        assert get(store, data, B) == zeros(data, B)
        old = put(store, data, A, 1)
        store.commit(1, {})
        assert get(store, data, A) == old != put(store, data, A, 2) == get(store, data, A)
        store.rollback()
        store.rollback()
        assert (get(store, data, A), store.step) == (old, 1)
        store.commit(2, {})
    with Store.open([path], io) as store:
        assert (get(store, data, A), get(store, data, B), store.step) == (old, zeros(data, B), 2)


def test_what_was_not_committed_is_gone_after_close(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        old = put(store, data, A, 1)
        store.commit(1, {})
        put(store, data, A, 2)
    with Store.open([path], io) as store:
        assert get(store, data, A) == old


def test_frozen_is_written_before_the_first_commit_only(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        put(store, data, FROZEN, 1)
        old = put(store, data, FROZEN, 2)
        store.commit(0, {})
        with pytest.raises(StoreError, match="frozen"):
            put(store, data, FROZEN, 3)
        put(store, data, A, 3)
        store.commit(1, {})
        assert get(store, data, FROZEN) == old
    with Store.open([path], io) as store, pytest.raises(StoreError, match="frozen"):
        put(store, data, FROZEN, 3)


def test_bytes_are_counted_by_kind(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        for key in (A, B, B):
            put(store, data, key, 0)
        get(store, data, A)
        get(store, data, FROZEN)  # zeros: no byte moved
        store.commit(0, {})
        assert store.stats() == {"weights_read": 4096, "weights_written": 4096, "state_read": 0, "state_written": 2 * 20480, "commits": 1}


@pytest.mark.parametrize(
    ("key", "make", "error"),
    [
        ((WEIGHTS, 0, 0, 99), lambda d: d.out[A], KeyError),
        ((STATE, 1, 1, 0), lambda d: d.out[A], KeyError),  # frozen: no state
        (A, lambda d: d.out[A][:-1], ValueError),
        (A, lambda d: d.out[B][64 : 64 + 4096], ValueError),
        (A, lambda d: d.out[A].view(2, 2048), ValueError),
        (A, lambda d: d.out[B][::2][:4096], ValueError),
        (A, lambda d: d.out[A].view(torch.int8), TypeError),
        (A, lambda d: torch.empty(4096, dtype=torch.uint8, device="meta"), TypeError),
        (A, lambda d: d.out[A].numpy(), TypeError),
    ],
)
def test_wrong_arguments_start_nothing(path: str, model: layout.Model, data: Bytes, io: FakeIo, key: Key, make, error) -> None:
    with Store.create([path], model, io) as store:
        put(store, data, B, 1)
        io.journal.clear()
        io.reads = 0
        for verb in (store.read, store.write):
            with pytest.raises(error):
                verb([(B, data.out[B]), (key, make(data))])
        assert not io.journal and not io.reads


def test_a_chunk_twice_in_one_write(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store, pytest.raises(ValueError, match="twice"):
        store.write([(A, data.out[A]), (A, data.back[A])])


@pytest.mark.parametrize("extra", [{"x": object()}, {"x": torch.zeros(1)}])
def test_extra_must_be_json(path: str, model: layout.Model, io: FakeIo, extra: dict) -> None:
    with Store.create([path], model, io) as store:
        store.commit(0, {})
        with pytest.raises(TypeError):
            store.commit(1, extra)
        with pytest.raises(ValueError, match="negative"):
            store.commit(-1, {})
        assert store.step == 0


def test_closed(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    store = Store.create([path], model, io)
    store.close()
    store.close()
    for use in (lambda: store.read([(A, data.out[A])]), lambda: store.write([(A, data.out[A])]), lambda: store.commit(0, {}), store.rollback, store.verify):
        with pytest.raises(StoreError, match="closed"):
            use()


# ---- order of transfers. The lazy engine does what it is not waited for at any time, in any order.


@pytest.mark.parametrize("seed", range(5))
def test_transfers_of_one_chunk_keep_their_order(path: str, model: layout.Model, data: Bytes, seed: int) -> None:
    rng = random.Random(seed)
    with Store.create([path], model, FakeIo(rng)) as store:
        spare = Bytes(model)
        for step in range(3):
            # A write that nobody waits for, a read of it, and a second write while the read is in flight.
            for key in data.places:
                if key[1:3] == FROZEN[1:3]:
                    continue
                store.write([(key, data.fill(key, step))])
                reads = store.read([(key, data.back[key])])
                store.write([(key, spare.fill(key, step + 10))])
                reads[0].wait()
                assert torch.equal(data.back[key], data.out[key])
                assert get(store, data, key) == spare.out[key].numpy().tobytes()
            store.commit(step, {})
        assert len(store._io.pending) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_read_of_the_old_version_survives_the_next_writes(path: str, model: layout.Model, data: Bytes, seed: int) -> None:
    with Store.create([path], model, FakeIo(random.Random(seed))) as store:
        old = put(store, data, A, 1)
        store.commit(1, {})
        ticket = store.read([(A, data.back[A])])[0]  # version 0, in flight from here on
        put(store, data, A, 2)  # version 1
        store.commit(2, {})
        put(store, data, A, 3)  # version 0 again: must wait for the read
        ticket.wait()
        assert data.back[A].numpy().tobytes() == old


def test_commit_waits_for_writes_and_syncs_after_them(path: str, model: layout.Model, data: Bytes) -> None:
    io = FakeIo(random.Random(0))
    with Store.create([path], model, io) as store:
        store.write([(key, data.fill(key, 1)) for key in data.places])
        store.commit(1, {})
        kinds = [event[0] for event in io.journal]
        assert kinds == ["w"] * len(data.places) + ["sync"] * 3
        io.journal.clear()
        store.write([(A, data.fill(A, 2))])
        store.commit(2, {})
        assert [(event[0], os.path.basename(event[1])) for event in io.journal] == [("w", "weights"), ("sync", "weights")]  # only what is dirty


def test_reads_go_on_and_writes_wait_while_a_commit_runs(path: str, model: layout.Model, data: Bytes, io: FakeIo, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = manifest.write_file

    def slow(name: str, payload: bytes) -> None:
        inside.set()
        assert go_on.wait(10)
        real(name, payload)

    with Store.create([path], model, io) as store:
        one = put(store, data, A, 1)
        monkeypatch.setattr(manifest, "write_file", slow)
        committer = threading.Thread(target=store.commit, args=(1, {}))
        committer.start()
        assert inside.wait(10)
        assert get(store, data, A) == one
        written = threading.Event()
        writer = threading.Thread(target=lambda: (put(store, data, A, 2), written.set()))
        writer.start()
        assert not written.wait(0.1)
        go_on.set()
        committer.join(10)
        assert written.wait(10)
        writer.join(10)
        store.close()
    with Store.open([path], io) as store:
        assert (get(store, data, A), store.step) == (one, 1)


def test_threads(path: str, model: layout.Model) -> None:
    """Each thread owns some chunks and writes and reads them; another commits all the time. What is committed is never torn."""
    io = FakeIo()
    keys = [key for key in layout.place(model).places if key[1:3] != FROZEN[1:3]]
    with Store.create([path], model, io, verify="always") as store:
        store.commit(0, {})
        stop = threading.Event()
        failures: list[BaseException] = []

        def work(mine: list[Key], seed: int) -> None:
            data = Bytes(model)
            try:
                for i in range(30):
                    expected = {key: put(store, data, key, seed + i) for key in mine}
                    assert {key: get(store, data, key) for key in mine} == expected
            except BaseException as e:
                failures.append(e)

        def commit() -> None:
            step = 1
            while not stop.is_set():
                store.commit(step, {})
                step += 1

        committer = threading.Thread(target=commit)
        workers = [threading.Thread(target=work, args=(keys[i::3], 1000 * i)) for i in range(3)]
        for t in (committer, *workers):
            t.start()
        for t in workers:
            t.join(60)
        stop.set()
        committer.join(60)
        assert not failures and not any(t.is_alive() for t in (committer, *workers))
        store.verify()


# ---- failures


@pytest.mark.parametrize("lazy", [False, True])
def test_a_failed_write_fails_the_commit_until_it_is_written_again(path: str, model: layout.Model, data: Bytes, lazy: bool) -> None:
    io = FakeIo(random.Random(0) if lazy else None)
    with Store.create([path], model, io) as store:
        put(store, data, A, 1)
        store.commit(1, {})
        fail_writes_of(store, io, A)
        ticket = store.write([(A, data.fill(A, 2))])[0]
        for _ in range(2):
            with pytest.raises(OSError, match=r"weights of shard 'embed', chunk 0 of run 0 \(bf16\), parameters embed.weight") as e:
                ticket.wait()
            assert e.value.errno == errno.ENOSPC and e.value.filename == os.path.join(path, "weights")
        heal(io)
        for _ in range(2):
            with pytest.raises(OSError) as e:
                store.commit(2, {})
            assert e.value.errno == errno.ENOSPC and store.step == 1
            with pytest.raises(OSError):  # nor can it be read: its newest bytes are nowhere
                store.read([(A, data.back[A])])
        new = put(store, data, A, 3)
        store.commit(2, {})
        assert (get(store, data, A), store.step) == (new, 2)


def test_a_failed_write_can_be_rolled_back(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        old = put(store, data, A, 1)
        store.commit(1, {})
        fail_writes_of(store, io, A)
        store.write([(A, data.fill(A, 2))])
        heal(io)
        store.rollback()
        assert get(store, data, A) == old
        store.commit(2, {})


def test_submit_itself_fails(path: str, model: layout.Model, data: Bytes, io: FakeIo, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.create([path], model, io) as store:
        with monkeypatch.context() as m:
            m.setattr(io, "submit", lambda ops, owner=None: (_ for _ in ()).throw(RuntimeError("engine is closed")))
            with pytest.raises(RuntimeError):
                store.write([(A, data.out[A])])
            with pytest.raises(RuntimeError):
                store.commit(1, {})
        put(store, data, A, 1)
        store.commit(1, {})


def test_a_failed_sync_loses_what_was_written_to_that_file(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    """After a failed fsync the kernel may drop the pages and report success the next time."""
    with Store.create([path], model, io) as store:
        put(store, data, A, 1)
        put(store, data, B, 1)
        io.fail = lambda kind, path, offset, length: (
            OSError(errno.EIO, "fdatasync: Input/output error", path) if kind == "sync" and path.endswith("weights") else None
        )
        with pytest.raises(OSError, match="fdatasync"):
            store.commit(1, {})
        heal(io)
        with pytest.raises(OSError, match="fdatasync"):
            store.commit(1, {})
        new = put(store, data, A, 2)
        store.commit(1, {})
        assert get(store, data, A) == new


@pytest.mark.parametrize("step", ["write_file", "rename"])
def test_a_manifest_that_cannot_be_written(path: str, model: layout.Model, data: Bytes, io: FakeIo, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    with Store.create([path], model, io) as store:
        old = put(store, data, A, 1)
        store.commit(1, {})
        new = put(store, data, A, 2)
        with monkeypatch.context() as m:
            m.setattr(manifest, step, lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device", a[0])))
            with pytest.raises(OSError, match="No space"):
                store.commit(2, {})
        assert store.step == 1 and not [name for name in os.listdir(path) if name.endswith(".tmp")]
        with Store.open([copy_of(path)], io) as other:
            assert get(other, data, A) == old
        store.commit(2, {})  # there is room again
    with Store.open([path], io) as store:
        assert (get(store, data, A), store.step) == (new, 2)


def copy_of(path: str) -> str:
    """The store as another process would find it after a kill."""
    copy = path + "-copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    return copy


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_unknown_outcome_of_a_commit_forbids_writing(
    path: str, model: layout.Model, data: Bytes, io: FakeIo, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The rename is done and its durability unknown: either step may come back after a crash, so neither may be overwritten."""
    with Store.create([path], model, io) as store:
        put(store, data, A, 1)
        store.commit(1, {})
        new = put(store, data, A, 2)
        with monkeypatch.context() as m:
            m.setattr(manifest, "sync_directory", lambda directory: (_ for _ in ()).throw(error))
            with pytest.raises(type(error)):
                store.commit(2, {})
        io.journal.clear()
        for use in (lambda: put(store, data, A, 3), lambda: store.commit(3, {}), store.rollback):
            with pytest.raises(StoreError, match="close the store and open it again"):
                use()
        assert get(store, data, A) == new and not io.journal
    with Store.open([path], io) as store:
        assert (get(store, data, A), store.step) == (new, 2)


def test_a_failed_read_names_the_chunk(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io) as store:
        put(store, data, B, 1)
        fail_writes_of(store, io, B, errno.EIO, kinds="r")
        ticket = store.read([(B, data.back[B])])[0]
        with pytest.raises(OSError, match="state of shard 'embed', chunk 1 of run 0") as e:
            ticket.wait()
        assert e.value.errno == errno.EIO and e.value.filename.endswith("/state")
        assert ticket.done()
        heal(io)
        store.commit(1, {})  # a failed read is no reason not to commit


def test_waiting_can_time_out_and_network_timeouts_are_errors(path: str, model: layout.Model, data: Bytes, io: FakeIo, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.create([path], model, io) as store:
        put(store, data, A, 1)

        class Never:
            def wait(self, timeout: float | None = None) -> None:
                raise TimeoutError("not yet")

            def done(self) -> bool:
                return False

        with monkeypatch.context() as m:
            m.setattr(io, "submit", lambda ops, owner=None: [Never()])
            ticket = store.read([(A, data.back[A])])[0]
        for _ in range(2):
            with pytest.raises(TimeoutError, match="not yet"):
                ticket.wait(0.01)
        assert not ticket.done()
        store._entries[A].reads.clear()
        fail_writes_of(store, io, A, errno.ETIMEDOUT, kinds="r")
        ticket = store.read([(A, data.back[A])])[0]
        with pytest.raises(OSError, match="weights of shard") as e:
            ticket.wait()
        assert e.value.errno == errno.ETIMEDOUT and ticket.done()
        heal(io)


# ---- checksums


def damage(path: str, entry, version: int, at: int = 100) -> None:
    with open(entry.file.path, "r+b") as f:
        f.seek(entry.offsets[version] + at)
        byte = f.read(1)[0]
        f.seek(entry.offsets[version] + at)
        f.write(bytes([byte ^ 1]))


def test_one_wrong_bit_is_found_and_named(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    key: Key = (STATE, 1, 0, 1)  # elements 2048.. of a bf16 run: block.a only
    with Store.create([path], model, io) as store:
        for k in data.places:
            put(store, data, k, 1)
        store.commit(1, {})
        entry = store._entries[key]
        damage(path, entry, 0)
        where = rf"{path}/state: 20480 bytes at offset {entry.offsets[0]} are not what was written"
        text = where + r".*state of shard 'block', chunk 1 of run 0 \(bf16\), parameters block\.a;"
        with pytest.raises(IntegrityError, match=text):
            store.verify()
    with pytest.raises(IntegrityError, match=text):
        Store.open([path], io)
    with pytest.raises(IntegrityError, match=text):  # the lock was released, the files closed
        Store.open([path], io, verify="always")
    with Store.open([path], io, verify="off") as store:
        get(store, data, key)
        with pytest.raises(IntegrityError):
            store.verify()


def test_always_compares_on_each_read(path: str, model: layout.Model, data: Bytes, io: FakeIo) -> None:
    with Store.create([path], model, io, verify="always") as store:
        put(store, data, A, 1)
        damage(path, store._entries[A], 0)
        ticket = store.read([(A, data.back[A])])[0]
        for _ in range(2):
            with pytest.raises(IntegrityError, match=r"embed\.weight"):
                ticket.wait()
        put(store, data, A, 2)
        get(store, data, A)


def test_verify_streams_large_chunks_through_a_small_ring(path: str, io: FakeIo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "PIECE", 8192)
    monkeypatch.setattr(scrub, "DEPTH", 3)
    arenas: list[int] = []
    real = host.Arena.__init__
    monkeypatch.setattr(host.Arena, "__init__", lambda self, nbytes, *a, **k: (arenas.append(nbytes), real(self, nbytes, *a, **k))[1])
    model = tiny_model(1 << 20)
    data = Bytes(model)
    io = FakeIo(random.Random(1))
    with Store.create([path], model, io) as store:
        for k in data.places:
            put(store, data, k, 1)
        store.commit(1, {})
        put(store, data, B0, 2)  # a newer version beside the committed one: both are checked
        arenas.clear()
        seen: list[tuple[int, int]] = []
        store.verify(lambda done, total: seen.append((done, total)))
        total = sum(p[0].length for p in data.places.values()) + data.out[B0].numel()
        assert seen[-1] == (total, total) and len(seen) == len(data.places) + 1 and seen == sorted(seen)
        assert arenas == [3 * 8192]
        for version in (0, 1):
            damage(path, store._entries[B0], version, at=30000)
            with pytest.raises(IntegrityError):
                store.verify()
            assert not io.pending  # nothing is on its way into memory that was given back
            damage(path, store._entries[B0], version, at=30000)
        store.verify()


# ---- one version only


def test_in_place_is_half_the_bytes_and_says_what_is_lost(path: str, model: layout.Model, data: Bytes, io: FakeIo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zinf"), Store.create([path], model, io, crash_safe=False) as store:
        assert [r for r in caplog.messages if "crash_safe is off" in r] == caplog.messages and len(caplog.messages) == 1
        first = put(store, data, A, 1)
        store.commit(1, {})
        with Store.open([copy_of(path)], io) as other:
            assert get(other, data, A) == first
        put(store, data, A, 2)
        with pytest.raises(StoreError, match="overwritten in place"):
            Store.open([copy_of(path)], io, verify="off")
        with pytest.raises(StoreError, match="one version"):
            store.rollback()
        second = put(store, data, A, 3)
        store.commit(2, {})
        store.rollback()  # nothing to forget
    with Store.open([path], io) as store:
        assert (get(store, data, A), store.step, store.crash_safe) == (second, 2, False)
    for name in ("weights", "state"):
        assert os.path.getsize(os.path.join(path, name)) * 2 == layout.place(model).sizes[0][name]


def test_the_checksum_is_that_of_the_package_and_lets_others_run():
    import xxhash

    from zinf.tiers import chunk

    for n in (0, 1, 240, 241, 4096, 1 << 20):
        data = torch.arange(n, dtype=torch.int64).to(torch.uint8)
        assert chunk.checksum(data) == xxhash.xxh3_64_intdigest(data.numpy().tobytes())
    assert chunk._xxh3 is not None  # with the package that is installed here
