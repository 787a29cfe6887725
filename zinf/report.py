"""What an engine says of itself: the plan for people, what is really in use, and totals."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from zinf.layout import place
from zinf.memory import choose_step_mode
from zinf.placement import Plan, Tier, human
from zinf.residency import residency
from zinf.scaling import scales

if TYPE_CHECKING:
    from zinf.config import Config
    from zinf.engine import Engine


def _where(engine: Engine, kind: str) -> str:
    """ "all on nvme", or the bytes of each tier."""
    tiers: Counter[Tier] = Counter()
    for i, spec in enumerate(engine.layout.shards):
        nbytes = spec.weights_nbytes if kind == "weights" else spec.state_nbytes
        tiers[getattr(engine.memory.plan, kind)[i]] += nbytes
    names = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.NVME: "NVMe"}
    return ", ".join(f"{human(n)} on {names[t]}" for t, n in sorted(tiers.items(), key=lambda kv: -kv[1]) if n)


def plan_lines(engine: Engine) -> list[str]:
    """What goes where, in a few lines."""
    plan, config = engine.memory.plan, engine.config
    store = engine.memory.parts.records.store
    trainable = sum(p.numel for s in engine.layout.shards for r in s.runs if r.trainable for p in r.params)
    dtypes = "/".join(dict.fromkeys(r.dtype for s in engine.layout.shards for r in s.runs))
    budget = {"host": config.host_memory, "device": config.device_memory}
    largest = max(s.weights_nbytes for s in engine.layout.shards)
    size = f"{engine.layout.numel / 1e6:.1f} M parameters ({trainable / 1e6:.1f} M trained, {dtypes})"
    lines = [
        f"model    {size} in {len(engine.shards)} shards, largest {human(largest)}",
        f"weights  {_where(engine, 'weights')}",
        f"state    {_where(engine, 'state')}",
    ]
    if plan.grads_away:
        lines.append(f"grads    {_grads(engine)}")
    lines.append(f"inputs   of recomputed blocks: {_activations(plan, config)}")
    for tier, parts, total in (("device", plan.device, plan.device_nbytes), ("host", plan.host, plan.host_nbytes)):
        most = budget[tier]
        limit = f" of {human(most)}" if most is not None else ""
        lines.append(f"{tier:<8} {human(total)}{limit}: {', '.join(f'{name} {human(n)}' for name, n in parts.items())}")
    if store is not None:
        versions = 2 if config.crash_safe else 1
        nbytes = sum(place(engine.layout, versions=versions).sizes[0].values())  # striping does not change the sum
        kept = "two versions of each chunk" if versions == 2 else "one version, not crash safe"
        lines.append(f"NVMe     {human(nbytes)} in {', '.join(store.paths)}: {kept}")
    backend = f", I/O by {engine.memory.io.name}" if engine.memory.io is not None else ""
    how = f"under the next forward{_could_step_early(engine)}" if engine.step_mode == "deferred" else "under backward"
    lines.append(f"step     {config.optimizer}, {how}; device {engine.memory.parts.device.name}{backend}")
    return lines


def _could_step_early(engine: Engine) -> str:
    """What may be better where no state fits in memory. Not taken unasked: a loop that reads weights between backward and step could not do so any more."""
    config, plan, root = engine.config, engine.memory.plan, engine.memory.root
    resident = any(t is not Tier.NVME for t, shard in zip(plan.state, engine.shards, strict=True) if shard is not root)
    early = dataclasses.replace(config, state="nvme")
    if resident or config.state != "auto" or choose_step_mode(early, engine.memory.io is not None, scales(config, engine.layout)) != "backward":
        return ""
    return f" (state: nvme steps under backward, and most of {human(plan.host.get('grads', 0))} for waiting grads is free for weights)"


def _grads(engine: Engine) -> str:
    """Why they wait on NVMe, and what that moves."""
    config, grads = engine.config, engine.memory.grads
    nbytes = sum(g.away.nbytes for g in grads.of if g.away is not None)
    moves = config.gradient_accumulation_steps - (engine.step_mode == "backward")  # the last sum of all is stepped from host memory
    why = "as asked" if config.grads == "nvme" else "as host_memory cannot hold them"
    return f"wait on NVMe, {why}: {human(nbytes * moves)} written and {human(nbytes * moves)} read a step"


def _activations(plan: Plan, config: Config) -> str:
    """Where they wait for backward, and what happens to those for which there is no room."""
    asked = config.activations == "host" or config.activation_memory is not None
    if plan.activations is Tier.DEVICE:
        return "on the device" + (", which computes from host memory: there is nothing to move" if asked else "")
    if plan.activations is Tier.NVME:
        return "on NVMe"
    rest = "NVMe" if plan.activation_slots else "the device"
    return f"in {human(plan.activations_nbytes)} of host memory, the rest on {rest}"


def report(engine: Engine) -> dict[str, Any]:
    """What is really in use."""
    plan, records = engine.memory.plan, engine.memory.parts.records
    return {
        "device": engine.memory.parts.device.name,
        "step_mode": engine.step_mode,
        "shards": len(engine.shards),
        "parameters": engine.layout.numel,
        "host_bytes": dict(plan.host),
        "device_bytes": dict(plan.device),
        "weights": [t.value for t in plan.weights],
        "state": [t.value for t in plan.state],
        "grads": "nvme" if plan.grads_away else "host",
        "activations": {"placement": plan.activations.value, **engine.memory.activations.report()},
        "slabs": [{"bytes": c.nbytes, "count": c.count, "shards": len(c.members)} for c in plan.slabs],
        "io": engine.memory.io.report() if engine.memory.io is not None else None,
        "store": records.store.paths if records.store is not None else None,
        "misses": engine.conductor.train.misses,
        "fused_head": engine.fused_head.report() if engine.fused_head is not None else "off",
    }


def stats(engine: Engine) -> dict[str, Any]:
    """Totals since the engine was built. `seconds` is how long a verb was under way, `waited` how long compute stood still for it.
    `forecast`: after ten steps, what the planner says of one and what it takes; None before, and where this machine is not measured."""
    trace, io = engine.trace, engine.memory.io
    moved = io.stats() if io is not None else {"bytes_read": 0, "bytes_written": 0}
    return {
        "seconds": {verb.value: s for verb, s in trace.busy.items()},
        "waited": {verb.value: s for verb, s in trace.waited.items()},
        "bytes": {**{verb.value: n for verb, n in trace.moved.items()}, "fetch": moved["bytes_read"], "flush": moved["bytes_written"]},
        "resident": residency(engine.memory),
        "counts": dict(trace.counts),
        "bytes_read": moved["bytes_read"],
        "bytes_written": moved["bytes_written"],
        "steps": engine.global_step,
        "skipped_steps": engine.skipped_steps,
        "params": engine.layout.numel,
        "forecast": engine.achieved.comparison.as_json() if engine.achieved.comparison is not None else None,
    }
