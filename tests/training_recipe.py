"""What a seed of the training machine draws: a small model and every option of the engine. See training_machine.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from oracle import DTYPES, Oracle
from torch import nn

from zinf.config import Config
from zinf.engine import Engine
from zinf.precision import keep_in_fp32

WIDTH, VOCABULARY, BLOCKS, ROWS = 32, 64, 3, 8
LEAF_BYTES = 1024  # so small that embedding and head are shards of their own
HYPER = dict(lr=1e-2, weight_decay=0.1)
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {  # (engine's name, options, function of reference.py, its moments)
    "adamw": ("adamw", dict(betas=(0.8, 0.9)), "adam", ("m", "v")),
    "adam": ("adam", dict(eps=1e-6), "adam", ("m", "v")),
    "sgd": ("sgd", {}, "sgd", ()),
    "momentum": ("sgd", dict(momentum=0.9, dampening=0.5), "sgd", ("m",)),
    "lion": ("lion", dict(betas=(0.8, 0.9)), "lion", ("m",)),
    "adagrad": ("adagrad", dict(lr_decay=0.1, initial_accumulator_value=0.1), "adagrad", ("s",)),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=500, cycle_momentum=False),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.5),
}


# ---- the model


class Interrupted(Exception):
    """What a block raises when told to."""


class Block(nn.Module):
    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)
        self.raises = ""  # "forward" or "backward"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH) to the same; the norm may be in fp32."""
        hidden = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        if self.raises == "forward":
            raise Interrupted
        out = x + self.dropout(self.down(torch.tanh(self.up(hidden))))
        if self.raises == "backward" and out.requires_grad:
            out.register_hook(_interrupt)
        return out


def _interrupt(grad: torch.Tensor) -> None:
    raise Interrupted


class Net(nn.Module):
    def __init__(self, tied: bool, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, batch_norm) for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.order = list(range(BLOCKS))  # of the calls of blocks: some twice, some never

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(rows,) to logits (rows, VOCABULARY)."""
        x = self.embed(ids)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x * self.scale)


def loss_of(model: nn.Module | Engine, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).float(), labels)


# ---- the options


@dataclass(frozen=True)
class Recipe:
    """The model and every option. `options` are the engine's, but for its folder."""

    dtype: str
    optimizer: str
    scheduler: str
    tied: bool
    dropout: float
    batch_norm: bool
    groups: bool
    micro_batches: int
    nvme: bool
    options: dict[str, Any]

    @classmethod
    def of(cls, draw: random.Random, device: str) -> Recipe:
        dtype, optimizer, micro_batches = draw.choice(["bf16", "bf16", "fp16", "fp32"]), draw.choice(list(OPTIMIZERS)), draw.choice([1, 1, 2, 3])
        batch_norm, nvme = draw.choice([False, False, True]), draw.choice([False, True, True, True])
        name, own, _, _ = OPTIMIZERS[optimizer]
        options = dict(device=device, leaf_bytes=LEAF_BYTES, optimizer=name, gradient_accumulation_steps=micro_batches, max_skipped_steps=100, **HYPER, **own)
        options |= dict(chunk_size=draw.choice([4096, 8192, 1 << 20]), debug=draw.choice([False, True]))
        options |= _placement(draw, nvme) | _precision(draw, dtype, micro_batches, batch_norm) | _stepping(draw)
        scheduler, tied, dropout, groups = draw.choice(list(SCHEDULERS)), draw.choice([False, True]), draw.choice([0, 0.2]), draw.choice([False, True])
        return cls(dtype, optimizer, scheduler, tied, dropout, batch_norm, groups, micro_batches, nvme, options)

    @property
    def freezes(self) -> bool:
        return "trainable" in self.options

    @property
    def crash_safe(self) -> bool:
        return self.nvme and self.options.get("crash_safe", True)

    @property
    def undoes(self) -> bool:
        """A step inside backward has changed shards before the whole is known: it can be undone only where both generations are on NVMe and committed."""
        away = self.crash_safe and self.options["state"] == self.options["weights"] == "nvme" and self.options["commit_every"] in (None, 1)
        return self.options["step_mode"] != "backward" or away

    def model(self) -> Net:
        torch.manual_seed(0)
        return Net(self.tied, self.dropout, self.batch_norm).to(DTYPES[self.dtype]).train()

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]] | None:
        if not self.groups:
            return None
        flat, matrices = ([p for p in model.parameters() if (p.dim() >= 2) == wide] for wide in (False, True))
        return [dict(params=matrices), dict(params=flat, weight_decay=0.0, lr=3e-3)]

    def oracle(self) -> Oracle:
        name, own, algorithm, moments = OPTIMIZERS[self.optimizer]
        model, options = self.model(), self.options
        keep_in_fp32(model, options.get("keep_in_fp32", ()))
        more = Config(optimizer=name, **own).optimizer_options() | ({"decoupled": name == "adamw"} if algorithm == "adam" else {}) | HYPER
        more |= {key: options.get(key) for key in ("max_grad_norm", "max_grad_value", "ema_decay")}
        wide = self.micro_batches > 1 and "grad_accum_dtype" not in options
        groups = self.parameter_groups(model)
        return Oracle(model, leaf_bytes=LEAF_BYTES, algorithm=algorithm, moments=moments, wide=wide, groups=groups, **more)


def _placement(draw: random.Random, nvme: bool) -> dict[str, Any]:
    options: dict[str, Any] = dict(activations=draw.choice(["auto", "device", "host", *(["nvme"] if nvme else [])]))
    options |= dict(recompute=draw.choice([True, True, False, ("blocks.1",)]), keep_last=draw.choice([0, 0, 1]))
    if nvme:
        options |= dict(weights=draw.choice(["nvme", "nvme", "host", 0.5, "device"]), state=draw.choice(["nvme", "nvme", "host", 0.5]))
        options |= dict(grads=draw.choice(["host", "nvme", "nvme"]), commit_every=draw.choice([None, None, 1, 2, 0]))
        options |= {"crash_safe": False} if draw.random() < 0.1 else {}
        options |= {"verify": "always"} if draw.random() < 0.2 else {}
    return options


def _precision(draw: random.Random, dtype: str, micro_batches: int, batch_norm: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if dtype != "fp32" and draw.random() < 0.5:
        options["keep_in_fp32"] = ("BatchNorm1d" if batch_norm else "LayerNorm",)
    elif micro_batches > 1 and draw.random() < 0.33:
        options["grad_accum_dtype"] = dtype
    if dtype == "fp16":
        dynamic = dict(initial_scale_power=draw.choice([10, 16, 18]), loss_scale_window=2, hysteresis=draw.choice([1, 2]))
        options |= draw.choice([dict(loss_scale=1), dict(loss_scale=256.0), dynamic])
    return options


def _stepping(draw: random.Random) -> dict[str, Any]:
    options = dict(max_grad_norm=draw.choice([None, 0.1, 1.0]), max_grad_value=draw.choice([None, None, 1e-3]), ema_decay=draw.choice([None, 0.9]))
    options = {key: value for key, value in options.items() if value is not None}
    if draw.random() < 0.5:
        options["trainable"] = "*"  # what is trained may change
    return options | {"step_mode": draw.choice(["auto", "deferred", *([] if "max_grad_norm" in options else ["backward"])])}
