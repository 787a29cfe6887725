"""What a step costs: bytes on each link from the layout and the placement that the engine would choose, and seconds from the machine.

Pure arithmetic. A step has two phases that do not overlap each other, forward and backward; within one, every resource works at once
and the slowest decides. The optimizer's traffic belongs to the phase under which shards are stepped: the next forward where grads
wait for the norm, else backward. In front of it all stands one fill: the first shard's weights, which nothing hides.

    compute   2 FLOP a parameter and token in forward, 6 in backward (2 of them recompute, 2 are for weights that are trained); attention's own are left out
    optimizer the bytes that it reads and writes in host memory: on a machine without a GPU the same cores do that and compute, so those times add
    h2d, d2h  weights up at each use that no slab has kept, boundary activations, grads down; both ways at once
    dram      every byte that the optimizer, the links or NVMe read or write in host memory
    nvme      reads and writes share the drives: their times add, or what was measured of both at once
"""

from __future__ import annotations

import dataclasses

from zinf import memory, placement, scaling
from zinf.config import Config, format_bytes
from zinf.errors import BudgetError
from zinf.layout import ITEMSIZE
from zinf.placement import Plan, Request, Tier
from zinf.planner.machine import Machine
from zinf.planner.model import Facts

CONTEXT = 1 << 30  # bytes of a device that its driver, its libraries and torch's allocator take; assumed
BLOCK_BYTES = 34  # a hidden element of one block's saved tensors in bf16 (Korthikanti et al. 2022, without attention matrices)
RESOURCES = ("compute", "optimizer", "h2d", "d2h", "dram", "nvme")
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
    weights: str | float = "auto"
    activations: str = "auto"
    state: str | float = "auto"
    grads: str = "auto"
    commit_every: int | None = None  # None: as the engine does
    optimizer: str = "adamw"

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
    stepped: float = 0  # what the optimizer reads and writes, a part of dram

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
        """Of training without a pause, until the drives have written what their maker rates them for; None: not known, or nothing is written."""
        if not self.traffic.nvme_write or self.machine.endurance is None:
            return None
        return self.machine.endurance * self.machine.drives / self.traffic.nvme_write / self.steps_per_day


def times(traffic: Traffic, machine: Machine) -> dict[str, float]:
    """Seconds for which each resource is busy."""
    return {
        "compute": traffic.flops / (machine.flops * machine.efficiency),
        "optimizer": traffic.stepped / (machine.adam or machine.dram),
        "h2d": traffic.h2d / machine.link,
        "d2h": traffic.d2h / machine.link,
        "dram": traffic.dram / machine.dram,
        "nvme": machine.nvme_seconds(traffic.nvme_read, traffic.nvme_write),
    }


def step_time(phases: tuple[Traffic, ...], fill: Traffic, machine: Machine) -> tuple[float, str]:
    """Seconds of a step, and the resource that decides most of them."""
    decided = dict.fromkeys(RESOURCES, 0.0)
    for phase in phases:
        busy = times(phase, machine)
        if machine.direct:
            busy["compute"] += busy.pop("optimizer")
        slowest = max(busy, key=lambda r: busy[r])
        decided[slowest] += busy[slowest]
    return sum(decided.values()) + sum(times(fill, machine).values()), max(decided, key=lambda r: decided[r])


def forecast(facts: Facts, machine: Machine, workload: Workload) -> Forecast:
    """The fastest of what fits: boundary activations on the device, on the host, or on NVMe.

    Raises:
        BudgetError: nothing fits; says what does not, and what to change.
    """
    found: list[Forecast] = []
    errors: list[BudgetError] = []
    for tier in ("device", "host", "nvme") if workload.activations == "auto" and not machine.direct else (workload.activations,):
        try:
            found.append(_forecast(facts, machine, workload, tier))
        except BudgetError as e:
            errors.append(e)
    if not found:
        raise errors[-1]
    return min(found, key=lambda f: f.step)


