"""DeepSpeed's config in zinf's words: `translate` takes each key through the table in keys.py.

    found = translate(read("ds_config.json"), auto={"learning_rate": 2e-5, ...})
    found.config        options of zinf.Config            found.waiting   keys that are "auto" and that `auto` does not say
    found.training      what a loop needs beside them     found.report    a line for each key: honoured, ignored

A file that works with DeepSpeed gets the same effective values; where DeepSpeed is strict about what does no harm, there is a line in the report. What
would give other numbers than DeepSpeed's is refused, all of it in one error. An unknown key is an error that names the nearest one, and where DeepSpeed
ignores what it does not know (the top level, aio and some more: LENIENT) a line of the report that warns.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from zinf.config import Config, convert
from zinf.errors import ConfigError
from zinf.integrations.deepspeed.keys import AUTO_IS_DEFAULT, DTYPES, FILL_ONLY, FILLS, KEYS, LENIENT, REQUIRED, SCHEDULERS, SECTIONS, Entry, canonical
from zinf.integrations.deepspeed.reading import brief

SHOWN = 8  # errors in one message


@dataclasses.dataclass(frozen=True)
class Line:
    """What became of one key."""

    key: str
    value: Any
    kind: str  # honoured | ignored
    said: str
    warns: bool = False  # it may be a mistake

    def __str__(self) -> str:
        return f"{self.key}: {brief(self.value)}  {self.kind}: {self.said}"


@dataclasses.dataclass(frozen=True)
class Translation:
    """A DeepSpeed config in zinf's words.

    training: zero_stage, dtype (fp32, fp16, bf16; None where it is waiting), train_batch_size, train_micro_batch_size_per_gpu,
    gradient_accumulation_steps (None where nothing says), dataloader_drop_last, scheduler: None or {"type", "params"}, defaults filled in;
    flops_profiler where it is enabled.
    waiting: key -> which names of `auto` it waits for.
    """

    config: dict[str, Any]
    training: dict[str, Any]
    waiting: dict[str, tuple[str, ...]]
    report: list[Line]


def translate(ds: Mapping[str, Any], *, auto: Mapping[str, Any] | None = None) -> Translation:
    """The config in zinf's words. `auto` has what Hugging Face's Trainer knows, by the names of TrainingArguments, and hidden_size, num_training_steps,
    warmup_steps: it replaces "auto", and must agree with values that are not.

    Raises:
        ConfigError: unknown keys, refused ones, values that cannot be; all of them in one line.
    """
    given = _Given(auto or {})
    for key, value in _leaves(ds):
        given.take(key, value)
    given.raise_errors()
    t = Translation({}, {"zero_stage": int(given.get("zero_optimization.stage", 0))}, given.waiting, given.report)
    for part in (_options, _precision, _batches, _clipping, _optimizer, _schedule, _profiler, _places):
        part(given, t)
    try:
        Config.from_dict(t.config)
    except ConfigError as e:
        raise ConfigError(f"in zinf's words: {brief(str(e), 300)}") from None
    return t


def is_known(key: str) -> bool:
    """Is it a key that the table has, a section, or inside of a section that is one row?"""
    parts = canonical(key).split(".")
    return ".".join(parts) in SECTIONS or any(".".join(parts[:n]) in KEYS for n in range(1, len(parts) + 1))


class _Given:
    """The keys of a config, one after the other through the table: values by key, and what there is to say about them."""

    def __init__(self, auto: Mapping[str, Any]) -> None:
        names = {name for names, _ in FILLS.values() for name in names}
        for name in auto:
            if name not in names:
                raise ConfigError(f"auto: unknown name {brief(name)}; it can be {', '.join(sorted(names))}")
        self.auto = auto
        self.values: dict[str, Any] = {}
        self.waiting: dict[str, tuple[str, ...]] = {}
        self.report: list[Line] = []
        self.errors: list[str] = []
        self._seen: dict[str, Any] = {}
        self._looked = 0  # for the nearest of unknown keys

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def take(self, key: str, value: Any) -> None:
        entry = KEYS.get(key)
        if _is_comment(key):
            return
        if entry is None and key.rpartition(".")[0] in LENIENT and key not in SECTIONS:
            self.report.append(Line(key, value, "ignored", f"DeepSpeed ignores it, too: {self._unknown(key)}", warns=True))
        elif entry is None:
            self.errors.append(f"{brief(key)}: {'expected a section with keys and values' if key in SECTIONS else self._unknown(key)}")
        elif key in self._seen and self._seen[key] != value:
            self.errors.append(f"{key} is there under two names: keep one")
        elif entry.kind == "refused":
            if not _is_off(value, entry.off):
                self.errors.append(f"{key} is {brief(value)}: {entry.said}")
            else:
                self.report.append(Line(key, value, "ignored", "it asks for nothing"))
        else:
            self._accept(key, value, entry)
        self._seen[key] = value

    def _unknown(self, key: str) -> str:
        self._looked += 1
        return f"unknown key; {_nearest(key)}" if self._looked <= SHOWN else "unknown key"  # to look for the nearest takes its time

    def _accept(self, key: str, value: Any, entry: Entry) -> None:
        said = entry.said
        if value == "auto" and key in FILLS:
            names, fill = FILLS[key]
            if any(name not in self.auto for name in names):
                if entry.kind == "honoured":
                    self.waiting[key] = names
                self.report.append(Line(key, value, entry.kind, f"{said}; auto is to be filled from {' and '.join(names)}"))
                return
            value = fill(*(self.auto[name] for name in names))
            said = f"{said}; auto is {brief(value)}"
        elif key in FILLS and value is not None:
            self._must_agree(key, value)
        if entry.kind == "honoured":
            value = self._converted(key, value, entry)
        self.report.append(Line(key, value, entry.kind, said))

    def _must_agree(self, key: str, value: Any) -> None:
        names, fill = FILLS[key]
        if key.startswith(FILL_ONLY) or any(name not in self.auto for name in names):
            return
        theirs = fill(*(self.auto[name] for name in names))
        if value != theirs:
            self.errors.append(f"{key} is {brief(value)}, but the Trainer's {' and '.join(names)} say {brief(theirs)}: set it to auto")

    def _converted(self, key: str, value: Any, entry: Entry) -> Any:
        """The value in its type, kept; None is as if the key were not there."""
        if value is None or (value == "auto" and key.startswith(AUTO_IS_DEFAULT)):
            return None
        if value == "auto":
            self.errors.append(f"{key} is auto, and there is nothing to fill it from: give a value")
            return None
        try:
            self.values[key] = convert(value, entry.hint, key)
        except ConfigError as e:
            self.errors.append(brief(str(e), 300))
            return None
        return self.values[key]

    def raise_errors(self) -> None:
        if self.errors:
            more = f"; and {len(self.errors) - SHOWN} more" if len(self.errors) > SHOWN else ""
            raise ConfigError("; ".join(self.errors[:SHOWN]) + more)


def _leaves(node: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) for what the table has rows for, and for what it does not know."""
    for name, value in node.items():
        key = canonical(f"{section}{name}")
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _leaves(value, key + ".")
        elif key == "zero_optimization" and isinstance(value, bool):  # of the first versions: stage 1, or none
            yield "zero_optimization.stage", value
        elif not (key in SECTIONS and key not in KEYS and value is None):
            yield key, value


