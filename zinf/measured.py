"""What this machine was measured to do, kept between processes: drives by path, host and compute, and what a model's blocks take.

    book    all that is known of this machine; one JSON file has a book for each machine that shares the home directory
    drive   what `zinf bench io` found on a path: the best block and depth, and bytes a second
    host    what `zinf bench machine` found: memory, optimizer and matmul rates
    pace    seconds of one model's forward and backward for one shape of batch, of this machine: `zinf plan MODEL` measures it

The planner reads all of it, an engine only its drives. Nobody but `zinf bench` and `zinf plan` measures: an engine that finds nothing here
goes on with defaults. The file is $ZINF_MEASURED, else machine.json in the cache. One that is damaged, or in an older format, counts as none: measuring
again writes it anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zinf.config import Bytes, build, cache_dir, convert_fields, require
from zinf.errors import ConfigError
from zinf.layout import PAGE

log = logging.getLogger("zinf")

FORMAT = 1
BLOCK_SIZE, QUEUE_DEPTH = 4 << 20, 16  # where nothing was measured


class _Positive:
    """Converts its fields, and refuses numbers that no measurement gives."""

    def __post_init__(self) -> None:
        convert_fields(self)
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            require(isinstance(value, str) or value is None or 0 < value < float("inf"), f.name, value, "a positive number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drive(_Positive):
    """Rates in bytes a second, of large records by zinf's own engine."""

    path: str  # where it was measured
    when: str  # date
    block_size: Bytes
    queue_depth: int
    read: float
    write: float
    both: float  # each way, while as much is read as written

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.block_size % PAGE == 0 and self.block_size <= 1 << 30, "block_size", self.block_size, f"a multiple of {PAGE}, at most 1 GiB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host(_Positive):
    """Rates in bytes (FLOP) a second, of all cores that this process may use."""

    when: str
    device: str  # what computes: "cpu", or a GPU's name
    threads: int
    dram: float  # a copy: bytes read plus bytes written
    adam: float  # AdamW on bf16 weights: bytes read plus bytes written
    flops: float  # bf16 matmul on the device
    flops_fp32: float
    device_memory: Bytes | None = None  # None: the device computes in host memory
    link: float | None = None  # to the device, each way; None: not measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace(_Positive):
    """Seconds of all forwards, recomputations and backwards of one step."""

    when: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Book:
    """What is known of this machine."""

    drives: dict[str, Drive] = dataclasses.field(default_factory=dict)  # by `drive_key`
    host: Host | None = None
    paces: dict[str, Pace] = dataclasses.field(default_factory=dict)  # by `pace_key`

    def drive(self, path: str) -> Drive | None:
        """What was measured on the drive below `path`, which need not exist yet."""
        return self.drives.get(drive_key(path))


# -------------------------------------------------------------------------------------------------------- whose numbers


