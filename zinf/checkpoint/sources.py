"""Where the elements of parameters come from: safetensors files, or a module in memory.

A source gives a reader for each parameter; a reader fills a buffer with any range of the parameter's elements. Files are read
into the caller's buffer, past the page cache or dropped from it behind (direct.py): no mapping, so no growth of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from zinf import layout
from zinf.checkpoint import direct
from zinf.checkpoint.format import TORCH, Tensor, read_header
from zinf.checkpoint.staging import TRANSFER, Part, cut
from zinf.errors import CheckpointError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # what can be imported

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

PICKLED = re.compile(r"(pytorch_model|model|consolidated).*\.(bin|pt|pth|ckpt)(\.index\.json)?")


def convert(folder: str) -> str:
    """How a user gets from a folder of pickled weights to one that can be read, as a command; transformers loads with weights_only."""
    made = "AutoModelForCausalLM"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError), open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        if re.fullmatch(r"\w+", name := json.load(f)["architectures"][0]):
            made = name
    where, out = os.path.abspath(folder), os.path.abspath(folder) + "-safetensors"
    code = f"import sys; from transformers import {made} as M; a, b = sys.argv[1:]; M.from_pretrained(a, dtype='auto').save_pretrained(b)"
    if any(os.path.isfile(os.path.join(folder, name)) for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")):
        code += "; from transformers import AutoTokenizer as T; T.from_pretrained(a).save_pretrained(b)"
    command = shlex.join(["python", "-c", code, where, out])
    return f"pickled weights can run code, so zinf opens safetensors only; convert them once, to {shlex.quote(out)}: {command}"


class Reader(Protocol):
    """One parameter of a source."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, of `dtype`, contiguous, CPU) with elements start, start + 1, ... of the flat parameter."""


class Source(Protocol):
    """A set of parameters by name."""

    where: str  # for messages: a folder, a class

    def open(self, name: str) -> Reader:
        """Raises CheckpointError, one clause, if the parameter is not there or cannot be read as floats."""

    def unexpected(self, params: Collection[str]) -> list[str]:
        """Names of tensors that none of these parameters uses and that nobody said to ignore."""


def check(model: layout.Model, source: Source) -> dict[str, Reader]:
    """A reader for each parameter of `model`.

    Raises:
        CheckpointError: lists every parameter that is missing, misshapen or not of floats, and every tensor nobody asked for.
    """
    readers: dict[str, Reader] = {}
    problems = []
    params = [p for shard in model.shards for run in shard.runs for p in run.params]
    for p in params:
        try:
            readers[p.name] = reader = source.open(p.name)
        except CheckpointError as e:
            problems.append(str(e))
            continue
        if tuple(reader.shape) != ((p.numel,) if isinstance(reader, _Parts) else p.shape):
            problems.append(f"{p.name} is {list(reader.shape)} there and {list(p.shape)} in the model")
    problems += [f"{name} is in the checkpoint and not in the model" for name in source.unexpected([p.name for p in params])]
    if problems:
        raise CheckpointError(f"{source.where} does not fit the model in {len(problems)} places: {'; '.join(problems)}")
    return readers


