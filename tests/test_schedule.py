"""The schedule as data: moves of a step as literal lists, and the engine's real moves equal to them."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from models import HYPER, LEAF_BYTES, batches, llama

from zinf.engine import Engine
from zinf.schedule import Cycle, Phase, Use, moves, training_cycle, victim

F, B = Phase.FORWARD, Phase.BACKWARD


def test_the_moves_of_a_step_with_two_slabs():
    assert [repr(m) for m in moves(training_cycle([0, 1, 2, 3]), dict.fromkeys(range(4), 0), [2], lookahead=2, steps=2)] == [
        # forward: 0 and 1 are there, they were the last of backward
        "compute 0",
        "evict 0", "fetch 2", "compute 1",
        "evict 1", "fetch 3", "compute 2",
        "compute 3",
        # backward: 3 and 2 are there, they were the last of forward
        "compute 3",
        "evict 3", "fetch 1", "compute 2",
        "evict 2", "fetch 0", "compute 1",
        "compute 0",
    ]  # fmt: skip


def test_a_third_slab_saves_half_of_the_fetches():
    assert [repr(m) for m in moves(training_cycle([0, 1, 2, 3]), dict.fromkeys(range(4), 0), [3], lookahead=2, steps=2)] == [
        "compute 0", "evict 0", "fetch 3", "compute 1", "compute 2", "compute 3",
        "compute 3", "evict 3", "fetch 0", "compute 2", "compute 1", "compute 0",
    ]  # fmt: skip


def test_a_victim_is_the_one_used_last():
    cycle = Cycle(training_cycle([0, 1, 2]))
    cycle.advance(Use(F, 0))
    assert victim([0, 1, 2], cycle) == 0  # F1 F2 B2 B1 B0: 0 is farthest
    assert victim([1, 2], cycle, before=1) == 2
    assert victim([1], cycle, before=2) is None  # 1 comes first: a prefetch does not evict it


def test_a_cycle_is_a_hint():
    cycle = Cycle(training_cycle([0, 1]))
    assert cycle.advance(Use(F, 0))
    assert not cycle.advance(Use(B, 1))  # skipped F1
    assert cycle.misses == 1
    assert cycle.advance(Use(B, 0))
    assert not cycle.advance(Use(F, 7))  # never seen: stays where it is
    assert cycle.advance(Use(F, 0))


def check_moves(done, of, capacity) -> None:
    """Compute finds its shard fetched, and no class of slabs (`of` each shard) has more than its `capacity`."""
    resident: set[int] = set()
    for move in done:
        if move.verb == "fetch":
            assert move.shard not in resident
            resident.add(move.shard)
        elif move.verb == "evict":
            resident.remove(move.shard)
        else:
            assert move.shard in resident
        for c, slabs in enumerate(capacity):
            assert sum(of[s] == c for s in resident) <= slabs


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3))
def test_every_compute_finds_its_shard_fetched_and_capacity_holds(order, capacity, lookahead):
    for_all = dict.fromkeys(range(6), 0)
    first, second = (moves(training_cycle(order), for_all, [capacity], lookahead, steps=n) for n in (1, 2))
    check_moves((*first, *second), for_all, [capacity])


def test_the_engine_does_what_the_schedule_says(tmp_path):
    model = llama(tied=False, num_hidden_layers=6)
    with Engine(model, nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, weights="nvme", state="nvme", trace=True, max_grad_norm=1.0, **HYPER) as engine:
        for ids in batches(3):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        cycle = list(engine.conductor.train.uses)
        order = [use.shard for use in cycle if use.phase is F]
        assert cycle == training_cycle(order)[:-1]  # the embedding's backward needs no weights
        assert len(order) == 8  # embedding, six blocks, head
        assert engine.conductor.train.misses == 0 and engine.stats()["counts"].get("misses", 0) <= 1
