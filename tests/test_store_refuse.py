"""A store that cannot be used says so in one line, with what to do, and nothing is damaged."""

from __future__ import annotations

import errno
import gc
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from fake_io import Bytes, FakeIo, content, tiny_model

from zinf import layout
from zinf.errors import StoreError
from zinf.tiers import directory, host, manifest
from zinf.tiers.nvme import Store, clean, inspect


@pytest.fixture
def io() -> FakeIo:
    return FakeIo()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def make(path: str | list[str], io: FakeIo, step: int = 5) -> layout.Model:
    model = tiny_model()
    data = Bytes(model)
    with Store.create([path] if isinstance(path, str) else path, model, io) as store:
        store.write([(key, data.fill(key, step)) for key in data.places])
        store.commit(step, {"n": step})
    return model


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


# ---- directories


def test_nothing_there(tmp_path: Path, path: str, io: FakeIo) -> None:
    with pytest.raises(StoreError, match=f"there is no store at {path}: the directory does not exist"):
        Store.open([path], io)
    os.mkdir(path)
    with pytest.raises(StoreError, match=f"there is no store at {path}"):
        Store.open([path], io)
    assert not os.listdir(path)
    with pytest.raises(StoreError, match=f"{tmp_path}/not-mounted does not exist: mount the drive or create the directory"):
        Store.create([str(tmp_path / "not-mounted" / "run")], tiny_model(), io)
    assert os.listdir(tmp_path) == ["store"]


def test_a_file_in_the_way(path: str, io: FakeIo) -> None:
    Path(path).write_text("x")
    for use in (lambda: Store.create([path], tiny_model(), io), lambda: Store.open([path], io)):
        with pytest.raises(StoreError, match="is not a directory"):
            use()
    with pytest.raises(StoreError, match="is not a directory, or a part of it is a file"):
        Store.create([path + "/below"], tiny_model(), io)


@pytest.mark.parametrize(
    ("code", "text"),
    [(errno.EROFS, "read-only filesystem: remount"), (errno.EACCES, "not writable for this user"), (errno.EIO, "cannot be used: .*Input/output")],
)
def test_directory_cannot_be_made_or_locked(path: str, io: FakeIo, monkeypatch: pytest.MonkeyPatch, code: int, text: str) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code), path)

    with monkeypatch.context() as m:
        m.setattr(os, "mkdir", refuse)
        with pytest.raises(StoreError, match=text):
            Store.create([path], tiny_model(), io)
    make(path, io)
    before = tree(Path(path))
    with monkeypatch.context() as m:
        m.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match=text):
            directory.Lock([path])
    assert tree(Path(path)) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_really_not_writable(tmp_path: Path, io: FakeIo) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="not writable for this user"):
        Store.create([str(tmp_path / "locked" / "run")], tiny_model(), io)


def test_links_are_not_followed(tmp_path: Path, path: str, io: FakeIo) -> None:
    make(path, io)
    link = str(tmp_path / "link")
    os.symlink(path, link)
    for use in (lambda: Store.open([link], io), lambda: Store.create([link], tiny_model(), io, overwrite=True)):
        with pytest.raises(StoreError, match="is a symbolic link: give the directory it points to"):
            use()
    for name in ("weights", "manifest.json", "member.json", "lock"):
        real = os.path.join(path, name)
        os.rename(real, tmp_path / "aside")
        os.symlink(tmp_path / "aside", real)
        with pytest.raises((StoreError, OSError)):
            Store.open([path], io)
        os.rename(tmp_path / "aside", real)
    Store.open([path], io).close()
    assert inspect([str(tmp_path)])["stores"][0]["paths"] == [path]  # once: not through the link


def test_the_same_directory_twice(path: str, io: FakeIo) -> None:
    with pytest.raises(StoreError, match="given twice"):
        Store.create([path, path + "/."], tiny_model(), io)
    with pytest.raises(TypeError, match="list"):
        Store.create(path, tiny_model(), io)
    with pytest.raises(ValueError, match="2 shares for 1 paths"):
        Store.create([path], tiny_model(), io, shares=[1, 1])
    with pytest.raises(ValueError, match="verify is 'sometimes'"):
        Store.open([path], io, verify="sometimes")


