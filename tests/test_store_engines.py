"""The store over the real I/O engines, in good weather and bad."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_io import Bytes, content, tiny_model

from zinf.errors import ConfigError
from zinf.layout import STATE
from zinf.tiers.nvme import Store

aio = pytest.importorskip("zinf.aio")
faults = pytest.importorskip("zinf.aio.faults")


@pytest.fixture(params=["uring", "threads", "python", "faults:uring", "faults:threads", "faults:python"])
def io(request: pytest.FixtureRequest) -> Iterator[object]:
    try:
        engine = aio.open_engine(request.param, block_size=8192, queue_depth=8)
    except ConfigError as e:
        pytest.skip(str(e))
    yield engine
    engine.close()


@pytest.mark.parametrize("direct", ["auto", False])
def test_round_trip(tmp_path: Path, io, direct: bool | str) -> None:
    """Chunks are larger than a piece of the engine, so that short transfers and retries happen in their middle."""
    model = tiny_model(4096)
    data = Bytes(model)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    expected = {}
    with Store.create(paths, model, io, direct=direct, verify="always") as store:
        for step in range(3):
            keys = [key for key in data.places if step == 0 or not store._entries[key].frozen]
            store.write([(key, data.fill(key, step)) for key in keys])
            expected |= {key: data.out[key].numpy().tobytes() for key in keys}
            assert content(store, data) == expected
            store.commit(step, {})
        store.write([(key, data.fill(key, 99)) for key in keys])
        store.rollback()
        assert content(store, data) == expected
    with Store.open(paths, io, direct=direct, verify="always", expect=model) as store:
        assert store.step == 2 and content(store, data) == expected


@pytest.mark.parametrize("backend", ["uring", "threads", "python"])
@pytest.mark.parametrize(("kinds", "code"), [("w", errno.EIO), ("w", errno.ENOSPC), ("d", errno.EIO)])
def test_a_disk_that_fails_once(tmp_path: Path, backend: str, kinds: str, code: int) -> None:
    try:
        io = faults.FaultyEngine(aio.open_engine(backend, block_size=8192), [])
    except ConfigError as e:
        pytest.skip(str(e))
    model = tiny_model(4096)
    data = Bytes(model)
    path = str(tmp_path / "s")
    with Store.create([path], model, io) as store:
        store.write([(key, data.fill(key, 0)) for key in data.places])
        store.commit(0, {})
        before = content(store, data)
        keys = [key for key in data.places if key[0] == STATE]
        io.arm([faults.Rule(kinds, path="state", nth=1 if kinds == "d" else 3, error=code)])
        store.write([(key, data.fill(key, 1)) for key in keys])
        for _ in range(2):
            with pytest.raises(OSError) as e:
                store.commit(1, {})
            assert e.value.errno == code and e.value.filename == os.path.join(path, "state")
        assert io.fired() == [1] and store.step == 0
        store.rollback()
        assert content(store, data) == before
        store.write([(key, data.fill(key, 2)) for key in keys])
        store.commit(1, {})
        after = content(store, data)
    with Store.open([path], io) as store:
        assert content(store, data) == after
    io.close()
