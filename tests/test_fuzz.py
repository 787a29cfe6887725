"""Parsers take a file or refuse it in one line, in time and within memory, whoever wrote it: some seconds of `make fuzz`, and what it has found."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from fuzz import TARGETS

from zinf import layout
from zinf.checkpoint.sources import SafetensorsSource
from zinf.config import Config
from zinf.errors import CheckpointError, ConfigError, StoreError
from zinf.tiers import manifest

FUZZ = Path(__file__).with_name("fuzz.py")


def test_some_inputs_of_each_target() -> None:
    done = subprocess.run([sys.executable, FUZZ, "all", "1", "--seed", "7", "--inputs", "1500"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1].rstrip(",") for line in lines] == list(TARGETS)
    assert all("'taken'" in line and "Error'" in line for line in lines), lines  # neither is everything refused nor nothing


@pytest.mark.parametrize("shape", [[1 << 62] * 300, [1 << 62] * 200_000, [0] * 65])
def test_a_shape_of_many_dimensions(tmp_path: Path, shape: list[int]) -> None:
    """Its size has more digits than Python writes; of longer ones, computing it takes hours."""
    raw = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "x").write_bytes(len(raw).to_bytes(8, "little") + raw)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="tensor x has the impossible shape") as e:
        SafetensorsSource(tmp_path / "x")
    assert len(str(e.value)) < 500 and time.monotonic() - start < 5


def test_a_manifest_of_more_chunks_than_memory_holds() -> None:
    """A thousand bytes that describe 10^8 chunks."""
    good = TARGETS["manifest"].inputs()[0]
    fields = json.loads(good)
    numel = 2048 * 10**8
    param = ["w", [numel], 0, numel]
    fields["layout"]["shards"] = [{"name": "s", "runs": [{**fields["layout"]["shards"][0]["runs"][0], "params": [param]}]}]
    fields["layout"]["chunk"] = 2048
    bad = TARGETS["manifest"].with_json(good, json.dumps(fields))
    assert layout.Model.from_json(fields["layout"]).numel == numel
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=r"x describes no possible store .*checksums for 200000000 chunks"):
            manifest.decode(bad, "x")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_config_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match="recursion"):
        Config.load(tmp_path / "x.json", env={})
