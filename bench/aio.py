"""The I/O engine against fio, on the same file, with the same block size and depth.

What bounds it: the drive, once enough is in flight and the copies are done by the drive's DMA. O_DIRECT leaves nothing for the CPU but to hand over
addresses: a few milliseconds of it for a gigabyte. What can cost speed is on this side of the drive: memory of 4 KiB pages (each block is then a
thousand segments for the block layer), unregistered buffers (pinned anew for each block), too little in flight, and a CPU busy elsewhere.

So fio is asked for the bound in its best form: io_uring, registered buffers and files, large pages (by glibc's malloc tunable; the memory of
4 KiB pages that it takes by itself is shown too). `over fio` is our speed over that of fio on large pages, taken inside a round; the median of
the rounds is reported, since machines are shared and drives have moods.

    python bench/aio.py [--mib 1024] [--block-kib 4096] [--depth 16] [--rounds 5] [--dir .] [--toy]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zinf.aio import IoEngine, open_engine
from zinf.errors import ConfigError

HUGE = 2 << 20  # bytes of a large page
BOUND = "fio io_uring, large pages"

Result = tuple[float, float]  # GB/s, CPU seconds per GB


def buffer(nbytes: int, huge: bool) -> tuple[mmap.mmap, int]:
    """Touched memory that starts at a large page, and its address."""
    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory would get no large pages
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    address += -address % HUGE
    ctypes.memset(address, 1, nbytes)
    return memory, address


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def ours(args: argparse.Namespace, kind: str, backend: str, *, huge: bool = True, register: bool = True) -> Result:
    """The file once, in blocks, into or out of a staging buffer of twice the depth, as the tiers use the engine."""
    slots = 2 * args.depth
    memory, base = buffer(slots * args.block, huge)
    engine: IoEngine = open_engine(backend, block_size=args.block, queue_depth=args.depth, threads=args.threads)
    try:
        if register:
            engine.register(base, slots * args.block, memory)
        file = engine.open(args.file, write=True, direct="auto")
        ops = [(kind, file, at, base + i % slots * args.block, min(args.block, args.bytes - at)) for i, at in enumerate(range(0, args.bytes, args.block))]
        cpu, start = cpu_seconds(), time.perf_counter()
        for ticket in engine.submit(ops, owner=memory):
            ticket.wait()
        seconds = time.perf_counter() - start
        cpu = cpu_seconds() - cpu
    finally:
        engine.close()
    return args.bytes / 1e9 / seconds, cpu / (args.bytes / 1e9)


def fio(args: argparse.Namespace, kind: str, *, huge: bool) -> Result:
    """The same with fio; its own figures."""
    rw = {"r": "read", "w": "write"}[kind]
    command = ["fio", "--name=bound", f"--filename={args.file}", f"--rw={rw}", f"--bs={args.block}", f"--iodepth={args.depth}", f"--size={args.bytes}"]
    command += ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", f"--direct={int(args.direct)}"]
    command += ["--thread", "--overwrite=1", "--scramble_buffers=0", "--output-format=json"]
    env = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1") if huge else dict(os.environ)
    job = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)["jobs"][0]
    gigabytes = job[rw]["io_bytes"] / 1e9
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return job[rw]["bw_bytes"] / 1e9, cpu / gigabytes


def contenders(args: argparse.Namespace) -> dict[str, Callable[[str], Result]]:
    found: dict[str, Callable[[str], Result]] = {}
    if shutil.which("fio"):
        found[BOUND] = lambda kind: fio(args, kind, huge=True)
        found["fio io_uring, 4 KiB pages"] = lambda kind: fio(args, kind, huge=False)
    for backend in ("uring", "threads"):
        try:
            open_engine(backend).close()
        except ConfigError as error:
            print(error)
            continue
        found[f"zinf {backend}"] = lambda kind, backend=backend: ours(args, kind, backend)  # type: ignore[misc]
    if "zinf uring" in found:
        found["zinf uring, not registered"] = lambda kind: ours(args, kind, "uring", register=False)
        found["zinf uring, 4 KiB pages"] = lambda kind: ours(args, kind, "uring", huge=False)
    return found


def lay(args: argparse.Namespace) -> None:
    """A file of random bytes, really on the drive, and whether O_DIRECT works there."""
    block = random.Random(0).randbytes(8 << 20)
    with open(args.file, "wb") as file:
        for at in range(0, args.bytes, len(block)):
            file.write(block[: args.bytes - at])
        file.flush()
        os.fsync(file.fileno())
    engine = open_engine("auto")
    with engine.open(args.file, write=True) as opened:
        args.direct = opened.direct
    engine.close()


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[Result]]]:
    """kind -> contender -> one result a round; contenders in another order each round."""
    found = contenders(args)
    results: dict[str, dict[str, list[Result]]] = {kind: {name: [] for name in found} for kind in "rw"}
    for i in range(args.rounds):
        for kind in "rw":
            for name in random.Random(i).sample(list(found), len(found)):
                results[kind][name].append(found[name](kind))
    return results


def report(args: argparse.Namespace, results: dict[str, dict[str, list[Result]]]) -> None:
    """A table for people, one JSON line for machines."""
    how = "O_DIRECT" if args.direct else "buffered (no O_DIRECT here)"
    print(f"{args.mib} MiB, blocks of {args.block_kib} KiB, {args.depth} in flight, {how}, {args.rounds} rounds")
    summary: dict[str, object] = {"bench": "aio", "mib": args.mib, "block_kib": args.block_kib, "depth": args.depth, "direct": args.direct}
    for kind, verb in (("r", "read"), ("w", "write")):
        print(f"{verb + ', median':30s} {'GB/s':>7s} {'best':>7s} {'CPU s/GB':>9s} {'over fio':>9s}")
        for name, rounds in results[kind].items():
            speed = statistics.median(speed for speed, _ in rounds)
            cpu = statistics.median(cpu for _, cpu in rounds)
            bound = results[kind].get(BOUND)
            ratio = statistics.median(mine / best for (mine, _), (best, _) in zip(rounds, bound, strict=True)) if bound else None
            print(f"{name:30s} {speed:7.2f} {max(speed for speed, _ in rounds):7.2f} {cpu:9.4f} {'' if ratio is None else f'{ratio:.2f}':>9s}")
            summary[f"{verb}: {name}"] = {"gb_s": round(speed, 3), "cpu_s_per_gb": round(cpu, 4), "over_fio": ratio and round(ratio, 3)}
    print(json.dumps(summary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--block-kib", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--threads", type=int, default=4, help="of the threads backend")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the file is put, and removed from")
    parser.add_argument("--toy", action="store_true", help="seconds, for tests: the numbers mean nothing")
    args = parser.parse_args()
    if args.toy:
        args.mib, args.block_kib, args.depth, args.rounds = 4, 256, 4, 1
    args.block, args.bytes, args.file = args.block_kib << 10, args.mib << 20, args.dir / f"zinf-bench-{os.getpid()}"
    try:
        lay(args)
        results = measure(args)
    finally:
        args.file.unlink(missing_ok=True)
    report(args, results)


if __name__ == "__main__":
    main()
