"""The same faults, to zinf and to DeepSpeed ZeRO-3, side by side: a small Llama in bf16 with weights and optimizer on NVMe.

Each fault is done to a run of each, from outside (a full disk is a small ext4 of its own, which needs root; bits flip one in
each MiB of the largest file), and what follows is compared with the run of the same library to which nothing happened. "ok" is
what a user hopes for: nothing lost, the same numbers, or an error that names the cause before harm is done. DeepSpeed runs with the
settings of peer_deepspeed.py, found by trial, as the documented ones do not run.

    python bench/faults.py [--deepspeed PYTHON] [--dir PATH] [--only NAME ...] [--json FILE] [--toy]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("peer_faults.py")
STEPS = 6
TOO_SMALL = 40  # MiB, less than either needs: zinf 100 (two versions of each chunk), DeepSpeed 65
FOR_ONE = 200  # MiB, one checkpoint of either and a rest, which is then filled
SILENCE = 180  # seconds without a word, after which a run hangs


class Skip(Exception):
    """The fault cannot be made on this machine."""


@dataclasses.dataclass
class Run:
    """What one process said until it ended."""

    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    resumed: int | None = None
    saved: list[int] = dataclasses.field(default_factory=list)
    finite: bool | None = None
    error: str | None = None

    def __str__(self) -> str:
        return self.error or f"ran to step {max(self.losses, default=self.resumed or 0)}"


class Side:
    """One library: how to run it, in folders of its own."""

    def __init__(self, name: str, python: str, folder: Path):
        self.name, self.python, self.folder = name, python, folder
        self.nvme, self.checkpoints = folder / "nvme", folder / "checkpoints"
        self._plain: Run | None = None

    def fresh(self) -> None:
        """Nothing of the run before is left."""
        for folder in (self.nvme, self.checkpoints):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def run(self, *options: str, at: Callable[[str, subprocess.Popen[str]], object] | None = None, nvme: Path | None = None) -> Run:
        """One process; `at` is called at "pause" and "saving"."""
        command = [self.python, str(WORKER), self.name, "--nvme", str(nvme or self.nvme), "--checkpoints", str(self.checkpoints), *options]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        with open(self.folder / "log", "a") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True)
        found = Run()
        try:
            for said in self._lines(process):
                if "loss" in said:
                    found.losses[said["step"]] = said["loss"]
                elif "saved" in said:
                    found.saved.append(said["saved"])
                elif "at" in said:
                    if at is not None:
                        at(said["at"], process)
                    if said["at"] == "pause" and process.stdin is not None:
                        with contextlib.suppress(BrokenPipeError):
                            process.stdin.write("go\n")
                            process.stdin.flush()
                else:
                    found = dataclasses.replace(found, **said)
            code = process.wait(20)
            if code and found.error is None:
                found.error = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            found.error = "hangs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return found

    @staticmethod
    def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
        def silent(*_: Any) -> None:
            raise subprocess.TimeoutExpired(process.args, SILENCE)

        before = signal.signal(signal.SIGALRM, silent)
        try:
            assert process.stdout is not None
            signal.alarm(SILENCE)
            for line in process.stdout:
                signal.alarm(0)
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)
                signal.alarm(SILENCE)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def undisturbed(self) -> Run:
        if self._plain is None:
            self.fresh()
            self._plain = self.run("--steps", str(STEPS))
            if self._plain.error:
                raise RuntimeError(f"{self.name} does not run at all: {self._plain.error} (see {self.folder / 'log'})")
        return self._plain

    def differs(self, run: Run) -> str | None:
        """How a run's losses differ from the undisturbed ones; None: in no bit."""
        wrong = [step for step, loss in run.losses.items() if loss != self.undisturbed().losses[step]]
        if not wrong:
            return None
        step = wrong[0]
        return f"step {step} has loss {run.losses[step]:.4f}, not {self.undisturbed().losses[step]:.4f}"


Verdict = tuple[bool, str]


