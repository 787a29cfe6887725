"""The crash storm: a real small training is killed with SIGKILL at random instants of every phase, again and again.

    python tests/crash/storm.py --kills 300 [--seed 0] [--mode deferred|backward|sim] [--power-loss 0.5] [--folder DIR]

A run is a child that is forked from here, where everything is imported already and no thread runs. Each time a phase is chosen, the
run goes on until it comes to that phase, and is killed after a random part of the time that the phase is known to take. After some kills
the disk is set to what a power loss at that instant might have left as well (disk.py). Then the next run opens the store, and what
it finds must be the last step that was promised, or the one that was being committed, with its bits. A life that comes to its end
must end as one that was never killed; then it is cleaned away, under fire too, and the next begins.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import hashlib
import importlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

from fake_io import FakeIo  # noqa: E402

from crash import worker  # noqa: E402
from crash.disk import Disk, Journal  # noqa: E402
from zinf.tiers.nvme import Store  # noqa: E402

PHASES = ("import", "resume", "forward", "backward", "step", "commit", "manifest", "save", "checkpoint", "export", "clean")
IN_STEPS = ("forward", "backward", "step", "commit", "manifest")
LATE = ("save", "checkpoint", "export")
OUT = ("out", "exported")
PATIENCE = 120.0  # seconds after which a run that tells nothing hangs


class Failure(Exception):
    """A promise was broken. The folder is left as it is."""


@dataclasses.dataclass
class Told:
    """What one run has said."""

    lines: list[str] = dataclasses.field(default_factory=list)
    phase: str = "start"
    open: list[str] = dataclasses.field(default_factory=list)  # commit, manifest, while they run
    began: dict[str, float] = dataclasses.field(default_factory=dict)
    rest: bytes = b""

    def take(self, data: bytes, durations: dict[str, float]) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        now = time.monotonic()
        for line in map(bytes.decode, lines):
            self.lines.append(line)
            if line.startswith("phase "):
                self._over(self.phase, now, durations)
                self.phase = line.removeprefix("phase ")
                self.began[self.phase] = now
            elif line[0] == "+":
                self.open.append(line[1:])
                self.began[line[1:]] = now
            elif line[0] == "-":
                self.open.remove(line[1:])
                self._over(line[1:], now, durations)

    def _over(self, phase: str, now: float, durations: dict[str, float]) -> None:
        if phase in self.began:
            took = now - self.began.pop(phase)
            durations[phase] = took if phase not in durations else 0.7 * durations[phase] + 0.3 * took

    def values(self, kind: str) -> list[list[str]]:
        return [line.split()[1:] for line in self.lines if line.startswith(kind + " ")]

    @property
    def where(self) -> str:
        """The phase in which the run is, or died."""
        phase = self.open[-1] if self.open else self.phase
        return "commit" if phase == "commit all" else phase


def digest_of_file(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def weights_in(folder: str) -> list[str]:
    """The files that a reader of models looks at."""
    return [name for name in os.listdir(folder) if name.startswith("model")] if os.path.isdir(folder) else []


class Storm:
    def __init__(self, folder: str, seed: int, mode: str, power_loss: float):
        self.rng, self.mode, self.power_loss = random.Random(seed), mode, power_loss
        self.folder, self.source, self.journal = os.path.join(folder, "drive"), os.path.join(folder, "source"), os.path.join(folder, "journal")
        self.modules = os.path.join(folder, "modules.txt")
        self.errors = os.path.join(folder, "errors.txt")
        self.durations: dict[str, float] = {}
        self.kills: collections.Counter[str] = collections.Counter()
        self.losses: collections.Counter[str] = collections.Counter()
        self.rolled = self.lives = 0
        self.steps: dict[int, str] = {}  # step -> digest, of the run that was never killed
        self.saved: dict[str, dict[str, str]] = {}  # folder -> file of its weights -> digest
        self.end = self.out = self.exported = ""
        os.makedirs(self.folder)

    # -- runs ---------------------------------------------------------------------------------------------------------------

    def run(self, what: str, target: str | None = None, skip: int = 0) -> tuple[Told, bool]:
        """Fork a run; kill it in phase `target` after it has come there `skip` times before. What it told, and whether it was killed."""
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            self._child(what, ours, theirs)
        os.close(theirs)
        told, killed = Told(), False
        try:
            while data := self._read(ours, pid):
                seen = sum(line in (f"phase {target}", f"+{target}") for line in told.lines)
                told.take(data, self.durations)
                now = sum(line in (f"phase {target}", f"+{target}") for line in told.lines)
                if target is not None and not killed and seen <= skip < now:
                    time.sleep(self.rng.random() * min(self.durations.get(target, 0.02), 1.0))
                    os.kill(pid, signal.SIGKILL)
                    killed = True
        finally:
            os.close(ours)
            _, status = os.waitpid(pid, 0)
        if killed and os.WIFSIGNALED(status):
            return told, True
        if status:
            with open(self.errors) as f:
                raise Failure(f"a run ended with status {status} in {told.where}:\n{f.read()}")
        return told, False

    def _read(self, fd: int, pid: int) -> bytes:
        if not select.select([fd], [], [], PATIENCE)[0]:
            os.kill(pid, signal.SIGKILL)
            raise Failure(f"a run has told nothing for {PATIENCE} seconds: it hangs")
        return os.read(fd, 1 << 16)

    def _child(self, what: str, ours: int, theirs: int) -> None:
        """Never returns."""
        code = 1
        try:
            os.close(ours)
            err = os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(err, 2)
            tell = lambda line: os.write(theirs, line.encode() + b"\n")  # noqa: E731
            if what == "source":
                worker.make_source(self.source)
            elif what == "clean":
                worker.clean(self.folder, tell)
            else:
                worker.life(self.folder, self.source, self.journal if what == "recorded" else None, self.mode, tell)
            if what == "life":
                with open(self.modules, "w") as f:
                    f.write("\n".join(sys.modules))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    # -- what must be true --------------------------------------------------------------------------------------------------

    def straight(self) -> None:
        """The run that is never killed says what is right."""
        self.run("source")
        told, _ = self.run("life")
        with open(self.modules) as f:
            for name in f.read().splitlines():
                with contextlib.suppress(Exception):
                    importlib.import_module(name)  # once, here, and not in every run
        gc.freeze()
        self.steps = {int(step): found for step, found in [*told.values("opened"), *told.values("done")]}
        ((self.end,),) = told.values("end")
        self.out, self.exported = (worker.digest_of_files(os.path.join(self.folder, name)) for name in ("out", "exported"))
        self.saved = {name: {f: digest_of_file(os.path.join(self.folder, name, f)) for f in weights_in(os.path.join(self.folder, name))} for name in OUT}
        assert len(self.saved["exported"]) > 2
        assert sorted(self.steps) == list(range(worker.STEPS + 1))
        self.run("clean")
        self._check_clean()

    def _check_run(self, told: Told, least: int) -> int:
        """What a run found and did is right; returns the last step that is promised from now on."""
        for (step, found), kind in [(v, "opened") for v in told.values("opened")] + [(v, "done") for v in told.values("done")]:
            if self.steps[int(step)] != found:
                raise Failure(f"step {step} ({kind}) has other bits")
            if kind == "opened" and not least <= int(step) <= max(least + 1, 0):
                raise Failure(f"step {least} was promised, and step {step} was found")
        done = [int(step) for step, _ in [*told.values("opened"), *told.values("done")]]
        return max([least, *done])

    def _check_saved(self) -> None:
        """Whatever was killed: a folder that looks like a checkpoint is one, whole."""
        for name, right in self.saved.items():
            there = weights_in(os.path.join(self.folder, name))
            if "model.safetensors" in there or "model.safetensors.index.json" in there:
                for file, digest in right.items():
                    if file not in there or digest_of_file(os.path.join(self.folder, name, file)) != digest:
                        raise Failure(f"{name} looks like a model, and {file} is not whole")
        checkpoint = os.path.join(self.folder, "checkpoints", "last")
        if os.path.exists(os.path.join(checkpoint, "manifest.json")):
            Store.open([checkpoint], FakeIo(), writable=False).close()  # compares every byte

    def _check_clean(self) -> None:
        if left := os.listdir(self.folder):
            raise Failure(f"clean left {left}")

    # -- power loss ---------------------------------------------------------------------------------------------------------

    def _lose_power(self, base: Disk | None) -> bool:
        """Set the store and what is exported to what the disk may hold if the power goes as well. False where nothing was recorded."""
        if base is None or not os.path.exists(self.journal):
            return False
        for event in Journal.read(self.journal):
            base.play(event)
        base.crash(self.rng)
        for name in ("manifest.json", "import.json"):
            file = os.path.join(self.folder, "run", name)
            if os.path.exists(file) and self.rng.random() < 0.3:  # and what is not named by anything may be anything
                with open(file, "rb") as f, open(f"{file}.tmp", "wb") as t:
                    data = f.read()
                    t.write(data[: self.rng.randrange(len(data))])
        return True

    # -- lives --------------------------------------------------------------------------------------------------------------

    def one_life(self, kills: int) -> None:
        """Import to clean, killed at most so often."""
        least, left = -1, kills - 2  # two are for the clean
        while True:
            store = os.path.exists(os.path.join(self.folder, "run", "manifest.json"))
            target, skip = self._target(store, least) if left > 0 else (None, 0)
            recorded = target is not None and self.rng.random() < self.power_loss
            if os.path.exists(self.journal):
                os.unlink(self.journal)
            base = Disk([os.path.join(self.folder, name) for name in ("run", "exported")]) if recorded else None
            told, killed = self.run("recorded" if recorded else "life", target, skip)
            least = self._check_run(told, least)
            if killed:
                left -= 1
                self.kills[told.where if told.where in PHASES else "resume"] += 1
                if self._lose_power(base):
                    self.losses[told.where if told.where in PHASES else "resume"] += 1
                self._check_saved()
                continue
            self._check_end(told)
            break
        for _ in range(2):
            _, killed = self.run("clean", "clean")
            self.kills["clean"] += killed
        self.run("clean")
        self._check_clean()
        self.lives += 1

    def _target(self, store: bool, least: int) -> tuple[str, int]:
        """The phase to kill in, and how many times it may come before: of those that can come, one of the two that were killed in least."""
        if not store:
            return "import" if self.kills["import"] < 3 * (self.lives + 1) else "resume", 0
        to_come = worker.STEPS - least
        phases = ["resume"]
        phases += IN_STEPS if to_come > 0 else ()
        phases += LATE if to_come == 0 or self.rng.random() < 0.1 else ()
        self.rng.shuffle(phases)
        target = self.rng.choice(sorted(phases, key=lambda phase: self.kills[phase])[:2])
        return target, self.rng.randrange(min(2, to_come)) if target in IN_STEPS else 0

    def _check_end(self, told: Told) -> None:
        if told.values("end") != [[self.end]]:
            raise Failure(f"the end is {told.values('end')}, and {self.end} where nothing was killed")
        for name, right in (("out", self.out), ("exported", self.exported)):
            if (found := worker.digest_of_files(os.path.join(self.folder, name))) != right:
                raise Failure(f"{name} has the digest {found}, and {right} where nothing was killed: {sorted(os.listdir(os.path.join(self.folder, name)))}")

    def rage(self, kills: int) -> None:
        self.straight()
        while (left := kills - self.kills.total()) > 0:
            self.one_life(min(left, self.rng.randrange(12, 25)))

    def table(self) -> str:
        rows = ["| phase | kills | of these with power loss |", "|---|---|---|"]
        rows += [f"| {phase} | {self.kills[phase]} | {self.losses[phase]} |" for phase in PHASES]
        return "\n".join([*rows, f"| all | {self.kills.total()} | {self.losses.total()} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description="kill a small training, again and again")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=list(worker.MODES), help="default: each in turn")
    parser.add_argument("--power-loss", type=float, default=0.5, help="of the kills, the part after which the disk loses what was not synced")
    parser.add_argument("--folder", help="to work in; default: a temporary one in the current directory")
    args = parser.parse_args()
    modes = [args.mode] if args.mode else list(worker.MODES)
    started, total = time.monotonic(), 0
    for i, mode in enumerate(modes):
        folder = tempfile.mkdtemp(prefix="zinf-crash-", dir=args.folder or os.getcwd())
        storm = Storm(folder, args.seed + i, mode, args.power_loss)
        try:
            storm.rage(args.kills // len(modes) + (i < args.kills % len(modes)))
        except Failure as e:
            print(f"FAILED in mode {mode}, seed {args.seed + i}, after {storm.kills.total()} kills; left in {folder}: {e}", flush=True)
            return 1
        total += storm.kills.total()
        print(f"\n{mode}: {storm.lives} lives\n\n{storm.table()}", flush=True)
        shutil.rmtree(folder)
    print(f"\n{total} kills in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
