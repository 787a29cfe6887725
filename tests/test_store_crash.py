"""A crash at any instant gives back the last committed step, with its exact bytes.

Power loss is enumerated: everything that reaches the disk is recorded (writes and fdatasync of the data files, the steps of
replacing the manifest), then the disk is built as it may be after a cut at each point of that record. What was not synced by then
is there, or not, or torn at 512 bytes, write by write. Kills are real: SIGKILL at random moments of a process that trains.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from crash.disk import Disk, watch_manifest
from fake_io import Bytes, FakeIo, content, fill, tiny_model

from zinf import layout
from zinf.errors import IntegrityError, StoreError
from zinf.layout import Key
from zinf.tiers import directory, manifest
from zinf.tiers.nvme import Store


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The events of FakeIo and of the manifest, in one list."""
    events: list[tuple] = []
    watch_manifest(events.append, monkeypatch.setattr)
    return events


def train(store: Store, data: Bytes, rng: random.Random, events: list[tuple]) -> dict[int, dict[Key, bytes]]:
    """Three steps with rewrites, a rollback and a failed commit; marks in `events` what was promised when. step -> content."""
    keys = [key for key in data.places if not layout.place(store.model).places[key][0].file == "frozen"]
    contents = {store.step: content(store, data)}
    for step in (1, 2, 3):
        if step == 2:
            store.write([(key, data.fill(key, 99)) for key in rng.sample(keys, 4)])
            store.rollback()
        for seed in (step, step + 10):
            for key in rng.sample(keys, 5):
                store.write([(key, data.fill(key, seed))])[0].wait()
        if step == 3:
            io, store._io.fail = store._io, lambda kind, *where: OSError(errno.EIO, "sync") if kind == "sync" else None
            with pytest.raises(OSError):
                store.commit(step, {})
            io.fail = lambda *where: None
            for entry in list(store._dirty.values()):
                store.write([(entry.key, data.fill(entry.key, 33))])
        expected = content(store, data)
        contents[step] = expected
        events.append(("begin", str(step)))
        store.commit(step, {"step": step})
        events.append(("done", str(step)))
    return contents


def recorded(tmp_path: Path, record: list[tuple], paths: int, seed: int) -> tuple[list[str], Disk, list[tuple], dict[int, dict[Key, bytes]]]:
    roots = [str(tmp_path / str(i)) for i in range(paths)]
    rng = random.Random(seed)
    io = FakeIo(rng)
    io.journal = record
    data = Bytes(tiny_model())
    with Store.create(roots, tiny_model(), io) as store:
        store.write([(key, data.fill(key, 0)) for key in data.places])
        store.commit(0, {"step": 0})
        base = Disk(roots)
        record.clear()
        contents = train(store, data, rng, record)
    return roots, base, list(record), contents


def check(tmp_path: Path, roots: list[str], files: dict[str, bytes], allowed: set[int], contents: dict[int, dict[Key, bytes]], data: Bytes) -> int:
    """Open the store on a disk of these files; it must be at an allowed step, with that step's bytes. Returns the step."""
    crashed = [str(tmp_path / f"crashed{i}") for i in range(len(roots))]
    for root, copied in zip(roots, crashed, strict=True):
        shutil.rmtree(copied, ignore_errors=True)
        os.mkdir(copied, 0o700)
        for path, content_ in files.items():
            if os.path.dirname(path) == root:
                Path(copied, os.path.basename(path)).write_bytes(content_)
    with Store.open(crashed, FakeIo(), expect=tiny_model()) as store:
        assert store.step in allowed and store.extra == {"step": store.step}
        assert content(store, data) == contents[store.step]
        # And training goes on: a step after the crash is committed and kept.
        key = next(iter(data.places))
        written = data.fill(key, 1234).numpy().tobytes()
        store.write([(key, data.out[key])])
        store.commit(store.step + 1, {})
        step = store.step - 1
    with Store.open(crashed, FakeIo()) as store:
        assert content(store, data) == contents[step] | {key: written}
    return step


@pytest.mark.parametrize(("paths", "seed"), [(1, 0), (2, 1), (1, 2)])
def test_power_loss_at_every_point(tmp_path: Path, record: list[tuple], paths: int, seed: int) -> None:
    roots, base, events, contents = recorded(tmp_path, record, paths, seed)
    rng = random.Random(seed)
    data = Bytes(tiny_model())
    disk, promised, begun = base, 0, 0
    seen = set()
    for event in events:
        if event[0] == "begin":
            begun = int(event[1])
        elif event[0] == "done":
            promised = int(event[1])
        else:
            disk.play(event)
        for _ in range(3 if event[0] in ("rename", "new", "sync") else 1):
            step = check(tmp_path, roots, disk.after_crash(rng), {promised, begun}, contents, data)
            seen.add((event[0], step - promised))
    assert len(events) > 60 and promised == 3
    assert {("rename", 0), ("rename", 1), ("w", 0)} <= seen  # both outcomes of an unsynced rename were seen


