"""What a user can set: one frozen dataclass, filled from keyword arguments, a YAML or JSON file, and ZINF_* variables.

    Config(lr=1e-5, host_memory="48GiB")            keywords, with the same spellings as in a file
    Config.load("run.yaml", lr=2e-5)                keywords win over ZINF_* variables, those win over the file

Every value is converted to its field's type or refused with the key, what was given, what was expected, and the nearest valid
key or choice. `build`, `convert` and `read_file` do that for any dataclass, so `zinf train` uses them for its own sections.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from zinf.errors import ConfigError
from zinf.layout import PIECE

T = TypeVar("T")

Bytes = Annotated[int, "bytes"]  # an int that may be written as "20GiB"
Placement = Literal["auto", "device", "host", "nvme"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}i"] = _UNITS[f"{_letter}ib"] = 1024**_power  # a bare letter is binary, as in dd, qemu and systemd
    _UNITS[f"{_letter}b"] = 1000**_power


def parse_bytes(text: str | int) -> int:
    """The number of bytes that `text` says: 4096, "4096", "512MiB" (binary), "20GB" (decimal), "1.5T" (a bare letter is binary).

    Raises:
        ConfigError: it says no whole, positive number of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        n: float = text
    else:
        match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
        if match is None or match[2] not in _UNITS:
            raise ConfigError(f"{text!r} is not a size; write it like 512MiB, 20GiB or 4096")
        n = float(match[1]) * _UNITS[match[2]] if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if n < 0 or n != int(n):
        raise ConfigError(f"{text!r} is not a whole, positive number of bytes")
    return int(n)


def format_bytes(n: float) -> str:
    """`n` bytes for a person: 512 MiB, 1.4 GiB, 96 B."""
    power = 0
    while abs(n) >= 1024 and power < 4:
        n, power = n / 1024, power + 1
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{n:.0f} {unit}" if unit == "B" or n >= 100 or n == int(n) else f"{n:.1f} {unit}"


def option(default: Any, help: str) -> Any:
    """A dataclass field with a line of help."""
    return dataclasses.field(default=default, metadata={"help": help})


# The options of each optimizer beside lr and weight_decay, and their defaults: those of torch.optim, and of the paper for Lion.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"momentum": 0.0, "dampening": 0.0, "nesterov": False},
    "lion": {"betas": (0.9, 0.99)},
    "adagrad": {"lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
}
_OPTIONS = tuple(dict.fromkeys(key for options in OPTIMIZERS.values() for key in options))


