"""Import and export against the drive, and against the safetensors package.

What bounds them: the drive. An import reads the bytes of a checkpoint and writes as many, an export the other way round; all else (checksums, splitting values,
looking up places) goes on beside, at many times the speed of the drive. So the bound is a plain copy of as many bytes between two files on the same drive
by the I/O engine alone: O_DIRECT, large pages, the same blocks, reads and writes overlapped, an fdatasync at the end. What can cost speed: files that are read
through the page cache (a copy by the CPU, and read-ahead in small pieces), dirty pages that pile up until an fsync, blocks that are allocated while they are
written, waiting for one side while the other has nothing to do.

Peers: safetensors' load_file (import) and save_file with an fsync (export), with the whole model in memory; they move the bytes once, not twice.
All read from the drive, not from the page cache. `over the bound` is our speed over that of the copy inside a round; the median of the rounds is
reported, since machines are shared and drives have moods.

    python bench/import_export.py [--mib 1024] [--rounds 5] [--dir .] [--toy]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file, save_file

from zinf import layout
from zinf.aio import open_engine
from zinf.checkpoint import SafetensorsSource, export_safetensors, import_store
from zinf.checkpoint.folder import Journal
from zinf.tiers import directory
from zinf.tiers.host import Arena
from zinf.tiers.nvme import Store

BLOCK, DEPTH = 4 << 20, 16
BOUND = "copy by the I/O engine"


def forget(*paths: Path) -> None:
    """Durable, and out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bench:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.bytes, self.source = folder, args.mib << 20, folder / "source"
        rows, columns = max(args.mib * 64, 64), 256  # eight tensors of an eighth each: 2 bytes an element
        names = [f"model.layers.{i}.weight" for i in range(8)]
        shards = [layout.make_shard(name, [(name, (rows, 4 * columns), "bf16", not args.frozen)]) for name in names]
        self.model = layout.Model(tuple(shards), args.chunk)
        block = torch.randn(64, 4 * columns, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.source.mkdir()
        save_file({name: block.repeat(rows // 64, 1) for name in names}, self.source / "model.safetensors", metadata={"format": "pt"})
        self.bytes = 8 * rows * 4 * columns * 2
        self.copied = folder / "copied"
        directory.allocate(str(self.copied), self.bytes)
        self.run_import()

    def run_import(self) -> None:
        with contextlib.closing(open_engine()) as io, SafetensorsSource(self.source) as source:
            import_store([str(self.folder / "store")], self.model, source, io, mark="bench", extra={}, overwrite=True)

    def import_(self) -> float:
        forget(self.source / "model.safetensors")
        shutil.rmtree(self.folder / "store")
        os.sync()
        return timed(self.run_import)

    def export(self) -> float:
        def run() -> None:
            with (
                contextlib.closing(open_engine()) as io,
                Store.open([str(self.folder / "store")], io, verify="read", writable=False) as store,
                Journal(str(self.folder / "out")) as journal,
            ):
                export_safetensors(self.folder / "out", self.model, store.read, journal=journal, contents=store.contents())
                journal.done()

        shutil.rmtree(self.folder / "out", ignore_errors=True)
        os.sync()
        return timed(run)

    def copy(self) -> float:
        """The bytes of a checkpoint from one file into another, whose blocks are there already."""
        with contextlib.closing(open_engine(block_size=BLOCK, queue_depth=2 * DEPTH)) as io, Arena(2 * DEPTH * BLOCK, io) as arena:
            ring = [arena.carve(BLOCK, "copy") for _ in range(2 * DEPTH)]
            store = self.folder / "store" / ("frozen" if (self.folder / "store/frozen").exists() else "weights")
            with contextlib.closing(io.open(str(store), write=False)) as a, contextlib.closing(io.open(str(self.copied), write=True)) as b:
                return timed(lambda: self._copy(io, a, b, ring))

    def _copy(self, io: object, a: object, b: object, ring: list[torch.Tensor]) -> None:
        spans = [(at, min(BLOCK, self.bytes - at)) for at in range(0, self.bytes, BLOCK)]
        reads, writes = {}, {}
        for i in range(len(spans) + DEPTH):
            if i < len(spans):
                slot = i % len(ring)
                if i >= len(ring):
                    writes.pop(i - len(ring)).wait()
                reads[i] = io.submit([("r", a, spans[i][0], ring[slot].data_ptr(), spans[i][1])], ring)[0]  # type: ignore[attr-defined]
            if (j := i - DEPTH) >= 0:
                reads.pop(j).wait()
                writes[j] = io.submit([("w", b, spans[j][0], ring[j % len(ring)].data_ptr(), spans[j][1])], ring)[0]  # type: ignore[attr-defined]
        for ticket in writes.values():
            ticket.wait()
        io.datasync(b).wait()  # type: ignore[attr-defined]

    def load(self) -> float:
        forget(self.source / "model.safetensors")
        return timed(lambda: [t.clone() for t in load_file(self.source / "model.safetensors").values()])  # it maps the file: clone reads it

    def save(self) -> float:
        tensors = load_file(self.source / "model.safetensors")
        target = self.folder / "saved.safetensors"
        target.unlink(missing_ok=True)
        os.sync()

        def run() -> None:
            save_file(tensors, target, metadata={"format": "pt"})
            forget(target)

        return timed(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="bytes of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=1 << 22, help="elements of a chunk")
    parser.add_argument("--frozen", action="store_true", help="a store of a base that is not trained: no room for state")
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the files are put, and removed from")
    parser.add_argument("--toy", action="store_true", help="seconds, for tests: the numbers mean nothing")
    args = parser.parse_args()
    if args.toy:
        args.mib, args.rounds, args.chunk = 8, 1, 1 << 18
    folder = Path(tempfile.mkdtemp(prefix="zinf-bench-", dir=args.dir))
    try:
        bench = Bench(folder, args)
        contenders = {BOUND: bench.copy, "zinf import": bench.import_, "zinf export": bench.export, "safetensors load_file": bench.load}
        contenders["safetensors save_file, fsync"] = bench.save
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(args.rounds):
            for name in random.Random(i).sample(list(contenders), len(contenders)):
                found[name].append(contenders[name]())
    finally:
        shutil.rmtree(folder)
    print(f"{bench.bytes >> 20} MiB of bf16, chunks of {args.chunk} elements, {'frozen' if args.frozen else 'trainable'}, {args.rounds} rounds")
    print(f"{'':30s} {'median s':>9s} {'best s':>7s} {'GB/s':>6s} {'over the bound':>15s}")
    summary: dict[str, object] = {"bench": "import_export", "mib": bench.bytes >> 20, "chunk": args.chunk, "frozen": args.frozen}
    for name, rounds in found.items():
        ratio = statistics.median(bound / mine for mine, bound in zip(rounds, found[BOUND], strict=True))
        median = statistics.median(rounds)
        print(f"{name:30s} {median:9.2f} {min(rounds):7.2f} {bench.bytes / 1e9 / median:6.2f} {ratio:15.2f}")
        summary[name] = {"seconds": round(median, 3), "gb_s": round(bench.bytes / 1e9 / median, 3), "over_bound": round(ratio, 3)}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
