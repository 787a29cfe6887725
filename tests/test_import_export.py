"""Promise: `zinf import` and `zinf export` go on where they were killed, end with the bits of one that was not, and say in a line what is wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import llama
from oracle import assert_same, engine_snapshot
from safetensors.torch import load_file, save_file
from test_checkpoint import folder_of, make_layout, random_tensors

import zinf
from zinf import cli
from zinf.aio import open_engine
from zinf.checkpoint import SafetensorsSource, direct, import_store, resuming, staging
from zinf.checkpoint import folder as exports
from zinf.checkpoint.folder import JOURNAL, Journal
from zinf.checkpoint.sources import _FileReader
from zinf.engine import Engine
from zinf.errors import CheckpointError, StoreError
from zinf.hf import loading
from zinf.hf.exporting import export_checkpoint
from zinf.layout import STATE
from zinf.tiers import directory
from zinf.tiers.nvme import Store


class Killed(BaseException):
    """What comes of it is not handled by anybody, as little as SIGKILL is; but files are closed, and with them locks."""


@pytest.fixture
def notes_at_once(monkeypatch):
    """Every chunk is noted as soon as it is known to be written, which is soon: few are in flight."""
    monkeypatch.setattr(resuming, "SECONDS", 0.0)
    monkeypatch.setattr(staging, "SLOTS", (3, 3))
    submit = resuming.concurrent.futures.ThreadPoolExecutor.submit

    def wait(pool, *args, **kwargs):
        future = submit(pool, *args, **kwargs)
        if pool._thread_name_prefix == "zinf-import":
            future.exception()
        return future

    monkeypatch.setattr(resuming.concurrent.futures.ThreadPoolExecutor, "submit", wait)


def run_import(path, model, folder, mark="a", **options):
    with contextlib.closing(open_engine("threads")) as io, SafetensorsSource(folder) as source:
        import_store([str(path)], model, source, io, mark=mark, extra={"of": mark}, **options)


def contents(path) -> tuple[str, bytes]:
    """What a store says it has, and every byte of it, of the version that counts."""
    with contextlib.closing(open_engine("threads")) as io, Store.open([str(path)], io, verify="resume", writable=False) as store:
        data = {name: (path / name).read_bytes() for name in directory.DATA if (path / name).exists()}
        found = [data[os.path.basename(e.file.path)][e.offsets[e.newest] :][: e.length] for e in store._entries.values() if e.newest != 255]
        return store.contents(), b"".join(found)


def killed_after(monkeypatch, writes: int):
    """The store's writes fail for good after so many."""
    real, left = Store.write, [writes]

    def write(self, items):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return real(self, items)

    monkeypatch.setattr(Store, "write", write)


def count_reads(monkeypatch) -> list[int]:
    """Bytes of tensors read from files."""
    real, read = _FileReader.read, []

    def counted(self, start, out):
        read.append(out.numel() * out.element_size())
        real(self, start, out)

    monkeypatch.setattr(_FileReader, "read", counted)
    return read


@pytest.mark.parametrize("crash_safe", [True, False])
def test_an_import_goes_on_where_it_was_killed(tmp_path, monkeypatch, notes_at_once, crash_safe):
    """Killed at every write in turn; what is there already is not read again."""
    model, folder = make_layout("bf16", frozen=("head",), chunk=2048), folder_of(tmp_path / "in", random_tensors(torch.float32))
    run_import(tmp_path / "straight", model, folder, crash_safe=crash_safe)
    with Store.open([str(tmp_path / "straight")], open_engine("threads"), writable=False) as store:
        writes = len({key[1:] for key in store.written()})
        assert any(key[0] == STATE for key in store.written())
    right, sizes = contents(tmp_path / "straight"), set()
    for n in range(writes):
        path = tmp_path / f"killed{n}"
        with monkeypatch.context() as m:
            killed_after(m, n)
            with pytest.raises(Killed):
                run_import(path, model, folder, crash_safe=crash_safe)
        assert not (path / "manifest.json").exists()
        with monkeypatch.context() as m:
            read = count_reads(m)
            run_import(path, model, folder, crash_safe=crash_safe)
            sizes.add(sum(read))
        assert contents(path) == right
        assert not (path / directory.IMPORT).exists()
        shutil.rmtree(path)
    assert len(sizes) >= 3 and min(sizes) < max(sizes)


