"""A power loss at any instant of an import, or of an export, leaves what the same command goes on from, to the bits of one that was left alone.

Everything that is sent to the disk is recorded; then the disk is built as it may be after a cut at each point of the record.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from crash.disk import Disk, Recorder, watch_files
from test_checkpoint import complete, folder_of, make_layout, random_tensors
from test_import_export import contents, files, notes_at_once, run_import  # noqa: F401

from zinf.aio import open_engine
from zinf.checkpoint import SafetensorsSource, import_store
from zinf.hf.exporting import export_checkpoint
from zinf.tiers.nvme import Store


def put(found: dict[str, bytes], root: Path, folder: Path) -> Path:
    """`found`, which is of `root`, at `folder`, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for path, data in found.items():
        (folder / os.path.relpath(path, root)).write_bytes(data)
    return folder


def record_import(path: Path, model, folder: Path, monkeypatch) -> list[tuple]:
    events: list[tuple] = []
    with monkeypatch.context() as m, contextlib.closing(Recorder(open_engine("threads"), events.append)) as io, SafetensorsSource(folder) as source:
        watch_files(events.append, m.setattr)
        import_store([str(path)], model, source, io, mark="a", extra={"of": "a"})
    return events


@pytest.mark.parametrize("again", [False, True], ids=["first", "resumed"])
def test_power_loss_at_every_point_of_an_import(tmp_path, monkeypatch, notes_at_once, again, caplog):  # noqa: F811
    model, folder = make_layout("bf16", frozen=("head",), chunk=2048), folder_of(tmp_path / "in", random_tensors(torch.float32))
    run_import(tmp_path / "straight", model, folder)
    right, rng = contents(tmp_path / "straight"), random.Random(int(again))
    root, crashed = tmp_path / "root", tmp_path / "crashed"
    disk = Disk([str(root)])
    if again:  # one that has noted about half, and was cut off
        first = Disk([str(root)])
        events = record_import(root, model, folder, monkeypatch)
        for event in events[: 2 * len(events) // 3]:
            first.play(event)
        first.crash(rng)
        assert (root / "import.json").exists()
        disk = Disk([str(root)])
    events = record_import(root, model, folder, monkeypatch)
    kinds = [event[0] for event in events]
    assert {"w", "new", "rename", "sync", "unlink"} <= set(kinds) and kinds.count("rename") > (1 if again else 3) and contents(root) == right
    taken_up, go_on = [], Store.go_on
    monkeypatch.setattr(Store, "go_on", lambda *args, **options: (store := go_on(*args, **options), taken_up.append(len(store.written()) if store else 0))[0])
    for event in events:
        disk.play(event)
        for _ in range(2 if event[0] in ("sync", "rename") else 1):
            path = put(disk.after_crash(rng), root, crashed)
            if not (path / "manifest.json").exists():
                run_import(path, model, folder)
            assert contents(path) == right, event[:2]
    assert sum(map(bool, taken_up)) > 10 and len(set(taken_up)) > (1 if again else 2)
    assert "begins anew" not in caplog.text  # what was noted was durable, every time


@pytest.mark.parametrize("shards", [1, 3])
def test_power_loss_at_every_point_of_an_export(tmp_path, monkeypatch, shards):
    model, folder = make_layout("bf16", chunk=2048), folder_of(tmp_path / "in", random_tensors(torch.float32))
    store, size = str(tmp_path / "store"), 10_000 if shards > 1 else 10**9
    run_import(Path(store), model, folder)
    export_checkpoint(store, str(tmp_path / "straight"), max_shard_size=size)
    right, whole = files(tmp_path / "straight"), complete(tmp_path / "straight")
    root, rng, events = tmp_path / "root", random.Random(shards), []
    root.mkdir()
    disk = Disk([str(root)])
    with monkeypatch.context() as m:
        watch_files(events.append, m.setattr)
        export_checkpoint(store, str(root), max_shard_size=size)
    assert {"w", "create", "sync", "rename", "unlink", "cut"} <= {event[0] for event in events}
    assert files(root) == right and sum(name.endswith("safetensors") for name in right) == shards
    writes = []
    for event in events:
        disk.play(event)
        path = put(disk.after_crash(rng), root, tmp_path / "crashed")
        if (found := complete(path)) is not None:
            assert all(torch.equal(found[name], t) for name, t in whole.items()), "what looks like a model is one"
        with monkeypatch.context() as m:
            real, count = os.pwrite, []
            m.setattr(os, "pwrite", lambda fd, data, offset, real=real, count=count: (count.append(len(data)), real(fd, data, offset))[1])
            export_checkpoint(store, str(path), max_shard_size=size)
            writes.append(sum(count))
        assert files(path) == right, event[:2]
    assert min(writes) < max(writes) / 3  # finished files were kept
