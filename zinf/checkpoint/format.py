"""The safetensors container: `<u64 little endian header length> <JSON header, padded to 8 bytes> <data>`.

The header is untrusted: it is checked in full (length, JSON, names, dtypes, shapes, offsets without holes or overlaps, size of
the file) before one of its numbers is used. Headers are written as the safetensors package writes them, byte for byte:
tensors by dtype, then by name, so that every tensor is aligned to its element size.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zinf.errors import CheckpointError
from zinf.tiers.manifest import shown

MAX_HEADER = 100_000_000  # bytes: the limit of the safetensors package
MAX_DIMENSIONS = 64  # torch's limit; and the product of more could keep us busy for hours

# Bits an element; the order is the safetensors package's, whose files hold later dtypes first.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TORCH.items()}
_ORDER = {name: i for i, name in enumerate(BITS)}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file: its bytes are [begin, end) of the file."""

    name: str
    path: str
    dtype: str  # safetensors' name: "BF16", ...
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(fd: int, path: str) -> dict[str, Tensor]:
    """The tensors of an open safetensors file, by name.

    Raises:
        CheckpointError: it is not a whole and consistent safetensors file; names the file and what is wrong.
    """
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, 8, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise _bad(path, f"the header should have {length} bytes but the file has {size}: it is cut short, or no safetensors file")
    if length > MAX_HEADER:
        raise _bad(path, f"the header claims {length} bytes, more than the {MAX_HEADER} allowed")
    raw = os.pread(fd, length, 8)
    if len(raw) < length:
        raise _bad(path, f"the header ends after {len(raw)} of {length} bytes")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise _bad(path, f"the header is not valid JSON ({e})") from None
    if not isinstance(header, dict):
        raise _bad(path, "the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(path, "__metadata__ is not a map of strings")
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_extent(path, tensors, 8 + length, size)
    return tensors


def _bad(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; download or save the checkpoint again")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    d = dict(pairs)
    if len(d) != len(pairs):
        raise ValueError("a key occurs twice")
    return d


def _is_count(x: object) -> bool:
    return type(x) is int and 0 <= x < 1 << 63


def _entry(path: str, name: str, entry: Any, data: int) -> Tensor:
    """One entry of the header, checked; `data` is the offset of the data in the file."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {name} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _bad(path, f"tensor {name} has the unknown dtype {shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise _bad(path, f"tensor {name} has the impossible shape {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)) or offsets[0] > offsets[1]:
        raise _bad(path, f"tensor {name} has the impossible data_offsets {shown(offsets)}")
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise _bad(path, f"tensor {name} is {dtype} {shape}, {bits // 8} bytes, but its data_offsets span {offsets[1] - offsets[0]}")
    return Tensor(name, path, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _check_extent(path: str, tensors: Mapping[str, Tensor], data: int, size: int) -> None:
    """The tensors must cover the data exactly: no holes, no overlaps, nothing behind."""
    at = data
    for t in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if t.begin != at:
            raise _bad(path, f"tensor {t.name} starts at byte {t.begin - data} of the data, expected {at - data}: tensors overlap or leave a hole")
        at = t.end
    if at != size:
        raise _bad(path, f"the file has {size} bytes and its tensors end at byte {at}: it is {'cut short' if size < at else 'longer than its header says'}")


def write_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], path: str, metadata: Mapping[str, str] | None) -> tuple[bytes, list[Tensor], int]:
    """The first bytes of a file that will hold tensors (name, safetensors dtype, shape); where each one goes; the file's size."""
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    placed, at = [], 0
    for name, dtype, shape in sorted(tensors, key=lambda t: (-_ORDER[t[1]], t[0])):
        end = at + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        placed.append(Tensor(name, path, dtype, shape, at, end))
        at = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    data = 8 + len(raw)
    placed = [dataclasses.replace(t, begin=t.begin + data, end=t.end + data) for t in placed]
    return len(raw).to_bytes(8, "little") + raw, placed, data + at
