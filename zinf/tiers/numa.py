"""Which cores are near a card, from /sys: host memory that is first touched there, and threads that work there, cross no socket.

One node, or none that is known, means that there is nothing to choose.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

SYS = Path("/sys")


def near(bus_id: str | None, sys: Path | None = None) -> tuple[int, ...]:
    """The cores of the card's node that this process may use; () where the node is unknown, the only one, or closed to us."""
    root = sys or SYS
    node = node_of(bus_id, root)
    if node is None or len(list((root / "devices/system/node").glob("node[0-9]*"))) < 2:
        return ()
    try:
        cores = parse((root / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return ()
    return tuple(sorted(cores & os.sched_getaffinity(0)))


def node_of(bus_id: str | None, sys: Path | None = None) -> int | None:
    """The NUMA node of a PCI device such as 0000:65:00.0; None if /sys does not say."""
    if bus_id is None:
        return None
    try:
        node = int(((sys or SYS) / f"bus/pci/devices/{bus_id.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def parse(cpulist: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


@contextlib.contextmanager
def on_node(cpus: Sequence[int]) -> Iterator[None]:
    """Let the calling thread run on `cpus` within the block, so that pages it touches first lie there. No-op for none."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
