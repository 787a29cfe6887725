"""What a step costs: bytes on each link from the layout and the placement that the engine would choose, and seconds from the machine.

Pure arithmetic. A step has two phases that do not overlap each other, forward and backward; within one, every resource works at once
and the slowest decides. The optimizer's traffic belongs to the phase under which shards are stepped: the next forward where grads
wait for the norm, else backward. In front of it all stands one fill: the first shard's weights, which nothing hides.

    compute   2 FLOP a parameter and token in forward, 6 in backward (one of the three passes is the recomputation); attention's own are left out
    h2d, d2h  weights up at each use that no slab has kept, boundary activations, grads down; both ways at once
    dram      every byte that the optimizer, the links or NVMe read or write in host memory
    nvme      reads and writes share the drives: their times add
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from zinf import memory, placement
from zinf.config import Config, format_bytes
from zinf.errors import BudgetError
from zinf.placement import Plan, Tier
from zinf.planner.machine import Machine
from zinf.planner.model import Facts

CONTEXT = 1 << 30  # bytes of a device that its driver, its libraries and torch's allocator take; assumed
BLOCK_BYTES = 34  # a hidden element of one block's saved tensors in bf16 (Korthikanti et al. 2022, without attention matrices)
RESOURCES = ("compute", "h2d", "d2h", "dram", "nvme")
DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is asked for. A batch is all rows of one optimizer step."""

    batch: int
    seq: int
    micro_batch: int | None = None
    clip: bool = False
    host_memory: int | None = None  # None: 9/10 of the machine's
    device_memory: int | None = None  # None: what the machine's leaves beside activations
    activations: str = "auto"
    state: str = "auto"

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of one phase of a step: FLOPs, and bytes."""

    flops: float = 0
    h2d: float = 0
    d2h: float = 0
    dram: float = 0
    nvme_read: float = 0
    nvme_write: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What the planner says. Times in seconds, of one step."""

    machine: Machine
    workload: Workload
    plan: Plan
    traffic: Traffic
    seconds: dict[str, float]  # busy, by resource
    step: float
    limiter: str
    store: int  # bytes on NVMe

    @property
    def tokens_per_second(self) -> float:
        return self.workload.tokens / self.step

    @property
    def steps_per_day(self) -> float:
        return DAY / self.step

    @property
    def written_per_1000_steps(self) -> float:
        """Bytes."""
        return 1000 * self.traffic.nvme_write

    @property
    def days_to_endurance(self) -> float | None:
        """Of training without a pause, until the drives have written what their maker rates them for; None: nothing is written."""
        if not self.traffic.nvme_write:
            return None
        return self.machine.endurance * self.machine.drives / self.traffic.nvme_write / self.steps_per_day


@dataclasses.dataclass(frozen=True)
class Suggestion:
    change: str
    gain: float  # tokens/s, of the changed over the present


def times(traffic: Traffic, machine: Machine) -> dict[str, float]:
    """Seconds for which each resource is busy."""
    return {
        "compute": traffic.flops / (machine.flops * machine.efficiency),
        "h2d": traffic.h2d / machine.link,
        "d2h": traffic.d2h / machine.link,
        "dram": traffic.dram / machine.dram,
        "nvme": (traffic.nvme_read / machine.nvme_read + traffic.nvme_write / machine.nvme_write) / machine.drives,
    }


def step_time(phases: tuple[Traffic, ...], fill: Traffic, machine: Machine) -> tuple[float, str]:
    """Seconds of a step, and the resource that decides most of them."""
    decided = dict.fromkeys(RESOURCES, 0.0)
    for phase in phases:
        busy = times(phase, machine)
        slowest = max(busy, key=lambda r: busy[r])
        decided[slowest] += busy[slowest]
    return sum(decided.values()) + sum(times(fill, machine).values()), max(decided, key=lambda r: decided[r])


def forecast(facts: Facts, machine: Machine, workload: Workload) -> Forecast:
    """The faster of what fits: boundary activations on the device, or on the host.

    Raises:
        BudgetError: nothing fits; says what does not, and what to change.
    """
    found: list[Forecast] = []
    errors: list[BudgetError] = []
    for tier in ("device", "host") if workload.activations == "auto" else (workload.activations,):
        try:
            found.append(_forecast(facts, machine, workload, tier))
        except BudgetError as e:
            errors.append(e)
    if not found:
        raise errors[-1]
    return min(found, key=lambda f: f.step)


