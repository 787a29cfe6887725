"""Bounded: memory stays within the budgets, and nothing grows, however long a run is; memory that others take makes it slower and no more.

The process of the run may not have more address space than it has after its first steps, and a little, nor, in a control group, more memory: see
bounded_worker.py. `make bounded` runs 1,000 steps; ZINF_BOUNDED_STEPS says how many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from control_group import Group, group

STEPS = int(os.environ.get("ZINF_BOUNDED_STEPS", "80"))
WORKER = Path(__file__).with_name("bounded_worker.py")
KIB, MIB = 1 << 10, 1 << 20


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
        assert within.limited and not within.killed
    assert result["losses"] == calm["losses"]


class Eaters(threading.Thread):
    """One process after the other takes all memory that the group has, until the kernel kills it: them first, as it is told."""

    EAT = "import time\nkept = []\nwhile True:\n    kept.append(b'x' * (1 << 20))\n    time.sleep(0.001)\n"

    def __init__(self, within: Group) -> None:
        super().__init__(daemon=True)
        self._group, self._over = within, threading.Event()

    def _enter(self) -> None:
        Path("/proc/self/oom_score_adj").write_text("1000")  # before it counts
        self._group.enter()

    def run(self) -> None:
        while not self._over.is_set():
            if not self._group.limited:  # it would take all that the machine has
                self._over.wait(0.05)
                continue
            eater = subprocess.Popen([sys.executable, "-S", "-E", "-c", self.EAT], preexec_fn=self._enter, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while eater.poll() is None and not self._over.wait(0.01):
                pass
            eater.kill()
            eater.wait()

    def stop(self) -> None:
        self._over.set()
        self.join()


def test_another_process_that_eats_the_memory_slows_and_does_not_kill(calm: dict, tmp_path: Path) -> None:
    with group() as within:
        eaters = Eaters(within)
        eaters.start()
        try:
            result = run(tmp_path, min(STEPS, 300), f"group={within.folder}", within=within)
        finally:
            eaters.stop()
        assert within.killed >= 1, "nobody was short of memory"
        print(f"eaters killed: {within.killed}")
    check(result)
    assert result["losses"] == calm["losses"][: result["steps"]]


def test_the_watch_sees_what_grows(tmp_path: Path) -> None:
    """A run that keeps 64 KiB and a descriptor from each step."""
    result = run(tmp_path, 80, "leak")
    with pytest.raises(AssertionError):
        check(result)
