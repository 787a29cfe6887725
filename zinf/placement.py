"""What lives where, decided before any work: records to tiers, slabs, rings and grads to budgets.

Pure arithmetic on the layout. Host memory is spent in this order: staging ring, boundary activations, grads that must wait,
weights, then state (a step visits its state in a fixed cycle, so a fixed resident part always pays and a cache never does). Device memory holds
the root and the slabs; what is left of it holds more slabs, which keep weights from being fetched again. Activations that stay on
the device are torch's, and not in its budget: without a budget, a card gets more slabs once its first step showed what they leave.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from zinf import layout
from zinf.errors import BudgetError

GIB = 1 << 30
ACTIVATION_PIECE = 1 << 20  # bytes of an activation in one read or write
ACTIVATION_SLOTS = 4  # of them in flight
ACTIVATION_MEMORY = 256 << 20  # bytes of host memory for activations where no budget says more


class Tier(enum.Enum):
    """Where a record lives between its uses."""

    DEVICE = "device"  # a slab of its own, for good
    HOST = "host"  # in the arena; NVMe has it as of the last commit
    NVME = "nvme"  # only on NVMe; passes through the ring


@dataclasses.dataclass(frozen=True)
class Request:
    """What the planner needs to know beside the layout. Sizes in bytes; None is no limit."""

    host_memory: int | None = None
    device_memory: int | None = None
    weights: str | float = "auto"  # auto | device | host | nvme, or the fraction that lives on the host
    state: str | float = "auto"  # auto | host | nvme, or the fraction that lives on the host
    on_nvme: bool = True  # is there a store at all
    direct: bool = True  # compute reads host memory (the cpu device)
    grads_wide: bool = False  # grads wait in host memory in fp32
    pass_wide: bool = False  # the grads of one backward are summed in fp32
    grads_wait: bool = True  # all grads wait for the norm (or for more backwards), else each shard's only for its step
    several: bool = False  # several backwards make a step
    lookahead: int = 2  # shards fetched ahead of compute
    state_slots: int = 8  # chunks of state in flight
    grads: str = "auto"  # where waiting grads wait: auto (the host, else NVMe) | device, host (the host) | nvme
    activations: str = "auto"  # auto | device | host | nvme
    activation_memory: int | None = None  # of host memory, for activations
    grows: bool = False  # the first step will show what activations leave for slabs: begin with few


@dataclasses.dataclass(frozen=True)
class SlabClass:
    """Slabs of one size, shared by shards of about that size. `count` slabs of `nbytes`."""

    nbytes: int
    members: tuple[int, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The outcome. `host` and `device` itemise the bytes that zinf will allocate in each tier."""

    weights: tuple[Tier, ...]
    state: tuple[Tier, ...]
    slabs: tuple[SlabClass, ...]
    state_slot_nbytes: int
    state_slots: int
    weights_slot_nbytes: int
    weights_slots: int
    grad_buffers: int  # shared buffers for grads; 0: each shard has its own
    grads_staging: int  # bytes of host memory where grads arrive that are to be added to others
    pass_buffers: int  # shared device buffers for the grads of one backward; 0: they all land in host grads directly
    host: dict[str, int]
    device: dict[str, int]
    grads_away: bool = False  # grads wait on NVMe, and pass through the shared buffers
    grads_slots: int = 0  # chunks of grads on their way from NVMe to their step
    grads_slot_nbytes: int = 0
    activations: Tier = Tier.DEVICE  # where boundary activations go first
    activations_nbytes: int = 0  # of host memory, where they rest
    activation_slots: int = 0  # of ACTIVATION_PIECE bytes, through which they go to NVMe and back; 0: they never do

    @property
    def host_nbytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_nbytes(self) -> int:
        return sum(self.device.values())


