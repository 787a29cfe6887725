"""What a machine can do: memory of each tier, and the rate of each resource. From a YAML file (some are shipped), or as this one was measured."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from zinf import measured
from zinf.config import Bytes, build, convert_fields, nearest, read_file, require
from zinf.errors import ConfigError
from zinf.measured import Book, Drive
from zinf.tiers.host import available_bytes

SHIPPED = Path(__file__).parent / "machines"
EFFICIENCY = 0.7  # of the rate of a large matmul, that training reaches; assumed where a model's own pace was not measured
LINK = 12e9  # bytes a second to a GPU whose link was not measured; assumed: PCIe 4.0 x8, or 3.0 x16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates are bytes a second (flops: FLOP a second) that are sustained; those of NVMe, its size and endurance are one drive's."""

    name: str
    device_memory: Bytes
    host_memory: Bytes
    flops: float  # peak, dense bf16 with fp32 accumulation
    efficiency: float  # the fraction of the peak that training reaches
    link: float  # host to device, and at the same time as much back
    dram: float
    nvme_read: float
    nvme_write: float
    nvme_size: Bytes
    flops_fp32: float | None = None
    adam: float | None = None  # bytes a second that the optimizer reads and writes; None: as dram
    nvme_both: float | None = None  # each way while as much is read as written; None: times add, 1 / (1 / read + 1 / write)
    endurance: Bytes | None = None  # that the drive's maker rates it to take, written; None: not known
    drives: int = 1
    direct: bool = False  # there is no GPU: the host's cores compute, from host memory, and step too
    sources: tuple[str, ...] = ()  # where the numbers come from

    def __post_init__(self) -> None:
        convert_fields(self)
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            require(isinstance(value, (str, tuple, bool)) or value is None or value > 0, f.name, value, "a positive number")
        require(self.efficiency <= 1, "efficiency", self.efficiency, "a fraction of the peak, up to 1")

    def computing(self, dtype: str) -> Machine:
        """For a model that computes in `dtype`. Raises ConfigError where it is not known how fast that is."""
        if dtype != "fp32":
            return self
        if self.flops_fp32 is None:
            raise ConfigError(f"{self.name} does not say its flops_fp32: add it to its file, or plan for bf16")
        return dataclasses.replace(self, flops=self.flops_fp32)

    def paced(self, flops: float, seconds: float, source: str) -> Machine:
        """As fast as it was measured for the model itself."""
        return dataclasses.replace(self, flops=flops / seconds, efficiency=1.0, sources=(*self.sources, source))

    def nvme_seconds(self, read: float, written: float) -> float:
        """As much of both as there is goes at once, then the rest alone."""
        both = self.nvme_both or 1 / (1 / self.nvme_read + 1 / self.nvme_write)
        mixed = min(read, written)
        return (mixed / both + (read - mixed) / self.nvme_read + (written - mixed) / self.nvme_write) / self.drives

    def with_drives(self, book: Book, paths: Sequence[str]) -> Machine:
        """The same machine with the measured drives of `paths`. Raises ConfigError for one that is not measured."""
        drives = {measured.drive_key(path): _measured(book, path) for path in paths}
        total = sum(d.both for d in drives.values())
        # Striped in proportion to `both`: reading alone is over when the drive that is relatively slowest at it is.
        read, write = (1 / max(d.both / total / rate(d) for d in drives.values()) for rate in (lambda d: d.read, lambda d: d.write))
        count = len(drives)
        free = sum(_free_bytes(next(path for path in paths if measured.drive_key(path) == key)) for key in drives)
        rates = dict(nvme_read=read / count, nvme_write=write / count, nvme_both=total / count)
        dates = ", ".join(f"{d.path} ({d.when})" for d in drives.values())
        return dataclasses.replace(
            self, drives=count, nvme_size=free // count, endurance=None, sources=(*self.sources, f"NVMe: measured on {dates}, free space now"), **rates
        )


def names() -> list[str]:
    """The machines that are shipped."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def load(name: str) -> Machine:
    """The machine of a YAML file, or the shipped one of that name (rtx4090, or rtx4090.yaml).

    Raises:
        ConfigError: there is none; or a key of the file is missing, unknown or impossible.
    """
    stem = name.removesuffix(".yaml")
    shipped = not Path(name).is_file() and stem in names()
    file = SHIPPED / f"{stem}.yaml" if shipped else Path(name)
    if not file.is_file():
        raise ConfigError(f"--machine {name}: no such file, and no machine that is shipped; {nearest(stem, names())}")
    machine = build(Machine, read_file(file), str(file))
    return dataclasses.replace(machine, sources=(f"{'datasheets, partly assumed' if shipped else 'as written'}: {file.name}",))


def this(book: Book, paths: Sequence[str]) -> Machine:
    """This machine, as `book` has it, with the drives of `paths`.

    Raises:
        ConfigError: something of it was not measured yet.
    """
    host = book.host
    if host is None:
        raise ConfigError("this machine is not measured yet: run `zinf bench machine`, or give --machine with one that is described")
    memory = available_bytes() or 0
    sources = [f"memory and compute: measured {host.when}, {host.threads} threads"]
    if host.device_memory is not None and host.link is None:
        sources.append(f"link to the GPU: assumed {LINK / 1e9:.0f} GB/s")
    machine = Machine(
        name=f"this machine ({'no GPU, ' if host.device_memory is None else f'{host.device}, '}{host.threads} cores)",
        device_memory=host.device_memory or memory,
        host_memory=memory,
        flops=host.flops,
        flops_fp32=host.flops_fp32,
        efficiency=EFFICIENCY,
        link=host.link or LINK,
        dram=host.dram,
        adam=host.adam,
        nvme_read=1,
        nvme_write=1,
        nvme_size=1,
        direct=host.device_memory is None,
        sources=tuple(sources),
    )
    return machine.with_drives(book, paths) if paths else machine


def _measured(book: Book, path: str) -> Drive:
    drive = book.drive(path)
    if drive is None:
        raise ConfigError(f"the drive of {path} is not measured yet: run `zinf bench io --path {path}`")
    return drive


def _free_bytes(path: str) -> int:
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
