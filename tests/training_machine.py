"""Whole trainings at random: a drawn combination of options, then drawn actions, compared with the oracle bit for bit.

    python tests/training_machine.py MINUTES [--seed N]       seed after seed; 0 minutes: this one

Features that work by themselves are used together here, and interrupted: steps that overflow, evaluations between forward and backward, edits, frozen
parameters, blocks in another order, checkpoints, closing and opening, crashes, I/O errors and recover().

- `Recipe` (training_recipe.py): what a seed draws: the model and every option.
- `Pair` (training_pair.py): an engine and an oracle that do the same. A `Moment` is what both of them were, to go back to.
- `Machine`: a pair, the actions, and the moments that the engine may go back to. Each action is a method; `ACTIONS` says how often.

A failing seed is printed with its recipe and its actions; it fails again with `--seed`, except where threads race. What the engine went back to after a
crash or an error is its own choice among the steps that ended, so the oracle follows to the same step; an edit without a commit may be gone, hence `dirty`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import logging
import math
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from training_pair import Moment, Pair  # noqa: E402
from training_recipe import BLOCKS, Interrupted, Recipe, loss_of  # noqa: E402

from zinf.aio.faults import Rule  # noqa: E402
from zinf.checkpoint import saver  # noqa: E402
from zinf.engine import Engine  # noqa: E402
from zinf.errors import CommitError, ConfigError, EngineError  # noqa: E402

SECONDS = 60  # for one seed; a hang ends the command with the stacks of all threads
ACTIONS_EACH = 25  # of a seed
ACTIONS = dict(
    step=10, io_error=2, compare=2, overflow=1, evaluate=1, evaluate_between=1, edit=1, edit_undone=1, load_weights=1, half_a_step=1,
    save=1, save_fails=1, load=1, reopen=1, crash=1, commit=1, reorder=1, freeze=3,
)  # fmt: skip


class Machine:
    """A pair, and the moments that the engine may go back to. `log`: what was done, for the message of a failure."""

    def __init__(self, seed: int, folder: Path, device: str) -> None:
        self.draw = random.Random(seed)
        self.recipe = Recipe.of(self.draw, device)
        self.log: list[str] = []
        self.saved: dict[str, Moment] = {}
        self.dirty = False  # an edit was not committed
        self.pair = Pair(self.recipe, folder)
        self.history = [self.pair.moment()]
        if self.recipe.nvme:
            self.engine.commit()

    @property
    def engine(self) -> Engine:
        return self.pair.engine

    def run(self) -> None:
        for _ in range(ACTIONS_EACH):
            action = self.draw.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            self.log.append(action)
            getattr(self, action)()
        self.log.append("compare at the end")
        self.compare()
        self.engine.close()

    def note(self, what: object) -> None:
        self.log[-1] += f" ({what})"

    # -- steps

    def step(self, **how: Any) -> None:
        """A step of training, which both can be asked to go back to."""
        if not any(p.requires_grad for p in self.pair.oracle.params.values()):
            return self.note("all are frozen")
        try:
            self.pair.step(**how)
        except CommitError:
            self.mark()  # the step itself is done
            raise
        self.mark()

    def overflow(self) -> None:
        """A step whose gradients are NaN: skipped."""
        if self.recipe.undoes:
            self.step(last_factor=math.nan)

    def evaluate_between(self) -> None:
        """A step with an evaluation between each forward and its backward."""
        self.step(between=self.pair.evaluate)

    def half_a_step(self) -> None:
        """Forward or backward raises, or its loss or gradients are dropped: as if it had not been."""
        if not self.recipe.undoes:
            return
        kind = self.draw.choice(["forward", "backward", "loss dropped", "grads dropped"])
        self.note(kind)
        ids, labels = self.pair.batch()
        self.pair.data_at -= 1
        self.engine.module.train(not self.recipe.batch_norm)  # running means would be another
        block = self.engine.module.blocks[self.draw.randrange(BLOCKS)]
        block.raises = kind
        try:
            loss = loss_of(self.engine, ids, labels)
            if kind != "loss dropped":
                self.engine.backward(loss)
        except Interrupted:
            pass
        finally:
            block.raises = ""
        self.engine.zero_grad()
        self.engine.module.train()

    # -- looks

    def evaluate(self) -> None:
        """An evaluation."""
        self.pair.evaluate()

    def compare(self) -> None:
        """All that is kept, bit for bit."""
        self.pair.compare()

    # -- changes from outside

    def edit(self) -> None:
        """Weights written in gather(write=True), then mostly committed; refused where they are frozen."""
        name = self.name()
        value = self.pair.oracle.params[name].detach().clone()
        count = max(1, value.numel() // 3)
        _change(value, count)
        try:
            with self.engine.gather(name, write=True):
                _change(self.engine.module.get_parameter(name), count)
        except EngineError as e:
            if "frozen" not in str(e):
                raise
            return self.note("refused")
        self.pair.set_weights(name, value)
        self.dirty = True
        if self.draw.random() < 0.7:
            self.commit()

    def edit_undone(self) -> None:
        """An edit whose block raises changes nothing."""
        name = self.name()
        with contextlib.suppress(Interrupted), self.engine.gather(name, write=True):
            _change(self.engine.module.get_parameter(name), 5)
            raise Interrupted

    def load_weights(self) -> None:
        """load_state_dict of two parameters: their own values, or others."""
        names, others = self.draw.sample(list(self.pair.oracle.params), 2), self.draw.random() < 0.5
        self.note(names)
        values = {name: self.pair.oracle.params[name].detach().clone() for name in names}
        if others:
            values = {name: value + 0.125 for name, value in values.items()}
        self.engine.load_state_dict(values, strict=False)
        if others:
            for name, value in values.items():
                self.pair.set_weights(name, value)
            self.commit()

    def freeze(self) -> None:
        """A parameter is frozen or trained from now on."""
        if self.recipe.freezes:
            name, trained = self.name(), self.draw.random() < 0.5
            for model in self.pair.models:
                model.get_parameter(name).requires_grad_(trained)
            self.note(trained)

    def reorder(self) -> None:
        """The blocks are called in another order, some twice or never."""
        order = self.draw.choice([[0, 1, 2], [0, 1], [2, 1, 0], [1, 1, 0], [0]])
        self.note(order)
        for model in self.pair.models:
            model.order = list(order)

    # -- what lasts

    def commit(self) -> None:
        """A commit."""
        self.engine.commit()
        self.engine.synchronize()
        self.mark()
        self.dirty = False

    def save(self) -> None:
        """A checkpoint, waited for or not."""
        tag = f"tag{len(self.saved)}"
        self.mark()
        self.engine.save_checkpoint(self.pair.folder / "checkpoints", tag, extra={"data_at": self.pair.data_at}, wait=self.draw.random() < 0.5)
        self.saved[tag] = self.pair.moment()
        self.dirty = False

    def save_fails(self) -> None:
        """A save beside training finds a full disk, or one that fails: it says so once, training goes on, and a checkpoint that had the tag still has it."""
        if not self.recipe.nvme:
            return
        self.engine.saver.finish()
        tag = self.draw.choice([*self.saved, f"tag{len(self.saved)}"])
        kind, what = self.draw.choice([("w", "weights"), ("w", "state"), ("d", "")])
        rule = Rule(kind, what, nth=self.draw.randrange(1, 5), error=self.draw.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT]))
        self.mark()
        real = saver.open_engine

        def failing(*args: Any, **options: Any) -> Any:
            io = real(*args, **options)
            io.arm([rule])
            return io

        saver.open_engine = failing
        try:
            saved = self.engine.save_checkpoint(self.pair.folder / "checkpoints", tag, extra={"data_at": self.pair.data_at}, wait=False)
        finally:
            saver.open_engine = real
        moment, self.dirty = self.pair.moment(), False
        if self.draw.random() < 0.5:
            self.step()
        try:
            saved.wait()
        except OSError as e:
            assert e.errno == rule.error, e
            return self.note(f"{tag}: {e.strerror}")
        self.saved[tag] = moment  # there were not so many writes

    def load(self) -> None:
        """One of the checkpoints."""
        if self.saved:
            tag = self.draw.choice(list(self.saved))
            self.note(tag)
            extra = self.engine.load_checkpoint(self.pair.folder / "checkpoints", tag)
            assert extra["data_at"] == self.saved[tag].data_at, "another extra than was saved"
            self.follow(self.saved[tag])

    def reopen(self) -> None:
        """Closed, and opened with resume."""
        if self.recipe.nvme:
            moment = self.pair.moment()
            self.engine.close()
            self.pair.open(resume=True)
            self.follow(moment)

    def crash(self) -> None:
        """Ended by an exception, and opened with resume: at a step that had ended."""
        if self.recipe.crash_safe and not self.dirty:
            self.engine.saver.finish()
            self.engine.__exit__(Interrupted, Interrupted(), None)
            self.pair.open(resume=True)
            self.follow(self.found())

    def io_error(self) -> None:
        """The n-th read, write or sync from now fails, within two steps; recover() is then at a step that had ended."""
        if not self.recipe.crash_safe or self.dirty:
            return
        away = [(kind, what) for what in ("grads", "activations") if self.recipe.options.get(what) == "nvme" for kind in "rw"]
        kind, what = self.draw.choice([("r", "weights"), ("r", "state"), ("w", "weights"), ("w", "state"), ("d", ""), *away])
        nth = self.draw.randrange(1, 9) if what else self.draw.randrange(1, 4)
        self.note(f"{kind} {what} {nth}")
        self.engine.saver.finish()  # else the error may be the checkpoint's
        io = self.engine.memory.io
        io.arm([Rule(kind, what, nth=nth, error=errno.EIO)])
        try:
            self.step()
            self.step()
            self.engine.synchronize()
            io.disarm()
            self.engine.state_dict()  # finds what nobody had waited for
        except OSError as e:
            io.disarm()
            at = self.engine.recover()
            self.note(f"{type(e).__name__}, back at {at}")
            assert at == self.engine.global_step, f"recover() returned {at}, and is at {self.engine.global_step}"
            self.follow(self.found())

    # -- moments

    def name(self) -> str:
        """Of a parameter."""
        name = self.draw.choice(list(self.pair.oracle.params))
        self.note(name)
        return name

    def mark(self) -> None:
        """The engine may go back to here."""
        self.history.append(self.pair.moment())

    def found(self) -> Moment:
        """The moment that the engine says it is at: the last one with its step and its place in the data."""
        at, data_at = self.engine.global_step, self.engine.extra.get("data_at")
        moments = [m for m in self.history if m.global_step == at and data_at in (None, m.data_at)]
        assert moments, f"the engine is at step {at}, data {data_at}, where it never was"
        return moments[-1]

    def follow(self, moment: Moment) -> None:
        """The oracle goes where the engine is, and neither goes back beyond it."""
        self.pair.go_back(moment)
        self.history, self.dirty = [moment], False
        self.note(f"at step {moment.global_step}")


def _change(weight: torch.Tensor, count: int) -> None:
    with torch.no_grad():
        weight.view(-1)[:count].mul_(0.5).add_(0.25)


# ---- seed after seed


def run_seed(seed: int, folder: Path, device: str | None = None) -> None:
    """Raises what went wrong, after printing the recipe and the actions; ConfigError if the engine refuses the combination."""
    machine = Machine(seed, folder, device or ("sim" if seed % 2 else "cpu"))
    try:
        machine.run()
    except BaseException as e:
        print(f"seed {seed}: {machine.recipe}", *(f"  {action}" for action in machine.log), sep="\n", file=sys.stderr)
        try:
            machine.engine.__exit__(type(e), e, None)  # ends its threads
        except Exception as other:
            print(f"closing: {other}", file=sys.stderr)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first one")
    args = parser.parse_args()
    os.environ["ZINF_IO_BACKEND"] = "faults:threads"
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    end, seed, refused, failed = time.monotonic() + 60 * args.minutes, args.seed, 0, []
    while seed == args.seed or time.monotonic() < end:
        print(f"seed {seed}", end=" ", flush=True)  # before it runs: it may hang
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            with tempfile.TemporaryDirectory(prefix="combine-", dir=".") as folder:
                run_seed(seed, Path(folder))
            print("passes", flush=True)
        except ConfigError as e:
            refused += 1
            print(f"refused: {e}", flush=True)
        except Exception:
            failed.append(seed)
            print(f"FAILS\n{traceback.format_exc()}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        seed += 1
    print(f"combine: {seed - args.seed} seeds from {args.seed}, {refused} refused, {len(failed)} failed {failed or ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