def _is_comment(key: str) -> bool:
    return key.rsplit(".", 1)[-1].startswith(("_", "//", "#")) or key.rsplit(".", 1)[-1] in ("comment", "comments")


def _is_off(value: Any, off: tuple[Any, ...], depth: int = 4) -> bool:
    """Does a value of a refused key ask for nothing? A section does not where it is empty, or says so, or all of its sections do not."""
    if not isinstance(value, Mapping):
        return any(value is o or (value == o and type(value) is type(o)) for o in off)
    if "enabled" in value:
        return value["enabled"] is False
    return depth > 0 and all(isinstance(v, Mapping) and _is_off(v, off, depth - 1) for v in value.values())


def _nearest(key: str) -> str:
    """The nearest key in its section, else of all keys by their last word."""
    section, _, name = key[:200].rpartition(".")
    siblings = [k for k in [*KEYS, *SECTIONS] if k.rpartition(".")[0] == section]
    match = difflib.get_close_matches(key[:200], siblings, n=1, cutoff=0.8)
    if not match:
        by_name = {k.rpartition(".")[2]: k for k in [*SECTIONS, *reversed(KEYS)]}
        match = [by_name[n] for n in difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)]
    return f"did you mean {match[0]}?" if match else "`zinf ds-config --keys` has all keys"


# ------------------------------------------------------------------------------ what more than one key decides together


def _options(given: _Given, t: Translation) -> None:
    """Values that are an option of zinf.Config as they stand. Those of an optimizer only where there is one."""
    for key, value in given.values.items():
        option = KEYS[key].option
        if option and ("optimizer.type" in given.values or not key.startswith("optimizer.")):
            t.config[option] = value
    threads = given.get("aio.thread_count")
    if threads is not None:
        t.config.setdefault("io_threads", threads)
    dtype, modules = given.get("data_types.grad_accum_dtype"), given.get("data_types.keep_in_fp32_modules")
    if dtype is not None:
        t.config["grad_accum_dtype"] = DTYPES[dtype]
    if modules is not None:
        t.config["keep_in_fp32"] = modules


def _precision(given: _Given, t: Translation) -> None:
    fp16, bf16 = given.get("fp16.enabled", False), given.get("bf16.enabled", False)
    if fp16 and bf16:
        raise ConfigError("fp16.enabled and bf16.enabled are both true: choose one")
    waits = "fp16.enabled" in given.waiting or "bf16.enabled" in given.waiting
    t.training["dtype"] = "fp16" if fp16 else "bf16" if bf16 else None if waits else "fp32"


