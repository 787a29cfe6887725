"""The training loop of `zinf train`: from a YAML file to a trained model, and on from the last commit after whatever stopped it.

What a run is at step n follows from its file, its data and the store's last commit alone: the learning rate is a pure function of
the step, the order of the rows one of (seed, epoch), and the position travels in the commit beside the weights. So a run that was
killed goes on with the same bits as one that was not.

The loop says what happens through a `Watch`; it prints nothing itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

from zinf.config import Config, build, convert_fields, expand_path, hub_hint, option, read_file, require
from zinf.data import DataConfig, Loader, Rows, find_files, tokenise
from zinf.errors import ConfigError
from zinf.trace.recorder import log_folder
from zinf.trace.runlog import TRACE, RunLog


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The `schedule` section: the factor on the learning rate."""

    kind: Literal["cosine", "linear", "constant"] = option("cosine", "how the learning rate falls after the warmup")
    warmup_steps: int = option(0, "steps in which it rises to lr, in a straight line")
    final: float = option(0.0, "the fraction of lr at the last step")

    def __post_init__(self) -> None:
        convert_fields(self)
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "zero or more")
        require(0 <= self.final <= 1, "final", self.final, "a fraction from 0 to 1")

    def factor(self, step: int, steps: int) -> float:
        """For step 0, 1, ... of `steps`. Warmup ends, and decay begins, at factor 1."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps))
        if self.kind == "cosine":
            return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))
        return 1.0 if self.kind == "constant" else self.final + (1 - self.final) * (1 - done)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training file. Paths may hold ~ and $VARIABLES; $ZINF_CACHE is zinf's cache folder."""

    model: str = dataclasses.field(metadata={"help": "folder of a Hugging Face model, or its name on the hub"})
    data: DataConfig = dataclasses.field(metadata={"help": "section: what to learn from"})
    engine: Config = dataclasses.field(default_factory=Config, metadata={"help": "section: everything the engine can be told"})
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig, metadata={"help": "section: the learning rate over time"})
    initialise: int | None = option(None, "a seed: begin with random weights; `model` needs a config.json only")
    tokenizer: str | None = option(None, "folder, or name on the hub, whose tokenizer is taken; default: that of `model`")
    output: str | None = option(None, "folder for the trained model, a normal Hugging Face folder; none: keep it in the store only")
    log: str | None = option(None, "folder for what zinf report reads: a line for each step, the trace; default: beside the store, run_name-log")
    dtype: Literal["bf16", "fp16", "fp32"] = option("bf16", "dtype of the weights (an fp32 master is always kept)")
    steps: int | None = option(None, "optimizer steps; default: as many as `epochs` has")
    epochs: float = option(1.0, "times through the data, where `steps` is not given")
    batch_size: int = option(1, "rows of a forward and backward")
    eval_rows: int = option(16, "rows to measure the held-out loss on, evenly spaced over the eval files")
    eval_every: int | None = option(None, "steps between two measurements; default: only before and after")
    seed: int = option(0, "of everything random but the order of the data (that is data.seed)")

    def __post_init__(self) -> None:
        convert_fields(self)
        for key in ("steps", "epochs", "batch_size", "eval_rows", "eval_every"):
            value = getattr(self, key)
            require(value is None or value > 0, key, value, "a positive number")
        require(self.initialise is None or self.initialise >= 0, "initialise", self.initialise, "zero or more")
        object.__setattr__(self, "model", _model_folder(self.model))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", _model_folder(self.tokenizer, "tokenizer"))
        for key in ("output", "log"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, expand_path(getattr(self, key)))
        paths = tuple(expand_path(p) for p in self.engine.nvme_path)
        object.__setattr__(self, "engine", dataclasses.replace(self.engine, nvme_path=paths))

    @classmethod
    def load(cls, file: str | os.PathLike[str], overrides: list[str] | tuple[str, ...] = (), engine: dict[str, Any] | None = None) -> TrainConfig:
        """From a YAML or JSON file; `overrides` are "key=value" with dots for sections; `engine` adds to the engine section.

        ZINF_* variables stand between the file and the overrides.
        """
        from zinf.config import from_env

        values = read_file(file)
        section = values["engine"] = dict(values.get("engine") or {})
        section.update(from_env(Config, os.environ))
        section.update(engine or {})
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"{text!r}: write KEY=VALUE, such as steps=100 or engine.lr=2e-5")
            _set(values, key.strip().split("."), value.strip(), key)
        return build(cls, values, str(file))

    def log_folder(self) -> str:
        """Where the run's log is."""
        if self.log is not None:
            return self.log
        return log_folder(os.path.join(self.engine.nvme_path[0], self.engine.run_name) if self.engine.nvme_path else self.engine.run_name)