class SafetensorsSource:
    """The tensors of a Hugging Face folder: model.safetensors, or the files that model.safetensors.index.json lists.

    Args:
        folder: the folder, or one .safetensors file.
        names: for parameters whose name is another in the files: that name, or the parts they are made of. Several
            parameters may use one tensor.
        ignore: tensors of the files that need not belong to a parameter (buffers, say).

    Raises:
        CheckpointError: no safetensors there (says how to convert pickled weights), an index or a file that is malformed.
        OSError: a file cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], *, names: Mapping[str, str | Sequence[Part]] | None = None, ignore: Collection[str] = ()) -> None:
        self.where = os.fspath(folder)
        self.names = dict(names or {})
        self.ignore = set(ignore)
        self.tensors: dict[str, Tensor] = {}
        self._fds: dict[str, int] = {}
        self._direct: dict[str, int | None] = {}
        self._opened: dict[str, tuple[int, int]] = {}  # size and time of change
        try:
            files, index = _files(self.where)
            for path in files:
                self._fds[path] = fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._direct[path] = direct.open_direct(path, os.O_RDONLY)
                self._opened[path] = _written(fd)
                for name, tensor in read_header(fd, path).items():
                    self._add(name, tensor, index)
            for name, file in index.items():
                if name not in self.tensors:
                    raise CheckpointError(f"{os.path.join(self.where, INDEX)} says that {name} is in {file}, which does not have it; save the checkpoint again")
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, tensor: Tensor, index: Mapping[str, str]) -> None:
        """Take a tensor; of two with the same name, the one the index means."""
        if name in self.tensors and name not in index:
            raise CheckpointError(f"{self.where}: tensor {name} is in {self.tensors[name].path} and in {tensor.path}, and the index does not say which counts")
        if name not in index or index[name] == os.path.basename(tensor.path):
            self.tensors[name] = tensor

    @property
    def files(self) -> list[str]:
        """Paths of the safetensors files."""
        return list(self._fds)

    def open(self, name: str) -> Reader:
        parts = self.names.get(name, name)
        if isinstance(parts, str):
            if parts not in self.tensors:
                raise CheckpointError(f"{name} is missing" + (f" (its name there would be {parts})" if parts != name else ""))
            return self._reader(parts)
        readers = []
        for part in parts:
            if part.name not in self.tensors:
                raise CheckpointError(f"{name} is missing (it is made of {len(parts)} tensors, and {part.name} is not there)")
            reader = self._reader(part.name)
            if reader.shape != part.shape:
                raise CheckpointError(f"{part.name}, a part of {name}, is {list(reader.shape)} there and should be {list(part.shape)}")
            readers.append(reader)
        return _Parts(name, readers, parts)

    def _reader(self, tensor: str) -> _FileReader:
        t = self.tensors[tensor]
        dtype = TORCH.get(t.dtype)
        if dtype not in FLOATS:
            raise CheckpointError(f"{tensor} has dtype {t.dtype}, which zinf does not stream; dequantize the checkpoint to bf16 first")
        return _FileReader(self._fds[t.path], self._direct[t.path], t, dtype)

    def load(self, tensor: str) -> torch.Tensor:
        """A whole tensor, by its name in the files, in its own dtype. For small ones: it is read into memory."""
        t = self.tensors[tensor]
        if t.dtype not in TORCH:
            raise CheckpointError(f"{t.path}: torch has no dtype for {t.dtype}, that of {tensor}")
        out = torch.empty(t.end - t.begin, dtype=torch.uint8)
        pread(self._fds[t.path], t.path, t.begin, out)
        return out.view(TORCH[t.dtype]).reshape(t.shape)

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors are the same, bit for bit."""
        a, b = self.tensors[one], self.tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        x, y = torch.empty(2, TRANSFER, dtype=torch.uint8).unbind()
        for at, n in cut(a.end - a.begin, 1):
            pread(self._fds[a.path], a.path, a.begin + at, x[:n])
            pread(self._fds[b.path], b.path, b.begin + at, y[:n])
            if not torch.equal(x[:n], y[:n]):
                return False
        return True

    def unexpected(self, params: Iterable[str]) -> list[str]:
        used = set(self.ignore)
        for name in params:
            parts = self.names.get(name, name)
            used.update([parts] if isinstance(parts, str) else [part.name for part in parts])
        return [name for name in self.tensors if name not in used]

    def mark(self) -> str:
        """Of the files as they are now (names, sizes, times of change, inodes), their headers, and what is read from where; another one means other values.

        The kernel's own time of change too: tools that copy set the other back.
        """
        infos = [(os.path.basename(path), os.fstat(fd)) for path, fd in sorted(self._fds.items())]
        of_files = [[name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino] for name, info in infos]
        of_tensors = [[t.name, t.dtype, t.shape, os.path.basename(t.path), t.begin] for _, t in sorted(self.tensors.items())]
        of_names = {name: parts if isinstance(parts, str) else [dataclasses.astuple(p) for p in parts] for name, parts in self.names.items()}
        return hashlib.sha256(json.dumps([of_files, of_tensors, of_names], sort_keys=True).encode()).hexdigest()[:16]

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file was written since it was opened: what was read may be of both. (Removed or replaced ones are read on.)"""
        for path, fd in self._fds.items():
            if _written(fd) != self._opened[path]:
                raise CheckpointError(f"{path} was changed while it was imported: nothing was committed; import again when it stays as it is")

    def close(self) -> None:
        """Close the files; idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])
        while self._direct:
            direct.close(self._direct.popitem()[1])

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _written(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_size, info.st_mtime_ns


def _files(where: str) -> tuple[list[str], dict[str, str]]:
    """The safetensors files of a folder, and the index (tensor -> file name; empty for a single file)."""
    if os.path.isfile(where):
        return [where], {}
    single, index = os.path.join(where, SINGLE), os.path.join(where, INDEX)
    if os.path.isfile(single):
        return [single], {}
    if not os.path.isfile(index):
        if not os.path.isdir(where):
            raise CheckpointError(f"{where} is not a folder")
        if pickled := sorted(filter(PICKLED.fullmatch, os.listdir(where))):
            raise CheckpointError(f"{where} has no safetensors but {pickled[0]}; {convert(where)}")
        raise CheckpointError(f"{where} has neither {SINGLE} nor {INDEX}")
    try:
        with open(index, encoding="utf-8") as f:
            weight_map = json.load(f)["weight_map"]
        if not weight_map or not all(isinstance(v, str) and v == os.path.basename(v) and v not in ("", ".", "..") for v in weight_map.values()):
            raise ValueError("weight_map must name files of the same folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{index}: not an index of safetensors files ({type(e).__name__}: {e})") from None
    files = sorted(set(weight_map.values()))
    missing = [f for f in files if not os.path.isfile(os.path.join(where, f))]
    if missing:
        raise CheckpointError(f"{where}: {len(missing)} of the {len(files)} files of the index are not there: {', '.join(missing)}; finish the download")
    return [os.path.join(where, f) for f in files], weight_map


def pread(fd: int, path: str, offset: int, out: torch.Tensor) -> None:
    """Fill `out` (1-D, contiguous) from byte `offset` of a file, and let the page cache drop what was read."""
    view = out.view(torch.uint8).numpy().data
    done, length = 0, len(view)
    while done < length:
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise OSError(errno.EIO, f"read {length} bytes at {offset}: the file ends after {done} of them", path)
        done += n
    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


class _FileReader:
    """A whole tensor of a file."""

    def __init__(self, fd: int, direct: int | None, tensor: Tensor, dtype: torch.dtype) -> None:
        self._fd, self._direct, self._tensor = fd, direct, tensor
        self.dtype, self.shape = dtype, tensor.shape

    def read(self, start: int, out: torch.Tensor) -> None:
        at, raw = self._tensor.begin + start * self.dtype.itemsize, out.view(torch.uint8)
        try:
            if (done := direct.read(self._direct, at, raw)) < len(raw):
                pread(self._fd, self._tensor.path, at + done, raw[done:])
        except OSError as e:
            raise OSError(e.errno, f"import {self._tensor.name}: {e.strerror}", self._tensor.path) from e


class _Parts:
    """A parameter that is several tensors, or pieces of tensors, end to end; flat, its shape is the model's to say."""

    def __init__(self, name: str, readers: Sequence[_FileReader], parts: Sequence[Part]) -> None:
        if len({r.dtype for r in readers}) != 1:
            raise CheckpointError(f"the parts of {name} have different dtypes: {', '.join(sorted({str(r.dtype) for r in readers}))}")
        self.dtype = readers[0].dtype
        self.shape: tuple[int, ...] = (sum(p.count for p in parts),)
        self._readers, self._parts = readers, parts

    def read(self, start: int, out: torch.Tensor) -> None:
        at = 0  # where the part begins in the parameter
        for reader, part in zip(self._readers, self._parts, strict=True):
            a, b = max(start, at), min(start + out.numel(), at + part.count)
            if a < b:
                reader.read(part.start + a - at, out[a - start : b - start])
            at += part.count


class ModuleSource:
    """The parameters of a module in memory, by every name they have; or only those of `names`.

    Raises:
        CheckpointError: parameters on the meta device, which have no values.
    """

    def __init__(self, module: nn.Module, names: Collection[str] | None = None) -> None:
        self.where = type(module).__name__
        self._params = {name: p for name, p in module.named_parameters(remove_duplicate=False) if names is None or name in names}
        self.names = self._params.keys()
        meta = [name for name, p in self._params.items() if p.is_meta]
        if meta:
            raise CheckpointError(f"{len(meta)} parameters of {self.where} are on the meta device and have no values to import: {', '.join(meta[:8])}")

    def open(self, name: str) -> Reader:
        if name not in self._params:
            raise CheckpointError(f"{name} is missing")
        p = self._params[name].detach()
        if p.dtype not in FLOATS:
            raise CheckpointError(f"{name} has dtype {p.dtype}, which zinf does not stream")
        return TensorReader(p)

    def unexpected(self, params: Collection[str]) -> list[str]:
        """Parameters that are the model's under no name."""
        used = {id(self._params[name]) for name in params if name in self._params}
        return [name for name, p in self._params.items() if id(p) not in used]


class WithFresh:
    """A source, and beside it parameters in memory that it has not."""

    def __init__(self, source: Source, fresh: ModuleSource) -> None:
        self.where, self._source, self._fresh = source.where, source, fresh

    def open(self, name: str) -> Reader:
        return self._fresh.open(name) if name in self._fresh.names else self._source.open(name)

    def unexpected(self, params: Collection[str]) -> list[str]:
        return self._source.unexpected([name for name in params if name not in self._fresh.names])


class TensorReader:
    """A tensor, on any device and with any strides; copies no more than the rows that a read touches."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)

    def read(self, start: int, out: torch.Tensor) -> None:
        t, end = self._tensor, start + out.numel()
        if t.is_contiguous():
            out.copy_(t.view(-1)[start:end])
            return
        row = math.prod(self.shape[1:])
        first = start // row
        rows = t[first : -(-end // row)].reshape(-1)
        out.copy_(rows[start - first * row : end - first * row])
