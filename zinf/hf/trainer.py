"""The Hugging Face Trainer on an engine: a mixin that goes first among the bases, and Trainer and Seq2SeqTrainer with it.

    class MyTrainer(ZinfTrainerMixin, SFTTrainer): ...

The Trainer keeps its loop, its schedules, its data and its files. What differs, in the order in which it calls:

    create_accelerator_and_postprocess   TrainingArguments are checked (see arguments.py), before any work
    _move_model_to_device                nothing: the engine moves weights
    create_optimizer                     the engine is built, and its optimizer is the Trainer's: schedules drive its parameter groups
    training_step                        the loss is scaled for fp16
    _clip_grad_norm, _get_grad_norm      the engine's norm; clipping is in its step
    _save                                weights streamed into a folder that any from_pretrained reads
    _save_optimizer_and_scheduler        and the engine's state into checkpoint-N/zinf_state, with what the filesystem shares
    _load_from_checkpoint                nothing yet
    _load_optimizer_and_scheduler        weights, moments and counters at once, from zinf_state
    _load_best_model                     the same

Random numbers, the place in the data and the schedule are in the Trainer's own files, so a resumed run has the bits of one that never stopped.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from zinf import memory
from zinf.config import Config
from zinf.discover import may_train
from zinf.engine import Engine
from zinf.errors import ConfigError, EngineError, StoreError
from zinf.hf import arguments, trl
from zinf.hf.metrics import Meter
from zinf.hf.resuming import Progress
from zinf.stored import basis_of
from zinf.tiers.manifest import MANIFEST

if TYPE_CHECKING:
    from typing import Any as _Trainer
else:
    _Trainer = object

log = logging.getLogger("zinf")

STATE = "zinf_state"  # the engine's part of a checkpoint-N
ARGUMENTS = "training_args.json"  # what Trainer pickles as training_args.bin, for people to read


class ZinfTrainerMixin(_Trainer):
    """Put it first: class MyTrainer(ZinfTrainerMixin, SomeTrainer).

    Args:
        zinf: the engine's options: a Config, a mapping, or a YAML or JSON file. Optional for a model from zinf.from_pretrained, whose weights
            are in a store already.
        args, kwargs: SomeTrainer's. TrainingArguments stays as it is.

    Raises:
        ConfigError: before any work, one line: an option or a training argument that cannot be had, and what to do.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zinf: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        self._zinf_config = arguments.config_of(zinf)
        self._zinf_engine: Engine | None = None
        self._zinf_meter: Meter | None = None
        self._zinf_resume = False
        self._zinf_progress = Progress(self)
        self._zinf_store: str | None = None  # stands for a checkpoint while training goes on from the store itself
        _refuse(args, kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, TrainingArguments):  # some trainers work for long before they look at them
                arguments.check(value)
        trl.settle_reference(type(self), args, kwargs)
        super().__init__(*args, **kwargs)
        self.add_callback(_Steps(self))

    @property
    def engine(self) -> Engine:
        """The engine of `model`; built when it is first needed (train, evaluate, predict, save), or here."""
        if self._zinf_engine is not None and self._zinf_engine.module is not self.model:
            self.close()
        if self._zinf_engine is None:
            self._zinf_engine = engine = self._build_engine()
            self._zinf_meter = Meter(engine)
            self._zinf_progress.found = {}
            engine.register("trainer", self._zinf_progress, late=True)
        return self._zinf_engine

    def close(self) -> None:
        """Commit what is pending, stop the engine's threads, free its memory. The model's weights stay in its store, or come into memory."""
        engine, self._zinf_engine, self._zinf_meter = self._zinf_engine, None, None
        self.optimizer = self.lr_scheduler = None
        if engine is not None:
            engine.close()

    def __enter__(self) -> ZinfTrainerMixin:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _build_engine(self) -> Engine:
        model, args, config = self.model, self.args, self._zinf_config
        arguments.check_dtypes(args, {name: p.dtype for name, p in model.named_parameters()})
        config = dataclasses.replace(config, **arguments.options(args, config))
        decayed, trained = set(self.get_decay_parameter_names(model)), may_train(model, config.trainable)
        named = [(name, p) for name, p in model.named_parameters() if name in trained]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        store = _own_store(model, config)
        if store is not None and not self._zinf_resume:
            raise StoreError(
                f"an earlier run has its store at {store}: go on from it with train(resume_from_checkpoint=True), or for a new run give another run_name "
                "in zinf=, or remove it with `zinf clean`"
            )
        engine = Engine(model, config, param_groups=[g for g in groups if g["params"]], resume=store is not None)
        try:
            trl.take_head(engine, args.device)
        except BaseException:
            engine.close()
            raise
        for line in engine.plan():
            log.info("%s", line)
        return engine

    # -- training -----------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer.train.

        With True it goes on from the store, if the store is further than the last checkpoint that is whole, else from that. A checkpoint that was being
        written when the process was killed is passed over.
        """
        self._zinf_resume = bool(resume_from_checkpoint)
        if resume_from_checkpoint is True:
            last = last_whole(self.args.output_dir)
            _ = self.engine
            if self._zinf_progress.further_than(last):
                with tempfile.TemporaryDirectory() as self._zinf_store:
                    self._zinf_progress.write(self._zinf_store, last)
                    return self._train(self._zinf_store, *args, **kwargs)
            if last is None:
                raise EngineError(f"{self.args.output_dir} has no checkpoint to go on from, nor has the store: call train() without resume_from_checkpoint")
            resume_from_checkpoint = last
        self._zinf_progress.found = {}
        if not resume_from_checkpoint and self.optimizer is None and self.engine.global_step:
            log.warning("the store is at step %d, and a new run begins from there; train(resume_from_checkpoint=True) goes on", self.engine.global_step)
        return self._train(resume_from_checkpoint, *args, **kwargs)

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().train(*args, **kwargs)
        except KeyboardInterrupt:
            self._settle()
            raise
        finally:
            self._zinf_store = None
        self._zinf_progress.found = {}
        self.engine.commit()
        self.engine.synchronize()
        return result

    def _settle(self) -> None:
        """After Ctrl-C: drop what was begun, so that the engine and its store are at the last whole step."""
        engine = self._zinf_engine
        if engine is not None:
            if engine.health.error is not None:
                engine.recover()
            engine.zero_grad()
            engine.synchronize()
            self._zinf_progress.keep(engine)
        self.is_in_train = False
        log.warning("interrupted after step %d, which is whole: go on with train(resume_from_checkpoint=True)", self.state.global_step)

    def create_accelerator_and_postprocess(self) -> None:
        arguments.check(self.args)
        arguments.adjust(self.args)
        super().create_accelerator_and_postprocess()
        self.model._is_accelerate_prepared = True  # accelerate neither moves nor wraps nor compiles it

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """bf16 is autocast, as ever. The scaler of fp16 is the engine's."""
        precision = "bf16" if self.args.bf16 else "no"
        return super()._build_accelerator_args(**{**kwargs, "mixed_precision": precision})

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The engine moves weights."""

    def create_optimizer(self, model: Any = None) -> Any:
        engine = self.engine
        engine.zero_grad()  # of a train() that ended in an exception
        if self.optimizer is None:
            self.optimizer = engine.optimizer
            if engine.loss_scale != 1 or engine.config.loss_scale != "dynamic":
                self.accelerator.backward = self._backward
        return self.optimizer

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.engine.scale(loss).backward(**kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._zinf_meter is not None:
            self._zinf_meter.tokens += _tokens(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss_context_manager(self) -> Any:
        stack = super().compute_loss_context_manager()
        stack.enter_context(self.accelerator.autocast())
        return stack

    def _clip_grad_norm(self, model: Any) -> float:
        return self.engine.grad_norm()

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self.engine.grad_norm() if grad_norm is None else grad_norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._zinf_meter is not None and "loss" in logs:
            logs.update(self._zinf_meter.read())
        super().log(logs, *args, **kwargs)

    # -- evaluation ---------------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        _ = self.engine
        return super().evaluation_loop(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super()._evaluate(*args, **kwargs)
        self.engine.commit()  # what an evaluation drew from the random numbers is not drawn again by a resumed run
        return metrics

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.autocast():
            return super().prediction_step(*args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's: of a reference that is the model itself."""
        _ = self.engine
        self.model.eval()
        return super()._precompute_ref_logps(*args, **kwargs)

    # -- checkpoints --------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        output_dir = output_dir or self.args.output_dir
        if state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        engine = self.engine
        engine.save_pretrained(output_dir)
        if engine.origin is None and getattr(self.model, "can_generate", bool)():
            self.model.generation_config.save_pretrained(output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(output_dir)
        with open(os.path.join(output_dir, ARGUMENTS), "w", encoding="utf-8") as f:
            f.write(self.args.to_json_string())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.engine.save_checkpoint(output_dir, STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if resume_from_checkpoint != self._zinf_store and not has_state(resume_from_checkpoint):
            raise ConfigError(
                f"{resume_from_checkpoint} has no {STATE}: it was saved by another trainer, or with save_only_model. "
                "Start anew from its weights: zinf.from_pretrained on that folder"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and checkpoint == self._zinf_store:
            self._zinf_progress.restore()
            return
        if checkpoint is not None:
            self.engine.load_checkpoint(checkpoint, STATE, rng=False)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and checkpoint == self._zinf_store:
            self._zinf_progress.restore_rng()
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not has_state(best):
            super()._load_best_model()
            return
        log.info("loading the best model, from %s", best)
        self.engine.load_checkpoint(best, STATE, rng=False)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("hyperparameter_search builds a model anew for each trial, which an engine and its store cannot follow: start a run per trial")


class ZinfTrainer(ZinfTrainerMixin, Trainer):
    """transformers' Trainer on an engine; see ZinfTrainerMixin."""


class ZinfSeq2SeqTrainer(ZinfTrainerMixin, Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer (predict_with_generate) on an engine; see ZinfTrainerMixin."""


class _Steps(TrainerCallback):
    """Tells accelerate of a step that was skipped since a gradient was not finite, so that the schedule waits; and `Progress` where the Trainer is."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._skipped = trainer, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._zinf_progress.begin()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        skipped = self._trainer.engine.skipped_steps
        self._trainer.optimizer._is_overflow = skipped > self._skipped
        self._skipped = skipped


def _refuse(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a trainer that the engine stands in for."""
    if isinstance(model := kwargs.get("model", args[0] if args else None), str):
        raise ConfigError(f"model={model!r} would be loaded into memory as a whole: give zinf.from_pretrained({model!r}, nvme_path=...)")
    if kwargs.get("model_init") is not None:
        raise ConfigError("model_init: an engine keeps to one model; build it first, and give model=")
    if (kwargs.get("optimizers") or (None,))[0] is not None or kwargs.get("optimizer_cls_and_kwargs") is not None:
        raise ConfigError("optimizers: the engine has the optimizer and its state; leave it out and set optim, learning_rate and the like in TrainingArguments")
    if kwargs.get("quantization_config") is not None:
        raise ConfigError("quantization_config: zinf streams weights of 16 or 32 bits: leave it out")


def _tokens(inputs: Any) -> int:
    """Of a batch: ids, or rows where there are none."""
    ids = next((inputs[key] for key in ("input_ids", "prompt_input_ids") if isinstance(inputs, Mapping) and torch.is_tensor(inputs.get(key))), None)
    return ids.numel() if ids is not None else 0


def _own_store(model: Any, config: Config) -> str | None:
    """Where a store stands already that an engine would make for `model`; None for a model that is in a store, or where there is none."""
    origin = getattr(model, "zinf_origin", None)
    basis = basis_of(model, origin.paths) if origin is not None else None
    if origin is not None and basis is None:
        return None
    return next((path for path in memory.store_paths(config, basis) if os.path.lexists(os.path.join(path, MANIFEST))), None)


def has_state(checkpoint: str | None) -> bool:
    """Is the engine's state in this checkpoint-N?"""
    return checkpoint is not None and os.path.isfile(os.path.join(checkpoint, STATE, MANIFEST))


def last_whole(folder: str) -> str | None:
    """The checkpoint-N in `folder` of the largest N that has all its parts."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = sorted((int(name.removeprefix("checkpoint-")) for name in names if name.removeprefix("checkpoint-").isdigit()), reverse=True)
    for step in steps:
        path = os.path.join(folder, f"checkpoint-{step}")
        if has_state(path) and os.path.isfile(os.path.join(path, TRAINER_STATE_NAME)):
            return path
        log.warning("%s is not whole, and passed over", path)
    return None