def boundaries(facts: Facts, workload: Workload) -> int:
    """Bytes of the inputs of all blocks, which wait for backward."""
    return 2 * facts.blocks * facts.hidden * workload.tokens


def _config(facts: Facts, machine: Machine, workload: Workload, tier: str) -> Config:
    """What a user would tell the engine."""
    kept = boundaries(facts, workload)
    taken = CONTEXT + BLOCK_BYTES * facts.hidden * (workload.micro_batch or workload.batch) * workload.seq + (kept if tier == "device" else 0)
    device = workload.device_memory or machine.device_memory - taken
    if device <= 0:
        raise BudgetError(
            f"activations need {format_bytes(taken)} of device memory, the machine has {format_bytes(machine.device_memory)}: "
            "lower --micro-batch, --batch or --seq, or put activations on the host"
        )
    return Config(
        host_memory=workload.host_memory or machine.host_memory * 9 // 10,
        device_memory=device,
        nvme_path=("planned",),
        micro_batch_size=workload.micro_batch,
        max_grad_norm=1.0 if workload.clip else None,
        state=workload.state,  # type: ignore[arg-type]
        activations=tier,  # type: ignore[arg-type]
        activation_memory=kept if tier == "host" else None,
    )


def _forecast(facts: Facts, machine: Machine, workload: Workload, tier: str) -> Forecast:
    config = _config(facts, machine, workload, tier)
    if config.host_memory is not None and config.host_memory > machine.host_memory:
        raise BudgetError(f"--host-memory is {format_bytes(config.host_memory)}, the machine has {format_bytes(machine.host_memory)}: ask for less")
    deferred = memory.choose_step_mode(config, True, False) == "deferred"
    request = memory.request(config, True, False, "deferred" if deferred else "backward")
    plan = placement.plan(facts.layout, request, facts.root, facts.pinned)
    store = store_nbytes(facts)
    if store > machine.nvme_size * machine.drives:
        raise BudgetError(
            f"the store needs {format_bytes(store)} of NVMe (two versions of everything), {machine.drives} x {format_bytes(machine.nvme_size)} are there: "
            "more --drives, or crash_safe: false, which keeps one version"
        )
    every = 50 if any(t is Tier.HOST and i != facts.root for i, t in enumerate(plan.state)) else 1  # the engine's default
    parts = (*phases(facts, plan, workload, deferred, request.grads_wide, request.pass_wide), commit(facts, plan, every))
    first = max((facts.layout.shards[i].weights_nbytes, plan.weights[i] is Tier.NVME) for c in plan.slabs for i in c.members) if plan.slabs else (0, False)
    step, limiter = step_time(parts, Traffic(h2d=first[0], nvme_read=first[0] * first[1]), machine)
    total = sum(parts, Traffic())
    return Forecast(machine, workload, plan, total, times(total, machine), step, limiter, store)


def store_nbytes(facts: Facts) -> int:
    """Bytes that the store takes on NVMe: two versions of what is trained, one of what is not."""
    return sum((r.weights_nbytes + r.state_nbytes) * (2 if r.trainable else 1) for s in facts.layout.shards for r in s.runs)


