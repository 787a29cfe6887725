"""What is read is what was written, or it is said: which chunks, in which file. On resume, on every fetch, and by `zinf inspect --verify`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from fake_io import Bytes, FakeIo, tiny_model
from models import HYPER, LEAF_BYTES, engine_run, llama, oracle_run, train
from oracle import Oracle, assert_same, engine_snapshot
from test_activations import Net, begin, square

from zinf import cli, layout
from zinf.engine import Engine
from zinf.errors import IntegrityError
from zinf.tiers.nvme import Store
from zinf.tiers.scratch import Scratch


def flip(file: Path, *offsets: int) -> None:
    """One bit of each of these bytes. Nothing stays in the page cache: the kernel would not let O_DIRECT write beside it."""
    with open(file, "r+b") as f:
        for offset in offsets:
            f.seek(offset)
            byte = f.read(1)[0] ^ 0x10
            f.seek(offset)
            f.write(bytes([byte]))
        f.flush()
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flip_all(folder: Path, name: str) -> None:
    """One bit in each page of a file."""
    flip(folder / name, *range(1000, (folder / name).stat().st_size, 4096))


@pytest.mark.parametrize("name", ["weights", "state", "frozen"])
def test_what_each_setting_of_verify_notices(tmp_path: Path, name: str) -> None:
    """always: at the next fetch, in the run. resume: when it is opened again. off: never."""

    def model():
        net = llama(num_hidden_layers=6, vocab_size=64)  # more blocks than slabs: each is fetched again in the next step
        for layer in net.model.layers if name == "frozen" else ():
            layer.mlp.requires_grad_(False)
        return net

    options = dict(nvme_path=str(tmp_path), run_name="run", weights="nvme", state="nvme", leaf_bytes=LEAF_BYTES, chunk_size=2048, backend="python", **HYPER)
    with Engine(model(), verify="always", **options) as engine:
        ids = torch.arange(16).view(2, 8)
        batch = dict(input_ids=ids, labels=ids)
        engine.backward(engine(**batch).loss)
        engine.step()
        engine.synchronize()
        flip_all(tmp_path / "run", name)
        with pytest.raises(IntegrityError, match=rf"run/{name}: \d+ bytes at offset \d+ are not what was written there .*parameters model\."):
            for _ in range(2):
                engine.backward(engine(**batch).loss)
                engine.step()
                engine.synchronize()
    for verify in "resume", "always":
        with pytest.raises(IntegrityError, match=f"run/{name}: .*restore the store from a checkpoint"):
            Engine(model(), verify=verify, resume=True, **options)


def test_resume_does_not_look_at_each_fetch_and_off_never(tmp_path: Path) -> None:
    """Their price is none: no checksum is compared in a step. What they then miss is what `always` is for."""
    options = dict(nvme_path=str(tmp_path), run_name="run", weights="nvme", state="nvme", leaf_bytes=LEAF_BYTES, chunk_size=2048, **HYPER)
    with Engine(llama(num_hidden_layers=2), verify="resume", **options) as engine:
        train(engine, 1)
        flip_all(tmp_path / "run", "weights")
        train(engine, 2, first=1)
    flip_all(tmp_path / "run", "state")
    with pytest.raises(IntegrityError):
        Engine(llama(num_hidden_layers=2), verify="resume", resume=True, **options)
    Engine(llama(num_hidden_layers=2), verify="off", resume=True, **options).close()


@pytest.fixture
def store(tmp_path: Path):
    """A committed store of two paths, another that never committed; how to look at them."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths, model = [str(tmp_path / "a/run"), str(tmp_path / "b/run")], tiny_model()
    data = Bytes(model)
    with Store.create(paths, model, FakeIo()) as store:
        store.write([(key, data.fill(key, 1)) for key in data.places])
        store.commit(1, {})
    Store.create([str(tmp_path / "a/half")], model, FakeIo()).close()
    return paths, [str(tmp_path / "a"), str(tmp_path / "b")]