def _set(values: dict[str, Any], keys: list[str], text: str, whole: str) -> None:
    import yaml

    for key in keys[:-1]:
        values[key] = inner = dict(values.get(key) or {}) if isinstance(values.get(key), dict | None) else None
        if inner is None:
            raise ConfigError(f"{whole}: {key} is not a section")
        values = inner
    values[keys[-1]] = yaml.safe_load(text)


def _model_folder(text: str, key: str = "model") -> str:
    """The path of a model's folder, or a name on the hub as it stands. Raises ConfigError for a path where nothing is."""
    path = expand_path(text)
    if os.path.isdir(path):
        return path
    looks_like_path = path != text or text.startswith((".", "/")) or text.count("/") > 1
    hint = "; `zinf demo --prepare` makes it" if "$ZINF_CACHE" in text else ""
    require(not looks_like_path, key, path, f"a folder with a Hugging Face model{hint}")
    return text


# ------------------------------------------------------------------------------------------------------------ the loop


class EngineLike(Protocol):
    """What the loop needs of zinf.Engine; tests put a plain in-memory one in its place."""

    optimizer: Any
    extra: dict[str, Any]

    @property
    def global_step(self) -> int: ...
    def __call__(self, **batch: Any) -> Any: ...
    def backward(self, loss: Any) -> Any: ...
    def step(self, extra: dict[str, Any]) -> Any: ...
    def synchronize(self) -> None: ...
    def restore_rng(self) -> None: ...
    def eval(self) -> Any: ...
    def train(self) -> Any: ...
    def plan(self) -> list[str]: ...
    def stats(self) -> dict[str, Any]: ...
    def save_pretrained(self, folder: str) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Step:
    """One step, as a progress bar wants to know it. `grad_norm` is nan where the step was skipped; bytes are NVMe traffic since the loop began."""

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    tokens: int
    bytes_read: int
    bytes_written: int


class Watch:
    """Is told what happens; does nothing with it."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def importing(self, done: int, total: int) -> None:
        """`done` of `total` bytes of the checkpoint are in the store."""

    def plan(self, lines: list[str]) -> None:
        """The engine's plan, before any training."""

    def begin(self, step: int, steps: int) -> None:
        """Training begins after `step` steps of `steps`."""

    def step(self, step: Step) -> None:
        """A step is done."""

    def evaluated(self, step: int, loss: float) -> None:
        """The held-out loss after `step` steps."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    evals: (step, held-out loss), of earlier processes of the run too.
    stats: of this process's training, evaluation apart: seconds and waited by verb, bytes_read, bytes_written, steps, params.
    """

    step: int
    steps: int
    finished: bool
    evals: list[tuple[int, float]]
    stats: dict[str, Any]
    output: str | None
    log: str = ""


def open_engine(config: TrainConfig, fresh: bool, watch: Watch) -> EngineLike:
    """The engine on the store that the config names: reopened at its last commit, or imported anew."""
    import torch

    from zinf.engine import Engine
    from zinf.hf.loading import from_pretrained
    from zinf.memory import check_budgets

    e = config.engine
    if not e.nvme_path:
        raise ConfigError("engine.nvme_path must be given: a folder on the NVMe drive that is to hold weights and optimizer state")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.dtype]
    model = from_pretrained(
        config.model,
        nvme_path=e.nvme_path,
        run_name=e.run_name,
        dtype=dtype,
        keep_in_fp32=e.keep_in_fp32,
        resume=not fresh,
        overwrite=fresh,
        chunk_size=e.chunk_size if e.chunk_size != Config.chunk_size else None,
        blocks=e.blocks,
        leaf_bytes=e.leaf_bytes,
        crash_safe=e.crash_safe,
        optimizer=e.optimizer,
        momentum=e.momentum,
        ema_decay=e.ema_decay,
        backend=e.backend,
        initialise=config.initialise,
        progress=watch.importing,
        fits=lambda layout, units: check_budgets(e, layout, units),
    )
    if e.trace is True:
        e = dataclasses.replace(e, trace=os.path.join(config.log_folder(), TRACE))
    return Engine(model, e)


def load_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    if os.path.isdir(folder) and not any(os.path.exists(os.path.join(folder, name)) for name in ("config.json", "tokenizer_config.json")):
        raise ConfigError(f"model: {folder} has no config.json: give the folder of a Hugging Face model (save_pretrained makes one)")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as e:
        if not os.path.isdir(folder):
            raise ConfigError(f"model: there is no folder {folder} here, and no such model could be had from the hub ({type(e).__name__}): {hub_hint()}") from e
        raise ConfigError(f"model: no tokenizer could be loaded from {folder}: text needs one; put it there with tokenizer.save_pretrained") from e