def test_tmpfs_is_told_once(io: FakeIo, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert directory.filesystem("/dev/shm") in ("tmpfs", "") and directory.filesystem("/proc") == "proc"
    monkeypatch.setattr(directory, "filesystem", lambda path: "tmpfs")
    path = str(tmp_path / "ram")
    with caplog.at_level(logging.WARNING, "zinf"):
        make(path, io)
        for _ in range(2):
            Store.open([path], io).close()
    assert [m for m in caplog.messages if "is on tmpfs: it spends the RAM it should save" in m] == caplog.messages and len(caplog.messages) == 1


def test_too_little_space_is_refused_with_the_numbers(tmp_path: Path, io: FakeIo, monkeypatch: pytest.MonkeyPatch) -> None:
    need = sum(layout.place(tiny_model(), (1, 1)).nbytes(i) + directory._SLACK for i in (0, 1))
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]  # one filesystem: their needs add up
    real = os.statvfs(tmp_path)

    class Room:
        f_bavail, f_frsize = need - 1, 1

    monkeypatch.setattr(os, "statvfs", lambda p: Room)
    with pytest.raises(StoreError, match=rf"needs .*\({need} bytes\) on {paths[0]}, {paths[1]}, and .*\({need - 1} bytes\) are free there \(1 bytes short\)"):
        Store.create(paths, tiny_model(), io)
    assert not os.listdir(tmp_path)
    Room.f_bavail = need
    Store.create(paths, tiny_model(), io).close()
    assert real.f_bavail > 0


def test_overwriting_counts_what_it_frees_and_keeps_the_old_store_if_that_is_too_little(path: str, io: FakeIo, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path, io)
    before = tree(Path(path))

    class Room:
        f_bavail, f_frsize = directory._SLACK, 1  # all but the data, which the old store gives back

    monkeypatch.setattr(os, "statvfs", lambda p: Room)
    bigger = layout.Model(tiny_model().shards * 64, 2048)
    with pytest.raises(StoreError, match="bytes short"):
        Store.create([path], bigger, io, overwrite=True)
    assert {k: v for k, v in tree(Path(path)).items() if k != "lock"} == {k: v for k, v in before.items() if k != "lock"}
    Store.create([path], tiny_model(), io, overwrite=True).close()


# ---- what stands there already


def test_a_committed_store_is_not_replaced_by_accident(path: str, io: FakeIo) -> None:
    make(path, io)
    with pytest.raises(StoreError, match=f"there is a store at {path} already"):
        Store.create([path], tiny_model(), io)
    Store.open([path], io).close()
    with Store.create([path], tiny_model(4096), io, overwrite=True) as store:
        assert store.step == -1
        store.commit(0, {})
    with Store.open([path], io) as store:
        assert store.step == 0 and store.model.chunk == 4096


def test_an_aborted_creation_is_in_nobodys_way(tmp_path: Path, io: FakeIo) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    Store.create(paths, tiny_model(), io).close()
    with pytest.raises(StoreError, match="never committed"):
        Store.open(paths, io)
    with pytest.raises(StoreError, match="path 1 of a store whose first path is elsewhere"):
        Store.create(paths[1:], tiny_model(), io)
    make(paths, io)


def test_foreign_files_are_not_touched(path: str, io: FakeIo) -> None:
    os.mkdir(path)
    Path(path, "weights").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match=r"files that are not zinf's \(weights\)"):
            Store.create([path], tiny_model(), io, overwrite=overwrite)
    assert tree(Path(path)) == {"weights": b"mine"}


def test_another_model_layout_or_format(path: str, io: FakeIo) -> None:
    model = make(path, io)
    other = layout.Model((layout.make_shard("x", [("y", (3,), "bf16", True)]),), 2048)
    with pytest.raises(StoreError, match=f"another model .*{model.fingerprint()}, this model has {other.fingerprint()}"):
        Store.open([path], io, expect=other)
    with pytest.raises(StoreError, match=rf"another layout \(chunk_size 2048, this run has 4096; fingerprint {model.fingerprint()}\): set chunk_size to 2048"):
        Store.open([path], io, expect=tiny_model(4096))
    for name in ("manifest.json", "member.json"):
        file = Path(path, name)
        text = file.read_text()
        file.write_text(text.replace('"format": 1', '"format": 2', 1))
        with pytest.raises(StoreError, match=f"{name} has store format 2; this zinf reads format 1"):
            Store.open([path], io)
        file.write_text(text)
    Store.open([path], io, expect=model).close()