def test_an_import_of_other_files_or_of_another_layout_begins_anew(tmp_path, monkeypatch, notes_at_once, caplog):
    tensors = [random_tensors(torch.float32, seed) for seed in (1, 2)]
    folders = [folder_of(tmp_path / f"in{i}", t) for i, t in enumerate(tensors)]
    model = make_layout("bf16", chunk=2048)
    for other, mark, options in (
        (model, "b", {}),
        (make_layout("bf16", chunk=4096), "a", {}),
        (make_layout("fp32", chunk=2048), "a", {}),
        (model, "a", {"crash_safe": False}),
    ):
        with monkeypatch.context() as m:
            killed_after(m, 6)
            with pytest.raises(Killed):
                run_import(tmp_path / "run", model, folders[0])
        assert (tmp_path / "run" / directory.IMPORT).exists()
        run_import(tmp_path / "run", other, folders[1], mark, **options)
        run_import(tmp_path / "right", other, folders[1], mark, **options)
        assert contents(tmp_path / "run") == contents(tmp_path / "right")
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "right")
    with SafetensorsSource(folders[0]) as a, SafetensorsSource(folders[1]) as b:
        marks = [a.mark(), b.mark()]
    os.utime(folders[0] / "model.safetensors", ns=(1, 1))
    with SafetensorsSource(folders[0]) as a:
        assert len({*marks, a.mark()}) == 3


@pytest.mark.parametrize("damage", ["bit", "note", "file"])
def test_what_is_damaged_since_is_imported_again(tmp_path, monkeypatch, notes_at_once, damage):
    model, folder = make_layout("bf16", chunk=2048), folder_of(tmp_path / "in", random_tensors(torch.float32))
    run_import(tmp_path / "straight", model, folder)
    path = tmp_path / "run"
    with monkeypatch.context() as m:
        killed_after(m, 6)
        with pytest.raises(Killed):
            run_import(path, model, folder)
    if damage == "file":
        (path / "weights").unlink()
    else:
        name, at = ("weights", 100) if damage == "bit" else (directory.IMPORT, 200)
        data = bytearray((path / name).read_bytes())
        data[at] ^= 1
        (path / name).write_bytes(data)
    run_import(path, model, folder)
    assert contents(path) == contents(tmp_path / "straight")


def test_one_import_at_a_time_and_a_full_disk_in_the_middle(tmp_path, monkeypatch, notes_at_once):
    model, folder = make_layout("bf16", chunk=2048), folder_of(tmp_path / "in", random_tensors(torch.float32))
    run_import(tmp_path / "straight", model, folder)
    real, left = Store.write, [5]

    def full(self, items):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", "weights")
        if left[0] == 2:
            with pytest.raises(StoreError, match="in use by this process"):
                run_import(tmp_path / "run", model, folder)
        return real(self, items)

    with monkeypatch.context() as m:
        m.setattr(Store, "write", full)
        with pytest.raises(OSError, match="No space left"):
            run_import(tmp_path / "run", model, folder)
    with monkeypatch.context() as m:
        read = count_reads(m)
        run_import(tmp_path / "run", model, folder)
    assert sum(read) < os.path.getsize(folder / "model.safetensors")
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")


def test_no_room_for_a_note_does_not_stop_an_import(tmp_path, monkeypatch, notes_at_once, caplog):
    model, folder = make_layout("bf16", chunk=2048), folder_of(tmp_path / "in", random_tensors(torch.float32))
    publish = resuming.Store.keep

    def keep(self, keys, mark):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Store, "keep", keep)
    run_import(tmp_path / "run", model, folder)
    assert "no room to note" in caplog.text and publish is not keep
    contents(tmp_path / "run")


# ---- export