def phases(facts: Facts, plan: Plan, workload: Workload, deferred: bool, grads_wide: bool, pass_wide: bool) -> tuple[Traffic, Traffic]:
    """Traffic of forward and of backward."""
    shards = facts.layout.shards
    forward = Traffic(flops=2.0 * facts.active * workload.tokens)
    backward = Traffic(flops=6.0 * facts.active * workload.tokens)
    again = _uploaded_again(plan)
    # Stepped under backward, the last of it get their new weights into the slabs where they are, from the step's own read.
    there = set() if deferred else {i for c in plan.slabs for i in c.members[: c.count]}
    steps = Traffic()
    for i, shard in enumerate(shards):
        use = _use(shard.weights_nbytes, plan.weights[i])
        forward += _use(shard.weights_nbytes, Tier.HOST) if i in there else use
        backward += use if i in again else Traffic()
        if shard.trainable:
            arriving, waiting = shard.grads_nbytes(pass_wide), shard.grads_nbytes(grads_wide)
            backward += Traffic(d2h=arriving, dram=arriving, nvme_write=waiting if plan.grads_away else 0)
            trained = sum(r.weights_nbytes for r in shard.runs if r.trainable)
            steps += _step(trained, plan.weights[i], shard.state_nbytes, plan.state[i], waiting, plan.grads_away, again=not deferred)
    kept = boundaries(facts, workload)
    if plan.activations is not Tier.DEVICE:
        beyond = max(0, kept - plan.activations_nbytes)
        forward += Traffic(d2h=kept, dram=kept + beyond, nvme_write=beyond)
        backward += Traffic(h2d=kept, dram=kept + beyond, nvme_read=beyond)
    return (forward + steps, backward) if deferred else (forward, backward + steps)


def _uploaded_again(plan: Plan) -> set[int]:
    """Shards whose weights backward uploads again: of each size of slab, as many of the last of forward as there are slabs are still there."""
    return {i for c in plan.slabs for i in c.members[: len(c.members) - c.count]}


def _use(weights: int, tier: Tier) -> Traffic:
    """Weights on their way to one use."""
    read = weights if tier is Tier.NVME else 0
    return Traffic(h2d=weights, dram=weights + read, nvme_read=read)


def commit(facts: Facts, plan: Plan, every: int) -> Traffic:
    """What a commit writes of trained weights and state that live in memory, over the steps between two."""
    dirty = 0
    for i, shard in enumerate(facts.layout.shards):
        dirty += sum(r.weights_nbytes for r in shard.runs if r.trainable) if plan.weights[i] is not Tier.NVME else 0
        dirty += shard.state_nbytes if plan.state[i] is not Tier.NVME else 0
    return Traffic(dram=dirty / every, nvme_write=dirty / every)


def _step(weights: int, weights_tier: Tier, state: int, state_tier: Tier, grads: int, away: bool, again: bool) -> Traffic:
    """The optimizer on one shard: reads grads, reads and writes weights and state; what lives on NVMe crosses host memory once more each way.

    `again`: weights that live on NVMe are read for it. Under forward they are not: it is the step's read that forward uses.
    """
    read = (state if state_tier is Tier.NVME else 0) + (weights if again and weights_tier is Tier.NVME else 0) + (grads if away else 0)
    written = (state if state_tier is Tier.NVME else 0) + (weights if weights_tier is Tier.NVME else 0)
    return Traffic(dram=grads + 2 * (weights + state) + read + written, nvme_read=read, nvme_write=written)


# ---------------------------------------------------------------------------------------------------------- what would help


def changes(machine: Machine, workload: Workload) -> Iterator[tuple[str, Machine, Workload]]:
    """Each one change, and what there would be after it."""
    host = 2 * machine.host_memory
    more = dataclasses.replace(workload, host_memory=2 * workload.host_memory if workload.host_memory else None)
    yield f"host memory {format_bytes(host)}", dataclasses.replace(machine, host_memory=host), more
    yield f"{2 * machine.drives} drives", dataclasses.replace(machine, drives=2 * machine.drives), workload
    micro = workload.micro_batch or workload.batch
    yield f"batch {2 * workload.batch} in micro-batches of {micro}", machine, dataclasses.replace(workload, batch=2 * workload.batch, micro_batch=micro)
    for key, text in (("link", "a link to the device of twice the rate"), ("dram", "host memory of twice the rate"), ("flops", "a device of twice the rate")):
        yield text, dataclasses.replace(machine, **{key: 2 * getattr(machine, key)}), workload
    if workload.state != "nvme" and not workload.clip:
        yield "state: nvme, so that shards step under backward and grads need not wait", machine, dataclasses.replace(workload, state="nvme")
    if workload.clip:
        yield "no clipping of the norm, and state: nvme, so that shards step under backward", machine, dataclasses.replace(workload, clip=False, state="nvme")
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