# ---------------------------------------------------------------------------------------------------------------- the faults


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """An ext4 of its own, mounted."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        raise Skip("a disk of its own needs root and mkfs.ext4")
    image, mount = folder / "disk.img", folder / "disk"
    with open(image, "wb") as f:
        f.truncate(mib << 20)
    mount.mkdir(exist_ok=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True).returncode:
        raise Skip("no loop device can be mounted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
        image.unlink()


def fill(folder: Path) -> None:
    """Take all the room there is."""
    with open(folder / "filler", "wb") as f, contextlib.suppress(OSError):
        while f.write(b"\0" * (1 << 16)):
            f.flush()


def flip(folder: Path) -> str:
    """One bit in each MiB of the largest file (a single one may meet bytes that nobody will read)."""
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    size = largest.stat().st_size
    with open(largest, "r+b") as f:
        for at in range(min(size // 2, 1 << 19), size, 1 << 20):
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ 64]))
        os.fsync(f.fileno())
    return largest.name


def says(error: str | None, *words: str) -> bool:
    return error is not None and any(word in error.lower() for word in words)


def disk_too_small(side: Side) -> Verdict:
    side.fresh()
    with small_disk(side.folder, TOO_SMALL) as disk:
        run = side.run("--steps", str(STEPS), nvme=disk)
    if run.error is None:
        return side.differs(run) is None, f"ran; {side.differs(run) or 'same losses'}"
    when = f"after {max(run.losses)} steps" if run.losses else "before the first step"
    return not run.losses and says(run.error, "space", "full", "errno 28"), f"{when}: {run.error}"


def disk_full_at_save(side: Side) -> Verdict:
    """A checkpoint is there; the next save meets a full disk; then there is room again."""
    side.fresh()
    with disk_for_checkpoints(side) as disk:
        run = side.run("--steps", "5", "--save", "2", "4", "--tags", "--pause", "4", at=lambda what, _: fill(disk) if what == "pause" else None)
        if run.error is None:
            return False, f"said nothing: saved {run.saved}"
        (disk / "filler").unlink()
        again = side.run("--steps", str(STEPS), "--resume", *(["--tag", "step2"] if side.name == "zinf" else []))
        kept = again.error is None and again.resumed == 2 and side.differs(again) is None
        return kept and says(run.error, "space", "full", "errno 28"), f"save: {run.error}; then resumed at {again.resumed}: {side.differs(again) or again}"


@contextlib.contextmanager
def disk_for_checkpoints(side: Side) -> Iterator[Path]:
    with small_disk(side.folder, FOR_ONE) as disk:
        before, side.checkpoints = side.checkpoints, disk / "checkpoints"
        side.checkpoints.mkdir()
        try:
            yield disk
        finally:
            side.checkpoints = before


def resume(side: Side) -> Verdict:
    """Saved after step 3, gone on in a new process."""
    side.fresh()
    side.run("--steps", "3", "--save", "3")
    shutil.rmtree(side.nvme)  # the checkpoint alone must do
    side.nvme.mkdir()
    run = side.run("--steps", str(STEPS), "--resume", "--tag", "last")
    if run.error or run.resumed != 3:
        return False, f"resumed at {run.resumed}: {run.error}"
    return side.differs(run) is None, side.differs(run) or "every loss has its bits"


def killed(side: Side) -> Verdict:
    """kill -9 before step 5, when nothing was saved; a step that is still under way may be lost."""
    side.fresh()
    side.run("--steps", str(STEPS), "--pause", "5", at=lambda what, process: process.kill())
    run = side.run("--steps", str(STEPS), "--resume")
    if run.error:
        return False, f"4 steps lost: {run.error}"
    return run.resumed in (3, 4) and side.differs(run) is None, f"resumed at {run.resumed}; {side.differs(run) or 'every loss has its bits'}"


def killed_in_save(side: Side, trials: int = 6) -> Verdict:
    """kill -9 while a save replaces the one before (the same tag)."""
    chance, loaded, exact = random.Random(0), 0, 0
    for _ in range(trials):
        side.fresh()
        saves: list[int] = []

        def kill(what: str, process: subprocess.Popen[str], saves: list[int] = saves) -> None:
            saves.append(1)
            if what == "saving" and len(saves) == 2:
                time.sleep(chance.uniform(0.005, 0.15))
                process.kill()

        side.run("--steps", "4", "--save", "2", "4", at=kill)
        run = side.run("--steps", str(STEPS), "--resume", "--tag", "last")
        good = run.error is None and run.resumed in (2, 4)
        loaded += good
        exact += good and side.differs(run) is None
    return exact == trials, f"{loaded} of {trials} had a checkpoint to go on from, {exact} went on with the same bits"


def bit_in_checkpoint(side: Side) -> Verdict:
    side.fresh()
    side.run("--steps", "3", "--save", "3")
    name = flip(side.checkpoints)
    run = side.run("--steps", str(STEPS), "--resume", "--tag", "last")
    if run.error:
        return says(run.error, "checksum", "not what was written", "corrupt"), f"{name}: {run.error}"
    return False, f"{name}: not noticed; {side.differs(run) or 'same losses for these steps'}"


def bit_on_drive(side: Side) -> Verdict:
    """Between two steps."""
    side.fresh()
    run = side.run("--steps", str(STEPS), "--pause", "4", *(["--always"] if side.name == "zinf" else []), at=lambda what, _: flip(side.nvme))
    if run.error:
        return says(run.error, "checksum", "not what was written", "corrupt"), run.error
    return False, f"not noticed; {side.differs(run) or 'same losses for these steps'}"


def typo(side: Side) -> Verdict:
    """max_grad_nrom, gradient_cliping."""
    side.fresh()
    run = side.run("--steps", "3", "--typo")
    return run.error is not None, run.error or f"not noticed: {side.differs(run) or 'same losses'}"


def nan(side: Side) -> Verdict:
    """The loss of step 3 is NaN, once."""
    side.fresh()
    run = side.run("--steps", str(STEPS), "--poison", "3")
    if run.error:
        return "nan" in run.error.lower() or "finite" in run.error.lower(), run.error
    return run.finite is True, "the step was skipped, weights are finite" if run.finite else "weights are NaN, and nothing is said"


def noncontiguous(side: Side) -> Verdict:
    """One weight is a transposed view."""
    side.fresh()
    run = side.run("--steps", str(STEPS), "--noncontiguous")
    return run.error is None and side.differs(run) is None, run.error or side.differs(run) or "every loss has its bits"


FAULTS: dict[str, Callable[[Side], Verdict]] = {
    "the disk is too small": disk_too_small,
    "the disk is full at a save": disk_full_at_save,
    "resume from a save": resume,
    "kill -9, nothing saved": killed,
    "kill -9 within a save": killed_in_save,
    "a bit flips in a checkpoint": bit_in_checkpoint,
    "a bit flips on the drive": bit_on_drive,
    "a typo in the config": typo,
    "one NaN gradient": nan,
    "a weight not contiguous": noncontiguous,
}


def judge(side: Side, fault: Callable[[Side], Verdict]) -> dict[str, Any]:
    try:
        ok, what = fault(side)
    except Skip as reason:
        return {"ok": None, "what": f"not run: {reason}"}
    return {"ok": ok, "what": " ".join(what.replace(str(side.folder), "...").split())[:200]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has DeepSpeed")
    parser.add_argument("--dir", default=".", help="where the folders of the runs are made")
    parser.add_argument("--only", nargs="*", default=[], help="words of the faults to do")
    parser.add_argument("--json")
    parser.add_argument("--toy", action="store_true", help="two faults, without DeepSpeed")
    args = parser.parse_args()
    if args.toy:
        args.deepspeed, args.only = None, ["typo", "NaN"]
    chosen = {name: fault for name, fault in FAULTS.items() if not args.only or any(word in name for word in args.only)}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="zinf-faults-") as folder:
        pythons = {"zinf": sys.executable, **({"deepspeed": args.deepspeed} if args.deepspeed else {})}
        sides = []
        for name, python in pythons.items():
            (Path(folder) / name).mkdir()
            sides.append(Side(name, python, Path(folder) / name))
        for name, fault in chosen.items():
            print(name)
            results[name] = {}
            for side in sides:
                found = results[name][side.name] = judge(side, fault)
                print(f"  {side.name:<10} {({True: 'ok', False: 'FAULT', None: '-'})[found['ok']]:<6} {found['what']}", flush=True)
    result = {"bench": "faults", "faults": results}
    if args.json:
        Path(args.json).write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