def check_options(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that `optimizer` does not have, or a value that it cannot have. Other keys are not looked at."""
    for key in _OPTIONS:
        if key in options and key not in OPTIMIZERS[optimizer]:
            owners = " and ".join(name for name, own in OPTIMIZERS.items() if key in own)
            raise ConfigError(f"{key} is {options[key]!r}, but {optimizer} has no {key} (it belongs to {owners}): leave it out")
    for key in ("lr", "weight_decay", "eps", "momentum", "lr_decay", "initial_accumulator_value"):
        require(options.get(key, 0) >= 0, key, options.get(key), "zero or more")
    betas = options.get("betas", ())
    require(all(0 <= b < 1 for b in betas), "betas", list(betas), "two numbers in [0, 1)")
    if options.get("nesterov") and "momentum" in OPTIMIZERS[optimizer]:
        ok = options.get("momentum", 0) > 0 and options.get("dampening", 0) == 0
        require(ok, "nesterov", True, f"false, or a momentum and no dampening (momentum is {options.get('momentum')}, dampening {options.get('dampening')})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything the engine can be told. Sizes are bytes and may be written "20GiB"; `None` means that zinf chooses."""

    # tiers
    nvme_path: tuple[str, ...] = option((), "folder on each NVMe drive that holds the store; several are striped")
    run_name: str = option("run", "name of the store below nvme_path")
    device_memory: Bytes | None = option(None, "hard limit on what zinf holds on the device; auto: on a card, what a first step leaves of it")
    host_memory: Bytes | None = option(None, "hard limit on what zinf allocates in host memory")
    weights: Placement | float = option("auto", "where weights rest between uses; a number is the fraction that rests in host memory")
    grads: Placement = option("auto", "where grads wait for their step; auto: host memory, and NVMe where host_memory cannot hold them (exact, slower)")
    state: Placement | float = option("auto", "where the optimizer state rests; a number is the fraction in host memory")
    activations: Placement = option("auto", "where inputs of recomputed blocks wait for backward; auto: host where activation_memory is set, else device")
    activation_memory: Bytes | None = option(
        None,
        "host memory for those inputs; more go to NVMe, or stay where there is no store; default with activations: host: an eighth of host_memory, or 256MiB",
    )
    # the store
    chunk_size: int = option(1 << 20, f"elements of a chunk, a multiple of {PIECE}")
    crash_safe: bool = option(True, "two versions of each chunk: twice the space, and a kill at any instant loses nothing committed")
    verify: Literal["resume", "always", "off"] = option("resume", "when checksums are examined")
    commit_every: int | None = option(None, "steps between commits (checkpoints); 0: only when asked; default: 1, or 50 where state rests in host memory")
    # input and output
    backend: Literal["auto", "uring", "threads", "python"] = option("auto", "I/O engine")
    block_size: Bytes | None = option(None, "largest single read or write; default: what `zinf bench io` found on nvme_path, else 4MiB")
    queue_depth: int | None = option(None, "reads and writes in flight at once; default: what `zinf bench io` found, else 16")
    io_threads: int = option(4, "threads of the threads backend")
    # computation
    device: Literal["auto", "cuda", "cpu", "sim"] = option("auto", "where forward and backward run; auto: a card that torch can use, else the CPU")
    cpu_threads: int | None = option(None, "threads of the CPU optimizer; default: all cores")
    blocks: tuple[str, ...] | None = option(None, "class names of the blocks that travel as one; default: found by itself")
    leaf_bytes: Bytes = option(4 << 20, "a layer outside of all blocks travels by itself from this size on")
    recompute: bool | tuple[str, ...] = option(
        True, "recompute blocks in backward, instead of keeping what their forward saved: true, false, or their names (patterns)"
    )
    keep_last: int = option(0, "blocks, the last of forward, that are not recomputed, since backward begins with them")
    compile_blocks: str | None = option(None, "backend of torch.compile (inductor, ...) for the training forward of blocks; equal blocks share one graph")
    fused_head: Literal["auto", "off", "require", "liger"] = option(
        "auto", "loss of a causal language model by tiles, without all logits; auto: where they are large"
    )
    micro_batch_size: int | None = option(None, "rows of a batch that go through a block at once")
    gradient_accumulation_steps: int = option(1, "backwards that make one step")
    grad_accum_dtype: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto", "dtype in which backwards and micro-batches are summed; auto: fp32 where there are several"
    )
    keep_in_fp32: tuple[str, ...] | None = option(None, "classes or name patterns of modules kept in fp32; auto: what a transformers model asks for")
    step_mode: Literal["auto", "backward", "deferred"] = option("auto", "step a shard under the same backward, or under the next forward")
    # optimizer
    trainable: tuple[str, ...] | None = option(None, 'names (patterns: "*" is all) of parameters that are frozen now and may be trained later')
    optimizer: Literal["adamw", "adam", "sgd", "lion", "adagrad"] = option("adamw", "AdamW (decoupled weight decay), Adam (L2), SGD, Lion or Adagrad")
    lr: float = option(1e-5, "learning rate")
    weight_decay: float = option(0.0, "weight decay")
    decay_norms_and_biases: bool = option(True, "false: no weight decay for norms and biases, as Hugging Face's Trainer has it")
    betas: tuple[float, float] | None = option(None, "adamw, adam: decay of the two moments, default 0.9, 0.999; lion: default 0.9, 0.99")
    eps: float | None = option(None, "adamw, adam, adagrad: added to the root; default 1e-8, adagrad 1e-10")
    momentum: float | None = option(None, "sgd: momentum, default 0")
    dampening: float | None = option(None, "sgd: dampening of the momentum, default 0")
    nesterov: bool | None = option(None, "sgd: Nesterov's momentum")
    lr_decay: float | None = option(None, "adagrad: decay of the learning rate, default 0")
    initial_accumulator_value: float | None = option(None, "adagrad: what the sums of squares start at, default 0")
    ema_decay: float | None = option(None, "keep an average of the weights in the state, with this decay a step; default: none")
    max_grad_norm: float | None = option(None, "clip the norm of all grads to this")
    max_grad_value: float | None = option(None, "clip each element of the grads to this, after max_grad_norm if both are set")
    loss_scale: Literal["dynamic"] | float = option("dynamic", "fp16: what losses are multiplied by; 0 is dynamic, 1 is off")
    initial_scale_power: int = option(16, "fp16: a dynamic scale begins at 2 to this power")
    loss_scale_window: int = option(1000, "fp16: good steps in a row after which a dynamic scale doubles")
    hysteresis: int = option(2, "fp16: overflows until a dynamic scale is halved, at the first time and after it doubled")
    consecutive_hysteresis: bool = option(False, "fp16: overflows count for hysteresis only in a row")
    min_loss_scale: float = option(1.0, "fp16: a dynamic scale does not fall below")
    max_skipped_steps: int = option(10, "steps with non-finite grads in a row that are skipped before an error")
    trace: bool | str = option(False, "record a timeline of all verbs: true, or the path of the file (zinf report shows it, so does ui.perfetto.dev)")
    debug: bool = option(False, "fill released buffers with NaN, and check at every use whose a buffer is")

    def __post_init__(self) -> None:
        if self.device_memory == "auto":
            object.__setattr__(self, "device_memory", None)
        convert_fields(self)
        sizes = ("device_memory", "host_memory", "activation_memory", "block_size")
        counts = ("queue_depth", "io_threads", "gradient_accumulation_steps", "micro_batch_size", "cpu_threads", "loss_scale_window", "hysteresis")
        for key in (*sizes, *counts, "max_grad_norm", "max_grad_value", "min_loss_scale"):
            value = getattr(self, key)
            require(value is None or value > 0, key, value, "a positive number")
        require(self.chunk_size >= PIECE and self.chunk_size % PIECE == 0, "chunk_size", self.chunk_size, f"a positive multiple of {PIECE}")
        require((self.block_size or 0) % 4096 == 0, "block_size", self.block_size, "a multiple of 4096")
        for key in ("max_skipped_steps", "commit_every", "keep_last"):
            require((getattr(self, key) or 0) >= 0, key, getattr(self, key), "zero or more")
        require(self.loss_scale == "dynamic" or self.loss_scale >= 0, "loss_scale", self.loss_scale, "dynamic, or a positive number")
        require(0 <= self.initial_scale_power <= 126, "initial_scale_power", self.initial_scale_power, "from 0 to 126")
        check_options(self.optimizer, {k: getattr(self, k) for k in _OPTIONS if getattr(self, k) is not None} | self.optimizer_options())
        require(self.ema_decay is None or 0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "a number in [0, 1), such as 0.999")
        for key in ("weights", "state"):
            value = getattr(self, key)
            require(isinstance(value, str) or 0 <= value <= 1, key, value, "auto, device, host, nvme, or a fraction from 0 to 1")
        require(bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_name)), "run_name", self.run_name, "letters, digits, '.', '_' and '-'")

    def optimizer_options(self) -> dict[str, Any]:
        """The options of the optimizer, what was not given by default: what a parameter group has."""
        own = OPTIMIZERS[self.optimizer]
        return {"lr": self.lr, "weight_decay": self.weight_decay} | {k: d if getattr(self, k) is None else getattr(self, k) for k, d in own.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config") -> Config:
        """From a mapping such as a parsed file; `source` is named in errors.

        Raises:
            ConfigError: an unknown key (with the nearest one) or a value that its key cannot have.
        """
        return build(cls, values, source)

    @classmethod
    def load(cls, file: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None, **options: Any) -> Config:
        """Keywords over ZINF_* variables (of `env`, default os.environ) over a YAML or JSON file over the defaults."""
        values = read_file(file) if file is not None else {}
        check_keys(cls, values, str(file))
        return build(cls, {**values, **from_env(cls, os.environ if env is None else env), **options}, "config")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a YAML or JSON file would hold them."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in dataclasses.fields(self)}


# ----------------------------------------------------------------------------------------- any dataclass from plain values


def build(cls: type[T], values: Mapping[str, Any], source: str) -> T:
    """An instance of the dataclass `cls` from a mapping; errors begin with `source`."""
    check_keys(cls, values, source)
    try:
        return cls(**values)
    except ConfigError as e:
        raise ConfigError(f"{source}: {e}") from None
    except TypeError as e:  # a key without default is missing
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and f.default is f.default_factory is dataclasses.MISSING]  # type: ignore[arg-type]
        if not missing:
            raise
        raise ConfigError(f"{source}: {' and '.join(missing)} must be given") from e