def human(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def plan(model: layout.Model, request: Request, root: int | None, pinned: Sequence[int] = ()) -> Plan:
    """Decide placements for `model`.

    Args:
        root: index of the root shard, resident for good; None if there is none.
        pinned: shards whose grads stay open through a whole backward (tied layers); they get buffers of their own.

    Raises:
        BudgetError: a budget is below the minimum; says which tier, the need, the budget, and the option to change.
    """
    may_leave = request.grads_wait and request.on_nvme
    if request.grads == "nvme" and not request.on_nvme:
        raise BudgetError("grads are to wait on NVMe, but there is no nvme_path: give one, or leave grads to auto")
    if request.grads != "nvme" or not may_leave:
        try:
            return _plan(model, request, root, pinned, False)
        except BudgetError:
            if request.grads != "auto" or not may_leave:
                raise
    return _plan(model, request, root, pinned, True)


def _plan(model: layout.Model, request: Request, root: int | None, pinned: Sequence[int], away: bool) -> Plan:
    """`away`: grads wait on NVMe."""
    shards = model.shards
    own = {i for i in (*pinned, root) if i is not None}
    host = _host_minimum(model, request, own, away)
    pass_buffers, pass_nbytes = _pass_buffers(model, request, own)
    weights, state = _fixed(model, request, root)
    spent = sum(host.values())
    _check("host", spent, request.host_memory, host, "host_memory")
    room = (request.host_memory if request.host_memory is not None else 1 << 62) - spent
    host["weights"] = sum(shards[i].weights_nbytes for i, t in enumerate(weights) if t is Tier.HOST or (t is Tier.DEVICE and not request.direct))
    host["state"] = sum(shards[i].state_nbytes for i, t in enumerate(state) if t is Tier.HOST)
    _check("host", sum(host.values()), request.host_memory, host, "host_memory")
    room -= host["weights"] + host["state"]
    for kind, tiers, nbytes in (("weights", weights, lambda i: shards[i].weights_nbytes), ("state", state, lambda i: shards[i].state_nbytes)):
        for i, tier in enumerate(tiers):
            if tier is None:
                fits = nbytes(i) <= room
                tiers[i] = Tier.HOST if fits else Tier.NVME
                room -= nbytes(i) if fits else 0
                host[kind] += nbytes(i) if fits else 0
    tiers_w = [t for t in weights if t is not None]
    device = {"grads": pass_nbytes, "resident weights": sum(shards[i].weights_nbytes for i, t in enumerate(tiers_w) if t is Tier.DEVICE)}
    streamed = [i for i, t in enumerate(tiers_w) if t is Tier.NVME or (t is Tier.HOST and not request.direct)]
    slabs = _slabs(model, streamed, request, sum(device.values()))
    device["slabs"] = sum(c.nbytes * c.count for c in slabs)
    _check("device", sum(device.values()), request.device_memory, device, "device_memory")
    slot_state, slot_weights = _slot_nbytes(model)
    return Plan(
        weights=tuple(tiers_w),
        state=tuple(t for t in state if t is not None),
        slabs=slabs,
        state_slot_nbytes=slot_state,
        state_slots=request.state_slots if request.on_nvme and slot_state else 0,
        weights_slot_nbytes=slot_weights,
        weights_slots=0 if request.direct else request.state_slots,
        grad_buffers=0 if request.grads_wait and not away else _grad_buffers(model),
        grads_staging=host["arriving grads"],
        pass_buffers=pass_buffers,
        host={k: v for k, v in host.items() if v},
        device={k: v for k, v in device.items() if v},
        grads_away=away,
        grads_slots=request.state_slots if away else 0,
        grads_slot_nbytes=_grads_slot_nbytes(model, request) if away else 0,
        activations=_activations(request)[0],
        activations_nbytes=host["activations"],
        activation_slots=ACTIVATION_SLOTS if host["activations in flight"] else 0,
    )


def _activations(request: Request) -> tuple[Tier, int, int]:
    """Where boundary activations go, the host memory where they rest, and that through which they go to NVMe.

    How many there will be is known only to a forward, so what the host has no room for overflows to NVMe.
    """
    tier = request.activations
    if tier == "auto":
        tier = "host" if request.activation_memory is not None else "device"
    if tier == "nvme" and not request.on_nvme:
        raise BudgetError("activations are to wait on NVMe, but there is no nvme_path: give one, or place them on the host")
    if tier == "device" or (tier == "host" and request.direct):  # what compute reads is host memory already
        return Tier.DEVICE, 0, 0
    share = request.host_memory // 8 if request.host_memory is not None else ACTIVATION_MEMORY
    rest = (request.activation_memory or share) if tier == "host" else 0
    return Tier(tier), rest, ACTIVATION_SLOTS * ACTIVATION_PIECE if request.on_nvme else 0


def _slot_nbytes(model: layout.Model) -> tuple[int, int]:
    """Bytes of the largest chunk of state, and of weights."""
    runs = [run for shard in model.shards for run in shard.runs]
    elements = max(min(model.chunk, run.padded) for run in runs)
    return elements * max(run.mode.state_bytes for run in runs), elements * max(run.mode.weights_bytes for run in runs)


def _grads_slot_nbytes(model: layout.Model, request: Request) -> int:
    """Bytes of the largest chunk of grads."""
    runs = [run for shard in model.shards for run in shard.runs if run.trainable]
    return max((min(model.chunk, run.padded) * layout.ITEMSIZE[run.grads_dtype(request.grads_wide)] for run in runs), default=0)


def _grad_buffers(model: layout.Model) -> int:
    return min(3, sum(s.trainable for s in model.shards))


def _host_minimum(model: layout.Model, request: Request, own: set[int], away: bool) -> dict[str, int]:
    slot_state, slot_weights = _slot_nbytes(model)
    grads = [s.grads_nbytes(request.grads_wide) for s in model.shards]
    if request.grads_wait and not away:
        total = sum(grads)
    else:
        shared = [g for i, g in enumerate(grads) if i not in own]
        total = sum(grads[i] for i in own) + _grad_buffers(model) * max(shared, default=0)
    adds = not request.direct and (request.grads_wait or request.pass_wide != request.grads_wide)
    return {
        "arriving grads": max(s.grads_nbytes(request.pass_wide) for s in model.shards) if adds else 0,
        "staging ring": (slot_state * request.state_slots if request.on_nvme else 0) + (0 if request.direct else slot_weights * request.state_slots),
        "grads": total,
        "grads in flight": _grads_slot_nbytes(model, request) * request.state_slots if away else 0,
        "activations": _activations(request)[1],
        "activations in flight": _activations(request)[2],
    }


def _pass_buffers(model: layout.Model, request: Request, own: set[int]) -> tuple[int, int]:
    """Buffers for the grads of one backward where they cannot (or not all) land in the host's: (how many are shared, bytes of all)."""
    if request.direct and request.pass_wide == request.grads_wide and not request.several:
        return 0, 0
    nbytes = [s.grads_nbytes(request.pass_wide) for s in model.shards]
    largest = max((n for i, n in enumerate(nbytes) if i not in own), default=0)
    return 2, 2 * largest + sum(nbytes[i] for i in own)


def _fixed(model: layout.Model, request: Request, root: int | None) -> tuple[list[Tier | None], list[Tier | None]]:
    """Tiers that the request decides; None where the budget will."""
    count = len(model.shards)
    if not request.on_nvme:
        if "nvme" in (request.weights, request.state) or any(isinstance(x, float) and x < 1 for x in (request.weights, request.state)):
            raise BudgetError("weights or state are to live on NVMe, but there is no nvme_path: give one, or place them on the host")
        weights: list[Tier | None] = [Tier.DEVICE if request.weights == "device" else Tier.HOST] * count
        state: list[Tier | None] = [Tier.HOST] * count
    else:
        weights = _asked(request.weights, [s.weights_nbytes for s in model.shards])
        state = _asked("host" if request.state == "device" else request.state, [s.state_nbytes for s in model.shards])
    if root is not None:
        weights[root], state[root] = Tier.DEVICE, Tier.HOST
    for i, shard in enumerate(model.shards):
        if not shard.has_state:
            state[i] = Tier.NVME  # nothing to keep anywhere
    return weights, state


def _asked(placement: str | float, nbytes: Sequence[int]) -> list[Tier | None]:
    """The tiers that a word or a fraction asks for; None where it leaves the choice."""
    if isinstance(placement, str):
        return [None if placement == "auto" else Tier(placement)] * len(nbytes)
    tiers: list[Tier | None] = []
    room = placement * sum(nbytes)
    for n in nbytes:
        tiers.append(Tier.HOST if n <= room else Tier.NVME)
        room -= n if n <= room else 0
    return tiers


def _slabs(model: layout.Model, streamed: Sequence[int], request: Request, taken: int) -> tuple[SlabClass, ...]:
    """Slab classes for the streamed shards: sizes within a quarter of each other share one; counts by what the budget leaves."""
    by_size = sorted(streamed, key=lambda i: (-model.shards[i].weights_nbytes, i))
    groups: list[tuple[int, list[int]]] = []
    for i in by_size:
        nbytes = model.shards[i].weights_nbytes
        if groups and nbytes * 5 >= groups[-1][0] * 4:
            groups[-1][1].append(i)
        else:
            groups.append((nbytes, [i]))
    counts = [min(len(members), 2) for _, members in groups]
    all_stay = request.weights == "auto" and not request.grows
    cap = [len(members) if all_stay else min(len(members), 2 + request.lookahead) for _, members in groups]
    budget = request.device_memory if request.device_memory is not None else 1 << 62
    need = taken + sum(nbytes * c for (nbytes, _), c in zip(groups, counts, strict=True))
    _check("device", need, request.device_memory, {"slabs and resident weights": need}, "device_memory")
    grown = True
    while grown:
        grown = False
        for k, (nbytes, _) in enumerate(groups):
            if counts[k] < cap[k] and need + nbytes <= budget:
                counts[k] += 1
                need += nbytes
                grown = True
    return tuple(SlabClass(nbytes, tuple(sorted(members)), count) for (nbytes, members), count in zip(groups, counts, strict=True))


def _check(tier: str, need: int, budget: int | None, parts: dict[str, int], option: str) -> None:
    if budget is not None and need > budget:
        items = ", ".join(f"{k} {human(v)}" for k, v in sorted(parts.items(), key=lambda kv: -kv[1]) if v)
        raise BudgetError(
            f"{tier} memory: zinf needs {human(need)} ({items}) but {option} is {human(budget)}: "
            f"raise {option}, or lower chunk_size, the batch, or what is placed there"
        )
