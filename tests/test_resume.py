"""A run that was stopped and goes on in a fresh process is the run that was not: losses, learning rates, data, random numbers, final bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import assert_same

from zinf import ConfigError, Engine, StoreError
from zinf.loader import ResumableLoader
from zinf.objects import LIMIT, Objects
from zinf.tiers import nvme

WORKER = Path(__file__).parent / "resume_worker.py"
STEPS = 7


@pytest.fixture(scope="module")
def worker():
    """Runs a part in a process of its own; returns its exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(
        folder: Path, out: str, case: dict, *, resume: str | None = None, until: int | None = None, save: bool | str = False, kill: bool = False, **more
    ) -> int:
        folder.mkdir(exist_ok=True)
        part = dict(case=case, folder=str(folder), out=out, resume=resume, until=until, save=save, kill=kill, **more)
        server.stdin.write(json.dumps(part) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    yield ask
    server.stdin.close()
    server.wait()


def seen(folder: Path, out: str) -> dict:
    return json.loads((folder / f"{out}.json").read_text())


def same_end(a: Path, b: Path) -> None:
    (bits_a, buffers_a), (bits_b, buffers_b) = (torch.load(f / "end.pt", weights_only=True) for f in (a, b))
    assert_same(bits_a, bits_b)
    assert all(torch.equal(x, y) for x, y in zip(buffers_a, buffers_b, strict=True))


CASES = {
    "deferred": dict(engine=dict(max_grad_norm=1.0), dropout=0.2, schedule="lambda"),
    "backward": dict(engine=dict(step_mode="backward"), dropout=0.2, schedule="cosine"),
    "resident": dict(engine=dict(weights="host", state="host", commit_every=1), dropout=0.2),
    "sim": dict(engine=dict(device="sim", gradient_accumulation_steps=2), dropout=0.2),
    "workers": dict(workers=2, dropout=0.2, paths=2),
    "packed": dict(data="packed", schedule="cosine"),
    "lr by hand": dict(by_hand=True),
    "evaluation": dict(evaluate=2, dropout=0.2),
    "frozen": dict(frozen=True, dtype="fp32", dropout=0.2),
    "fp16": dict(dtype="fp16", dropout=0.2, engine=dict(loss_scale_window=2, hysteresis=1)),
    "lora": dict(lora=True, dropout=0.2, schedule="cosine", data="packed"),
}


@pytest.fixture(scope="module")
def straight(worker, tmp_path_factory):
    """The folder of the uninterrupted run of a case."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("straight")
            assert worker(made[name], "end", CASES[name]) == 0
            assert len(seen(made[name], "end")) == STEPS
        return made[name]

    return of


@pytest.mark.parametrize("name", CASES)
def test_goes_on_from_the_last_commit(worker, straight, tmp_path, name):
    """Killed in the middle of an epoch, after a step whose commit may not be made yet."""
    assert worker(tmp_path, "begun", CASES[name], until=3, kill=True) == 9
    assert worker(tmp_path, "end", CASES[name], resume="store") == 0
    whole, begun, end = seen(straight(name), "end"), seen(tmp_path, "begun"), seen(tmp_path, "end")
    assert len(end) >= STEPS - 3 and {**end, **begun} == whole and {**begun, **end} == whole
    same_end(tmp_path, straight(name))


OTHERS = {"deferred": dict(device="sim"), "packed": dict(weights="host", state="host"), "workers": dict(chunk_size=4096), "fp16": dict(device="sim")}
OTHERS["lora"] = dict(device="sim", chunk_size=4096)


@pytest.mark.parametrize("name", OTHERS)
def test_goes_on_from_a_checkpoint(worker, straight, tmp_path, name):
    """Saved after a step, killed; loaded by a process with another store and placement."""
    case = CASES[name]
    assert worker(tmp_path, "begun", case, until=3, save=True, kill=True) == 9
    other = {**case, "engine": {**case.get("engine", {}), **OTHERS[name]}}
    assert worker(tmp_path, "end", other, resume="checkpoint", drives=[str(tmp_path / "elsewhere")]) == 0
    whole, begun, end = seen(straight(name), "end"), seen(tmp_path, "begun"), seen(tmp_path, "end")
    assert {**begun, **end} == whole and set(begun) | set(end) == set(whole) and not set(begun) & set(end)
    same_end(tmp_path, straight(name))


def test_a_moved_store_opens(worker, straight, tmp_path):
    """Directories are found by what they say of themselves, under any name and in any order; one that lacks is named."""
    case, names = CASES["workers"], ["somewhere", "else"]
    assert worker(tmp_path, "begun", case, until=3) == 0  # closed well
    for old, new in zip(("drive0", "drive1"), names, strict=True):
        (tmp_path / old).rename(tmp_path / new)
    with pytest.raises(StoreError, match=r"2 paths, and 1 are given \(.*somewhere/run is path 0; path 1 is missing\)"):
        _open(tmp_path / names[0])
    with pytest.raises(StoreError, match=r"drive1/run: the directory does not exist"):
        (tmp_path / "drive1").mkdir()
        _open(tmp_path / names[0], tmp_path / "drive1")
    assert worker(tmp_path, "end", case, resume="store", drives=[str(tmp_path / name) for name in reversed(names)]) == 0
    assert {**seen(tmp_path, "begun"), **seen(tmp_path, "end")} == seen(straight("workers"), "end")
    same_end(tmp_path, straight("workers"))


def test_killed_in_a_load_or_a_save(worker, straight, tmp_path):
    """A load that was not committed never was; a save that was not whole is not there, and is cleaned away."""
    case = CASES["deferred"]
    assert worker(tmp_path, "begun", case, until=3, save=True, kill=True) == 9
    assert worker(tmp_path, "more", case, resume="store") == 0
    assert worker(tmp_path, "none", case, resume="store, then checkpoint") == 9
    assert worker(tmp_path, "end", case, resume="store") == 0 and seen(tmp_path, "end") == {}
    same_end(tmp_path, straight("deferred"))
    assert worker(tmp_path / "b", "begun", case, until=3, save="beside", kill=True) == 9
    saved = tmp_path / "b/saved"
    nvme.clean([str(saved)], yes=False)
    assert sorted(os.listdir(saved)) in ([], ["latest", "step-3"])
    assert worker(tmp_path / "b", "end", case, resume="store") == 0
    same_end(tmp_path / "b", straight("deferred"))


def _open(*drives: Path) -> None:
    import resume_worker

    Engine(resume_worker.model({}), nvme_path=[str(d) for d in drives], resume=True, chunk_size=2048, leaf_bytes=1024)


# ---- what a loop registers


class Holder:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_states_survive_as_they_were():
    import collections

    import numpy

    state = {
        "plain": [1, -2.5, None, True, "x", float("inf"), 1 << 100], "tuple": (1, (2, [3])), 5: "int key", "$odd": {"$tuple": [1]}, "bytes": b"\0\xff",
        "tensors": [torch.arange(6).view(2, 3).to(d) for d in (torch.bfloat16, torch.int64, torch.bool)] + [torch.tensor(2.5), torch.zeros(0, 3)],
        "numpy": [numpy.arange(4.0).reshape(2, 2), numpy.float32(1.5)], "counter": collections.Counter({3: 2}),
    }  # fmt: skip
    objects, others = Objects(), Objects()
    generator = torch.Generator().manual_seed(3)
    objects.add("all", Holder(state), None)
    objects.add("generator", generator, None)
    saved = json.loads(json.dumps(objects.capture()))
    others.restore(saved)
    assert others.capture() == saved, "a state that nobody has claimed yet was lost"
    back = Holder(None)
    assert others.add("all", back, None)
    assert others.capture() == saved

    def text(value):
        return repr({k: v for k, v in value.items() if k != "tensors"})

    assert text(back.state) == text(state)
    for a, b in zip(back.state["tensors"], state["tensors"], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    assert others.add("generator", other, None) and torch.equal(torch.rand(3, generator=other), expected)


def test_what_cannot_be_registered_is_refused():
    objects = Objects()
    with pytest.raises(ConfigError, match=r"'x' is a list without state_dict\(\)"):
        objects.add("x", [], None)
    with pytest.raises(ConfigError, match=r"the state of x.f\[0\] is a function"):
        objects.add("x", Holder({"f": [lambda: 0]}), None)
    with pytest.raises(ConfigError, match=f"tensors of more than {LIMIT} bytes"):
        objects.add("x", Holder({"big": torch.zeros(LIMIT + 1, dtype=torch.uint8)}), None)
    objects.add("x", Holder({}), None)
    with pytest.raises(ConfigError, match="'x' is registered already"):
        objects.add("x", Holder({}), None)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_counts_what_was_taken(workers):
    """Not what workers have fetched ahead; every row once an epoch; other rows are refused; the global generator is left alone."""
    rows = list(range(10))
    before = torch.get_rng_state()
    loader = ResumableLoader(rows, 3, shuffle=True, seed=1, num_workers=workers)
    whole = [[b.tolist() for b in loader] for _ in range(3)]
    assert [sorted(i for batch in epoch for i in batch) for epoch in whole] == [rows] * 3 and whole[0] != whole[1] and len(loader) == 4
    again = ResumableLoader(rows, 3, shuffle=True, seed=1, num_workers=workers)
    again.load_state_dict({**loader.state_dict(), "epoch": 1, "taken": 0})
    for i, batch in enumerate(again):
        assert batch.tolist() == whole[1][i] and again.state_dict()["taken"] == i + 1
        if i == 1:
            break
    third = ResumableLoader(rows, 3, shuffle=True, seed=1, num_workers=workers)
    third.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert [b.tolist() for b in third] == whole[1][2:] and [b.tolist() for b in third] == whole[2]
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError, match=r"data: rows was 10 .* and is 9 now"):
        ResumableLoader(rows[:9], 3, shuffle=True, seed=1).load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="generator follows from"):
        ResumableLoader(rows, 3, generator=None)
    with pytest.raises(ConfigError, match="has no length"):
        ResumableLoader(iter(rows), 3)
