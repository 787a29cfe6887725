"""Which one change to the machine or to what is asked for would help most: each is tried, by the planner itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from zinf.config import format_bytes
from zinf.errors import BudgetError
from zinf.memory import COMMIT_EVERY_RESIDENT
from zinf.planner.cost import Forecast, Workload, forecast
from zinf.planner.machine import Machine
from zinf.planner.model import Facts


@dataclasses.dataclass(frozen=True)
class Suggestion:
    change: str
    gain: float  # tokens/s, of the changed over the present


Change = tuple[str, Machine, Workload]  # what is said of it, and what there is after it


def changes(machine: Machine, workload: Workload) -> Iterator[Change]:
    """Each one change, and what there would be after it."""
    host, budget = 2 * machine.host_memory, 2 * (workload.host_memory or 0)
    more = dataclasses.replace(workload, host_memory=budget or None)
    if 0 < budget <= machine.host_memory:
        yield f"host_memory {format_bytes(budget)}, which the machine has", machine, more
    else:
        yield f"host memory {format_bytes(host)}", dataclasses.replace(machine, host_memory=host), more
    yield f"{2 * machine.drives} drives", dataclasses.replace(machine, drives=2 * machine.drives), workload
    micro = workload.micro_batch or workload.batch
    yield f"batch {2 * workload.batch} in micro-batches of {micro}", machine, dataclasses.replace(workload, batch=2 * workload.batch, micro_batch=micro)
    cores = "cores" if machine.direct else "a device"
    yield f"{cores} of twice the rate", dataclasses.replace(machine, flops=2 * machine.flops), workload
    if not machine.direct:
        yield "a link to the device of twice the rate", dataclasses.replace(machine, link=2 * machine.link), workload
    adam = 2 * machine.adam if machine.adam else None
    yield "host memory of twice the rate", dataclasses.replace(machine, dram=2 * machine.dram, adam=adam), workload
    if workload.state != "nvme" and not workload.clip:
        yield "state: nvme, so that shards step under backward and grads need not wait", machine, dataclasses.replace(workload, state="nvme")
    if workload.clip:
        yield "no clipping of the norm, and state: nvme, so that shards step under backward", machine, dataclasses.replace(workload, clip=False, state="nvme")
    if workload.commit_every in (None, 1):
        text = f"commit_every: {COMMIT_EVERY_RESIDENT}, so that weights in memory are not written every step; a crash loses as many"
        yield text, machine, dataclasses.replace(workload, commit_every=COMMIT_EVERY_RESIDENT)
    if workload.micro_batch is not None and workload.micro_batch < workload.batch:
        yield "no micro-batches, so that grads need not be summed in fp32", machine, dataclasses.replace(workload, micro_batch=None)


def suggestions(facts: Facts, now: Forecast, count: int = 3) -> list[Suggestion]:
    """The changes that help most, with at least a hundredth more tokens a second; fewer than `count` where fewer do."""
    found = []
    for text, machine, workload in changes(now.machine, now.workload):
        try:
            gain = forecast(facts, machine, workload).tokens_per_second / now.tokens_per_second
        except BudgetError:
            continue
        if gain >= 1.01:
            found.append(Suggestion(text, gain))
    return sorted(found, key=lambda s: -s.gain)[:count]


def remedies(facts: Facts, machine: Machine, workload: Workload, count: int = 2) -> list[str]:
    """For what does not fit: the first changes of different kinds that would make it, the cheapest first; where no one does, the first two together."""
    found = [text for kind in _kinds(machine, workload) for text in _first_that_fits(facts, kind)]
    return found[:count] or next(_pairs(facts, machine, workload), [])


def _pairs(facts: Facts, machine: Machine, workload: Workload) -> Iterator[list[str]]:
    """Two changes together."""
    for kind in _kinds(machine, workload):
        for first, there, work in kind:
            for then in _kinds(there, work):
                for second in _first_that_fits(facts, then):
                    yield [f"{first} and {second}"]


def _first_that_fits(facts: Facts, kind: list[Change]) -> list[str]:
    """What is said of it; nothing if none does."""
    for text, machine, workload in kind:
        try:
            forecast(facts, machine, workload)
        except BudgetError:
            continue
        return [text]
    return []


def _kinds(machine: Machine, workload: Workload) -> Iterator[list[Change]]:
    """Changes by kind, each from the least on."""
    rows = workload.micro_batch or workload.batch
    smaller = [rows >> k for k in range(1, rows.bit_length())]
    yield [(f"--micro-batch {m}", machine, dataclasses.replace(workload, micro_batch=m)) for m in smaller]
    for key, option in (("host_memory", "--host-memory"), ("device_memory", "--device-memory")):
        if getattr(workload, key) is not None:
            without: dict[str, Any] = {key: None}
            yield [(f"no {option}, but all that the machine has", machine, dataclasses.replace(workload, **without))]
    if workload.activations != "auto":
        yield [("--activations auto", machine, dataclasses.replace(workload, activations="auto"))]
    batches = [workload.batch >> k for k in range(1, workload.batch.bit_length())]
    yield [(f"--batch {m}", machine, dataclasses.replace(workload, batch=m, micro_batch=None)) for m in batches]
    for key, what in (("device_memory", "device memory"), ("host_memory", "host memory")):
        if not (machine.direct and key == "device_memory"):
            sizes = [k * getattr(machine, key) for k in (2, 4, 8)]
            yield [(f"{format_bytes(n)} of {what}", dataclasses.replace(machine, **{key: n}), workload) for n in sizes]
    yield [(f"{k * machine.drives} drives", dataclasses.replace(machine, drives=k * machine.drives), workload) for k in (2, 4, 8)]