def test_paths_of_different_stores_or_not_all(tmp_path: Path, io: FakeIo) -> None:
    one, two = [str(tmp_path / n) for n in ("a", "b")], [str(tmp_path / n) for n in ("c", "d")]
    make(one, io)
    make(two, io)
    with pytest.raises(StoreError, match="belong to different stores"):
        Store.open([one[0], two[1]], io)
    for some in (one[:1], one[1:]):
        with pytest.raises(StoreError, match="has 2 paths, and 1 are given"):
            Store.open(some, io)


@pytest.mark.parametrize("name", ["weights", "state", "frozen"])
def test_data_files_are_looked_at(path: str, io: FakeIo, name: str) -> None:
    make(path, io)
    file = Path(path, name)
    size = file.stat().st_size
    os.truncate(file, size - 4096)
    with pytest.raises(StoreError, match=f"{name} is {size - 4096} bytes, and the manifest says {size}"):
        Store.open([path], io)
    os.unlink(file)
    with pytest.raises(StoreError, match=f"{name} is missing"):
        Store.open([path], io)
    os.mkfifo(file)
    with pytest.raises(StoreError, match=f"{name} is "):
        Store.open([path], io)


# ---- manifests that are damaged or hostile


def test_every_damage_of_a_manifest_is_found(path: str, io: FakeIo) -> None:
    make(path, io)
    file = Path(path, "manifest.json")
    good = file.read_bytes()
    rng = random.Random(0)
    for i in range(300):
        bad = bytearray(good)
        if i % 3 == 0:
            del bad[rng.randrange(len(bad) - 1) :]
        elif i % 3 == 1:
            bad[rng.randrange(len(bad) - 2)] ^= 1 << rng.randrange(8)
        else:
            at = rng.randrange(len(bad) - 2)
            bad[at : at + rng.randrange(1, 600)] = bytes(rng.randrange(256) for _ in range(rng.randrange(20)))
        if bytes(bad).rstrip() == good.rstrip():
            continue
        with pytest.raises(StoreError, match=r"manifest\.json"):
            manifest.decode(bytes(bad), str(file))
    manifest.decode(good, str(file))


def resign(fields: dict) -> bytes:
    """A manifest with a right checksum, as an attacker would make it."""
    fields = {k: v for k, v in fields.items() if k != "digest"}
    body = json.dumps(fields)[:-1].encode()
    return body + b',\n"digest": "%016x"}\n' % xxhash.xxh3_64_intdigest(body)


def mutations(fields: dict) -> list[dict]:
    """Every leaf and key replaced by absurd values, one at a time."""
    out = []

    def walk(value: object, rebuild) -> None:
        for bad in (None, -1, 0, 1 << 70, 1e308, "x", "../../etc", [], {}, True, [[]]):
            if type(bad) is not type(value) or bad != value:
                out.append(rebuild(bad))
        if isinstance(value, dict):
            for k in value:
                walk(value[k], lambda new, k=k, value=value: rebuild(value | {k: new}))
                out.append(rebuild({a: b for a, b in value.items() if a != k}))
        elif isinstance(value, list):
            for i in range(min(len(value), 2)):
                walk(value[i], lambda new, i=i, value=value: rebuild([*value[:i], new, *value[i + 1 :]]))

    walk(fields, lambda new: new)
    return [new for new in out if isinstance(new, dict)]


