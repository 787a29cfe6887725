"""Bounded: memory stays within the budgets, and nothing grows, however long a run is; memory that others take makes it slower and no more.

The process of the run may not have more address space than it has after its first steps, and a little, nor, in a control group, more memory: see
bounded_worker.py. `make bounded` runs 1,000 steps; ZINF_BOUNDED_STEPS says how many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from control_group import Group, group

STEPS = int(os.environ.get("ZINF_BOUNDED_STEPS", "80"))
WORKER = Path(__file__).with_name("bounded_worker.py")
KIB, MIB = 1 << 10, 1 << 20
ROOM = 128 * MIB
EAT = """
import os, sys, time
folder, room = sys.argv[1], int(sys.argv[2])
limit = os.path.join(folder, "memory.max" if os.path.exists(os.path.join(folder, "memory.max")) else "memory.limit_in_bytes")
while open(limit).read().strip() == "max" or int(open(limit).read()) > 1 << 60:
    time.sleep(0.05)  # else it would be the machine's memory
while True:
    kept = b"x" * room
    with open(sys.argv[3], "rb") as f:  # pages of a file want their place too
        while f.read(1 << 20):
            pass
    time.sleep(0.02)
    del kept
    time.sleep(0.02)
"""


def run(folder: Path, steps: int, *mode: str, within: Group | None = None) -> dict:
    enter = within.enter if within is not None else None
    done = subprocess.run([sys.executable, WORKER, folder, str(steps), *mode], capture_output=True, text=True, timeout=290, preexec_fn=enter)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run(tmp_path_factory.mktemp("calm"), STEPS)


def check(result: dict) -> None:
    first, *later = result["seen"]
    assert len(later) >= 4
    for now in later:
        assert now["zinf"] == first["zinf"] == result["planned"] <= sum(result["budgets"].values())
        assert now["descriptors"] == first["descriptors"] and now["threads"] <= first["threads"], (first, now)
        assert now["disk"] <= first["disk"] + 64 * KIB  # a manifest counts its steps
        assert now["rss"] <= first["rss"] + 2 * MIB, [seen["rss"] for seen in result["seen"]]
        assert now["space"] <= result["limit"]
    print(json.dumps({key: result[key] for key in ("steps", "seconds", "faults", "planned")} | {"first": first, "last": later[-1]}))


def test_nothing_grows(calm: dict) -> None:
    check(calm)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the owner of the files may have their pages taken")
def test_memory_pressure_slows_and_does_not_kill(calm: dict, tmp_path: Path) -> None:
    """Nor does it change a bit of a loss. (How many pages are really taken depends on who else maps the same libraries.)"""
    pressed = run(tmp_path, min(STEPS, 150), "pressure")
    check(pressed)
    assert pressed["rounds"] > 10
    assert pressed["losses"] == calm["losses"][: pressed["steps"]]


def test_within_a_control_group(calm: dict, tmp_path: Path) -> None:
    """Memory is limited to what the run has after its first steps and a little (the kernel would kill it), and the bits are the same."""
    with group() as within:
        result = run(tmp_path, STEPS, f"group={within.folder}", within=within)
        check(result)
        assert not within.killed
    assert result["losses"] == calm["losses"]


def test_another_process_that_eats_the_memory_slows_and_does_not_kill(calm: dict, tmp_path: Path) -> None:
    """Together they have what the run alone needs, a little, and ROOM; the other takes ROOM again and again, so pages of files have to go, and come back."""
    with open(tmp_path / "large", "wb") as f:
        f.truncate(2 * ROOM)
    with group() as within:
        eater = subprocess.Popen([sys.executable, "-S", "-E", "-c", EAT, str(within.folder), str(ROOM), str(tmp_path / "large")], preexec_fn=within.enter)
        try:
            result = run(tmp_path, min(STEPS, 300), f"group={within.folder}", str(ROOM), within=within)
            assert eater.poll() is None and not within.killed
            assert within.refused > 10, "nobody was short of memory"
        finally:
            eater.kill()
            eater.wait()
    check(result)
    assert result["losses"] == calm["losses"][: result["steps"]]


def test_the_watch_sees_what_grows(tmp_path: Path) -> None:
    """A run that keeps 64 KiB and a descriptor from each step."""
    result = run(tmp_path, 80, "leak")
    with pytest.raises(AssertionError):
        check(result)
