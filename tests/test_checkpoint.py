"""Promise: a checkpoint comes in and goes out with exactly its values, in fixed memory, and a bad one is refused before a byte is written."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from zinf import checkpoint, layout, ops
from zinf.aio import open_engine
from zinf.checkpoint import Part, exporting, staging
from zinf.checkpoint import folder as exports
from zinf.chunks import DTYPES
from zinf.errors import CheckpointError
from zinf.tiers.nvme import Store

CHUNK = 4096  # elements


class Done:
    def wait(self, timeout: float | None = None) -> None:
        pass


class Late:
    """A ticket that copies only some time after it was asked for, and poisons what it read from: early reuse of a slot shows."""

    def __init__(self, work) -> None:
        self._thread = threading.Thread(target=lambda: (time.sleep(0.002), work()))
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join()


class Chunks:
    """A store in a dict, as strict about tensors as the real one."""

    def __init__(self, model: layout.Model, late: bool = False) -> None:
        self.model, self.late = model, late
        self.data: dict[layout.Key, torch.Tensor] = {}

    def _start(self, work):
        if self.late:
            return Late(work)
        work()
        return Done()

    def _check(self, key: layout.Key, tensor: torch.Tensor) -> None:
        kind, s, r, c = key
        run = self.model.shards[s].runs[r]
        size = run.mode.weights_bytes if kind == layout.WEIGHTS else run.mode.state_bytes
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.data_ptr() % 4096 == 0
        assert tensor.numel() == self.model.chunks(s, r)[c].length * size

    def write(self, items):
        def work(key, tensor):
            self.data[key] = tensor.clone()
            tensor.fill_(0xA5)  # what is written is the writer's no more

        for key, tensor in items:
            self._check(key, tensor)
        return [self._start(lambda key=key, tensor=tensor: work(key, tensor)) for key, tensor in items]

    def read(self, items):
        def work(key, tensor):
            tensor.copy_(self.data[key]) if key in self.data else tensor.zero_()

        for key, tensor in items:
            self._check(key, tensor)
            tensor.fill_(0xA5)
        return [self._start(lambda key=key, tensor=tensor: work(key, tensor)) for key, tensor in items]

    def run(self, s: int, r: int, kind: str = layout.WEIGHTS, plane: int = 0) -> torch.Tensor:
        """A whole run of weights, or a whole plane of its state."""
        run = self.model.shards[s].runs[r]
        dtypes = [run.dtype] if kind == layout.WEIGHTS else [dtype for _, dtype in run.mode.planes]
        before = sum(layout.ITEMSIZE[d] for d in dtypes[:plane])
        out = []
        for c in self.model.chunks(s, r):
            n = c.length
            raw = self.data.get((kind, s, r, c.index), torch.zeros(n * sum(layout.ITEMSIZE[d] for d in dtypes), dtype=torch.uint8))
            out.append(raw[n * before : n * (before + layout.ITEMSIZE[dtypes[plane]])].view(DTYPES[dtypes[plane]]))
        return torch.cat(out)

    def param(self, name: str) -> torch.Tensor:
        for s, shard in enumerate(self.model.shards):
            for r, run in enumerate(shard.runs):
                for p in run.params:
                    if p.name == name:
                        return self.run(s, r)[p.offset : p.offset + p.numel].view(p.shape)
        raise KeyError(name)


SHAPES = {"embed": (100, 61), "a.weight": (64, 65), "a.bias": (7,), "b.weight": (3, 5, 11), "norm": (1,), "head": (61, 90)}


def make_layout(dtype: str, frozen: tuple[str, ...] = (), chunk: int = CHUNK) -> layout.Model:
    groups = [["embed"], ["a.weight", "a.bias", "b.weight", "norm"], ["head"]]
    return layout.Model(tuple(layout.make_shard(g[0], [(n, SHAPES[n], dtype, n not in frozen) for n in g]) for g in groups), chunk)


def random_tensors(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, -0.0 and NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def folder_of(path: Path, tensors: dict[str, torch.Tensor], **files: list[str]) -> Path:
    """A folder with model.safetensors, or with the given files (keyword: names) and an index."""
    path.mkdir(parents=True, exist_ok=True)
    if not files:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    for file, names in files.items():
        save_file({n: tensors[n] for n in names}, path / f"{file}.safetensors")
    weight_map = {n: f"{file}.safetensors" for file, names in files.items() for n in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def imported(model: layout.Model, folder: Path, late: bool = False, **options) -> Chunks:
    chunks = Chunks(model, late)
    used = staging.pages(checkpoint.import_nbytes(model)).fill_(0xA5)  # as memory is that was used before
    with checkpoint.SafetensorsSource(folder, **options) as source:
        checkpoint.import_tensors(model, source, chunks.write, buffer=used)
    return chunks


# ---- values


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("late", [False, True])
def test_same_dtype_is_copied(tmp_path, dtype, late):
    tensors = random_tensors(DTYPES[dtype])
    tensors["norm"] = torch.full((1,), float("nan"), dtype=DTYPES[dtype])
    tensors["embed"][0, 0] = -0.0
    chunks = imported(make_layout(dtype, frozen=("head",)), folder_of(tmp_path, tensors), late)
    for name, t in tensors.items():
        assert same(chunks.param(name), t), name
    states = {key for key in chunks.data if key[0] == layout.STATE}
    assert bool(states) == (dtype == "fp16"), "state is written only where it says something"


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("late", [False, True])
def test_bf16_keeps_the_rest_in_lo(tmp_path, source, late):
    tensors = random_tensors(source)
    model = make_layout("bf16", frozen=("a.weight", "embed"))
    chunks = imported(model, folder_of(tmp_path, tensors), late)
    for s, shard in enumerate(model.shards):
        for r, run in enumerate(shard.runs):
            hi, lo = chunks.run(s, r), chunks.run(s, r, layout.STATE, 0)
            joined = torch.empty(run.padded)
            ops.join(hi, lo, joined)
            for p in run.params:
                part = slice(p.offset, p.offset + p.numel)
                if run.trainable:
                    assert same(joined[part].view(p.shape), tensors[p.name].float()), p.name
                else:
                    assert same(hi[part].view(p.shape), tensors[p.name].bfloat16()), p.name
            for a, b in run.gaps():
                assert not joined[a:b].any() and not hi[a:b].view(torch.int16).any(), "gaps are zero"
            for plane in (1, 2):
                assert not chunks.run(s, r, layout.STATE, plane).any(), "moments are zero"
            assert run.trainable or not any(key[:3] == (layout.STATE, s, r) for key in chunks.data)


def test_bf16_values_in_fp32_write_no_state(tmp_path):
    tensors = random_tensors(torch.bfloat16)
    wide = {n: t.float() for n, t in tensors.items()}
    wide["head"][0, 0] += 2**-20  # one element of one chunk has something to say
    chunks = imported(make_layout("bf16"), folder_of(tmp_path, wide))
    assert [key for key in chunks.data if key[0] == layout.STATE] == [(layout.STATE, 2, 0, 0)]


def test_a_slot_that_was_used_leaves_nothing_in_the_next_chunk(tmp_path):
    """Runs of mixed sources and lengths through the same slots: lo planes of bf16 tensors beside fp32 ones are zero."""
    tensors = random_tensors(torch.float32)
    for name in ("a.bias", "norm"):
        tensors[name] = tensors[name].bfloat16()
    model = make_layout("bf16", chunk=2048)
    chunks = imported(model, folder_of(tmp_path, tensors), late=True)
    run = model.shards[1].runs[0]
    lo = chunks.run(1, 0, layout.STATE, 0)
    for p in run.params:
        assert bool(lo[p.offset : p.offset + p.numel].any()) == (p.name in ("a.weight", "b.weight"))


def test_fp16_master_is_the_value(tmp_path):
    tensors = random_tensors(torch.float32)
    model = make_layout("fp16")
    chunks = imported(model, folder_of(tmp_path, tensors))
    for s, shard in enumerate(model.shards):
        master = chunks.run(s, 0, layout.STATE, 0)
        for p in shard.runs[0].params:
            assert same(master[p.offset : p.offset + p.numel].view(p.shape), tensors[p.name])
            assert same(chunks.param(p.name), tensors[p.name].half())


def test_module_source(tmp_path):
    module = nn.Module()
    module.a, module.b = nn.Linear(65, 64), nn.Linear(33, 17)
    module.b.weight = nn.Parameter(torch.randn(33, 17).t())  # not contiguous
    module.also = nn.Module()
    module.also.weight = module.a.weight
    specs = [(n, tuple(p.shape), "fp32", True) for n, p in module.named_parameters()]
    model = layout.Model((layout.make_shard("m", specs),), 2048)
    chunks = Chunks(model)
    checkpoint.import_tensors(model, checkpoint.ModuleSource(module), chunks.write)
    for name, p in module.named_parameters():
        assert same(chunks.param(name), p.detach()), name


def test_module_source_refuses_meta():
    with torch.device("meta"):
        module = nn.Linear(3, 4)
    with pytest.raises(CheckpointError, match=r"2 parameters of Linear are on the meta device.*weight, bias"):
        checkpoint.ModuleSource(module)


def test_tied_and_renamed_and_composed(tmp_path):
    """Two parameters of one tensor, one of three tensors, one of the middle of a tensor."""
    files = {"one": torch.randn(8, 300), "e.0": torch.randn(9, 7), "e.1": torch.randn(9, 7), "e.2": torch.randn(9, 7), "qkv": torch.randn(12, 700)}
    names = {
        "x": "one",
        "y": "one",
        "experts": tuple(Part(f"e.{i}", (9, 7), 0, 63) for i in range(3)),
        "k": (Part("qkv", (12, 700), 2800, 2800),),
    }
    specs = [("x", (8, 300), "fp32", True), ("experts", (3, 9, 7), "fp32", True), ("y", (8, 300), "fp32", False), ("k", (4, 700), "fp32", True)]
    model = layout.Model((layout.make_shard("m", specs),), 2048)
    folder = folder_of(tmp_path, files)
    chunks = imported(model, folder, names=names)
    assert same(chunks.param("x"), files["one"]) and same(chunks.param("y"), files["one"])
    assert same(chunks.param("experts"), torch.stack([files[f"e.{i}"] for i in range(3)]))
    assert same(chunks.param("k"), files["qkv"][4:8])


def test_export_cuts_and_joins(tmp_path):
    specs = [("experts", (3, 9, 700), "bf16", True), ("q", (4, 700), "bf16", True), ("k", (4, 700), "bf16", False)]
    model = layout.Model((layout.make_shard("m", specs),), 2048)
    tensors = {n: torch.randn(s).bfloat16() for n, s, _, _ in specs}
    chunks = imported(model, folder_of(tmp_path / "in", tensors))
    names = {
        "experts": tuple(Part(f"e.{i}", (9, 700), 0, 6300) for i in range(3)),
        "q": (Part("qk", (8, 700), 0, 2800),),
        "k": (Part("qk", (8, 700), 2800, 2800),),
    }
    checkpoint.export_safetensors(tmp_path / "out", model, chunks.read, names=names)
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(out) == ["e.0", "e.1", "e.2", "qk"]
    assert same(torch.stack([out[f"e.{i}"] for i in range(3)]), tensors["experts"])
    assert same(out["qk"], torch.cat([tensors["q"], tensors["k"]]))
    with pytest.raises(CheckpointError, match="only 2800 elements of qk"):
        checkpoint.export_safetensors(tmp_path / "bad", model, chunks.read, names={**names, "k": "k"})
    with pytest.raises(CheckpointError, match="two parameters go to the tensor q"):
        checkpoint.export_safetensors(tmp_path / "bad", model, chunks.read, names={"k": "q"})


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("late", [False, True])
def test_export_of_the_master_is_the_file(tmp_path, dtype, late):
    """fp32 -> any mode -> fp32 gives the bytes that the safetensors package wrote; and so once more."""
    tensors = random_tensors(torch.float32)
    folder = folder_of(tmp_path / "in", tensors)
    model = make_layout(dtype)
    for out in ("one", "two"):
        chunks = imported(model, folder, late)
        checkpoint.export_safetensors(tmp_path / out, model, chunks.read, dtype="fp32")
        assert (tmp_path / out / "model.safetensors").read_bytes() == (tmp_path / "in" / "model.safetensors").read_bytes()
        folder = tmp_path / out
    with safe_open(folder / "model.safetensors", framework="pt") as f:
        assert f.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", None])
@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp32"])
def test_export_casts(tmp_path, mode, dtype):
    tensors = random_tensors(DTYPES[mode])
    model = make_layout(mode, frozen=("head",))
    chunks = imported(model, folder_of(tmp_path / "in", tensors))
    checkpoint.export_safetensors(tmp_path / "out", model, chunks.read, dtype=dtype)
    out = load_file(tmp_path / "out" / "model.safetensors")
    for name, t in tensors.items():
        assert same(out[name], t.to(DTYPES[dtype or mode])), name


def test_export_is_sharded_as_transformers_does(tmp_path):
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = random_tensors(torch.bfloat16)
    model = make_layout("bf16")
    chunks = imported(model, folder_of(tmp_path / "in", tensors))
    extra = {"counter": torch.arange(5), "norm.running": torch.randn(3)}
    order = ["head", "embed", "counter", "a.bias", "a.weight", "b.weight", "norm", "norm.running"]
    paths = checkpoint.export_safetensors(tmp_path / "out", model, chunks.read, names={n: n for n in order}, buffers=extra, max_shard_size=9000)
    everything = {n: {**tensors, **extra}[n] for n in order}
    split = split_torch_state_dict_into_shards(everything, filename_pattern="model{suffix}.safetensors", max_shard_size=9000)
    for file, names in split.filename_to_tensors.items():
        save_file({n: everything[n] for n in names}, tmp_path / "theirs", metadata={"format": "pt"})
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "theirs").read_bytes()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == split.tensor_to_filename and index["metadata"]["total_size"] == split.metadata["total_size"]
    assert sorted(os.path.basename(p) for p in paths) == sorted(os.listdir(tmp_path / "out")), "no temporary file is left"
    again = imported(model, tmp_path / "out", ignore=list(extra))
    assert all(torch.equal(again.data[key], t) for key, t in chunks.data.items())


def test_through_a_real_store(tmp_path):
    tensors = random_tensors(torch.float32)
    model = make_layout("bf16", chunk=2048)
    folder = folder_of(tmp_path / "in", tensors)
    io = open_engine("auto")
    try:
        store = Store.create([str(tmp_path / "store")], model, io)
        with checkpoint.SafetensorsSource(folder) as source:
            checkpoint.import_tensors(model, source, store.write)
        store.commit(0, {})
        store.close()
        store = Store.open([str(tmp_path / "store")], io, verify="always")
        checkpoint.export_safetensors(tmp_path / "out", model, store.read, dtype="fp32")
        store.close()
    finally:
        io.close()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_progress_and_buffer(tmp_path):
    model = make_layout("bf16")
    folder = folder_of(tmp_path / "in", random_tensors(torch.float32))
    chunks, seen = Chunks(model), []
    memory = staging.pages(checkpoint.import_nbytes(model))
    with checkpoint.SafetensorsSource(folder) as source:
        checkpoint.import_tensors(model, source, chunks.write, buffer=memory, progress=lambda done, total: seen.append((done, total)))
        with pytest.raises(ValueError, match="buffer must be a page-aligned"):
            checkpoint.import_tensors(model, source, chunks.write, buffer=memory[4096:])
    total = sum(s.weights_nbytes for s in model.shards)
    assert seen == sorted(seen) and seen[-1] == (total, total) and len(seen) == len([k for k in chunks.data if k[0] == layout.WEIGHTS])
    checkpoint.export_safetensors(tmp_path / "out", model, chunks.read, buffer=memory, dtype="fp32", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (total, total)
    assert same(load_file(tmp_path / "out" / "model.safetensors")["head"], load_file(folder / "model.safetensors")["head"])


# ---- refusals: one clear error, nothing written


def refused(model: layout.Model, folder: Path, **options) -> str:
    """The error of an import, which must not have written anything."""
    chunks = Chunks(model)
    with pytest.raises(CheckpointError) as e:
        with checkpoint.SafetensorsSource(folder, **options) as source:
            checkpoint.import_tensors(model, source, chunks.write)
    assert not chunks.data
    assert "\n" not in str(e.value)
    return str(e.value)


def test_every_misfit_is_listed(tmp_path):
    tensors = random_tensors(torch.float32)
    del tensors["norm"], tensors["a.bias"]
    tensors["embed"] = torch.zeros(61, 100)
    tensors["head"] = torch.zeros(61, 90, dtype=torch.int8)
    tensors["extra.1"], tensors["extra.2"] = torch.zeros(1), torch.zeros(1)
    message = refused(make_layout("bf16"), folder_of(tmp_path, tensors), ignore=["extra.2"])
    assert message == (
        f"{tmp_path} does not fit the model in 5 places: embed is [61, 100] there and [100, 61] in the model; a.bias is missing; norm is missing; "
        "head has dtype I8, which zinf does not stream; dequantize the checkpoint to bf16 first; extra.1 is in the checkpoint and not in the model"
    )


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    message = refused(make_layout("bf16"), tmp_path)
    assert "pytorch_model.bin" in message and f"convert them once, to {tmp_path}-safetensors: python -c" in message
    assert refused(make_layout("bf16"), tmp_path / "nowhere") == f"{tmp_path / 'nowhere'} is not a folder"
    (tmp_path / "pytorch_model.bin").unlink()
    assert "has neither model.safetensors nor" in refused(make_layout("bf16"), tmp_path)


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


EMPTY = b'{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'
MALFORMED = {
    "empty": (b"", "it is cut short"),
    "seven bytes": (b"1234567", "it is cut short"),
    "header longer than the file": (({"x": entry()}, b"12345678", 1000), "it is cut short"),
    "header of 2^63": (({"x": entry()}, b"12345678", 2**63), "it is cut short"),
    "not JSON": ((b"{not json", b""), "not valid JSON"),
    "not UTF-8": ((b'{"\xff": 1}', b""), "not valid JSON"),
    "deep JSON": ((b"[" * 100000, b""), "not valid JSON"),
    "a list": (([1], b""), "not a JSON object"),
    "duplicate name": ((b'{"x": ' + EMPTY + b', "x": ' + EMPTY + b"}", b""), "a key occurs twice"),
    "metadata of numbers": (({"__metadata__": {"a": 1}, "x": entry()}, b"12345678"), "__metadata__ is not a map of strings"),
    "no offsets": (({"x": {"dtype": "F32", "shape": [2]}}, b""), "does not have exactly"),
    "unknown dtype": (({"x": entry("F31")}, b"12345678"), "unknown dtype 'F31'"),
    "negative shape": (({"x": entry(shape=(-2,))}, b"12345678"), "impossible shape"),
    "shape of floats": (({"x": entry(shape=(2.0,))}, b"12345678"), "impossible shape"),
    "shape of booleans": (({"x": entry(shape=(True, 2))}, b"12345678"), "impossible shape"),
    "offsets reversed": (({"x": entry(offsets=(8, 0))}, b"12345678"), "impossible data_offsets"),
    "offsets huge": (({"x": entry(offsets=(0, 2**70))}, b"12345678"), "impossible data_offsets"),
    "size against shape": (({"x": entry(shape=(3,))}, b"12345678"), "12 bytes, but its data_offsets span 8"),
    "overlap": (({"x": entry(), "y": entry(offsets=(4, 12))}, b"1" * 12), "overlap or leave a hole"),
    "same place": (({"x": entry(), "y": entry()}, b"1" * 8), "overlap or leave a hole"),
    "hole": (({"x": entry(), "y": entry(offsets=(12, 20))}, b"1" * 20), "overlap or leave a hole"),
    "data cut short": (({"x": entry()}, b"1234567"), "cut short"),
    "data too long": (({"x": entry()}, b"123456789"), "longer than its header says"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files(tmp_path, case):
    content, expected = MALFORMED[case]
    path = tmp_path / "model.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        raw_file(path, *content)
    model = layout.Model((layout.make_shard("m", [("x", (2,), "fp32", True)]),), 2048)
    message = refused(model, tmp_path)
    assert expected in message and str(path) in message


def test_header_limit(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", 100_000_001))
        f.truncate(200_000_000)  # sparse
    assert "claims 100000001 bytes" in refused(make_layout("bf16"), tmp_path)


def test_malformed_indexes(tmp_path):
    tensors = random_tensors(torch.float32)
    names = list(tensors)
    folder = folder_of(tmp_path, tensors, one=names[:3], two=names[3:])
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    model = make_layout("bf16")
    assert same(imported(model, folder).param("head"), imported(model, folder_of(tmp_path / "x", tensors)).param("head"))

    index.write_text("{")
    assert "not an index" in refused(model, folder)
    for bad in ("../one.safetensors", "/etc/passwd", "", "..", 3):
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], "head": bad}}))
        assert "must name files of the same folder" in refused(model, folder)
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "head": "three.safetensors"}}))
    assert "1 of the 3 files of the index are not there: three.safetensors" in refused(model, folder)
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "head": "one.safetensors"}}))
    assert "says that head is in one.safetensors, which does not have it" in refused(model, folder)
    save_file({n: tensors[n] for n in names[2:]}, folder / "two.safetensors")
    index.write_text(json.dumps({"weight_map": {n: f for n, f in good["weight_map"].items() if n != names[2]}}))
    assert f"tensor {names[2]} is in " in refused(model, folder)


# ---- failures on the way


class Broken(Chunks):
    """Fails at the n-th call; tickets fail too if `ticket`."""

    def __init__(self, model: layout.Model, n: int, ticket: bool) -> None:
        super().__init__(model, late=True)
        self.n, self.ticket = n, ticket

    def _turn(self, start, items):
        self.n -= 1
        error = OSError(errno.EIO, "write: Input/output error", "store")
        if self.n == 0 and not self.ticket:
            raise error
        tickets = start(items)
        if self.n == 0:

            class Failing:
                def wait(self, timeout=None, inner=tickets[0]):
                    inner.wait()
                    raise error

            tickets[0] = Failing()
        return tickets

    def write(self, items):
        return self._turn(super().write, items)

    def read(self, items):
        return self._turn(super().read, items)


@pytest.mark.parametrize("ticket", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_errors_of_the_store_come_out_and_leave_nothing(tmp_path, ticket, n):
    model = make_layout("bf16", chunk=2048)
    folder = folder_of(tmp_path / "in", random_tensors(torch.float32))
    threads = threading.active_count()
    with checkpoint.SafetensorsSource(folder) as source, pytest.raises(OSError, match="write: Input/output error"):
        checkpoint.import_tensors(model, source, Broken(model, n, ticket).write)
    good = imported(model, folder)
    out = tmp_path / "out"
    checkpoint.export_safetensors(out, model, good.read)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    broken = Broken(model, n, ticket)
    broken.data = good.data
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.export_safetensors(out, model, broken.read, dtype="fp32", max_shard_size=5000)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before, "the older checkpoint is as it was"
    assert threading.active_count() == threads


def test_a_file_that_shrinks_is_an_error(tmp_path):
    model = make_layout("fp32")
    folder = folder_of(tmp_path, random_tensors(torch.float32))
    with checkpoint.SafetensorsSource(folder) as source:
        os.truncate(folder / "model.safetensors", 1000)
        with pytest.raises(OSError, match=r"import \S+: read \d+ bytes at \d+: the file ends after \d+ of them.*model.safetensors"):
            checkpoint.import_tensors(model, source, Chunks(model).write)


def test_no_space_is_said_before_the_first_byte(tmp_path, monkeypatch):
    model = make_layout("bf16")
    chunks = imported(model, folder_of(tmp_path / "in", random_tensors(torch.float32)))
    real = os.statvfs

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(exporting.os, "statvfs", lambda path: Full() if str(path).endswith("out") else real(path))
    monkeypatch.setattr(chunks, "read", lambda items: pytest.fail("a byte was read"))
    with pytest.raises(OSError, match=r"export needs \d+ bytes and 4096 are free") as e:
        checkpoint.export_safetensors(tmp_path / "out", model, chunks.read)
    assert e.value.errno == errno.ENOSPC and not os.listdir(tmp_path / "out")


class Killed(BaseException):
    pass


def complete(folder: Path) -> dict[str, torch.Tensor] | None:
    """What a reader of HF checkpoints finds in a folder: None if it sees that nothing whole is there."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return None
    weight_map = json.loads(index.read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


@pytest.mark.parametrize("old_shards", [False, True])
@pytest.mark.parametrize("new_shards", [False, True])
def test_a_crash_at_any_instant_leaves_no_mixture(tmp_path, monkeypatch, old_shards, new_shards):
    """Stop at each rename, unlink and fsync of an export over an older checkpoint of the same names."""
    model = make_layout("fp32")
    sizes = {False: 10**9, True: 12000}
    versions = [random_tensors(torch.float32, seed) for seed in (1, 2)]
    stores = [imported(model, folder_of(tmp_path / f"in{i}", t)) for i, t in enumerate(versions)]
    outcomes = set()
    for stop in range(100):
        out = tmp_path / f"out{stop}"
        checkpoint.export_safetensors(out, model, stores[0].read, max_shard_size=sizes[old_shards])
        left = [stop]

        def step(real, left=left):
            def call(*args, **kwargs):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as m:
            for name in ("replace", "unlink", "fsync"):
                m.setattr(exporting.os, name, step(getattr(os, name)))
            try:
                checkpoint.export_safetensors(out, model, stores[1].read, max_shard_size=sizes[new_shards])
                finished = True
            except Killed:
                finished = False
        found = complete(out)
        if found is not None:
            matches = [all(same(found[n], t) for n, t in v.items()) for v in versions]
            assert any(matches), f"a mixture after {stop} operations"
            outcomes.add(matches.index(True))
        if finished:
            break
    assert outcomes == {0, 1} and stop < 99
    reference = checkpoint.export_safetensors(tmp_path / "ref", model, stores[1].read, max_shard_size=sizes[new_shards])
    assert sorted(os.listdir(out)) == sorted(os.path.basename(p) for p in reference)


def test_bytes_are_durable_before_names(tmp_path, monkeypatch):
    model = make_layout("fp32")
    chunks = imported(model, folder_of(tmp_path / "in", random_tensors(torch.float32)))
    out, events = tmp_path / "out", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(exporting.os, "fsync", lambda fd: (events.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(exporting.os, "replace", lambda a, b: (events.append("name " + os.path.basename(b)), replace(a, b)))
    checkpoint.export_safetensors(out, model, chunks.read, max_shard_size=30000)
    one, two, three = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    index, tmp = "model.safetensors.index.json", f".{os.getpid()}.tmp"
    assert events == [
        *(f"fsync .{f}{tmp}" for f in (one, two, three, index)),
        *(f"name {f}" for f in (one, two, three, index)),
        "fsync out",
        "fsync out",
    ]


# ---- memory

MEMORY = """
import os, sys, threading, time
import torch
from safetensors.torch import load_file
from zinf import checkpoint, layout, ops
from zinf.checkpoint import staging

folder, out, dtype, how = sys.argv[1:]
ROWS, COLUMNS, COUNT, CHUNK = 3100, 4096, 24 if dtype == "bf16" else 12, 1 << 20
shards = [layout.make_shard(f"s{i}", [(f"w{i}", (ROWS, COLUMNS), dtype, True)]) for i in range(COUNT)]  # 610 MB: 24 tensors of bf16, or 12 of fp32
model = layout.Model(tuple(shards), CHUNK)
places = layout.place(model, versions=1)
fds = {f: os.open(os.path.join(out, f), os.O_RDWR | os.O_CREAT) for f in places.sizes[0]}
written = set()

class Done:
    def wait(self, timeout=None): pass

def write(items):
    for key, t in items:
        p = places.places[key][0]
        assert os.pwrite(fds[p.file], t.numpy().data, p.offset) == p.length
        written.add(key)
    return [Done() for _ in items]

def read(items):
    for key, t in items:
        p = places.places[key][0]
        if key in written:
            assert os.preadv(fds[p.file], [t.numpy().data], p.offset) == p.length
        else:
            t.zero_()
    return [Done() for _ in items]

def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096

peak, run = 0, True
def watch():
    global peak
    while run:
        peak = max(peak, rss())
        time.sleep(0.002)

x = torch.ones(1 << 17); hi, lo = torch.empty(1 << 17, dtype=torch.bfloat16), torch.empty(1 << 17, dtype=torch.int16)
ops.split(x, hi, lo); ops.join(hi, lo, x); ops.cast(x, hi)  # threads and code of the kernels are not what is measured
base = rss()
thread = threading.Thread(target=watch)
thread.start()
if how == "whole":
    held = load_file(os.path.join(folder, "model.safetensors"))
    total = sum(float(t.float().sum()) for t in held.values())
else:
    with checkpoint.SafetensorsSource(folder, ignore=[f"w{i}" for i in range(COUNT, 24)]) as source:
        checkpoint.import_tensors(model, source, write)
    checkpoint.export_safetensors(os.path.join(out, "hf"), model, read, max_shard_size=200_000_000, dtype="fp32" if dtype == "fp32" else None)
run = False
thread.join()
print(peak - base, staging.slots_nbytes(model, True), (staging.STAGE + staging.TRANSFER) * staging.THREADS)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """610 MB of bf16 in 25 MB tensors."""
    folder = tmp_path_factory.mktemp("large")
    w = torch.randn(3100, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    from zinf.checkpoint.format import write_header

    header, _, _ = write_header([(f"w{i}", "BF16", (3100, 4096)) for i in range(24)], "", {"format": "pt"})
    with open(folder / "model.safetensors", "wb") as f:
        f.write(header)
        for _ in range(24):
            f.write(w.view(torch.uint8).numpy().data)
    return folder


@pytest.mark.parametrize("how", ["bf16", "fp32", "whole"])
def test_memory_does_not_grow_with_the_model(tmp_path, large, how):
    dtype = "bf16" if how == "whole" else how
    run = subprocess.run([sys.executable, "-c", MEMORY, str(large), str(tmp_path), dtype, how], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    growth, slots, stages = map(int, run.stdout.split())
    bound = slots + stages + (24 << 20)  # and what Python, torch and threads need
    assert bound < 200e6 < 610e6
    if how == "whole":
        assert growth > bound, "the bound must tell"
    else:
        assert growth < bound, f"{growth / 1e6:.0f} MB of {bound / 1e6:.0f} MB"


def test_what_a_killed_export_has_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".model.safetensors.1.tmp").write_bytes(b"of one that was killed")
    (tmp_path / ".model.notes.2.tmp").write_bytes(b"of somebody else")
    with exports.Folder(str(tmp_path)) as living:
        living.create("model-00001-of-00002.safetensors", b"")
        with exports.Folder(str(tmp_path)):
            left = sorted(os.listdir(tmp_path))
    assert left == [f".model-00001-of-00002.safetensors.{os.getpid()}.tmp", ".model.notes.2.tmp"]
