"""From a Hugging Face folder or hub id to a model whose weights are in a store, and back to a folder.

build_on_meta      the architecture: parameters on the meta device, buffers real
from_pretrained    that, and the weights imported into a store; memory: a few chunks, never a whole tensor
save_extras        everything of a folder that is not weights
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import functools
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zinf import layout, measured
from zinf.aio import open_engine
from zinf.algorithms import moments
from zinf.checkpoint import SafetensorsSource, check, import_store
from zinf.checkpoint.sources import PICKLED, ModuleSource, WithFresh, convert
from zinf.checkpoint.staging import Progress
from zinf.config import Config, hub_hint
from zinf.discover import Unit, discover, layout_of
from zinf.errors import CheckpointError, ConfigError
from zinf.hf.initial import RandomSource, initialise_missing
from zinf.hf.names import Names, Where, match
from zinf.precision import AUTO, keep_in_fp32
from zinf.stored import load_parameter, store_away
from zinf.tiers.manifest import MANIFEST
from zinf.tiers.nvme import Store

log = logging.getLogger("zinf")

# What a folder holds beside weights and the configs that the model itself writes.
EXTRAS = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "preprocessor_config.json", "processor_config.json", "image_processor*.json", "video_preprocessor_config.json", "*.py",
)  # fmt: skip
EXTRA_FOLDERS = ("additional_chat_templates",)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a model came from and where its weights are: `model.zinf_origin`, which an engine takes over."""

    folder: str
    paths: tuple[str, ...]  # the store's directories
    chunk_size: int  # elements
    stateful: frozenset[str]  # parameters that have optimizer state in the store
    names: dict[str, Where]  # parameter -> its place in exported files, in their order
    buffers: dict[str, str]  # persistent buffer -> its name in exported files
    files: tuple[str, ...]  # to be copied at save, relative to the folder
    persistent: dict[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)  # persistent buffer -> (dtype, shape)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for a manifest: of the names, only those that differ."""
        return {
            "source": self.folder,
            "files": list(self.files),
            "names": {k: v if isinstance(v, str) else [dataclasses.astuple(p) for p in v] for k, v in self.names.items() if k != v},
            "buffers": {k: v for k, v in self.buffers.items() if k != v},
            "persistent": self.persistent,
        }

    def buffers_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The persistent buffers of `model` under their names in exported files, for export_safetensors(buffers=...)."""
        return {self.buffers.get(name, name): b for name, b in persistent_buffers(model).items()}

    def save_extras(self, model: Any, out: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """save_extras(), for models that have an origin."""
        save_extras(model, out, self, dtype=dtype)


def resolve(name_or_dir: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None, code: bool = False) -> str:
    """The local folder of a model: itself, or downloaded from the hub (safetensors, configs, tokenizer; `code` adds Python files).

    Raises:
        ConfigError: one line: no such folder, no such model, or no way to download it.
    """
    name = os.fspath(name_or_dir)
    if os.path.isdir(name):
        return name
    if os.path.isfile(name):
        how = f"; {convert(os.path.dirname(name) or '.')}" if PICKLED.fullmatch(os.path.basename(name)) else ""
        raise ConfigError(f"{name} is a file: give the folder that it is in, with its config.json{how}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ConfigError(f"{name} is not a folder, and not a hub id (owner/name)")
    import huggingface_hub

    patterns = ["model*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab*", "*.tiktoken", "*.jinja"] + ["*.py"] * code
    try:
        return huggingface_hub.snapshot_download(name, revision=revision, token=token, allow_patterns=patterns)
    except Exception as e:
        if not isinstance(e, (OSError, ValueError)) and not type(e).__module__.startswith(("huggingface_hub", "httpx", "requests")):
            raise
        why = (str(e).strip().splitlines() or [""])[0].split(". ")[0]
        raise ConfigError(f"{name} is not a folder here, and could not be downloaded from the hub: {hub_hint()} ({type(e).__name__}: {why})") from e


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that this thread makes get their parameters on the meta device; buffers and all else are real.

    A parameter is moved as it is registered, before its values are set; parameters that are shared stay shared. (accelerate's
    init_empty_weights wraps a shared parameter anew in each module, and torch.device("meta") leaves no buffers.)
    """
    register, me = nn.Module.register_parameter, threading.get_ident()
    moved = WeakTensorKeyDictionary()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta and threading.get_ident() == me:
            if param not in moved:
                moved[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                moved[param].__dict__.update(param.__dict__)
            param = moved[param]
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]


