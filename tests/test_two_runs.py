"""Two runs, one disk: neither harms the other, whoever is killed, and nothing that is not a store's own is touched."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_io import Bytes, FakeIo, tiny_model
from models import HYPER, LEAF_BYTES, llama, train

from zinf import cli
from zinf.engine import Engine
from zinf.errors import StoreError
from zinf.tiers import directory, manifest
from zinf.tiers.nvme import Store, clean, inspect

TESTS = Path(__file__).parent
HOLD = """
import os, sys, time
sys.path[:0] = [{tests!r}, {root!r}]
from fake_io import FakeIo
from zinf.tiers.nvme import Store
store = Store.open([{path!r}], FakeIo())
child = os.fork() if {fork} else 1
if child:
    print(child, flush=True)
time.sleep(100)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    path, model, io = str(tmp_path / "store"), tiny_model(), FakeIo()
    data = Bytes(model)
    with Store.create([path], model, io) as store:
        store.write([(key, data.fill(key, 1)) for key in data.places])
        store.commit(1, {})
    return path


def hold(path: str, fork: bool) -> tuple[subprocess.Popen, int]:
    """A process that has the store open, and what it printed: the pid of its forked child, if it has one."""
    code = HOLD.format(tests=str(TESTS), root=str(TESTS.parent), path=path, fork=fork)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("fork", [False, True])
def test_the_lock_of_a_killed_run_is_free(path: str, fork: bool) -> None:
    """Also where a forked child (a DataLoader's worker, say) outlives the run."""
    process, child = hold(path, fork)
    with pytest.raises(StoreError, match=f"in use by process {process.pid}: wait for it or stop it"):
        Store.open([path], FakeIo())
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    try:
        assert inspect([path])["stores"][0]["locked_by"] is None
        Store.open([path], FakeIo()).close()
    finally:
        if fork:
            os.kill(child, signal.SIGKILL)


