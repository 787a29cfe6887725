"""kill -9 at random moments: every reopen lands on a committed step, and the run ends with the bits of one that was never killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from oracle import assert_same

WORKER = Path(__file__).parent / "crash_worker.py"
STEPS = 30
KILLS = 20
NVME = dict(weights="nvme", state="nvme")


def start(folder: Path, options: dict) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, str(WORKER), str(folder), str(STEPS), json.dumps(options)], stdout=subprocess.PIPE, text=True)


def end(folder: Path):
    return torch.load(folder / "end.pt")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [dict(**NVME, max_grad_norm=1.0), dict(**NVME, step_mode="backward")], ids=["deferred", "backward"])
def test_killed_at_random_moments(tmp_path, options):
    straight = start(tmp_path / "straight", options)
    assert straight.communicate()[0].endswith("done\n") and straight.returncode == 0
    rng = random.Random(7)
    killed, begun = 0, []
    folder = tmp_path / "killed"
    while True:
        worker = start(folder, options)
        assert worker.stdout is not None
        first = worker.stdout.readline()
        if killed < KILLS // 2:  # at a moment of training: after a random number of steps, and a random part of one
            begun.append(int(first.split()[1]))
            assert int(first.split()[2]) == sum(range(begun[-1])), "extra is of another step than the weights"
            for _ in range(rng.randint(0, 2)):
                worker.stdout.readline()
            time.sleep(rng.random() * 0.15)
            worker.kill()
            worker.communicate()
            killed += 1
        else:
            assert worker.communicate()[0].endswith("done\n") and worker.returncode == 0
            break
    assert begun == sorted(begun)
    assert killed == KILLS // 2
    assert_same(end(folder), end(tmp_path / "straight"))
