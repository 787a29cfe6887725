"""What is held in each tier at this moment, in bytes. For the run's log and its trace; nothing decides by it."""

from __future__ import annotations

from zinf.memory import Memory
from zinf.tiers.host import Slots


def _used(slots: Slots | None) -> int:
    return (len(slots) - slots.free) * slots.nbytes if slots is not None else 0


def residency(memory: Memory) -> dict[str, dict[str, int]]:
    """{"device" | "host": {what: bytes}}. Called by the thread that computes.

    Slabs are counted with the device also where compute reads host memory.
    """
    plan, parts, wide = memory.plan, memory.parts, memory.grads.host_wide
    flight = sum(map(_used, (parts.state_slots, parts.grads_slots, *parts.weights_slots.values())))
    return {
        "device": {
            "weights": sum(s.spec.weights_nbytes for s in memory.shards if s.slab is not None),
            "grads": plan.device.get("grads", 0),
        },
        "host": {
            "weights": plan.host.get("weights", 0),
            "state": plan.host.get("state", 0),
            "grads": sum(s.spec.grads_nbytes(wide) for s in memory.shards if any(g is not None for g in s.grads)),
            "in flight": flight,
            "activations": memory.activations.report()["host"],
        },
    }
