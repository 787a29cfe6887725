"""Promise: what an import or an export goes on with is what it would make now: other values, errors of the disk, hostile names and leftovers change nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from models import llama
from test_checkpoint import folder_of, make_layout, random_tensors
from test_import_export import Killed, contents, files, store_of

import zinf
from zinf.checkpoint import SafetensorsSource, export_safetensors
from zinf.checkpoint import folder as exports
from zinf.checkpoint.folder import JOURNAL, Folder, Journal
from zinf.checkpoint.sources import _FileReader
from zinf.errors import CheckpointError
from zinf.hf import exporting
from zinf.hf.exporting import export_checkpoint

SIZE = 10_000


def killed_export(store: Path, out: Path, monkeypatch, pid: int = 7) -> list[Path]:
    """An export by process `pid` that has finished two files; their temporary names."""
    with monkeypatch.context() as m:
        finish = Journal.finish
        m.setattr(Journal, "finish", lambda self, file, *args: (_ for _ in ()).throw(Killed) if "model-00003" in file else finish(self, file, *args))
        m.setattr(exports.os, "getpid", lambda: pid)
        m.setattr(exports.os, "unlink", lambda path: None)  # a killed process cleans nothing away
        with pytest.raises(Killed):
            export_checkpoint(str(store), str(out), max_shard_size=SIZE)
    return sorted(out.glob(".model-*"))[:2]


def test_a_source_that_was_changed_in_place_is_another_even_with_its_time_set_back(tmp_path):
    folder = folder_of(tmp_path / "in", random_tensors(torch.float32))
    file = folder / "model.safetensors"
    before = file.stat()
    with SafetensorsSource(folder) as source:
        mark = source.mark()
        assert source.mark() == mark
    with open(file, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\x55")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    with SafetensorsSource(folder) as source:
        assert source.mark() != mark


@pytest.mark.parametrize("damage", ["bit", "unreadable", "symlink"])
def test_a_finished_file_that_cannot_be_taken_up_is_written_again_and_goes(tmp_path, monkeypatch, damage):
    store, out = store_of(tmp_path), tmp_path / "out"
    export_checkpoint(str(store), str(tmp_path / "straight"), max_shard_size=SIZE)
    left = killed_export(store, out, monkeypatch)[0]
    if damage == "bit":
        data = bytearray(left.read_bytes())
        data[-1] ^= 1
        left.write_bytes(data)
    elif damage == "symlink":
        left.rename(tmp_path / "elsewhere")
        left.symlink_to(tmp_path / "elsewhere")
    else:
        real, inode = os.preadv, left.stat().st_ino

        def preadv(fd, buffers, offset):
            if os.fstat(fd).st_ino == inode:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
    export_checkpoint(str(store), str(out), max_shard_size=SIZE)
    assert files(out) == files(tmp_path / "straight")
    assert sorted(os.listdir(out)) == sorted(os.listdir(tmp_path / "straight"))


def test_other_buffers_are_other_files(tmp_path, monkeypatch):
    """The step's weights may be the same (frozen, lr 0), and the buffers others."""
    model, out = make_layout("bf16", chunk=2048), tmp_path / "out"
    store = store_of(tmp_path)

    def export(to, value, journal=True):
        from zinf.aio import open_engine
        from zinf.tiers.nvme import Store

        io = open_engine("threads")
        with Store.open([str(store)], io, writable=False) as opened, Journal(str(to)) as kept:
            export_safetensors(to, model, opened.read, journal=kept, contents=opened.contents(), buffers={"count": torch.tensor([value])}, max_shard_size=SIZE)
            kept.done()
        io.close()

    export(tmp_path / "right", 2)
    with monkeypatch.context() as m:
        m.setattr(Folder, "publish", lambda self, index: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            export(out, 1)
    assert (out / JOURNAL).exists()
    export(out, 2)
    assert files(out) == files(tmp_path / "right")


def test_nothing_is_written_through_a_symlink_with_the_name_of_a_temporary_file(tmp_path):
    store, out, victim = store_of(tmp_path), tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_bytes(b"mine")
    (out / f".model.safetensors.{os.getpid()}.tmp").symlink_to(victim)
    export_checkpoint(str(store), str(out))
    assert victim.read_bytes() == b"mine" and not (out / "model.safetensors").is_symlink()


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "config.json/../../escaped", "secret.txt"])
def test_a_manifest_cannot_name_files_to_copy_that_are_not_a_models(tmp_path, name):
    source, out = tmp_path / "a" / "source", tmp_path / "b" / "out"
    source.mkdir(parents=True)
    out.mkdir(parents=True)
    for path in (source / "config.json", source / "tokenizer.json"):
        path.write_text("{}")
    (source / "secret.txt").write_text("secret")
    (tmp_path / "a" / "escaped").write_text("hostile")
    name = str(tmp_path / "a" / "escaped") if name == "/escaped" else name
    written = exporting._extras({"source": str(source), "files": ["tokenizer.json", name]}, str(out), "bf16")
    assert sorted(os.path.basename(f) for f in written) == ["config.json", "tokenizer.json"]
    assert os.listdir(tmp_path / "b") == ["out"] and (tmp_path / "a" / "escaped").read_text() == "hostile"
    assert sorted(os.listdir(out)) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("bad", ["{", "[]", "null", '"x"', "[" * 100_000])
def test_a_config_that_was_damaged_since_is_one_line(tmp_path, bad):
    (tmp_path / "config.json").write_text(bad)
    with pytest.raises(CheckpointError, match=r"config\.json is not a config any more"):
        exporting._extras({"source": str(tmp_path)}, str(tmp_path / "out"), "bf16")


def test_what_is_no_folder_is_said_in_a_line(tmp_path):
    store = store_of(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for out in ("file", "file/below", "dangling"):
        with pytest.raises(CheckpointError, match="is not a folder"):
            export_checkpoint(str(store), str(tmp_path / out))
    for kind in ("link", "folder"):
        out = tmp_path / kind
        out.mkdir()
        (out / JOURNAL).symlink_to(tmp_path / "victim") if kind == "link" else (out / JOURNAL).mkdir()
        with pytest.raises(CheckpointError, match="is no file of an export"):
            export_checkpoint(str(store), str(out))
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "victim").exists() and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("change", ["written", "removed"])
def test_a_source_that_changes_while_it_is_imported_is_not_committed(tmp_path, monkeypatch, change):
    """A file that is written in place: half old, half new. One that is removed, or replaced, is read on."""
    llama(num_hidden_layers=2).save_pretrained(tmp_path / "in")
    file, real, done = tmp_path / "in/model.safetensors", _FileReader.read, []

    def read(self, start, out):
        real(self, start, out)
        if not done and change == "written":
            with open(file, "r+b") as f:
                f.seek(-1, os.SEEK_END)
                f.write(b"\x55")
        elif not done:
            file.unlink()
        done.append(start)

    with monkeypatch.context() as m:
        m.setattr(_FileReader, "read", read)
        if change == "removed":
            zinf.from_pretrained(tmp_path / "in", nvme_path=tmp_path)
            return
        with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while it was imported"):
            zinf.from_pretrained(tmp_path / "in", nvme_path=tmp_path)
    assert not (tmp_path / "run/manifest.json").exists()
    for name in ("run", "straight"):
        zinf.from_pretrained(tmp_path / "in", nvme_path=tmp_path, run_name=name)
    assert contents(tmp_path / "run")[0] == contents(tmp_path / "straight")[0]
