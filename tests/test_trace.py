"""The timeline of a run has what was done, no more and no less; it survives a kill; and what is read out of it is right."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter

import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, engine_run, llama, oracle_run, train
from oracle import assert_same

from zinf.aio import open_engine
from zinf.aio.traced import TracedEngine
from zinf.engine import Engine
from zinf.schedule import moves
from zinf.tiers.host import Arena
from zinf.trace import recorder as recording
from zinf.trace.bottleneck import HANDOVER, MAIN, NVME, Part, busy, covered, critical_path, summary
from zinf.trace.reading import Event, Step, Timeline, read
from zinf.trace.recorder import COMPUTE, LOOP, WAITING, Recorder

pytestmark = pytest.mark.usefixtures("one_thread")
NVME_ONLY = dict(weights="nvme", state="nvme")
READ, WRITE, CPU, UP = (recording.LANES[verb] for verb in ("fetch", "flush", "step", "upload"))
STEPS = 5


def check(got, want) -> None:
    assert got[:2] == want[:2]
    assert_same(got[2], want[2])


def rows(path) -> list[dict]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module", params=[("cpu", "deferred"), ("sim", "deferred"), ("sim", "backward")], ids="-".join)
def traced(request, tmp_path_factory):
    """(events, stats, engine's facts) of a tiny run whose trace begins after nothing and ends after everything."""
    device, mode = request.param
    folder = tmp_path_factory.mktemp("trace")
    model = llama(tied=False, num_hidden_layers=6, hidden_size=128, intermediate_size=384)
    options = dict(max_grad_norm=1.0) if mode == "deferred" else {}
    with Engine(
        model, nvme_path=str(folder), leaf_bytes=LEAF_BYTES, chunk_size=65536, device=device, trace=str(folder / "t.json"), **NVME_ONLY, **HYPER, **options
    ) as engine:
        train(engine, STEPS)
        engine.synchronize()
        plan = engine.memory.plan
        classes = {s: k for k, c in enumerate(plan.slabs) for s in c.members}
        schedule = moves(engine.conductor.train.uses, classes, [c.count for c in plan.slabs], engine.memory.lookahead, steps=STEPS)
        chunks = sum(len(list(r.chunks(engine.layout.chunk))) for s in engine.layout.shards for r in s.runs if r.trainable)
    return rows(folder / "t.json"), read(folder / "t.json", keep=STEPS + 1), engine, schedule, chunks


def test_bytes_are_those_that_are_counted(traced):
    events, _, engine, *_ = traced
    moved: Counter[str] = Counter()
    for e in events:
        moved[e.get("cat")] += e["args"].get("bytes", 0) if e["ph"] == "X" else 0
    stats = engine.stats()
    assert stats["bytes"]["fetch"] == stats["bytes_read"] > 0 and stats["bytes"]["flush"] == stats["bytes_written"] > 0
    assert {verb: moved[verb] for verb in stats["bytes"]} == stats["bytes"]
    device = engine.memory.parts.device
    assert bool(moved["upload"]) == bool(moved["offload"]) == (not device.direct)


def test_events_are_those_of_the_schedule(traced):
    events, timeline, engine, schedule, chunks = traced
    names = [s.name for s in engine.shards]
    last = max(timeline.steps)
    assert [s.number for s in timeline.steps] == list(range(1, STEPS + 1))
    within = sorted(timeline.within(last.start, last.end), key=lambda e: e.start)
    computed = [e.name for e in within if e.lane == COMPUTE and e.shard >= 0]
    used = [f"{use.phase.value} {names[use.shard]}" for use in engine.conductor.train.uses]
    assert [name for i, name in enumerate(computed) if i == 0 or name != computed[i - 1]] == used  # a wait within a use cuts it in two
    evicted = [e.shard for e in within if e.verb == "evict"]
    assert evicted == [m.shard for m in schedule if m.verb == "evict"]
    assert sum(e.get("cat") == "step" and e["name"].startswith("step ") for e in events) == chunks * STEPS
    offloaded = Counter(e["name"] for e in events if e.get("cat") == "offload" and e["name"].startswith("offload"))
    assert set(offloaded.values()) == {STEPS} and len(offloaded) == sum(s.spec.trainable for s in engine.shards)


def test_nothing_overlaps_in_a_row_and_serial_resources_have_one(traced):
    events, *_ = traced
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"steps", COMPUTE, WAITING, LOOP, READ, WRITE, CPU, "evict", "commit", "import"} <= set(lanes.values())
    rows_of = Counter(lanes.values())
    assert all(rows_of[lane] == 1 for lane in ("steps", COMPUTE, LOOP, CPU, UP, "device to host", "evict", "commit") if lane in rows_of)
    ends = dict.fromkeys(lanes, 0.0)
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        assert e["ts"] >= ends[e["tid"]] - 0.002 and e["dur"] >= 0  # microseconds, written with three digits
        ends[e["tid"]] = e["ts"] + e["dur"]


