"""A power loss at any instant of a real training leaves a store that opens at a committed step, with the bits of that step.

Everything that the engine sends to the disk is recorded; then the disk is built as it may be after a cut at each point of the record.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from crash.disk import Disk, Recorder, watch_manifest
from crash.rig import MODES, begin, end, same_end, train
from fake_io import FakeIo

from zinf import memory
from zinf.aio import open_engine
from zinf.tiers.nvme import Store

STEPS = 3


def put(folder: Path, files: dict[str, bytes]) -> Path:
    """A store of these files. A killed run's lock is free."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        target = folder / "run" / os.path.basename(path)
        if not target.exists() or target.read_bytes() != data:
            target.write_bytes(data)
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_power_loss_at_every_point_of_a_training(tmp_path, mode, monkeypatch):
    sums, ends = {}, {}
    for name in ("straight", "recorded"):
        (tmp_path / name).mkdir()
    for steps in range(STEPS + 2):  # straight runs say what is right
        with begin(tmp_path / "straight", resume=bool(steps), **MODES[mode]) as engine:
            engine.restore_rng()
            train(engine, steps)
            ends[steps] = end(engine)
        with Store.open([str(tmp_path / "straight" / "run")], FakeIo(), writable=False) as store:
            sums[steps] = store._committed.sums

    events: list[tuple] = []
    folder = tmp_path / "recorded"
    engine = begin(folder, **MODES[mode])
    engine.close()
    disk = Disk([str(folder / "run")])
    monkeypatch.setattr(memory, "open_engine", lambda *args, **options: Recorder(open_engine(*args, **options), events.append))
    with monkeypatch.context() as patch:
        watch_manifest(events.append, patch.setattr)
        engine = begin(folder, resume=True, **MODES[mode])
        engine.restore_rng()
        store = engine.memory.parts.records.store
        commit = store.commit
        monkeypatch.setattr(store, "commit", lambda step, extra: (events.append(("begin", step)), commit(step, extra), events.append(("done", step))))
        train(engine, STEPS)
        engine.close()
    monkeypatch.undo()

    rng = random.Random(0)
    done = begun = 0
    seen = set()
    for i, event in enumerate(events):
        if event[0] == "begin":
            begun = event[1]
        elif event[0] == "done":
            done = event[1]
        else:
            disk.play(event)
        for _ in range({"rename": 6, "sync": 2}.get(event[0], 1)):
            files = disk.after_crash(rng)
            crashed = put(tmp_path / "crashed", files)
            with Store.open([str(crashed / "run")], FakeIo()) as store:  # compares every byte with the checksums of its manifest
                assert store.step in (done, begun), f"event {i}: {event[:2]}"
                assert store._committed.sums == sums[store.step], f"event {i}: step {store.step} has other bits"
                seen.add((event[0], store.step - done))
        if i % (len(events) // 8) == 3:
            with begin(put(tmp_path / f"resumed{i}", files), resume=True, **MODES[mode]) as engine:
                engine.restore_rng()
                train(engine, STEPS + 1)
                same_end(end(engine), ends[STEPS + 1])
    assert done == STEPS and len(events) > 40 * STEPS
    assert {("rename", 0), ("rename", 1), ("w", 0), ("done", 0)} <= seen  # both outcomes of an unsynced rename were seen