def test_inspect_verify_reads_everything_and_names_all_that_is_wrong(store, capsys) -> None:
    paths, drives = store
    assert cli.main(["inspect", *drives, "--verify"]) == 0
    said = capsys.readouterr().out
    nbytes = sum(places[0].length for places in layout.place(tiny_model()).places.values())
    assert said.count("checksums") == 1 and f"all good, {nbytes // 1024} KiB read" in said
    places = layout.place(tiny_model(), (1.0, 1.0)).places
    broken = {f"{paths[p[0].path]}/{p[0].file}: {p[0].length} bytes at offset {p[0].offset}" for p in list(places.values())[::3]}
    for where in broken:
        file, _, rest = where.partition(":")
        flip(Path(file), int(rest.split()[-1]) + 7)
    assert cli.main(["inspect", *drives, "--verify", "--json"]) == 1
    stores = {s["state"]: s for s in json.loads(capsys.readouterr().out)["stores"]}
    assert "verified" not in stores["uncommitted"]
    verified = stores["committed"]["verified"]
    assert {line.partition(" are not what")[0] for line in verified["errors"]} == broken and verified["bytes"] == nbytes
    assert cli.main(["inspect", *drives, "--verify"]) == 1
    said = capsys.readouterr().out
    assert f"{len(broken)} errors, {nbytes // 1024} KiB read" in said and all(where in said for where in broken)
    assert cli.main(["inspect", *drives]) == 0


def test_inspect_verify_of_what_cannot_be_read(store, capsys) -> None:
    paths, drives = store
    with Store.open(paths, FakeIo()):  # training: its bytes change as we would read them
        assert cli.main(["inspect", *drives, "--verify"]) == 1
        assert "1 errors, 0 B read" in (said := capsys.readouterr().out) and "is in use by this process" in said
    with Store.open(paths, FakeIo(), writable=False):
        assert cli.main(["inspect", *drives, "--verify"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", drives[1], "--verify"]) == 1
    assert "the store has 2 paths, and 1 are given" in capsys.readouterr().out
    os.truncate(os.path.join(paths[0], "weights"), 4096)
    assert cli.main(["inspect", *drives, "--verify"]) == 1
    assert "weights is 4096 bytes, and the manifest says" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("name", "read"), [("grads", 2), ("grads", 5), ("activations", 2)])
def test_what_waits_on_nvme_within_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: int, device: str) -> None:
    """With `always` a flipped bit is found before it is used, nothing that is committed is lost by it, and recover() goes on with the same bits."""
    options: dict = dict(device=device, max_grad_norm=1.0, step_mode="deferred", run_name=name, **{name: "nvme"})

    def run(engine: Engine, until: int) -> None:
        while engine.global_step < until:
            engine.backward(square(engine, engine.global_step))
            engine.step()

    oracle = Oracle(Net(), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES, max_grad_norm=1.0)
    for step in range(4):
        oracle.backward(square(oracle.model, step))
        oracle.step()
    seen, real = [0], Scratch.read

    def spoiled(scratch: Scratch, start: int, buffer: torch.Tensor) -> list:
        seen[0] += 1
        if seen[0] == read:
            _, file, offset, _, _ = next(scratch._ops("r", start, buffer))
            flip(Path(f"/proc/self/fd/{file.fd}"), offset + buffer.numel() // 2)
        return real(scratch, start, buffer)

    for verify in "resume", "always":
        with begin(tmp_path, Net(), verify=verify, **{**options, "run_name": f"{name}-{verify}"}) as engine:
            run(engine, 2)
            engine.synchronize()
            seen[0] = 0
            monkeypatch.setattr(Scratch, "read", spoiled)
            if verify == "resume":
                run(engine, 4)  # it is not looked for
                engine.synchronize()
                assert seen[0] >= read
                monkeypatch.undo()
                continue
            with pytest.raises(
                IntegrityError, match=rf"/{name}: \d+ bytes of {name}, from offset \d+ on, are not what was written there in this step: .*recover"
            ):
                run(engine, 4)
                engine.synchronize()
            monkeypatch.undo()
            assert engine.recover() >= 2
            run(engine, 4)
            assert_same(engine_snapshot(engine), oracle.snapshot())


@pytest.mark.parametrize("options", [dict(grads="nvme", gradient_accumulation_steps=2), dict(activations="nvme"), dict(grads="nvme", paths=2)], ids=str)
def test_always_changes_nothing_where_nothing_is_wrong(tmp_path: Path, options: dict) -> None:
    """Chunks of grads that are read alone, all of them to be added to, activations of more than one piece."""
    accumulation = options.pop("gradient_accumulation_steps", 1)
    got = engine_run(tmp_path, 3, accumulation=accumulation, verify="always", max_grad_norm=1.0, weights="nvme", state="nvme", chunk_size=2048, **options)
    want = oracle_run(3, accumulation, 1.0)
    assert got[:2] == want[:2]
    assert_same(got[2], want[2])
