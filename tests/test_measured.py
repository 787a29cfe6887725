"""What was measured is kept for this machine and these drives alone, a damaged file counts as none, and engines use what is there."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from models import LEAF_BYTES, llama, train

from zinf import cli, layout, measured
from zinf.engine import Engine
from zinf.measured import Book, Drive, Host, Pace
from zinf.planner import drive
from zinf.planner.drive import Trial

GB = 10**9
FAST = Drive(path="/a", when="2026-01-02", block_size=1 << 20, queue_depth=24, read=3e9, write=2e9, both=1.5e9)
HOST = Host(when="2026-01-02", device="cpu", threads=2, dram=20e9, adam=18e9, flops=1e11, flops_fp32=5e10)
BOOK = Book({"1:2 ext4 1000": FAST}, HOST, {"f 1x2 bf16": Pace(when="2026-01-02", seconds=0.5)})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZINF_MEASURED", str(tmp_path / "cache" / "machine.json"))
    return tmp_path / "cache" / "machine.json"


def test_what_is_saved_comes_back(file: Path) -> None:
    assert measured.load() == Book()
    assert measured.save(BOOK) == file and measured.load() == BOOK
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_another_machine_has_a_book_of_its_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.save(BOOK)
    with monkeypatch.context() as there:
        there.setattr(measured, "machine_key", lambda: "other")
        assert measured.load() == Book()
        measured.save(Book(host=dataclasses.replace(HOST, threads=96)))
    assert measured.load() == BOOK


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "is damaged and not used"),
        (lambda text: "", "is damaged and not used"),
        (lambda text: "[]", "is damaged and not used"),
        (lambda text: "\x00\xff", "is damaged and not used"),
        (lambda text: "[" * 100_000, "is damaged and not used"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "is in format 0, this zinf has 1"),
        (lambda text: text.replace('"format": 1', '"format": 99'), "is in format 99, this zinf has 1"),
        (lambda text: text.replace("1048576", "1048577"), "block_size is 1048577, expected a multiple of 4096"),
        (lambda text: text.replace("3000000000.0", "-1"), "read is -1.0, expected a positive number"),
        (lambda text: text.replace("3000000000.0", "NaN"), "read is nan, expected a number"),
        (lambda text: text.replace('"dram"', '"drum"'), "unknown key 'drum'; did you mean 'dram'"),
        (lambda text: text.replace('"seconds": 0.5', '"seconds": null'), "expected a number"),
        (lambda text: text.replace('"paces": {', '"paces": 3, "x": {'), "of this machine is damaged"),
    ],
)
def test_a_damaged_file_counts_as_none_and_is_written_anew(file: Path, caplog: pytest.LogCaptureFixture, damage, said: str) -> None:
    measured.save(BOOK)
    whole = file.read_text()
    assert damage(whole) != whole
    file.write_text(damage(whole), encoding="latin-1")
    with caplog.at_level(logging.INFO, logger="zinf"):
        assert measured.load() == Book()
    assert said in caplog.text and caplog.text.count("\n") == 1
    assert measured.io_options(["/"], None, None) == {"block_size": 4 << 20, "queue_depth": 16}
    measured.save(BOOK)
    assert measured.load() == BOOK


def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    assert measured.load(tmp_path) == Book()  # a folder
    assert measured.load(tmp_path / "no" / "where") == Book()


def test_a_save_that_fails_leaves_what_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.save(BOOK)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measured.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        measured.save(Book())
    assert measured.load() == BOOK and [p.name for p in file.parent.iterdir()] == [file.name]


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ZINF_MEASURED")
    monkeypatch.delenv("ZINF_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured.location() == tmp_path / "zinf" / "machine.json"


def test_a_folder_that_is_not_there_yet_is_on_the_drive_of_its_parent(tmp_path: Path) -> None:
    assert measured.drive_key(tmp_path / "not" / "yet") == measured.drive_key(tmp_path) != measured.drive_key("/proc")
    other = measured.drive_key("/proc")
    book = Book({measured.drive_key(tmp_path): FAST})
    assert book.drive(str(tmp_path / "x")) == FAST and other not in book.drives and book.drive("/proc") is None


# ----------------------------------------------------------------------------------------------------- what engines use


def two_drives(monkeypatch: pytest.MonkeyPatch, **drives: Drive) -> None:
    """As if the folder a were on another drive than b, and each was measured if it is in `drives`."""
    monkeypatch.setattr(measured, "drive_key", lambda path: Path(path).parent.name if Path(path).name == "run" else Path(path).name)
    measured.save(Book(drives))


def test_blocks_and_depths(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(FAST, block_size=8 << 20, queue_depth=8, both=0.5e9)
    two_drives(monkeypatch, a=FAST, b=slow)
    assert measured.io_options(["/a"], None, None) == {"block_size": 1 << 20, "queue_depth": 24}
    assert measured.io_options(["/a", "/b"], None, None) == {"block_size": 8 << 20, "queue_depth": 32}
    assert measured.io_options(["/a", "/x/a"], None, None)["queue_depth"] == 24  # one drive
    assert measured.io_options(["/a", "/c"], None, None) == {"block_size": 1 << 20, "queue_depth": 24}
    assert measured.io_options(["/a"], 2 << 20, None) == {"block_size": 2 << 20, "queue_depth": 24}
    assert measured.io_options(["/a"], 2 << 20, 3) == {"block_size": 2 << 20, "queue_depth": 3}
    assert measured.io_options(["/c"], None, None) == measured.io_options([], None, None) == {"block_size": 4 << 20, "queue_depth": 16}


def test_shares_are_in_proportion_to_what_was_measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(FAST, both=0.5e9)
    two_drives(monkeypatch, a=FAST, b=slow)
    assert measured.shares(["/a", "/b"]) == [0.75, 0.25]
    assert measured.shares(["/a", "/x/a", "/b"]) == [0.375, 0.375, 0.25]  # two paths on one drive have no more than it has
    assert measured.shares(["/a", "/c"]) is None and measured.shares(["/a"]) is None


def test_a_store_is_striped_in_that_proportion_and_opens_whatever_is_measured_later(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    for path in paths:
        Path(path).mkdir()
    two_drives(monkeypatch, a=FAST, b=dataclasses.replace(FAST, both=0.5e9))
    options = dict(nvme_path=paths, leaf_bytes=LEAF_BYTES, chunk_size=layout.PIECE, weights="nvme", state="nvme")
    with Engine(llama(), **options) as engine:
        losses = train(engine, 2)[0]
        io, store = engine.memory.io.report(), engine.memory.parts.records.store
        assert (io["block_size"], io["queue_depth"]) == (1 << 20, 48)
        assert store.shares == (0.75, 0.25)
        placed = layout.place(engine.layout, store.shares)
        assert placed.nbytes(0) / (placed.nbytes(0) + placed.nbytes(1)) == pytest.approx(0.75, abs=0.01)
    measured.save(Book())
    with Engine(llama(), resume=True, **options) as engine:
        assert engine.memory.parts.records.store.shares == (0.75, 0.25) and engine.memory.io.report()["queue_depth"] == 16
        third = train(engine, 3, first=2)[0]
    with Engine(llama(), leaf_bytes=LEAF_BYTES) as engine:
        assert losses + third == train(engine, 3)[0]


def test_nothing_is_measured_when_an_engine_starts(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*args, **options):
        raise AssertionError("measured")

    monkeypatch.setattr(drive, "search", never)
    with Engine(llama(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES):
        pass
    assert not file.exists()


# ------------------------------------------------------------------------------------------------------------ the search


def a_drive(monkeypatch: pytest.MonkeyPatch, rate) -> list[tuple[str, int, int]]:
    """A drive that needs no time; returns what is tried on it."""
    tried = []

    def run(name: str, mode: str, block: int, depth: int, *rest: object) -> float:
        tried.append((mode, block, depth))
        return rate(mode, block, depth)

    monkeypatch.setattr(drive, "_run", run)
    return tried


def test_the_search_finds_the_best_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ticks = []
    tried = a_drive(monkeypatch, lambda mode, block, depth: 1e9 * (1 + (block == 1 << 20)) * (1 + (depth == 32)) * {"read": 3, "write": 2, "both": 1}[mode])
    found, trials = drive.search(str(tmp_path), 1.0, 4 << 20, done=lambda: ticks.append(1))
    assert (found.block_size, found.queue_depth, found.read, found.write, found.both) == (1 << 20, 32, 12e9, 8e9, 4e9)
    assert len(tried) == len(ticks) == drive.trials() == 3 * len(trials) == 27
    assert list(tmp_path.iterdir()) == []


def test_noise_does_not_leave_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_drive(monkeypatch, lambda mode, block, depth: 1e9 * (1.02 if block == 1 << 20 or depth == 32 else 1))
    found, _ = drive.search(str(tmp_path), 1.0, 4 << 20)
    assert (found.block_size, found.queue_depth) == (4 << 20, 16)


def test_a_failed_search_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*args: object) -> float:
        raise OSError(5, "Input/output error")

    a_drive(monkeypatch, fails)
    with pytest.raises(OSError, match="Input/output"):
        drive.search(str(tmp_path), 1.0, 4 << 20)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_search_left_is_removed_and_a_running_one_s_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_drive(monkeypatch, lambda mode, block, depth: 1e9)
    (tmp_path / f"{drive.PREFIX}dead").write_bytes(b"x")
    with drive._file(str(tmp_path), 4 << 20, "auto") as running:
        assert [str(p) for p in tmp_path.iterdir()] == [running]
        drive.search(str(tmp_path), 1.0, 4 << 20)
        assert [str(p) for p in tmp_path.iterdir()] == [running]
    assert list(tmp_path.iterdir()) == []


def test_scores_weigh_every_mode() -> None:
    assert Trial(1, 1, read=8.0, write=1.0, both=1.0).score == pytest.approx(2.0)


@pytest.mark.parametrize("mode", drive.MODES)
def test_a_run_moves_what_it_says(tmp_path: Path, mode: str) -> None:
    """Every record of the file once, each way's in its own half where there are two."""
    moved = []
    size, record = 1 << 20, 1 << 16

    class Now:
        def wait(self) -> None:
            pass

    class Io:
        def submit(self, ops, owner):
            moved.extend((kind, offset, address - owner.data_ptr()) for kind, _, offset, address, _ in ops)
            return [Now()]

    buffer = torch.empty(drive.FLIGHT * record, dtype=torch.uint8)
    assert drive._move(Io(), None, buffer, mode, record, size, 60.0) > 0
    starts = {kind: [offset for k, offset, _ in moved if k == kind] for kind in "rw"}
    halves = {"r": (0, size // 2), "w": (size // 2, size)} if mode == "both" else {"r": (0, size), "w": (0, size)}
    for kind, offsets in starts.items():
        assert (offsets != []) == (mode == "both" or mode[0] == kind)
        assert all(halves[kind][0] <= offset < halves[kind][1] for offset in offsets)
    assert all(0 <= at <= (drive.FLIGHT - 1) * record for _, _, at in moved) and len({at for _, _, at in moved}) == drive.FLIGHT


# --------------------------------------------------------------------------------------------------------- the commands


def test_bench_io(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "io", "--path", str(tmp_path), "--seconds", "0.5", "--size", "4MiB"]) == 0
    out = capsys.readouterr().out
    for part in ("block", "depth", "both, each way", "in flight", str(file)):
        assert part in out
    kept = measured.load().drive(str(tmp_path))
    assert kept is not None and kept.path == str(tmp_path) and kept.block_size in drive.BLOCKS and kept.queue_depth in drive.DEPTHS


def test_bench_machine_keeps_all_and_its_parts_only_theirs(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from zinf.planner import host

    monkeypatch.setattr(host, "ELEMENTS", 1 << 16)
    monkeypatch.setattr(host, "SIDE", {"cpu": 64, "cuda": 64})
    assert cli.main(["bench", "machine", "--seconds", "0.1"]) == 0
    first = measured.load().host
    assert first is not None and first.device_memory is None if not torch.cuda.is_available() else first
    assert {"memory", "AdamW", "matmul"} <= set(capsys.readouterr().out.split())
    measured.save(Book(host=dataclasses.replace(first, dram=1.0, adam=1.0, flops=1.0, flops_fp32=1.0, link=7.0)))
    assert cli.main(["bench", "adam", "--seconds", "0.1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dram"] > 1 < told["adam"] and told["flops"] == 1.0 and told["link"] == 7.0
    assert cli.main(["bench", "compute", "--seconds", "0.1"]) == 0
    last = measured.load().host
    assert last is not None and last.flops > 1 and last.dram == told["dram"]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["bench"], 2, "the following arguments are required: WHAT"),
        (["bench", "oi"], 2, "invalid choice: 'oi'"),
        (["bench", "io", "--seconds", "soon"], 2, "'soon' is not a number of seconds"),
        (["bench", "io", "--seconds", "nan"], 2, "'nan' is not a number of seconds"),
        (["bench", "io", "--path", "nowhere"], 1, "the directory does not exist"),
        (["bench", "io", "--path", "file"], 1, "is not a directory"),
        (["bench", "io", "--path", "/proc", "--size", "4MiB"], 1, "/proc"),
        (["bench", "io", "--size", "900TiB"], 1, "or give a smaller --size"),
        (["bench", "io", "--size", "1MiB"], 1, "--size is '1 MiB', expected whole MiB, at least 4"),
    ],
)
def test_wrong_turns(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    try:
        assert cli.main(args) == code
    except SystemExit as e:
        assert e.code == code
    err = capsys.readouterr().err
    assert said in err and (code == 2 or err.count("\n") <= 2)
    assert not file.exists() and [p.name for p in tmp_path.iterdir()] == ["file"]
