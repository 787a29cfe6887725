"""`zinf env`: one page on what this machine has, what of it zinf uses, and how to get the rest."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from zinf import __version__, measured
from zinf.cli import card, text
from zinf.config import cache_dir, format_bytes

PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors", "numpy", "cffi", "triton", "deepspeed")
ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # of /proc/cpuinfo: what kernels and matmuls care for
LIBURING_HINT = "Debian, Ubuntu: apt install liburing-dev, then make (or pip install) again"


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "env", parents=parents, help="what this machine has, and what zinf uses of it",
        description="What this machine has, what of it zinf uses, and how to get the rest. Changes nothing.",
    )  # fmt: skip
    p.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="folders whose drives to look at (default: this one)")
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = collect(args.paths)
    if args.json:
        json.dump(found, sys.stdout, indent=2, default=str)
        print()
        return 0
    text.heading(f"zinf {found['zinf']}")
    text.rows([("Python", found["python"]), ("packages", ", ".join(f"{k} {v}" for k, v in found["packages"].items())), ("cache", found["cache"])])
    text.heading("Machine")
    cpu, memory = found["cpu"], found["memory"]
    text.rows(
        [
            ("system", f"{found['system']}, Linux {found['kernel']}"),
            ("CPU", f"{cpu['model']}, {cpu['usable']} of {cpu['cores']} cores usable; {' '.join(cpu['flags']) or 'no SIMD flags known'}"),
            ("kernels", cpu["kernels"]),
            ("memory", _memory_line(memory)),
            ("hugepages", memory["hugepages"]),
            ("memlock", memory["memlock"]),
            ("GPU", "\n".join(found["gpu"]) or "none: everything runs on the CPU"),
        ]
    )
    text.heading("Input and output")
    text.rows(_io_lines(found["io"]))
    for drive in found["drives"]:
        text.heading(f"Drive of {drive['path']}")
        text.rows([(key, value) for key, value in drive.items() if key != "path"])
    return 0


def collect(paths: list[str]) -> dict[str, Any]:
    """Everything that is shown, as plain values. No part of it can fail as a whole."""
    return {
        "zinf": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": versions(),
        "cache": str(cache_dir()),
        "system": _system(),
        "kernel": platform.release(),
        "cpu": cpu(),
        "memory": memory(),
        "gpu": card.lines(),
        "cards": card.cards(),
        "io": io(),
        "drives": [drive(path) for path in paths],
    }


# ------------------------------------------------------------------------------------------------------------- software


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def io() -> dict[str, Any]:
    """What zinf.aio's probe finds, and whether the native engine is there."""
    try:
        from zinf.aio.probe import probe

        found = dict(probe())
    except ImportError as e:
        found = {"io_uring": False, "why": str(e)}
    found["native"] = importlib.util.find_spec("zinf._aio") is not None
    return found


def _io_lines(found: dict[str, Any]) -> list[tuple[str, object]]:
    works = bool(found.get("io_uring"))
    built = str(found.get("built", ""))
    lines: list[tuple[str, object]] = [
        ("io_uring", "works" if works else f"cannot be used: {found.get('why') or 'unknown'}"),
        ("liburing", found.get("liburing") or f"not found ({LIBURING_HINT})"),
    ]
    if not found.get("native"):
        lines.append(("engine", "python: the native one is not built; run make, or pip install"))
    elif built.startswith("without"):
        lines.append(("engine", f"threads: zinf._aio was built without liburing ({LIBURING_HINT})"))
    else:
        lines.append(("engine", "uring" if works else "threads: io_uring cannot be used"))
    if works:
        pinned = found.get("registered_buffers")
        lines.append(("registered buffers", "yes" if pinned is True else f"no: {pinned}" if pinned else "unknown"))
        for key in ("setup_flags", "opcodes", "features"):
            if found.get(key):
                lines.append((key.replace("_", " "), " ".join(found[key])))
    return lines


# -------------------------------------------------------------------------------------------------------------- machine


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def cpu() -> dict[str, Any]:
    info = _read("/proc/cpuinfo")
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    has = set((fields.get("flags") or fields.get("Features") or "").split())
    try:
        from zinf.ops import available_isas

        forced = os.environ.get("ZINF_ISA")
        kernels = f"{available_isas()[-1]} of {', '.join(available_isas())}" + (f", ZINF_ISA forces {forced}" if forced else "")
    except ImportError as e:
        kernels = f"not built: run make, or pip install ({e})"
    return {
        "model": fields.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "flags": [f for f in ISA_FLAGS if f in has],
        "kernels": kernels,
    }