def convert_fields(instance: Any) -> None:
    """Convert every field of a frozen dataclass in place to its annotated type; for use in __post_init__."""
    hints = typing.get_type_hints(type(instance), include_extras=True)
    for f in dataclasses.fields(instance):
        object.__setattr__(instance, f.name, convert(getattr(instance, f.name), hints[f.name], f.name))


def require(ok: bool, key: str, value: Any, expected: str) -> None:
    """Raise ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{key} is {shown(value)}, expected {expected}")


def shown(value: Any, limit: int = 200) -> str:
    """repr(value) for a message of one line: what is longer is cut."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def check_keys(cls: type, values: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for a key that the dataclass does not have, naming the nearest one it has."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: expected keys and values, found {type(values).__name__}")
    known = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {shown(key)}; {nearest(str(key)[:100], known)}")


def nearest(word: str, choices: Iterable[str]) -> str:
    """ "did you mean 'x'?" if one is near, else all of them."""
    choices = list(choices)
    match = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.6)
    return f"did you mean {match[0]!r}?" if match else f"it can be {', '.join(choices)}"


def convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type `hint` (bool, int, float, str, Literal, Bytes, tuple, union, dataclass), or ConfigError that names `key`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        try:
            return parse_bytes(value)
        except ConfigError as e:
            raise ConfigError(f"{key}: {e}") from None
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, key)
    if origin is Literal:
        value = "off" if value is False and "off" in args else value  # YAML 1.1 reads off as false
        require(value in args, key, value, f"one of {', '.join(map(str, args))}; {nearest(str(value)[:100], map(str, args))}")
        return value
    if origin is tuple:
        items = (value,) if isinstance(value, (str, os.PathLike)) else value
        fixed = args[-1] is not Ellipsis
        require(isinstance(items, (list, tuple)) and (not fixed or len(items) == len(args)), key, value, f"a list of {len(args)}" if fixed else "a list")
        return tuple(convert(item, args[i] if fixed else args[0], key) for i, item in enumerate(items))
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, key)  # type: ignore[arg-type]
    return _SCALARS[hint](value, key)