def test_compute_and_waiting_share_the_thread_that_computes(traced):
    _, timeline, engine, *_ = traced
    main = sorted((e for e in timeline.events if e.lane in MAIN), key=lambda e: e.start)
    assert all(a.end <= b.start + 1e-8 for a, b in itertools.pairwise(main))
    waited: Counter[str] = Counter()
    for e in main:
        waited[e.verb] += e.end - e.start if e.lane == WAITING else 0
    for verb, seconds in engine.stats()["waited"].items():
        assert waited[verb] == pytest.approx(seconds, abs=1e-5)
    for step in timeline.steps:
        parts = critical_path(timeline.within(step.start, step.end), step.start, step.end)
        assert parts[0].start == step.start and parts[-1].end == step.end
        assert all(a.end == b.start for a, b in itertools.pairwise(parts))


def test_a_trace_changes_no_bits_and_without_one_nothing_is_in_the_way(tmp_path):
    check(engine_run(tmp_path, 3, max_grad_norm=1.0, trace=True, device="sim", **NVME_ONLY), oracle_run(3, max_grad_norm=1.0))
    made = [p for p in tmp_path.rglob("trace.json")]
    assert len(made) == 1 and made[0].parent.name.endswith("-log") and len(read(made[0]).steps) == 3
    with Engine(llama(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, **NVME_ONLY, **HYPER) as engine:
        assert engine.trace.recorder is None and not isinstance(engine.memory.io, TracedEngine)


# -------------------------------------------------------------------------------------------------------------- the file


def test_what_a_killed_run_leaves_is_readable(tmp_path):
    recorder = Recorder(str(tmp_path / "t.json"), ["a", "b"])
    for n in range(1, 4):
        recorder.span("step", 0, "", recorder.began + n, recorder.began + n + 0.5, 10)
        recorder.stepped(n)
    text = (tmp_path / "t.json").read_bytes()  # not closed
    assert [s.number for s in read(tmp_path / "t.json").steps] == [1, 2, 3]
    json.loads(text + b"]")
    for cut in range(len(text)):
        (tmp_path / "cut.json").write_bytes(text[:cut])
        found = read(tmp_path / "cut.json")
        assert found.damaged <= 1 and [s.number for s in found.steps] == [1, 2, 3][: len(found.steps)]
    (tmp_path / "odd.json").write_bytes(text.replace(b'"ph":"X"', b'"ph":"X\xff"', 1) + b'\nnull,\n3,\n{"ph":"X"},\n' + b"[" * 100_000)
    assert read(tmp_path / "odd.json").damaged >= 3


class Opaque:
    """A transfer that only knows whether it is over, as an event of a card."""

    over = False

    def done(self) -> bool:
        return self.over


def test_transfers_without_times_are_in_order_and_asked_at_every_event(tmp_path):
    recorder = Recorder(str(tmp_path / "t.json"), ["a", "b"])
    first, second = Opaque(), Opaque()
    for shard, moving in enumerate((first, second)):
        recorder.moving("upload", shard, 10, moving)
    second.over = True  # copies of one direction go in order: nothing is over before the first is
    recorder.span("step", 0, "", recorder.began, recorder.began, 1)
    assert [row[1] for row in recorder._rows] == ["step a"]
    first.over = True
    recorder.span("step", 1, "", recorder.began, recorder.began, 1)
    recorder.moving("upload", 0, 10, Opaque())  # never over: it is left out
    recorder.close()
    found = [e for e in read(tmp_path / "t.json").events if e.lane == UP]
    assert [e.name for e in found] == ["upload a", "upload b"] and found[0].end <= found[1].start + 1e-8


def test_memory_and_file_are_bounded(tmp_path, caplog):
    recorder = Recorder(str(tmp_path / "t.json"), ["a"], limit=1 << 20)
    with caplog.at_level(logging.WARNING, "zinf"):
        for n in range(20_000):
            recorder.span("step", 0, "", recorder.began + n, recorder.began + n + 0.5, 10)
            assert len(recorder._rows) <= recording.FLUSH
        recorder.close()
    assert (tmp_path / "t.json").stat().st_size <= 1 << 20 and len(read(tmp_path / "t.json").events) > 1000
    assert len(caplog.records) == 1


def test_a_trace_that_cannot_be_written_costs_a_line_and_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "zinf"):
        got = engine_run(tmp_path, 2, trace=str(tmp_path / "file" / "t.json"), **NVME_ONLY)
    check(got, oracle_run(2))
    assert [r.getMessage() for r in caplog.records if "trace" in r.getMessage()] == [f"no trace is recorded: {tmp_path}/file/t.json: File exists"]


