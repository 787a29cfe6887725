"""Any run: the cycle of uses against a plain list, the slab moves that follow from it, and plans for any model and budget."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_schedule import check_moves

from zinf import layout, placement
from zinf.errors import BudgetError
from zinf.schedule import Cycle, Phase, Use, moves, training_cycle, victim

uses = st.builds(Use, st.sampled_from(Phase), st.integers(0, 5))


class Machine(RuleBasedStateMachine):
    """Runs that follow the cycle, leave it, and learn another one. The model: the cycle written out twice, and looked through from where the run stands."""

    @initialize(cycle=st.lists(uses, min_size=1, max_size=12))
    def start(self, cycle: list[Use]) -> None:
        self.cycle, self.list, self.at, self.misses = Cycle(cycle), cycle, 0, 0

    def ahead(self) -> list[Use]:
        return (self.list + self.list)[self.at : self.at + len(self.list)]

    @rule(count=st.integers(1, 15))
    def follow(self, count: int) -> None:
        for _ in range(count):
            assert self.cycle.advance(self.ahead()[0])
            self.at = (self.at + 1) % len(self.list)

    @rule(use=uses)
    def wander(self, use: Use) -> None:
        ahead = self.ahead()
        skipped = ahead.index(use) if use in ahead else None
        assert self.cycle.advance(use) == (skipped == 0)
        self.misses += skipped != 0
        if skipped is not None:
            self.at = (self.at + skipped + 1) % len(self.list)

    @rule(cycle=st.lists(uses, min_size=1, max_size=12))
    def learn(self, cycle: list[Use]) -> None:
        self.cycle.replace(cycle)
        self.list, self.at = cycle, 0

    @invariant()
    def what_comes_is_what_the_list_says(self) -> None:
        if not hasattr(self, "cycle"):
            return
        shards = [use.shard for use in self.ahead()]
        for shard in range(7):
            distance = shards.index(shard) if shard in shards else None
            assert self.cycle.distance(shard) == (2 * len(shards) + 1 if distance is None else distance)
        order = list(dict.fromkeys(shards))
        for count in (1, 3, 10):
            assert self.cycle.upcoming(count) == order[:count]
        never = [s for s in range(6) if s not in order]
        assert victim(range(6), self.cycle) == (never[0] if never else order[-1])
        for first in order:  # a prefetch takes the place only of what is used later
            out = victim(order, self.cycle, before=first)
            assert out is None or order.index(out) > order.index(first)
        assert self.cycle.misses == self.misses


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=30)


@given(st.permutations(range(6)), st.lists(st.integers(0, 2), min_size=6, max_size=6), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(0, 3))
def test_compute_finds_its_shard_and_no_class_has_more_slabs_than_it_has(order: list[int], classes: list[int], capacity: list[int], lookahead: int) -> None:
    of = dict(enumerate(classes))
    check_moves(moves(training_cycle(order), of, capacity, lookahead, steps=1), of, capacity)


params = st.tuples(st.integers(1, 60_000), st.sampled_from(["bf16", "fp16", "fp32"]), st.booleans())
shards = st.lists(st.lists(params, min_size=1, max_size=3), min_size=1, max_size=6)
budget = st.one_of(st.none(), st.integers(1 << 10, 1 << 22))
where = st.one_of(st.just("auto"), st.just("nvme"), st.just("host"), st.floats(0, 1))


@given(shards, budget, budget, where, where, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_a_plan_keeps_its_budgets_or_says_what_it_needs(sizes, host, device, weights, state, direct, wide, wait, several) -> None:
    model = layout.Model(tuple(layout.make_shard(f"s{i}", [(f"p{i}.{k}", (n,), d, t) for k, (n, d, t) in enumerate(ps)]) for i, ps in enumerate(sizes)), 2048)
    request = dict(weights=weights, state=state, direct=direct, grads_wide=wide, grads_wait=wait, several=several)
    try:
        plan = placement.plan(model, placement.Request(host_memory=host, device_memory=device, **request), root=None)
    except BudgetError as e:
        assert any(f"{tier}_memory is" in str(e) for tier, limit in (("host", host), ("device", device)) if limit is not None)
        return
    assert host is None or plan.host_nbytes <= host
    assert device is None or plan.device_nbytes <= device
    assert len(plan.weights) == len(plan.state) == len(model.shards)
    assert all(count >= 1 for count in (c.count for c in plan.slabs)) and all(nbytes > 0 for nbytes in (*plan.host.values(), *plan.device.values()))
    slabs = [s for c in plan.slabs for s in c.members]
    assert len(slabs) == len(set(slabs))
    assert all(c.nbytes >= model.shards[s].weights_nbytes for c in plan.slabs for s in c.members)
    placement.plan(model, placement.Request(device_memory=device, **request), root=None)  # more host memory never stops a plan