def machine_key() -> str:
    """Another one on another machine, and where this one got other cores. Containers of one image share a machine-id, so that alone is not enough."""
    parts = [platform.machine(), _cpu(), str(len(os.sched_getaffinity(0)))]
    parts.append(_read("/etc/machine-id") or _read("/var/lib/dbus/machine-id") or _read("/proc/sys/kernel/random/boot_id"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def drive_key(path: str | os.PathLike[str]) -> str:
    """Device number, filesystem and size of what `path` is on, or will be: a drive that was swapped is not taken for the old one."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        device, room = folder.stat().st_dev, os.statvfs(folder)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be looked at: {e.strerror}") from e
    return f"{os.major(device)}:{os.minor(device)} {filesystem(device)} {room.f_blocks * room.f_frsize}"


def filesystem(device: int) -> str:
    """The type of the filesystem with this device number, "" where the kernel does not tell."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _read("/proc/self/mountinfo").splitlines():
        fields, _, kind = line.partition(" - ")
        if kind and fields.split()[2] == wanted:
            return kind.split()[0]
    return ""


def pace_key(fingerprint: str, rows: int, seq: int, dtype: str) -> str:
    """One model under one shape of batch. `fingerprint` is layout.Model's."""
    return f"{fingerprint} {rows}x{seq} {dtype}"


def _cpu() -> str:
    line = next((line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")), "")
    return line.partition(":")[2].strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------------------- the file


def location() -> Path:
    return Path(os.environ.get("ZINF_MEASURED") or cache_dir() / "machine.json")


def load(file: Path | None = None) -> Book:
    """What is known of this machine; nothing, where the file has nothing of it. Never raises: what is damaged is left out, with one log line."""
    file = file or location()
    machines = _machines(file)
    try:
        return _book(machines.get(machine_key(), {}))
    except (ConfigError, TypeError, AttributeError, ValueError) as e:
        log.warning("%s: what it says of this machine is damaged and not used (%s): zinf bench measures again", file, e)
        return Book()


def save(book: Book, file: Path | None = None) -> Path:
    """Replace what is known of this machine, whole or not at all; other machines' books stay. Raises OSError."""
    file = file or location()
    machines = _machines(file) | {machine_key(): dataclasses.asdict(book)}
    file.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=file.name, dir=file.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            json.dump({"format": FORMAT, "machines": machines}, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return file


def _machines(file: Path) -> dict[str, Any]:
    """The books of the file, by machine."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            log.info("%s is in format %s, this zinf has %d: it counts as none", file, content["format"], FORMAT)
            return {}
        return dict(content["machines"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        log.warning("%s is damaged and not used (%s): zinf bench measures again", file, " ".join(str(e).split()) or type(e).__name__)
        return {}


def _book(values: dict[str, Any]) -> Book:
    """Raises for anything but what `save` wrote."""
    drives = {str(key): build(Drive, value, str(key)) for key, value in values.get("drives", {}).items()}
    paces = {str(key): build(Pace, value, str(key)) for key, value in values.get("paces", {}).items()}
    return Book(drives, build(Host, values["host"], "host") if values.get("host") else None, paces)


# ---------------------------------------------------------------------------------------------- what an engine takes of it


def io_options(paths: Sequence[str], block_size: int | None, queue_depth: int | None) -> dict[str, int]:
    """Block size and depth of one I/O engine for all of `paths`: as told, else as measured, else the defaults.

    Depths of different drives add up. The block is the largest that one of them wants: others lose less by it than that one by a smaller.
    """
    known = _known(paths) if block_size is None or queue_depth is None else {}
    measured = [drive for drive in known.values() if drive is not None]
    block = max((d.block_size for d in measured), default=BLOCK_SIZE)
    depth = min(sum(d.queue_depth for d in measured), 256) if measured else QUEUE_DEPTH
    return {"block_size": block_size or block, "queue_depth": queue_depth or depth}


def shares(paths: Sequence[str]) -> list[float] | None:
    """The part of a store's bytes that each path takes: in proportion to its measured rate. None, that is equal, unless all of them are known.

    Paths on one drive share its rate. A step reads about as much as it writes, so the rate is that of both at once.
    """
    if len(paths) < 2:
        return None
    known, keys = _known(paths), [drive_key(path) for path in paths]
    rates = [drive.both / keys.count(key) for key in keys if (drive := known[key]) is not None]
    if len(rates) < len(paths):
        return None
    return [rate / sum(rates) for rate in rates]


def drives(paths: Sequence[str]) -> list[Drive]:
    """What is known of each drive that `paths` lie on; nothing, unless all of them are known."""
    known = list(_known(paths).values())
    found = [drive for drive in known if drive is not None]
    return found if len(found) == len(known) else []


def _known(paths: Sequence[str]) -> dict[str, Drive | None]:
    """By drive."""
    if not paths:
        return {}
    book = load()
    return {key: book.drives.get(key) for key in map(drive_key, paths)}
