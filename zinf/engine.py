"""The engine: what a training loop calls. No arithmetic and no I/O happens here.

One step, as the user sees it:  loss = engine(**batch).loss;  engine.backward(loss);  engine.step()

    forward    each shard is fetched before its module runs, the next ones meanwhile; a step that is pending for a shard is
               applied by its fetch
    backward   in reverse, from recomputed blocks; each shard's grads are offloaded when its last call is over
    step       the norm of all grads fixes one coefficient and a step is left pending on every shard (or was made under
               backward, see stepping.py)
    commit     once every shard of a step has been stepped and flushed, the store's manifest names the new versions

[Note: what a reader waits for] A pending step is invisible: whoever reads weights (forward, save, commit, close) first has it
applied. So the numbers are those of a step that blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zinf import fused, guards, kvcache, memory, merging, moving, oom, precision, reading, recovery, saves, scaling
from zinf.algorithms import moments
from zinf.checkpoint.saver import Saved, Saver
from zinf.commit import Committer
from zinf.compiling import check_backend, compile_forward
from zinf.conductor import Conductor
from zinf.config import Config, check_keys
from zinf.discover import check_model, discover, layout_of, may_train
from zinf.errors import CommitError, EngineError
from zinf.health import Health
from zinf.optimizer import Optimizer, make_groups
from zinf.planner.achieved import Achieved
from zinf.progress import Progress
from zinf.recompute import TakeOver, recomputed
from zinf.report import plan_lines, report, stats
from zinf.shard import Shard
from zinf.stepping import Stepper, StepStats
from zinf.stored import basis_of
from zinf.streaming import stream

log = logging.getLogger("zinf")


class Engine:
    """Trains `model` with its weights, grads and optimizer state in tiers, with the numbers of training in memory.

    Args:
        model: any nn.Module, materialised, or from zinf.from_pretrained (then its weights are in a store already).
        config: a Config; keyword options override its fields.
        param_groups: as for torch.optim, covering all trainable parameters; None puts them in one group. []: for inference, of a model
            whose parameters are all frozen; nothing is committed.
        resume: for a materialised model: go on from the last commit of the store that stands at nvme_path/run_name, and
            ignore the model's own values.

    Raises:
        ConfigError, BudgetError, StoreError: before any work.
    """

    def __init__(
        self, model: nn.Module, config: Config | None = None, *, param_groups: Sequence[dict[str, Any]] | None = None, resume: bool = False, **options: Any
    ):
        check_keys(Config, options, "zinf.Engine")
        check_model(model, streamed=getattr(model, "zinf_origin", None) is not None)
        self.config = config = dataclasses.replace(config or Config(), **options)
        owner = getattr(model, "zinf_engine", None)
        if owner is not None and owner() is not None:
            raise EngineError(f"this {type(model).__name__} already has an engine: close it first")
        self.module = model
        check_backend(config.compile_blocks)
        self.origin = getattr(model, "zinf_origin", None)
        precision.keep_in_fp32(model, config.keep_in_fp32 or (), stored=self.origin is not None)
        trained = may_train(model, config.trainable)
        groups = make_groups(model, param_groups, config, trained)
        basis = basis_of(model, self.origin.paths) if self.origin is not None else None  # if it is no longer what was imported
        stored = self.origin if basis is None else None
        stateful = memory.stateful(model, trained, memory.store_paths(config, basis), stored, resume)
        self.units = discover(model, config.blocks, config.leaf_bytes, stateful)
        chunk = config.chunk_size if self.origin is None else self.origin.chunk_size
        self.layout = layout_of(self.units, chunk, stateful, moments=moments(config, groups or ({},)))
        scaled = scaling.scales(config, self.layout)
        self.step_mode = memory.choose_step_mode(config, self.origin is not None or bool(config.nvme_path), scaled)
        self._scaler = scaling.LossScaler(config, scaled)
        with contextlib.ExitStack() as stack:
            self.memory = memory.build(self.layout, self.units, model, config, self.step_mode, stack, stored, resume, basis)
            parts = self.memory.parts
            self.saver = Saver(parts.records, parts.state_slots, config)
            stack.callback(self.saver.stop)  # before the tiers that it reads
            self._shutdown = weakref.finalize(self, _close, stack.pop_all(), os.getpid())
        self.shards, self.trace = self.memory.shards, self.memory.parts.trace
        self._undo: list[Callable[[], None]] = []
        try:
            self._start(groups)
        except BaseException:
            self._release()
            raise

    def _start(self, groups: list[dict[str, Any]]) -> None:
        """Everything above the memory."""
        model, config = self.module, self.config
        self.optimizer = Optimizer(self, groups)
        self.committer = Committer(self.memory.parts, self.shards)
        self.conductor = Conductor(self.memory, self.committer, memory.guess_order(model, self.units), config.micro_batch_size)
        self.stepper = Stepper(self.memory, self.optimizer, self.committer, config, self.step_mode, self._scaler, _weak(self.conductor.fetch))
        self.health = Health(self.stepper, self._shutdown)
        self.conductor.stepper, self.conductor.health = self.stepper, self.health
        self.progress = Progress(model, self.committer, config.optimizer)
        self.progress.stepper, self.progress.optimizer = self.stepper, self.optimizer
        self.achieved = Achieved()
        self._take_over = TakeOver(model, self.units)
        if self.memory.restored is not None:
            self.progress.restore(self.memory.restored)
        self._hook()
        model.zinf_engine = weakref.ref(self)  # type: ignore[assignment]

    def _hook(self) -> None:
        """Let the model compute from the shards."""
        conductor, stepper = weakref.proxy(self.conductor), weakref.proxy(self.stepper)
        again = recomputed(self.units, self.config.recompute, self.config.keep_last)
        self._undo.append(self._take_over.undo)
        self._undo.append(moving.buffers_to(self.module, self.memory.parts.device.torch_device))
        self._undo += kvcache.turn_off(self.module, [m for unit in self.units if unit.block for m in unit.modules])
        self.fused_head = fused.find(self.module, self.config.fused_head, self.memory.parts.device.name, lambda: stepper.global_step)
        if self.fused_head is not None:
            self._undo.append(self.fused_head.install_below())
        for shard, unit in zip(self.shards, self.units, strict=True):
            for i, (*_, p) in enumerate(shard.params):
                if self.optimizer.steps(p):
                    with _wanting_grad(p):
                        self._undo.append(p.register_post_accumulate_grad_hook(_taker(weakref.ref(self.stepper), shard, i)).remove)
            for module in unit.modules:
                compiled = [compile_forward(module, self.config.compile_blocks)] if unit.block and self.config.compile_blocks else []
                self._undo.append(stream(module, shard, conductor, unit.block, again[shard.index]))
                self._undo += compiled  # undone after what stands upon it
            if shard is self.memory.root:
                shard.fetch(self.conductor.train)
                shard.wait_fetched()
                shard.bind()
            else:
                shard.make_placeholders()
        if self.fused_head is not None:
            self._undo.insert(0, self.fused_head.install_above())  # what was put on top comes off first
        pre = self.module.register_forward_pre_hook(_weak(self._begin_forward), with_kwargs=True, prepend=True)  # sees what the caller asked for
        post = self.module.register_forward_hook(_weak(self._end_forward), always_call=True)
        self._undo += [pre.remove, post.remove, *guards.install(self.module, _weak(self.load_state_dict))]

    # -- what a training loop calls -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Tensors of host memory go to the device.

        Raises:
            BudgetError: activations do not fit on the device; says what to lower. The engine is as it was.
        """
        self.health.check_usable()
        with oom.explained("forward", self.memory.plan, self.config):
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """scale(loss).backward(). Divide the loss yourself when several backwards make a step.

        Raises:
            BudgetError: it does not fit on the device; says what to lower. Call zero_grad(), then repeat the backwards of this step.
        """
        scaled = self.scale(loss)
        self.trace.computing("backward", -1)
        with oom.explained("backward", self.memory.plan, self.config):
            scaled.backward()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a backward of your own; the loss itself where weights are not fp16."""
        self.health.check_usable()
        return self._scaler.apply(loss)

    def step(self, extra: dict[str, Any] | None = None) -> StepStats:
        """Fix this step: norm, clipping, learning rates. Its arithmetic is done where nobody waits for it.

        Args:
            extra: plain JSON values to be committed with this step (a data position, say); they come back as `engine.extra`.

        Raises:
            EngineError: no backward since the last step.
            NonFiniteError: more than `max_skipped_steps` steps in a row had gradients that are not finite.
            CommitError: this step is made, and an earlier one could not be committed, nor will this be before there is room.
        """
        self._prepare_step()
        with self.health.noting(Exception, KeyboardInterrupt):
            done = self.stepper.step()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
            if extra is not None:
                self.extra = extra
            every = self._commit_every
            if not done.skipped and ((every and done.step % every == 0) or self.committer.failed):
                self.progress.step_done(done.step)
            for shard in self.shards:  # the root's is needed at once; where shards are stepped under backward, none may wait, as the next one would overtake it
                if shard.pending is not None and (shard is self.memory.root or self.step_mode == "backward"):
                    self.conductor.fetch(shard)
            self.conductor.next_step()
            self.committer.make_if_applied()
            self.memory.grow()
            if self.memory.root is not None:
                self.memory.root.wait_fetched()  # it is bound: whoever reads an adapter between two steps must not see half of one
        self.trace.idle()
        self.trace.stepped(done.step)
        self.achieved.stepped(self)
        self.committer.check()
        return done

    def _prepare_step(self) -> None:
        self.health.check_usable(idle=True)
        self.trace.computing("fix the step", -1)
        self.conductor.learn()
        with self.health.noting():
            self.progress.ask_late()
            self.stepper.prepare()

    def grad_norm(self) -> float:
        """The global L2 norm of the unscaled grads that the coming `step` will use, before clipping; nan or inf where one is not finite.

        Raises:
            EngineError: no backward since the last step.
        """
        self._prepare_step()
        return self.stepper.norm()

    def zero_grad(self) -> None:
        """Drop the grads summed since the last step."""
        self.health.check_usable(idle=True)
        with self.health.noting():
            self.stepper.zero_grad()

    def commit(self, extra: dict[str, Any] | None = None) -> None:
        """Commit the state after the last step as soon as it is on NVMe; does not wait for that. See `step` for `extra`."""
        self.health.check_whole()
        if extra is not None:
            self.extra = extra
        with self.health.noting():
            self.progress.ask()

    def synchronize(self) -> None:
        """Apply every pending step, make the commit that was asked for, and wait until it is made."""
        self.health.check_whole()
        with self.health.noting():
            self.progress.ask_late()
            self.stepper.apply_pending()
            if self.committer.failed and self.committer.asked is None:
                self.committer.ask(self.global_step, self.progress.snapshot())
            self.committer.make_if_applied()
            self.committer.wait()
            self.stepper.drain()

    def recover(self) -> int:
        """Go on in this process after an error of the disk whose cause is gone: space was freed, the drive is back. See zinf/recovery.py.

        Where nothing was lost it drops what was under way since the last step; else it goes back to the last commit, as resume=True would.
        `global_step`, learning rates, buffers, `extra` and the random number generators are then those of the step that is returned: go
        on with the batch after it.

        Raises:
            EngineError: there is no store, or the engine is in use.
            StoreError: the store cannot go back (crash_safe: false): close the engine.
            OSError: the cause is still there; it may be called again.
        """
        self.health.check_alive()
        return recovery.recover(self)

    def train(self, mode: bool = True) -> Engine:
        """model.train(mode)."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """model.eval()."""
        return self.train(False)

    def generate(self, inputs: torch.Tensor, **kwargs: Any) -> Any:
        """model.generate, in eval mode: weights are read once for a token of all rows, and the KV cache stays on the device. Returns what that returns.

        Raises:
            BudgetError: it does not fit on the device; give fewer rows, or fewer tokens.
        """
        self.health.check_usable()
        was = self.module.training
        self.module.eval()
        inputs, kwargs = moving.tensors_to((inputs, kwargs), self.memory.parts.device.torch_device)
        try:
            with oom.explained("forward", self.memory.plan, self.config), torch.no_grad():
                return self.module.generate(inputs, **kwargs)  # type: ignore[operator]
        finally:
            self.module.train(was)

    @property
    def global_step(self) -> int:
        """Steps made, those before a resume included; skipped ones are not."""
        return self.stepper.global_step

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing since a gradient was not finite."""
        return self.stepper.skipped_steps

    @property
    def extra(self) -> dict[str, Any]:
        """The plain values that the last commit, or the resumed one, was given."""
        return self.progress.extra

    @extra.setter
    def extra(self, values: dict[str, Any]) -> None:
        self.progress.extra = values

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 where weights are not fp16."""
        return self._scaler.scale

    # -- checkpoints --------------------------------------------------------------------------------------------------------

    def register(self, name: str, obj: Any, *, late: bool | None = None) -> Any:
        """Let the state of `obj` be a part of every commit and checkpoint: a data loader, a learning-rate scheduler, a scaler, an EMA.

        Where a run was resumed, `obj` is given the state of that commit now. Returns `obj`.

        Args:
            obj: has state_dict() and load_state_dict(), or get_state() and set_state(); numbers, text, lists, dicts, small tensors.
            late: is it moved after step()? Then a commit looks at it when the model is next used, and not within step(). Default:
                True for torch's learning-rate schedulers, else False.

        Raises:
            ConfigError: no such methods, a state that is more than that, or the name is taken.
        """
        self.progress.register(name, obj, late)
        return obj

    def save_checkpoint(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, extra: dict[str, Any] | None = None, keep_last: int | None = None, wait: bool = True
    ) -> Saved:
        """Save all that a resumed run needs as folder/tag: weights, moments, step, schedules, registered objects, random numbers, config.

        A pending step is applied, and committed, first. The checkpoint is whole or not there; `folder`/latest names the last one. One
        that had the tag before is replaced once this one is durable. On the same filesystem frozen weights are shared by a hard link,
        and everything is where the filesystem can share blocks.

        Args:
            tag: default: step-N.
            extra: as for `step`.
            keep_last: then remove all checkpoints of this model in `folder` but the last so many.
            wait: False returns once the space is allocated; the copy runs beside training. `.wait()` of what is returned waits for it.
                (Where nothing is on NVMe it is always waited for.)

        Raises:
            EngineError: grads are summed and not stepped.
            OSError: the disk is full (with the numbers; nothing is left), or failed. Training can go on.
            StoreError: something else is there under that name, or it is being read.
        """
        return saves.save(self, folder, tag, extra, keep_last, wait)

    def load_checkpoint(self, folder: str | os.PathLike[str], tag: str | None = None, *, weights_only: bool = False, rng: bool = True) -> dict[str, Any]:
        """Go on from a checkpoint, whatever placement, budgets, chunk size, paths or device it was made with; returns its `extra`.

        The store, if there is one, commits it; a crash before that leaves the step it had.

        Args:
            folder: what save_checkpoint was given, or the checkpoint itself.
            tag: default: the last one.
            weights_only: start anew from its weights: no moments, step 0; schedules, objects, random numbers stay.
            rng: set the random number generators of python, numpy and torch.

        Raises:
            CheckpointError: there is none, or it is of another model or optimizer.
            IntegrityError, OSError: it cannot be read; the engine is what it was (without a crash-safe store all is compared first).
        """
        return saves.load(self, folder, tag, weights_only, rng)

    # -- reading ------------------------------------------------------------------------------------------------------------

    def gather(self, params: str | nn.Parameter | Iterable[str | nn.Parameter], write: bool = False) -> contextlib.AbstractContextManager[None]:
        """Have the values of `params` (names or parameters) in memory within a with block. Their whole shards come.

        Args:
            write: take what the block makes of the values, in place, as the new weights once it ends; moments and step counts stay.
                An element that the block leaves as it is keeps all digits of its fp32 master; one that it changes gets exactly
                the new value. An exception in the block undoes it all. Blocks within one another end with the outermost. What it wrote is safe
                once a commit has it, the next step's or `commit`: until then resume=True, and a recover() that goes back, are before it.

        Raises:
            EngineError: between a backward that has stepped some shards and its step; values changed without `write`; frozen
                parameters to be written, whose only copy a commit needs.
        """
        return reading.gather(self, params, write)

    def state_dict(self, ema: bool = False) -> dict[str, torch.Tensor]:
        """All weights and buffers in memory, under the model's names. For models that fit; others use save_pretrained.

        With `ema` the averages of the weights instead, in fp32 as they are kept (see zinf/averages.py).
        """
        return reading.state_dict(self, ema)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
        """Take weights and buffers from `state`, under the model's names, one shard after the other; `model.load_state_dict` is the same.

        As under gather(write=True); what is given in fp32 goes into the fp32 master exactly.

        Returns:
            (missing_keys, unexpected_keys) as nn.Module.load_state_dict.

        Raises:
            RuntimeError: shapes that differ, and with `strict` names; nothing was loaded.
        """
        return reading.load_state_dict(self, state, strict)

    def save_pretrained(self, folder: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000, dtype: str | None = None, ema: bool = False) -> None:
        """Write a Hugging Face checkpoint of the weights as they are now, streamed: safetensors, config, tokenizer.

        Of a model with adapters (PEFT) only those, as its own save_pretrained does.

        Args:
            folder: made if missing; files of the same names are replaced.
            max_shard_size: bytes in one file.
            dtype: None for the weights' own; "fp32" for the full master.
            ema: write the averages of the weights instead; ConfigError if none are kept.
        """
        reading.save_pretrained(self, folder, max_shard_size, dtype, ema)

    def merge_and_save(self, folder: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000) -> None:
        """Write the base of a model with adapters (PEFT), the adapters merged into it, as a normal Hugging Face folder.

        One layer at a time is merged, on a copy, by the adapter itself; the engine's weights stay as they are.

        Raises:
            EngineError: the model has no adapters.
        """
        merging.merge_and_save(self, folder, max_shard_size)

    def plan(self) -> list[str]:
        """What goes where, in a few lines for people."""
        return plan_lines(self)

    def report(self) -> dict[str, Any]:
        """What is really in use: backend, device, step mode, bytes of each tier."""
        return report(self)

    def stats(self) -> dict[str, Any]:
        """Totals since the engine was built: seconds by verb, seconds waited, NVMe bytes, steps."""
        return stats(self)

    # -- end ----------------------------------------------------------------------------------------------------------------

    def close(self, *, commit: bool = True) -> None:
        """Apply and commit what is pending, then stop every thread and free every byte. Idempotent.

        Without a store the parameters get their values, which nothing else would keep; with one they stay placeholders.

        Args:
            commit: False gives up what was stepped since the last commit.

        Raises:
            CommitError: there is no room for the commit. The engine stays open, and nothing is lost: make room, and call it again. At the end of a
                `with` block, which must end, the engine is closed all the same, at the last commit.
            OSError: the drive failed, or a save that was under way. It is closed.
        """
        if not self._shutdown.alive:
            return
        try:
            if commit and self.health.error is None:
                self._close_well()
            self.saver.finish()
        except CommitError:
            raise
        except BaseException:
            self._release()
            raise
        self._release()

    def _close_well(self) -> None:
        if self.stepper.early:
            self.zero_grad()
        self.commit()
        self.synchronize()
        if self.memory.io is None:
            reading.hand_over(self)

    def _release(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        for shard in self.shards:
            if shard.bound:
                shard.forget_binds(0)
            shard.part()
        self._shutdown()
        self.module.zinf_engine = None  # type: ignore[assignment]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.close()
        finally:
            if self._shutdown.alive:
                self._release()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.health.check_whole()
        with self.health.noting():
            self.progress.ask_late()
        self._take_over.look()
        if torch.is_grad_enabled():
            kvcache.refuse(kwargs)
            if self.progress.marks.empty:
                self.progress.mark()
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.dim()]
        if torch.is_grad_enabled():
            self.achieved.forward(tensors)
        self.conductor.begin_forward(tensors[0].shape[0] if tensors else None)
        root = self.memory.root
        if root is not None:
            self.conductor.bring(root)
            root.check_bound()
        self.trace.computing("forward" if torch.is_grad_enabled() else "evaluate", -1)
        return moving.tensors_to((args, kwargs), self.memory.parts.device.torch_device)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.conductor.end_forward()

    def bring(self, shard: Shard) -> None:
        """Have the shard's newest weights where they can be read, outside of any pass."""
        self.health.check_whole()
        self.conductor.bring(shard)

    @property
    def _commit_every(self) -> int:
        return memory.commit_every(self.config, self.memory.plan, self.memory.root.index if self.memory.root is not None else None)

    def restore_rng(self) -> None:
        """Set the random number generators of python, numpy, torch and its devices to the resumed commit's. No-op if nothing was resumed.

        They are those of the end of step(). After something that draws from them between two steps and is not repeated by a resumed
        loop, such as sampling in an evaluation, call `commit`, which takes them anew.
        """
        self.progress.restore_rng()


def _close(stack: contextlib.ExitStack, pid: int) -> None:
    """Close what an engine stands on; in a fork, whose threads and locks are the parent's, leave it all as it is, for good."""
    if os.getpid() == pid:
        stack.close()
    else:
        _of_parents.append(stack)


_of_parents: list[contextlib.ExitStack] = []


def _weak(method: Any) -> Callable[..., Any]:
    """The bound method, without keeping its object alive; a call after the object's death does nothing."""
    ref = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = ref()
        return bound(*args, **kwargs) if bound is not None else None

    return call


@contextlib.contextmanager
def _wanting_grad(p: nn.Parameter) -> Iterator[None]:
    """Hooks for gradients are only taken by what wants one; a parameter that is frozen for now may later."""
    wants = p.requires_grad
    p.requires_grad_(True)
    try:
        yield
    finally:
        p.requires_grad_(wants)


def _taker(stepper: weakref.ref[Stepper], shard: Shard, i: int) -> Callable[[nn.Parameter], None]:
    index = shard.index

    def take(p: nn.Parameter) -> None:
        owner = stepper()
        if owner is not None:
            owner.take(owner.shards[index], i, p)

    return take
