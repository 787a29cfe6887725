"""A checkpoint holds one step whole, whatever happens beside it, and brings it back into any placement, bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from oracle import assert_same, engine_snapshot
from torch import nn

from zinf import cli
from zinf.aio import open_engine
from zinf.aio.faults import FaultyEngine, Rule
from zinf.checkpoint import saver, saving, tags
from zinf.engine import Engine
from zinf.errors import CheckpointError, EngineError, IntegrityError, StoreError
from zinf.tiers import host, nvme
from zinf.tiers.nvme import Store

SAVED, END = 3, 6  # steps
NVME = dict(weights="nvme", state="nvme")
MEMORY = dict(paths=0)
WIDTH = 32


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH)).to(torch.bfloat16)


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)


def engine(folder: Path, *, paths: int = 1, net: nn.Module | None = None, **options) -> Engine:
    drives = [str(folder / f"drive{i}") for i in range(paths)]
    for drive in drives:
        os.makedirs(drive, exist_ok=True)
    defaults = dict(chunk_size=4096, leaf_bytes=1024, cpu_threads=1, weight_decay=0.1, lr=1e-3, max_grad_norm=1.0)
    return Engine(net or model(), nvme_path=drives, **{**defaults, **options})


def forward(e: Engine, step: int) -> torch.Tensor:
    return (e(batch(step)).float() - batch(step + 1).float()).square().mean()


def train(e: Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        for group in e.optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / 8)
        loss = forward(e, step)
        losses.append(loss.item())
        e.backward(loss)
        e.step(extra={"step": step + 1})
    return losses


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(losses, bits at SAVED, bits at END, folder with a checkpoint made at SAVED, while its step was pending)."""
    folder = tmp_path_factory.mktemp("straight")
    with engine(folder, **NVME) as e:
        losses = train(e, 0, SAVED)
        assert any(s.pending for s in e.shards)
        e.save_checkpoint(folder / "saved", extra={"name": "first"})
        losses += train(e, SAVED, END)
        end = engine_snapshot(e)
    with engine(folder / "again", **MEMORY) as e:
        assert train(e, 0, SAVED) == losses[:SAVED]
        at_saved = engine_snapshot(e)
    return losses, at_saved, end, folder / "saved"


# ---- load: into anything


@pytest.mark.parametrize(
    "options",
    [
        dict(NVME),
        dict(NVME, chunk_size=2048, paths=2),
        dict(NVME, chunk_size=1 << 20, step_mode="deferred", commit_every=0),
        dict(NVME, max_grad_norm=None, step_mode="backward"),
        dict(NVME, device="sim", chunk_size=6144),
        dict(NVME, crash_safe=False),
        dict(weights="host", state="host"),
        dict(weights=0.5, state=0.5, device="sim"),
        dict(MEMORY),
        dict(MEMORY, device="sim", chunk_size=6144),
    ],
    ids=str,
)
def test_loads_into_any_placement(tmp_path, straight, options):
    losses, at_saved, end, folder = straight
    with engine(tmp_path, **options) as e:
        train(e, 4, 5)  # something to be forgotten
        assert e.load_checkpoint(folder) == {"name": "first"} == e.extra
        assert e.global_step == SAVED and e.optimizer.param_groups[0]["lr"] == 1e-3 * (1 - (SAVED - 1) / 8)
        assert_same(engine_snapshot(e), at_saved)
        if options.get("max_grad_norm", 1.0):
            assert train(e, SAVED, END) == losses[SAVED:]
            assert_same(engine_snapshot(e), end)
    if options.get("paths") != 0:
        with engine(tmp_path, **options, resume=True) as e:
            assert e.global_step == (END if options.get("max_grad_norm", 1.0) else SAVED)


@pytest.mark.parametrize("options", [dict(NVME, paths=2), dict(weights="host", state="host"), dict(MEMORY), dict(NVME, device="sim")], ids=str)
def test_saves_from_any_placement(tmp_path, straight, options):
    losses, at_saved, end, _ = straight
    with engine(tmp_path / "a", **options) as e:
        train(e, 0, SAVED)
        e.save_checkpoint(tmp_path / "saved")
        assert train(e, SAVED, END) == losses[SAVED:]
    with engine(tmp_path / "b", **MEMORY) as e:
        e.load_checkpoint(tmp_path / "saved", f"step-{SAVED}")
        assert_same(engine_snapshot(e), at_saved)
        train(e, SAVED, END)
        assert_same(engine_snapshot(e), end)