def test_a_hostile_manifest_points_nowhere(path: str, io: FakeIo) -> None:
    """With the checksum and the fingerprint put right: refused, or a store within its own files; never another exception."""
    make(path, io)
    file = Path(path, "manifest.json")
    fields = json.loads(file.read_bytes())
    assert resign(fields)
    before = {name: os.path.getsize(os.path.join(path, name)) for name in directory.DATA}
    refused = opened = 0
    for bad in mutations(fields):
        try:
            bad["fingerprint"] = layout.Model.from_json(bad["layout"]).fingerprint()
        except Exception:
            pass
        file.write_bytes(resign(bad))
        try:
            with Store.open([path], io) as store:
                opened += 1
                for entry in store._entries.values():
                    assert os.path.dirname(entry.file.path) == path
                    assert all(0 <= o and o + entry.length <= os.path.getsize(entry.file.path) for o in entry.offsets)
        except StoreError:
            refused += 1
    assert refused > 300 and {name: os.path.getsize(os.path.join(path, name)) for name in directory.DATA} == before
    assert opened < 60  # step, extra, names of shards and parameters: free text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '{"format": 1}', '{"format": 1, "uuid": "x", "index": 1, "count": 1}', '{"format": 1, "uuid": 3, "index": 0, "count": 1}', "[" * 100000],
)
def test_a_damaged_member_file(path: str, io: FakeIo, text: str) -> None:
    make(path, io)
    Path(path, "member.json").write_text(text)
    with pytest.raises(StoreError, match=r"member\.json is damaged"):
        Store.open([path], io)


def test_a_second_version_where_there_is_only_one(path: str, io: FakeIo) -> None:
    make(path, io)
    file = Path(path, "manifest.json")
    fields = json.loads(file.read_bytes())
    frozen = next(i for i, places in enumerate(layout.place(tiny_model()).places.values()) if places[0].file == "frozen")
    for bad in (
        fields | {"versions": fields["versions"][:frozen] + "1" + fields["versions"][frozen + 1 :]},
        fields | {"crash_safe": False, "versions": "1" * 14},
    ):
        file.write_bytes(resign(bad))
        with pytest.raises(StoreError, match="a version that its store does not have"):
            Store.open([path], io)


def test_a_manifest_of_another_store(tmp_path: Path, io: FakeIo) -> None:
    one, two = str(tmp_path / "a"), str(tmp_path / "b")
    make(one, io)
    make(two, io)
    os.replace(os.path.join(two, "manifest.json"), os.path.join(one, "manifest.json"))
    with pytest.raises(StoreError, match="belongs to another store"):
        Store.open([one], io)


def test_manifest_of_many_chunks_is_small(path: str) -> None:
    import array

    model = layout.Model((layout.make_shard("s", [("w", (2048 * 20000,), "bf16", True)]),), 2048)
    m = manifest.Manifest("u" * 32, 1, model, (1.0,), True, True, bytes(40000), array.array("Q", range(40000)), {"a": 1})
    data = m.encode()
    assert len(data) < 18 * 40000 and manifest.decode(data, "x") == m


# ---- in use


def _hold(paths: list[str], ready, done, writable: bool) -> None:
    store = Store.open(paths, FakeIo(), writable=writable)
    ready.set()
    done.wait(60)
    store.close()


def test_in_use_by_another_process(path: str, io: FakeIo) -> None:
    make(path, io)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "zinf.tiers.nvme", "fake_io"])
    ready, done = context.Event(), context.Event()
    child = context.Process(target=_hold, args=([path], ready, done, True), daemon=True)
    child.start()
    assert ready.wait(60)
    for use in (
        lambda: Store.open([path], io),
        lambda: Store.open([path], io, writable=False),
        lambda: Store.create([path], tiny_model(), io, overwrite=True),
    ):
        with pytest.raises(StoreError, match=f"in use by process {child.pid}: wait for it or stop it"):
            use()
    (store,) = inspect([path])["stores"]
    assert store["locked_by"] == child.pid and store["step"] == 5
    assert clean([path], yes=True) == {
        "removed": [],
        "kept": [([path], f"the store at {path} is in use by process {child.pid}: wait for it or stop it, or choose another run_name")],
    }
    child.kill()
    child.join(20)
    Store.open([path], io).close()  # the lock died with it