def budgets(facts: Facts, machine: Machine, workload: Workload, tier: str) -> tuple[int, int]:
    """Bytes of host and device memory that a training may be given. Without a GPU both are one memory, and a quarter of it is the device's."""
    kept = facts.boundary(workload.tokens) if tier == "device" or machine.direct else 0
    rows = workload.micro_batch or workload.batch
    taken = BLOCK_BYTES * facts.hidden * rows * workload.seq * ITEMSIZE[facts.dtype] // 2 + kept
    if not machine.direct:
        host, device, taken = machine.host_memory * 9 // 10, machine.device_memory - taken - CONTEXT, taken + CONTEXT
    else:
        room = machine.host_memory * 9 // 10 - taken
        host, device = room * 3 // 4, room // 4
    if workload.device_memory is None and device <= 0:
        raise BudgetError(
            f"activations need {format_bytes(taken)} of device memory, the machine has {format_bytes(machine.device_memory)}: "
            "lower --micro-batch, --batch or --seq, or put activations on the host"
        )
    return workload.host_memory or host, workload.device_memory or device


def _config(facts: Facts, machine: Machine, workload: Workload, tier: str) -> Config:
    """What a user would tell the engine."""
    host, device = budgets(facts, machine, workload, tier)
    if host > machine.host_memory:
        raise BudgetError(f"--host-memory is {format_bytes(host)}, the machine has {format_bytes(machine.host_memory)}: ask for less")
    return Config(
        host_memory=host,
        device_memory=device,
        nvme_path=("planned",),
        micro_batch_size=workload.micro_batch,
        max_grad_norm=1.0 if workload.clip else None,
        weights=workload.weights,  # type: ignore[arg-type]
        state=workload.state,  # type: ignore[arg-type]
        grads=workload.grads,  # type: ignore[arg-type]
        commit_every=workload.commit_every,
        optimizer=workload.optimizer,  # type: ignore[arg-type]
        activations=tier,  # type: ignore[arg-type]
        activation_memory=facts.boundary(workload.tokens) if tier == "host" else None,
    )


def _forecast(facts: Facts, machine: Machine, workload: Workload, tier: str) -> Forecast:
    config = _config(facts, machine, workload, tier)
    mode = memory.choose_step_mode(config, True, scaling.scales(config, facts.layout))
    request = memory.request(config, True, machine.direct, mode)
    plan = placement.plan(facts.layout, request, facts.root, facts.pinned)
    store = store_nbytes(facts)
    if store > machine.nvme_size * machine.drives:
        raise BudgetError(
            f"the store needs {format_bytes(store)} of NVMe (two versions of everything), {machine.drives} x {format_bytes(machine.nvme_size)} are there: "
            "more --drives, or crash_safe: false, which keeps one version"
        )
    return predict(facts, plan, request, machine, workload, mode == "deferred", memory.commit_every(config, plan, facts.root))


def predict(facts: Facts, plan: Plan, request: Request, machine: Machine, workload: Workload, deferred: bool, every: int) -> Forecast:
    """What a step costs where `plan` is what an engine does, which commits after `every` steps (0: never)."""
    parts = (*phases(facts, plan, workload, deferred, request), commit(facts, plan, every))
    streamed = [(facts.layout.shards[i].weights_nbytes, plan.weights[i] is Tier.NVME) for c in plan.slabs for i in c.members]
    first, remote = max(streamed, default=(0, False))
    fill = Traffic(h2d=0 if request.direct else first, nvme_read=first * remote)
    step, limiter = step_time(parts, fill, machine)
    total = sum(parts, Traffic())
    return Forecast(machine, workload, plan, total, times(total, machine), step, limiter, store_nbytes(facts))


def store_nbytes(facts: Facts) -> int:
    """Bytes that the store takes on NVMe: two versions of what is trained, one of what is not."""
    return sum((r.weights_nbytes + r.state_nbytes) * (2 if r.trainable else 1) for s in facts.layout.shards for r in s.runs)