@pytest.mark.parametrize("backend", ["uring", "threads", "python"])
def test_a_ticket_knows_its_times(tmp_path, backend):
    import time

    io = open_engine(backend)
    try:
        arena = Arena(1 << 20, io)
        buffer = arena.carve(1 << 20, "test")
        file = io.open(str(tmp_path / "f"), write=True, create=True)
        before = time.perf_counter()
        tickets = io.submit([("w", file, i << 18, buffer.data_ptr() + (i << 18), 1 << 18) for i in range(4)], buffer)
        for ticket in (*tickets, io.datasync(file)):
            ticket.wait()
            started, ended = ticket.times
            assert before <= started <= ended <= time.perf_counter()
        arena.close()
    finally:
        io.close()


# ------------------------------------------------------------------------------------------------- what is read out of it


def event(lane: str, start: float, end: float, shard: int = -1, verb: str = "", name: str = "") -> Event:
    return Event(lane, name or f"{lane} {shard}", verb, start, end, shard, 0)


def test_covered_is_the_union():
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)], 0, 10) == 4
    assert covered([(0, 2), (1, 3)], 1.5, 2.5) == 1
    assert covered([], 0, 1) == 0


def test_reads_and_writes_share_the_drive():
    events = [event(READ, 0, 4), event(READ, 1, 2), event(WRITE, 3, 6), event(COMPUTE, 5, 9)]
    assert busy(events, 0, 10) == {READ: 4, WRITE: 3, NVME: 6, COMPUTE: 4}


def test_a_step_that_computes_is_limited_by_compute():
    events = [event(COMPUTE, 0, 6, 0), event(COMPUTE, 6, 10, 1), event(READ, 0, 3, 1), event(WRITE, 8, 10, 0)]
    assert [p.resource for p in critical_path(events, 0, 10)] == [COMPUTE, COMPUTE]


def test_a_wait_is_followed_to_the_reads_behind_it():
    # Shard 1's chunks are read one after the other, stepped, uploaded; compute stands still until then.
    events = [
        event(COMPUTE, 0, 2, 0, name="forward a"),
        event(READ, 0, 3, 1, name="read 1"),
        event(READ, 3, 6, 1, name="read 2"),
        event(CPU, 6, 7, 1, name="step 2"),
        event(UP, 7, 8, 1, name="upload 2"),
        event(READ, 6, 9, 2),  # of another shard, later
        event(WAITING, 2, 8, 1, "fetch"),
        event(COMPUTE, 8, 10, 1, name="forward b"),
    ]
    assert critical_path(events, 0, 10) == [
        Part(NVME, "read 1", 0, 3),
        Part(NVME, "read 2", 3, 6),
        Part(CPU, "step 2", 6, 7),
        Part(UP, "upload 2", 7, 8),
        Part(COMPUTE, "forward b", 8, 10),
    ]