def _convert_union(value: Any, args: tuple[Any, ...], key: str) -> Any:
    """The first member of the union that takes the value; None and then choices are tried first."""
    if type(None) in args and (value is None or (isinstance(value, str) and value.lower() in ("none", "null", ""))):
        return None
    error = ConfigError(f"{key} must not be empty")
    for arg in sorted((a for a in args if a is not type(None)), key=lambda a: typing.get_origin(a) is not Literal):
        try:
            return convert(value, arg, key)
        except ConfigError as e:
            error = e if error.args[0].endswith("must not be empty") else error
    raise error


def _bool(value: Any, key: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    word = str(value).lower()
    require(isinstance(value, (bool, int, str)) and word in words, key, value, "true or false")
    return words[word]


def _number(kind: type, expected: str) -> Callable[[Any, str], Any]:
    def number(value: Any, key: str) -> Any:
        try:
            # Through float: YAML 1.1 reads 1e-5 as a string, and 1e6 is a fine way to write an int.
            result = kind(value) if isinstance(value, int) and not isinstance(value, bool) else kind(float(value)) if not isinstance(value, bool) else None
            ok = result is not None and result == float(value)
        except (TypeError, ValueError, OverflowError):
            ok = False
        require(ok, key, value, expected)
        return result

    return number


def _str(value: Any, key: str) -> str:
    require(isinstance(value, (str, os.PathLike)), key, value, "text")
    return os.fspath(value)


_SCALARS: dict[Any, Callable[[Any, str], Any]] = {bool: _bool, int: _number(int, "a whole number"), float: _number(float, "a number"), str: _str}


# ------------------------------------------------------------------------------------------------- files and variables


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that a YAML or JSON file holds.

    Raises:
        ConfigError: the file is missing, or is no valid YAML or JSON (with the line), or holds no mapping.
    """
    import yaml

    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder: give a YAML or JSON file")
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as e:
        raise ConfigError(f"{path}: {' '.join(str(e).split())}") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(values).__name__}")
    return values or {}


def from_env(cls: type, env: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `cls` that `env` sets: ZINF_HOST_MEMORY=8GiB sets host_memory. Lists are written [a, b]."""
    import yaml

    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        text = env.get(f"ZINF_{f.name.upper()}")
        if text is not None:
            values[f.name] = yaml.safe_load(text) if text.startswith("[") else text
    return values


def hub_hint() -> str:
    """What to do about a model that could not be had from the hub."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set: give a folder, or unset it"
    return "check the name (owner/name) and the network, and for a gated model `hf auth login`"


def cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where downloads and converted models are kept: $ZINF_CACHE, else $XDG_CACHE_HOME/zinf, else ~/.cache/zinf."""
    env = os.environ if env is None else env
    if env.get("ZINF_CACHE"):
        return Path(env["ZINF_CACHE"]).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zinf"


def expand_path(text: str) -> str:
    """`text` with ~ and $VARIABLES replaced; $ZINF_CACHE is always defined.

    Raises:
        ConfigError: a variable is not set.
    """

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name == "ZINF_CACHE":
            return str(cache_dir())
        if name not in os.environ:
            raise ConfigError(f"{text}: the variable {name} is not set")
        return os.environ[name]

    return os.path.expanduser(re.sub(r"\$(?:\{(\w+)\}|(\w+))", variable, text))
