"""Builds what an engine stands on: the plan, the I/O engine, the store, arenas, slabs, shards. In that order, undone in reverse.

Everything that an engine will ever allocate is allocated here, after the plan said that it fits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from zinf import layout, measured, ops, placement, precision, scaling
from zinf.activations import Activations
from zinf.aio import IoEngine, open_engine
from zinf.aio.traced import TracedEngine
from zinf.checkpoint import ModuleSource, import_tensors
from zinf.config import Config
from zinf.discover import Unit
from zinf.errors import ConfigError, StoreError
from zinf.grads import Grads
from zinf.owners import Owners, Unwatched
from zinf.pipeline import Pipeline
from zinf.placement import Plan, Request, Tier
from zinf.shard import Parts, Shard
from zinf.slabs import Slab, Slabs
from zinf.stored import Basis, linked
from zinf.tiers import manifest, numa
from zinf.tiers.device import Device, is_direct, open_device
from zinf.tiers.host import Arena
from zinf.tiers.nvme import Store
from zinf.tiers.races import OrderedDevice, OrderedOwners, Races
from zinf.tiers.records import Records
from zinf.tiers.scratch import Scratch
from zinf.trace import Trace, Verb
from zinf.trace.recorder import Recorder, trace_path

log = logging.getLogger("zinf")

STATE_SLOTS = 8  # chunks of state in flight: enough to read, step and write at once, with a few ahead
COMMIT_EVERY_RESIDENT = 50  # steps between commits where state lives in host memory, since a commit then writes all of it
LOOKAHEAD = 2  # shards fetched ahead of the one that computes


class Origin(Protocol):
    """How a model that was streamed into a store says where it is (zinf.hf.loading)."""

    paths: Sequence[str]
    stateful: frozenset[str]  # names of the parameters that have optimizer state in it


@dataclasses.dataclass
class Memory:
    """An engine's tiers."""

    plan: Plan
    parts: Parts
    shards: list[Shard]
    grads: Grads
    activations: Activations
    root: Shard | None
    io: IoEngine | None
    lookahead: int
    restored: dict[str, Any] | None  # what the last commit of the store says, if it was there before
    grows: bool = False  # the first step shows what activations leave of the device

    def grow(self) -> None:
        """A first step is over: activations have taken what they take, and slabs may have the rest of the device. No-op the second time."""
        if not self.grows:
            return
        self.grows = False
        made = self.parts.slabs.grow(self.parts.device.room() or 0)
        if made:
            self.plan = dataclasses.replace(self.plan, device=self.plan.device | {"more slabs": made})
            log.info("after the first step %s of the device are free, and hold more weights", placement.human(made))

    def roll_back(self) -> None:
        """Bring every tier back to the last commit of the store. No one may be computing.

        Raises:
            StoreError: the store cannot be rolled back (crash_safe: false, or a commit whose outcome is not known).
            OSError: the disk. It may be called again.
        """
        parts = self.parts
        parts.fetcher.drain()
        parts.stepper.drain()
        self.forget_values()
        assert parts.records.store is not None
        parts.records.store.rollback()
        parts.records.load_homes()
        parts.stepper.error = None

    def forget_values(self) -> None:
        """The records are about to get other values: nothing may keep those of now, nor step them. No one may be computing."""
        self.parts.slabs.evict_all()
        for shard in self.shards:
            shard.job = shard.pending = None
            shard.edited = False
            shard.steps += 1  # graphs from before belong to other weights
            shard.valid = shard.slab is not None and self.parts.device.direct  # such a slab is the record's home; any other is filled again


def guess_order(module: nn.Module, units: Sequence[Unit]) -> list[int]:
    """The order of a forward before one was seen: that of registration. The root has no place in it."""
    index = {id(m): i for i, unit in enumerate(units) for m in unit.modules}
    return [index[id(m)] for m in module.modules() if id(m) in index]