def store_of(tmp_path, dtype="bf16") -> Path:
    path = tmp_path / "store"
    run_import(path, make_layout(dtype, chunk=2048), folder_of(tmp_path / "in", random_tensors(torch.float32)))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stop_at(monkeypatch, n: int, error: BaseException) -> list[str]:
    """The n-th system call of an export that changes a folder raises; the names of those that were made."""
    made: list[str] = []

    def step(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            if len(made) >= n:
                raise error
            made.append(name)
            return real(*args, **kwargs)

        return call

    for name in ("pwrite", "replace", "fsync"):
        monkeypatch.setattr(exports.os, name, step(name))
    return made


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_export_goes_on_where_it_was_killed(tmp_path, monkeypatch, dtype):
    """Killed at each system call in turn: finished files are neither read from the store nor written again, and the end is the same."""
    store, options = store_of(tmp_path), dict(dtype=dtype, max_shard_size=10_000)
    export_checkpoint(str(store), str(tmp_path / "straight"), **options)
    right, whole = files(tmp_path / "straight"), None
    assert len(right) > 3
    written = set()
    for n in range(0, 1000, 3):
        out = tmp_path / f"killed{n}"
        with monkeypatch.context() as m:
            stop_at(m, n, Killed())
            m.setattr(exports.os, "unlink", lambda path: None)  # a killed process cleans nothing away
            try:
                export_checkpoint(str(store), str(out), **options)
                finished = True
            except Killed:
                finished = False
        with monkeypatch.context() as m:
            made = stop_at(m, 10**6, Killed())
            export_checkpoint(str(store), str(out), **options)
            written.add(made.count("pwrite"))
            whole = whole or made.count("pwrite")
        assert files(out) == right
        if finished:
            break
        shutil.rmtree(out)
    assert n > 20 and min(written) < whole / 3 and len(written) > 3


def test_a_finished_file_that_was_changed_is_written_again(tmp_path, monkeypatch):
    store, out = store_of(tmp_path), tmp_path / "out"
    export_checkpoint(str(store), str(tmp_path / "straight"), max_shard_size=10_000)
    with monkeypatch.context() as m:
        finish = Journal.finish
        m.setattr(Journal, "finish", lambda self, file, *args: (_ for _ in ()).throw(Killed) if "model-00003" in file else finish(self, file, *args))
        with pytest.raises(Killed):
            export_checkpoint(str(store), str(out), max_shard_size=10_000)
    left = sorted(out.glob(".model-*"))
    assert len(left) == 2 and (out / JOURNAL).exists()
    data = bytearray(left[0].read_bytes())
    data[-1] ^= 1
    left[0].write_bytes(data)
    created = []
    monkeypatch.setattr(exports.Folder, "create", lambda self, file, *args, real=exports.Folder.create: (created.append(file), real(self, file, *args))[1])
    export_checkpoint(str(store), str(out), max_shard_size=10_000)
    assert files(out) == files(tmp_path / "straight")
    assert any("00001" in f for f in created) and not any("00002" in f for f in created)


def test_an_export_of_something_else_does_not_go_on(tmp_path, monkeypatch):
    store, out = store_of(tmp_path), tmp_path / "out"
    with monkeypatch.context() as m:
        m.setattr(exports.Folder, "publish", lambda self, index: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            export_checkpoint(str(store), str(out), max_shard_size=10_000)
    assert (out / JOURNAL).exists()
    export_checkpoint(str(store), str(out), max_shard_size=10_000, dtype="fp32")
    export_checkpoint(str(store), str(tmp_path / "right"), max_shard_size=10_000, dtype="fp32")
    assert files(out) == files(tmp_path / "right")


def test_a_full_disk_in_the_middle_of_an_export(tmp_path, monkeypatch):
    store = store_of(tmp_path)
    export_checkpoint(str(store), str(tmp_path / "straight"), max_shard_size=10_000)
    with monkeypatch.context() as m:
        made = stop_at(m, 10**6, Killed())
        export_checkpoint(str(store), str(tmp_path / "count"), max_shard_size=10_000)
    before = made.index("replace")
    for n in (2, before // 2, before - 1):
        out = tmp_path / f"out{n}"
        with monkeypatch.context() as m:
            stop_at(m, n, OSError(errno.ENOSPC, "No space left on device"))
            with pytest.raises(OSError, match="No space left"):
                export_checkpoint(str(store), str(out), max_shard_size=10_000)
        left = os.listdir(out)
        assert not any(name.startswith("model") for name in left) and (n > 2 or not left)
        export_checkpoint(str(store), str(out), max_shard_size=10_000)
        assert files(out) == files(tmp_path / "straight")
    assert sum(name.startswith(".model") for name in left) > 1  # finished files had stayed


def test_one_export_at_a_time(tmp_path):
    store = store_of(tmp_path)
    with Journal(str(tmp_path / "out")), pytest.raises(CheckpointError, match="another export is writing to"):
        export_checkpoint(str(store), str(tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("refuse", ["", "at once", "later"])
def test_past_the_page_cache_the_bytes_are_the_same(tmp_path, monkeypatch, refuse):
    """Any offset, any length, pages that a filesystem does not take at once; and one that takes none after all."""
    rng = random.Random(0)
    data = rng.randbytes(11 << 20)
    calls = []

    def sometimes(real):
        def call(fd, buffers, offset):
            calls.append(offset)
            if refuse and len(calls) > (0 if refuse == "at once" else 4):
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, buffers, offset)

        return call

    (tmp_path / "file").write_bytes(data)
    read, write = direct.open_direct(str(tmp_path / "file"), os.O_RDONLY), direct.open_direct(str(tmp_path / "file"), os.O_WRONLY)
    monkeypatch.setattr(direct.os, "preadv", sometimes(os.preadv))
    monkeypatch.setattr(direct.os, "pwrite", sometimes(os.pwrite))
    whole = 0
    for _ in range(12):
        at = rng.randrange(5 << 20)
        n = rng.choice((100, 70_000, 4 << 20, 5 << 20, (11 << 20) - at))
        out = torch.zeros(n, dtype=torch.uint8)
        done = direct.read(read, at, out)
        assert out[:done].numpy().tobytes() == data[at : at + done] and not out[done:].any()
        whole += done == n
        first, end = direct.write(write, at, torch.frombuffer(bytearray(data[at : at + n]), dtype=torch.uint8).bitwise_not())
        changed = bytes(x ^ 255 for x in data[at + first : at + end])
        assert ((at + first) % 4096 == (end - first) % 4096 == 0 or first == end) and 0 <= first <= end <= n
        data = data[: at + first] + changed + data[at + end :]
        assert (tmp_path / "file").read_bytes() == data
    assert (whole > 5) == (not refuse) and len(calls) > 5, (whole, len(calls))
    direct.close(read)
    direct.close(write)


# ---- the commands


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    llama(num_hidden_layers=2).save_pretrained(folder)
    return folder


def zinf_command(capsys, *args) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main([str(a) for a in args])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("drives", [1, 2])
def test_a_run_opens_what_was_imported(tmp_path, source, capsys, monkeypatch, drives):
    paths = [tmp_path / f"drive{i}" for i in range(drives)]
    for path in paths:
        path.mkdir()
    more = [x for path in paths[1:] for x in ("--nvme-path", path)]
    code, out, err = zinf_command(capsys, "import", source, paths[0] / "mine", *more, "--chunk-size", "4096")
    assert (code, err) == (0, "") and "imported" in out and "run_name mine" in out
    monkeypatch.setattr(loading, "import_store", None)  # not once more
    nvme_path = [str(path) for path in paths]
    model = zinf.from_pretrained(source, nvme_path=nvme_path, run_name="mine", resume=True).train()
    with Engine(model, nvme_path=nvme_path, run_name="mine", weights="nvme", state="nvme", lr=1e-2) as engine:
        ids = torch.arange(16).view(2, 8)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        snapshot = engine_snapshot(engine)
        engine.save_pretrained(tmp_path / "own", max_shard_size=50_000)
        engine.save_pretrained(tmp_path / "own32", dtype="fp32")
    monkeypatch.undo()
    with Engine(llama_of(source), lr=1e-2) as engine:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        assert_same(engine_snapshot(engine), snapshot)
    stores = [path / "mine" for path in paths]
    assert zinf_command(capsys, "export", *stores, tmp_path / "out", "--max-shard-size", "50KB")[0] == 0
    assert zinf_command(capsys, "export", *stores, tmp_path / "out32", "--dtype", "fp32")[0] == 0
    assert (tmp_path / "out32/model.safetensors").read_bytes() == (tmp_path / "own32/model.safetensors").read_bytes()
    ours, theirs = ({name: t for f in (tmp_path / folder).glob("model-*") for name, t in load_file(f).items()} for folder in ("out", "own"))
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())
    assert len(list((tmp_path / "out").glob("model-*"))) > 2


def llama_of(source):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).train()


def test_wrong_turns_of_import(tmp_path, source, capsys, monkeypatch):
    """Each a line that says what to do, and nothing is made."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    no_weights = tmp_path / "no-weights"
    no_weights.mkdir()
    shutil.copy(source / "config.json", no_weights)
    pickled = tmp_path / "pickled"
    shutil.copytree(no_weights, pickled)
    torch.save({}, pickled / "pytorch_model.bin")
    store = tmp_path / "drive/run"
    store.parent.mkdir()
    before = sorted(os.listdir(tmp_path))
    for args, said in (
        ([source, store, "--dtype", "bf61"], "did you mean 'bf16'"),
        ([source, store, "--optimizer", "adamv"], "did you mean 'adam'"),
        ([tmp_path / "nowhere", store], "is not a folder"),
        ([tmp_path / "empty", store], "has no usable config.json"),
        ([no_weights, store], "has neither model.safetensors nor"),
        ([source / "model.safetensors", store], "is a file: give the folder that it is in"),
        ([pickled / "pytorch_model.bin", store], "convert them once"),
        ([pickled, store], "convert them once"),
        ([source, tmp_path / "other"], "has other files (notes.txt): give a folder of its own"),
        ([source, tmp_path / "nowhere/run"], "does not exist: mount the drive or create the directory"),
        ([source, store, "--chunk-size", "1000"], "chunk_size is 1000"),
        ([source, store, "--chunk-size", "0"], "chunk_size is 0"),
    ):
        code, out, err = zinf_command(capsys, "import", *args)
        assert code == 1 and out == "" and said in err and err.count("\n") == 1, (args, err)
    assert sorted(os.listdir(tmp_path)) == before and os.listdir(tmp_path / "drive") == []
    with monkeypatch.context() as m:
        real = os.statvfs
        m.setattr(directory.os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 100, 100, 100, *real(path)[5:])))
        code, _, err = zinf_command(capsys, "import", source, store)
        assert code == 1 and "the store needs" in err and "free there" in err and os.listdir(tmp_path / "drive") == []
    assert zinf_command(capsys, "import", source, store)[0] == 0
    code, _, err = zinf_command(capsys, "import", source, store)
    assert code == 1 and "already, at step 0" in err and "--yes" in err and err.count("\n") == 1
    with contextlib.closing(open_engine("threads")) as io, Store.open([str(store)], io):
        code, _, err = zinf_command(capsys, "import", source, store, "--yes")
        assert code == 1 and "in use by" in err
        code, _, err = zinf_command(capsys, "export", store, tmp_path / "out")
        assert code == 1 and "in use by" in err and not (tmp_path / "out").exists()
    assert zinf_command(capsys, "import", source, store, "--yes", "--dtype", "fp32")[0] == 0


def test_wrong_turns_of_export(tmp_path, source, capsys, monkeypatch):
    (tmp_path / "drive").mkdir()
    store = tmp_path / "drive/run"
    assert zinf_command(capsys, "import", source, store)[0] == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with monkeypatch.context() as m:
        killed_after(m, 1)
        with pytest.raises(Killed):
            cli.main(["import", str(source), str(tmp_path / "drive/half")])
    before = sorted(os.listdir(tmp_path))
    for args, said in (
        ([tmp_path / "nowhere", tmp_path / "out"], "no such folder"),
        ([source, tmp_path / "out"], "there is no store and no checkpoint at"),
        ([tmp_path / "drive", tmp_path / "out"], "is no store but holds"),
        ([tmp_path / "drive/half", tmp_path / "out"], "give the same import again, which goes on with it"),
        ([store, tmp_path / "out", "--dtype", "f32"], "did you mean 'fp32'"),
        ([store, tmp_path / "out", "--max-shard-size", "5GiX"], "--max-shard-size: '5GiX' is not a size"),
        ([store, tmp_path / "out", "--max-shard-size", "0"], "--max-shard-size is 0"),
        ([store, tmp_path / "full"], "is not empty (notes.txt): choose a new folder"),
        ([store, tmp_path / "file"], "is not a folder, or a part of it is a file"),
    ):
        code, out, err = zinf_command(capsys, "export", *args)
        assert code == 1 and out == "" and said in err and err.count("\n") == 1, (args, err)
    assert sorted(os.listdir(tmp_path)) == before
    real = os.statvfs
    with monkeypatch.context() as m:
        m.setattr(exports.os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 1, 1, 1, *real(path)[5:])))
        code, _, err = zinf_command(capsys, "export", store, tmp_path / "out")
        assert code == 1 and "4096 are free" in err and os.listdir(tmp_path / "out") == []
    code, out, _ = zinf_command(capsys, "export", store, tmp_path / "full", "--overwrite")
    assert code == 0 and (tmp_path / "full/notes.txt").exists() and load_file(tmp_path / "full/model.safetensors")


def test_a_store_with_adapters_is_not_a_model_for_others(tmp_path, source, capsys):
    peft = pytest.importorskip("peft")
    model = zinf.from_pretrained(source, nvme_path=tmp_path, trainable=False)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    with Engine(model, nvme_path=str(tmp_path), weights="nvme", state="nvme") as engine:
        engine.synchronize()
    if (tmp_path / "run-adapted/manifest.json").exists():
        code, _, err = zinf_command(capsys, "export", tmp_path / "run-adapted", tmp_path / "out")
        assert code == 1 and "engine.merge_and_save" in err
    assert zinf_command(capsys, "export", tmp_path / "run", tmp_path / "out")[0] == 0
    assert (tmp_path / "out/model.safetensors").exists()


def test_the_command_that_converts_pickled_weights_converts_them(tmp_path, source, capsys):
    """Run as it is printed, by a shell."""
    folder = tmp_path / "pick led's"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    code, _, err = zinf_command(capsys, "import", folder, tmp_path / "run")
    found = re.search(r"convert them once, to (.*?): (python -c .*)$", err.strip())
    assert code == 1 and found
    (out,) = shlex.split(found[1])
    subprocess.run(["bash", "-c", found[2].replace("python", shlex.quote(sys.executable), 1)], check=True, capture_output=True)
    assert all(torch.equal(load_file(Path(out) / "model.safetensors")[name], t) for name, t in tensors.items())
    assert zinf_command(capsys, "import", out, tmp_path / "run")[0] == 0


def test_a_new_head_is_drawn_again_and_the_rest_is_not(tmp_path, source, monkeypatch, notes_at_once):
    """What is random is in no file that could be compared: it is always imported anew."""
    from transformers import AutoModelForSequenceClassification as Auto

    def load(run_name, seed):
        torch.manual_seed(seed)
        return zinf.from_pretrained(source, nvme_path=tmp_path, run_name=run_name, auto_class=Auto, chunk_size=4096, num_labels=3)

    load("straight", 7)
    with monkeypatch.context() as m:
        killed_after(m, 8)
        with pytest.raises(Killed):
            load("run", 6)
    assert (tmp_path / "run" / directory.IMPORT).exists()
    load("run", 7)
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")


def test_buffers_of_a_run_are_exported(tmp_path):
    """A model whose state_dict has buffers: those that training changed, and those that it did not."""
    tensors = random_tensors(torch.float32)
    model = make_layout("bf16", chunk=2048)
    folder = folder_of(tmp_path / "in", tensors)
    save_file({**tensors, "count": torch.tensor([5])}, folder / "model.safetensors")
    with contextlib.closing(open_engine("threads")) as io, SafetensorsSource(folder, ignore=["count"]) as source:
        origin = {"source": str(folder), "persistent": {"count": ["int64", [1]], "mean": ["float32", [2]]}}
        changed = {"mean": "AACAPwAAAEA="}  # 1.0, 2.0
        import_store([str(tmp_path / "run")], model, source, io, mark="a", extra={"origin": origin, "engine": {"buffers": changed}})
    export_checkpoint(str(tmp_path / "run"), str(tmp_path / "out"))
    out = load_file(tmp_path / "out/model.safetensors")
    assert out["count"].tolist() == [5] and out["mean"].tolist() == [1.0, 2.0]
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="the buffers count are those of the folder"):
        export_checkpoint(str(tmp_path / "run"), str(tmp_path / "out2"))