def test_in_use_by_this_process(tmp_path: Path, io: FakeIo) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    make(paths, io)
    with Store.open(paths, io):
        with pytest.raises(StoreError, match="in use by this process"):
            Store.open(paths, io)
        assert inspect(paths)["stores"][0]["locked_by"] == os.getpid()
    Store.open(paths, io).close()


def test_readers_share(path: str, io: FakeIo) -> None:
    model = make(path, io)
    data = Bytes(model)
    with Store.open([path], io, writable=False) as one, Store.open([path], io, writable=False) as two:
        assert content(one, data) == content(two, data)
        for use in (lambda: one.write([(next(iter(data.places)), data.out[next(iter(data.places))])]), lambda: one.commit(6, {}), one.rollback):
            with pytest.raises(StoreError, match="read-only"):
                use()
        with pytest.raises(StoreError, match="in use"):
            Store.open([path], io)
    with Store.open([path], io) as store:
        assert store.step == 5


def test_a_forked_child_neither_keeps_the_lock_nor_gives_it_away(path: str, io: FakeIo) -> None:
    make(path, io)
    store = Store.open([path], io)
    go, stop = os.pipe()
    closed, say_closed = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(stop)
        store.close()
        os.write(say_closed, b"1")
        os.read(go, 1)
        os._exit(0)
    assert os.read(closed, 1) == b"1"
    with pytest.raises(StoreError, match="in use by this process"):
        Store.open([path], io)
    store.close()
    Store.open([path], io).close()  # the child lives
    for fd in (stop, go, closed, say_closed):
        os.close(fd)
    os.waitpid(pid, 0)


def test_a_store_that_is_dropped_is_not_in_use(path: str, io: FakeIo) -> None:
    make(path, io)
    store = Store.open([path], io)
    assert store.step == 5
    del store
    gc.collect()
    Store.open([path], io).close()