def request(config: Config, on_nvme: bool, direct: bool, mode: str, grows: bool = False) -> Request:
    """What the planner is asked for."""
    several = config.gradient_accumulation_steps > 1 or config.micro_batch_size is not None
    wide = config.grad_accum_dtype == "fp32" or (config.grad_accum_dtype == "auto" and several)
    return Request(
        host_memory=config.host_memory,
        device_memory=config.device_memory,
        weights=config.weights,
        state=config.state,
        on_nvme=on_nvme,
        direct=direct,
        grads_wide=wide,
        pass_wide=wide and config.micro_batch_size is not None,
        grads_wait=mode == "deferred" or config.gradient_accumulation_steps > 1,
        several=config.gradient_accumulation_steps > 1,
        lookahead=LOOKAHEAD,
        state_slots=STATE_SLOTS,
        grads=config.grads,
        activations=config.activations,
        activation_memory=config.activation_memory,
        grows=grows,
    )


def roles(units: Sequence[Unit]) -> tuple[int | None, list[int]]:
    """The index of the root, and those of tied layers, whose grads stay open through a whole backward."""
    return next((i for i, u in enumerate(units) if not u.modules), None), [i for i, u in enumerate(units) if len(u.modules) > 1]


def plan_for(model: layout.Model, units: Sequence[Unit], config: Config, on_nvme: bool, direct: bool, mode: str, grows: bool = False) -> Plan:
    """What goes where. Raises BudgetError and ConfigError; allocates nothing."""
    precision.check_sums(config.grad_accum_dtype, [run.dtype for shard in model.shards for run in shard.runs if run.trainable])
    return placement.plan(model, request(config, on_nvme, direct, mode, grows), *roles(units))


def stateful(module: nn.Module, trained: frozenset[str], paths: Sequence[str], origin: Origin | None, resume: bool) -> frozenset[str]:
    """The names of the parameters that have optimizer state: those that may be trained, and what else the store has state for already.

    Raises:
        ConfigError: the model's store has no state for one that is to be trained.
    """
    if origin is None:
        there = _stateful_in(paths) if resume else frozenset()
        return trained | (there & {name for name, _ in module.named_parameters()})
    missing = sorted(trained - origin.stateful)
    if missing:
        raise ConfigError(
            f"{missing[0]}{f' and {len(missing) - 1} more' * (len(missing) > 1)} should be trained, and the store at {origin.paths[0]} has no optimizer state "
            "for it: import the model with a from_pretrained(trainable=...) that says so"
        )
    return origin.stateful


def _stateful_in(paths: Sequence[str]) -> frozenset[str]:
    """What the store that stands at `paths` has state for; nothing, if none can be read: opening it will say why."""
    for path in paths:
        try:
            model = manifest.load(path).model
        except (OSError, StoreError):
            continue
        return frozenset(p.name for shard in model.shards for run in shard.runs if run.trainable for p in run.params)
    return frozenset()


def store_paths(config: Config, basis: Basis | None = None) -> list[str]:
    """The store's directory on each path of the config, or beside the store of the basis."""
    if basis is not None:
        return basis.own_paths(config.run_name)
    return [os.path.join(path, config.run_name) for path in config.nvme_path]


