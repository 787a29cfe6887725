"""Every bench runs, at toy size, and ends with one JSON object, so that none rots."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
SCRIPTS = sorted(p.name for p in BENCH.glob("*.py") if not p.name.startswith("peer_"))  # peers need what zinf does not: a bench starts them where it can


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_last_line_is_one_json_object(script: str, tmp_path) -> None:
    done = subprocess.run([sys.executable, BENCH / script, "--toy"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    result = json.loads(last)
    assert table and isinstance(result, dict) and result
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
    if script == "curve.py":
        check_curve(result)


def check_curve(result: dict) -> None:
    """The two loops are the same but for roundings."""
    assert result["zinf"][0] == result["plain"][0] and result["held_out"]["zinf"][0] == result["held_out"]["plain"][0]
    assert len(result["zinf"]) == len(result["plain"]) == result["steps"]
    assert result["largest_difference"] < 0.01 and result["zinf"][-1] < result["zinf"][0]
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(result["norms"]["zinf"], result["norms"]["plain"], strict=True))