def test_a_read_that_nothing_held_up_was_begun_by_compute():
    events = [
        event(COMPUTE, 0, 4, 0, name="forward a"),
        event(READ, 4, 7, 1, name="read"),
        event(WAITING, 4.5, 7.5, 1, "fetch"),
        event(COMPUTE, 7.5, 10, 1, name="forward b"),
    ]
    assert critical_path(events, 0, 10) == [
        Part(COMPUTE, "forward a", 0, 4),
        Part(NVME, "read", 4, 7),
        Part(HANDOVER, "", 7, 7.5),
        Part(COMPUTE, "forward b", 7.5, 10),
    ]


def test_a_chain_that_began_under_compute_is_followed_to_its_beginning():
    events = [
        event(COMPUTE, 0, 5, 0, name="forward a"),
        event(READ, 1, 3, 2, name="read of c"),  # the drive was at another shard, so it is that one which made the next read late
        event(READ, 3, 6, 1, name="read of b"),
        event(WAITING, 5, 6, 1, "fetch"),
        event(COMPUTE, 6, 8, 1, name="forward b"),
    ]
    assert critical_path(events, 0, 8) == [
        Part(COMPUTE, "forward a", 0, 1),
        Part(NVME, "read of c", 1, 3),
        Part(NVME, "read of b", 3, 6),
        Part(COMPUTE, "forward b", 6, 8),
    ]


def test_what_has_no_cause_in_the_trace_stays_waiting():
    events = [event(COMPUTE, 0, 4), event(WAITING, 4, 9, 3, "fetch", "wait"), event(COMPUTE, 9, 10)]
    assert [(p.resource, p.end - p.start) for p in critical_path(events, 0, 12)] == [(COMPUTE, 4), (WAITING, 5), (COMPUTE, 1), (HANDOVER, 2)]
    assert critical_path([], 0, 1) == [Part(HANDOVER, "", 0, 1)]


def test_the_sentence_names_the_limiter():
    events = [event(READ, 0, 8, 1, "fetch"), event(WAITING, 0, 8, 1, "fetch"), event(COMPUTE, 8, 10, 1)]
    said = summary(Timeline(events), Step(1, 0, 10)).sentence()
    assert said == (
        "The drive limits this step: it is 80 % of the critical path, and was busy for 80 % of the time; compute for 20 %. "
        "Compute stood still for 80 %, for fetch."
    )
    alone = summary(Timeline([event(COMPUTE, 0, 10)]), Step(1, 0, 10)).sentence()
    assert alone == "Compute limits this step: it is 100 % of the critical path, and was busy for 100 % of the time. Compute stood still for 0 %."


def test_two_drives_have_a_lane_each(tmp_path):
    got = engine_run(tmp_path, 2, paths=2, trace=str(tmp_path / "t.json"), **NVME_ONLY)
    check(got, oracle_run(2))
    lanes = {e["args"]["name"] for e in rows(tmp_path / "t.json") if e["name"] == "thread_name"}
    assert {f"NVMe read, drive {i}" for i in (1, 2)} | {f"NVMe write, drive {i}" for i in (1, 2)} <= lanes
    assert not lanes & {READ, WRITE}


def test_an_evaluation_is_no_part_of_a_step(tmp_path):
    with Engine(llama(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, trace=str(tmp_path / "t.json"), **NVME_ONLY, **HYPER) as engine:
        train(engine, 1)
        with torch.no_grad():
            engine(input_ids=batches(1)[0])
        train(engine, 2, first=1)
    timeline = read(tmp_path / "t.json")
    evaluated = [e for e in timeline.events if e.verb == "evaluate"]
    assert evaluated and all(e.end <= timeline.steps[1].start for e in evaluated)