def build(
    model: layout.Model,
    units: Sequence[Unit],
    module: nn.Module,
    config: Config,
    mode: str,
    stack: contextlib.ExitStack,
    origin: Origin | None,
    resume: bool,
    basis: Basis | None = None,
) -> Memory:
    """Everything below the engine. `stack` closes it all, also when this raises half way."""
    root_index, pinned = roles(units)
    paths = list(origin.paths) if origin is not None else store_paths(config, basis)
    recorder = _recorder(model, config, paths, stack)
    io: IoEngine | None = None
    if paths:
        io = open_engine(config.backend, threads=config.io_threads, **measured.io_options(paths, config.block_size, config.queue_depth))
        stack.callback(io.close)
        io = TracedEngine(io, recorder, paths) if recorder is not None else io
    device = open_device(config.device, io)
    stack.callback(device.close)
    grows = config.device_memory is None and config.weights == "auto" and device.room() is not None
    plan = plan_for(model, units, config, bool(paths), device.direct, mode, grows)
    poison = config.debug or device.name == "sim"
    store, restored = _open_store(paths, model, config, io, stack, origin is not None or resume, basis)
    arena = None
    if plan.host_nbytes:
        with numa.on_node(device.cpus):
            arena = Arena(plan.host_nbytes, io, poison=poison)
        stack.callback(arena.close)
        stack.callback(device.pin(arena.address, arena.nbytes))
    owners = Owners() if poison else Unwatched()
    if poison and not device.direct:
        races = Races()
        device, owners = OrderedDevice(device, races), OrderedOwners(races)
    device.reserve(plan.device_nbytes)
    records = Records(model, plan, arena, store, device.direct)
    trace = Trace(recorder)
    if recorder is not None and store is not None:
        recorder.places = {(path, offset): (key[1], {"kind": key[0], "run": key[2], "chunk": key[3]}) for path, offset, key in store.where()}
    slabs = Slabs(plan.slabs, device, trace, owners, poison)
    parts = _parts(plan, config, device, records, slabs, arena, trace, owners, stack)
    shards = []
    params = {name: p for unit in units for name, p in unit.params}
    for i, spec in enumerate(model.shards):
        slab = None
        if plan.weights[i] is Tier.DEVICE:
            slab = Slab(device.alloc(spec.weights_nbytes, f"weights of {spec.name}"), -3 - i)
            if device.direct:
                records.adopt_weights(i, slab.buffer)
        shards.append(Shard(i, spec, params, parts, slab))
    own = [i for i in (*pinned, root_index) if i is not None]
    req = request(config, bool(paths), device.direct, mode)
    scratch = None
    if plan.grads_away and store is not None and io is not None:
        scratch = Scratch(store.paths, "grads", io, "or raise host_memory so that grads wait there", config.verify == "always")
        stack.callback(scratch.close)
    grads = Grads(shards, plan, arena, req.grads_wide, req.pass_wide, own, scratch)
    activations = _activations(plan, parts, arena, store, io, poison, config.verify == "always", stack)
    _fill(model, module, records, store, restored is not None, trace, basis)
    for shard in shards:
        shard.valid = shard.slab is not None and device.direct  # a slab that is there already is held for good
    return Memory(plan, parts, shards, grads, activations, shards[root_index] if root_index is not None else None, io, LOOKAHEAD, restored, grows)


def _recorder(model: layout.Model, config: Config, paths: Sequence[str], stack: contextlib.ExitStack) -> Recorder | None:
    """Who writes the trace, if one is asked for: where it says, or beside the store (beside where the run was started, without one)."""
    if not config.trace:
        return None
    path = config.trace if isinstance(config.trace, str) else trace_path(paths[0] if paths else config.run_name)
    recorder = Recorder(os.path.abspath(os.path.expanduser(path)), [shard.name for shard in model.shards])
    stack.callback(recorder.close)
    return recorder


def _open_store(
    paths: Sequence[str], model: layout.Model, config: Config, io: IoEngine | None, stack: contextlib.ExitStack, reopen: bool, basis: Basis | None
) -> tuple[Store | None, dict[str, Any] | None]:
    if not paths:
        return None, None
    assert io is not None
    if reopen:
        store = Store.open(paths, io, verify=config.verify, expect=model)
        restored: dict[str, Any] | None = store.extra
    else:
        options: dict[str, Any] = {"crash_safe": config.crash_safe, "verify": config.verify}
        store = Store.create(paths, model, io, shares=measured.shares(paths), **options) if basis is None else basis.create_store(paths, model, io, options)
        restored = None
    stack.callback(store.close)
    return store, restored