def test_weights_only_is_a_new_run(tmp_path, straight):
    """No moments and no steps: what from-scratch training of these weights (and their masters) does."""
    _, at_saved, _, folder = straight
    with engine(tmp_path, **NVME) as e:
        train(e, 0, 1)
        e.load_checkpoint(folder, weights_only=True)
        assert e.global_step == 0
        weights, state = engine_snapshot(e)
        assert_same((weights, {}), (at_saved[0], {}))
        for key, (lo, m, v) in state.items():
            assert torch.equal(lo, at_saved[1][key][0]) and not m.any() and not v.any()
        train(e, 0, 1)


class Frozen(nn.Module):
    """A frozen base in blocks, and something to train."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.top = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.top(self.base(x))


def test_frozen_weights_are_stored_once(tmp_path):
    def net(seed=0):
        return Frozen(seed).to(torch.bfloat16)

    def inode(path):
        return os.stat(path / "frozen").st_ino

    with engine(tmp_path / "a", net=net(), **NVME) as e:
        train(e, 0, 1)
        one = Path(e.save_checkpoint(tmp_path / "saved", "one").path)
        train(e, 1, 2)
        bits = engine_snapshot(e)
        two = Path(e.save_checkpoint(tmp_path / "saved", "two").path)
        assert inode(one) == inode(two) == inode(tmp_path / "a/drive0/run")
        e.save_checkpoint(tmp_path / "saved", "two", keep_last=1)
    with engine(tmp_path / "b", net=net(), paths=2, **NVME) as e:  # striped: the store has no such file, but an earlier checkpoint
        e.load_checkpoint(two)
        assert_same(engine_snapshot(e), bits)
        assert inode(Path(e.save_checkpoint(tmp_path / "saved", "three").path)) == inode(two)
    with engine(tmp_path / "c", net=net(1), **NVME, chunk_size=2048) as e:  # over another base
        e.load_checkpoint(tmp_path / "saved", "three")
        assert_same(engine_snapshot(e), bits)
    with engine(tmp_path / "c", net=net(1), resume=True, **NVME, chunk_size=2048) as e:
        assert_same(engine_snapshot(e), bits)
    with engine(tmp_path / "d", net=net(1), **NVME) as e:
        other = engine_snapshot(e)
        e.save_checkpoint(tmp_path / "other")  # shares the file that the load would have to change
        with pytest.raises(StoreError, match="shared with checkpoints"):
            e.load_checkpoint(two)
        assert_same(engine_snapshot(e), other)


# ---- beside training


class Gate:
    """Holds back the copy of chunks after the first few, until opened."""

    def __init__(self, monkeypatch, free: int = 2):
        self.open, self.asked = threading.Event(), 0
        write, lock = saving.Target.write, threading.Lock()

        def gated(target, *args):
            with lock:
                self.asked += 1
            if self.asked > free:
                self.open.wait(0.01 if self.leak else 30)
            return write(target, *args)

        self.leak = False
        monkeypatch.setattr(saving.Target, "write", gated)


@pytest.mark.parametrize("options", [dict(NVME), dict(NVME, crash_safe=False), dict(NVME, device="sim"), dict(weights="host", state="host")], ids=str)
def test_a_copy_beside_training_holds_its_step(tmp_path, straight, monkeypatch, options):
    """The copy is made as slow as a few chunks a step: steps catch up with it, and it still is of its own step."""
    losses, at_saved, end, _ = straight
    gate = Gate(monkeypatch)
    gate.leak = True
    with engine(tmp_path / "a", **options) as e:
        train(e, 0, SAVED)
        allocated = host.allocated_bytes()
        saved = e.save_checkpoint(tmp_path / "saved", wait=False)
        assert not saved.done and host.allocated_bytes() == allocated
        assert train(e, SAVED, END) == losses[SAVED:]
        assert_same(engine_snapshot(e), end)
        saved.wait()
    with engine(tmp_path / "b", **MEMORY) as e:
        e.load_checkpoint(tmp_path / "saved")
        assert_same(engine_snapshot(e), at_saved)


def test_a_step_does_not_wait_for_the_copy(tmp_path, monkeypatch):
    """While the copy stands still, the next step is made and committed: it writes the other versions."""
    gate = Gate(monkeypatch)
    with engine(tmp_path, **NVME) as e:
        train(e, 0, 1)
        saved = e.save_checkpoint(tmp_path / "saved", wait=False)
        train(e, 1, 2)
        e.synchronize()
        assert e.memory.parts.records.store.step == 2 and not saved.done
        gate.open.set()
        saved.wait()
        assert saved.done and saved.step == 1


def test_close_waits_and_an_error_does_not(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    e = engine(tmp_path / "a", **NVME)
    saved = e.save_checkpoint(tmp_path / "saved", "closed", wait=False)
    threading.Timer(0.2, gate.open.set).start()
    e.close()
    assert saved.done and tags.find(str(tmp_path / "saved"), None) == saved.path
    gate.open.clear()
    gate.leak = True
    with pytest.raises(KeyError), engine(tmp_path / "b", **NVME) as e:
        saved = e.save_checkpoint(tmp_path / "saved", "stopped", wait=False)
        raise KeyError
    assert saved.done and sorted(os.listdir(tmp_path / "saved")) == ["closed", "latest"]
    with pytest.raises(StoreError, match="its engine ended first"):
        saved.wait()


# ---- what goes wrong


def faulty(monkeypatch, *rules: Rule) -> None:
    monkeypatch.setattr(saver, "open_engine", lambda *args, **kwargs: FaultyEngine(open_engine("threads"), rules))


@pytest.mark.parametrize("rule", [Rule("w", path="state", nth=5, error=errno.ENOSPC), Rule("d", nth=1, error=errno.EIO)], ids=["write", "datasync"])
def test_a_failing_disk_costs_a_checkpoint_and_nothing_else(tmp_path, straight, monkeypatch, rule):
    losses, _, end, _ = straight
    with engine(tmp_path, **NVME) as e:
        train(e, 0, SAVED)
        e.save_checkpoint(tmp_path / "saved", "good")
        faulty(monkeypatch, rule)
        with pytest.raises(OSError, match="good") as error:  # the same tag again
            e.save_checkpoint(tmp_path / "saved", "good")
        assert error.value.errno == rule.error
        unseen = e.save_checkpoint(tmp_path / "saved", "bad", wait=False)
        assert train(e, SAVED, END) == losses[SAVED:]
        assert_same(engine_snapshot(e), end)
        with pytest.raises(OSError):  # of the one before, before anything else
            e.save_checkpoint(tmp_path / "saved", "bad")
        assert unseen.done
        assert sorted(os.listdir(tmp_path / "saved")) == ["good", "latest"]
        assert Store.open([str(tmp_path / "saved/good")], open_engine("threads"), writable=False).step == SAVED
        e.save_checkpoint(tmp_path / "saved", "bad", wait=False)
        with pytest.raises(OSError):
            e.close()
    with engine(tmp_path, **NVME, resume=True) as e:
        assert e.global_step == END


def test_a_full_disk_is_found_before_the_first_byte(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(small)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with engine(tmp_path, **NVME) as e:
            train(e, 0, 1)
            with pytest.raises(OSError, match=r"needs .* bytes\) and .* are free") as error:
                e.save_checkpoint(small, wait=False)
            assert error.value.errno == errno.ENOSPC and os.listdir(small) == []
            train(e, 1, 2)
            e.save_checkpoint(tmp_path / "elsewhere")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_cannot_be_saved_is_refused(tmp_path):
    with engine(tmp_path / "a", **NVME, gradient_accumulation_steps=2) as e:
        e.save_checkpoint(tmp_path / "saved", "before")
        e.backward(forward(e, 0))
        with pytest.raises(EngineError, match="grads are not saved"):
            e.save_checkpoint(tmp_path / "saved")
        e.zero_grad()
        e.save_checkpoint(tmp_path / "saved", "dropped")
    with engine(tmp_path / "b", **NVME, max_grad_norm=None, step_mode="backward") as e:
        train(e, 0, 1)
        e.backward(forward(e, 1))
        with pytest.raises(EngineError, match="stepped some shards already"):
            e.save_checkpoint(tmp_path / "saved")
        e.step()
        for tag in ("latest", "../x", "", "a/b", ".x"):
            with pytest.raises(ValueError, match="tag is"):
                e.save_checkpoint(tmp_path / "saved", tag)
        (tmp_path / "saved/mine").mkdir()
        (tmp_path / "saved/mine/file").touch()
        with pytest.raises(StoreError, match="is no checkpoint"):
            e.save_checkpoint(tmp_path / "saved", "mine")
        with pytest.raises(StoreError, match="is no checkpoint"):  # least of all a live store
            e.save_checkpoint(tmp_path / "b/drive0", "run")
        with e.gather("0.0.weight", write=True):
            with pytest.raises(EngineError, match="save_checkpoint within a gather block"):
                e.save_checkpoint(tmp_path / "saved")
            with pytest.raises(EngineError, match="load_checkpoint within a gather block"):
                e.load_checkpoint(tmp_path / "saved", "before")
        graph = forward(e, 0)
        e.load_checkpoint(tmp_path / "saved", "before")
        with pytest.raises(EngineError, match="between a forward and its backward"):
            e.backward(graph)
    assert sorted(os.listdir(tmp_path / "saved")) == ["before", "dropped", "latest", "mine"]


def test_what_does_not_fit_is_refused(tmp_path, straight):
    *_, folder = straight
    with engine(tmp_path / "a", net=model()[:-1], **NVME) as e:
        bits = engine_snapshot(e)
        with pytest.raises(
            CheckpointError, match=rf"another model \(fingerprint \w+, this one has {e.layout.fingerprint()}\): 3.weight is .* and missing here"
        ):
            e.load_checkpoint(folder)
        with pytest.raises(CheckpointError, match=r"no checkpoint 'step-9' in .*; there are step-3"):
            e.load_checkpoint(folder, "step-9")
        with pytest.raises(CheckpointError, match="no file 'latest'; there are none"):
            e.load_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match="is the store of a run"):
            e.load_checkpoint(tmp_path / "a/drive0", "run")
        assert_same(engine_snapshot(e), bits)
    with engine(tmp_path / "b", optimizer="adam", **NVME) as e:
        with pytest.raises(CheckpointError, match="trained with adamw, this engine has adam"):
            e.load_checkpoint(folder)
        e.load_checkpoint(folder, weights_only=True)
    with pytest.raises(StoreError, match=r"is a checkpoint, .*\.load_checkpoint"):
        Engine(model(), nvme_path=str(folder), run_name=f"step-{SAVED}", resume=True, chunk_size=4096, leaf_bytes=1024)


@pytest.mark.parametrize(
    "options", [dict(NVME), dict(MEMORY), dict(NVME, crash_safe=False), dict(NVME, chunk_size=2048), dict(weights="host", state="nvme")], ids=str
)
def test_a_damaged_checkpoint_changes_nothing(tmp_path, straight, options):
    *_, folder = straight
    shutil.copytree(folder, tmp_path / "saved")
    with open(tmp_path / f"saved/step-{SAVED}/state", "r+b") as f:
        f.seek(-5000, os.SEEK_END)
        f.write(b"\xff" * 100)
    with engine(tmp_path, **options) as e:
        losses = train(e, 0, 2)
        bits = engine_snapshot(e)
        with pytest.raises(IntegrityError, match=r"state of shard"):
            e.load_checkpoint(tmp_path / "saved")
        assert_same(engine_snapshot(e), bits)
        again = train(e, 2, 4)
    with engine(tmp_path / "straight", **MEMORY) as e:
        assert train(e, 0, 4) == losses + again


# ---- the folder


def test_tags_are_replaced_and_pruned(tmp_path):
    saved = tmp_path / "saved"
    with engine(tmp_path, **NVME) as e:
        for step in range(4):
            e.save_checkpoint(saved, keep_last=2)
            train(e, step, step + 1)
        assert sorted(os.listdir(saved)) == ["latest", "step-2", "step-3"]
        e.save_checkpoint(saved, "step-3", extra={"second": True})  # of step 4, under an old name
        assert e.load_checkpoint(saved) == {"second": True} and e.global_step == 4
        reader = Store.open([str(saved / "step-3")], open_engine("threads"), writable=False)
        with pytest.raises(StoreError, match="in use"):
            e.save_checkpoint(saved, "step-3")
        reader.verify()
        e.save_checkpoint(saved, "new", keep_last=1)  # one in use stays
        assert sorted(os.listdir(saved)) == ["latest", "new", "step-3"]
        reader.close()
        with pytest.raises(ValueError, match="keep_last"):
            e.save_checkpoint(saved, keep_last=0)


def test_without_an_exchange_of_names(tmp_path, monkeypatch):
    """Where the filesystem cannot exchange two names there is an instant without the tag; the new one is found."""
    monkeypatch.setattr(tags.cffi.FFI, "dlopen", lambda *args: object())
    with engine(tmp_path, **NVME) as e:
        for number in range(2):
            e.save_checkpoint(tmp_path / "saved", "tag", extra={"number": number})
        assert e.load_checkpoint(tmp_path / "saved") == {"number": 1}
        assert sorted(os.listdir(tmp_path / "saved")) == ["latest", "tag"]
        os.rename(tmp_path / "saved/tag", tmp_path / "saved/.tag.saving")
        shutil.copytree(tmp_path / "saved/.tag.saving", tmp_path / "saved/.tag.old")
        assert e.load_checkpoint(tmp_path / "saved") == {"number": 1}
        with monkeypatch.context() as m:  # the next save fails: what is whole but for its name is still there
            m.setattr(saving.Target, "check_space", lambda self, need: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(OSError, match="full"):
                e.save_checkpoint(tmp_path / "saved", "tag", extra={"number": 2})
        assert e.load_checkpoint(tmp_path / "saved") == {"number": 1}
        e.save_checkpoint(tmp_path / "saved", "tag", extra={"number": 3})
        assert e.load_checkpoint(tmp_path / "saved") == {"number": 3}
        assert sorted(os.listdir(tmp_path / "saved")) == ["latest", "tag"]


def test_blocks_are_shared_where_the_filesystem_can(tmp_path, straight, monkeypatch):
    _, at_saved, _, _ = straight

    def cloned(source, offset, length, target, at):
        with open(f"/proc/self/fd/{source}", "rb") as f:
            assert os.pwrite(target, os.pread(f.fileno(), length, offset), at) == length

    monkeypatch.setattr(saving, "clone_range", cloned)
    monkeypatch.setattr(saving, "copy_snapshot", None)
    with engine(tmp_path / "a", **NVME, paths=2) as e:
        train(e, 0, SAVED)
        e.save_checkpoint(tmp_path / "saved")
        train(e, SAVED, END)
    with engine(tmp_path / "b", **MEMORY) as e:
        e.load_checkpoint(tmp_path / "saved")
        assert_same(engine_snapshot(e), at_saved)


def test_export_without_the_model(tmp_path, capsys):
    """The files that the engine itself would write, of a model that came from a folder, and the fp32 master."""
    import models
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    import zinf

    models.llama(num_hidden_layers=2).save_pretrained(tmp_path / "source")
    net = zinf.from_pretrained(tmp_path / "source", nvme_path=tmp_path, chunk_size=4096)
    with Engine(net, nvme_path=str(tmp_path), lr=1e-3) as e:
        models.train(e, 2)
        e.save_checkpoint(tmp_path / "saved")
        e.save_pretrained(tmp_path / "own")
        e.save_pretrained(tmp_path / "own32", dtype="fp32")
    assert cli.main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0 and "config.json" in capsys.readouterr().out
    assert cli.main(["export", str(tmp_path / "saved/step-2"), str(tmp_path / "out32"), "--dtype", "fp32"]) == 0
    for own, out in (("own", "out"), ("own32", "out32")):
        a, b = (load_file(tmp_path / f / "model.safetensors") for f in (own, out))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out32").dtype == torch.float32
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "live")]) == 0  # the store itself
    assert (tmp_path / "live/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_inspect_and_clean_know_checkpoints(tmp_path, straight, capsys):
    *_, folder = straight
    shutil.copytree(folder, tmp_path / "saved")
    left = tmp_path / "saved/.killed.saving"  # what a process that was killed in a save has left
    shutil.copytree(folder / f"step-{SAVED}", left)
    (left / "manifest.json").unlink()
    # (It has the uuid of the checkpoint beside it, as any copy has: they still are two.)
    stores = {os.path.basename(s["paths"][0]): s for s in nvme.inspect([str(tmp_path / "saved")])["stores"]}
    assert stores[f"step-{SAVED}"]["state"] == "committed" and stores[f"step-{SAVED}"]["checkpoint"]["tag"] == f"step-{SAVED}"
    assert stores[".killed.saving"]["state"] == "uncommitted"
    assert cli.main(["inspect", str(tmp_path / "saved")]) == 0
    assert "zinf 0.1.0, torch 2." in capsys.readouterr().out
    assert cli.main(["clean", str(tmp_path / "saved")]) == 0 and not left.exists()
    assert tags.find(str(tmp_path / "saved"), None) == str(tmp_path / f"saved/step-{SAVED}")