def test_power_loss_after_a_kill_between_rename_and_sync(tmp_path: Path, record: list[tuple]) -> None:
    """The next run sees the new manifest and writes over what the old one names: so the old one must not come back."""
    root = str(tmp_path / "s")
    io = FakeIo()
    io.journal = record
    data = Bytes(tiny_model())
    with Store.create([root], tiny_model(), io) as store:
        store.write([(key, data.fill(key, 0)) for key in data.places])
        store.commit(0, {"step": 0})
        keys = [key for key in data.places if not store._entries[key].frozen]
        disk, contents = Disk([root]), {}
        record.clear()
        store.write([(key, data.fill(key, 1)) for key in keys])
        contents[1] = content(store, data)
        store.commit(1, {"step": 1})
    assert record.pop() == ("sync", root)  # killed before it
    for event in list(record):
        disk.play(event)
    record.clear()
    with Store.open([root], io) as store:
        store.write([(key, data.fill(key, 2)) for key in keys])
    for event in list(record):
        disk.play(event)
        for seed in range(3):
            assert check(tmp_path, [root], disk.after_crash(random.Random(seed)), {1}, contents, data) == 1


def test_power_loss_in_the_first_step_is_no_store(tmp_path: Path, record: list[tuple]) -> None:
    root = str(tmp_path / "s")
    io = FakeIo()
    io.journal = record
    data = Bytes(tiny_model())
    with Store.create([root], tiny_model(), io) as store:
        disk = Disk([root])
        record.clear()
        store.write([(key, data.fill(key, 0)) for key in data.places])
        store.commit(0, {})
    for event in list(record):  # opening a store adds to it
        if event[0] == "rename":
            break
        disk.play(event)
        (tmp_path / "c").mkdir(exist_ok=True)
        for path, content_ in disk.after_crash(random.Random(0)).items():
            (tmp_path / "c" / os.path.basename(path)).write_bytes(content_)
        with pytest.raises(StoreError, match="never committed"):
            Store.open([str(tmp_path / "c")], FakeIo())
    # What such a crash leaves behind is in nobody's way.
    with Store.create([str(tmp_path / "c")], tiny_model(), FakeIo()) as store:
        store.commit(0, {})


def test_in_place_store_is_refused_after_power_loss_in_a_step(tmp_path: Path, record: list[tuple]) -> None:
    root = str(tmp_path / "s")
    io = FakeIo()
    io.journal = record
    data = Bytes(tiny_model())
    rng = random.Random(0)
    with Store.create([root], tiny_model(), io, crash_safe=False) as store:
        store.write([(key, data.fill(key, 0)) for key in data.places])
        store.commit(0, {})
        disk, contents = Disk([root]), {0: content(store, data)}
        record.clear()
        keys = [key for key in data.places if not store._entries[key].frozen]
        store.write([(key, data.fill(key, 1)) for key in keys])
        contents[1] = content(store, data)
        store.commit(1, {})
    outcomes = []
    for event in list(record):  # opening a store adds to it
        disk.play(event)
        for _ in range(5):
            (tmp_path / "c").mkdir(exist_ok=True)
            for path, content_ in disk.after_crash(rng).items():
                (tmp_path / "c" / os.path.basename(path)).write_bytes(content_)
            try:
                with Store.open([str(tmp_path / "c")], FakeIo(), verify="off") as store:
                    assert content(store, data) == contents[store.step]  # without a look at checksums
                    outcomes.append(store.step)
            except StoreError as e:
                assert "two steps" in str(e) and not isinstance(e, IntegrityError)
                outcomes.append(-1)
            shutil.rmtree(tmp_path / "c")
    assert set(outcomes) == {-1, 0, 1} and outcomes.index(-1) < outcomes.index(1)


# ---- killed


def _train_until_killed(paths: list[str], pipe: multiprocessing.connection.Connection) -> None:
    """In a child: step after step, each chunk from (key, step); tells each step that is committed."""
    from zinf.aio import open_engine

    engine = open_engine()
    store = Store.open(paths, engine)
    data = Bytes(store.model)
    keys = [key for key in data.places if not store._entries[key].frozen]
    while True:
        step = store.step + 1
        order = random.Random(step).sample(keys, len(keys))
        for tensor in data.out.values():  # what the last step wrote is durable by now
            tensor.fill_(0)
        store.write([(key, fill(data.out[key], key, step)) for key in order])
        reads = store.read([(key, data.back[key]) for key in order[:5]])
        for ticket in reads:
            ticket.wait()
        store.commit(step, {"step": step})
        pipe.send(step)