def _parts(
    plan: Plan,
    config: Config,
    device: Device,
    records: Records,
    slabs: Slabs,
    arena: Arena | None,
    trace: Trace,
    owners: Unwatched,
    stack: contextlib.ExitStack,
) -> Parts:
    pool = ops.Pool(config.cpu_threads, affinity=device.cpus or None)
    stack.callback(pool.close)
    fetcher, stepper = Pipeline("zinf-fetch"), Pipeline("zinf-step")
    stack.callback(fetcher.close)
    stack.callback(stepper.close)
    state_slots = arena.slots(plan.state_slots, plan.state_slot_nbytes, "state in flight") if plan.state_slots and arena is not None else None
    weights_slots = {}
    if plan.weights_slots and arena is not None:
        for pipeline in (fetcher, stepper):
            weights_slots[pipeline] = arena.slots(plan.weights_slots // 2, plan.weights_slot_nbytes, "weights in flight")
    grads_slots = arena.slots(plan.grads_slots, plan.grads_slot_nbytes, "grads in flight") if plan.grads_slots and arena is not None else None
    return Parts(device, records, slabs, fetcher, stepper, state_slots, grads_slots, weights_slots, pool, trace, owners, config.ema_decay)


def _activations(
    plan: Plan,
    parts: Parts,
    arena: Arena | None,
    store: Store | None,
    io: IoEngine | None,
    poison: bool,
    verify: bool,
    stack: contextlib.ExitStack,
) -> Activations:
    region = arena.carve(plan.activations_nbytes, "activations") if plan.activations_nbytes and arena is not None else None
    slots = scratch = None
    if plan.activation_slots and arena is not None and store is not None and io is not None:
        slots = arena.slots(plan.activation_slots, placement.ACTIVATION_PIECE, "activations in flight")
        scratch = Scratch(store.paths, "activations", io, "lower the batch, or place activations on the host", verify)
        stack.callback(scratch.close)
    activations = Activations(parts.device, parts.trace, region, slots, scratch, poison, parts.owners)
    stack.callback(activations.close)
    return activations


def _fill(model: layout.Model, module: nn.Module, records: Records, store: Store | None, restored: bool, trace: Trace, basis: Basis | None) -> None:
    """Fill the records: from the store that was there, from the module's own parameters, or from what it was imported as."""
    if restored:
        records.load_homes()
        return
    with trace.span(Verb.IMPORT, -1, "the model", sum(s.weights_nbytes for s in model.shards)):
        there = linked(store) if store is not None else frozenset()
        with basis.source(module) if basis is not None else contextlib.nullcontext(ModuleSource(module)) as source:
            import_tensors(model, source, records.write, apart=there)
        if store is not None:
            records.load_homes(there)
            records.dirty_all(there)
            records.flush()
            store.commit(0, {})


def check_budgets(config: Config, model: layout.Model, units: Sequence[Unit]) -> None:
    """Raise BudgetError if an engine of `config` would not fit its budgets; for whoever imports a model first."""
    on_nvme = bool(config.nvme_path)
    mode = choose_step_mode(config, on_nvme, scaling.scales(config, model))
    plan_for(model, units, config, on_nvme, is_direct(config.device), mode)


def commit_every(config: Config, plan: Plan, root: int | None) -> int:
    """Steps between two commits; 0: only when asked."""
    if config.commit_every is not None:
        return config.commit_every
    return COMMIT_EVERY_RESIDENT if any(t is not Tier.NVME for i, t in enumerate(plan.state) if i != root) else 1


def choose_step_mode(config: Config, on_nvme: bool, scaled: bool) -> str:
    """`backward` where every step can be undone if a late gradient is not finite, and nothing needs the norm first."""
    if config.step_mode == "backward" and config.max_grad_norm is not None:
        raise ConfigError("step_mode is backward, but max_grad_norm needs all grads before the first step: leave step_mode to auto, or unset max_grad_norm")
    undoable = on_nvme and config.state == "nvme" and config.weights in ("auto", "nvme") and config.crash_safe and config.commit_every in (None, 1)
    if config.step_mode == "backward" and scaled and not undoable:
        raise ConfigError(
            "step_mode is backward, but the loss of fp16 weights is scaled, and overflows are routine that could not be undone: leave step_mode to auto"
        )
    if config.step_mode != "auto":
        return config.step_mode
    return "backward" if undoable and config.max_grad_norm is None and not scaled else "deferred"