def test_who_is_named_where_the_kernel_does_not_say(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pid in the lock file counts only while it is of this boot, and of a process that lives."""
    monkeypatch.setattr(directory, "_flock_pids", lambda inode: iter(()))  # as seen from another container, or over a network mount
    lock = Path(path, "lock")
    with Store.open([path], FakeIo()):
        pid, boot = lock.read_bytes().split()
        assert int(pid) == os.getpid() and boot == directory._boot_id() != b""
        assert directory.holder(path) == os.getpid()
        dead = subprocess.Popen(["true"])
        dead.wait()
        for stale in (b"%d %s\n" % (dead.pid, boot), b"%d another-boot\n" % os.getpid(), b"%d\n" % os.getpid(), b"\xff", b""):
            lock.write_bytes(stale)
            assert directory.holder(path) == 0
            with pytest.raises(StoreError, match="in use by another process"):
                Store.open([path], FakeIo())
    Store.open([path], FakeIo()).close()  # whatever the file says, nobody holds it


def test_clean_keeps_what_lives_what_is_committed_and_what_is_not_ours(path: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    process, _ = hold(path, False)
    mine = {"app/manifest.json": "{}", "app/weights": "mine", "team/member.json": '{"name": "me"}', "team/state": "mine", "team/lock": ""}
    for name, content in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    unborn = str(tmp_path / "unborn")
    living = Store.create([unborn], tiny_model(), FakeIo())  # not yet committed, and in use
    for command, code in (["clean", str(tmp_path)], 0), (["clean", str(tmp_path), "--yes"], 1):
        assert cli.main(command) == code
        said = capsys.readouterr().out
        assert "\nremoved " not in f"\n{said}" and f"kept {unborn}: the store at {unborn} is in use by this process" in said
        assert f"kept {tmp_path}/team: it may not be zinf's: {tmp_path}/team/member.json" in said and "app" not in said
    living.close()
    process.kill()
    process.wait(20)
    assert cli.main(["clean", str(tmp_path)]) == 0  # now dead, but committed
    assert [p for p in (path, unborn) if os.path.exists(p)] == [path] and capsys.readouterr().out.startswith(f"removed {unborn}\n")
    Store.open([path], FakeIo()).close()
    assert clean([str(tmp_path)], yes=True)["removed"] == [path]
    assert {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()} == mine
    for overwrite in (False, True):
        with pytest.raises(StoreError, match=r"files that are not zinf's \(manifest.json, weights\)"):
            Store.create([str(tmp_path / "app")], tiny_model(), FakeIo(), overwrite=overwrite)
    assert (tmp_path / "app/manifest.json").read_text() == "{}"


def test_a_creation_killed_at_its_first_byte_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for name in ("lock", "member.json.tmp"):
        (tmp_path / "store" / name).write_text("4711")
    Store.create([str(tmp_path / "store")], tiny_model(), FakeIo()).close()


@pytest.mark.parametrize("name", ["manifest.json", "member.json"])
@pytest.mark.parametrize(("found", "said"), [("2", "store format 2; this zinf reads format 1: use the zinf"), ("99", "store format 99; this")])
def test_a_newer_format_is_refused_with_its_number(path: str, name: str, found: str, said: str) -> None:
    file = Path(path, name)
    file.write_text(file.read_text().replace(f'"format": {manifest.FORMAT}', f'"format": {found}', 1))
    with pytest.raises(StoreError, match=f"{name} has {said}"):
        Store.open([path], FakeIo())


@pytest.mark.parametrize("found", ["0", "-1", "true", "1.0", '"1"', "null", "[" * 50 + "]" * 50, "1" + "0" * 4000])
def test_a_format_that_never_was_is_refused(path: str, found: str) -> None:
    file = Path(path, "manifest.json")
    file.write_text(file.read_text().replace('"format": 1', f'"format": {found}', 1))
    with pytest.raises(StoreError, match=r"manifest.json has store format .{1,203}[,;]") as e:
        Store.open([path], FakeIo())
    assert len(str(e.value)) < 500


def test_files_are_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with grads and activations on NVMe, and its checkpoints, whatever the umask."""
    modes: dict[str, set[int]] = {}

    def look() -> None:
        for p in (tmp_path / "nvme/run", tmp_path / "checkpoints"):
            for f in [*p.rglob("*")] if p.exists() else ():
                modes.setdefault("directory" if f.is_dir() else "file", set()).add(stat.S_IMODE(f.lstat().st_mode))

    unlink = os.unlink

    def look_first(name, *args, **kwargs):
        look()
        unlink(name, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", look_first)  # scratch files lose their names as soon as they have them
    (tmp_path / "nvme").mkdir()
    before = os.umask(0)
    try:
        options = dict(weights="nvme", state="nvme", activations="nvme", device="sim", leaf_bytes=LEAF_BYTES, chunk_size=2048)
        with Engine(llama(num_hidden_layers=2), nvme_path=str(tmp_path / "nvme"), run_name="run", **options, **HYPER) as engine:
            train(engine, 1)
            engine.save_checkpoint(tmp_path / "checkpoints")
            look()
    finally:
        os.umask(before)
    assert modes == {"file": {0o600}, "directory": {0o700}}
    assert stat.S_IMODE((tmp_path / "nvme/run").stat().st_mode) == 0o700


def test_two_starts_at_once_make_one_store(tmp_path: Path) -> None:
    """Processes that create, or open, the same store at the same moment: one has it, the other is told, nothing is damaged."""
    code = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
from fake_io import FakeIo, tiny_model
from zinf.errors import StoreError
from zinf.tiers.nvme import Store
sys.stdin.readline()
try:
    store = Store.create([{str(tmp_path / "store")!r}], tiny_model(), FakeIo())
except StoreError as e:
    print("refused", e)
else:
    print("made", flush=True)
    sys.stdin.readline()
    store.commit(0, {{}})
"""
    pipe = subprocess.PIPE
    runs = [subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    time.sleep(0.1)
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    said = [run.stdout.readline() for run in runs]
    for run in runs:
        run.communicate("\n", timeout=60)
    assert sorted(s.split()[0] for s in said) == ["made", "refused"], said
    assert all("in use by" in s or "already" in s for s in said if s.startswith("refused"))
    Store.open([str(tmp_path / "store")], FakeIo()).close()