@pytest.mark.parametrize("paths", [2])
def test_kill_9_at_random_moments(tmp_path: Path, paths: int) -> None:
    aio = pytest.importorskip("zinf.aio")
    model = tiny_model(4096)
    roots = [str(tmp_path / str(i)) for i in range(paths)]
    data = Bytes(model)
    engine = aio.open_engine()
    with Store.create(roots, model, engine) as store:
        store.write([(key, data.fill(key, 0)) for key in data.places])
        store.commit(0, {"step": 0})
    frozen = {key for key, places in data.places.items() if places[0].file == "frozen"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "zinf.tiers.nvme", "fake_io"])
    rng = random.Random(7)
    last = 0
    for _ in range(10):
        ours, theirs = context.Pipe()
        child = context.Process(target=_train_until_killed, args=(roots, theirs), daemon=True)
        child.start()
        theirs.close()
        assert ours.poll(60)
        time.sleep(rng.random() * 0.05)
        child.kill()
        child.join(20)
        told = last
        try:
            while True:
                told = ours.recv()
        except EOFError:
            pass
        with Store.open(roots, engine, expect=model) as store:
            assert store.step in (told, told + 1) and store.step > last
            last = store.step
            assert store.extra == {"step": last}
            assert content(store, data) == {key: data.fill(key, 0 if key in frozen else last).numpy().tobytes() for key in data.places}
    engine.close()


# ---- full


def test_full_while_creating_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("the user's")
    real = os.posix_fallocate
    for fail_at in range(6):
        calls = iter(range(100))

        def fallocate(fd: int, offset: int, nbytes: int, calls=calls, fail_at=fail_at) -> None:
            real(fd, offset, nbytes)
            if next(calls) == fail_at:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        with pytest.raises(OSError, match="No space left") as e:
            Store.create([str(tmp_path / "old"), str(tmp_path / "new")], tiny_model(), FakeIo())
        assert e.value.errno == errno.ENOSPC and os.path.basename(e.value.filename) in directory.DATA
        assert os.listdir(tmp_path) == ["old"] and os.listdir(tmp_path / "old") == ["notes.txt"]


def fill_up(f: io.RawIOBase) -> None:
    with pytest.raises(OSError, match="No space left"):
        while True:
            f.write(bytes(4096))


def test_really_full(tmp_path: Path) -> None:
    """A filesystem of 2 MiB: the store does not fit; then it fits and something else takes the rest."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "zinf-test", str(mount)], capture_output=True).returncode:
        pytest.skip("mounting a small filesystem is not allowed here")
    monkey = pytest.MonkeyPatch()
    try:
        big = layout.Model((layout.make_shard("s", [("w", (500_000,), "bf16", True)]),), 4096)
        with pytest.raises(StoreError, match=r"needs 19\.\d\d MiB .* and 2\.00 MiB \(\d+ bytes\) are free"):
            Store.create([str(mount / "s")], big, FakeIo())
        monkey.setattr(directory, "_SLACK", -(100 << 20))  # the check is fooled: somebody else was faster
        with pytest.raises(OSError, match="No space left"):
            Store.create([str(mount / "s")], big, FakeIo())
        assert not os.listdir(mount)
        model = tiny_model()
        data = Bytes(model)
        with Store.create([str(mount / "s")], model, FakeIo()) as store:
            keys = [key for key in data.places if not store._entries[key].frozen]
            store.write([(key, data.fill(key, 1)) for key in data.places])
            store.commit(1, {})
            before = content(store, data)
            filler = open(mount / "filler", "wb", buffering=0)
            for step in (2, 3, 4, 5):  # the chunks have their blocks, the manifest has the reserve, again and again
                fill_up(filler)
                store.write([(key, data.fill(key, step)) for key in keys])
                before = content(store, data)
                store.commit(step, {})
            fill_up(filler)
            assert manifest.release_reserve(str(mount / "s"))
            fill_up(filler)  # was faster than we
            store.write([(key, data.fill(key, 6)) for key in keys])
            after = content(store, data)
            with pytest.raises(OSError, match="No space left"):
                store.commit(6, {})
            assert store.step == 5 and not store.lost()
            filler.close()
        with Store.open([str(mount / "s")], FakeIo()) as store:
            assert content(store, data) == before
            store.write([(key, data.fill(key, 6)) for key in keys])
            os.unlink(mount / "filler")
            store.commit(6, {})
        with Store.open([str(mount / "s")], FakeIo()) as store:
            assert content(store, data) == after
    finally:
        monkey.undo()
        subprocess.run(["umount", str(mount)], check=True)