def test_the_race_of_two_creators_harms_neither(path: str, io: FakeIo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loser made the directory; it must not take it away from the winner."""
    real = directory.Lock
    winner: list[Store] = []

    def slow(paths, **kwargs):
        if not winner:
            winner.append(None)
            winner[0] = Store.create([path], tiny_model(), io)
        return real(paths, **kwargs)

    monkeypatch.setattr(directory, "Lock", slow)
    with pytest.raises(StoreError, match="in use"):
        Store.create([path], tiny_model(), io)
    winner[0].commit(0, {})
    winner[0].close()
    Store.open([path], io).close()


def test_refused_open_leaves_nothing_open(path: str, io: FakeIo) -> None:
    model = make(path, io)
    fds = len(os.listdir("/proc/self/fd"))
    live = host.allocated_bytes()
    for use in (
        lambda: Store.open([path], io, expect=tiny_model(4096)),
        lambda: Store.create([path], model, io),
        lambda: os.truncate(os.path.join(path, "state"), 4096) or Store.open([path], io),
    ):
        with pytest.raises(StoreError):
            use()
    assert len(os.listdir("/proc/self/fd")) == fds and host.allocated_bytes() == live


# ---- inspect and clean


def test_inspect_and_clean(tmp_path: Path, io: FakeIo) -> None:
    drives = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for drive in drives:
        drive.mkdir()
        (drive / "photos").mkdir()
        (drive / "photos" / "weights").write_text("not a store")
    roots = [str(d) for d in drives]
    good = [str(d / "good") for d in drives]
    model = make(good, io)
    aborted = [str(drives[0] / "aborted")]
    Store.create(aborted, model, io).close()
    broken = str(drives[1] / "broken")
    make(broken, io)
    Path(broken, "manifest.json").write_text("{}")
    Path(good[0], "note.txt").write_text("the user's")

    stores = {tuple(s["paths"]): s for s in inspect(roots)["stores"]}
    assert set(stores) == {tuple(good), tuple(aborted), (broken,)}
    g = stores[tuple(good)]
    assert (g["state"], g["step"], g["count"], g["locked_by"], g["clean"], g["crash_safe"]) == ("committed", 5, 2, None, True, True)
    assert (g["fingerprint"], g["shards"], g["parameters"], g["chunk"]) == (model.fingerprint(), 2, model.numel, 2048)
    assert g["chunks"] == g["chunks_written"] == len(layout.place(model).places)
    assert g["bytes"] >= sum(sum(s.values()) for s in layout.place(model, (1, 1)).sizes)
    assert stores[tuple(aborted)]["state"] == "uncommitted"
    assert stores[(broken,)]["state"] == "damaged" and "manifest.json" in stores[(broken,)]["error"]
    assert inspect([roots[0]])["stores"][1]["state"] == "incomplete" and inspect([roots[1]])["stores"][1]["state"] == "incomplete"

    before = tree(tmp_path / "nvme0" / "good")
    first = clean(roots, yes=False)
    assert first["removed"] == aborted and sorted(p for p, _ in first["kept"]) == sorted([good, [broken]])
    assert tree(tmp_path / "nvme0" / "good") == before
    with Store.open(good, io):
        assert sorted(clean(roots, yes=True)["removed"]) == [broken]
    assert clean(roots, yes=True) == {"removed": good, "kept": []}
    assert tree(tmp_path) == {
        "nvme0": None,
        "nvme1": None,
        "nvme0/photos": None,
        "nvme1/photos": None,
        "nvme0/photos/weights": b"not a store",
        "nvme1/photos/weights": b"not a store",
        "nvme0/good": None,
        "nvme0/good/note.txt": b"the user's",
    }
    assert inspect(roots) == {"stores": []} and inspect([str(tmp_path / "missing")]) == {"stores": []}


def test_importing_the_store_starts_nothing() -> None:
    """No thread, no torch CUDA context, no compiled module needed to look at a store."""
    code = "import threading, sys, zinf.tiers.nvme; assert threading.active_count() == 1; assert 'zinf._aio' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
    assert torch is not None


def test_a_directory_with_nothing_but_a_lock_is_cleaned(tmp_path: Path) -> None:
    """What a kill at the begin of a creation leaves, or at the end of a removal."""
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "lock").write_text("4711\n")
    (tmp_path / "begun" / "member.json.tmp").write_text("{")
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "lock").write_text("of my bicycle: 4711\n")
    assert [(s["state"], s["paths"]) for s in inspect([str(tmp_path)])["stores"]] == [("uncommitted", [str(tmp_path / "begun")])]
    assert clean([str(tmp_path)], yes=False) == {"removed": [str(tmp_path / "begun")], "kept": []}
    assert os.listdir(tmp_path) == ["users"]


@pytest.mark.parametrize("action", ["again", "overwrite", "clean"])
@pytest.mark.parametrize("swapped", [False, True])
def test_killed_while_a_store_of_two_paths_is_removed(tmp_path: Path, io: FakeIo, monkeypatch: pytest.MonkeyPatch, action: str, swapped: bool) -> None:
    """At each file that goes: the same command, and a new store there, then say nothing of paths of a store that is elsewhere."""
    order = slice(None, None, -1 if swapped else 1)
    for n in range(100):
        paths = [str(tmp_path / f"{n}a"), str(tmp_path / f"{n}b")]
        if action == "again":
            Store.create(paths, tiny_model(), io).close()
        else:
            make(paths, io)
        killed = False
        with monkeypatch.context() as m:
            left, real = [n], os.unlink

            def unlink(path, *args, left=left, real=real, **kwargs):
                if left[0] <= 0:
                    left[0] = -1
                    raise KeyboardInterrupt  # and from then on always: as SIGKILL, for the files
                left[0] -= os.path.lexists(path)
                return real(path, *args, **kwargs)

            m.setattr(os, "unlink", unlink)
            try:
                if action == "clean":
                    clean(paths[order], yes=True)
                else:
                    Store.create(paths[order], tiny_model(), io, overwrite=action == "overwrite").close()
            except KeyboardInterrupt:
                killed = True
        there = os.path.exists(os.path.join(paths[0], manifest.MANIFEST))  # until that is gone it is a store as before
        Store.create(paths[order], tiny_model(), io, overwrite=there).close()
        clean(paths, yes=False)
        assert not os.path.exists(paths[0]) and not os.path.exists(paths[1])
        if not killed:
            break
    assert n > 6