def check_output(folder: str | None) -> None:
    """Try now whether the trained model's folder can be made, since nobody wants to hear after training that it cannot.

    Raises:
        ConfigError: it cannot be made, or not be written to.
    """
    if folder is None:
        return
    new = not os.path.isdir(folder)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"output: {folder} cannot be made ({e.strerror}): choose another folder") from e
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"output: {folder} is not writable for this user: change its mode, or choose another folder")
    if new:
        os.rmdir(folder)


def train(
    config: TrainConfig,
    *,
    fresh: bool = False,
    stop: Callable[[], bool] = lambda: False,
    watch: Watch | None = None,
    open_engine: Callable[[TrainConfig, bool, Watch], EngineLike] = open_engine,
    tokenizer: Any = None,
) -> Result:
    """Run `config` to its end, or until `stop()` says so after a step; then everything up to that step is committed.

    Args:
        fresh: forget what an earlier run with the same store has learned.
        stop: asked after each step.
        watch: is told what happens.
        open_engine, tokenizer: for tests.
    """
    import torch

    watch = watch or Watch()
    check_output(config.output)
    tokenizer = load_tokenizer(config.tokenizer or config.model) if tokenizer is None else tokenizer
    train_rows = Rows(tokenise(find_files(config.data.train), tokenizer), config.data.max_length, config.data.packing)
    eval_rows = Rows(tokenise(find_files(config.data.eval), tokenizer), config.data.max_length, config.data.packing) if config.data.eval else None
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    loader = Loader(train_rows, config.batch_size, config.data.seed, config.data.shuffle, pad)
    per_step = config.batch_size * config.engine.gradient_accumulation_steps
    steps = config.steps if config.steps is not None else max(1, math.ceil(config.epochs * len(train_rows) / per_step))
    torch.manual_seed(config.seed)
    with open_engine(config, fresh, watch) as engine:  # leaving it well commits the last step; an error leaves the last commit
        return _Run(config, engine, loader, eval_rows, steps, watch).train(stop)


class _Run:
    """One process's part of a run."""

    def __init__(self, config: TrainConfig, engine: EngineLike, loader: Loader, eval_rows: Rows | None, steps: int, watch: Watch) -> None:
        self.config, self.engine, self.loader, self.eval_rows, self.steps, self.watch = config, engine, loader, eval_rows, steps, watch
        self.evals: list[tuple[int, float]] = []
        self.begun = engine.global_step
        self.told = False  # was the forecast compared with?
        self.meter = _Meter(engine)
        self.log = RunLog(config.log_folder(), fresh=engine.global_step == 0)
        if engine.global_step:
            self._resume(engine.extra)

    def _resume(self, extra: dict[str, Any]) -> None:
        if "data" not in extra:
            raise ConfigError(f"run {self.config.engine.run_name!r} was not committed by `zinf train` (no data position): take another run_name, or --fresh")
        self.loader.load_state_dict(extra["data"])
        self.evals = [(step, loss) for step, loss in extra["evals"]]
        now = self._settings()
        changed = [f"{key} {old} -> {now[key]}" for key, old in extra["settings"].items() if key in now and now[key] != old]
        if changed:
            self.watch.note(f"not the run that was interrupted: {', '.join(changed)}")
        self.engine.restore_rng()

    def _settings(self) -> dict[str, Any]:
        """What the numbers of a run depend on, beside the data."""
        e = self.config.engine
        keys = ("optimizer", "ema_decay", "decay_norms_and_biases", "max_grad_norm", "max_grad_value", "gradient_accumulation_steps")
        values = {key: getattr(e, key) for key in keys} | e.optimizer_options() | dataclasses.asdict(self.config.schedule)
        values |= {"batch_size": self.config.batch_size, "steps": self.steps}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def train(self, stop: Callable[[], bool]) -> Result:
        with contextlib.closing(self.log):
            return self._train(stop)

    def _train(self, stop: Callable[[], bool]) -> Result:
        engine, every = self.engine, self.config.eval_every
        self.watch.plan(engine.plan())
        self.log.write("begin", step=engine.global_step, steps=self.steps, **_about(self.config, engine))
        if engine.global_step == 0:
            self.evaluate()
        self.watch.begin(engine.global_step, self.steps)
        stopped = False
        self.meter.start()
        while engine.global_step < self.steps and not stopped:
            if every and engine.global_step and engine.global_step % every == 0:
                self.evaluate()
            self.one_step()
            stopped = stop()
        finished = engine.global_step >= self.steps
        engine.synchronize()
        self.meter.stop()
        if finished:
            self.evaluate()
            if self.config.output:
                engine.save_pretrained(self.config.output)
        stats = {**self.meter.total, "steps": engine.global_step - self.begun, "params": engine.stats()["params"]}
        self.log.write("end", step=engine.global_step, finished=finished)
        return Result(engine.global_step, self.steps, finished, self.evals, stats, self.config.output if finished else None, self.log.folder)

    def one_step(self) -> None:
        """All backwards of one optimizer step, and the step."""
        from zinf.heads import count_targets

        engine, config = self.engine, self.config
        began, before = time.perf_counter(), self.meter.now()
        engine.train()
        lr = config.engine.lr * config.schedule.factor(engine.global_step, self.steps)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        backwards = config.engine.gradient_accumulation_steps
        batches = [self.loader.next_batch() for _ in range(backwards)]
        counts = [count_targets(batch["labels"]) for batch in batches]
        mean, tokens = 0.0, 0  # over all tokens of the step that are learned, however backwards share them
        for batch, count in zip(batches, counts, strict=True):
            loss = engine(**batch).loss
            share = count / sum(counts)
            engine.backward(loss * share if share != 1 else loss)
            mean += float(loss.detach()) * share
            tokens += batch["input_ids"].numel()
        done = engine.step(extra={"data": self.loader.state_dict(), "evals": [list(e) for e in self.evals], "settings": self._settings()})
        self._tell_forecast()
        now = self.meter.now()
        seconds = time.perf_counter() - began
        values = {"loss": mean, "grad_norm": done.grad_norm, "lr": lr, "skipped": done.skipped, "tokens": tokens}
        self.log.write("step", step=engine.global_step, seconds=seconds, **values, **_since(before, now), resident=engine.stats().get("resident"), rss=_rss())
        self.watch.step(Step(engine.global_step, self.steps, mean, lr, done.grad_norm, done.skipped, tokens, now["bytes_read"], now["bytes_written"]))

    def _tell_forecast(self) -> None:
        """Once the engine has compared its steps with the plan."""
        forecast = None if self.told else self.engine.stats().get("forecast")
        if forecast is not None:
            self.told = True
            self.watch.note(forecast["text"])
            self.log.write("forecast", step=self.engine.global_step, **forecast)

    def evaluate(self) -> None:
        """The mean loss of a token over the held-out rows, once per step."""
        step = self.engine.global_step
        if self.eval_rows is None or (self.evals and self.evals[-1][0] == step):
            return
        import torch

        from zinf.heads import count_targets

        self.engine.synchronize()  # what is pending is training's cost
        with self.meter.paused(), torch.no_grad():
            self.engine.eval()
            total, count = 0.0, 0
            for batch in self.eval_rows.spread(self.config.eval_rows, self.config.batch_size, self.loader.pad):
                targets = count_targets(batch["labels"])
                total += float(self.engine(**batch).loss) * targets
                count += targets
        self.evals.append((step, total / count))
        self.log.write("eval", step=step, loss=total / count)
        self.watch.evaluated(step, total / count)


