"""DeepSpeedEngine: what a loop written for DeepSpeed calls, in terms of zinf.Engine, which is its attribute `zinf`.

What is DeepSpeed's and not zinf's:

    backward    divides the loss by the micro-batches of a step; loss.backward() does, too
    step        is called after each micro-batch, and steps after the last; then it moves the schedule, unless the step was skipped
    counters    global_steps counts skipped steps, too

Names that it has not itself are the module's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zinf.engine import Engine
from zinf.errors import EngineError
from zinf.integrations.deepspeed import saving
from zinf.integrations.deepspeed.profiling import StepProfile
from zinf.integrations.deepspeed.settings import Accessors, Settings

log = logging.getLogger("zinf")


class Counters:
    """What a checkpoint has beside zinf's own counters."""

    def __init__(self) -> None:
        self.micro_steps = 0  # calls of step()
        self.samples = 0
        self.client: dict[str, Any] = {}  # what the script gave to the save that is under way

    def state_dict(self) -> dict[str, Any]:
        return {"micro_steps": self.micro_steps, "samples": self.samples, "client": self.client}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.micro_steps, self.samples, self.client = state["micro_steps"], state["samples"], state["client"]


class DeepSpeedEngine(Accessors):
    """Made by `initialize`."""

    def __init__(self, engine: Engine, settings: Settings, scheduler: Any = None, training_data: Any = None, collate_fn: Any = None, steps: bool = True):
        self.zinf, self.settings = engine, settings
        self.module: nn.Module = engine.module
        self.lr_scheduler = scheduler
        self.collate_fn = collate_fn
        self.optimizer: Any = engine.optimizer if steps else None
        self._client_optimizer: Any = None  # the script's own, whose groups are the engine's
        self._counters = engine.register("deepspeed", Counters(), late=True)
        self._boundary: bool | None = None  # as the script says
        self._in_backward = self._in_step = self._inside_no_sync = False
        self._backwards = 0  # since the last step
        self._norm: float | None = None
        self._profile = StepProfile(settings.profiler)
        self._applied = False
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None
        if scheduler is not None and hasattr(scheduler, "state_dict"):
            engine.register("lr_scheduler", scheduler, late=True)

    # -- a step -------------------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if torch.is_grad_enabled():
            self._profile.begin(self.module, self.global_steps)
        out = self.zinf(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.settings.accumulation > 1:
            self._divide_later(out)
        return out

    forward = __call__

    def _divide_later(self, out: Any) -> None:
        """Where the script calls loss.backward() itself the gradient is divided where it enters: at the loss, or at all outputs if none is one."""
        tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not tensors and hasattr(out, "values"):  # of transformers, where it is no node of pytree
            tensors = [t for t in out.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        losses = [t for t in tensors if t.dim() == 0]
        for t in losses or tensors:
            t.register_hook(lambda grad: grad if self._in_backward else grad / self.settings.accumulation)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """loss.backward(), divided by the micro-batches of a step, and scaled where weights are fp16; returns the divided loss."""
        self._check_steps("backward")
        if loss.dim() != 0:
            raise EngineError(f"backward needs a loss of one element, and this has the shape {tuple(loss.shape)}: reduce it, or call backward on the output")
        loss = loss / self.settings.accumulation if scale_wrt_gas else loss
        self._in_backward = True
        try:
            self.zinf.scale(loss).backward(retain_graph=retain_graph)
        finally:
            self._in_backward = False
            self._profile.end()
        self._backwards += 1
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a backward of the script's own."""
        self._check_steps("scale")
        return self.zinf.scale(loss)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Does the next step() change the weights?"""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed:
            return self._in_step
        return (self.micro_steps + 1) % self.settings.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say yourself which step() changes the weights."""
        if not self.settings.managed:
            raise EngineError("managed_gradient_accumulation is false: each step() is a boundary, and there is nothing to set")
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary make the step and move the schedule; elsewhere count a micro-batch."""
        self._check_steps("step")
        if self._inside_no_sync:
            raise EngineError("step() within no_sync(): end the block first")
        self._profile.end()
        self._in_step, self._applied = True, False
        try:
            if self.is_gradient_accumulation_boundary():
                self._step(lr_kwargs or {})
        finally:
            self._in_step = False
        self._counters.micro_steps += 1

    def _step(self, lr_kwargs: dict[str, Any]) -> None:
        done = self.zinf.step()
        self._applied, self._norm = not done.skipped, done.grad_norm
        self.optimizer.overflow = done.skipped
        if self._client_optimizer is not None:
            self._client_optimizer._opt_called = True  # what torch's schedules look for
        if self.lr_scheduler is not None and not done.skipped:
            self.lr_scheduler.step(**lr_kwargs)
        micro = self._backwards if not self.settings.managed else self.settings.accumulation
        self._counters.samples += micro * self.settings.micro_batch
        self._backwards = 0
        every = self.settings.steps_per_print
        if every and self.global_steps % every == 0:
            log.info("step=%d, skipped=%d, lr=%s, mom=%s", self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom())

    def _check_steps(self, what: str) -> None:
        if self.optimizer is None:
            raise EngineError(f"{what}() without an optimizer: name one in the config, or pass one to initialize")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what was summed since the last step."""
        self.zinf.zero_grad()

    def was_step_applied(self) -> bool:
        """Did the last step() change the weights?"""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Of the last step's gradients, before clipping; None before the first."""
        return self._norm

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.zinf.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        name = "momentum" if self.zinf.config.optimizer == "sgd" else "betas"
        return [group.get(name, 0.0) for group in self.zinf.optimizer.param_groups]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is exchanged with other ranks in any case; step() is refused inside, as in DeepSpeed."""
        if self._inside_no_sync:
            raise EngineError("no_sync() within no_sync(): end the outer block first")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    coalesce_grad_reduction = no_sync

    # -- counters and places ------------------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Steps, skipped ones included."""
        return self.zinf.global_step + self.zinf.skipped_steps

    @property
    def skipped_steps(self) -> int:
        return self.zinf.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Calls of step()."""
        return self._counters.micro_steps

    @property
    def global_samples(self) -> int:
        return self._counters.samples

    @property
    def device(self) -> torch.device:
        """Where batches belong."""
        return self.zinf.memory.parts.device.torch_device

    local_rank, global_rank, world_size, dp_world_size, mp_world_size = 0, 0, 1, 1, 1

    @property
    def loss_scale(self) -> float:
        return self.zinf.loss_scale

    cur_scale = loss_scale

    @property
    def training(self) -> bool:
        return self.module.training

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = False, data_sampler: Any = None, collate_fn: Any = None,
        num_local_io_workers: int = 0,
    ) -> Any:  # fmt: skip
        """A loader of micro-batches. In training its order is DeepSpeed's: shuffled by seed 0, the same each epoch unless the sampler is told its epoch."""
        from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=route == "train")
        return DataLoader(
            dataset, batch_size=batch_size or self.settings.micro_batch, sampler=data_sampler, collate_fn=collate_fn or self.collate_fn,
            drop_last=self.settings.drop_last, num_workers=num_local_io_workers, pin_memory=pin_memory,
        )  # fmt: skip

    # -- saving -------------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None, save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Save all that a resumed run needs as save_dir/tag, and `client_state` with it. See zinf.Engine.save_checkpoint.

        Args:
            tag: default: global_stepN.
            client_state: numbers, text, lists, tuples, dicts, tensors (of 16 MiB in all); nothing is pickled.
            save_latest: let save_dir/latest name it.
            exclude_frozen_parameters: has no effect, as frozen weights are stored once and shared with the store by a link where that can be.
        """
        return saving.save(self, save_dir, tag, client_state or {}, save_latest)

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Go on from a checkpoint of save_checkpoint, of zinf.Engine's, or of DeepSpeed's own (ZeRO-1, 2, 3, universal; any number of ranks).

        Returns (its path, client_state); (None, None) if `load_dir` names none.
        """
        if custom_load_fn is not None:
            raise EngineError("custom_load_fn is not there in zinf, which loads record by record: change the weights afterwards under engine.zinf.gather")
        return saving.load(self, load_dir, tag, load_optimizer_states and not load_module_only, load_lr_scheduler_states, load_module_only)

    def save_16bit_model(self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False) -> bool:
        """Write the weights into `save_dir`, streamed, as safetensors: the name ends in .safetensors, whatever it ended in (nothing is pickled)."""
        return saving.save_16bit(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **options: Any) -> dict[str, torch.Tensor]:
        """All weights and buffers in memory, under the module's names."""
        frozen = {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad} if exclude_frozen_parameters else set()
        return {name: value for name, value in self.zinf.state_dict().items() if name not in frozen}

    state_dict = _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict = module_state_dict

    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Set weights and buffers; see zinf.Engine.load_state_dict."""
        return self.zinf.load_state_dict(state, strict)

    # -- what has no work to do in zinf ---------------------------------------------------------------------------------------

    def offload_states(self, *args: Any, **options: Any) -> None:
        """State and grads are in host memory or on NVMe as it is; weights leave the device when others need the room."""

    def reload_states(self, non_blocking: bool = False) -> None:
        """What comes back comes when it is used."""

    def empty_partition_cache(self) -> None:
        """Slabs are evicted as others need them."""

    def compile(self, backend: str = "inductor", **options: Any) -> None:
        """Blocks are compiled when the engine is built: give compile_blocks="inductor" to initialize."""
        log.warning("engine.compile has no effect: give compile_blocks=%r to initialize, which compiles blocks", backend)

    def allreduce_gradients(self, *args: Any, **options: Any) -> None:
        """There is one rank."""

    def destroy(self) -> None:
        """Commit what is pending, stop every thread, free every byte."""
        self.zinf.close()

    close = destroy

    def __enter__(self) -> DeepSpeedEngine:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.zinf.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(f"neither the engine nor its {type(module).__name__} has {name!r}") from None