def phases(facts: Facts, plan: Plan, workload: Workload, deferred: bool, request: Request) -> tuple[Traffic, Traffic]:
    """Traffic of forward and of backward."""
    shards, direct = facts.layout.shards, request.direct
    forward, backward = (Traffic(flops=flops) for flops in facts.flops(workload.tokens))
    again = _uploaded_again(plan)
    # The last of backward are the first of forward. Their new weights are in the slabs where they are: of a step under backward, by the step's own
    # read, and always where the step works on the slab itself. Else the step needs them in host memory, and forward's read is the step's.
    there = set() if deferred and not direct else {i for c in plan.slabs for i in c.members[: c.count]}
    steps = Traffic()
    for i, shard in enumerate(shards):
        use = _use(shard.weights_nbytes, plan.weights[i], direct)
        forward += _use(shard.weights_nbytes, Tier.HOST, direct) if i in there else use
        backward += use if i in again else Traffic()
        if shard.trainable:
            arriving, waiting = shard.grads_nbytes(request.pass_wide), shard.grads_nbytes(request.grads_wide)
            backward += Traffic(d2h=0 if direct else arriving, dram=arriving, nvme_write=waiting if plan.grads_away else 0)
            trained = sum(r.weights_nbytes for r in shard.runs if r.trainable)
            steps += _step(trained, plan.weights[i], shard.state_nbytes, plan.state[i], waiting, plan.grads_away, again=not deferred and not direct)
    kept = facts.boundary(workload.tokens)
    if plan.activations is not Tier.DEVICE:
        beyond = max(0, kept - plan.activations_nbytes)
        forward += Traffic(d2h=kept, dram=kept + beyond, nvme_write=beyond)
        backward += Traffic(h2d=kept, dram=kept + beyond, nvme_read=beyond)
    return (forward + steps, backward) if deferred else (forward, backward + steps)


def _uploaded_again(plan: Plan) -> set[int]:
    """Shards whose weights backward uploads again: of each size of slab, as many of the last of forward as there are slabs are still there."""
    return {i for c in plan.slabs for i in c.members[: len(c.members) - c.count]}


def _use(weights: int, tier: Tier, direct: bool) -> Traffic:
    """Weights on their way to one use. Where compute reads host memory they are there, or NVMe writes them there."""
    read = weights if tier is Tier.NVME else 0
    if direct:
        return Traffic(dram=read, nvme_read=read)
    return Traffic(h2d=weights, dram=weights + read, nvme_read=read)


def commit(facts: Facts, plan: Plan, every: int) -> Traffic:
    """What a commit writes of trained weights and state that live in memory, over the steps between two."""
    dirty = 0
    for i, shard in enumerate(facts.layout.shards):
        dirty += sum(r.weights_nbytes for r in shard.runs if r.trainable) if plan.weights[i] is not Tier.NVME else 0
        dirty += shard.state_nbytes if plan.state[i] is not Tier.NVME else 0
    return Traffic(dram=dirty / every, nvme_write=dirty / every) if every else Traffic()


def _step(weights: int, weights_tier: Tier, state: int, state_tier: Tier, grads: int, away: bool, again: bool) -> Traffic:
    """The optimizer on one shard: reads grads, reads and writes weights and state; what lives on NVMe crosses host memory once more each way.

    `again`: weights that live on NVMe are read for it. Under forward they are not: it is the step's read that forward uses.
    """
    read = (state if state_tier is Tier.NVME else 0) + (weights if again and weights_tier is Tier.NVME else 0) + (grads if away else 0)
    written = (state if state_tier is Tier.NVME else 0) + (weights if weights_tier is Tier.NVME else 0)
    stepped = grads + 2 * (weights + state)
    return Traffic(dram=stepped + read + written, nvme_read=read, nvme_write=written, stepped=stepped)
