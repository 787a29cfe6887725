"""kill -9 at random moments of import, steps, commit, save, export, resume and clean, and power losses: every reopen lands on a committed step with
its bits, and the run ends with the bits of one that was never killed. `make crash N=300` is the same for longer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

STORM = Path(__file__).parent / "crash" / "storm.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "kills"), [("deferred", 16), ("backward", 16), ("sim", 8)])
def test_storm(tmp_path, mode, kills):
    ran = subprocess.run(
        [sys.executable, str(STORM), "--kills", str(kills), "--seed", "1", "--mode", mode, "--folder", str(tmp_path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    made = re.search(r"^(\d+) kills in", ran.stdout, re.MULTILINE)
    assert made and int(made[1]) >= kills, ran.stdout  # the last life may be killed once more
