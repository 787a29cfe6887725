"""What a machine can do, from a YAML file: memory of each tier, and the rate of each resource. Some machines are shipped."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from zinf.config import Bytes, build, convert_fields, nearest, read_file, require
from zinf.errors import ConfigError

SHIPPED = Path(__file__).parent / "machines"


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
    endurance: Bytes  # that the drive's maker rates it to take, written
    drives: int = 1

    def __post_init__(self) -> None:
        convert_fields(self)
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            require(isinstance(value, str) or value > 0, f.name, value, "a positive number")
        require(self.efficiency <= 1, "efficiency", self.efficiency, "a fraction of the peak, up to 1")


def names() -> list[str]:
    """The machines that are shipped."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def load(name: str | None) -> Machine:
    """The machine of a YAML file, or the shipped one of that name (rtx4090, or rtx4090.yaml).

    Raises:
        ConfigError: there is none; or a key of the file is missing, unknown or impossible.
    """
    if name is None:
        raise ConfigError(f"which machine? This one is not measured yet: give --machine with a YAML file that describes it, or one of {', '.join(names())}")
    stem = name.removesuffix(".yaml")
    file = SHIPPED / f"{stem}.yaml" if not Path(name).is_file() and stem in names() else Path(name)
    if not file.is_file():
        raise ConfigError(f"--machine {name}: no such file, and no machine that is shipped; {nearest(stem, names())}")
    return build(Machine, read_file(file), str(file))