def _batches(given: _Given, t: Translation) -> None:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps; one of them follows from the others."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, rows, steps = (given.get(name) for name in names)
    for name in names:
        if given.get(name, 1) < 1:
            raise ConfigError(f"{name} is {given.get(name)}, expected a positive number")
    if not any(name in given.waiting for name in names):
        if steps is None and (whole or rows):
            steps = whole // rows if whole and rows else 1
        rows = whole // steps if rows is None and whole else rows
        whole = rows * steps if whole is None and rows else whole
    if None not in (whole, rows, steps) and whole != rows * steps:
        raise ConfigError(
            f"train_batch_size is {whole}, but train_micro_batch_size_per_gpu {rows} x gradient_accumulation_steps {steps} are {rows * steps} on one card:"
            " leave one of them out"
        )
    t.training.update(zip(names, (whole, rows, steps), strict=True))
    t.training["dataloader_drop_last"] = given.get("dataloader_drop_last", False)
    if steps:
        t.config["gradient_accumulation_steps"] = steps


def _clipping(given: _Given, t: Translation) -> None:
    key = "gradient_clipping"
    if key in given.waiting:
        return
    norm = given.get(key)
    if norm is None and "max_grad_norm" in given.auto:  # the Trainer always says
        norm = given.auto["max_grad_norm"]
        t.report.append(Line(key, None, "honoured", f"max_grad_norm: {norm}, the Trainer's; 0 is none"))
    elif norm is None:
        t.report.append(Line(key, None, "honoured", "max_grad_norm: 1.0, DeepSpeed's default where it is not given; 0 is none"))
    t.config["max_grad_norm"] = 1.0 if norm is None else norm or None


_OPTIMIZERS = {"adam": 1e-3, "adamw": 1e-3, "lion": 1e-3, "sgd": 1e-3, "adagrad": 1e-2}  # name -> the lr that it has by default


def _optimizer(given: _Given, t: Translation) -> None:
    """DeepSpeed's Adam is AdamW, unless adam_w_mode is false."""
    kind = given.get("optimizer.type")
    if kind is None:
        return
    name = kind.lower()
    if name not in _OPTIMIZERS:
        raise ConfigError(f"optimizer.type is {brief(kind)}: zinf has {', '.join(_OPTIMIZERS)}; choose one of them")
    if name == "adam" and given.get("optimizer.params.adam_w_mode", True):
        name = "adamw"
    t.config["optimizer"] = name
    if "optimizer.params.lr" not in given.waiting:
        t.config.setdefault("lr", _OPTIMIZERS[name])
    if name == "lion" and "optimizer.params.betas" not in given.waiting:
        t.config.setdefault("betas", (0.9, 0.999))  # DeepSpeed's; the paper's second is 0.99
    if name == "adamw" and given.get("optimizer.params.torch_adam") and "optimizer.params.weight_decay" not in given.waiting:
        t.config.setdefault("weight_decay", 0.01)


def _schedule(given: _Given, t: Translation) -> None:
    kind, prefix = given.get("scheduler.type"), "scheduler.params."
    t.training["scheduler"] = None
    if kind is None:
        return
    own = SCHEDULERS[kind]
    params = {key.removeprefix(prefix): value for key, value in given.values.items() if key.startswith(prefix)}
    waiting = {key.removeprefix(prefix) for key in given.waiting if key.startswith(prefix)}
    for name in (*params, *sorted(waiting)):
        if name not in own:
            raise ConfigError(f"{prefix}{name}: {kind} has no such parameter; it has {', '.join(own)}")
    for name, default in own.items():
        if default is REQUIRED and name not in params and name not in waiting:
            raise ConfigError(f"{prefix}{name} is missing: {kind} needs it")
    t.training["scheduler"] = {"type": kind, "params": {name: params.get(name, default) for name, default in own.items() if name not in waiting}}


def _profiler(given: _Given, t: Translation) -> None:
    prefix = "flops_profiler."
    if given.get(prefix + "enabled"):
        t.training["flops_profiler"] = {key.removeprefix(prefix): value for key, value in given.values.items() if key.startswith(prefix)}


def _places(given: _Given, t: Translation) -> None:
    """Where weights and state rest, and the drives. Where DeepSpeed keeps them on the device, zinf chooses."""
    stage, zero = t.training["zero_stage"], "zero_optimization."
    if not 0 <= stage <= 3:
        raise ConfigError(f"{zero}stage is {stage}, expected 0, 1, 2 or 3")
    old = {"offload_param": ("cpu_offload_param", "cpu_offload_params"), "offload_optimizer": ("cpu_offload",)}
    paths: list[str] = []
    for section, option in (("offload_param", "weights"), ("offload_optimizer", "state")):
        default = "cpu" if any(given.get(zero + name) for name in old[section]) else "none"
        device = given.get(f"{zero}{section}.device", default)
        path = given.get(f"{zero}{section}.nvme_path")
        if device == "none":
            continue
        if section == "offload_param" and stage < 3:
            t.report.append(Line(f"{zero}{section}", device, "ignored", f"stage is {stage}; it has an effect with stage 3 only"))
            continue
        t.config[option] = "host" if device == "cpu" else "nvme"
        if device == "nvme" and path is None:
            t.report.append(Line(f"{zero}{section}.nvme_path", None, "ignored", "it is not given, but the device is nvme: zinf.Engine will want an nvme_path"))
        elif device == "nvme" and path not in paths:
            paths.append(path)
    if paths:
        t.config["nvme_path"] = paths