def build_on_meta(
    name_or_dir: str | os.PathLike[str],
    *,
    auto_class: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    keep: Sequence[str] | None = None,
    **config_overrides: Any,
) -> nn.Module:
    """The model of a folder's config.json, in eval mode: parameters on meta, tied where the config ties them, buffers real.

    Args:
        auto_class: transformers' AutoModelForCausalLM (None), another Auto class, or a model class.
        dtype: of the parameters, but for those that stay in fp32.
        keep: what stays in fp32, see precision.keep_in_fp32; None: what the architecture asks for.
        config_overrides: attributes of the config.

    Raises:
        ConfigError: no config, a config of quantized weights, or an override that the config does not know.
    """
    import transformers

    auto_class = auto_class or transformers.AutoModelForCausalLM
    folder = resolve(name_or_dir, code=trust_remote_code)
    config = _config(folder, auto_class, trust_remote_code, config_overrides)
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with parameters_on_meta():
        if hasattr(auto_class, "from_config"):
            model = auto_class.from_config(config, trust_remote_code=trust_remote_code, **options)
        else:
            model = auto_class._from_config(config, **options)
    model.tie_weights()
    _set_buffers(model)
    keep_in_fp32(model, (AUTO,) if keep is None else keep, dtype)
    if model.can_generate() and os.path.isfile(os.path.join(folder, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def _config(folder: str, auto_class: Any, trust_remote_code: bool, overrides: dict[str, Any]) -> Any:
    import transformers

    try:
        if hasattr(auto_class, "from_config"):
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        else:
            config = auto_class.config_class.from_pretrained(folder)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{folder} has no usable config.json: {(str(e).strip().splitlines() or [''])[0]}") from e
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else getattr(quantization, "quant_method", None)
        raise ConfigError(f"{folder} has quantized weights ({method}), which zinf does not train; take the checkpoint they were made from")
    for key, value in overrides.items():
        if not hasattr(config, key):
            raise ConfigError(f"{type(config).__name__} has no attribute {key} that could be set to {value!r}")
        setattr(config, key, value)
    config.name_or_path = folder
    return config


@torch.no_grad()
def _set_buffers(model: Any) -> None:
    """Compute the buffers again outside of the constructor, where the default dtype is not the model's: GPT-J's positions differ."""
    from transformers import PreTrainedModel

    def walk(module: nn.Module, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        if module._buffers:
            owner._init_weights(module)  # of parameters on meta it changes nothing
        for child in module.children():
            walk(child, owner)

    walk(model, model)


def open_source(model: nn.Module, folder: str, *, ignore_unexpected: bool = False) -> tuple[SafetensorsSource, Names]:
    """The weights of a folder as a source for the layout of `model`, and how their names match. The caller closes the source.

    Raises:
        CheckpointError: see SafetensorsSource; a conversion that zinf does not stream; tensors that should be equal and are not.
    """
    with SafetensorsSource(folder) as plain:
        names = match(model, {name: t.shape for name, t in plain.tensors.items()})
        for one, other in names.copies:
            if not plain.equal(one, other):
                raise CheckpointError(f"{folder}: {one} and {other} differ, but the config says they are one; set tie_word_embeddings=False to have both")
    ignore = [*names.buffers.values(), *(copy for _, copy in names.copies), *(names.unexpected if ignore_unexpected else names.ignored)]
    return SafetensorsSource(folder, names=names.load, ignore=ignore), names


def from_pretrained(
    name_or_dir: str | os.PathLike[str],
    *,
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    run_name: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    keep_in_fp32: Sequence[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    trainable: Callable[[str], bool] | bool | None = None,
    ignore_unexpected: bool = False,
    chunk_size: int | None = None,
    blocks: Sequence[str] | None = None,
    leaf_bytes: int | None = None,
    crash_safe: bool = True,
    optimizer: str = "adamw",
    momentum: float | None = None,
    ema_decay: float | None = None,
    backend: str = "auto",
    revision: str | None = None,
    initialise: int | None = None,
    progress: Progress | None = None,
    fits: Callable[[layout.Model, Sequence[Unit]], None] | None = None,
    **build: Any,
) -> nn.Module:
    """A transformers model whose weights are in a store, ready for zinf.Engine. Host memory: a few chunks.

    An import that was killed goes on where it was. The checkpoint is checked in full before the store is made. The model has
    `zinf_origin` (Origin); until an engine takes it, an operation on a parameter reads it from the store (zinf.stored), so adapters can
    be put around layers, and embeddings resized. Parameters outside of the blocks that the checkpoint has not (a new head) are
    initialised as transformers does, and named in the log.

    Args:
        name_or_dir: a folder, or a hub id.
        nvme_path: one path or several; the store is the folder `run_name` in each.
        run_name: default: that of Config.
        dtype: of the weights; trainable bf16 and fp16 weights keep what they cannot hold of the checkpoint in their state.
        keep_in_fp32: classes of modules or patterns of names whose weights are fp32 all the same, see Config.keep_in_fp32; None: what the
            architecture asks for ("auto").
        resume: take the store that stands there, at whatever step it is, if it is of this model; import only if there is none.
        overwrite: replace a store that stands there.
        trainable: whether parameters are trained, or of each name whether it is; default: as the model is built. Frozen ones have no
            state in the store: give False for a model that gets adapters.
        ignore_unexpected: go on if the checkpoint has tensors that the model has not.
        chunk_size: elements of a chunk; default: that of Config, or of the store that is resumed.
        blocks, leaf_bytes: class names of the blocks, and the size from which on a layer travels by itself, see discover(); as for the engine.
        optimizer, momentum, ema_decay: what the engine will be given: what a new store has room for follows from them.
        initialise: a seed: random weights, as transformers initialises the model, a layer at a time; the folder needs no more than config.json.
        progress: called with (bytes imported, bytes in all).
        fits: called with layout and units before anything is imported; raises if there is no point in it.
        build: see build_on_meta: auto_class, attn_implementation, trust_remote_code and attributes of the config.

    Raises:
        ConfigError, CheckpointError, StoreError, OSError: one line; no store is left behind that could be taken for a whole one.
    """
    folder = resolve(name_or_dir, revision=revision, code=build.get("trust_remote_code", False))
    model = build_on_meta(folder, dtype=dtype, keep=keep_in_fp32, **build)
    for name, p in model.named_parameters() if trainable is not None else ():
        p.requires_grad_(trainable(name) if callable(trainable) else bool(trainable))
    drives = [nvme_path] if isinstance(nvme_path, (str, os.PathLike)) else list(nvme_path)
    paths = [os.path.join(os.fspath(drive), run_name or Config.run_name) for drive in drives]
    resume = resume and os.path.lexists(os.path.join(paths[0], MANIFEST))
    leaf_bytes = leaf_bytes or Config.leaf_bytes
    units = discover(model, blocks, leaf_bytes)
    source: SafetensorsSource | RandomSource
    if initialise is None:
        source, names = open_source(model, folder, ignore_unexpected=ignore_unexpected)
    else:
        source, names = RandomSource(model, units, initialise), Names.same(model)
    fresh = initialise_missing(model, names, {name for unit in units if unit.block for name, _ in unit.params})
    if fresh:
        units = discover(model, blocks, leaf_bytes)
    with contextlib.closing(source):
        values = WithFresh(source, ModuleSource(model, fresh)) if fresh else source
        keeps = moments(Config(optimizer=optimizer, momentum=momentum, ema_decay=ema_decay))  # type: ignore[arg-type]
        plan = layout_of(units, chunk_size or Config.chunk_size, moments=keeps)
        if fits is not None:
            fits(plan, units)
        check(plan, values)
        if isinstance(source, SafetensorsSource):
            load_buffers(model, source, names)
        if resume:
            plan = _reuse(paths, plan, chunk_size is None, backend)
        stateful = frozenset(p.name for shard in plan.shards for run in shard.runs if run.trainable for p in run.params)
        origin = Origin(os.path.abspath(folder), tuple(paths), plan.chunk, stateful, names.save, names.buffers, extra_files(folder), _describe(model))
        if not resume:
            with contextlib.closing(open_engine(backend, **measured.io_options(paths, None, None))) as io:
                import_store(
                    paths, plan, values, io, mark=source.mark(), extra={"origin": origin.to_json()}, crash_safe=crash_safe, overwrite=overwrite, anew=fresh,
                    shares=measured.shares(paths), progress=progress,
                    check_unchanged=source.check_unchanged if isinstance(source, SafetensorsSource) else None,
                )  # fmt: skip
    make_placeholders(model)
    for name, p in model.named_parameters():
        if name in fresh:  # the store has the values now
            p.data = torch.full((), float("nan"), dtype=p.dtype).expand(p.shape)
        store_away(p, name, functools.partial(load_parameter, origin.paths, name))
    model.zinf_origin = origin  # type: ignore[assignment]
    return model


def _reuse(paths: Sequence[str], plan: layout.Model, any_chunk: bool, backend: str) -> layout.Model:
    """The layout of the store at `paths`, which must be that of `plan` (but for the chunk size, if any will do)."""
    with contextlib.closing(open_engine(backend)) as io:
        expect = plan
        if any_chunk:
            with contextlib.closing(Store.open(paths, io, verify="off", writable=False)) as store:
                expect = dataclasses.replace(plan, chunk=store.model.chunk)
        Store.open(paths, io, verify="off", expect=expect, writable=False).close()
    return expect


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds, each under its first name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in parameters and isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _describe(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(b.dtype).removeprefix("torch."), tuple(b.shape)) for name, b in persistent_buffers(model).items()}


def make_placeholders(model: nn.Module) -> None:
    """Put CPU parameters of true shape and dtype, but of one element (NaN) expanded, in the place of those on meta.

    The data of a parameter on meta cannot be set, so an engine could not let it be a view of a slab.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if p not in made:
                    made[p] = nn.Parameter(torch.full((), float("nan"), dtype=p.dtype).expand(p.shape), requires_grad=p.requires_grad)
                module._parameters[name] = made[p]


def load_buffers(model: nn.Module, source: SafetensorsSource, names: Names) -> None:
    """Set the persistent buffers of `model` to what the checkpoint has of them.

    Raises:
        CheckpointError: a buffer of another shape.
    """
    for name, tensor in names.buffers.items():
        buffer, value = model.get_buffer(name), source.load(tensor)
        if value.shape != buffer.shape:
            raise CheckpointError(f"{source.where}: {tensor} is {list(value.shape)} there and {list(buffer.shape)} in the model")
        buffer.copy_(value)


def extra_files(folder: str) -> tuple[str, ...]:
    """The files of a folder that a saved model should have too: tokenizer, chat templates, processors, code."""
    files = [f for f in sorted(os.listdir(folder)) if any(fnmatch.fnmatch(f, p) for p in EXTRAS) and not f.endswith(".safetensors")]
    for sub in EXTRA_FOLDERS:
        if os.path.isdir(os.path.join(folder, sub)):
            files += [os.path.join(sub, f) for f in sorted(os.listdir(os.path.join(folder, sub)))]
    return tuple(f for f in files if os.path.isfile(os.path.join(folder, f)))


def save_extras(model: Any, out: str | os.PathLike[str], origin: Origin | None = None, *, dtype: torch.dtype | None = None) -> None:
    """Write config.json and generation_config.json of `model` to `out`, and copy the files that `origin` lists.

    Args:
        origin: default: that of the model, if it has one.
        dtype: of the exported weights, for the config; None: the model's.

    Raises:
        OSError: a file cannot be written.
    """
    os.makedirs(out, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)
    origin = origin or getattr(model, "zinf_origin", None)
    if origin is None:
        return
    for file in origin.files:
        target = os.path.join(out, file)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isfile(source := os.path.join(origin.folder, file)):
            shutil.copyfile(source, target)