def memory() -> dict[str, Any]:
    """Bytes, and what limits them."""
    info = {line.split(":")[0]: line.split(":")[1].split()[0] for line in _read("/proc/meminfo").splitlines() if ":" in line}
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    thp = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = thp[thp.find("[") + 1 : thp.find("]")] if "[" in thp else ""
    use = {"always": "transparent, for all memory", "madvise": "transparent, where asked for: zinf asks"}.get(
        mode, "off: reads are slower; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    return {
        "total": int(info.get("MemTotal", 0)) * 1024,
        "available": int(info.get("MemAvailable", 0)) * 1024,
        "cgroup_limit": cgroup_limit(),
        "memlock": "unlimited" if soft == resource.RLIM_INFINITY else f"{format_bytes(soft)}{' (root is exempt)' if os.geteuid() == 0 else ''}",
        "hugepages": use,
    }


def cgroup_limit(root: str = "/sys/fs/cgroup", self_file: str = "/proc/self/cgroup") -> int | None:
    """The tightest memory limit of the cgroups that this process is in (v2, then v1), bytes; None where there is none."""
    limits = []
    for line in _read(self_file).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = Path(root), "memory.max"
        elif "memory" in controllers.split(","):
            base, name = Path(root, "memory"), "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            value = _read(folder / name).strip()
            if value.isdigit() and int(value) < 1 << 60:  # v1 says "no limit" with a number near 2**63
                limits.append(int(value))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return min(limits, default=None)


def _memory_line(m: dict[str, Any]) -> str:
    line = f"{format_bytes(m['total'])}, {format_bytes(m['available'])} available"
    return f"{line}, but this process may use only {format_bytes(m['cgroup_limit'])} (cgroup)" if m["cgroup_limit"] else line


# --------------------------------------------------------------------------------------------------------------- drives


def drive(path: str) -> dict[str, Any]:
    """The drive below `path`: device, filesystem, free space, and whether O_DIRECT works there."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        return {"path": path, "problem": "no such folder"}
    usage = shutil.disk_usage(path)
    device, mount, filesystem = mount_of(path)
    kind = block_device(os.stat(path).st_dev)
    return {
        "path": path,
        "device": f"{device}, {kind}" if kind else device,
        "filesystem": f"{filesystem} at {mount}" + (" (in memory: no place for a store)" if filesystem in ("tmpfs", "ramfs") else ""),
        "space": f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}",
        "O_DIRECT": direct_io(path),
        "measured": _rates(path),
    }


def _rates(path: str) -> str:
    """What `zinf bench io` found there."""
    found = measured.load().drive(path)
    if found is None:
        return f"no: zinf bench io --path {path}"
    rates = f"reads {text.rate(found.read)}, writes {text.rate(found.write)}, both at once {text.rate(found.both)} each way"
    return f"{rates}; blocks of {format_bytes(found.block_size)}, {found.queue_depth} in flight ({found.when})"


def mount_of(path: str) -> tuple[str, str, str]:
    """(device, mount point, filesystem) of the deepest mount that holds `path`."""
    best = ("unknown", "/", "unknown")
    real = os.path.realpath(path)
    for line in _read("/proc/self/mounts").splitlines():
        device, mount, filesystem = line.split()[:3]
        mount = mount.encode().decode("unicode_escape")  # \040 is a space
        if (real + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best[1]):
            best = (device, mount, filesystem)
    return best


def block_device(dev: int) -> str | None:
    """The model and kind of a block device, from sysfs."""
    folder = Path(f"/sys/dev/block/{os.major(dev)}:{os.minor(dev)}")
    if not folder.exists():
        return None
    real = folder.resolve()
    disk = real if (real / "queue").exists() else real.parent
    model = _read(disk / "device/model").strip()
    if disk.name.startswith(("vd", "xvd")):
        return "a virtual disk"
    kind = "NVMe" if disk.name.startswith("nvme") else "rotating: slow" if _read(disk / "queue/rotational").strip() == "1" else "solid state"
    return ", ".join(part for part in (model, kind) if part)


def direct_io(path: str) -> str:
    """Whether a file in `path` can be opened with O_DIRECT."""
    try:
        fd, name = tempfile.mkstemp(prefix=".zinf-env-", dir=path)
    except OSError as e:
        return f"cannot write here: {e.strerror}"
    try:
        os.close(fd)
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
        return "yes"
    except OSError as e:
        return "no: reads and writes go through the page cache, slower" if e.errno in (errno.EINVAL, errno.EOPNOTSUPP) else f"no: {e.strerror}"
    finally:
        os.unlink(name)


def _read(path: str | Path) -> str:
    """A small file of the kernel's, or nothing."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