def _since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What one step has added, by verb."""
    names = {"seconds": "busy", "waited": "waited", "bytes": "bytes"}
    return {name: {verb: round(n - before[key].get(verb, 0), 6) for verb, n in now[key].items()} for key, name in names.items()}


def _rss() -> int:
    """The largest resident set this process has had, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _about(config: TrainConfig, engine: EngineLike) -> dict[str, Any]:
    """What a report of the run wants to know beside its steps."""
    from zinf import __version__, measured

    drives, host = measured.drives(config.engine.nvme_path), measured.load().host
    bounds = {f"nvme_{key}": sum(getattr(d, key) for d in drives) for key in ("read", "write", "both")} if drives else {}
    bounds |= {"link": host.link} if host is not None and host.link is not None else {}
    recorder = getattr(getattr(engine, "trace", None), "recorder", None)
    values = dataclasses.asdict(config)
    values["engine"] = {f.name: v for f in dataclasses.fields(Config) if (v := getattr(config.engine, f.name)) != f.default}
    about = {"version": __version__, "model": config.model, "params": engine.stats()["params"], "plan": engine.plan(), "bounds": bounds, "config": values}
    return {**about, "trace": recorder.path if recorder is not None else None, "pid": os.getpid()}


class _Meter:
    """What training cost by the engine's own count, pauses left out."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._since: dict[str, Any] | None = None
        self.total: dict[str, Any] = {"bytes_read": 0, "bytes_written": 0, "seconds": {}, "waited": {}, "bytes": {}}

    def start(self) -> None:
        self._since = self._engine.stats()

    def stop(self) -> None:
        self.total, self._since = self.now(), None

    def now(self) -> dict[str, Any]:
        """The total up to now."""
        if self._since is None:
            return self.total
        stats, since, total = self._engine.stats(), self._since, self.total
        new: dict[str, Any] = {key: total[key] + stats[key] - since[key] for key in ("bytes_read", "bytes_written")}
        for key in ("seconds", "waited", "bytes"):
            new[key] = {verb: total[key].get(verb, 0) + s - since.get(key, {}).get(verb, 0) for verb, s in stats.get(key, {}).items()}
        return new

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens in the block."""
        running = self._since is not None
        if running:
            self.stop()
        yield
        if running:
            self.start()
